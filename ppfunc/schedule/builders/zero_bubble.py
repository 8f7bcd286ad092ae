"""The zero-bubble heuristic: for any costs and any cap of memory, the best of some greedy runs."""

from __future__ import annotations

from itertools import count, product

from ..costs import Costs
from ..instruction import Instruction, Op
from ..schedule import Schedule, single_chain
from ._parts import require_counts
from ._play import Rules, Times, play


def zero_bubble(ranks: int, microbatches: int, cap: int | None = None, costs: Costs | None = None) -> Schedule:
    """Forwards and input gradients as they arrive, weight gradients in the gaps and where memory forces them.

    Of several warm-ups and rules the one with the shortest span is kept. At equal costs of all
    stages and with ``cap >= p`` the span is at most a few percent above the lower bounds of
    the problem, and equal to them where F = I = W: ``(p - 1)(F + I - W)`` of bubble with the cap
    p of 1F1B, none with ``2p - 1``. At most ``cap`` activations wait for their W.

    >>> for program in zero_bubble(ranks=2, microbatches=3, cap=3).programs:
    ...     print(" ".join(str(i) for step in program for i in step))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.
        cap: forwards that a rank may have without their W; by default p, as in 1F1B.
        costs: times of F, I, W and of messages per stage; by default all 1, and 0 for messages.

    Raises:
        ValueError: an argument is below 1, or costs for another number of stages.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 3.1.
    """
    cap = ranks if cap is None else cap
    require_counts(ranks=ranks, microbatches=microbatches, cap=cap)
    costs = (costs or Costs()).fitting(ranks)
    single = ("forward", "backward_input", "backward_weight")
    times = Times(*([costs.of(n, s) for s in range(ranks)] for n in single), [costs.message_of(s) for s in range(ranks)])
    runs = [Rules(w, *rules) for w in _warm_ups(times, cap) for rules in product((False, True), repeat=3)]
    outcomes = filter(None, (play(times, microbatches, cap, rules) for rules in runs))
    best = min(outcomes, key=lambda outcome: outcome[:2])
    programs = (_numbered(r, letters) for r, letters in enumerate(best.letters))
    return single_chain("zero_bubble", range(ranks), microbatches, programs)


def _warm_ups(times: Times, cap: int) -> list[list[int]]:
    """Forwards of each rank before its first input gradient: what fits in time, as in 1F1B, what memory allows."""
    ranks = range(len(times.forward))
    way = [sum(times.forward[r + 1 :]) + sum(times.backward[r + 1 :]) + sum(times.message[r:-1]) + sum(times.message[r + 1 :]) for r in ranks]
    fitting = [int(way[r] // times.forward[r]) if times.forward[r] else cap for r in ranks]
    shapes = ([min(cap - r, fitting[r] + 1) for r in ranks], [min(cap, len(ranks) - r) for r in ranks], [cap for _ in ranks])
    return [[max(1, n) for n in shape] for shape in shapes]


def _numbered(stage: int, letters: list[str]) -> list[Instruction]:
    """The instructions of the letters, the microbatches of each in order."""
    numbers = {letter: count() for letter in "FIW"}
    return [Instruction(Op(letter), stage, next(numbers[letter])) for letter in letters]

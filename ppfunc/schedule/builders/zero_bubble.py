"""The zero-bubble heuristic: for any costs and any cap of memory, the best of some greedy runs."""

from __future__ import annotations

from itertools import count, product

from ..costs import Costs
from ..instruction import Instruction, Op
from ..schedule import Schedule, single_chain
from ._parts import require_counts
from ._play import Rules, StageTimes, play, warm_ups


def zero_bubble(ranks: int, microbatches: int, cap: int | None = None, costs: Costs | None = None) -> Schedule:
    """Forwards and input gradients as they arrive, weight gradients in the gaps and where memory forces them.

    Of several warm-ups and rules the one with the shortest span is kept. At equal costs of all
    stages and with ``cap >= p`` the span is at most a few percent above the lower bounds of
    the problem, and equal to them where F = I = W: ``(p - 1)(F + I - W)`` of bubble with the cap
    p of 1F1B, none with ``2p - 1``. At most ``cap`` activations wait for their W.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zero_bubble(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

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
    forward, backward, weight = ([costs.of(n, s) for s in range(ranks)] for n in ("forward", "backward_input", "backward_weight"))
    times = StageTimes(forward, backward, weight, [costs.message_of(s) for s in range(ranks)])
    runs = [Rules(w, *rules) for w in warm_ups(times, cap) for rules in product((False, True), repeat=3)]
    outcomes = filter(None, (play(times, microbatches, cap, rules) for rules in runs))
    best = min(outcomes, key=lambda outcome: outcome[:2])
    programs = (_numbered(r, letters) for r, letters in enumerate(best.letters))
    return single_chain("zero_bubble", range(ranks), microbatches, programs)


def _numbered(stage: int, letters: list[str]) -> list[Instruction]:
    """The instructions of the letters, the microbatches of each in order."""
    numbers = {letter: count() for letter in "FIW"}
    return [Instruction(Op(letter), stage, next(numbers[letter])) for letter in letters]

"""The zero-bubble heuristic: for any costs and any cap of memory, the best of some greedy runs."""

from itertools import count, product

from ppfunc.parallel.placement import loop

from ..costs import Costs, Number, require_costs
from ..instruction import Instruction, Op
from ..planner.problem import problem_of
from ..schedule import Schedule, single_chain
from ._parts import require_counts
from ._play import Rules, StageTimes, play, warm_ups


def zero_bubble(
    ranks: int, microbatches: int, cap: Number | None = None, costs: Costs | None = None
) -> Schedule:
    """Run forwards and input gradients as they arrive, weight gradients in gaps or when memory is full.

    Of several warm-ups and rules the one with the shortest span is kept. At equal costs of all
    stages and with ``cap >= p`` the span is at most a few percent above the lower bounds of
    the problem, and equal to them where F = I = W: ``(p - 1)(F + I - W)`` of bubble with the cap
    p of 1F1B, none with ``2p - 1``. Activations, as far as they wait for their W, take at most ``cap``.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zero_bubble(ranks=3, microbatches=4)), end="")
    rank 0  0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2   .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Args:
        ranks: number of ranks p, one stage each.
        microbatches: number of microbatches m.
        cap: memory of a rank, in the unit of the costs; by default that of p activations, as in 1F1B.
        costs: times of F, I, W and of messages per stage, activations and the share of them held on to W; by
            default all 1, and 0 for messages.

    Raises:
        ValueError: an argument is below 1, a cap below one activation, or costs for another number of stages.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 3.1.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    costs = require_costs(Costs(weight_share=1) if costs is None else costs).fitting(ranks)
    if cap is None:
        cap = [ranks * costs.of("activation", s) + costs.of("parameters", s) for s in range(ranks)]
    p = problem_of(costs, loop(ranks), microbatches, cap)
    times = StageTimes(p.forward, p.backward, p.weight, [*p.down[:-1], p.up[-1]], p.held, p.kept, p.cap)
    runs = [
        Rules(w, *rules) for w in warm_ups(times, microbatches) for rules in product((False, True), repeat=3)
    ]
    outcomes = filter(None, (play(times, microbatches, rules) for rules in runs))
    best = min(outcomes, key=lambda outcome: outcome[:2])
    programs = (_numbered(r, letters) for r, letters in enumerate(best.letters))
    return single_chain("zero_bubble", range(ranks), microbatches, programs)


def _numbered(stage: int, letters: list[str]) -> list[Instruction]:
    """Make the instructions of the letters, the microbatches of each in order."""
    numbers = {letter: count() for letter in "FIW"}
    return [Instruction(Op(letter), stage, next(numbers[letter])) for letter in letters]

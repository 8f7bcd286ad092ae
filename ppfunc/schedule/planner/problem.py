"""State a planning problem as plain numbers per stage: times and latencies in ticks, memory in whole
units.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from numbers import Rational, Real
from typing import Any, Literal, NamedTuple, get_args

from ppfunc._checks import require_counts
from ppfunc.parallel.placement import explicit, stages_of

from ..costs import Costs, Number, exact_portion, require_costs

Objective = Literal["makespan", "span"]
Cap = Number | Sequence[Number] | None

# Of a cap that is a float: a sum of activations and shares may be rounded to a float below it.
_ROUNDING = 2.0**-50


class Problem(NamedTuple):
    """One chain of stages on ranks, with all its numbers.

    Times are whole numbers of ticks where those of the costs are exact, else floats; memory is counted in
    whole units. So sums are exact, and quick.

    Args:
        place: rank of every stage.
        microbatches: number of microbatches m.
        forward: time of F, per stage.
        backward: time of I, per stage.
        weight: time of W, per stage.
        down: latency from the end of F of a stage to the F of the next one.
        up: latency from the end of I of a stage to the I of the one before.
        held: memory from the start of F to the end of I.
        kept: the part of it that is held on until the end of W.
        cap: memory of each rank for activations.
        again: time of F that runs again, per stage; None where it may not.
        out, back: time of a copy of what is held to the host, and back; None where it may not move.
        stub: memory held between F and the start of the one that runs again.
        ticks: number of ticks in one unit of time.
        objective: what is to be short, ``"makespan"`` or ``"span"``.
    """

    place: tuple[int, ...]
    microbatches: int
    forward: tuple[Number, ...]
    backward: tuple[Number, ...]
    weight: tuple[Number, ...]
    down: tuple[Number, ...]
    up: tuple[Number, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    cap: tuple[int, ...]
    again: tuple[Number | None, ...]
    out: tuple[Number | None, ...]
    back: tuple[Number | None, ...]
    stub: tuple[int, ...]
    ticks: int
    objective: Objective

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @property
    def stages_by_rank(self) -> list[list[int]]:
        """List the stages of each rank, ascending."""
        return [list(stages_of(self.place, rank)) for rank in range(self.ranks)]

    @property
    def work(self) -> list[Number]:
        """Return the time that each rank computes."""
        one = [f + i + w for f, i, w in zip(self.forward, self.backward, self.weight, strict=True)]
        return [self.microbatches * sum(one[s] for s in stages) for stages in self.stages_by_rank]

    @property
    def flexible(self) -> bool:
        """Tell whether residuals of any stage may move or be computed again."""
        return any(time is not None for time in (*self.again, *self.out))

    def roomy(self) -> "Problem":
        """Return the problem in which all activations fit, and stay."""
        whole = [self.microbatches * sum(self.held[s] for s in stages) for stages in self.stages_by_rank]
        none = (None,) * len(self.place)
        return self._replace(cap=tuple(whole), again=none, out=none)

    def time_of(self, ticks: Number) -> Number:
        """Convert a time to the unit of the costs, whole if it can be."""
        return ticks if self.ticks == 1 else exact_portion(ticks, 1, self.ticks)


def problem_of(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    cap: Cap = None,
    objective: Objective = "makespan",
) -> Problem:
    """Collect the numbers of a problem.

    Args:
        costs: times, latencies, activations, shares and parameters per stage.
        placement: rank of every stage; the stages form one chain.
        microbatches: number of microbatches.
        cap: memory of a rank for activations and parameters, one number or one per rank; None for no limit.
        objective: ``"makespan"`` or ``"span"``.

    Raises:
        ValueError: an argument that is out of range, costs for another number of stages, or a cap
            in which one microbatch does not fit.
    """
    place = explicit(placement)
    require_counts(microbatches=microbatches)
    if objective not in get_args(Objective):
        raise ValueError(f"objective is {objective!r}, expected 'makespan' or 'span'")
    costs = require_costs(costs).fitting(len(place))
    (forward, backward, weight, down, up, again, out, back), ticks = _times(costs, place)
    held, kept, stub, caps = _memory(costs, place, microbatches, cap)
    times = forward, backward, weight, down, up
    problem = Problem(place, microbatches, *times, held, kept, caps, again, out, back, stub, ticks, objective)
    for rank, mine in enumerate(problem.stages_by_rank):
        need = sum(held[s] for s in mine)
        if need > caps[rank]:
            least = float(sum(costs.of("activation", s) + costs.of("parameters", s) for s in mine))
            limit = cap[rank] if isinstance(cap, Sequence) else cap
            raise ValueError(
                f"cap is {limit}, but one microbatch and the parameters of rank {rank} take"
                f" {least:g}: raise it to that"
            )
    return problem


def _exact(value: Number) -> Number:
    from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

    return Fraction(value if isinstance(value, Rational) else float(value))


def _times(costs: Costs, place: tuple[int, ...]) -> tuple[list[tuple[Any, ...]], int]:
    """Return per stage F, I, W, latencies down and up, F again, and copies out and back, in ticks; and the
    ticks in a unit of time. None stays None.
    """
    rows = [
        [costs.of(name, s) for s in range(len(place))]
        for name in ("forward", "backward_input", "backward_weight")
    ]
    crosses = [a != b for a, b in pairwise(place)]
    rows.append([*(costs.message_of(s) if cross else 0 for s, cross in enumerate(crosses)), 0])
    rows.append([0, *(costs.message_of(s) if cross else 0 for s, cross in enumerate(crosses, start=1))])
    rows += [[costs.of(name, s) for s in range(len(place))] for name in ("recompute", "offload", "fetch")]
    rows[-1] = [out if back is None else back for out, back in zip(*rows[-2:], strict=True)]
    times: list[Number] = [time for row in rows for time in row if time is not None]
    if not all(isinstance(time, Rational) for time in times):
        return [tuple(None if time is None else float(time) for time in row) for row in rows], 1
    ticks = lcm(*(int(time.denominator) for time in times))
    return [tuple(None if time is None else int(time * ticks) for time in row) for row in rows], ticks


def _memory(costs: Costs, place: tuple[int, ...], microbatches: int, cap: Cap) -> list[tuple[int, ...]]:
    """Convert activations, shares kept for W, checkpoints, and the caps of the ranks to one whole unit."""
    stages, ranks = range(len(place)), max(place) + 1
    held = [_exact(costs.of("activation", s)) for s in stages]
    kept = [size * _exact(costs.of("weight_share", s)) for s, size in enumerate(held)]
    stub = [min(size, _exact(costs.of("checkpoint", s))) for s, size in enumerate(held)]
    unit = lcm(*(size.denominator for size in (*held, *kept, *stub)))
    if cap is None:
        free = [
            microbatches * sum(size for s, size in enumerate(held) if place[s] == rank)
            for rank in range(ranks)
        ]
    else:
        free = [
            _exact(limit) * (1 if isinstance(limit, Rational) else 1 + _exact(_ROUNDING))
            for limit in _limits(cap, ranks)
        ]
        for stage in stages:
            free[place[stage]] -= _exact(costs.of("parameters", stage))
    return [tuple(int(size * unit // 1) for size in sizes) for sizes in (held, kept, stub, free)]


def _limits(cap: Cap, ranks: int) -> Sequence[Number]:
    limits = cap if isinstance(cap, Sequence) and not isinstance(cap, str | bytes) else [cap] * ranks
    if len(limits) != ranks:
        raise ValueError(f"cap has {len(limits)} numbers, expected {ranks}, one per rank")
    for limit in limits:
        if not isinstance(limit, Real) or isinstance(limit, bool) or limit <= 0 or not limit < float("inf"):
            raise ValueError(f"cap is {limit!r}, expected a finite number above 0; leave it out for no limit")
    return limits

"""Plan a schedule for given costs and memory, with a certificate of how far it is from the best.

The way of a plan, and where each part lives:

* here: which stage is where, and what it costs;
* ``problem``: the numbers of one placement, and what no schedule can beat;
* ``replay``: a schedule as one word per rank, the rules of both directions of time, the run of an order, and
  replays backwards and forwards in time, in which operations overtake where data and memory let them;
* ``search``: orders to start from, of the builders, of a microbatch that repeats, and of residuals that stay,
  move to the host or are computed again; replays of these, and random delays, until the bound is met or the
  effort is used up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple

from ppfunc import _logs
from ppfunc._checks import naming_arguments, percent, require_counts, require_positive
from ppfunc.parallel.topology import Placement, explicit, loop, v_shape

from ..collector import collector_paused
from ..costs import OF_THE_MODEL, Costs, Number, exact_portion, require_costs
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .problem import Bound, Cap, Objective, Problem, bound_of, problem_of
from .replay import schedule_of
from .search import Given, Search, builder_orders, given_orders, residual_orders, spaced_orders

_log = _logs.room("planning")

Progress = Callable[[float, Number, Number], bool | None]
"""``progress(share of the effort, best value, its bound)``; the search stops where it returns True."""
Style = Literal["loop", "v", "any"]

_REPLAYS, _LEAST, _MOST = 200, 1_000_000, 10_000_000  # replays of all operations; operations
_SEVERAL = 1.2  # times the effort, where several placements share it
_WIDER = (1, 1), (1.5, 0.3), (2, 0.3)  # times the cap of plans whose residuals then go, share of the effort


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule, how long it takes on paper, and how much shorter another one could be at most.

    Args:
        schedule: compute, with I and W apart, and copies of residuals.
        value: makespan or span of the schedule, as ``objective`` says.
        bound: the least value of any schedule of the placement under the cap, with its reason.
        gap: ``value / bound - 1``; 0 where the schedule is proved optimal.
        memory: peak of activations plus parameters of each rank, in the unit of the costs.
        timeline: the run on paper.
        objective: ``"makespan"`` or ``"span"``.
        placement: name of the placement.
        found: the builder or the search that found it.
        costs: the costs of its stages.
    """

    schedule: Schedule
    value: Number
    bound: Bound
    gap: float
    memory: tuple[Number, ...]
    timeline: Timeline
    objective: Objective
    placement: str
    found: str
    costs: Costs

    def __repr__(self) -> str:
        return f"Plan({self.placement}, {self})"

    def __str__(self) -> str:
        proof = "optimal" if self.optimal else f"gap {self.gap:.2%}"
        bubble = self.timeline.span_bubble if self.objective == "span" else self.timeline.bubble
        value, bound = map(self.timeline.time, (self.value, self.bound.value))
        return (
            f"{self.objective} {value}, bound {bound} ({self.bound.name}, rank {self.bound.rank}), {proof}, "
            f"bubble {percent(bubble)}, memory {float(max(self.memory)):g}"
        )

    @property
    def optimal(self) -> bool:
        """Tell whether the schedule is proved to be the shortest of its placement."""
        return self.gap <= 1e-9


@naming_arguments
def plan(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    cap: Cap = None,
    placement: Style | Sequence[int] = "any",
    chunks: int | Sequence[int] | None = None,
    objective: Objective = "makespan",
    slices: int = 0,
    effort: float = 1,
    progress: Progress | None = None,
) -> Plan:
    """Search for the shortest schedule that fits in memory.

    Plans are chains: :func:`arrange`, :func:`with_parts` and :func:`spread` put a graph in order. The same
    arguments give the same schedule in every process. It is never longer than that of any builder that has
    the placement and fits in the cap. Where the costs have ``recompute`` or ``offload``, residuals of each
    stage and microbatch stay, are computed again or move to the host; of the same stages, it is never longer
    than a plan after which all stay, or :func:`~ppfunc.schedule.insert_recomputes` or
    :func:`~ppfunc.schedule.insert_offloads` treats all alike. It takes some three times as long.

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m, with ``slices`` of all slices of all sequences.
        costs: times, messages and memory of each stage. Numbers that are the same for all stages allow
            several numbers of chunks: they are for the first of these, and smaller in proportion if a rank
            has more stages, where ``ppfunc plan`` takes them per rank. Messages keep their size.
        cap: memory of a rank for activations and parameters, in the unit of the costs, one number or one per
            rank; None for no limit.
        placement: ``"loop"``, ``"v"``, ``"any"`` of both, or the rank of every stage.
        chunks: stages per rank, one number or several to choose from; by default as many as the costs have
            stages, else 1 for a loop, 2 for a V, 1 to 4 for any.
        objective: ``"makespan"``, from 0 to the last end, or ``"span"``, the largest over the ranks of last
            end minus first start.
        slices: number of slices of a sequence, whose backwards begin with the last; see :class:`Schedule`.
            Their residuals stay: costs with ``recompute`` or ``offload`` under a cap are refused.
        effort: length of the search; 1 takes some two seconds for 8 ranks and 24 microbatches, 2 twice that.
        progress: called as ``progress(share of the effort, best value, bound)``; the search stops where it
            returns True.

    Raises:
        ValueError: an argument that is out of range; costs that do not fit the stages; a cap in which one
            microbatch does not fit; costs of overlapped pairs, or of a whole backward that is not I and W
            together, of which plans make no use.

    References:
        Li and Willis 1992 for the search; Qi et al., Zero Bubble and Controllable Memory, for schedules in
        which W is apart.

    >>> plan(ranks=4, microbatches=8, costs=Costs(weight_share=1), cap=4, placement="loop", objective="span")
    Plan(loop of 1, span 27, bound 27 (work, rank 0), optimal, bubble 11.1%, memory 4)
    """
    costs = require_costs(costs)
    require_positive(effort=effort)
    if costs.overlapped is not None:
        raise ValueError("overlapped is given, but a plan overlaps nothing: leave it out")
    if costs.backward is not None:
        raise ValueError(
            "backward is given, but a plan has I and W apart: give backward_input and backward_weight only"
        )
    if cap is None:
        costs = replace(costs, recompute=None, offload=None, fetch=None)  # all can stay
    shapes = _shapes(ranks, costs, placement, chunks)
    problems = _Problem.fitting(shapes, costs, microbatches, cap, objective, slices)
    with _logs.timed(_log.info, "searched for a plan of %d ranks and %d microbatches", ranks, microbatches):
        best = _search(problems, cap, effort, progress)
    _log.info("took %r", best)
    return best


def _shapes(
    ranks: int, costs: Costs, placement: Style | Sequence[int], chunks: int | Sequence[int] | None
) -> dict[str, Placement]:
    """Return the placements that are asked for, by name."""
    require_counts(ranks=ranks)
    if isinstance(placement, Sequence) and not isinstance(placement, str):
        place = explicit(placement)
        if max(place) + 1 != ranks:
            raise ValueError(f"placement has {max(place) + 1} ranks, expected {ranks}")
        if chunks is not None:
            raise ValueError(
                f"chunks is {chunks!r}, but the placement is given rank by rank: leave chunks out"
            )
        return {"explicit": place}
    shapes: dict[str, Placement] = {}
    for v in chunk_counts(ranks, costs, placement, chunks):
        if v == 1 or placement in ("loop", "any"):
            shapes[f"loop of {v}"] = loop(ranks, v)
        if v > 1 and placement != "loop":
            shapes["V" if v == 2 else f"wave of {v}"] = v_shape(ranks, v)
    return shapes


def chunk_counts(
    ranks: int, costs: Costs, placement: str, chunks: int | Sequence[int] | None
) -> Sequence[int]:
    """List the numbers of stages per rank to try."""
    styles = {"loop": [1], "v": [2], "any": [1, 2, 3, 4]}
    if not isinstance(placement, str) or placement not in styles:
        raise ValueError(
            f"placement is {placement!r}, expected 'loop', 'v', 'any' or the rank of every stage"
        )
    values = costs.per_stage.values()
    sizes = {len(value) for value in values if isinstance(value, Sequence)}
    if chunks is not None:
        counts = list(chunks) if isinstance(chunks, Sequence) and not isinstance(chunks, str) else [chunks]
    elif sizes:
        stages = max(sizes)
        if not stages or stages % ranks:
            raise ValueError(f"costs are given for {stages} stages, expected a multiple of {ranks} ranks")
        counts = [stages // ranks]
    else:
        counts = styles[placement]
    if not counts:
        raise ValueError("chunks names no number, expected one or several, such as range(1, 5)")
    for v in counts:
        require_counts(chunks=v)
    if len(counts) > 1 and values:
        raise ValueError("costs are given per stage, but chunks allows several numbers of stages: name one")
    return counts


def shared_costs(costs: Costs, stages: int, wanted: int) -> Costs:
    """Convert the costs of a stage of a model in ``stages`` equal stages to a model in ``wanted`` stages."""
    shares = dict.fromkeys(OF_THE_MODEL if stages != wanted else (), (stages, wanted))
    return costs.divided(shares, exact_portion)


class _Problem(NamedTuple):
    """A placement with the costs of its stages, its numbers and its lower bound."""

    name: str
    costs: Costs
    numbers: Problem
    bound: Bound

    @classmethod
    def fitting(
        cls,
        shapes: Mapping[str, Placement],
        costs: Costs,
        microbatches: int,
        cap: Cap,
        objective: Objective,
        slices: int,
    ) -> list["_Problem"]:
        """List the placements in which one microbatch fits in the cap, least bound first.

        Raises:
            ValueError: it fits in none.
        """
        least = min(map(len, shapes.values()))
        fitting: list[_Problem] = []
        refused: ValueError | None = None
        for name, place in shapes.items():
            stages = shared_costs(costs, least, len(place))
            try:
                p = problem_of(stages, place, microbatches, cap, objective, slices)
            except ValueError as error:
                refused = error
            else:
                fitting.append(cls(name, stages, p, bound_of(p)))
        if refused and not fitting:
            raise refused
        return sorted(fitting, key=lambda problem: problem.bound.value)

    @property
    def operations(self) -> int:
        """Count the operations that an effort of 1 replays."""
        p = self.numbers
        return min(max(_LEAST, _REPLAYS * 3 * len(p.place) * p.microbatches), _MOST)

    def given(self, cap: Cap, effort: float) -> list[Given]:
        """List the orders to start from, the most promising first."""
        p, found = self.numbers, list[Given]()
        for policy, limit, share in _policies(p, cap) if p.flexible else ():
            bound, operations = bound_of(policy).value * p.ticks, share * effort * self.operations
            search = Search(policy, bound, operations, _starts(policy, self.costs, limit), lambda: False)
            search.advance(operations)
            base = search.best
            orders = residual_orders(p, schedule_of(policy, base.order))
            found += given_orders(p, ((f"{base.name}{way}", order) for way, order in orders))
        return _in_turns(found) + _starts(p, self.costs, cap)

    def plan(self, best: Given) -> Plan:
        """Write the best order as a plan."""
        p, schedule = self.numbers, schedule_of(self.numbers, best.order)
        timeline = simulate(schedule, self.costs)
        value = timeline.makespan if p.objective == "makespan" else timeline.span
        taken = [sum(self.costs.of("parameters", s) for s in stages) for stages in p.stages_by_rank]
        memory = tuple(a + b for a, b in zip(timeline.peak_activations, taken, strict=True))
        gap = max(0.0, float(value / self.bound.value) - 1) if self.bound.value else 0.0
        rest = (timeline, p.objective, self.name, best.name, self.costs)
        return Plan(schedule, value, self.bound, gap, memory, *rest)


@collector_paused()
def _search(problems: Sequence[_Problem], cap: Cap, effort: float, progress: Progress | None) -> Plan:
    """Search all problems for half of the effort, and the best for the rest."""
    effort *= _SEVERAL if len(problems) > 1 else 1
    searches: list[tuple[_Problem, Search]] = []
    stopped = False

    def value(entry: tuple[_Problem, Search]) -> Number:
        problem, search = entry
        return problem.numbers.time_of(search.best.value)

    def stop() -> bool:
        nonlocal stopped
        if progress and not stopped:
            entry = min(searches, key=value)
            share = sum(search.spent / search.operations for _, search in searches)
            stopped = bool(progress(min(1.0, share), value(entry), entry[0].bound.value))
        return stopped

    for problem in problems:
        bound, operations = problem.bound.value * problem.numbers.ticks, effort * problem.operations
        given = problem.given(cap, effort / len(problems))
        searches.append((problem, Search(problem.numbers, bound, operations, given, stop)))
    least: Number = inf
    for problem, search in searches:
        if problem.bound.value < least:
            search.advance(search.operations / 2 / len(searches))
        least = min(least, value((problem, search)))
    problem, search = min(searches, key=value)
    search.advance(search.operations / 2)
    return problem.plan(search.best)


def _starts(p: Problem, costs: Costs, cap: Cap) -> list[Given]:
    """List the orders of builders, then the orders of a microbatch that repeats, the shortest first."""
    kinds = builder_orders(p, costs, cap), spaced_orders(p)
    return [each for named in kinds for each in sorted(given_orders(p, named), key=attrgetter("value"))]


def _policies(p: Problem, cap: Cap) -> Iterator[tuple[Problem, Cap, float]]:
    """Yield problems without choices, each with its cap and its share of the effort.

    All residuals stay, under the cap, under larger ones and without; or all are computed again, in a whole
    backward, with the memory that is left beside one microbatch.
    """
    none = (None,) * len(p.place)
    still = p._replace(again=none, out=none)
    for times, share in _WIDER:
        wider = [times * limit for limit in cap] if isinstance(cap, Sequence) else times * (cap or 0)
        yield still._replace(cap=tuple(int(times * room) for room in p.cap)), wider, share
    yield p.roomy(), None, 1
    room = tuple(limit - max(p.held) for limit in p.cap)
    fits = all(sum(p.stub[s] for s in p.stages_by_rank[r]) <= left for r, left in enumerate(room))
    if None not in p.again and fits:
        whole = tuple(map(sum, zip(p.again, p.backward, p.weight, strict=True)))
        still = still._replace(backward=whole, weight=(0,) * len(p.place))
        yield still._replace(held=p.stub, kept=(0,) * len(p.place), cap=room), cap, 1


def _in_turns(given: list[Given]) -> list[Given]:
    """Sort orders by value, and take them from each way of residuals in turn."""
    ways: dict[str, list[Given]] = {}
    for entry in sorted(given, key=attrgetter("value")):
        ways.setdefault(entry.name.rpartition(", ")[2], []).append(entry)
    return [entry for turn in zip_longest(*ways.values()) for entry in turn if entry]

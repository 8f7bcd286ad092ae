"""Plan a schedule for given costs and memory, with a certificate of how far it is from the best.

The way of a plan, and where each part lives:

* ``placements`` and ``layers``: which stage is where, and what it costs;
* ``problem``: the numbers of one placement; :mod:`ppfunc.schedule.bounds`: what no schedule can beat;
* ``orders``: a schedule as one word per rank, the rules of both directions of time, and the run of an order;
* ``starts`` and ``blocks``: orders to start from, of the builders and of a microbatch that repeats without collisions;
* ``replay``: list scheduling in the order of a word, in which operations overtake where data and memory let them;
* ``search``: replays backwards and forwards in time, and random delays, until the bound is met or the effort is used up;
* ``repeat``: the middle of a plan repeated, where there are too many microbatches to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real

from ...parallel.partition import Partition
from ..bounds import Bound, bound_of
from ..collector import collector_paused
from ..costs import Costs, Number
from ..schedule import Schedule
from ..simulate import Timeline, simulate
from .blocks import block_orders
from .orders import Order, directions, evaluate, order_of, schedule_of
from .placements import Candidate, Style, candidates
from .problem import Cap, Objective, Problem, problem_of
from .repeat import extend, fewer_microbatches
from .search import Progress, Search
from .starts import builder_orders, one_by_one

_OPERATIONS, _REPLAYS = 1_000_000, 200
_LARGE = 100_000


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule, how long it takes on paper, and how much shorter another one could be at most.

    Args:
        schedule: compute only, with I and W apart.
        value: its makespan or its span, as ``objective`` says.
        bound: what no schedule of the placement under the cap can beat, and why.
        gap: ``value / bound - 1``; 0 where the schedule is proved optimal.
        memory: per rank, peak of activations plus parameters, in the unit of the costs.
        timeline: the run on paper.
        objective: ``"makespan"`` or ``"span"``.
        placement: name of the placement.
        found: how it was found.
        costs: the costs of its stages.
        partition: the layers of its stages, None where layers were not given.
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
    partition: Partition | None

    def __repr__(self) -> str:
        return f"Plan({self.placement}, {self})"

    def __str__(self) -> str:
        proof = "optimal" if self.optimal else f"gap {self.gap:.2%}"
        bubble = self.timeline.span_bubble if self.objective == "span" else self.timeline.bubble
        return (
            f"{self.objective} {float(self.value):.6g}, bound {float(self.bound.value):.6g} ({self.bound.name}, rank {self.bound.rank}), {proof}, "
            f"bubble {float(bubble):.4f}, memory {float(max(self.memory)):g}"
        )

    @property
    def optimal(self) -> bool:
        """Whether the schedule is proved to be the shortest of its placement."""
        return self.gap <= 1e-9


def plan(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    *,
    cap: Cap = None,
    placement: Style | Sequence[int] = "any",
    chunks: int | Sequence[int] | None = None,
    layers: int | None = None,
    objective: Objective = "makespan",
    effort: float = 1,
    progress: Progress | None = None,
) -> Plan:
    """Search for the shortest schedule that fits in memory.

    The same arguments give the same schedule in every process. It is never longer than that of any builder that has the
    placement and fits in the cap.

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        costs: times, messages and memory of each stage, or of each layer where ``layers`` is given. Numbers that are the
            same for all stages may go with several numbers of chunks: they are for the first of these, and smaller in
            proportion where a rank has more stages; messages stay as they are.
        cap: memory of a rank for activations and parameters, in the unit of the costs, one number or one per rank; None for
            no limit.
        placement: ``"loop"``, ``"v"``, ``"wave"``, ``"any"`` of them, or the rank of every stage.
        chunks: stages per rank, one number or several to choose from; by default as many as the costs have stages, else
            1 for a loop, 2 for a wave, 1 to 4 for any.
        layers: number of layers, which are then also cut into stages.
        objective: ``"makespan"``, from 0 to the last end, or ``"span"``, the largest over the ranks of last end minus first start.
        effort: how long to search; 1 takes some two seconds for 8 ranks and 24 microbatches, 2 twice that.
        progress: called as ``progress(share of the effort, best value, bound)``; the search stops where it returns True.

    Raises:
        ValueError: an argument that is out of range; costs that do not fit the stages; a cap in which one microbatch does not
            fit; costs of overlapped pairs, or of a whole backward that is not I and W together, of which plans make no use.

    References:
        Li and Willis 1992 for the search; Qi et al., Zero Bubble and Controllable Memory, for schedules in which W is apart.

    >>> plan(ranks=4, microbatches=8, cap=4, placement="loop", objective="span")
    Plan(loop of 1, span 24, bound 24 (work, rank 0), optimal, bubble 0.0000, memory 4)
    """
    costs = costs or Costs()
    if isinstance(effort, bool) or not isinstance(effort, Real) or not 0 < effort < inf:
        raise ValueError(f"effort is {effort!r}, expected a finite number above 0")
    _require_parts(costs)
    found = candidates(ranks, microbatches, costs, placement, chunks, layers, cap, objective)
    with collector_paused():
        return _best(_fitting(found, microbatches, cap, objective), cap, effort, progress)


def _require_parts(costs: Costs) -> None:
    """Refuse costs that only whole or overlapped backwards have."""
    if costs.overlapped is not None:
        raise ValueError("overlapped is given, but a plan overlaps nothing: leave it out")
    if costs.backward is not None:
        raise ValueError("backward is given, but a plan has I and W apart: give backward_input and backward_weight only")


def _fitting(found: list[Candidate], microbatches: int, cap: Cap, objective: Objective) -> list[tuple[Candidate, Problem, Bound]]:
    """The candidates of which one microbatch fits in the cap, least bound first."""
    fitting: list[tuple[Candidate, Problem, Bound]] = []
    refused: ValueError | None = None
    for candidate in found:
        try:
            p = problem_of(candidate.costs, candidate.placement, microbatches, cap, objective)
        except ValueError as error:
            refused = error
        else:
            fitting.append((candidate, p, bound_of(p)))
    if refused and not fitting:
        raise refused
    return sorted(fitting, key=lambda entry: entry[2].value)


def _best(entries: list[tuple[Candidate, Problem, Bound]], cap: Cap, effort: float, progress: Progress | None) -> Plan:
    """Search every candidate for a short while, then the best one for the rest."""
    if len(entries) == 1:
        return _plan_one(*entries[0], cap, effort, progress)
    plans: list[tuple[Plan, Candidate, Problem]] = []
    for candidate, p, bound in entries:
        if not plans or bound.value < min(found.value for found, *_ in plans):
            plans.append((_plan_one(candidate, p, bound, cap, effort / (2 * len(entries)), progress), candidate, p))
    best, candidate, p = min(plans, key=lambda entry: entry[0].value)
    if best.optimal:
        return best
    return min(best, _plan_one(candidate, p, best.bound, cap, effort / 2, progress, best), key=lambda found: found.value)


def _plan_one(
    candidate: Candidate, p: Problem, bound: Bound, cap: Cap, effort: float, progress: Progress | None, known: Plan | None = None
) -> Plan:
    """Plan one placement, from a known plan where there is one; very many microbatches by repetition."""
    forwards = directions(p)[0]
    given = [(known.found, order_of(known.schedule))] if known else _given(candidate, p, cap)
    if 3 * len(p.place) * p.microbatches > _LARGE:
        short = p._replace(microbatches=fewer_microbatches(p))
        found, order = _search(short, bound_of(short), _given(candidate, short, cap), effort, progress)
        longer = extend(forwards, order, p.microbatches)
        if longer:
            given.append((f"{found}; {short.microbatches} microbatches, repeated to {p.microbatches}", longer))
            effort = 0
    found, order = _search(p, bound, given, effort, progress)
    return _finished(candidate, p, bound, order, found)


def _given(candidate: Candidate, p: Problem, cap: Cap) -> list[tuple[str, Order]]:
    """The orders of the builders, and one that always fits."""
    return [*builder_orders(p, directions(p)[0], candidate.costs, cap), ("one by one", one_by_one(p))]


def _search(p: Problem, bound: Bound, given: list[tuple[str, Order]], effort: float, progress: Progress | None) -> tuple[str, Order]:
    """Search from the given orders and from blocks; returns how the best order was found, and that order."""
    rules = directions(p)
    valued = [(timing.value, name, order) for name, order in given if (timing := evaluate(rules[0], order))]
    valued.sort(key=lambda entry: entry[0])
    operations = max(_OPERATIONS, _REPLAYS * 3 * len(p.place) * p.microbatches)
    search = Search(p, rules, bound.value, int(effort * operations), progress)
    if valued[0][0] > bound.value and effort:
        search.run([(name, order) for _, name, order in valued], block_orders(p, rules[0]))
    timing = evaluate(rules[0], search.best.order) if search.best.order else None
    if timing and timing.value < valued[0][0]:
        return search.found, search.best.order
    return valued[0][1], valued[0][2]


def _finished(candidate: Candidate, p: Problem, bound: Bound, order: Order, found: str) -> Plan:
    """The plan of an order."""
    schedule = schedule_of(p, order)
    timeline = simulate(schedule, candidate.costs)
    value = timeline.makespan if p.objective == "makespan" else timeline.span
    taken = [sum(candidate.costs.of("parameters", s) for s in stages) for stages in p.stages_by_rank]
    memory = tuple(a + b for a, b in zip(timeline.peak_activations, taken, strict=True))
    gap = float(value / bound.value) - 1 if bound.value else 0.0
    return Plan(
        schedule, value, bound, max(0.0, gap), memory, timeline, p.objective, candidate.name, found, candidate.costs, candidate.partition
    )

"""Plan a schedule for given costs and memory, with a certificate of how far it is from the best.

The way of a plan, and where each part lives:

* ``placements``: which stage is where, which layers it has, and what it costs;
* ``problem``: the numbers of one placement; :mod:`ppfunc.schedule.planner.bounds`: what no schedule can beat;
* ``orders``: a schedule as one word per rank, the rules of both directions of time, and the run of an order;
* ``starts``: orders to start from, of the builders, of a microbatch that repeats, and of residuals that stay,
  move to the host or are computed again;
* ``search``: replays backwards and forwards in time, in which operations overtake where data and memory let
  them, and random delays, until the bound is met or the effort is used up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from numbers import Real
from operator import itemgetter
from typing import Any, NamedTuple, Self

from ppfunc._checks import naming_arguments
from ppfunc.parallel.partition import Partition

from ..collector import collector_paused
from ..costs import Costs, Number, require_costs
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .bounds import Bound, bound_of
from .orders import Order, choices_of, directions, evaluate, fits, schedule_of
from .placements import Candidate, Style, candidates
from .problem import Cap, Objective, Problem, problem_of
from .search import Search
from .starts import all_again, builder_orders, residual_orders, spaced_orders

Progress = Callable[[float, Number, Number], bool | None]
"""``progress(share of the effort, best value, its bound)``; the search stops where it returns True."""

_REPLAYS, _LEAST, _MOST = 200, 1_000_000, 10_000_000  # replays of all operations; operations
_SEVERAL = 1.2  # times the effort, where several placements share it
_WIDER, _LESS = (1.5, 2), 0.3  # times the cap of plans whose residuals then go, and their share of the effort


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule, how long it takes on paper, and how much shorter another one could be at most.

    Args:
        schedule: of compute, with I and W apart, and of copies of residuals.
        value: its makespan or its span, as ``objective`` says.
        bound: the least value of any schedule of the placement under the cap, with its reason.
        gap: ``value / bound - 1``; 0 where the schedule is proved optimal.
        memory: per rank, peak of activations plus parameters, in the unit of the costs.
        timeline: the run on paper.
        objective: ``"makespan"`` or ``"span"``.
        placement: name of the placement.
        found: the builder or the search that found it.
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
            f"{self.objective} {float(self.value):.6g}, "
            f"bound {float(self.bound.value):.6g} ({self.bound.name}, rank {self.bound.rank}), {proof}, "
            f"bubble {float(bubble):.4f}, memory {float(max(self.memory)):g}"
            + ("" if self.partition is None else f", layers {' '.join(map(str, self.partition.sizes))}")
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
    layers: int | None = None,
    objective: Objective = "makespan",
    effort: float = 1,
    progress: Progress | None = None,
) -> Plan:
    """Search for the shortest schedule that fits in memory.

    The same arguments give the same schedule in every process. It is never longer than that of any builder
    that has the placement and fits in the cap. Where the costs have ``recompute`` or ``offload``, residuals
    of each stage and microbatch stay, are computed again or move to the host; of the same stages, it is never
    longer than a plan after which all stay, or :func:`~ppfunc.schedule.insert_recomputes` or
    :func:`~ppfunc.schedule.insert_offloads` treats all alike. It takes some three times as long.

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        costs: times, messages and memory of each stage, or of each layer with ``layers``. Numbers that are
            the same for all stages allow several numbers of chunks: they are for the first of these, and
            smaller in proportion if a rank has more stages, where ``ppfunc plan`` takes them per rank.
            Messages keep their size.
        cap: memory of a rank for activations and parameters, in the unit of the costs, one number or one per
            rank; None for no limit.
        placement: ``"loop"``, ``"v"``, ``"wave"``, ``"any"`` of them, or the rank of every stage.
        chunks: stages per rank, one number or several to choose from; by default as many as the costs have
            stages, else 1 for a loop, 2 for a wave, 1 to 4 for any.
        layers: number of layers; the plan also cuts them into stages.
        objective: ``"makespan"``, from 0 to the last end, or ``"span"``, the largest over the ranks of last
            end minus first start.
        effort: how long to search; 1 takes some two seconds for 8 ranks and 24 microbatches, 2 twice that.
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
    Plan(loop of 1, span 27, bound 27 (work, rank 0), optimal, bubble 0.1111, memory 4)
    """
    costs = require_costs(costs)
    if isinstance(effort, bool) or not isinstance(effort, Real) or not 0 < effort < inf:
        raise ValueError(f"effort is {effort!r}, expected a finite number above 0")
    if costs.overlapped is not None:
        raise ValueError("overlapped is given, but a plan overlaps nothing: leave it out")
    if costs.backward is not None:
        raise ValueError(
            "backward is given, but a plan has I and W apart: give backward_input and backward_weight only"
        )
    still = replace(costs, recompute=None, offload=None, fetch=None)
    costs = still if cap is None else costs  # all can stay
    found = candidates(ranks, microbatches, costs, placement, chunks, layers, cap, objective)
    bases: list[Plan] = []
    if costs != still:
        options = {"placement": placement, "chunks": chunks, "layers": layers, "objective": objective}
        bases = list(_bases(ranks, microbatches, costs, still, cap, effort, options))
    effort *= _SEVERAL if len(found) > 1 else 1
    with collector_paused():
        attempts: list[_Attempt] = []
        stop = _reporter(attempts, effort, progress)
        attempts += [
            _Attempt.of(*entry, cap, effort, stop, bases)
            for entry in _fitting(found, microbatches, cap, objective)
        ]
        best, sure = _best(attempts, effort).plan(), min(attempts, key=lambda attempt: attempt.given_value)
        return best if best.value <= sure.given_value else sure.plan()


def _fitting(
    found: list[Candidate], microbatches: int, cap: Cap, objective: Objective
) -> list[tuple[Candidate, Problem, Bound]]:
    """List the candidates of which one microbatch fits in the cap, least bound first."""
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


class _Attempt(NamedTuple):
    """The search of one candidate.

    Args:
        candidate: the placement with the costs of its stages.
        problem: its numbers.
        bound: the lower bound.
        given: the shortest of the orders to start from, with its value and name.
        search: of the problem.
    """

    candidate: Candidate
    problem: Problem
    bound: Bound
    given: tuple[Number, str, Order]
    search: Search

    @classmethod
    def of(
        cls,
        candidate: Candidate,
        p: Problem,
        bound: Bound,
        cap: Cap,
        effort: float,
        stop: Callable[[], bool],
        bases: Sequence[Plan] = (),
    ) -> Self:
        forwards, _ = directions(p)
        given = _in_turns(list(_based(p, bases, candidate.name)))
        for orders in (builder_orders(p, forwards, candidate.costs, cap), spaced_orders(p, forwards)):
            timed = ((evaluate(forwards, order), name, order) for name, order in orders)
            runs = ((timing.value, name, order) for timing, name, order in timed if timing)
            given += sorted(runs, key=itemgetter(0))
        starts = [(name, order) for _, name, order in given]
        search = Search(p, bound.value * p.ticks, effort * _operations(p), starts, stop)
        return cls(candidate, p, bound, min(given, key=itemgetter(0)), search)

    @property
    def given_value(self) -> Number:
        """Return the value of the shortest given order, in the unit of the costs."""
        return self.problem.time_of(self.given[0])

    @property
    def value(self) -> Number:
        best = self.search.best.value
        return self.given_value if best == inf else min(self.given_value, self.problem.time_of(best))

    def plan(self) -> Plan:
        search, best = self.search, self.search.best.order
        timing = evaluate(directions(self.problem, choices_of(self.problem, best))[0], best) if best else None
        found = [self.given, *([(timing.value, search.found, search.best.order)] if timing else [])]
        _, name, order = min(found, key=itemgetter(0))
        return _finished(self.candidate, self.problem, self.bound, order, name)


def _bases(
    ranks: int,
    microbatches: int,
    costs: Costs,
    still: Costs,
    cap: Cap,
    effort: float,
    options: dict[str, Any],
) -> Iterator[Plan]:
    """Plan without choices: what stays under the cap, under larger ones and without; all computed again."""
    wider = [
        [x * limit for limit in cap] if isinstance(cap, Sequence) else x * cap
        for x in _WIDER
        if cap is not None
    ]
    problems = [(still, cap, 1), *((still, each, _LESS) for each in wider), (still, None, 1)]
    for each, limit, share in (*problems, *all_again(costs, still, cap)):
        with suppress(ValueError):  # this policy does not fit
            yield plan(ranks, microbatches, each, cap=limit, effort=effort * share, **options)


def _based(p: Problem, bases: Sequence[Plan], placement: str) -> Iterator[tuple[Number, str, Order]]:
    """Yield value, name and order of those that follow from plans of the same placement, and fit."""
    for base in (base for base in bases if base.placement == placement):
        for name, order in residual_orders(p, base.schedule):
            forwards, _ = directions(p, choices_of(p, order))
            if fits(forwards, order) and (timing := evaluate(forwards, order)):
                yield timing.value, f"{base.found}, {name}" if name else base.found, order


def _in_turns(given: list[tuple[Number, str, Order]]) -> list[tuple[Number, str, Order]]:
    """Sort orders so that those of every way come in turn, the shortest first."""
    ways: dict[str, list[tuple[Number, str, Order]]] = {}
    for entry in sorted(given, key=itemgetter(0)):
        ways.setdefault(entry[1].rpartition(", ")[2], []).append(entry)
    return [entry for turn in zip_longest(*ways.values()) for entry in turn if entry]


def _operations(p: Problem) -> int:
    """Count the operations that an effort of 1 replays."""
    return min(max(_LEAST, _REPLAYS * 3 * len(p.place) * p.microbatches), _MOST)


def _reporter(attempts: list[_Attempt], effort: float, progress: Progress | None) -> Callable[[], bool]:
    """Return a callback that reports the progress of all searches and tells if the caller wants to stop."""
    stopped = False

    def stop() -> bool:
        nonlocal stopped
        assert progress
        if not stopped:
            best = min(attempts, key=lambda attempt: attempt.value)
            budget = effort * sum(_operations(attempt.problem) for attempt in attempts) / len(attempts)
            share = sum(attempt.search.spent for attempt in attempts) / budget
            stopped = bool(progress(min(1.0, share), best.value, best.bound.value))
        return stopped

    return stop if progress else lambda: False


def _best(attempts: list[_Attempt], effort: float) -> _Attempt:
    """Search all candidates for a while, the better half of them for longer, and so on until one is left."""
    rounds = (len(attempts) - 1).bit_length() + 1
    for _ in range(rounds):
        least = inf
        for attempt in attempts:
            if attempt.bound.value < least and attempt.given_value > attempt.bound.value:
                attempt.search.advance(effort * _operations(attempt.problem) / rounds / len(attempts))
            least = min(least, attempt.value)
        attempts = sorted(attempts, key=lambda attempt: attempt.value)[: (len(attempts) + 1) // 2]
    return attempts[0]


def _finished(candidate: Candidate, p: Problem, bound: Bound, order: Order, found: str) -> Plan:
    schedule = schedule_of(p, order)
    timeline = simulate(schedule, candidate.costs)
    value = timeline.makespan if p.objective == "makespan" else timeline.span
    taken = [sum(candidate.costs.of("parameters", s) for s in stages) for stages in p.stages_by_rank]
    memory = tuple(a + b for a, b in zip(timeline.peak_activations, taken, strict=True))
    return Plan(
        schedule,
        value,
        bound,
        max(0.0, float(value / bound.value) - 1) if bound.value else 0.0,
        memory,
        timeline,
        p.objective,
        candidate.name,
        found,
        candidate.costs,
        candidate.partition,
    )

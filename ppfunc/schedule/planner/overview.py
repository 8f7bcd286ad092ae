"""Compare schedules on paper, for one model and one number of ranks: time, bubble, memory, messages, distance
to the bound.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple

from ppfunc._checks import (
    duration,
    naming_arguments,
    percent,
    require_counts,
    require_number,
    require_type,
    show_table,
)

from ..builders import BUILDERS, find_builder
from ..collector import collector_paused
from ..costs import Costs, Number, require_costs
from ..dataflow import Dataflow, links
from ..formats.svg import Axis, Point, clipped, draw, number, short
from ..instruction import RESIDUAL_OPS, Op
from ..proof.certificate import check
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .problem import lower_bound

_HEAD = ("schedule", "makespan", "bubble", "of span", "peak", "messages", "held", "over bound")


class ScheduleFigures(NamedTuple):
    """The figures of one schedule.

    Args:
        name: name of the schedule; with a number, such as ``1f1b #2``, where an earlier schedule has it.
        timeline: run on paper, in the unit of the costs.
        peak_activations: most on any rank, in those of one microbatch in one rank's share of the model.
        messages: point-to-point messages in a step.
        parameters: most on any rank, in one rank's share of the model: 2 where every rank holds two shares.
        memory: most on any rank of activations and parameters together, in the unit of the costs.
        bound: the least makespan of any order of this placement (see :func:`ppfunc.schedule.lower_bound`),
            under the cap if the schedule keeps it. None if no bound is known: for several chains or a graph,
            without backwards, and for overlapped pairs with costs of their own.
    """

    name: str
    timeline: Timeline
    peak_activations: float
    messages: int
    parameters: float
    memory: Number
    bound: Number | None

    @property
    def gap(self) -> float | None:
        """Return the distance to the lower bound as a share of it.

        Returns:
            The share; None without a bound.
        """
        if self.bound is None:
            return None
        return float(self.timeline.makespan / self.bound - 1) if self.bound else 0.0


@dataclass(frozen=True, repr=False)
class Overview:
    """Schedules side by side, the shortest first; ``str`` is a table.

    Args:
        ranks, microbatches: numbers of ranks and microbatches of all schedules.
        rows: the figures of each.
        refused: name and reason of each schedule that these numbers do not allow.
        cap: memory of a rank, in the unit of the costs; None for no limit.
    """

    ranks: int
    microbatches: int
    rows: tuple[ScheduleFigures, ...]
    refused: tuple[tuple[str, str], ...] = ()
    cap: Number | None = None

    def __repr__(self) -> str:
        shortest = f", shortest={self.rows[0].name!r}" if self.rows else ""
        return (
            f"Overview(ranks={self.ranks}, microbatches={self.microbatches},"
            f" schedules={len(self.rows)}{shortest})"
        )

    def __str__(self) -> str:
        cells = [_HEAD, *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
        over = ["", *("  over the cap" if self.exceeds(row) else "" for row in self.rows)]
        return "\n".join(
            [*map(add, lines, over), *(f"left out: {name}: {reason}" for name, reason in self.refused)]
        )

    _repr_pretty_ = show_table

    def _repr_svg_(self) -> str:
        return to_scatter(self)

    def exceeds(self, row: ScheduleFigures) -> bool:
        """Tell whether a schedule takes more memory than the cap."""
        return self.cap is not None and row.memory > self.cap

    def figures(self) -> dict[str, Any]:
        """Return all figures as one JSON object, times as the costs have them."""
        of_time = ("makespan", "span", "bubble", "span_bubble")
        of_row = ("peak_activations", "messages", "parameters", "memory", "bound", "gap")
        rows = [
            {"name": row.name}
            | {name: getattr(row.timeline, name) for name in of_time}
            | {name: getattr(row, name) for name in of_row}
            | {"over_cap": self.exceeds(row)}
            for row in self.rows
        ]
        head = {"ranks": self.ranks, "microbatches": self.microbatches, "cap": self.cap}
        return {**head, "schedules": rows, "left_out": dict(self.refused)}

    @staticmethod
    def _cells(row: ScheduleFigures) -> tuple[str, ...]:
        time = row.timeline
        shares = map(percent, (time.bubble, time.span_bubble))
        gap = "-" if row.gap is None else percent(row.gap)
        return (
            row.name,
            duration(time.makespan) if time.seconds else f"{float(time.makespan):.6g}",
            *shares,
            f"{row.peak_activations:.4g}",
            str(row.messages),
            f"{row.parameters:.4g}",
            gap,
        )


_WHOLE = [name for name, build in BUILDERS.items() if "slices" not in inspect.signature(build).parameters]


@naming_arguments
@collector_paused()
def compare_schedules(
    ranks: int,
    microbatches: int,
    schedules: Iterable[str | Schedule] | None = None,
    costs: Costs | None = None,
    *,
    cap: Number | None = None,
    chunks: int = 2,
    slices: int = 2,
) -> Overview:
    """Run schedules on paper for the same model, in as many stages as each schedule has.

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches of a step; of a schedule of slices, its sequences.
        schedules: names as of :func:`ppfunc.schedule.find_builder`, or schedules; by default all
            builders with a backward, except those of slices, whose stages take a carry.
        costs: times and sizes of one rank's share of the model, a p-th of it; by default F = I = W = 1. A
            sequence has a number for each stage of the model, in order; replicas cost as much as their stage.
        cap: memory of a rank, in the unit of the costs, for schedules that are built for one.
        chunks: stages per rank, of schedules that let the caller choose.
        slices: slices of a sequence, of schedules that have them.

    Raises:
        ValueError: a schedule for other numbers, an unknown name, schedules with and without backward, costs
            for another number of stages.

    >>> print(compare_schedules(4, 8, ["1f1b", "zb_h1", "dualpipe"]))
    schedule  makespan  bubble  of span  peak  messages  held  over bound
    dualpipe        26    7.7%     7.7%     5        48     2           -
    zb_h1           27   11.1%    11.1%     4        48     1        0.0%
    1f1b            33   27.3%    27.3%     4        48     1       22.2%
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks, slices=slices)
    costs = require_costs(costs)
    if cap is not None:
        require_number("cap", cap)
    rows: list[ScheduleFigures] = []
    refused, seen = [], Counter[str]()
    for item in _WHOLE if schedules is None else _items(schedules):
        name = item if isinstance(item, str) else item.name
        try:
            if isinstance(item, str):
                schedule = _built(item, ranks, microbatches, costs, cap, {"chunks": chunks, "slices": slices})
            else:
                check(schedule := item)
            if schedules is not None or not schedule.forward_only:
                seen[schedule.name] += 1
                again = f" #{seen[schedule.name]}" if seen[schedule.name] > 1 else ""
                rows.append(_figures(schedule, schedule.name + again, _costs_of(schedule, costs), cap))
        except ValueError as error:
            if schedules is not None:
                raise (error if isinstance(item, Schedule) else ValueError(f"{name}: {error}")) from None
            refused.append((name, str(error)))
    if not rows:
        raise ValueError(refused[0][1] if refused else "schedules: got an empty list, expected a schedule")
    for row in rows:
        _require_same(row.timeline.schedule, ranks, microbatches, rows[0].timeline.schedule)
    rows.sort(key=lambda row: row.timeline.makespan)
    return Overview(ranks, microbatches, tuple(rows), tuple(refused), cap)


@naming_arguments
def to_scatter(overview: Overview, *, width: float | None = None) -> str:
    """Draw ``overview`` as an SVG file: each schedule by its bubble and its peak of activations.

    The nearer to the corner at the left below, the better. Schedules that hold parameters twice or more stand
    out by their colour.

    Args:
        width: width of the picture in pixels, from 720 to 100000; by default 900.

    Raises:
        ValueError: a width out of range.
    """
    require_type("overview", overview, Overview, "what compare_schedules returns")
    cap = "" if overview.cap is None else short(overview.cap)
    counts = (overview.ranks, "rank", "s"), (overview.microbatches, "microbatch", "es")
    size = ", ".join(f"{n} {word}{plural * (n != 1)}" for n, word, plural in counts)
    points = [
        Point(
            float(row.timeline.bubble),
            row.peak_activations,
            ("twice" if row.parameters > 1 else "point") + (" over" if overview.exceeds(row) else ""),
            label := clipped(row.name) + f" ({number(row.parameters)} x parameters)" * (row.parameters > 1),
            f"{label}: bubble {percent(row.timeline.bubble)}, peak activations"
            f" {number(row.peak_activations)}",
        )
        for row in overview.rows
    ]
    return draw(
        points, f"Schedules for {size}: simulated", f"{'; '.join(point.tip for point in points)}.", width,
        Axis("bubble: share of the makespan in which ranks wait", lambda x: f"{short(100 * x)}%", True),
        Axis("peak activations, in those of one microbatch in one rank's share of the model", short, True),
        {"twice": "holds parameters more than once", "over": f"over the cap of {cap}"},
    )  # fmt: skip


def _items(schedules: Iterable[str | Schedule]) -> list[str | Schedule]:
    expected = "a list of names and schedules, such as ['1f1b']"
    if isinstance(schedules, str):
        raise TypeError(f"schedules: got {schedules!r}, expected {expected}")
    require_type("schedules", schedules, Iterable, expected)
    items = list(schedules)
    for item in items:
        require_type("schedules", item, str | Schedule, expected)
    return items


def _built(
    name: str, ranks: int, microbatches: int, costs: Costs, cap: Number | None, given: Mapping[str, int]
) -> Schedule:
    """Build a schedule; a builder that takes costs gets the costs of its stages."""
    build = find_builder(name)
    taken = inspect.signature(build).parameters
    options = {option: number for option, number in given.items() if option in taken}
    schedule = build(ranks, microbatches, **options)
    if "costs" in taken:
        return build(ranks, microbatches, cap=cap, costs=_costs_of(schedule, costs), **options)
    own = not schedule.slices and schedule.microbatches == ranks * microbatches
    if own and ranks > 1:  # each rank has microbatches of its own
        if microbatches % ranks:
            raise ValueError(f"microbatches = {microbatches}, expected a multiple of the {ranks} ranks")
        return build(ranks, microbatches // ranks, **options)
    return schedule


def _require_same(schedule: Schedule, ranks: int, microbatches: int, first: Schedule) -> None:
    if (schedule.ranks, schedule.sequences) != (ranks, microbatches):
        units = "sequences" if schedule.slices else "microbatches"
        got = f"{schedule.ranks} ranks and {schedule.sequences} {units}"
        raise ValueError(f"{schedule.name} is for {got}, expected {ranks} and {microbatches}")
    if schedule.forward_only != first.forward_only:
        raise ValueError(
            f"of {schedule.name} and {first.name} one has a backward, the other has none: they do not do the"
            " same work; compare one kind, such as forward_only of both"
        )


def _figures(schedule: Schedule, name: str, costs: Costs, cap: Number | None) -> ScheduleFigures:
    timeline = simulate(schedule, costs)
    held = [
        sum(costs.of("parameters", s) for s in schedule.stages_of(rank)) for rank in range(schedule.ranks)
    ]
    memory = max(map(add, timeline.peak_activations, held))
    model = {schedule.model_stages[s]: s for s in range(schedule.stages)}
    size = {stage: costs.of("parameters", s) for stage, s in model.items()}
    size = size if any(size.values()) else dict.fromkeys(size, 1)
    parameters = max(
        sum(size[stage] for stage in schedule.model_stages_of(rank)) for rank in range(schedule.ranks)
    )
    return ScheduleFigures(
        name=name,
        timeline=timeline,
        peak_activations=max(timeline.peaks),
        messages=_messages(schedule),
        parameters=float(parameters * schedule.ranks / sum(size.values())),
        memory=memory,
        bound=bound_of_order(schedule, costs, cap if cap is not None and memory <= cap else None),
    )


def _messages(schedule: Schedule) -> int:
    flow, ops = Dataflow(schedule), {Op.F} if schedule.forward_only else {Op.F, Op.B}
    return sum(len(flow.sent(link)) for link in links(schedule) if link.compute in ops)


def bound_of_order(schedule: Schedule, costs: Costs, cap: Number | None) -> Number | None:
    """Return the least makespan of any order of the placement of a schedule.

    Returns:
        The bound; None for several chains, for overlapped pairs with own costs, without backwards, and for
        slices of unlike costs.
    """
    paired = Op.OVERLAP_F_B in schedule.ops and costs.overlapped is not None
    unlike = schedule.slices and costs.slices
    if len(schedule.flows) > 1 or not schedule.chained or paired or schedule.forward_only or unlike:
        return None
    if schedule.ops & RESIDUAL_OPS:
        cap = None  # which bounds what is kept
    # A whole backward that is shorter than its parts, or longer, is not what bounds every order.
    parts = [
        (costs.of("backward_input", s), costs.of("backward_weight", s), costs.backward_of(s))
        for s in range(schedule.stages)
    ]
    inputs = [min(i, whole) for i, _, whole in parts]
    weights = [min(w, whole - i) for i, (_, w, whole) in zip(inputs, parts, strict=True)]
    least = replace(costs, backward_input=inputs, backward_weight=weights, slices=())
    return lower_bound(least, schedule.placement, schedule.microbatches, cap, "makespan").value


def fitted(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of the stages of ``schedule``. Costs given per stage of the model serve all replicas.

    Raises:
        ValueError: costs for another number of stages.
    """
    model = len(set(schedule.model_stages))
    lengths = {len(value) for value in costs.per_stage.values() if isinstance(value, Sequence)}
    if schedule.replicas and lengths == {model}:
        return costs.of_stages(schedule.model_stages)
    return costs.fitting(schedule.stages, schedule.slices)


def _costs_of(schedule: Schedule, costs: Costs) -> Costs:
    """Return the costs of the stages of ``schedule``; a number for all stages is for a rank's share."""
    if costs.per_stage and schedule.slices > 1 and not costs.slices:
        raise ValueError(
            "costs are given per stage, but slices share costs of a rank: give one number for all, or costs"
            " of each slice, Costs(slices=[...])"
        )
    return fitted(costs, schedule) if costs.per_stage else costs.per_rank(schedule)

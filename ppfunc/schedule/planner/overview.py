"""Compare schedules on paper, for one model and one number of ranks: time, bubble, memory, messages, distance
to the bound.
"""

import inspect
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import add
from typing import Any, NamedTuple

from ppfunc._checks import require_counts, require_type, show_table

from ..builders import BUILDERS, find_builder
from ..collector import collector_paused
from ..costs import SENT, Costs, Number, portion, require_costs
from ..formats.svg import Point, clipped, draw, number, short
from ..instruction import RESIDUAL_OPS, Op
from ..proof.certificate import check
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .bounds import lower_bound
from .placements import costs_of_stages

_HEAD = ("schedule", "makespan", "bubble", "of span", "peak", "messages", "held", "over bound")


class ScheduleFigures(NamedTuple):
    """The figures of one schedule.

    Args:
        name: of the schedule.
        timeline: its run on paper, in the unit of the costs.
        peak_activations: most on any rank, in those of one microbatch in one rank's share of the model.
        messages: point-to-point messages in a step.
        parameters: most on any rank, in one rank's share of the model: 2 where every rank holds two shares.
        memory: most on any rank of activations and parameters together, in the unit of the costs.
        bound: the least makespan of any order of this placement (see :func:`ppfunc.schedule.lower_bound`),
            under the cap if the schedule keeps it. None if no bound is known: for several chains, without
            backwards, and for overlapped pairs with costs of their own.
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
        """Return the distance to the lower bound, as a share of it; None without a bound."""
        return (
            None
            if self.bound is None
            else float(self.timeline.makespan / self.bound - 1)
            if self.bound
            else 0.0
        )


@dataclass(frozen=True, repr=False)
class Overview:
    """Schedules side by side, the shortest first; ``str`` is a table.

    Args:
        ranks, microbatches: of all of them.
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

    @staticmethod
    def _cells(row: ScheduleFigures) -> tuple[str, ...]:
        time = row.timeline
        shares = (f"{float(share):.1%}" for share in (time.bubble, time.span_bubble))
        gap = "-" if row.gap is None else f"{row.gap:.1%}"
        return (
            row.name,
            f"{float(time.makespan):.6g}",
            *shares,
            f"{row.peak_activations:.4g}",
            str(row.messages),
            f"{row.parameters:.4g}",
            gap,
        )


@collector_paused()
def compare_schedules(
    ranks: int,
    microbatches: int,
    schedules: Iterable[str | Schedule] | None = None,
    costs: Costs | None = None,
    *,
    cap: Number | None = None,
    chunks: int = 2,
) -> Overview:
    """Run schedules on paper for the same model, whatever the number of stages that each cuts it into.

    Args:
        ranks: number of ranks p.
        microbatches: number of microbatches of a step.
        schedules: names as of :func:`ppfunc.schedule.find_builder`, or schedules; by default all
            builders with a backward.
        costs: one number for all is that of one rank's share of the model, a p-th of it; by default F = I = W
            = 1. A sequence has a number for each stage of the model, in order. A schedule with fewer stages
            joins neighbours. One with more stages cuts each into equal parts. A part sends as many bytes as
            the whole, a part of the last stage as many as it receives. Replicas cost as much as their stage.
        cap: memory of a rank, in the unit of the costs, for schedules that are built for one.
        chunks: stages per rank, of schedules that let the caller choose.

    Raises:
        ValueError: a schedule for other numbers, an unknown name, schedules with and without backward, costs
            for a number of stages that no schedule can have.

    >>> print(compare_schedules(4, 8, ["1f1b", "zb_h1", "dualpipe"]))
    schedule  makespan  bubble  of span  peak  messages  held  over bound
    dualpipe        26    7.7%     7.7%     5        48     2           -
    zb_h1           27   11.1%    11.1%     4        48     1        0.0%
    1f1b            33   27.3%    27.3%     4        48     1       22.2%
    """
    require_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    costs = require_costs(costs)
    if cap is not None and (
        not isinstance(cap, (int, float, Fraction)) or isinstance(cap, bool) or not cap >= 0
    ):
        raise ValueError(f"cap: got {cap!r}, expected the memory of a rank, a number from 0")
    schedules = schedules if schedules is None else _items(schedules)
    rows: list[ScheduleFigures] = []
    refused = []
    for item in BUILDERS if schedules is None else schedules:
        name = _canonical(item) if isinstance(item, str) else item.name
        try:
            schedule = (
                _built(name, ranks, microbatches, costs, cap, chunks)
                if isinstance(item, str)
                else _checked(item)
            )
            if schedules is not None or not schedule.forward_only:
                rows.append(_figures(name, schedule, _stage_costs(costs, schedule), cap))
        except ValueError as error:
            if schedules is not None:
                raise (error if isinstance(item, Schedule) else ValueError(f"{name}: {error}")) from None
            refused.append((name, str(error)))
    for row in rows:
        _require_same(row.timeline.schedule, ranks, microbatches, rows[0].timeline.schedule)
    if not rows:
        raise ValueError(
            refused[0][1] if refused else "schedules: got an empty list, expected at least one schedule"
        )
    rows.sort(key=lambda row: row.timeline.makespan)
    return Overview(ranks, microbatches, tuple(rows), tuple(refused), cap)


def to_scatter(overview: Overview, *, width: float | None = None) -> str:
    """Draw ``overview`` as an SVG file: each schedule by its bubble and its peak of activations.

    The nearer to the corner at the left below, the better. Schedules that hold parameters twice or more stand
    out by their colour.

    Args:
        width: of the picture, in pixels from 720 to 100000; by default 900.

    Raises:
        ValueError: a width out of range.
    """
    require_type("overview", overview, Overview, "what compare_schedules returns")
    pale = "" if overview.cap is None else f"; pale: over the cap of {short(overview.cap)}"
    size = f"{overview.ranks} ranks, {overview.microbatches} microbatches"
    points = [
        Point(
            float(row.timeline.bubble),
            row.peak_activations,
            ("twice" if row.parameters > 1 else "point") + (" over" if overview.exceeds(row) else ""),
            _name(row),
        )
        for row in overview.rows
    ]
    rows = "; ".join(f"{p.label}: bubble {p.x:.1%}, peak activations {number(p.y)}" for p in points)
    return draw(
        points, f"Schedules for {size}: simulated", f"{rows}.", width,
        ("bubble: share of the makespan in which ranks wait", lambda x: f"{short(100 * x)}%"),
        (f"peak activations, in those of one microbatch in one rank's share of the model{pale}", short),
    )  # fmt: skip


def _name(row: ScheduleFigures) -> str:
    name = clipped(row.name)
    return name if row.parameters <= 1 else f"{name} ({number(row.parameters)} x parameters)"


def _items(schedules: Any) -> list[str | Schedule]:
    expected = "expected a list of names and schedules"
    if isinstance(schedules, str | Schedule) or not isinstance(schedules, Iterable):
        raise TypeError(
            f"schedules: got {reprlib.repr(schedules)}, {expected}, such as [{reprlib.repr(schedules)}]"
        )
    items = list(schedules)
    if wrong := [item for item in items if not isinstance(item, str | Schedule)]:
        raise TypeError(f"schedules: got an item of type {type(wrong[0]).__name__}, {expected}")
    return items


def _canonical(name: str) -> str:
    build = find_builder(name)
    return next(known for known, builder in BUILDERS.items() if builder is build)


def _built(
    name: str, ranks: int, microbatches: int, costs: Costs, cap: Number | None, chunks: int
) -> Schedule:
    """Build a schedule; one that is made for costs gets those of its stages."""
    build = BUILDERS[name]
    taken = inspect.signature(build).parameters
    options = {"chunks": chunks} if "chunks" in taken else {}
    schedule = build(ranks, microbatches, **options)
    if "costs" in taken:
        schedule = build(ranks, microbatches, cap=cap, costs=_stage_costs(costs, schedule), **options)
    if schedule.microbatches == ranks * microbatches and ranks > 1:  # each rank has microbatches of its own
        if microbatches % ranks:
            raise ValueError(f"microbatches = {microbatches}, expected a multiple of the {ranks} ranks")
        schedule = build(ranks, microbatches // ranks, **options)
    return schedule


def _checked(schedule: Schedule) -> Schedule:
    check(schedule)
    return schedule


def _require_same(schedule: Schedule, ranks: int, microbatches: int, first: Schedule) -> None:
    if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
        got = f"{schedule.ranks} ranks and {schedule.microbatches} microbatches"
        raise ValueError(f"{schedule.name} is for {got}, expected {ranks} and {microbatches}")
    if schedule.forward_only != first.forward_only:
        raise ValueError(
            f"of {schedule.name} and {first.name} one has a backward, the other has none: they do not do the"
            " same work; compare one kind, such as forward_only of both"
        )


def _figures(name: str, schedule: Schedule, costs: Costs, cap: Number | None) -> ScheduleFigures:
    timeline = simulate(schedule, costs)
    held = [
        sum(costs.of("parameters", s) for s in schedule.stages_of(rank)) for rank in range(schedule.ranks)
    ]
    memory = max(map(add, timeline.peak_activations, held))
    model = {schedule.model_stages[s]: s for s in range(schedule.stages)}
    activation = sum(costs.of("activation", s) for s in model.values()) / schedule.ranks
    size = {stage: costs.of("parameters", s) for stage, s in model.items()}
    size = size if any(size.values()) else dict.fromkeys(size, 1)
    parameters = max(
        sum(size[stage] for stage in schedule.model_stages_of(rank)) for rank in range(schedule.ranks)
    )
    return ScheduleFigures(
        name=name,
        timeline=timeline,
        peak_activations=float(max(timeline.peak_activations) / activation) if activation else 0.0,
        messages=_messages(schedule),
        parameters=float(parameters * schedule.ranks / sum(size.values())),
        memory=memory,
        bound=bound_of_order(schedule, costs, cap if cap is not None and memory <= cap else None),
    )


def _messages(schedule: Schedule) -> int:
    walked = {stage: len(chain.microbatches) for chain in schedule.chains for stage in chain.stages}
    return sum(walked[source] for source, _ in schedule.crossing_edges) * (1 if schedule.forward_only else 2)


def bound_of_order(schedule: Schedule, costs: Costs, cap: Number | None) -> Number | None:
    """Return the least makespan of any order of the placement of a schedule; None where no bound is known."""
    paired = Op.OVERLAP_F_B in schedule.ops and costs.overlapped is not None
    if len(schedule.chains) > 1 or paired or schedule.forward_only:
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
    least = replace(costs, backward_input=inputs, backward_weight=weights)
    return lower_bound(least, schedule.placement, schedule.microbatches, cap, "makespan").value


def _stage_costs(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of every stage of ``schedule`` from those of the model."""
    wanted = len(set(schedule.model_stages))
    values = vars(costs).values()
    if not any(isinstance(value, Sequence | Mapping) for value in values):
        return costs.per_rank(schedule)
    sizes = {len(value) for value in values if isinstance(value, Sequence)} or {schedule.ranks}
    if len(sizes) > 1:
        raise ValueError(
            f"costs are given for {' and for '.join(map(str, sorted(sizes)))} stages, expected one number of"
            " stages"
        )
    (count,) = sizes
    costs.fitting(count)
    if wanted % count and count % wanted:
        raise ValueError(
            f"costs for {count} stages are not those of the {wanted} stages of {schedule.name}: expected a"
            " divisor or a multiple"
        )
    if wanted < count:
        costs = costs_of_stages(costs, range(0, count + 1, count // wanted))
    elif wanted > count:
        costs = _pieces(costs, count, wanted // count)
    return costs.of_stages(schedule.model_stages)


def _pieces(costs: Costs, count: int, pieces: int) -> Costs:
    """Cut each stage into equal pieces.

    A piece sends as many bytes as its stage; a piece of the last stage that another follows, as many as that
    stage receives.
    """
    whole = [stage for stage in range(count) for _ in range(pieces)]
    inner = [*whole[: count * pieces - pieces], *[max(count - 2, 0)] * (pieces - 1), count - 1]
    cut: dict[str, list[Number]] = {}
    for name, value in vars(costs).items():
        if name in SENT and value is not None:
            cut[name] = [costs.of(name, stage) for stage in inner]
        elif value is not None:
            parts = 1 if name in ("weight_share", "checkpoint") else pieces
            values = (costs.of(name, stage) for stage in whole)
            cut[name] = [value if value is None else portion(value, 1, parts) for value in values]
    return replace(costs, **cut)

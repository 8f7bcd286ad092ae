"""Draw a schedule in time as plain SVG: one row per rank, bars to scale, light and dark.

Colour says the kind of instruction, its strength which of the rank's stages it belongs to (the first
is the strongest), the number the microbatch; an overlapped pair is a bar of two halves, the forward
above. Collectives that take time are thin bars under what runs beside them. At the right: how much of the
time a rank is idle, and its peak of live activations.
"""

from collections.abc import Iterator, Set
from typing import NamedTuple

from ..errors import ScheduleError
from ..instruction import COMPUTE, Op, parts_of
from ..schedule import Schedule
from ..simulate import Timeline, simulate
from .elements import amount, line, number, page, rect, require_width, short, text, ticks
from .grid import Bar, bars_of, compute_bars

_KINDS = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
_WHOLE = {
    Op.UNSHARD: "gather of parameters",
    Op.REDUCE_TIED: "sum over tied places",
    Op.REDUCE_GRAD: "sum over data ranks",
    Op.STEP: "optimizer step",
}
_THIN = 5.0  # pixels of the bar of a collective
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 168.0, 104.0, 44.0
_DIGIT = 6.8  # pixels of one digit at 11 px
_COLUMN = 960.0  # pixels of a page that a notebook has for a picture
_MOST = 1000  # compute instructions that a notebook shows as a picture, of some 200 bytes each

_STYLE = """
.track { fill: #eceff4 } .level { fill: #b4bdcc }
.F { fill: #3f72d0 } .B { fill: #23906c } .I { fill: #8a5cc8 } .W { fill: #e5a62f }
.UNSHARD { fill: #0f8c9b } .REDUCE_TIED { fill: #7d6a4f }
.REDUCE_GRAD { fill: #c04a4a } .STEP { fill: #5b6577 }
.n { fill: #ffffff; text-anchor: middle } .n.half { font-size: 10px }
.n.dark { fill: #3a2600 } .n.pale { fill: #16202f }"""
_DARK = """
.track { fill: #232a35 } .level { fill: #566277 }
.F { fill: #4477dd } .B { fill: #23906c } .I { fill: #9165d6 } .W { fill: #e5ad42 }
.n.pale { fill: #f2f4f8 }"""


class _Scale(NamedTuple):
    """Time and ranks on the page, in pixels."""

    per_time: float
    width: float
    row: float

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_time

    def y(self, rank: int) -> float:
        return _TOP + rank * self.row

    @property
    def bar(self) -> float:
        return self.row - 4


def to_svg(schedule: Schedule, timeline: Timeline | None = None, *, width: float | None = None) -> str:
    """Return the picture of ``schedule`` as the text of an SVG file.

    Args:
        schedule: the one to draw; messages and loads take no space, nor does what takes no time.
        timeline: start and end of every instruction, simulated or measured (see
            :func:`ppfunc.schedule.simulate.timeline_of`); by default simulated with the default costs.
        width: of the picture, in pixels from 960 to 100000; by default such that most bars have room for
            their number.

    Raises:
        ValueError: a width out of range.
    """
    if width is not None:
        require_width(width, 960)
    timeline = simulate(schedule) if timeline is None else timeline
    rows, whole, makespan = (
        compute_bars(schedule, timeline),
        bars_of(schedule, timeline, _WHOLE),
        float(timeline.makespan),
    )
    scale = _scale(rows, makespan, width)
    timed = {bar.instruction.op for row in whole for bar in row if bar.end > bar.start}
    elements = [
        *_heading(schedule, timeline),
        *_legend(schedule, rows, timed),
        *_axis(scale, makespan, len(rows)),
    ]
    for rank, row in enumerate(rows):
        elements += [
            *_margins(scale, timeline, rank),
            *_bars(schedule, scale, rank, row),
            *_whole_bars(scale, rank, whole[rank]),
        ]
    size = _LEFT + scale.width + _RIGHT, scale.y(len(rows)) + _BOTTOM
    return page(schedule.name, *size, _STYLE, _DARK, elements)


def picture(value: Schedule | Timeline) -> str | None:
    """Return the picture of a schedule or a timeline for a notebook: its ``_repr_svg_``.

    None where it would be too large, or where a schedule cannot run and has no times: the text stands alone
    there.
    """
    schedule, timeline = (value.schedule, value) if isinstance(value, Timeline) else (value, None)
    if sum(count for op, count in schedule.counts.items() if op in COMPUTE) > _MOST:
        return None
    try:
        return to_svg(schedule, timeline, width=_COLUMN)
    except ScheduleError:  # saying what is wrong with it is the work of check
        return None


def _scale(rows: list[list[Bar]], makespan: float, width: float | None) -> _Scale:
    """Return the scale for the width asked for, or for one that fits the numbers of three bars in four."""
    durations = sorted(bar.end - bar.start for row in rows for bar in row)
    parts = (part for row in rows for bar in row for part in parts_of(bar.instruction))
    digits = max((len(str(part.microbatch)) for part in parts), default=1)
    typical = durations[len(durations) // 4] if durations else makespan
    wanted = (_DIGIT * digits + 5) * makespan / typical if typical else 0.0
    across = min(max(wanted, 720.0), 30000.0) if width is None else width - _LEFT - _RIGHT
    paired = any(bar.instruction.parts for row in rows for bar in row)
    return _Scale(across / (makespan or 1.0), across, 30.0 if paired or len(rows) <= 16 else 22.0)


def _heading(schedule: Schedule, timeline: Timeline) -> Iterator[str]:
    counts = (
        (schedule.ranks, "rank", "s"),
        (schedule.stages, "stage", "s"),
        (schedule.microbatches, "microbatch", "es"),
    )
    facts = [
        *(f"{n} {word}{plural * (n != 1)}" for n, word, plural in counts),
        f"makespan {short(timeline.makespan)}",
        f"bubble {float(timeline.bubble):.1%}",
        f"bubble of the span {float(timeline.span_bubble):.1%}",
        f"peak activations {amount(max(timeline.peak_activations, default=0))}",
    ]
    yield text("ink h", _LEFT, 34, schedule.name)
    yield text("soft", _LEFT, 56, " · ".join(facts))


def _legend(schedule: Schedule, rows: list[list[Bar]], whole: Set[Op]) -> Iterator[str]:
    seen = [bar.instruction for row in rows for bar in row]
    kinds = {part.op for i in seen for part in parts_of(i)}
    x, y = _LEFT, 72.0
    for op, label in (_KINDS | _WHOLE).items():
        if op in kinds | whole:
            yield rect(op.value, x, y, 14, 14, 'rx="2"')
            yield text("ink", x + 20, y + 11, label)
            x += 44 + 6 * len(label)
    if any(i.parts for i in seen):
        yield rect("F", x, y, 14, 7) + rect("B", x, y + 7, 14, 7)
        yield text("ink", x + 20, y + 11, "overlapped pair")
        x += 44 + 6 * 15
    chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
    if chunks > 1:
        for chunk in range(chunks):
            yield rect("F", x + 14 * chunk, y, 14, 14, f'fill-opacity="{_strength(chunk, chunks)}"')
        yield text("ink", x + 14 * chunks + 6, y + 11, f"the {chunks} stages of a rank, in order")


def _strength(chunk: int, chunks: int) -> str:
    return "1" if chunks == 1 else number(1 - 0.55 * chunk / (chunks - 1))


def _axis(scale: _Scale, makespan: float, ranks: int) -> Iterator[str]:
    top, bottom = scale.y(0), scale.y(ranks)
    for rank in range(ranks):
        yield rect("track", _LEFT, scale.y(rank) + 2, scale.width, scale.bar)
    for time in ticks(makespan, scale.width):
        yield line(scale.x(time), top, scale.x(time), bottom + 5)
        yield text("soft mid", scale.x(time), bottom + 18, short(time))
    yield text("soft end", _LEFT - 10, bottom + 18, "time")
    yield text("soft end", _LEFT + scale.width + 52, top - 6, "idle")
    yield text("soft", _LEFT + scale.width + 70, top - 6, "peak activations")


def _margins(scale: _Scale, timeline: Timeline, rank: int) -> Iterator[str]:
    """Write the name of the rank at the left, its idle share and its memory at the right."""
    middle, right = scale.y(rank) + scale.row / 2 + 4, _LEFT + scale.width
    idle = float(timeline.idle[rank] / timeline.makespan) if timeline.makespan else 0.0
    peak, most = float(timeline.peak_activations[rank]), float(max(timeline.peak_activations)) or 1.0
    yield text("ink end", _LEFT - 10, middle, f"rank {rank}")
    yield text("soft end", right + 52, middle, f"{idle:.0%}")
    yield rect("level", right + 70, scale.y(rank) + scale.row / 2 - 5, 56 * peak / most, 10, 'rx="2"')
    yield text("ink", right + 76 + 56 * peak / most, middle, amount(peak))


def _bars(schedule: Schedule, scale: _Scale, rank: int, row: list[Bar]) -> Iterator[str]:
    order = {stage: n for n, stage in enumerate(schedule.stages_of(rank))}
    for instruction, start, end in row:
        parts = parts_of(instruction)
        height = scale.bar / len(parts)
        tip = f"<title>{instruction} on rank {rank}, {short(start)} to {short(end)}</title>"
        for n, part in enumerate(parts):
            strength = _strength(order.get(part.stage, 0), max(len(order), 1))
            y = scale.y(rank) + 2 + n * height
            # A hairline of the paper between bars, so that equal neighbours can be told apart.
            width = max((end - start) * scale.per_time - 0.8, 0.4)
            faded = "" if strength == "1" else f'fill-opacity="{strength}"'
            drawn = height - 0.6 if n + 1 < len(parts) else height
            yield rect(part.op.value, scale.x(start), y, width, drawn, faded, tip)
            label = str(part.microbatch)
            if width >= _DIGIT * len(label) + 1:
                tone = " pale" if float(strength) < 0.75 else " dark" * (part.op is Op.W)
                kind = "n" + tone + " half" * (len(parts) > 1)
                yield text(kind, scale.x(start) + width / 2, y + height / 2 + 4, label)


def _whole_bars(scale: _Scale, rank: int, row: list[Bar]) -> Iterator[str]:
    """Bars of optimizer steps, and thin ones of collectives; what takes no time has none."""
    for instruction, start, end in row:
        if end > start:
            height = scale.bar if instruction.op is Op.STEP else _THIN
            tip = f"<title>{instruction} on rank {rank}, {short(start)} to {short(end)}</title>"
            width = max((end - start) * scale.per_time - 0.8, 0.4)
            y = scale.y(rank) + 2 + scale.bar - height
            yield rect(instruction.op.value, scale.x(start), y, width, height, inside=tip)

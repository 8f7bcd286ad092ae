"""Draw a schedule in time as plain SVG: one row per rank, bars to scale, light and dark.

Colour says the kind of instruction, its strength which of the rank's stages it belongs to (the first
is the strongest), the number the microbatch: all bars of a kind have one, or none where one is too narrow.
An overlapped pair is a bar of two halves, the forward above. Collectives that take time are thin bars under
what runs beside them. At the right: how much of the time a rank is idle, and its peak of live activations.
Below a row may be the bytes that its rank holds.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ppfunc._checks import require_index, require_type, shown

from ..errors import require_schedule
from ..instruction import COMPUTE, Op, parts_of
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .elements import amount, clipped, line, number, page, rect, require_width, short, text, ticks
from .grid import Bar, bars_of, with_timeline

_KINDS = {
    Op.F: "forward",
    Op.RECOMPUTE: "forward again",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
}
_WHOLE = {
    Op.UNSHARD: "gather of parameters",
    Op.OFFLOAD: "copy to the host",
    Op.FETCH: "copy from the host",
    Op.REDUCE_TIED: "sum over tied places",
    Op.REDUCE_GRAD: "sum over data ranks",
    Op.STEP: "optimizer step",
}
_THIN = 5.0  # pixels of the bar of a collective
_STRIP = 24.0  # pixels of the most bytes
_LEFT, _RIGHT, _BOTTOM = 76.0, 168.0, 44.0
_DIGIT = 6.8  # pixels of one digit at 11 px
_WIDEST = 1600.0  # pixels of a screen

_STYLE = """
.track { fill: #eceff4 } .level { fill: #b4bdcc }
.F { fill: #3f72d0 } .B { fill: #23906c } .I { fill: #8a5cc8 } .W { fill: #e5a62f }
.RECOMPUTE { fill: #6a8fb8 } .OFFLOAD { fill: #b0568f } .FETCH { fill: #4f8f3a }
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
    top: float
    strip: float  # below each row

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_time

    def y(self, rank: int) -> float:
        return self.top + rank * (self.row + self.strip)

    def bar_width(self, bar: Bar) -> float:
        # A hairline of the paper between bars, so that equal neighbours can be told apart.
        return max((bar.end - bar.start) * self.per_time - 0.8, 0.4)

    @property
    def bar(self) -> float:
        return self.row - 4


def to_svg(
    schedule: Schedule | Timeline,
    timeline: Timeline | None = None,
    *,
    width: float | None = None,
    memory: Mapping[int, Sequence[int]] | None = None,
) -> str:
    """Return the picture of ``schedule`` as the text of an SVG file.

    Args:
        schedule: the one to draw; messages and loads take no space, nor does what takes no time. Or a
            timeline alone, which has its schedule.
        timeline: start and end of every instruction, simulated or measured (see
            :func:`~ppfunc.schedule.proof.timeline.timeline_of`); by default simulated with the default costs.
        width: of the picture, in pixels from 960 to 100000; by default such that most bars have room for
            their number, at most 1600.
        memory: by rank, the most bytes in each instruction of its program, such as ``by_instruction`` of what
            ``lowered.memory_analysis()`` returns, with ``lowered.schedule``; drawn below the row of the rank.

    Raises:
        TypeError, ValueError: a width out of range, or bytes of other ranks, or of another number of
            instructions.
    """
    schedule, timeline = with_timeline(schedule, timeline)
    require_schedule(schedule)
    if width is not None:
        require_width(width, 960)
    if memory is not None:
        _require_bytes(schedule, memory)
    units = "F, I and W take 1 each" if timeline is None else "units of its costs"
    timeline = simulate(schedule) if timeline is None else timeline
    rows, whole = bars_of(schedule, timeline), bars_of(schedule, timeline, _WHOLE)
    makespan = float(timeline.makespan)
    across = _across(rows, makespan) if width is None else width - _LEFT - _RIGHT
    timed = {bar.instruction.op for row in whole for bar in row if bar.end > bar.start}
    legend, top = _legend(schedule, rows, timed, _LEFT + across + _RIGHT)
    high = 30.0 if len(rows) <= 16 or any(bar.instruction.parts for row in rows for bar in row) else 22.0
    scale = _Scale(across / (makespan or 1.0), across, high, top, _STRIP + 6 if memory else 0.0)
    most = max((size for sizes in (memory or {}).values() for size in sizes), default=0)
    numbered = _numbered(scale, rows)
    facts = _facts(schedule, timeline)
    origin = "measured, seconds" if timeline.measured else f"simulated, {units}"
    heading = f"{clipped(schedule.name)}: {origin}"
    elements = [
        text("ink h", _LEFT, 34, heading),
        text("soft", _LEFT, 56, " · ".join(facts)),
        *legend,
        *_axis(scale, makespan, len(rows), "seconds" if timeline.measured else "time"),
    ]
    for rank, row in enumerate(rows):
        elements += [
            *_margins(scale, timeline, rank),
            *_bars(schedule, scale, rank, row, numbered),
            *_whole_bars(scale, rank, whole[rank]),
        ]
        if memory and rank in memory:
            elements += _bytes_held(scale, timeline, rank, memory[rank], most)
    size = _LEFT + scale.width + _RIGHT, scale.y(len(rows)) + _BOTTOM
    return page(heading, _spoken(timeline, facts), *size, _STYLE, _DARK, elements)


def _across(rows: list[list[Bar]], makespan: float) -> float:
    """Return the pixels of the bars of all the time, such that three bars in four have room for a number."""
    durations = sorted(bar.end - bar.start for row in rows for bar in row)
    parts = (part for row in rows for bar in row for part in parts_of(bar.instruction))
    digits = max((len(str(part.microbatch)) for part in parts), default=1)
    typical = durations[len(durations) // 4] if durations else makespan
    wanted = (_DIGIT * digits + 5) * makespan / typical if typical else 0.0
    return min(max(wanted, 720.0), _WIDEST - _LEFT - _RIGHT)


def _numbered(scale: _Scale, rows: list[list[Bar]]) -> Set[Op]:
    """Return the kinds of bars that all have room for a number."""
    narrow = {
        bar.instruction.op
        for row in rows
        for bar in row
        for part in parts_of(bar.instruction)
        if scale.bar_width(bar) < _DIGIT * len(str(part.microbatch)) + 1
    }
    return COMPUTE - narrow


def _facts(schedule: Schedule, timeline: Timeline) -> list[str]:
    counts = (
        (schedule.ranks, "rank", "s"),
        (schedule.stages, "stage", "s"),
        (schedule.microbatches, "microbatch", "es"),
    )
    return [
        *(f"{n} {word}{plural * (n != 1)}" for n, word, plural in counts),
        f"makespan {short(timeline.makespan)}",
        f"bubble {float(timeline.bubble):.1%}",
        f"bubble of the span {float(timeline.span_bubble):.1%}",
        f"peak activations {amount(max(timeline.peak_activations, default=0))}",
    ]


def _spoken(timeline: Timeline, facts: list[str]) -> str:
    """Say what the picture shows: the facts of the whole, then those of every rank."""
    ranks = (
        f"rank {rank}: idle {_idle(timeline, rank)}, peak activations {amount(peak)}"
        for rank, peak in enumerate(timeline.peak_activations)
    )
    return f"A row per rank, time to the right. {', '.join(facts)}. {'; '.join(ranks)}."


def _idle(timeline: Timeline, rank: int) -> str:
    return f"{float(timeline.idle[rank] / timeline.makespan) if timeline.makespan else 0.0:.0%}"


def _legend(
    schedule: Schedule, rows: list[list[Bar]], timed: Set[Op], width: float
) -> tuple[list[str], float]:
    """Return the entries of the legend, in lines of at most ``width``, and where the bars begin below it."""
    x, y, entries = _LEFT, 72.0, []
    for swatch, size, label in _swatches(schedule, rows, timed):
        length = size + 30 + 6 * len(label)
        if x + length > width:
            x, y = _LEFT, y + 20
        at = f"translate({number(x)} {number(y)})"
        entries.append(f'<g transform="{at}">{swatch}{text("ink", size + 6, 11, label)}</g>')
        x += length
    return entries, y + 32


def _swatches(schedule: Schedule, rows: list[list[Bar]], timed: Set[Op]) -> Iterator[tuple[str, float, str]]:
    """Yield what stands in the legend: a swatch, its width, and its label."""
    seen = [bar.instruction for row in rows for bar in row]
    kinds = timed | {part.op for i in seen for part in parts_of(i)}
    for op, label in (_KINDS | _WHOLE).items():
        if op in kinds:
            yield rect(op.value, 0, 0, 14, 14, 'rx="2"'), 14, label
    if any(i.parts for i in seen):
        yield rect("F", 0, 0, 14, 7) + rect("B", 0, 7, 14, 7), 14, "overlapped pair"
    chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
    if chunks > 1:
        strengths = (f'fill-opacity="{_strength(chunk, chunks)}"' for chunk in range(chunks))
        swatch = "".join(rect("F", 14 * n, 0, 14, 14, strength) for n, strength in enumerate(strengths))
        yield swatch, 14 * chunks, f"the {chunks} stages of a rank, in order"


def _strength(chunk: int, chunks: int) -> str:
    return "1" if chunks == 1 else number(1 - 0.55 * chunk / (chunks - 1))


def _axis(scale: _Scale, makespan: float, ranks: int, unit: str) -> Iterator[str]:
    top, bottom = scale.y(0), scale.y(ranks)
    for rank in range(ranks):
        yield rect("track", _LEFT, scale.y(rank) + 2, scale.width, scale.bar)
    for time in ticks(makespan, scale.width):
        yield line(scale.x(time), top, scale.x(time), bottom + 5)
        yield text("soft mid", scale.x(time), bottom + 18, short(time))
    yield text("soft end", _LEFT - 10, bottom + 18, unit)
    yield text("soft end", _LEFT + scale.width + 52, top - 6, "idle")
    yield text("soft", _LEFT + scale.width + 70, top - 6, "peak activations")


def _margins(scale: _Scale, timeline: Timeline, rank: int) -> Iterator[str]:
    """Write the name of the rank at the left, its idle share and its memory at the right."""
    middle, right = scale.y(rank) + scale.row / 2 + 4, _LEFT + scale.width
    peak, most = float(timeline.peak_activations[rank]), float(max(timeline.peak_activations)) or 1.0
    yield text("ink end", _LEFT - 10, middle, f"rank {rank}")
    yield text("soft end", right + 52, middle, _idle(timeline, rank))
    yield rect("level", right + 70, scale.y(rank) + scale.row / 2 - 5, 56 * peak / most, 10, 'rx="2"')
    yield text("ink", right + 76 + 56 * peak / most, middle, amount(peak))


def _bars(schedule: Schedule, scale: _Scale, rank: int, row: list[Bar], numbered: Set[Op]) -> Iterator[str]:
    order = {stage: n for n, stage in enumerate(schedule.stages_of(rank))}
    for bar in row:
        instruction, start, end = bar
        parts, width = parts_of(instruction), scale.bar_width(bar)
        height = scale.bar / len(parts)
        tip = f"<title>{instruction} on rank {rank}, {short(start)} to {short(end)}</title>"
        for n, part in enumerate(parts):
            strength = _strength(order.get(part.stage, 0), max(len(order), 1))
            y = scale.y(rank) + 2 + n * height
            faded = "" if strength == "1" else f'fill-opacity="{strength}"'
            drawn = height - 0.6 if n + 1 < len(parts) else height
            yield rect(part.op.value, scale.x(start), y, width, drawn, faded, tip)
            if instruction.op in numbered:
                tone = " pale" if float(strength) < 0.75 else " dark" * (part.op is Op.W)
                kind = "n" + tone + " half" * (len(parts) > 1)
                yield text(kind, scale.x(start) + width / 2, y + height / 2 + 4, str(part.microbatch))


def _whole_bars(scale: _Scale, rank: int, row: list[Bar]) -> Iterator[str]:
    """Draw bars for optimizer steps, thin ones for collectives and copies; none for what takes no time."""
    for bar in row:
        instruction, start, end = bar
        if end > start:
            height = scale.bar if instruction.op is Op.STEP else _THIN
            tip = f"<title>{instruction} on rank {rank}, {short(start)} to {short(end)}</title>"
            y = scale.y(rank) + 2 + (0 if instruction.op is Op.OFFLOAD else scale.bar - height)
            yield rect(instruction.op.value, scale.x(start), y, scale.bar_width(bar), height, inside=tip)


def _require_bytes(schedule: Schedule, memory: Any) -> None:
    """Check that ``memory`` has a number for every instruction of each of its ranks."""
    form = "{rank: numbers}, such as {r: m.by_instruction for r, m in lowered.memory_analysis().items()}"
    require_type("memory", memory, Mapping, form)
    for rank, sizes in memory.items():
        require_index("rank of memory", rank, schedule.ranks)
        if not isinstance(sizes, Sequence) or not all(isinstance(size, int) for size in sizes):
            raise TypeError(f"memory[{rank}]: got {shown(sizes)}, expected memory={form}")
        if len(sizes) != (count := len(list(schedule.instructions(rank)))):
            raise ValueError(
                f"memory[{rank}]: got {len(sizes)} numbers, rank {rank} has {count} instructions; draw the"
                " schedule that they are of, lowered.schedule"
            )


def _bytes_held(
    scale: _Scale, timeline: Timeline, rank: int, sizes: Sequence[int], most: int
) -> Iterator[str]:
    """Draw the bytes of a rank: from each compute instruction to the next, with what came in between."""
    row = list(zip(timeline.schedule.instructions(rank), timeline.starts[rank], strict=True))
    levels: list[tuple[float, int, str]] = []
    high = 0
    for (instruction, start), size in zip(row, sizes, strict=True):
        high = max(high, size)
        if instruction.op in COMPUTE or instruction.op is Op.STEP:
            levels.append((float(start), high, str(instruction)))
            high = 0
    bottom = scale.y(rank) + scale.row + _STRIP
    ends = [start for start, _, _ in levels[1:]] + [float(timeline.makespan)]
    for (start, size, name), end in zip(levels, ends, strict=bool(levels)):
        height, tip = _STRIP * size / (most or 1), f"<title>{size} bytes in {name} on rank {rank}</title>"
        width = (end - start) * scale.per_time
        yield rect("level", scale.x(start), bottom - height, width, height, inside=tip)
    yield text("ink", _LEFT + scale.width + 70, bottom - 6, f"{amount(max(sizes, default=0))} bytes")

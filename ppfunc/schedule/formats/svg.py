"""Draw a schedule in time as plain SVG: one row per rank, bars to scale, light and dark.

Colour says the kind of instruction, its strength which of the rank's stages it belongs to (the first
is the strongest), the number the microbatch: all bars of a colour have one, or none where one is too narrow.
An overlapped pair is a bar of two halves, the forward above. Collectives that take time are thin bars under
what runs beside them. At the right: how much of the time a rank is idle, and its peak of live activations,
in those of one microbatch in one rank's share of the model.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from html import escape
from math import ceil, floor, hypot, log10
from numbers import Real
from textwrap import fill
from typing import NamedTuple

from ppfunc._checks import naming_arguments, percent, require_index

from ..instruction import COMPUTE, KINDS, Kind, Op, Unit, parts_of
from ..proof.timeline import Timeline, simulate
from ..schedule import Schedule
from .grid import Bar, bars_of

_WHOLE = [op for op, kind in KINDS.items() if kind.label and op not in COMPUTE]
_THIN = 5.0  # pixels of the bar of a collective
_LEFT, _RIGHT, _BOTTOM = 76.0, 168.0, 44.0
_DIGIT = 6.8  # pixels of one digit at 11 px
_BOLD = 11.0  # pixels of a letter of the heading
_SCREEN = 1600.0  # pixels


def _colours(of: Callable[[Kind], str]) -> str:
    """Write the rules for the bars of each kind, several in a line."""
    rules = [f".{op} {{ fill: {of(kind)} }}".replace(" ", "\0") for op, kind in KINDS.items() if of(kind)]
    return fill(" ".join(rules), 87).replace("\0", " ")


_STYLE = f"""
.track {{ fill: #eceff4 }} .level {{ fill: #b4bdcc }}
{_colours(lambda kind: kind.colour)}
.n {{ fill: #ffffff; text-anchor: middle }} .n.half {{ font-size: 10px }}
.n.dark {{ fill: #3a2600 }} .n.pale {{ fill: #16202f }}"""
_DARK = f"""
.track {{ fill: #232a35 }} .level {{ fill: #566277 }}
{_colours(lambda kind: kind.dark)}
.n.pale {{ fill: #f2f4f8 }}"""

_EDGE = "\n.edge { stroke: #1c2330; stroke-width: 1.2; stroke-opacity: 0.5 }"
_EDGE_DARK = "\n.edge { stroke: #e8ebf1 }"
_NUMBER = '<text class="n'


Swatch = tuple[str, float, str]  # a drawing, its width, its label


class _Scale(NamedTuple):
    """Time and ranks on the page, in pixels."""

    per_time: float
    width: float
    row: float
    top: float

    def x(self, time: float) -> float:
        return _LEFT + time * self.per_time

    def y(self, rank: int) -> float:
        return self.top + rank * self.row

    def bar_width(self, bar: Bar) -> float:
        # A hairline of the paper between bars, so that equal neighbours can be told apart.
        return max((bar.end - bar.start) * self.per_time - 0.8, 0.4)

    @property
    def bar(self) -> float:
        return self.row - 4


@naming_arguments
def to_svg(schedule: Schedule | Timeline, *, width: float | None = None, edges: Iterable[int] = ()) -> str:
    """Return the picture of a schedule in time as the text of an SVG file.

    Messages and loads take no space, nor does what takes no time.

    Args:
        schedule: schedule, which is simulated with the default costs; or a timeline of a schedule, simulated
            or measured (see :func:`~ppfunc.schedule.proof.timeline.timeline_of`).
        width: width of the picture, in pixels from 960 to 100000; by default such that most bars have room
            for their number, at most 1600.
        edges: the microbatches whose edges are drawn, forward and back, as lines from the instruction that
            makes a value to the instructions that take it; none by default.

    Raises:
        ScheduleError: ``schedule`` is no schedule.
        ValueError: a width out of range, or a microbatch that does not exist.
    """
    timeline = schedule if isinstance(schedule, Timeline) else simulate(schedule)
    units = "units of its costs" if timeline is schedule else "F, I and W take 1 each"
    made = "measured, seconds" if timeline.measured else "predicted, seconds"
    origin = made if timeline.seconds else f"simulated, {units}"
    schedule = timeline.schedule
    if width is not None:
        require_width(width, 960)
    rows, whole = bars_of(timeline), bars_of(timeline, _WHOLE)
    makespan = float(timeline.makespan)
    across = _across(schedule, rows, makespan) if width is None else width - _LEFT - _RIGHT
    timed = {bar.instruction.op for row in whole for bar in row if bar.end > bar.start}
    shades = {s: n for r in range(schedule.ranks) for n, s in enumerate(schedule.stages_of(r))}
    edges = tuple(edges)
    entries, top = legend(_swatches(schedule, rows, timed, edges), _LEFT + across + _RIGHT, 72)
    high = 30.0 if len(rows) <= 16 or any(bar.instruction.parts for row in rows for bar in row) else 22.0
    scale = _Scale(across / (makespan or 1.0), across, high, top)
    narrow = _narrow(schedule, scale, rows, shades)
    facts = _facts(timeline)
    room = int((across + _RIGHT) / _BOLD) - len(origin) - 2
    heading = f"{clipped(schedule.name, min(room, _LONGEST))}: {origin}"
    elements = [
        text("ink h", _LEFT, 34, heading),
        text("soft", _LEFT, 56, " · ".join(facts)),
        *entries,
        *_axis(scale, timeline),
    ]
    for rank, row in enumerate(rows):
        elements += [
            *_margins(scale, timeline, rank),
            *_bars(scale, timeline, rank, row, shades, narrow),
            *_whole_bars(scale, timeline, rank, whole[rank]),
        ]
    if drawn := [*_edges(schedule, scale, rows, edges)]:  # under the numbers
        elements = sorted([*elements, *drawn], key=lambda element: element.startswith(_NUMBER))
    size = _LEFT + scale.width + _RIGHT, scale.y(len(rows)) + _BOTTOM
    style, dark = (_STYLE + _EDGE, _DARK + _EDGE_DARK) if drawn else (_STYLE, _DARK)
    return page(heading, _spoken(timeline, facts), *size, style, dark, elements)


def _across(schedule: Schedule, rows: list[list[Bar]], makespan: float) -> float:
    """Return the pixels of the bars of all the time, such that three bars in four have room for a number."""
    durations = sorted(bar.end - bar.start for row in rows for bar in row)
    parts = (part for row in rows for bar in row for part in parts_of(bar.instruction))
    digits = max((len(schedule.numbered(part.microbatch)) for part in parts), default=1)
    typical = durations[len(durations) // 4] if durations else makespan
    wanted = (_DIGIT * digits + 5) * makespan / typical if typical else 0.0
    return min(max(wanted, 720.0), _SCREEN - _LEFT - _RIGHT)


def _narrow(
    schedule: Schedule, scale: _Scale, rows: list[list[Bar]], shades: Mapping[int, int]
) -> Set[tuple[Op, int]]:
    """Return the kinds and shades of bars that are too narrow for their numbers."""
    return {
        (bar.instruction.op, shades.get(bar.instruction.stage, 0))
        for row in rows
        for bar in row
        for part in parts_of(bar.instruction)
        if scale.bar_width(bar) < _DIGIT * len(schedule.numbered(part.microbatch)) + 1
    }


def _facts(timeline: Timeline) -> list[str]:
    schedule, size = timeline.schedule, max(timeline.peak_activations)
    counts = (
        (schedule.ranks, "rank", "s"),
        (schedule.stages, "stage", "s"),
        (schedule.microbatches, "microbatch", "es"),
    )
    return [
        *(f"{n} {word}{plural * (n != 1)}" for n, word, plural in counts),
        *([f"{schedule.slices} slices to a sequence"] if schedule.slices > 1 else []),
        f"makespan {timeline.time(timeline.makespan)}",
        f"bubble {percent(timeline.bubble)}",
        f"bubble of the span {percent(timeline.span_bubble)}",
        f"peak activations {number(max(timeline.peaks))}" + f" ({amount(size)})" * timeline.sized,
    ]


def _spoken(timeline: Timeline, facts: list[str]) -> str:
    """Describe the picture in words: the facts of the whole, then of every rank."""
    ranks = (
        f"rank {rank}: idle {_idle(timeline, rank)}, peak activations {number(peak)}"
        for rank, peak in enumerate(timeline.peaks)
    )
    return f"A row per rank, time to the right. {', '.join(facts)}. {'; '.join(ranks)}."


def _idle(timeline: Timeline, rank: int) -> str:
    return percent(timeline.idle[rank] / (timeline.makespan or 1), 0)


def legend(swatches: Iterable[Swatch], width: float, y: float) -> tuple[list[str], float]:
    """Return the entries of the legend, in lines of at most ``width`` from ``y``, and where it ends below."""
    x, entries = _LEFT, list[str]()
    for swatch, size, label in swatches:
        length = size + 30 + 6 * len(label)
        if x + length > width:
            x, y = _LEFT, y + 20
        at = f"translate({number(x)} {number(y)})"
        entries.append(f'<g transform="{at}">{swatch}{text("ink", size + 6, 11, label)}</g>')
        x += length
    return entries, y + 32 * bool(entries)


def _swatches(
    schedule: Schedule, rows: list[list[Bar]], timed: Set[Op], edges: Sequence[int]
) -> Iterator[Swatch]:
    """Yield the entries of the legend."""
    seen = [bar.instruction for row in rows for bar in row]
    kinds = timed | {part.op for i in seen for part in parts_of(i)}
    for op, kind in KINDS.items():
        if op in kinds and kind.label:
            yield rect(op.value, 0, 0, 14, 14, 'rx="2"'), 14, kind.label
    if any(i.parts for i in seen):
        yield rect("F", 0, 0, 14, 7) + rect("B", 0, 7, 14, 7), 14, "overlapped pair"
    chunks, least = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks)), _least(schedule)
    for shades, things in ((chunks, "stages of a rank"), (schedule.slices, "slices of a sequence")):
        if shades > 1:
            strengths = (f'fill-opacity="{number(_strength(n, shades, least))}"' for n in range(shades))
            swatch = "".join(rect("F", 14 * n, 0, 14, 14, strength) for n, strength in enumerate(strengths))
            yield swatch, 14 * shades, f"the {shades} {things}, in order"
    if edges and schedule.edges:
        label = f"values of microbatch{'es' * (len(edges) > 1)} {', '.join(map(str, edges))}"
        yield line(0, 7, 14, 7, "edge"), 14, clipped(label)


_PALEST = 0.45  # on which a label can be read


def _least(schedule: Schedule) -> float:
    """Return the opacity of the last shade; shades of stages and of slices are multiplied."""
    several = schedule.stages > schedule.ranks and schedule.slices > 1
    return _PALEST**0.5 if several else _PALEST


def _strength(shade: int, shades: int, least: float) -> float:
    return 1.0 if shades == 1 else 1 - (1 - least) * shade / (shades - 1)


def _axis(scale: _Scale, timeline: Timeline) -> Iterator[str]:
    top, bottom = scale.y(0), scale.y(timeline.schedule.ranks)
    for rank in range(timeline.schedule.ranks):
        yield rect("track", _LEFT, scale.y(rank) + 2, scale.width, scale.bar)
    for time in ticks(0, float(timeline.makespan), scale.width):
        yield line(scale.x(time), top, scale.x(time), bottom + 5)
        yield text("soft mid", scale.x(time), bottom + 18, timeline.time(time) if time else "0")
    yield text("soft end", _LEFT - 10, bottom + 18, "time")
    yield text("soft end", _LEFT + scale.width + 52, top - 6, "idle")
    yield text("soft", _LEFT + scale.width + 70, top - 6, "peak activations")


def _margins(scale: _Scale, timeline: Timeline, rank: int) -> Iterator[str]:
    """Write the name of the rank at the left, its idle share and its memory at the right."""
    middle, right = scale.y(rank) + scale.row / 2 + 4, _LEFT + scale.width
    peak, most = timeline.peaks[rank], max(timeline.peaks) or 1.0
    yield text("ink end", _LEFT - 10, middle, f"rank {rank}")
    yield text("soft end", right + 52, middle, _idle(timeline, rank))
    yield rect("level", right + 70, scale.y(rank) + scale.row / 2 - 5, 56 * peak / most, 10, 'rx="2"')
    yield text("ink", right + 76 + 56 * peak / most, middle, number(peak))


def _bars(
    scale: _Scale, timeline: Timeline, rank: int, row: list[Bar],
    shades: Mapping[int, int], narrow: Set[tuple[Op, int]],
) -> Iterator[str]:  # fmt: skip
    schedule, chunks = timeline.schedule, 1 + max(shades.values())
    slices, least = schedule.per_sequence, _least(schedule)
    for bar in row:
        instruction, start, end = bar
        parts, width = parts_of(instruction), scale.bar_width(bar)
        height = scale.bar / len(parts)
        tip = f"<title>{instruction} on rank {rank}, {timeline.time(start)} to {timeline.time(end)}</title>"
        for n, part in enumerate(parts):
            strength = _strength(shades.get(part.stage, 0), chunks, least)
            strength *= _strength((part.microbatch or 0) % slices, slices, least)
            y = scale.y(rank) + 2 + n * height
            faded = "" if strength == 1 else f'fill-opacity="{number(strength)}"'
            drawn = height - 0.6 if n + 1 < len(parts) else height
            yield rect(part.op.value, scale.x(start), y, width, drawn, faded, tip)
            if (instruction.op, shades.get(instruction.stage, 0)) not in narrow:
                tone = " pale" if strength < 0.75 else " dark" * (part.op is Op.W)
                kind = "n" + tone + " half" * (len(parts) > 1)
                yield text(
                    kind, scale.x(start) + width / 2, y + height / 2 + 4, schedule.numbered(part.microbatch)
                )


def _edges(
    schedule: Schedule, scale: _Scale, rows: list[list[Bar]], microbatches: Iterable[int]
) -> Iterator[str]:
    """Draw lines for the values of microbatches, from the bar that makes a value to the bars that take it."""
    bars = {
        (part.op is Op.F, part.stage, part.microbatch): (scale.y(rank) + scale.row / 2, bar)
        for rank, row in enumerate(rows)
        for bar in row
        for part in parts_of(bar.instruction)
        if part.op in (Op.F, Op.B, Op.I)
    }
    for m in microbatches:
        require_index("edges", m, schedule.microbatches)
        for a, b in schedule.edges:
            later = m + schedule.shift(a, b)
            for giver, taker in (((True, a, m), (True, b, later)), ((False, b, m), (False, a, m))):
                if giver in bars and taker in bars:
                    (y, made), (to, used) = bars[giver], bars[taker]
                    yield line(scale.x(made.end), y, scale.x(used.start), to, "edge")


def _whole_bars(scale: _Scale, timeline: Timeline, rank: int, row: list[Bar]) -> Iterator[str]:
    """Draw bars for optimizer steps, and thin bars for collectives and copies, where they take time."""
    for bar in row:
        instruction, start, end = bar
        if end > start:
            unit = KINDS[instruction.op].unit
            height = scale.bar if unit is Unit.RANK else _THIN
            tip = (
                f"<title>{instruction} on rank {rank}, {timeline.time(start)} to {timeline.time(end)}</title>"
            )
            y = scale.y(rank) + 2 + (0 if unit is Unit.OUT else scale.bar - height)
            yield rect(instruction.op.value, scale.x(start), y, scale.bar_width(bar), height, inside=tip)


_WIDEST, _LONGEST = 100_000, 60  # pixels of a picture, letters of a name in it
_FONT = (
    '.ppfunc { font: 11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;'
    " font-variant-numeric: tabular-nums }"
)
_PAGE_STYLE = """
.paper { fill: #ffffff } .ink { fill: #1c2330 } .soft { fill: #667085 } .tick { stroke: #d5dae3 }
.h { font-size: 18px; font-weight: 600 } .end { text-anchor: end } .mid { text-anchor: middle }"""
_PAGE_DARK = """
.paper { fill: #12161d } .ink { fill: #e8ebf1 } .soft { fill: #98a2b3 } .tick { stroke: #333c4a }"""


def require_width(width: float, least: int) -> None:
    """Check the width of a picture, in pixels.

    Raises:
        ValueError: no number, or one out of range.
    """
    if not isinstance(width, Real) or not least <= width <= _WIDEST:
        raise ValueError(f"width is {width!r}, expected a number of pixels from {least} to {_WIDEST}")


def page(
    title: str,
    description: str,
    width: float,
    height: float,
    style: str,
    dark: str,
    elements: Iterable[str],
) -> str:
    """Return a picture: ``style`` for its classes, and ``dark`` for those that differ on a dark page.

    Title and description are for readers who cannot see it.
    """
    size = f'width="{number(width)}" height="{number(height)}"'
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ppfunc" role="img" viewBox="0 0 {number(width)}'
            f' {number(height)}" {size}>'
        ),
        f"<title>{escaped(title)}</title>",
        f"<desc>{escaped(description)}</desc>",
        (
            f"<style>\n{_FONT}{_scoped(_PAGE_STYLE + style)}\n@media (prefers-color-scheme: dark)"
            f" {{{_scoped(_PAGE_DARK + dark)}\n}}\n</style>"
        ),
        f'<rect class="paper" {size}/>',
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _scoped(style: str) -> str:
    """Restrict CSS rules to the picture: notebooks put pictures into their own page."""
    return re.sub(r"(?<![\w.])\.(?=[a-zA-Z])", ".ppfunc .", style)


def rect(
    kind: str, x: float, y: float, width: float, height: float, extra: str = "", inside: str = ""
) -> str:
    """Draw a rectangle of the class ``kind``."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    body = f'rect class="{kind}" {place} {extra}'.rstrip()
    return f"<{body}>{inside}</rect>" if inside else f"<{body}/>"


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "tick") -> str:
    """Draw a line of the class ``kind``."""
    return f'<line class="{kind}" x1="{number(x1)}" x2="{number(x2)}" y1="{number(y1)}" y2="{number(y2)}"/>'


def text(kind: str, x: float, y: float, content: str) -> str:
    """Write a text of the class ``kind``."""
    return f'<text class="{kind}" x="{number(x)}" y="{number(y)}">{escaped(content)}</text>'


def escaped(content: str) -> str:
    """Escape a text of lines for XML; control characters, which XML cannot hold, become ``?``."""
    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in content), quote=False)


def number(value: float) -> str:
    """Write a number with at most two decimals, without trailing zeros."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


def amount(memory: float, unit: str = "") -> str:
    """Write an amount of memory, in activations or in a unit: from ten thousand on with k, M, G or T."""
    power = next((n for n in (4, 3, 2, 1) if memory >= 10.0 ** (3 * n)), 0) if memory >= 10_000 else 0
    written = f"{memory / 10.0 ** (3 * power):.3g}" if power else number(memory)
    return f"{written} {' kMGT'[power]}{unit}".replace("  ", " ").rstrip()


def clipped(name: str, most: int = _LONGEST) -> str:
    """Write a name in at most ``most`` letters, by default 60."""
    return name if len(name) <= most else name[: most - 2] + ".."


def short(value: float) -> str:
    """Write a number of any unit (seconds, multiples of a forward) in six digits."""
    return f"{float(value):.6g}"


def ticks(low: float, high: float, pixels: float, apart: float = 70) -> Iterator[float]:
    """Yield the ticks of an axis of ``pixels``, at least ``apart`` pixels apart: multiples of 1, 2 or 5."""
    if high <= low:
        return
    least = apart * (high - low) / pixels
    power = 10.0 ** floor(log10(least))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= least * 0.999)
    for n in range(ceil(low / step * 0.999999), int(high / step * 1.000001) + 1):
        yield n * step


# Pixels of a line of text, of a letter in it, of a point, beside it, of a line of the key.
_LINE, _LETTER, _RADIUS, _CLEAR, _KEY = 14.0, 6.0, 5.0, 9.0, 18.0
_COLUMNS = _LEFT, _LEFT + 34, _LEFT + 104, _LEFT + 174  # pixels of the columns of the key
_TRIES, _WRAPPED = 60, 40  # distances of a label from its point, letters of a line of a label
_POINT_STYLE = """
.point { fill: #3f72d0 } .twice { fill: #e5a62f } .over { fill-opacity: 0.35 } .lead { stroke: #8a96aa }
.limit { stroke: #c04a4a; stroke-width: 1.5; stroke-dasharray: 5 4 } .told { fill: #b23c3c }"""
_POINT_DARK = """
.point { fill: #5f8df0 } .twice { fill: #e5ad42 } .lead { stroke: #7b889f }
.limit { stroke: #e07272 } .told { fill: #ee8a8a }"""


class Point(NamedTuple):
    """A point of a picture: its figures, its class, its label, and what it is in words."""

    x: float
    y: float
    kind: str
    label: str
    tip: str


class Axis(NamedTuple):
    """An axis of a picture: what it shows, how its numbers are written, and whether it begins at 0."""

    caption: str
    write: Callable[[float], str]
    whole: bool = False


_Pixel = Callable[[float], float]  # of a figure


def _fitted(
    axis: Axis, figures: Sequence[float], start: float, end: float, apart: float
) -> tuple[_Pixel, list[tuple[float, str]]]:
    """Lay an axis between two pixels; it begins at 0, unless most of it were empty.

    Returns:
        The place of a figure; the place and the text of each tick.
    """
    low, high = min(figures, default=0.0), max(figures, default=0.0)
    low = 0.0 if axis.whole or low < high / 3 else low - max(0.08 * (high - low), 0.02 * low)
    high += max(0.08 * (high - low), 0.02 * high) or 1.0

    def at(figure: float) -> float:
        return start + (figure - low) / (high - low) * (end - start)

    return at, [(at(n), axis.write(n)) for n in ticks(low, high, abs(end - start), apart)]


def draw(
    points: Sequence[Point], title: str, description: str, width: float | None, across: Axis, upwards: Axis,
    meaning: Mapping[str, str], *, limit: Sequence[tuple[float, str]] = (), key: Sequence[Sequence[str]] = (),
) -> str:  # fmt: skip
    """Draw points with labels as an SVG file; of points in one place, the labels stand together.

    Args:
        points: points, of the classes ``point``, ``twice`` and ``over``.
        title, description: texts for all readers, and for readers who cannot see the picture.
        width: width of the picture, in pixels from 720 to 100000; by default 900.
        across, upwards: the axes.
        meaning: words of the legend for the classes; it has those that are drawn.
        limit: numbers on the axis across with a line, and the label of each.
        key: cells of the lines below, in four columns, the first line their heads.
    """
    width = 900 if width is None else width
    require_width(width, 720)
    kinds = {kind for point in points for kind in point.kind.removeprefix("point ").split()}
    signs = {
        kind: Point(7, 7, "point " * (kind == "over") + kind, "", "") for kind in meaning if kind in kinds
    }
    shown, top = legend([(_mark(sign), 14, meaning[kind]) for kind, sign in signs.items()], width, 50)
    top, labels = top + 36, [point.label for point in points if point.label]
    bottom = top + max(440.0, 24.0 * len(labels))
    right = width - min(46 + _LETTER * max(map(len, labels), default=0), 150.0)
    x, below = _fitted(across, [*(p.x for p in points), *(at for at, _ in limit)], _LEFT, right, 70)
    y, beside = _fitted(upwards, [p.y for p in points], bottom, top, 40)
    placed = _placed(points, x, y)
    elements = [
        text("ink h", _LEFT, 34, title),
        *shown,
        *(line(at, top, at, bottom + 5) for at, _ in below),
        *(line(_LEFT - 5, at, right, at) for at, _ in beside),
        *(text("soft mid", at, bottom + 18, label) for at, label in below),
        *(text("soft end", _LEFT - 10, at + 4, label) for at, label in beside),
        text("soft", _LEFT, top - 22, upwards.caption),
        text("soft end", right, bottom + 40, across.caption),
        *(line(x(at), top, x(at), bottom, "limit") for at, _ in limit),
        *(text("told mid", x(at), top - 7, label) for at, label in limit),
        *_labels(placed, width, top, bottom),
        *map(_mark, placed),
        *(
            text(
                "ink" if n else "soft", at, bottom + 66 + n * _KEY, clipped(cell, int((width - at) / _LETTER))
            )
            for n, row in enumerate(key)
            for at, cell in zip(_COLUMNS, row, strict=True)
            if cell
        ),
    ]
    height = bottom + 60 + _KEY * (len(key) + bool(key))
    return page(title, description, width, height, _POINT_STYLE, _POINT_DARK, elements)


def _placed(points: Sequence[Point], across: _Pixel, upwards: _Pixel) -> list[Point]:
    """Return the points on the page from top to bottom; merge points of the same place."""
    by_place: dict[tuple[int, int], list[Point]] = {}
    for p in points:
        by_place.setdefault((round(across(p.x)), round(upwards(p.y))), []).append(p)
    return [
        Point(
            x,
            y,
            ("twice" if any("twice" in p.kind for p in there) else "point")
            + (" over" if all("over" in p.kind for p in there) else ""),
            fill(", ".join(p.label for p in there if p.label), _WRAPPED),
            "; ".join(p.tip for p in there),
        )
        for (x, y), there in sorted(by_place.items(), key=lambda item: item[0][1])
    ]


def _mark(point: Point) -> str:
    x, y, kind, _, tip = point
    body = f'circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="{number(_RADIUS)}"'
    return f"<{body}><title>{escaped(tip)}</title></circle>" if tip else f"<{body}/>"


def _labels(points: list[Point], width: float, top: float, bottom: float) -> Iterator[str]:
    """Put each label at the nearest place where it covers nothing, nor does the line to it from its point."""
    taken = [
        _Box(point.x - _CLEAR, point.y - _RADIUS, point.x + _CLEAR, point.y + _RADIUS) for point in points
    ]
    labels = []  # drawn after all lines, which they interrupt
    for point, own in [pair for pair in zip(points, taken, strict=True) if pair[0].label]:
        others = [box for box in taken if box is not own]
        boxes = [*_places(point)]
        inside = [
            b for b in boxes
            if b.left > _LEFT and b.right < width and b.top > top - 6 and b.bottom < bottom
        ]  # fmt: skip
        free = [b for b in inside if not any(map(b.covers, taken))]
        clear = (b for b in free if not any(dot.covers(o) for dot in _lead(point, b) for o in others))
        box = next(clear, next(iter(free), (inside or boxes)[0]))
        lead = _lead(point, box)
        taken += [box, *lead]
        if lead:
            yield line(point.x, point.y, lead[-1].left, lead[-1].top, "lead")
        labels.append(rect("paper", box.left - 2, box.top, box.right - box.left + 4, box.bottom - box.top))
        for n, label in enumerate(point.label.split("\n"), 1):
            labels.append(text("ink label", box.left, box.top + n * _LINE - 3, label))
    yield from labels


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _lead(point: Point, box: _Box) -> list[_Box]:
    """Return the line from a point to its label as a row of dots, empty where the label is beside it."""
    x, y = min(max(point.x, box.left), box.right), min(max(point.y, box.top), box.bottom)
    if y == point.y:
        return []
    length = hypot(x - point.x, y - point.y)
    shares = (n / length for n in range(int(_RADIUS) + 1, int(length), 3))
    dots = [(point.x + share * (x - point.x), point.y + share * (y - point.y)) for share in (*shares, 1)]
    return [_Box(left, top, left + 1, top + 1) for left, top in dots]


def _places(point: Point) -> Iterator[_Box]:
    """Yield places of a label: right of its point, left, below and above, aside; then ever farther away."""
    lines = point.label.split("\n")
    length, height = _LETTER * max(map(len, lines)), _LINE * len(lines)
    for away in range(_TRIES):
        for side in (1, -1) if away else (1,):
            y = point.y + side * away * _LINE / 2 - height / 2
            aside = _CLEAR + away * _LINE
            for x in (_CLEAR, -_CLEAR - length, -length / 2, aside, -aside - length):
                yield _Box(point.x + x, y, point.x + x + length, y + height)

"""Draw values with two figures as points of a picture, each with a label that covers no other."""

from collections.abc import Callable, Iterator, Sequence
from math import hypot
from typing import NamedTuple

from .elements import line, number, page, require_width, text, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 150.0, 84.0, 60.0
_LINE, _LETTER, _RADIUS, _CLEAR = (
    14.0,
    6.0,
    5.0,
    9.0,
)  # pixels of a line of text, of a letter in it, of a point, beside it
_TRIES = 60  # distances of a label from its point
_STYLE = """
.point { fill: #3f72d0 } .twice { fill: #e5a62f } .over { fill-opacity: 0.35 } .lead { stroke: #8a96aa }
.label { fill: #1c2330; paint-order: stroke; stroke: #ffffff; stroke-width: 3px }"""
_DARK = """
.point { fill: #5f8df0 } .twice { fill: #e5ad42 } .lead { stroke: #7b889f }
.label { fill: #e8ebf1; stroke: #12161d }"""


class Point(NamedTuple):
    """A point of a picture: its figures, its class, and its label."""

    x: float
    y: float
    kind: str
    label: str


Axis = tuple[str, Callable[[float], str]]  # what it shows, and how its numbers are written


def draw(
    points: Sequence[Point], title: str, description: str, width: float | None, across: Axis, upwards: Axis
) -> str:
    """Draw points with labels as an SVG file; of points in one place, the labels stand together.

    Args:
        points: of the classes ``point``, ``twice`` and ``over``.
        title, description: for all readers, and for those who cannot see it.
        width: in pixels from 720 to 100000; by default 900.
        across, upwards: the axes, which begin at 0.
    """
    width = 900 if width is None else width
    require_width(width, 720)
    height = _TOP + max(440.0, 24.0 * sum(bool(point.label) for point in points)) + _BOTTOM
    right, bottom = width - _RIGHT, height - _BOTTOM
    most = [1.05 * max(values) or 1.0 for values in zip(*((p.x, p.y) for p in points), strict=True)]
    placed = _placed(points, [(right - _LEFT) / most[0], (bottom - _TOP) / most[1]], bottom)
    head = [text("ink h", _LEFT, 34, title), *_axes(most, right, bottom, across, upwards)]
    elements = [*head, *_labels(placed, width, bottom), *map(_mark, placed)]
    return page(title, description, width, height, _STYLE, _DARK, elements)


def _placed(points: Sequence[Point], scale: list[float], bottom: float) -> list[Point]:
    """Return the points on the page from top to bottom; merge those in the same place."""
    by_place: dict[tuple[int, int], list[Point]] = {}
    for p in points:
        place = round(_LEFT + p.x * scale[0]), round(bottom - p.y * scale[1])
        by_place.setdefault(place, []).append(p)
    return [
        Point(
            x,
            y,
            ("twice" if any("twice" in p.kind for p in there) else "point")
            + (" over" if all("over" in p.kind for p in there) else ""),
            ", ".join(p.label for p in there if p.label),
        )
        for (x, y), there in sorted(by_place.items(), key=lambda item: item[0][1])
    ]


def _axes(most: list[float], right: float, bottom: float, across: Axis, upwards: Axis) -> Iterator[str]:
    yield text("soft", _LEFT, 56, upwards[0])
    for value in ticks(most[0], right - _LEFT):
        x = _LEFT + value / most[0] * (right - _LEFT)
        yield line(x, _TOP, x, bottom + 5)
        yield text("soft mid", x, bottom + 18, across[1](value))
    for value in ticks(most[1], bottom - _TOP, 40):
        y = bottom - value / most[1] * (bottom - _TOP)
        yield line(_LEFT - 5, y, right, y)
        yield text("soft end", _LEFT - 10, y + 4, upwards[1](value))
    yield text("soft end", right, bottom + 40, across[0])


def _mark(point: Point) -> str:
    x, y, kind, _ = point
    return f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="{number(_RADIUS)}"/>'


def _labels(points: list[Point], width: float, bottom: float) -> Iterator[str]:
    """Put each label at the nearest place where it covers nothing, nor does the line to it from its point."""
    taken = [
        _Box(point.x - _CLEAR, point.y - _RADIUS, point.x + _CLEAR, point.y + _RADIUS) for point in points
    ]
    labels = []  # drawn after all lines, which they interrupt
    for point, own in zip(points, list(taken), strict=True):
        others = [box for box in taken if box is not own]
        boxes = list(_places(point, _LETTER * len(point.label)))
        inside = [b for b in boxes if b.left > _LEFT and b.right < width and b.bottom < bottom]
        free = [b for b in inside if not any(map(b.covers, taken))]
        clear = (b for b in free if not any(dot.covers(o) for dot in _lead(point, b) for o in others))
        box = next(clear, next(iter(free), boxes[0]))
        lead = _lead(point, box)
        taken += [box, *lead]
        if lead:
            yield line(point.x, point.y, lead[-1].left, lead[-1].top, "lead")
        labels += [text("label", box.left, box.bottom - 3, point.label)] * bool(point.label)
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
    """Return the line from a point to its label as a row of dots; none where the label is beside it."""
    x, y = min(max(point.x, box.left), box.right), min(max(point.y, box.top), box.bottom)
    if y == point.y:
        return []
    length = hypot(x - point.x, y - point.y)
    shares = (n / length for n in range(int(_RADIUS) + 1, int(length), 3))
    dots = [(point.x + share * (x - point.x), point.y + share * (y - point.y)) for share in (*shares, 1)]
    return [_Box(left, top, left + 1, top + 1) for left, top in dots]


def _places(point: Point, length: float) -> Iterator[_Box]:
    """Yield places of a label: right of its point, left, below and above, then ever farther away."""
    for away in range(_TRIES):
        for side in (1, -1) if away else (1,):
            y = point.y + side * away * _LINE / 2
            for x in (point.x + _CLEAR, point.x - _CLEAR - length, point.x - length / 2):
                yield _Box(x, y - _LINE / 2, x + length, y + _LINE / 2)

"""Write the page and the elements of SVG pictures, light and dark."""

import re
from collections.abc import Iterable, Iterator
from html import escape
from math import floor, log10
from numbers import Real

_WIDEST, _LONGEST = 100_000, 60  # pixels of a picture, letters of a name in it
_FONT = (
    '.ppfunc { font: 11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;'
    " font-variant-numeric: tabular-nums }"
)
_STYLE = """
.paper { fill: #ffffff } .ink { fill: #1c2330 } .soft { fill: #667085 } .tick { stroke: #d5dae3 }
.h { font-size: 18px; font-weight: 600 } .end { text-anchor: end } .mid { text-anchor: middle }"""
_DARK = """
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
            f"<style>\n{_FONT}{_scoped(_STYLE + style)}\n@media (prefers-color-scheme: dark)"
            f" {{{_scoped(_DARK + dark)}\n}}\n</style>"
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
    """Escape a text for XML; control characters, which XML cannot hold, become ``?``."""
    return escape("".join(c if c.isprintable() else "?" for c in content), quote=False)


def number(value: float) -> str:
    """Write a number with at most two decimals, none if it is whole."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


def amount(memory: float) -> str:
    """Write an amount of memory, in activations or bytes: from ten thousand on with k, M, G or T."""
    power = next((n for n in (4, 3, 2, 1) if memory >= 10.0 ** (3 * n)), 0) if memory >= 10_000 else 0
    return f"{memory / 10.0 ** (3 * power):.3g} {'kMGT'[power - 1]}" if power else number(memory)


def clipped(name: str) -> str:
    """Write a name in at most 60 letters."""
    return name if len(name) <= _LONGEST else name[: _LONGEST - 2] + ".."


def short(value: float) -> str:
    """Write a number of any unit (seconds, multiples of a forward) in six digits."""
    return f"{float(value):.6g}"


def ticks(most: float, pixels: float, apart: float = 70) -> Iterator[float]:
    """Yield round numbers from 0 to ``most`` for an axis of ``pixels``, at least ``apart`` pixels apart."""
    if most <= 0:
        return
    least = apart * most / pixels
    power = 10.0 ** floor(log10(least))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= least * 0.999)
    for n in range(int(most / step * 1.000001) + 1):
        yield n * step

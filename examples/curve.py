"""A loss curve as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isfinite, log10

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 64, 24, 64, 48

STYLE = """
svg { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
svg { font-variant-numeric: tabular-nums }
.paper { fill: #ffffff } .ink { fill: #1c2330 } .soft { fill: #667085 } .grid { stroke: #e3e7ee }
.curve { fill: none; stroke: #3f72d0; stroke-width: 1.6; stroke-linejoin: round } .mark { fill: #e5a62f }
.h { font-size: 18px; font-weight: 600 } .end { text-anchor: end } .mid { text-anchor: middle }
@media (prefers-color-scheme: dark) {
.paper { fill: #12161d } .ink { fill: #e8ebf1 } .soft { fill: #98a2b3 } .grid { stroke: #2b3340 }
.curve { stroke: #6c9bf5 }
}"""


def loss_curve(losses: Sequence[float], validations: Sequence[tuple[int, float]], title: str) -> str:
    """The text of an SVG file: loss in nats per byte over steps, and validation losses as dots. What is not
    finite is left out.
    """
    steps = max(len(losses), 1)
    drawn = [(step + 1, loss) for step, loss in enumerate(losses) if isfinite(loss)]
    dots = [(step, loss) for step, loss in validations if isfinite(loss)]
    levels = round_levels([loss for _, loss in (*drawn, *dots)])
    low, top = levels[0], levels[-1]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - loss) / (top - low)

    def text(kind: str, at_x: float, at_y: float, words: str) -> str:
        return f'<text class="{kind}" x="{at_x:.1f}" y="{at_y:.1f}">{words}</text>'

    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
            f' height="{HEIGHT}" role="img">'
        ),
        f"<title>{title}</title>",
        f"<desc>{described('Training', drawn)} {described('Validation', dots)}</desc><style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text("ink h", LEFT, 30, title),
        text("soft", LEFT, 50, "nats per byte over training steps"),
    ]
    for loss in levels:
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>'
        )
        lines.append(text("soft end", LEFT - 10, y(loss) + 4, f"{loss:.6g}"))
    lines += [
        text("soft mid", x(step), HEIGHT - BOTTOM + 22, str(step))
        for step in sorted({round(steps * k / 4) for k in range(5)})
    ]
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in drawn)
    lines.append(f'<polyline class="curve" points="{points}"/>')
    lines += [f'<circle class="mark" cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4"/>' for step, loss in dots]
    if dots:
        lines.append(text("ink end", WIDTH - RIGHT, TOP - 8, f"validation {dots[-1][1]:.3f}"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def round_levels(values: Sequence[float], most: int = 8) -> list[float]:
    """Round numbers apart by the same step, from below the least value to above the largest."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    least = max(high - low, 1e-3) / (most - 2)
    power = 10.0 ** floor(log10(least))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= least)
    return [n * step for n in range(floor(low / step), floor(high / step) + 2)]


def described(name: str, drawn: list[tuple[int, float]]) -> str:
    """The ends of a curve in words."""
    ends = [f"{loss:.3f} at step {step}" for step, loss in dict.fromkeys(drawn[:1] + drawn[-1:])]
    return f"{name} loss: {' to '.join(ends)}."

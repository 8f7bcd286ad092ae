"""A loss curve as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence

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


def loss_curve(losses: Sequence[float], validation: float, title: str) -> str:
    """The text of an SVG file: loss in nats per byte over steps, and the validation loss as a dot at the
    end.
    """
    top = max(6.0, *losses, validation) if losses else 6.0
    steps = max(len(losses), 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / top)

    def text(kind: str, at_x: float, at_y: float, words: str) -> str:
        return f'<text class="{kind}" x="{at_x:.1f}" y="{at_y:.1f}">{words}</text>'

    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
            f' height="{HEIGHT}">'
        ),
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text("ink h", LEFT, 30, title),
        text("soft", LEFT, 50, "nats per byte over training steps"),
    ]
    for loss in range(int(top) + 1):
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>'
        )
        lines.append(text("soft end", LEFT - 10, y(loss) + 4, str(loss)))
    lines += [
        text("soft mid", x(steps * k / 4), HEIGHT - BOTTOM + 22, str(round(steps * k / 4))) for k in range(5)
    ]
    points = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
    lines += [
        f'<polyline class="curve" points="{points}"/>',
        f'<circle class="mark" cx="{x(steps):.1f}" cy="{y(validation):.1f}" r="4"/>',
        text("ink end", x(steps), y(validation) - 26, f"validation {validation:.3f}"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"

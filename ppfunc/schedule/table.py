"""Print values as tables: on paper, at the prompt of IPython and in notebooks."""

from collections.abc import Iterable, Sequence
from typing import Any

_LINES, _COLUMNS = 32, 120  # of what is shown unasked


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return lines of cells, right-aligned: integers whole, other numbers in four digits, None as a blank.

    >>> print(table(["stage", "forward"], [[0, 1], [1, 0.123456]]))
    stage  forward
        0        1
        1   0.1235
    """
    lines = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str | int):
        return "" if value is None else str(value)
    return f"{float(value):.4g}"


def clipped(text: str) -> str:
    """Cut a text to a number of lines and columns, and say how many more lines there are."""
    lines = text.splitlines()
    shown = [line if len(line) <= _COLUMNS else line[: _COLUMNS - 2] + " …" for line in lines[:_LINES]]
    return "\n".join(shown if len(lines) <= _LINES else [*shown, f"… {len(lines) - _LINES} more lines"])


def show_table(value: Any, printer: Any, cycle: bool) -> None:
    """Show ``str(value)`` at IPython's top level, ``repr(value)`` inside other values (``_repr_pretty_``)."""
    printer.text(repr(value) if len(printer.stack) > 1 else clipped(str(value)))

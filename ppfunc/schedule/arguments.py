"""Refuse arguments of a wrong type or value by their names."""

from collections.abc import Iterable
from typing import Any

from ppfunc._text import shown


def require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Check that the argument ``name`` is of a type, or of one of several.

    Raises:
        TypeError: it is not; the message has the name, the value and ``expected``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")


def require_number(name: str, value: object, count: int) -> None:
    """Check that the argument ``name`` is one of so many ranks or stages.

    Raises:
        ValueError: it is no integer from 0 to ``count`` - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ValueError(f"{name}: got {value!r}, expected a number from 0 to {count - 1}")


def require_stages(name: str, value: Iterable[int], count: int) -> set[int]:
    """Check that the argument ``name`` holds stages, numbers below ``count``; return them.

    Raises:
        TypeError: it is not iterable.
        ValueError: an item is not a stage.
    """
    require_type(name, value, Iterable, "stages, such as [0, 1]")
    stages = list(value)
    for stage in stages:
        require_number(name, stage, count)
    return set(stages)

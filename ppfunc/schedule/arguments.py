"""Refuse arguments of a wrong type by their names."""

from typing import Any

from .._text import shown


def require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Check that the argument ``name`` is of a type, or of one of several.

    Raises:
        TypeError: naming the argument, what was got, and what is ``expected``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")

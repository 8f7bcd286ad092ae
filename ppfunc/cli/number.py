"""Read numbers from the command line."""

from typing import Any

from ppfunc.schedule.formats.text import shortened

_MOST, _LARGEST = 1_000_000, 1e100


def number(text: str) -> float:
    """Read a number; whole numbers stay whole, so that sums of them are exact.

    Raises:
        ValueError: ``text`` is not a number, or beyond 1e100.

    >>> number("3"), number("0.5")
    (3, 0.5)
    """
    value: float
    try:
        value = int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number, got {shortened(text)}") from None
    if abs(value) > _LARGEST and abs(value) != float("inf"):
        raise ValueError(f"expected a number up to {_LARGEST:g}, got {shortened(text)}")
    return value


def numbers(text: str) -> Any:
    """Read one number, or several apart by commas.

    >>> numbers("2"), numbers("1,2,0.5")
    (2, (1, 2, 0.5))
    """
    values = tuple(number(part) for part in text.split(","))
    return values if len(values) > 1 else values[0]


def count(text: str) -> int:
    """Read a whole number of things that can be counted out.

    Raises:
        ValueError: ``text`` is not a whole number, or is beyond a million.

    >>> count("8")
    8
    """
    try:
        value = int(text) if len(text) < 100 else _MOST + 1
    except ValueError:
        raise ValueError(f"expected a whole number, got {shortened(text)}") from None
    if abs(value) > _MOST:
        raise ValueError(f"expected a whole number up to {_MOST}, got {shortened(text)}")
    return value

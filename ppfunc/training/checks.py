"""Check the numbers that optimizers, rates, scales and norms are given."""

from math import inf
from numbers import Real
from typing import Any

from ppfunc._text import shown


def require_real(name: str, number: Any, mend: str = "") -> None:
    """Raise TypeError unless this is a number, finite or not."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} is {shown(number)}, expected a number{mend}")


def require_number(name: str, number: Any, least: float = 0.0, below: float = inf, mend: str = "") -> None:
    """Require a finite number of at least ``least``, less than ``below``.

    Raises:
        TypeError: no number.
        ValueError: another number.

    >>> require_number("betas[0]", 1.0, below=1.0)
    Traceback (most recent call last):
    ValueError: betas[0] is 1.0, expected a number of at least 0 and less than 1
    """
    require_real(name, number, mend)
    if not least <= float(number) < below:
        wanted = "a finite number" if below == inf else "a number"
        limit = "" if below == inf else f" and less than {below:g}"
        raise ValueError(f"{name} is {number}, expected {wanted} of at least {least:g}{limit}{mend}")


def require_positive(**numbers: Any) -> None:
    """Raise TypeError or ValueError unless these are finite numbers of more than 0."""
    for name, number in numbers.items():
        require_number(name, number)
        if number == 0:
            raise ValueError(f"{name} is {number}, expected a finite number of more than 0")

"""Refuse arguments of a wrong type or value by their names."""

from collections.abc import Iterable, Sequence
from math import inf
from numbers import Real
from typing import Any

from ._text import shown, suggestion


def require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Check that the argument ``name`` is of a type, or of one of several.

    Raises:
        TypeError: it is not; the message has the name, the value and ``expected``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")


def require_one_of(name: str, got: Any, known: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of the known names; suggest the nearest."""
    if got not in known:
        near = suggestion(got, known) if isinstance(got, str) else ""
        raise ValueError(f"{name}: got {got!r}, expected {' or '.join(map(repr, known))}{near}")


def require_counts(least: int = 1, /, **counts: object) -> None:
    """Check that every count, of ranks, stages, layers or microbatches, is an integer of at least ``least``.

    Args:
        least: the smallest count that makes sense.
        counts: the counts, by the names of the arguments that they were passed as.

    Raises:
        ValueError: one is not; says which.
    """
    for name, got in counts.items():
        if isinstance(got, bool) or not isinstance(got, int) or got < least:
            number = isinstance(got, float | int | str | None)
            model = "" if number else "; models and stages go to pp.value_and_grad(stages, loss_fn, schedule)"
            raise ValueError(
                f"{name} = {repr(got) if number else shown(got)}, expected an integer of at least {least}:"
                f" pass {name}={least} or more{model}"
            )


def require_index(name: str, value: object, count: int) -> None:
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
        require_index(name, stage, count)
    return set(stages)


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
        require_real(name, number)
        if not 0 < number < inf:
            raise ValueError(f"{name} is {number}, expected a finite number of more than 0")

"""Write the values of costs as JSON, and read them."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Rational
from typing import Any

from ..arguments import require_type
from .json import load
from .text import FormatError

_LONGEST = 2**20  # characters


def plain(value: Any) -> Any:
    """Return a value of costs as JSON has it."""
    if isinstance(value, Mapping):
        return {str(stage): plain(number) for stage, number in value.items()}
    if isinstance(value, Sequence):
        return [plain(number) for number in value]
    if value is None or not isinstance(value, Rational):
        return value if value is None else float(value)
    return int(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def read_values(text: str, names: Sequence[str]) -> dict[str, Any]:
    """Read an object with some of these names from JSON; raise ValueError for other text or keys."""
    expected = f"expected an object with some of {', '.join(names)}"
    require_type("text", text, str, "the text of a JSON object")
    if len(text) > _LONGEST:
        raise ValueError(f"got {len(text)} characters, expected at most {_LONGEST}")
    try:
        document = load(text)
    except FormatError as error:
        raise ValueError(f"{str(error).removeprefix('$: ')}; {expected}") from None
    if not isinstance(document, dict):
        raise ValueError(f"got {reprlib.repr(document)}, {expected}")
    unknown = [key for key in document if key not in names]
    if unknown:
        raise ValueError(f"has {reprlib.repr(unknown[0])}, {expected}")
    return {name: _read(name, value) for name, value in document.items()}


def _read(name: str, value: Any) -> Any:
    """Read the value ``name`` of costs from JSON; keep other than numbers, to be refused by name."""
    if isinstance(value, list):
        return tuple(_read(name, number) for number in value)
    if isinstance(value, dict):
        wrong = [key for key in value if not re.fullmatch("0|[1-9][0-9]{0,9}", key)]
        if wrong:
            raise ValueError(f"{name} has the key {reprlib.repr(wrong[0])}, expected the number of a stage")
        return {int(stage): _read(name, number) for stage, number in value.items()}
    if isinstance(value, str) and re.fullmatch("[0-9]{1,99}/[1-9][0-9]{0,99}", value):
        from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

        return Fraction(value)
    return value

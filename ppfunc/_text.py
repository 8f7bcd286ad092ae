"""Write names, values and foreign texts for errors."""

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the most similar of ``names``, or an empty text.

    >>> suggestion("shwo", ["show", "check"])
    "; did you mean 'show'?"
    """
    import difflib  # here, because it is needed for errors only

    by_letters = {other.lower(): other for other in names}
    similar = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return f"; did you mean {by_letters[similar[0]]!r}?" if similar else ""


def require_one_of(name: str, got: Any, known: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of the known names; suggest the nearest."""
    if got not in known:
        near = suggestion(got, known) if isinstance(got, str) else ""
        raise ValueError(f"{name}: got {got!r}, expected {' or '.join(map(repr, known))}{near}")


def shown(thing: Any) -> str:
    """Write a value, abridged and in one line, with its type.

    >>> shown(2.5)
    '2.5 of type float'
    """
    return f"{' '.join(reprlib.repr(thing).splitlines())} of type {type(thing).__name__}"


def limited(text: str, most: int = 2000) -> str:
    """Cut a foreign text, which may be very long, to ``most`` characters.

    >>> limited("x" * 20_000_000, 3)
    'xxx... (19999997 more characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"

"""Write names, values and foreign texts for errors."""

import reprlib
from collections.abc import Iterable
from typing import Any


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the most similar of ``names``, nothing where none is similar.

    >>> suggestion("shwo", ["show", "check"])
    "; did you mean 'show'?"
    """
    import difflib  # here, because it is needed for errors only

    similar = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def shown(thing: Any) -> str:
    """A value, abridged and in one line, and its type.

    >>> shown(2.5)
    '2.5 of type float'
    """
    return f"{' '.join(reprlib.repr(thing).splitlines())} of type {type(thing).__name__}"


def limited(text: str, most: int = 2000) -> str:
    """A text of somebody else's, which may be very long, up to so many characters.

    >>> limited("x" * 20_000_000, 3)
    'xxx... (19999997 more characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"

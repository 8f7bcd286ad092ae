"""Define the error of checkpoints, and show foreign names in it."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 200  # characters


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or none; or the ranks that save or load together cannot go on."""


def shown(name: object) -> str:
    r"""A foreign name as errors show it: control characters escaped, long ones cut.

    >>> print(shown("a\x1b[2J"))
    'a\x1b[2J'
    """
    text = repr(str(name))
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first names of several, and how many there are more.

    >>> print(listed("abcde"))
    'a', 'b', 'c' and 2 more
    """
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(shown, every[:most])) + more

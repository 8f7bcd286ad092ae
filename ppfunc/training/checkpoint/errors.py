"""Define the errors of checkpoints, and escape foreign names in them."""

import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike

_MOST = 200  # characters


class CheckpointError(RuntimeError):
    """Raised for a damaged or incomplete checkpoint, or if the ranks that save or load cannot go on."""


class RankError(CheckpointError):
    """Raised if another rank is gone, or failed with an error of its own: no checkpoint helps."""


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Turn errors of the operating system into CheckpointError, so that an earlier checkpoint is tried."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{escaped(name)} cannot be read: {error.strerror or error}") from error


def escaped(name: object) -> str:
    r"""Escape the control characters of a foreign name, and cut it if it is long.

    Other foreign values are cut before they are written: a list of lists may hold itself a million times.

    >>> print(escaped("a\x1b[2J"))
    'a\x1b[2J'
    """
    text = repr(str(name) if isinstance(name, str | PathLike | Exception) else reprlib.repr(name))
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def listed(names: Iterable[str], most: int = 3) -> str:
    """List the first of several names, and count the rest.

    >>> print(listed("abcde"))
    'a', 'b', 'c' and 2 more
    """
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(escaped, every[:most])) + more

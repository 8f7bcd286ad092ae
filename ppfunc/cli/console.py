"""Parse the words of a command line, and write what it prints. Every help has an example."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ppfunc._checks import limited
from ppfunc.schedule.instruction import shortened

_LONGEST = 4000


class CommandParser(argparse.ArgumentParser):
    """Parse a command line; errors are one line, without control characters.

    Args:
        example: command lines for the end of the help.
        options: those of ``argparse``.
    """

    def __init__(self, *, example: str = "", **options: Any) -> None:
        super().__init__(
            epilog=f"example:\n{example}" if example else None, formatter_class=_Formatter, **options
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{printable(f'{self.prog}: error: {message}')} (see {self.prog} --help)\n")


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of examples, and of tables of words, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def printable(text: str) -> str:
    r"""Return ``text`` for a terminal: escape control characters other than newlines, and cut long text.

    >>> printable("a\x1b[31m\nb")
    'a\\x1b[31m\nb'
    """
    return escaped(limited(text, _LONGEST))


def escaped(text: str) -> str:
    """Return ``text`` with every control character other than newlines escaped."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


MOST, _LARGEST = 1_000_000, 1e100


def number(text: str) -> float:
    """Read a number; whole numbers stay whole, so that sums of them are exact.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not a number, or beyond 1e100.

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
            raise argparse.ArgumentTypeError(f"expected a number, got {shortened(text)}") from None
    if abs(value) > _LARGEST and abs(value) != float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number up to {_LARGEST:g}, got {shortened(text)}")
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
        argparse.ArgumentTypeError: ``text`` is not a whole number, or is beyond a million.

    >>> count("8")
    8
    """
    try:
        value = int(text) if len(text) < 100 else MOST + 1
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {shortened(text)}") from None
    if abs(value) > MOST:
        raise argparse.ArgumentTypeError(f"expected a whole number up to {MOST}, got {shortened(text)}")
    return value


_OTHER_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".html")


def write(text: str, path: Path | None = None) -> None:
    """Write ``text`` to the file ``path``, or to standard output with its control characters escaped."""
    if path is None:
        sys.stdout.write(escaped(text))
    else:
        path.write_text(text, encoding="utf-8", newline="")


def require_folder(path: Path | None) -> None:
    """Refuse, before a long search, a file in a folder that is not there."""
    if path and not path.parent.is_dir():
        raise ValueError(f"--out {path}: no directory {path.parent}, make it first")


def form_of(path: Path | None, chosen: str | None, suffixes: Mapping[str, tuple[str, ...]]) -> str:
    """Return the chosen format, else that of the file's suffix, else the first.

    Args:
        path: where it is written; None for standard output.
        chosen: the value of ``--format``.
        suffixes: of every format.

    Raises:
        ValueError: the suffix is that of another format, or says none.

    >>> form_of(Path("x.svg"), None, {"grid": (".txt",), "svg": (".svg",)})
    'svg'
    """
    suffix = "" if path is None else path.suffix.lower()
    if not suffix:
        return chosen or next(iter(suffixes))
    forms = [form for form, own in suffixes.items() if suffix in own]
    if chosen is None and not forms:
        raise ValueError(
            f"--out {path}: its suffix says no format, give --format, one of {', '.join(suffixes)}"
        )
    if chosen is not None and chosen not in forms and (forms or suffix in _OTHER_PICTURES):
        raise ValueError(
            f"--out {path}: expected a name that ends in {' or '.join(suffixes[chosen])}, for --format"
            f" {chosen}"
        )
    return chosen or forms[0]

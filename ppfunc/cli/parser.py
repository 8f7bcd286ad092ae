"""Parse the words of a command line: errors that suggest the nearest name, an example in every help."""

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from ppfunc._checks import limited, mend_of, suggestion

_LONGEST = 4000


class CommandParser(argparse.ArgumentParser):
    """Parse a command line; errors are short, in the words of the types, without control characters.

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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, and refuse unknown ones here rather than in the parent command."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = next((w for w in unknown if w.startswith("-")), unknown[0])
            options = [option for action in self._actions for option in action.option_strings]
            mend = mend_of("()", word.partition("=")[0].lstrip("-").replace("-", "_"))
            here = f"--{mend}" if f"--{mend}" in options else mend if mend.startswith("nothing: ") else ""
            near = f"; here: {here}" if here else suggestion(word, options)
            self.error(f"{word} is none of its options or arguments{near}")
        return arguments, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return action.type(arg_string) if callable(action.type) else arg_string
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            near = suggestion(value, names) or _doing(value, action)
            raise argparse.ArgumentError(
                action, f"invalid choice {value!r}: expected one of {', '.join(names)}{near}"
            )


def in_options(reason: str, names: Iterable[str]) -> str:
    """Replace argument names in an error by the options of the command, such as ``--ranks``.

    >>> in_options("ranks = 0, expected an integer: pass ranks=1 or more", ["ranks"])
    '--ranks 0, expected an integer: pass --ranks 1 or more'
    """
    options = "|".join(map(re.escape, names))
    pattern = rf"(?<![\w.-])(?<!\* )({options}) ?= ?(?=-?\d)"
    return re.sub(pattern, lambda found: f"--{found[1].replace('_', '-')} ", reason)


def _doing(word: str, action: argparse.Action) -> str:
    """Suggest the command whose help has the word, such as ``convert``."""
    commands = getattr(action, "_choices_actions", ())
    return next(
        (f"; see {c.dest}: {c.help}" for c in commands if word in re.findall(r"\w+", c.help or "")), ""
    )


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

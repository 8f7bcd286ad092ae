"""Find the schedule that a command line names: a builder with its options, a file, or standard input."""

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppfunc._checks import suggestion
from ppfunc.schedule import Costs, FormatError, Schedule, Timeline, find_builder
from ppfunc.schedule.formats.files import parse, read_text, text_of

from .number import count, number

BUILDER_OPTIONS = {
    "ranks": ("P", "number of ranks"),
    "microbatches": ("M", "number of microbatches"),
    "chunks": ("V", "stages per rank, where that is a choice"),
    "group": ("N", "microbatches of a group (interleaved_1f1b)"),
    "cap": ("K", "memory of a rank in activations (zero_bubble, zbv_greedy)"),
    "order": ("source|head", "order of messages (deepspeed_train)"),
}
_METAVARS = {name: metavar for name, (metavar, _) in BUILDER_OPTIONS.items()}
_METAVARS |= {"effort": "N", "width": "N", "max-activations": "N", "layers": "N", "out": "FILE"}
_TYPES: dict[str, Callable[[str], Any]] = {"cap": number, "effort": number, "order": str, "out": Path}
_FORWARDS = 500_000


def add_options(parser: argparse.ArgumentParser, /, **meanings: str) -> None:
    """Add options of these names, with their meanings for the help."""
    for name, meaning in meanings.items():
        option = name.replace("_", "-")
        parser.add_argument(
            f"--{option}", type=_TYPES.get(option, count), metavar=_METAVARS[option], help=meaning
        )


def add_builder_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which schedules are built."""
    add_options(parser, **{name: meaning for name, (_, meaning) in BUILDER_OPTIONS.items()})


def find_schedule(
    name: str, arguments: argparse.Namespace, costs: Costs | None
) -> tuple[Schedule, Timeline | None]:
    """Build the schedule called ``name``, or read it from that file; ``-`` is standard input.

    A file is not checked here; a trace also has the times that were measured. Costs are passed to builders
    that take them.

    Raises:
        ValueError: an unknown name, options that do not fit, or no such file. OSError: a file that cannot be
            read. ScheduleError: a file that is no schedule.
    """
    if is_file(name):
        schedule, timeline = read_file(name)
        for option, wanted in _builder_options(arguments).items():
            if option not in ("ranks", "microbatches"):
                raise ValueError(f"--{option} is for building a schedule, and {name} is a file: leave it out")
            if wanted != getattr(schedule, option):
                raise ValueError(
                    f"--{option} {wanted}, but {name} has {getattr(schedule, option)}: leave the option out"
                )
        return schedule, timeline
    return _built(name, arguments, costs), None


def is_file(name: str) -> bool:
    """Tell whether a word of the command line is the path of a file and not the name of a schedule."""
    if name == "-" or os.sep in name:
        return True
    try:
        find_builder(name)
    except ValueError:
        return Path(name).exists() or Path(name).suffix.lower() in (".csv", ".json", ".trace")
    return False


def text_of_path(path: str | Path) -> str:
    """Read a text file, or standard input if the path is ``-``, up to a size limit."""
    return text_of(sys.stdin.buffer, "standard input") if str(path) == "-" else read_text(path)


def read_file(path: str) -> tuple[Schedule, Timeline | None]:
    """Read a schedule, and its times from a trace; errors name the file."""
    if path != "-" and not Path(path).exists():
        folder = Path(path).parent
        raise ValueError(
            f"no such file: {path}{suggestion(path, map(str, folder.iterdir())) if folder.is_dir() else ''}"
        )
    try:
        return parse(text_of_path(path), "stdin" if path == "-" else Path(path).stem)
    except FormatError as error:
        name = "standard input" if path == "-" else path
        raise FormatError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None


def require_size(ranks: int, microbatches: int, chunks: int) -> None:
    """Refuse a schedule that would take minutes to build.

    Raises:
        ValueError: more than half a million forwards.
    """
    forwards = ranks * microbatches * chunks
    if min(ranks, microbatches, chunks) > 0 and forwards > _FORWARDS:
        numbers = f"{ranks} x {microbatches} x {chunks}"
        raise ValueError(
            f"ranks x microbatches x stages per rank = {numbers}: expected at most {_FORWARDS} forwards"
        )


def _builder_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the builder options on the command line, by name."""
    return {name: value for name in BUILDER_OPTIONS if (value := getattr(arguments, name)) is not None}


def _built(name: str, arguments: argparse.Namespace, costs: Costs | None) -> Schedule:
    try:
        build = find_builder(name)
    except ValueError as error:
        raise ValueError(f"{error}; and there is no file of this name") from None
    missing = [f"--{n}" for n in ("ranks", "microbatches") if getattr(arguments, n) is None]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}")
    taken = inspect.signature(build).parameters
    options = _builder_options(arguments)
    for option in options:
        if option not in taken:
            valid = ", ".join(f"--{p}" for p in taken)
            raise ValueError(
                f"{name} takes no --{option}: its options are {valid}{suggestion(option, taken)}"
            )
    require_size(
        options["ranks"], options["microbatches"], options.get("chunks", 2) if "chunks" in taken else 1
    )
    return build(**options, **({"costs": costs} if "costs" in taken and costs is not None else {}))


def takes_costs(name: str) -> bool:
    """Tell whether the builder called ``name`` takes costs."""
    return not is_file(name) and "costs" in inspect.signature(find_builder(name)).parameters

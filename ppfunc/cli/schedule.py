"""The subcommands on schedules: ``ppfunc list``, ``show``, ``check`` and ``simulate``."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..schedule.builders import BUILDERS
from ..schedule.check import check
from ..schedule.config import find_builder
from ..schedule.costs import Costs
from ..schedule.formats.csv import to_csv
from ..schedule.formats.files import read_schedule
from ..schedule.formats.grid import to_grid
from ..schedule.formats.json import to_json
from ..schedule.formats.steps import to_steps
from ..schedule.formats.svg import to_svg
from ..schedule.formats.trace import to_trace
from ..schedule.passes.place_communication import place_communication
from ..schedule.passes.remove import compute_only, remove_slots
from ..schedule.schedule import Schedule
from ..schedule.simulate import simulate
from .number import number

FORMATS: dict[str, Callable[[Schedule], str]] = {
    "grid": to_grid,
    "csv": lambda schedule: to_csv(remove_slots(schedule)),
    "steps": to_steps,
    "json": to_json,
    "svg": to_svg,
    "trace": to_trace,
}
_BUILDER_OPTIONS = {
    "ranks": ("P", "number of ranks"),
    "microbatches": ("M", "number of microbatches"),
    "chunks": ("V", "stages per rank, where that is a choice"),
    "group": ("N", "microbatches of a group (interleaved_1f1b)"),
    "cap": ("K", "memory of a rank in activations (zero_bubble, zbv_greedy)"),
    "order": ("source|head", "order of messages (deepspeed_train)"),
}
_COSTS = {
    "forward": "time of a forward; default 1",
    "backward": "time of a whole backward, in place of its parts; a part not given takes half or what is left",
    "backward_input": "time of an input gradient; default 1",
    "backward_weight": "time of a weight gradient; default 1",
    "overlapped": "time of an overlapped pair; default: the sum of its parts",
    "communication": "latency of a message; default 0",
    "weight_share": "share of an activation that is held from the input to the weight gradient; default 0",
}


def add_schedules(commands: Any) -> None:
    """Add ``list``, ``show``, ``check`` and ``simulate`` to the subparsers of a command line.

    Each sets ``func``, a function from the parsed arguments to the exit code, which raises ValueError where
    the question cannot be answered.
    """
    listing = commands.add_parser("list", help="the schedules that can be built, with their options and constraints")
    listing.set_defaults(func=_list)
    show = commands.add_parser("show", help="print or draw a schedule")
    show.add_argument("name", metavar="NAME", help="a name of `ppfunc list`")
    _add_builder_options(show, required=True)
    show.add_argument("--format", choices=FORMATS, default="grid", help="default: grid")
    show.add_argument("--lowered", action="store_true", help="with communication; csv without it holds compute only")
    show.add_argument("--out", metavar="FILE", type=Path, help="write there instead of to standard output")
    show.set_defaults(func=_show)
    checking = commands.add_parser("check", help="prove a schedule in a CSV or JSON file, or say what is wrong with it")
    checking.add_argument("file", metavar="FILE", type=Path, help="CSV, as torch.distributed.pipelining writes it, or JSON")
    checking.set_defaults(func=_check)
    timing = commands.add_parser("simulate", help="time, bubbles and memory of a schedule on paper; times are per chunk")
    timing.add_argument("name", metavar="NAME|FILE", help="a name of `ppfunc list`, or a CSV or JSON file")
    _add_builder_options(timing, required=False)
    _add_cost_options(timing)
    timing.add_argument("--json", action="store_true", help="print one JSON object")
    timing.set_defaults(func=_simulate)


def _add_builder_options(parser: argparse.ArgumentParser, required: bool) -> None:
    for name, (metavar, meaning) in _BUILDER_OPTIONS.items():
        if name == "order":
            parser.add_argument("--order", choices=("source", "head"), help=meaning)
        else:
            needed = required and name in ("ranks", "microbatches")
            parser.add_argument(f"--{name}", type=int, metavar=metavar, required=needed, help=meaning)


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    for name, meaning in _COSTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=number, metavar="X", help=meaning)


def _list(arguments: argparse.Namespace) -> int:
    for name, build in BUILDERS.items():
        text = (inspect.getdoc(build) or "").replace("``", "")
        print(f"{name}\n    {text.splitlines()[0]}")
        meanings = dict(entry.split(": ", 1) for entry in _section(text, "Args:"))
        for parameter in inspect.signature(build).parameters.values():
            if parameter.name == "costs":
                continue  # the options of `simulate`
            print(f"    {_usage(parameter):<20}  {meanings.get(parameter.name, '')}".rstrip())
        for line in _section(text, "Raises:"):
            print(f"    refused: {line.removeprefix('ValueError: ')}")
    return 0


def _usage(parameter: inspect.Parameter) -> str:
    text = f"--{parameter.name} {_BUILDER_OPTIONS[parameter.name][0]}"
    if parameter.default is parameter.empty:
        return text
    return f"[{text}]" if parameter.default is None else f"[{text}, else {parameter.default}]"


def _section(text: str, title: str) -> list[str]:
    """List the entries of one section of a docstring, each as one line."""
    entries: list[str] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith(" "):
            inside = line == title
        elif inside and line.startswith("        "):
            entries[-1] += f" {line.strip()}"
        elif inside:
            entries.append(line.strip())
    return entries


def _show(arguments: argparse.Namespace) -> int:
    schedule = _built(arguments)
    if arguments.lowered and not schedule.lowered:
        schedule = place_communication(schedule)
    if arguments.format == "csv" and not arguments.lowered:
        schedule = compute_only(schedule)
    text = FORMATS[arguments.format](schedule)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.write_text(text, encoding="utf-8", newline="")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    print(check(read_schedule(arguments.file)))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    schedule = _built(arguments) if arguments.name in BUILDERS else _read(arguments)
    timeline = simulate(schedule, _costs(arguments))
    names = ("makespan", "span", "bubble", "span_bubble", "idle", "peak_activations")
    figures = {name: getattr(timeline, name) for name in names}
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        numbers = value if isinstance(value, tuple) else (value,)
        print(f"{name.replace('_', ' '):<17} {' '.join(f'{number:g}' for number in numbers)}")
    return 0


def _built(arguments: argparse.Namespace) -> Schedule:
    """Build the schedule from its name and options."""
    build = find_builder(arguments.name)
    missing = [f"--{n}" for n in ("ranks", "microbatches") if getattr(arguments, n) is None]
    if missing:
        raise ValueError(f"{arguments.name} needs {' and '.join(missing)}")
    taken = inspect.signature(build).parameters
    given = _given(arguments, _BUILDER_OPTIONS)
    for name in given:
        if name not in taken:
            valid = ", ".join(f"--{p}" for p in taken)
            raise ValueError(f"{arguments.name} takes no --{name}: its options are {valid}")
    if "costs" in taken and hasattr(arguments, "forward"):
        costs = _costs(arguments)
        given["costs"] = costs if costs != Costs() else None
    return build(**given)


def _read(arguments: argparse.Namespace) -> Schedule:
    """Read the schedule in a file and prove it: only a proved schedule may be timed."""
    if not Path(arguments.name).exists():
        names = ", ".join(BUILDERS)
        raise ValueError(f"{arguments.name!r} is neither a file nor a schedule: expected a path or one of {names}")
    schedule = read_schedule(arguments.name)
    check(schedule)
    for name, wanted in _given(arguments, _BUILDER_OPTIONS).items():
        if name not in ("ranks", "microbatches"):
            raise ValueError(f"--{name} is for building a schedule, and {arguments.name} is a file: leave it out")
        if wanted != getattr(schedule, name):
            raise ValueError(f"--{name} {wanted}, but {arguments.name} has {getattr(schedule, name)}: leave the option out")
    return schedule


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options out of ``names`` that the command line gives."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _costs(arguments: argparse.Namespace) -> Costs:
    """Make costs from the options; an option that is not given keeps the default of ``Costs``."""
    given = _given(arguments, _COSTS)
    whole = given.get("backward")
    if whole is not None:
        parts = [given.get("backward_input"), given.get("backward_weight")]
        if parts == [None, None]:
            parts = [whole / 2, whole / 2]
        for name, part in zip(("input", "weight"), parts, strict=True):
            if part is not None and part > whole:
                raise ValueError(f"--backward-{name} {part} is a part of --backward {whole}: expected at most that")
        given["backward_input"], given["backward_weight"] = (whole - parts[1 - n] if part is None else part for n, part in enumerate(parts))
    return Costs(**given)

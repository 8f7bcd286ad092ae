"""The subcommands on schedules: ``ppfunc list``, ``show``, ``check`` and ``simulate``."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..schedule.builders import BUILDERS
from ..schedule.check import check
from ..schedule.config import find_builder
from ..schedule.costs import Costs
from ..schedule.formats import compute_only, read_schedule, to_csv, to_grid, to_json, to_steps, to_svg, to_trace
from ..schedule.passes import place_communication, remove_slots
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
_METAVARS = {"ranks": "P", "microbatches": "M", "chunks": "V", "group": "N", "cap": "K", "order": "source|head"}
_OPTIONS = ("chunks", "group", "cap", "order")


def add_list(commands: Any) -> None:
    """Add ``list`` to the subparsers of a command line.

    Like every ``add_...`` here and in :mod:`ppfunc.cli.parallel`, it sets ``func``, a function from the parsed
    arguments to the exit code, which raises ValueError where the question cannot be answered.
    """
    listing = commands.add_parser("list", help="the schedules that can be built, with their options and constraints")
    listing.set_defaults(func=_list)


def add_show(commands: Any) -> None:
    """Add ``show`` to the subparsers of a command line."""
    show = commands.add_parser("show", help="print or draw a schedule")
    show.add_argument("name", metavar="NAME", help="a name of `ppfunc list`")
    _add_builder_options(show, required=True)
    show.add_argument("--format", choices=FORMATS, default="grid", help="default: grid")
    show.add_argument("--lowered", action="store_true", help="with communication; csv without it holds compute only")
    show.add_argument("--out", metavar="FILE", type=Path, help="write there instead of to standard output")
    show.set_defaults(func=_show)


def add_check(commands: Any) -> None:
    """Add ``check`` to the subparsers of a command line."""
    checking = commands.add_parser("check", help="prove a schedule in a CSV or JSON file, or say what is wrong with it")
    checking.add_argument("file", metavar="FILE", type=Path, help="CSV, as torch.distributed.pipelining writes it, or JSON")
    checking.set_defaults(func=_check)


def add_simulate(commands: Any) -> None:
    """Add ``simulate`` to the subparsers of a command line."""
    timing = commands.add_parser("simulate", help="time, bubbles and memory of a schedule on paper; times are per chunk")
    timing.add_argument("name", metavar="NAME|FILE", help="a name of `ppfunc list`, or a CSV or JSON file")
    _add_builder_options(timing, required=False)
    _add_cost_options(timing)
    timing.add_argument("--json", action="store_true", help="print one JSON object")
    timing.set_defaults(func=_simulate)


def _add_builder_options(parser: argparse.ArgumentParser, required: bool) -> None:
    for name, meaning in (
        ("ranks", "number of ranks"),
        ("microbatches", "number of microbatches"),
        ("chunks", "stages per rank, where that is a choice"),
        ("group", "microbatches of a group (interleaved_1f1b)"),
        ("cap", "memory of a rank in activations (zero_bubble, zbv_greedy)"),
    ):
        needed = required and name in ("ranks", "microbatches")
        parser.add_argument(f"--{name}", type=int, metavar=_METAVARS[name], required=needed, help=meaning)
    parser.add_argument("--order", choices=("source", "head"), help="order of messages (deepspeed_train)")


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    for name, meaning in (
        ("forward", "time of a forward; default 1"),
        ("backward", "time of a whole backward, in place of its parts; a part not given takes half or what is left"),
        ("backward-input", "time of an input gradient; default 1"),
        ("backward-weight", "time of a weight gradient; default 1"),
        ("overlapped", "time of an overlapped pair; default: the sum of its parts"),
        ("communication", "latency of a message; default 0"),
        ("weight-share", "share of an activation that is held from the input to the weight gradient; default 0"),
    ):
        parser.add_argument(f"--{name}", type=number, metavar="X", help=meaning)


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
    text = f"--{parameter.name} {_METAVARS[parameter.name]}"
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
    figures = {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "idle": list(timeline.idle),
        "peak_activations": list(timeline.peak_activations),
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            numbers = value if isinstance(value, list) else [value]
            print(f"{name.replace('_', ' '):<17} {' '.join(f'{number:g}' for number in numbers)}")
    return 0


def _built(arguments: argparse.Namespace) -> Schedule:
    """Build the schedule from its name and options."""
    build = find_builder(arguments.name)
    missing = [f"--{n}" for n in ("ranks", "microbatches") if getattr(arguments, n) is None]
    if missing:
        raise ValueError(f"{arguments.name} needs {' and '.join(missing)}")
    taken = inspect.signature(build).parameters
    given = {name: getattr(arguments, name) for name in ("ranks", "microbatches", *_OPTIONS)}
    given = {name: value for name, value in given.items() if value is not None}
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
    for name in ("ranks", "microbatches"):
        wanted, found = getattr(arguments, name), getattr(schedule, name)
        if wanted not in (None, found):
            raise ValueError(f"--{name} {wanted}, but {arguments.name} has {found}: leave the option out")
    for name in _OPTIONS:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is for building a schedule, and {arguments.name} is a file: leave it out")
    return schedule


def _costs(arguments: argparse.Namespace) -> Costs:
    """Make costs from the options; an option that is not given keeps the default of ``Costs``."""
    names = ("forward", "backward", "backward_input", "backward_weight", "overlapped", "communication", "weight_share")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
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

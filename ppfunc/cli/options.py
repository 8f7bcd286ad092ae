"""Declare and read the options that subcommands share: a schedule, built or read, and costs of its stages."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ppfunc._checks import suggestion
from ppfunc.schedule import Costs, FormatError, Schedule, Timeline, find_builder
from ppfunc.schedule.formats.files import parse, read_text, text_of
from ppfunc.schedule.instruction import RESIDUAL_OPS, TAIL, Op
from ppfunc.schedule.json import load

from .console import count, number, numbers

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


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that are on the command line, with their values."""
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


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
        for option, wanted in given(arguments, BUILDER_OPTIONS).items():
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


def _built(name: str, arguments: argparse.Namespace, costs: Costs | None) -> Schedule:
    try:
        build = find_builder(name)
    except ValueError as error:
        raise ValueError(f"{error}; and there is no file of this name") from None
    missing = [f"--{n}" for n in ("ranks", "microbatches") if getattr(arguments, n) is None]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}")
    taken = inspect.signature(build).parameters
    options = given(arguments, BUILDER_OPTIONS)
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


_OPTIONS = {
    "forward": "time of a forward; default 1",
    "backward": "time of a whole backward, in place of its parts, each of which takes half",
    "backward_input": "time of an input gradient; default 1",
    "backward_weight": "time of a weight gradient; default 1",
    "overlapped": "time of an overlapped pair; default: the sum of its parts",
    "communication": "latency of a message; default 0",
    "bytes": "size of a message; default 0",
    "bandwidth": "bytes of a message per unit of time; default: no limit",
    "activation": "memory that a forward keeps for its backward; default 1",
    "weight_share": (
        "share of it that is held from the input to the weight gradient; default 0 (zero_bubble, zbv_greedy"
        " without costs: 1)"
    ),
    "recompute": "time of a forward that runs again; default: as the first; a plan recomputes where given",
    "checkpoint": "memory that a forward keeps to run again; default 0",
    "offload": "time to copy an activation to the host; default 0; a plan offloads where given",
    "fetch": "time to copy it back; default: that of --offload",
    "parameters": "memory that a stage takes all the time; default 0",
    "unshard": "time of a gather of parameters, beside compute; default 0",
    "reduce_tied": "time of a sum over tied places, beside compute; default 0",
    "reduce_grad": "time of a sum over data ranks, beside compute; default 0",
    "step": "time of an optimizer step; default 0",
}
_HALVES = ("backward_input", "backward_weight")
# What ``plan --json`` prints, the costs among them.
_OF_A_PLAN = {
    *("objective", "value", "bound", "gap", "binds", "span", "makespan", "bubble", "span_bubble"),
    *("peak_activations", "placement", "found", "costs", "boundaries"),
}
# The instructions that a cost is for: it changes nothing in a schedule without them.
_OF = {
    "overlapped": {Op.OVERLAP_F_B},
    "weight_share": {Op.W},
    "checkpoint": {Op.RECOMPUTE},
    **{name: {Op.B, Op.I, Op.W, Op.OVERLAP_F_B} for name in ("backward", *_HALVES)},
    **{op.lower(): {op} for op in (Op.UNSHARD, *TAIL, *RESIDUAL_OPS)},
}


def add_cost_options(
    parser: argparse.ArgumentParser, unit: str, without: Collection[str] = (), per: str | None = "stage"
) -> None:
    """Add an option per argument of ``Costs``, ``--costs`` for a file, and ``--per``.

    Args:
        unit: what a number without commas is for.
        without: arguments that have no meaning there.
        per: the default of ``--per``, for the help; None for a command that has one unit.
    """
    group = parser.add_argument_group("costs", f"one number for {unit}, or one per stage, as in 1,2,1,1")
    if per is not None:
        meaning = "what one number is for: a stage, or a rank's share of the model, as in compare"
        group.add_argument("--per", choices=("stage", "rank"), help=f"{meaning}; default: {per}")
    group.add_argument(
        "--costs",
        metavar="FILE",
        type=Path,
        help="JSON as Costs.to_json writes it, such as of pp.measure, or as plan --json does",
    )
    for name, meaning in _OPTIONS.items():
        if name not in without:
            group.add_argument(f"--{name.replace('_', '-')}", type=numbers, metavar="X[,X...]", help=meaning)


def read_costs(arguments: argparse.Namespace) -> Costs | None:
    """Read the costs of the options; return None without any.

    Raises:
        ValueError: the costs are in two places, or invalid.
        OSError: the file cannot be read.
    """
    costs = given(arguments, _OPTIONS)
    if ("bytes" in costs) != ("bandwidth" in costs):
        raise ValueError("--bytes and --bandwidth go together: a message takes latency + bytes / bandwidth")
    if (whole := costs.pop("backward", None)) is not None:
        if both := costs.keys() & {*_HALVES}:
            raise ValueError(
                f"--backward and --{min(both).replace('_', '-')}: give the time of a whole backward, or those"
                " of both parts"
            )
        half = tuple(time / 2 for time in whole) if isinstance(whole, tuple) else whole / 2
        costs |= dict.fromkeys(_HALVES, half)
    if arguments.costs is None:
        return Costs(**costs) if costs else None
    if costs:
        raise ValueError(
            f"--costs {arguments.costs} and --{next(iter(costs)).replace('_', '-')}: give the costs in one"
            " place"
        )
    try:
        text = text_of_path(arguments.costs)
        read = load(text)
        planned = read.get("costs") if isinstance(read, dict) and read.keys() <= _OF_A_PLAN else None
        return Costs.from_json(text if planned is None else json.dumps(planned))
    except ValueError as error:
        raise ValueError(f"{arguments.costs}: {error}") from None


def require_effect(
    arguments: argparse.Namespace, schedules: Collection[Schedule], unseen: Collection[str] = ()
) -> None:
    """Refuse costs of the command line that change nothing.

    Args:
        schedules: what the costs are for. That of a plan, which recomputes and offloads only where that is
            shorter, takes the costs of both; its name begins with ``plan``, in a CSV that of the file.
        unseen: costs that the output does not show.

    Raises:
        ValueError: a cost of an instruction that is in none of the schedules, or one that is not seen.
    """
    ops = {op for schedule in schedules for op in schedule.ops}
    ops |= RESIDUAL_OPS if any(schedule.name.startswith("plan") for schedule in schedules) else set()
    for name in given(arguments, _OPTIONS):
        users, option = _OF.get(name), f"--{name.replace('_', '-')}"
        if users and not users & ops:
            raise ValueError(
                f"{option} changes nothing: there is no {' or '.join(sorted(users))} in the schedule; leave"
                " it out"
            )
        if name in unseen:
            raise ValueError(f"{option} changes nothing in what is printed: leave it out")


def costed_schedule(
    arguments: argparse.Namespace, default: bool = False
) -> tuple[Schedule, Timeline | None, Costs | None]:
    """Return the schedule that is named, its measured times, and the costs of its stages that are given.

    Args:
        default: without any, the times of a schedule that is not measured are those of ``Costs()``.

    Raises:
        ValueError: ``--per`` without costs; as :func:`read_costs`, :func:`fitted`, :func:`find_schedule`.
    """
    costs, per_rank = read_costs(arguments), arguments.per == "rank"
    schedule, measured = find_schedule(arguments.name, arguments, None if per_rank else costs)
    if arguments.per and costs is None and (measured or not default):
        raise ValueError("--per says what costs are for, and there are none: give some, or leave it out")
    if per_rank:
        costs = (costs or Costs()).per_rank(schedule)
        if takes_costs(arguments.name):
            schedule, _ = find_schedule(arguments.name, arguments, costs)
    return schedule, measured, None if costs is None else fitted(costs, schedule)


def fitted(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of the stages of ``schedule``. Costs given per stage of the model serve all replicas.

    Raises:
        ValueError: costs for another number of stages.
    """
    model = len(set(schedule.model_stages))
    lengths = {len(value) for name in _OPTIONS if isinstance(value := getattr(costs, name), tuple)}
    return (
        costs.of_stages(schedule.model_stages)
        if schedule.replicas and lengths == {model}
        else costs.fitting(schedule.stages)
    )

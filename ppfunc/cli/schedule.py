"""Run the subcommands on schedules: ``list``, ``show``, ``check``, ``simulate``; explain what they print."""

import argparse
import inspect
import json
import re
import shutil
from collections.abc import Callable
from textwrap import fill
from typing import Any

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Schedule,
    Timeline,
    check,
    compare,
    compute_only,
    find_builder,
    place_communication,
    remove_slots,
    simulate,
    to_csv,
    to_grid,
    to_json,
    to_steps,
    to_svg,
    to_torch_csv,
    to_trace,
)

from .console import form_of, write
from .options import (
    BUILDER_OPTIONS,
    add_builder_options,
    add_cost_options,
    add_options,
    costed_schedule,
    find_schedule,
    is_file,
    require_effect,
    takes_costs,
)

_TEXTS: dict[str, Callable[[Schedule], str]] = {
    "csv": lambda schedule: to_csv(remove_slots(schedule)),
    "steps": to_steps,
    "json": to_json,
}
_PICTURES: dict[str, Callable[[Schedule, Timeline | None, int | None], str]] = {
    "grid": lambda schedule, timeline, width: to_grid(schedule, timeline, width=width),
    "svg": lambda schedule, timeline, width: to_svg(schedule, timeline, width=width),
    "trace": lambda schedule, timeline, width: to_trace(schedule, timeline),
}
_SUFFIXES = {
    "grid": (".txt",),
    "csv": (".csv", ".txt"),
    "steps": (".txt",),
    "json": (".json",),
    "svg": (".svg",),
    "trace": (".json", ".trace"),
}
_WIDE = 160  # columns of a measured grid where there is no terminal
_FIGURES = ("makespan", "span", "bubble", "span_bubble", "idle", "peak_activations")
_SOURCE = (
    "a name of `ppfunc list`, a file (CSV, also of torch.distributed.pipelining, JSON or trace), or - for"
    " standard input"
)


def add_schedules(commands: Any) -> None:
    """Add ``list``, ``show``, ``check`` and ``simulate`` to the subparsers of a command line.

    Each sets ``func``, a function from the parsed arguments to the exit code. It raises ValueError for
    options that do not fit.
    """
    listing = commands.add_parser(
        "list",
        help="the schedules that can be built, with their options",
        example="  ppfunc list\n  ppfunc list zbv",
    )
    listing.add_argument("names", metavar="NAME", nargs="*", help="only these")
    listing.set_defaults(func=_list)
    _add_show(commands)
    checking = commands.add_parser(
        "check",
        help="prove a schedule, or say what is wrong with it",
        description="Exits with 0 where the schedule is right, with 1 where it is wrong.",
        example=(
            "  ppfunc show zb_h1 --ranks 4 --microbatches 8 --lowered --format csv | ppfunc check -"
            " --max-activations 4\n  ppfunc check 1f1b --ranks 4 --microbatches 8"
        ),
    )
    checking.add_argument("name", metavar="NAME|FILE", help=_SOURCE)
    add_builder_options(checking)
    add_options(checking, max_activations="refuse a rank that holds more activations at one time")
    checking.set_defaults(func=_check)
    timing = commands.add_parser(
        "simulate",
        help="time, bubbles and memory of a schedule on paper",
        description="A trace without costs has the times that were measured.",
        example="  ppfunc simulate 1f1b --ranks 4 --microbatches 8 --forward 1,2,1,1 --backward 2,4,2,2",
    )
    timing.add_argument("name", metavar="NAME|FILE", help=_SOURCE)
    add_builder_options(timing)
    add_cost_options(timing, "all stages")
    timing.add_argument("--json", action="store_true", help="print one JSON object")
    timing.set_defaults(func=_simulate)


def _add_show(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        help=f"print, draw or convert a schedule: --format {', '.join(_SUFFIXES)}, or the suffix of --out",
        description="Grid, SVG and trace are drawn with the costs, or with the times of a trace.",
        example=(
            "  ppfunc show 1f1b --ranks 4 --microbatches 8\n  ppfunc show zbv --ranks 4 --microbatches 8"
            " --forward 1 --backward 2 --format svg --out zbv.svg\n  ppfunc show zbv --ranks 4 --microbatches"
            " 8 --for torch --out zbv.csv\n  ppfunc show zbv.csv --format trace --out trace.json\n  ppfunc"
            " show trace.json"
        ),
    )
    show.add_argument("name", metavar="NAME|FILE", help=_SOURCE)
    add_builder_options(show)
    add_cost_options(show, "all stages")
    show.add_argument(
        "--format",
        choices=tuple(_SUFFIXES),
        help="default: as the suffix of --out says, else grid; csv for torch",
    )
    show.add_argument(
        "--for",
        dest="target",
        choices=("torch",),
        help="a csv that torch.distributed.pipelining's runtime runs",
    )
    show.add_argument(
        "--lowered", action="store_true", help="with communication; csv without it holds compute only"
    )
    add_options(
        show,
        width="pixels of an svg, or the most columns of a grid; default of a trace: those of the terminal",
        out="write there instead of to standard output",
    )
    show.set_defaults(func=_show)


def _list(arguments: argparse.Namespace) -> int:
    lines = []
    chosen = [find_builder(name) for name in arguments.names] or BUILDERS.values()
    for name, build in BUILDERS.items():
        if build not in chosen:
            continue
        text = (inspect.getdoc(build) or "").replace("``", "")
        lines.append(f"{name}\n    {text.splitlines()[0]}\n    in Python: ppfunc.{build.__name__}")
        meanings = dict(entry.split(": ", 1) for entry in _section(text, "Args:"))
        for parameter in inspect.signature(build).parameters.values():
            lines.append(f"    {_usage(parameter):<20}  {meanings.get(parameter.name, '')}".rstrip())
        lines += [f"    refused: {line.removeprefix('ValueError: ')}" for line in _section(text, "Raises:")]
    print(explain("\n".join(lines)))
    return 0


def _usage(parameter: inspect.Parameter) -> str:
    text = (
        "--costs FILE, --forward X, ..."
        if parameter.name == "costs"
        else f"--{parameter.name} {BUILDER_OPTIONS[parameter.name][0]}"
    )
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
    form = form_of(arguments.out, arguments.format or ("csv" if arguments.target else None), _SUFFIXES)
    schedule, measured, costs = costed_schedule(arguments)
    _require_fit(arguments, form, costs)
    built_for_costs = takes_costs(arguments.name)
    memory = () if form != "grid" or built_for_costs else ("activation", "weight_share")
    unseen = () if built_for_costs else ("parameters", *memory)
    require_effect(arguments, [schedule], unseen)
    timeline = measured
    if is_file(arguments.name) and (form != "grid" or timeline or costs):
        check(schedule)  # a grid without times shows a wrong schedule too
    if costs is not None and form in _PICTURES:
        timeline, measured = simulate(schedule, costs), None
    if arguments.lowered and form == "grid" and timeline is not None:
        raise ValueError("a grid on a scale of time has no messages: leave --lowered out, or the costs")
    width = (
        shutil.get_terminal_size((_WIDE, 0)).columns
        if measured and form == "grid" and not arguments.width
        else arguments.width
    )
    if arguments.target is not None:
        text = to_torch_csv(schedule)
    elif form in _PICTURES:
        text = _PICTURES[form](_lowered(schedule) if arguments.lowered else schedule, timeline, width)
    else:
        text = _TEXTS[form](
            _lowered(schedule) if arguments.lowered else compute_only(schedule) if form == "csv" else schedule
        )
    if form == "grid" and measured:
        text += compare(measured, simulate(schedule, measured.costs())).summary + "\n"
    write(text, arguments.out)
    return 0


def _require_fit(arguments: argparse.Namespace, form: str, costs: Costs | None) -> None:
    """Refuse options that change nothing in this form."""
    if arguments.target is not None and form != "csv":
        raise ValueError(f"--for {arguments.target} is a csv: leave --format {form} out")
    if arguments.width is not None and form not in ("grid", "svg"):
        raise ValueError(f"--width is for a grid or an svg: leave it out of --format {form}")
    if costs is not None and form not in _PICTURES and not takes_costs(arguments.name):
        raise ValueError(
            f"costs change nothing in --format {form} of {arguments.name}: leave them out, or take grid, svg"
            " or trace"
        )
    if arguments.lowered and (form == "svg" or arguments.target is not None):
        raise ValueError(
            f"--lowered changes nothing in {'an svg' if form == 'svg' else 'a csv for torch'}: leave it out"
        )


def _lowered(schedule: Schedule) -> Schedule:
    return schedule if schedule.has_messages else place_communication(schedule)


def _check(arguments: argparse.Namespace) -> int:
    schedule, _ = find_schedule(arguments.name, arguments, None)
    certificate = check(schedule, max_activations=arguments.max_activations)
    write(explain(str(certificate)) + "\n")
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    schedule, timeline, costs = costed_schedule(arguments, default=True)
    if is_file(arguments.name):
        check(schedule)
    if timeline is None or costs is not None:
        timeline = simulate(schedule, costs)
    require_effect(arguments, [schedule])
    figures = {name: getattr(timeline, name) for name in _FIGURES}
    if costs is not None and costs.parameters:
        # Per rank, the parameters of its stages and its peak of activations.
        figures["memory"] = tuple(
            peak + sum(costs.of("parameters", stage) for stage in schedule.stages_of(rank))
            for rank, peak in enumerate(timeline.peak_activations)
        )
    if arguments.json:
        print(json.dumps(figures, default=float))
        return 0
    lines = []
    for name, value in figures.items():
        numbers = value if isinstance(value, tuple) else (value,)
        lines.append(f"{name.replace('_', ' '):<17} {' '.join(f'{float(number):g}' for number in numbers)}")
    unit = "measured, in seconds" if timeline.measured else f"by costs per {arguments.per or 'stage'}"
    print(explain("\n".join([*lines, f"{'times':<17} {unit}"])))
    return 0


WORDS = {
    "rank": "a worker of the pipeline, which holds a stage or several",
    "stage": "a part of the model",
    "chunk": "one of the stages of a rank that holds several",
    "microbatch": "a part of the batch, which goes through the stages by itself",
    "chain": "a path of stages that some microbatches take; with several, ranks hold replicas of stages",
    "instruction": (
        "a thing that a rank does: F forward, B backward, I and W its two parts, the input and the weight"
        " gradient, (F;B)OVERLAP_F_B a pair as one; SEND and RECV messages, LOAD data, OFFLOAD and FETCH"
        " activations, RECOMPUTE them, UNSHARD and RESHARD parameters, REDUCE_GRAD and REDUCE_TIED sums of"
        " gradients over replicas and over tied parameters, STEP the optimizer"
    ),
    "input gradient": (
        "the part I of a backward B, which the stage before waits for; the weight gradient W is the other"
        " part"
    ),
    "1F1B": "one forward and one backward in turn",
    "source, head": (
        "the two orders of messages in DeepSpeed: with source a rank receives an activation before it sends a"
        " gradient"
    ),
    "warm-up": "the forwards of a rank before its first backward",
    "activation": "what the forward of a microbatch keeps for its backward",
    "peak activations": "the most that a rank holds at one time, per rank",
    "cap": "the most memory that a rank may take",
    "memory": "the parameters of a rank and its peak of activations, in one unit",
    "group": "microbatches that go through one chunk before the rank turns to the next chunk",
    "makespan": "the time from the start to the last end",
    "span": "the largest time, over the ranks, from their first start to their last end",
    "bubble": "the share of the makespan in which ranks wait, on average",
    "span bubble": "the same share of the span",
    "idle": "the time of the makespan in which a rank does not compute, per rank",
    "digest": (
        "SHA-256 of what the ranks do, in which order; two schedules that do the same have the same, whatever"
        " their names"
    ),
    "no deadlock": "how it has been proved to run to its end",
    "by data dependencies": "without messages: nothing is computed from what comes later",
    "rendezvous": "even where a send waits until it is received",
    "one queue per pair of ranks": (
        "even where messages between two ranks move in the order in which they are posted"
    ),
    "slot": "a buffer of a stage for a value, named by instructions as @0, @1, ...",
    "step": "instructions of a rank whose messages are posted together",
    "step-atomic": (
        "whether a barrier may stand between any two steps: none needs anything from a later step of another"
        " rank"
    ),
    "refused": "numbers for which the schedule is not defined",
}


def explain(text: str) -> str:
    """Return ``text`` with a line below for each of its words that is known here.

    >>> print(explain("stages 3"))
    stages 3
    <BLANKLINE>
    words
    stage  a part of the model
    """
    words = [word for word in WORDS if re.search(rf"(?<![a-z_-]){word.split(',')[0]}", text)]
    width = max(map(len, words)) + 2
    lines = (
        fill(WORDS[word], 110, initial_indent=word.ljust(width), subsequent_indent=" " * width)
        for word in words
    )
    return "\n".join([text.rstrip("\n"), "", "words", *lines])

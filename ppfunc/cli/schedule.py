"""Run the subcommands on schedules: ``list``, ``show``, ``check``, ``simulate``."""

import argparse
import inspect
import json
import shutil
from collections.abc import Callable
from typing import Any

from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Schedule,
    Timeline,
    check,
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
        help="the schedules that can be built, with their options; all about those that are named",
        example="  ppfunc list\n  ppfunc list zbv",
    )
    listing.add_argument("names", metavar="NAME", nargs="*", help="all about these")
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
    chosen = [find_builder(name) for name in arguments.names]
    for name, build in BUILDERS.items():
        text = (inspect.getdoc(build) or "").replace("``", "")
        if build in chosen:
            print(f"{name}, ppfunc.{build.__name__}\n\n{text}\n")
        elif not chosen:
            options = " ".join(map(_usage, inspect.signature(build).parameters.values()))
            print(f"{name}\n    {text.splitlines()[0]}\n    {options}")
    return 0


def _usage(parameter: inspect.Parameter) -> str:
    if parameter.name == "costs":
        return "[--costs FILE, --forward X, ...]"
    option = f"--{parameter.name} {BUILDER_OPTIONS[parameter.name][0]}"
    if parameter.default is parameter.empty:
        return option
    return f"[{option}]" if parameter.default is None else f"[{option}, else {parameter.default}]"


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
    write(f"{certificate}\n")
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
    print("\n".join([*lines, f"{'times':<17} {unit}"]))
    return 0

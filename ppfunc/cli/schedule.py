"""Run the subcommands on schedules: ``list``, ``show``, ``check``, ``simulate``, ``compare``."""

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppfunc.schedule import (
    BUILDERS,
    Schedule,
    Timeline,
    check,
    compare_schedules,
    compute_only,
    find_builder,
    place_communication,
    remove_slots,
    simulate,
    to_csv,
    to_grid,
    to_json,
    to_scatter,
    to_steps,
    to_svg,
    to_torch_csv,
    to_trace,
)

from .options import (
    Options,
    add_command,
    add_cost_options,
    add_json,
    add_options,
    add_source,
    costed_schedule,
    find_source,
    form_of,
    is_file,
    read_costs,
    read_file,
    require_effect,
    require_size,
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
_OUT = "write there instead of to standard output"

_COLUMNS = (
    "Columns: the makespan in the unit of the costs; the bubble as a share of the makespan, and of the span"
    " (the largest time, over the ranks, from their first start to their last end); the peak of activations"
    " in activations of one microbatch in one rank's share of the model; messages in a step; parameters held,"
    " in shares of one rank; and by how much the makespan is over the lower bound of its placement, which no"
    " order of its stages beats, a - where no bound is known (several chains)."
)
_UNIT = (
    "Costs are those of a rank's share of the model, also where it holds several stages; `ppfunc simulate`"
    " takes those of a stage, or with --per rank these."
)
_TABLES = {"table": (".txt",), "svg": (".svg",), "json": (".json",)}


def add_schedules(commands: Any) -> None:
    """Add the subcommands on schedules to the subparsers of a command line."""
    add_command(
        commands,
        "list",
        _list,
        help="schedules that can be built, with their options; in Python, help(ppfunc.zbv) says more",
        example="  ppfunc list",
    )
    _add_show(commands)
    checking = add_command(
        commands,
        "check",
        _check,
        help="prove a schedule, or say what is wrong with it",
        description="Exits with 0 where the schedule is right, with 1 where it is wrong.",
        example=(
            "  ppfunc show zb_h1 --ranks 4 --microbatches 8 --lowered --format csv | ppfunc check -"
            " --max-activations 4\n  ppfunc check 1f1b --ranks 4 --microbatches 8"
        ),
    )
    add_source(checking)
    add_options(checking, max_activations="refuse a rank that holds more activations at one time")
    timing = add_command(
        commands,
        "simulate",
        _simulate,
        help="time, bubbles and memory of a schedule on paper",
        description="A trace without costs has the times that were measured.",
        example="  ppfunc simulate 1f1b --ranks 4 --microbatches 8 --forward 1,2,1,1 --backward 2,4,2,2",
    )
    add_source(timing)
    add_cost_options(timing, "all stages")
    add_json(timing)
    _add_compare(commands)


def _add_show(commands: Any) -> None:
    show = add_command(
        commands,
        "show",
        _show,
        help=f"print, draw or convert a schedule: --format {', '.join(_SUFFIXES)}, or the suffix of --out",
        description="Grid, SVG and trace are drawn with the costs, or with the times of a trace.",
        example=(
            "  ppfunc show 1f1b --ranks 4 --microbatches 8\n  ppfunc show zbv --ranks 4 --microbatches 8"
            " --forward 1 --backward 2 --format svg --out zbv.svg\n  ppfunc show zbv --ranks 4 --microbatches"
            " 8 --for torch --out zbv.csv\n  ppfunc show zbv.csv --format trace --out trace.json\n  ppfunc"
            " show trace.json"
        ),
    )
    add_source(show)
    add_cost_options(show, "all stages")
    forms = "default: as the suffix of --out says, else grid; csv for torch"
    show.add_argument("--format", choices=tuple(_SUFFIXES), help=forms)
    runs = "a csv that torch.distributed.pipelining's runtime runs"
    show.add_argument("--for", choices=("torch",), help=runs)
    lowered = "with communication; csv without it holds compute only"
    show.add_argument("--lowered", action="store_true", help=lowered)
    width = "pixels of an svg, or the most columns of a grid; default of a trace: those of the terminal"
    add_options(show, width=width, out=_OUT)


def _add_compare(commands: Any) -> None:
    comparing = add_command(
        commands,
        "compare",
        _compare,
        help="a table of schedules for the same model part per rank",
        description=_COLUMNS,
        example=(
            "  ppfunc compare --ranks 8 --microbatches 32\n"
            "  ppfunc compare --ranks 4 --microbatches 8 1f1b zbv dualpipe --cap 4\n"
            "  ppfunc compare --ranks 8 --microbatches 32 --format svg --out schedules.svg"
        ),
    )
    names = "names of `ppfunc list`, or files; default: the list"
    comparing.add_argument("names", metavar="NAME|FILE", nargs="*", help=names)
    add_options(
        comparing,
        ranks="number of ranks; default: that of the first file",
        microbatches="number of microbatches; default: that of the first file",
        chunks="stages per rank, where that is a choice; default: 2",
        cap="memory of a rank, in the unit of the costs; default: no limit",
        width="pixels of an svg",
        out=_OUT,
    )
    add_cost_options(comparing, "one rank's share of the model", per=None)
    forms = "svg: bubble against memory; default: as the suffix of --out says, else table"
    comparing.add_argument("--format", choices=tuple(_TABLES), help=forms)


def _list(options: Options) -> tuple[int, str]:
    lines = []
    for name, build in BUILDERS.items():
        does = (inspect.getdoc(build) or "").partition("\n")[0].replace("``", "")
        taken = inspect.signature(build).parameters.values()
        words = (f"--{p.name}" if p.default is p.empty else f"[--{p.name}]" for p in taken)
        lines.append(f"{name}\n    {does}\n    {' '.join(words)}\n")
    return 0, "".join(lines)


def _show(options: Options) -> tuple[int, str]:
    for_torch = options.pop("for", None)
    form = form_of(options, _SUFFIXES, default="csv" if for_torch else None)
    if for_torch and form != "csv":
        raise ValueError(f"--for torch is a csv: leave --format {form} out")
    unseen = ("parameters", "activation", "weight_share") if form == "grid" else ("parameters",)
    drawn = form in _PICTURES
    schedule, timeline, costs = costed_schedule(options, timed=drawn, proved=form != "grid", unseen=unseen)
    width = options.pop("width", None) if form in ("grid", "svg") else None
    if timeline and form == "grid" and not (width or costs):
        width = shutil.get_terminal_size((_WIDE, 0)).columns
    if drawn and costs is not None:
        timeline = simulate(schedule, costs)
    if for_torch:
        return 0, to_torch_csv(schedule)
    messages = form != "svg" and not (form == "grid" and timeline)  # else there is no place for them
    if messages and options.pop("lowered", False):
        schedule = schedule if schedule.has_messages else place_communication(schedule)
    elif form == "csv":
        schedule = compute_only(schedule)
    return 0, _PICTURES[form](schedule, timeline, width) if drawn else _TEXTS[form](schedule)


def _check(options: Options) -> tuple[int, str]:
    most = options.pop("max_activations", None)
    return 0, f"{check(find_source(options, proved=False).make(None), max_activations=most)}\n"


def _simulate(options: Options) -> tuple[int, str]:
    per = options.get("per", "stage")
    schedule, timeline, costs = costed_schedule(options, default=True)
    if timeline is None or costs is not None:
        timeline = simulate(schedule, costs)
    memory = None
    if costs is not None and costs.parameters:
        memory = tuple(  # per rank, the parameters of its stages and its peak of activations
            peak + sum(costs.of("parameters", stage) for stage in schedule.stages_of(rank))
            for rank, peak in enumerate(timeline.peak_activations)
        )
    if options.pop("json", False):
        figures = {name: getattr(timeline, name) for name in _FIGURES}
        return 0, json.dumps(figures | ({"memory": memory} if memory else {}), default=float) + "\n"
    held = f"memory of each rank: {' '.join(f'{float(size):g}' for size in memory)}\n" if memory else ""
    unit = "measured, in seconds" if timeline.measured else f"by costs per {per}"
    return 0, f"{timeline}\n{held}times: {unit}\n"


def _named(name: str) -> str | Schedule:
    """Read the schedule of a file, named after the file; return another name as it is."""
    if is_file(name):
        schedule, _ = read_file(name)
        return replace(schedule, name=schedule.name if name == "-" else Path(name).name)
    find_builder(name)  # else it is unknown
    return name


def _compare(options: Options) -> tuple[int, str]:
    form = form_of(options, _TABLES)
    width = options.pop("width", None) if form == "svg" else None
    given, costs = {*options}, read_costs(options)
    items = [_named(name) for name in options.pop("names")]
    first = next((item for item in items if isinstance(item, Schedule)), None)
    ranks, microbatches = (options.pop(n, getattr(first, n, None)) for n in ("ranks", "microbatches"))
    if ranks is None or microbatches is None:
        raise ValueError("--ranks and --microbatches are missing: say how many there are, or name a file")
    builders = [find_builder(item) for item in items if isinstance(item, str)]
    chosen = not items or any("chunks" in inspect.signature(build).parameters for build in builders)
    chunks = options.pop("chunks", 2) if chosen else 2
    require_size(ranks, microbatches, chunks)
    cap = options.pop("cap", None)
    overview = compare_schedules(ranks, microbatches, items or None, costs, cap=cap, chunks=chunks)
    sizes = () if form == "json" or cap is not None else ("activation", "parameters")
    unseen = [name for name in sizes if costs and not isinstance(getattr(costs, name), tuple)]
    require_effect(given, [row.timeline.schedule for row in overview.rows], unseen)
    if form == "svg":
        return 0, to_scatter(overview, width=width)
    return (
        0,
        f"{json.dumps(overview.figures(), default=float)}\n"
        if form == "json"
        else f"{overview}\n\n{_UNIT}\n",
    )

"""Run the subcommands. Each is a function from its options to an exit code and a text.

A function takes the options that it honours out of the dictionary; what is left is refused by the caller.
"""

import inspect
import json
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ppfunc._checks import suggestion
from ppfunc.parallel import Topology, effective_loads, partition_balanced, partition_layers
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Plan,
    Schedule,
    Timeline,
    check,
    compare_schedules,
    compute_only,
    find_builder,
    place_communication,
    plan,
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
from ppfunc.schedule.planner.plan import chunk_counts, shared_costs

from .options import (
    JSON,
    SOURCE,
    Options,
    chunk_range,
    cost_options,
    costed_schedule,
    find_source,
    form_of,
    is_file,
    option,
    read_costs,
    read_file,
    require_effect,
    require_size,
    write,
)

_TEXTS: dict[str, Callable[[Schedule], str]] = {
    "csv": lambda schedule: to_csv(remove_slots(schedule)),
    "steps": to_steps,
    "json": to_json,
}
_PICTURES: dict[str, Callable[[Schedule | Timeline, int | None], str]] = {
    "grid": lambda schedule, width: to_grid(schedule, width=width),
    "svg": lambda schedule, width: to_svg(schedule, width=width),
    "trace": lambda schedule, width: to_trace(schedule),
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

_ACTIVATIONS = "activations: those of one microbatch in one rank's share of the model"
_COLUMNS = (
    "Columns: the makespan in the unit of the costs; the bubble as a share of the makespan, and of the span"
    " (the largest time, over the ranks, from their first start to their last end); the peak of activations"
    " in activations of one microbatch in one rank's share of the model; messages in a step; parameters held,"
    " in shares of one rank; and by how much the makespan is over the lower bound of its placement, which no"
    " order of its stages beats, a - where no bound is known (several chains, a graph). The stages of a graph"
    " count alike, unless costs are given per stage."
)
_UNIT = (
    "Columns: time of a step; share that ranks wait, of it and of their span from first to last instruction;"
    " most activations of a\nrank, in microbatches of its share; messages; copies of parameters; distance to"
    " the lower bound of the placement.\nCosts are those of a rank's share of the model, also where it holds"
    " several stages; `ppfunc simulate` takes those of a stage, or with --per rank these."
)
_TABLES = {"table": (".txt",), "svg": (".svg",), "json": (".json",)}


_WRITERS: dict[str, Callable[[Plan], str]] = {
    "csv": lambda best: to_csv(best.schedule),
    "json": lambda best: to_json(best.schedule),
    "svg": lambda best: to_svg(best.timeline),
}
_NOT_PLANNED = ("overlapped", "unshard", "reduce_tied", "reduce_grad", "step")
_NEEDED = {"recompute": "cap", "offload": "cap", "checkpoint": "recompute", "fetch": "offload"}


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
    if for_torch:
        return 0, to_torch_csv(schedule)
    # An SVG and a grid in time have no place for messages, a trace of known times has no time for more.
    in_time = drawn and (timeline is not None or costs is not None)
    messages = form != "svg" and not (in_time and (form == "grid" or costs is None))
    if messages and options.pop("lowered", False):
        schedule = schedule if schedule.has_messages else place_communication(schedule)
    elif form == "csv":
        schedule = compute_only(schedule)
    if not drawn:
        return 0, _TEXTS[form](schedule)
    if costs is not None:
        timeline = simulate(schedule, costs)
    return 0, _PICTURES[form](timeline or schedule, width)


def _check(options: Options) -> tuple[int, str]:
    most = options.pop("max_activations", None)
    make, _, _ = find_source(options, proved=False)
    return 0, f"{check(make(None), max_activations=most)}\n"


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
    made = "measured" if timeline.measured else "predicted"
    unit = f"{made}, in seconds" if timeline.seconds else f"in the unit of the costs per {per}"
    return 0, f"{timeline}\n{held}times: {unit}\n{_ACTIVATIONS}\n"


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
    named = {name for build in builders for name in inspect.signature(build).parameters}
    taken = named if items else {"chunks"}
    chunks, slices = (options.pop(name, 2) if name in taken else 2 for name in ("chunks", "slices"))
    require_size(ranks, microbatches * slices, chunks)
    cap = options.pop("cap", None)
    overview = compare_schedules(
        ranks, microbatches, items or None, costs, cap=cap, chunks=chunks, slices=slices
    )
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


def _plan(options: Options) -> tuple[int, str]:
    for name, other in _NEEDED.items():
        if name in options and other not in options:
            raise ValueError(f"{option(name)} changes nothing without {option(other)}: give that too")
    form, as_json = form_of(options, {form: (f".{form}",) for form in _WRITERS}), options.pop("json", False)
    ranks, microbatches, costs = options["ranks"], options["microbatches"], read_costs(options) or Costs()
    counts = chunk_counts(ranks, costs, options["placement"], options.get("chunks"))
    require_size(ranks, microbatches, max(counts))
    per = options.pop("per", "rank" if len(counts) > 1 else "stage")
    if per == "rank":
        costs = shared_costs(costs, 1, counts[0])
    out, interrupts = options.pop("out", None), list[int]()

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)  # for the second one

    before = signal.signal(signal.SIGINT, note)
    try:
        best = plan(costs=costs, progress=lambda *_: bool(interrupts), **options)
    finally:
        signal.signal(signal.SIGINT, before)
    options.clear()  # which are the arguments
    if out:
        write(_WRITERS[form](best), out)
    if as_json:
        return 0, json.dumps(_figures(best), default=float) + "\n"
    return 0, f"{best.placement}: {best}; {best.found}; in the units of the costs, per {per}\n"


def _figures(best: Plan) -> dict[str, Any]:
    timeline = best.timeline
    return {
        "objective": best.objective,
        "value": best.value,
        "bound": best.bound.value,
        "gap": best.gap,
        "binds": f"{best.bound.name} of rank {best.bound.rank}",
        "span": timeline.span,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_activations": list(timeline.peak_activations),
        "placement": list(best.schedule.placement),
        "found": best.found,
        "costs": json.loads(best.costs.to_json()),
    }


def _tune(options: Options) -> tuple[int, str]:
    form_of(options, {"svg": (".svg",)})
    from ppfunc.tuning.tune import tune  # here, because it loads torch

    source, out, as_json = options.pop("source"), options.pop("out", None), options.pop("json", False)
    file, _, name = source.rpartition(":")
    if not file:
        raise ValueError(f"expected FILE:FUNCTION, such as train.py:arguments, got {source!r}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a file that it runs
    if not callable(function := (names := runpy.run_path(file)).get(name)):
        raise ValueError(f"{file} has no function {name!r}{suggestion(name, names)}")
    say = {"progress": lambda *step: print(*step, file=sys.stderr)} if sys.stderr.isatty() else {}
    of_file = function()
    if not isinstance(of_file, dict):
        raise ValueError(f"{source} returned {of_file!r}, expected the arguments of ppfunc.tune by name")
    try:
        tuning = tune(**of_file | say | options)
    except TypeError as error:
        raise ValueError(f"{source}: {error}") from None
    options.clear()  # which are arguments
    if out:
        write(tuning.to_svg(), out)
    fits = tuning.rows and tuning.rows[0].fits
    return 0 if fits else 1, f"{tuning.to_json() if as_json else tuning}\n"


def _topology(options: Options) -> tuple[int, str]:
    topology = Topology.parse(options.pop("axes"))
    if topology.world_size > 1_000_000:
        raise ValueError(f"{topology.world_size} ranks are too many to print, expected at most a million")
    groups = {axis: list(topology.groups(axis)) for axis in topology.axes}
    places = [dict(zip(topology.axes, place, strict=True)) for place in topology.coordinates()]
    if options.pop("json", False):
        figures = {"world_size": topology.world_size, "coordinates": places, "groups": groups}
        return 0, json.dumps(figures) + "\n"
    lines = [f"{topology}: {topology.world_size} ranks"]
    for rank, place in enumerate(places):
        lines.append(f"rank {rank}: {', '.join(f'{axis}={index}' for axis, index in place.items())}")
    for axis, of_axis in groups.items():
        lines.append(f"groups along {axis}: {' '.join(str(list(group)) for group in of_axis)}")
    return 0, "\n".join([*lines, ""])


def _partition(options: Options) -> tuple[int, str]:
    stages, empty = options.pop("stages"), options.pop("allow_empty", False)
    layers, weights = options.pop("layers", None), options.pop("weights", None)
    if (layers is None) is (weights is None):
        raise ValueError("give either --weights or --layers")
    default = 0 if layers is None else 1
    ends = [options.pop(name, default) for name in ("input_weight", "output_weight")]
    if layers is None:
        weights = list(weights) if isinstance(weights, tuple) else [weights]
        weights[0] += ends[0]
        weights[-1] += ends[1]
        partition = partition_balanced(weights, stages, allow_empty=empty)
        results: dict[str, Any] = {"boundaries": partition.boundaries, "loads": partition.loads(weights)}
    else:
        partition = partition_layers(layers, stages, *ends, allow_empty=empty)
        results = {"boundaries": partition.boundaries, "loads": effective_loads(partition, *ends)}
        results["split_points"] = partition.split_points()
    if options.pop("json", False):
        return 0, json.dumps(results) + "\n"
    return 0, "".join(f"{name.replace('_', ' ')}: {list(values)}\n" for name, values in results.items())


class Command(NamedTuple):
    """Describe a subcommand.

    Args:
        run: function from the options to an exit code and a text.
        help, description, example: texts of the help; the example has command lines.
        options: the options by name, each with its meaning, or with arguments of ``argparse``.
        unit: thing that a cost without commas is for; empty for a subcommand without costs.
    """

    run: Callable[[Options], tuple[int, str]]
    help: str
    example: str
    description: str | None = None
    options: Mapping[str, Any] = {}
    unit: str = ""


_OUT = {"out": "write there instead of to standard output"}
COMMANDS = {
    "list": Command(
        _list,
        "schedules that can be built, with their options; in Python, help(ppfunc.zbv) says more",
        "  ppfunc list",
    ),
    "show": Command(
        _show,
        f"print, draw or convert a schedule: --format {', '.join(_SUFFIXES)}, or the suffix of --out",
        (
            "  ppfunc show 1f1b --ranks 4 --microbatches 8\n  ppfunc show zbv --ranks 4 --microbatches 8"
            " --forward 1 --backward 2 --format svg --out zbv.svg\n  ppfunc show zbv --ranks 4 --microbatches"
            " 8 --for torch --out zbv.csv\n  ppfunc show zbv.csv --format trace --out trace.json\n  ppfunc"
            " show trace.json"
        ),
        "Grid, SVG and trace are drawn with the costs, or with the times of a trace.",
        SOURCE
        | cost_options()
        | {
            "format": {
                "choices": tuple(_SUFFIXES),
                "help": "default: as the suffix of --out says, else grid; csv for torch",
            },
            "for": {
                "choices": ("torch",),
                "help": "a csv that torch.distributed.pipelining's runtime runs",
            },
            "lowered": "with communication; csv without it holds compute only",
            "width": "pixels of an svg, or most columns of a grid; default of a trace: those of the terminal",
        }
        | _OUT,
        "all stages",
    ),
    "check": Command(
        _check,
        "prove a schedule, or say what is wrong with it",
        (
            "  ppfunc show zb_h1 --ranks 4 --microbatches 8 --lowered --format csv | ppfunc check -"
            " --max-activations 4\n  ppfunc check 1f1b --ranks 4 --microbatches 8"
        ),
        "Exits with 0 where the schedule is right, with 1 where it is wrong.",
        SOURCE | {"max_activations": "refuse a rank that holds more activations at one time"},
    ),
    "simulate": Command(
        _simulate,
        "time, bubbles and memory of a schedule on paper",
        "  ppfunc simulate 1f1b --ranks 4 --microbatches 8 --forward 1,2,1,1 --backward 2,4,2,2",
        "A trace without costs has the times that were measured.",
        SOURCE | cost_options() | JSON,
        "all stages",
    ),
    "compare": Command(
        _compare,
        "a table of schedules for the same model part per rank",
        (
            "  ppfunc compare --ranks 8 --microbatches 32\n"
            "  ppfunc compare --ranks 4 --microbatches 8 1f1b zbv dualpipe --cap 4\n"
            "  ppfunc compare --ranks 8 --microbatches 32 --format svg --out schedules.svg"
        ),
        _COLUMNS,
        {
            "names": {
                "metavar": "NAME|FILE",
                "nargs": "*",
                "help": "names of `ppfunc list`, or files; default: the list",
            },
            "ranks": "number of ranks; default: that of the first file",
            "microbatches": "number of microbatches; default: that of the first file",
            "chunks": "stages per rank, where that is a choice; default: 2",
            "slices": "slices of a sequence (seq1f1b, seq_zb, decode), a microbatch here; default: 2",
            "cap": "memory of a rank, in the unit of the costs; default: no limit",
            "width": "pixels of an svg",
            "format": {
                "choices": tuple(_TABLES),
                "help": "svg: bubble against memory; default: as the suffix of --out says, else table",
            },
        }
        | _OUT
        | cost_options(per=None),
        "one rank's share of the model",
    ),
    "plan": Command(
        _plan,
        "search for the shortest schedule that fits in memory, with a lower bound",
        ("  ppfunc plan --ranks 4 --microbatches 12 --cap 4 --weight-share 1 --placement v --objective span"),
        (
            "The stages of a rank share costs per rank; messages keep their size. Where several numbers of"
            " chunks are tried, costs are per rank; pp.plan takes those of a stage of the first number."
            " Plans are chains: in Python, pp.arrange, pp.with_parts and pp.spread put a graph in order."
            " Ctrl-C ends the search with the best schedule so far."
        ),
        {
            "ranks": {"required": True, "help": "number of ranks"},
            "microbatches": {"required": True, "help": "number of microbatches"},
            "slices": "slices of a sequence, of which each is a microbatch; default: no carry",
            "cap": "memory of a rank, in the unit of an activation; default: no limit",
            "placement": {"choices": ("loop", "v", "any"), "default": "any", "help": "default: any"},
            "chunks": {
                "type": chunk_range,
                "metavar": "V|V..V",
                "help": "stages per rank, one number or a range; default 1..4 for any",
            },
            "objective": {
                "choices": ("makespan", "span"),
                "help": "time to minimise; default: makespan",
            },
            "effort": "how long to search; default 1, some seconds",
            "out": "write the schedule there, as its suffix says: .csv, .json or .svg",
        }
        | JSON
        | {
            name: meaning
            for name, meaning in cost_options(
                "rank where several numbers of chunks are tried, else stage"
            ).items()
            if name not in _NOT_PLANNED
        },
        "all stages",
    ),
    "tune": Command(
        _tune,
        "rank grids, cuts, schedules, rematerialisation and shards for a model, with torch",
        "  ppfunc tune train.py:arguments --ranks 8 --memory 80e9 --out frontier.svg",
        (
            "FUNCTION of the file FILE, which is run, returns a dictionary of arguments of ppfunc.tune, such"
            " as grids, tensor=, which lays the model over tensor ranks, and parts= and spread=, which put an"
            " output layer and an encoder on all ranks of a pipeline; the options here come before"
            " those. Ctrl-C ends the search with the best so far."
        ),
        {
            "source": {"metavar": "FILE:FUNCTION", "help": "where the arguments come from"},
            "ranks": "number of ranks of all pipelines together",
            "batch": "number of rows of a step",
            "memory": "bytes of a rank",
            "top": "number of rows that fit; default: 5",
            "effort": "effort of plans; default: 0.1",
            "out": "draw seconds over bytes there, as an svg",
        }
        | JSON,
    ),
    "topology": Command(
        _topology,
        "ranks, coordinates and groups of a grid of processes",
        "  ppfunc topology --axes pipe=2,data=2,model=2",
        "Print a grid of processes.",
        {
            "axes": {
                "required": True,
                "help": "names and sizes, slowest first, as in pipe=2,data=2,model=2",
            }
        }
        | JSON,
    ),
    "partition": Command(
        _partition,
        "cut layers into stages",
        "  ppfunc partition --weights 1,2,3,2,1 --stages 3\n  ppfunc partition --layers 32 --stages 4",
        "Print where layers are cut into stages, and the loads.",
        {
            "weights": "weight of each layer, as in 1,2,3; or --layers",
            "layers": "number of equal layers",
            "stages": {"required": True, "help": "number of stages"},
            "input_weight": "cost of the embedding in layers (1 with --layers)",
            "output_weight": "cost of norm and head in layers (1 with --layers)",
            "allow_empty": "accept stages without layers",
        }
        | JSON,
    ),
}
"""The subcommands, in the order of the help."""

"""Run the subcommands that search: ``ppfunc plan`` for a schedule, ``tune`` for a configuration."""

import argparse
import json
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppfunc._checks import suggestion
from ppfunc.schedule import Costs, Plan, plan, to_csv, to_json, to_svg
from ppfunc.schedule.planner.plan import chunk_counts, shared_costs

from .options import (
    Options,
    add_command,
    add_cost_options,
    add_json,
    add_options,
    form_of,
    option,
    read_costs,
    require_size,
    write,
)

_WRITERS: dict[str, Callable[[Plan], str]] = {
    "csv": lambda best: to_csv(best.schedule),
    "json": lambda best: to_json(best.schedule),
    "svg": lambda best: to_svg(best.schedule, best.timeline),
}
_NOT_PLANNED = ("overlapped", "unshard", "reduce_tied", "reduce_grad", "step")
_NEEDED = {"recompute": "cap", "offload": "cap", "checkpoint": "recompute", "fetch": "offload"}


def add_searches(commands: Any) -> None:
    """Add ``plan`` and ``tune`` to the subparsers of a command line."""
    planning = add_command(
        commands,
        "plan",
        _plan,
        help="search for the shortest schedule that fits in memory, with a lower bound",
        description=(
            "The stages of a rank share costs per rank; messages keep their size. Where several numbers of"
            " chunks are tried, costs are per rank; pp.plan takes those of a stage of the first number."
            " Ctrl-C ends the search with the best schedule so far."
        ),
        example=(
            "  ppfunc plan --ranks 4 --microbatches 12 --cap 4 --weight-share 1 --placement v --objective"
            " span"
        ),
    )
    add_options(
        planning,
        ("ranks", "microbatches"),
        ranks="number of ranks",
        microbatches="number of microbatches",
        cap="memory of a rank, in the unit of an activation; default: no limit",
        effort="how long to search; default 1, some seconds",
        out="write the schedule there, as its suffix says: .csv, .json or .svg",
    )
    default = "rank where several numbers of chunks are tried, else stage"
    add_cost_options(planning, "all stages", without=_NOT_PLANNED, per=default)
    styles = ("loop", "v", "any")
    planning.add_argument("--placement", choices=styles, default="any", help="default: any")
    chunks = "stages per rank, one number or a range; default 1..4 for any"
    planning.add_argument("--chunks", type=_range, metavar="V|V..V", help=chunks)
    objective = "time to minimise; default: makespan"
    planning.add_argument("--objective", choices=("makespan", "span"), help=objective)
    add_json(planning)
    tuning = add_command(
        commands,
        "tune",
        _tune,
        help="rank grids, cuts, schedules, rematerialisation and shards for a model, with torch",
        description=(
            "FUNCTION of the file FILE, which is run, returns a dictionary of arguments of ppfunc.tune, such"
            " as grids, and tensor=, which lays the model over tensor ranks; the options here come before"
            " those. Ctrl-C ends the search with the best so far."
        ),
        example="  ppfunc tune train.py:arguments --ranks 8 --memory 80e9 --out frontier.svg",
    )
    tuning.add_argument("source", metavar="FILE:FUNCTION", help="where the arguments come from")
    add_options(
        tuning,
        ranks="number of ranks of all pipelines together",
        batch="number of rows of a step",
        memory="bytes of a rank",
        top="number of rows that fit; default: 5",
        effort="effort of plans; default: 0.1",
        out="draw seconds over bytes there, as an svg",
    )
    add_json(tuning)


def _range(text: str) -> Any:
    """Read a whole number or a range such as 1..4."""
    first, dots, last = text.partition("..")
    try:
        return range(int(first), int(last) + 1) if dots else int(first)
    except ValueError:
        wanted = "a whole number or a range such as 1..4"
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None


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
    return 0, f"{best.placement}: {best}; {best.found}; costs per {per}\n"


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

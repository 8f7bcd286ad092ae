"""Run the subcommands that search: ``ppfunc plan`` for a schedule, ``tune`` for a configuration."""

import argparse
import json
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

from ppfunc._checks import suggestion
from ppfunc.schedule import Costs, Plan, plan, to_csv, to_json, to_svg
from ppfunc.schedule.planner.placements import chunk_counts, shared_costs

from .console import count, form_of, number, require_folder, write
from .options import add_cost_options, add_options, given, read_costs, require_size

_WRITERS: dict[str, Callable[[Plan], str]] = {
    ".csv": lambda best: to_csv(best.schedule),
    ".json": lambda best: to_json(best.schedule),
    ".svg": lambda best: to_svg(best.schedule, best.timeline),
}
_NOT_PLANNED = ("overlapped", "unshard", "reduce_tied", "reduce_grad", "step")


def add_plan(commands: Any) -> None:
    """Add ``plan`` to the subparsers of a command line."""
    planning = commands.add_parser(
        "plan",
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
    _add_options(planning)
    planning.add_argument("--json", action="store_true", help="print one JSON object")
    planning.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the schedule there, as its suffix says: .csv, .json or .svg",
    )
    planning.set_defaults(func=_plan)


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, metavar in (("ranks", "P"), ("microbatches", "M")):
        parser.add_argument(f"--{name}", type=count, metavar=metavar, required=True, help=f"number of {name}")
    default = "rank where several numbers of chunks are tried, else stage"
    add_cost_options(parser, "all stages or layers", without=_NOT_PLANNED, per=default)
    add_options(
        parser,
        layers="costs are those of N layers, also cut into stages; simulate --costs reads what --json prints",
        cap="memory of a rank, in the unit of an activation; default: no limit",
        effort="how long to search; default 1, some seconds",
    )
    parser.add_argument(
        "--placement", choices=("loop", "v", "wave", "any"), default="any", help="default: any"
    )
    parser.add_argument(
        "--chunks",
        type=_range,
        metavar="V|V..V",
        help="stages per rank, one number or a range; default 1..4 for any",
    )
    parser.add_argument(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help="time to minimise; default: makespan",
    )


def _range(text: str) -> Any:
    """Read a whole number or a range such as 1..4."""
    first, dots, last = text.partition("..")
    try:
        values = range(int(first), int(last) + 1) if dots else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number or a range such as 1..4, got {text!r}"
        ) from None
    if values == range(0):
        raise argparse.ArgumentTypeError(
            f"expected a range from small to large, such as {last}..{first}, got {text!r}"
        )
    return values


def _in_parts(costs: Costs) -> Costs:
    """Drop the cost of a whole backward if it is the sum of its parts: a plan splits backwards."""
    apart = replace(costs, backward=None)
    values = (costs.backward, costs.backward_input, costs.backward_weight)
    stages = max(len(value) if isinstance(value, Sequence) else 1 for value in values)
    return apart if all(isclose(apart.backward_of(s), costs.backward_of(s)) for s in range(stages)) else costs


def _costs(arguments: argparse.Namespace) -> tuple[Costs, str]:
    """Return the costs as :func:`plan` takes them, and what they were given for: a layer, stage or rank."""
    costs, ranks, layers = _in_parts(read_costs(arguments) or Costs()), arguments.ranks, arguments.layers
    counts = chunk_counts(ranks, costs, arguments.placement, arguments.chunks, layers)
    require_size(ranks, arguments.microbatches, max(counts))
    if layers is not None:
        if arguments.per is not None:
            raise ValueError(
                "--per changes nothing with --layers, whose costs are those of a layer: leave it out"
            )
        return costs, "layer"
    if arguments.per == "stage" and len(counts) > 1:
        raise ValueError(
            "--per stage: several numbers of chunks have stages of other sizes; give one, or --per rank"
        )
    if arguments.per != "rank" and len(counts) == 1:
        return costs, "stage"
    for name, value in vars(costs).items():
        if isinstance(value, Sequence | Mapping):
            raise ValueError(f"--per rank: {name} is {value!r}, expected one number")
    return shared_costs(costs, 1, counts[0]), "rank"


def _planned(arguments: argparse.Namespace, costs: Costs) -> Plan:
    """Search until the effort is spent or Ctrl-C; return the best plan so far."""
    with _interrupted() as interrupted:
        return plan(
            arguments.ranks,
            arguments.microbatches,
            costs,
            cap=arguments.cap,
            placement=arguments.placement,
            chunks=arguments.chunks,
            layers=arguments.layers,
            objective=arguments.objective,
            effort=1 if arguments.effort is None else arguments.effort,
            progress=lambda *_: bool(interrupted),
        )


@contextmanager
def _interrupted() -> Iterator[list[int]]:
    """Yield a list that receives the first Ctrl-C; the second one interrupts as usual."""
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        signals.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def _plan(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out and out.suffix not in _WRITERS:
        raise ValueError(f"--out {out} ends in {out.suffix!r}, expected one of {', '.join(_WRITERS)}")
    require_folder(out)
    for name, other in (
        ("recompute", "cap"),
        ("offload", "cap"),
        ("checkpoint", "recompute"),
        ("fetch", "offload"),
    ):
        if getattr(arguments, name) is not None and getattr(arguments, other) is None:
            raise ValueError(f"--{name} changes nothing without --{other}: give that too, or leave it out")
    costs, per = _costs(arguments)
    best = _planned(arguments, costs)
    if out:
        write(_WRITERS[out.suffix](best), out)
    print(
        json.dumps(_figures(best), default=float)
        if arguments.json
        else f"{best.placement}: {best}; {best.found}; costs per {per}"
    )
    return 0


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
        **({} if best.partition is None else {"boundaries": list(best.partition.boundaries)}),
    }


def add_tune(commands: Any) -> None:
    """Add ``tune`` to the subparsers of a command line."""
    tuning = commands.add_parser(
        "tune",
        help="rank grids, cuts, schedules, rematerialisation and shards for a model, with torch",
        description=(
            "FUNCTION of the file FILE, which is run, returns a dictionary of arguments of ppfunc.tune, such"
            " as grids, and tensor=, which lays the model over tensor ranks; the options here come before"
            " those. Ctrl-C ends the search with the best so far."
        ),
        example="  ppfunc tune train.py:arguments --ranks 8 --memory 80e9 --out frontier.svg",
    )
    tuning.add_argument("source", metavar="FILE:FUNCTION", help="where the arguments come from")
    for name, kind, meaning in (
        ("ranks", count, "of all pipelines together"), ("batch", count, "rows of a step"),
        ("memory", number, "bytes of a rank"), ("top", count, "rows that fit; default: 5"),
        ("effort", number, "of plans; default: 0.1"),
    ):  # fmt: skip
        tuning.add_argument(f"--{name}", type=kind, metavar="N", help=meaning)
    tuning.add_argument("--json", action="store_true", help="print one JSON object")
    tuning.add_argument("--out", metavar="FILE", type=Path, help="draw seconds over bytes there, as an svg")
    tuning.set_defaults(func=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    form_of(arguments.out, None, {"svg": (".svg",)})
    require_folder(arguments.out)
    from ppfunc.tuning.tune import tune  # here, because it loads torch

    file, _, name = arguments.source.rpartition(":")
    if not file:
        raise ValueError(f"expected FILE:FUNCTION, such as train.py:arguments, got {arguments.source!r}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a file that it runs
    if not callable(function := (names := runpy.run_path(file)).get(name)):
        raise ValueError(f"{file} has no function {name!r}{suggestion(name, names)}")
    chosen = given(arguments, ("ranks", "batch", "memory", "top", "effort"))
    say = {"progress": lambda *step: print(*step, file=sys.stderr)} if sys.stderr.isatty() else {}
    of_file = function()
    if not isinstance(of_file, dict):
        raise ValueError(
            f"{arguments.source} returned {of_file!r}, expected the arguments of ppfunc.tune by name"
        )
    try:
        tuning = tune(**of_file | say | chosen)
    except TypeError as error:
        raise ValueError(f"{arguments.source}: {error}") from None
    if arguments.out:
        write(tuning.to_svg(), arguments.out)
    write(f"{tuning.to_json() if arguments.json else tuning}\n")
    return 0 if tuning.rows and tuning.rows[0].fits else 1

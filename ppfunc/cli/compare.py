"""Run ``ppfunc compare``: a table of schedules for one model."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from ppfunc.schedule import Schedule, compare_schedules, find_builder, to_scatter
from ppfunc.schedule.planner.overview import Overview

from .console import form_of, write
from .options import (
    add_cost_options,
    add_options,
    is_file,
    read_costs,
    read_file,
    require_effect,
    require_size,
)

_COLUMNS = """Columns: the makespan in the unit of the costs; the bubble as a share of the makespan, and of
the span (the largest time, over the ranks, from their first start to their last end); the peak of
activations in those of one microbatch in one rank's share of the model; messages in a step; parameters held,
in shares of one rank; and by how much the makespan is over the lower bound of its placement, which no order
of its stages beats, a - where no bound is known (several chains)."""

_UNIT = (
    "Costs are those of a rank's share of the model, also where it holds several stages; `ppfunc simulate`"
    " takes those of a stage, or with --per rank these."
)
_SUFFIXES = {"table": (".txt",), "svg": (".svg",), "json": (".json",)}


def add_compare(commands: Any) -> None:
    """Add ``compare`` to the subparsers of a command line."""
    comparing = commands.add_parser(
        "compare",
        help="a table of schedules for the same model part per rank",
        description=_COLUMNS.replace("\n", " "),
        example=(
            "  ppfunc compare --ranks 8 --microbatches 32\n"
            "  ppfunc compare --ranks 4 --microbatches 8 1f1b zbv dualpipe --cap 4\n"
            "  ppfunc compare --ranks 8 --microbatches 32 --format svg --out schedules.svg"
        ),
    )
    comparing.add_argument(
        "names",
        metavar="NAME|FILE",
        nargs="*",
        help="names of `ppfunc list`, or files; default: the list",
    )
    add_options(
        comparing,
        ranks="number of ranks; default: that of the first file",
        microbatches="number of microbatches; default: that of the first file",
        chunks="stages per rank, where that is a choice; default: 2",
        cap="memory of a rank, in the unit of the costs; default: no limit",
        width="pixels of an svg",
        out="write there instead of to standard output",
    )
    add_cost_options(comparing, "one rank's share of the model", per=None)
    comparing.add_argument(
        "--format",
        choices=tuple(_SUFFIXES),
        help="svg: bubble against memory; default: as the suffix of --out says, else table",
    )
    comparing.set_defaults(func=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    form = form_of(arguments.out, arguments.format, _SUFFIXES)
    if arguments.width is not None and form != "svg":
        raise ValueError(f"--width is for an svg: leave it out of --format {form}")
    costs = read_costs(arguments)
    items = list(_items(arguments.names))
    ranks, microbatches = _numbers(arguments, items)
    built = [item for item in items if isinstance(item, str)]
    if (
        arguments.chunks is not None
        and items
        and not any("chunks" in signature(find_builder(name)).parameters for name in built)
    ):
        raise ValueError("--chunks changes nothing: none of these schedules takes it")
    chunks = 2 if arguments.chunks is None else arguments.chunks
    require_size(ranks, microbatches, chunks)
    overview = compare_schedules(ranks, microbatches, items or None, costs, cap=arguments.cap, chunks=chunks)
    sizes = () if form == "json" or arguments.cap is not None else ("activation", "parameters")
    unseen = [name for name in sizes if not isinstance(getattr(arguments, name), tuple)]
    require_effect(arguments, [row.timeline.schedule for row in overview.rows], unseen)
    if form == "svg":
        text = to_scatter(overview, width=arguments.width)
    else:
        text = (
            f"{overview}\n\n{_UNIT}\n"
            if form == "table"
            else json.dumps(_document(overview), default=float) + "\n"
        )
    write(text, arguments.out)
    return 0


def _items(names: list[str]) -> Iterator[str | Schedule]:
    """Read the schedules of files, named after the file; pass names on as they are."""
    for name in names:
        if is_file(name):
            schedule, _ = read_file(name)
            yield replace(schedule, name=schedule.name if name == "-" else Path(name).name)
        else:
            find_builder(name)  # else it is unknown
            yield name


def _numbers(arguments: argparse.Namespace, items: list[str | Schedule]) -> tuple[int, int]:
    """Read the numbers of ranks and microbatches from the options, or else from the first file."""
    first = next((item for item in items if isinstance(item, Schedule)), None)
    numbers = []
    for name in ("ranks", "microbatches"):
        value = getattr(arguments, name)
        if value is None and first is None:
            raise ValueError(f"--{name} is missing: say how many there are, or name a file")
        numbers.append(getattr(first, name) if value is None else value)
    return numbers[0], numbers[1]


def _document(overview: Overview) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "makespan": row.timeline.makespan,
            "span": row.timeline.span,
            "bubble": row.timeline.bubble,
            "span_bubble": row.timeline.span_bubble,
            "peak_activations": row.peak_activations,
            "messages": row.messages,
            "parameters": row.parameters,
            "memory": row.memory,
            "bound": row.bound,
            "gap": row.gap,
            "over_cap": overview.exceeds(row),
        }
        for row in overview.rows
    ]
    head = {"ranks": overview.ranks, "microbatches": overview.microbatches, "cap": overview.cap}
    return {**head, "schedules": rows, "left_out": dict(overview.refused)}

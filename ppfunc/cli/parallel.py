"""Run the subcommands on ranks and layers: ``ppfunc topology`` and ``partition``."""

import argparse
import json
from typing import Any

from ppfunc.parallel import Topology, effective_loads, partition_balanced, partition_layers

from .console import MOST, count, number, numbers


def add_parallel(commands: Any) -> None:
    """Add ``topology`` and ``partition`` to the subparsers of a command line."""
    topology = commands.add_parser(
        "topology",
        help="ranks, coordinates and groups of a grid of processes",
        description="Print a grid of processes.",
        example="  ppfunc topology --axes pipe=2,data=2,model=2",
    )
    topology.add_argument(
        "--axes", required=True, help="names and sizes, slowest first, as in pipe=2,data=2,model=2"
    )
    topology.set_defaults(func=_topology)
    partition = commands.add_parser(
        "partition",
        help="cut layers into stages",
        description="Print where layers are cut into stages, and the loads.",
        example=(
            "  ppfunc partition --weights 1,2,3,2,1 --stages 3\n  ppfunc partition --layers 32 --stages 4"
        ),
    )
    source = partition.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=numbers, help="the weight of each layer, as in 1,2,3")
    source.add_argument("--layers", type=count, help="the number of equal layers")
    partition.add_argument("--stages", type=count, required=True, help="the number of stages")
    partition.add_argument(
        "--input-weight", type=number, help="cost of the embedding in layers (1 with --layers)"
    )
    partition.add_argument(
        "--output-weight", type=number, help="cost of norm and head in layers (1 with --layers)"
    )
    partition.add_argument("--allow-empty", action="store_true", help="accept stages without layers")
    partition.set_defaults(func=_partition)
    for parser in (topology, partition):
        parser.add_argument("--json", action="store_true", help="print JSON")


def _topology(arguments: argparse.Namespace) -> int:
    topology = Topology.parse(arguments.axes)
    if topology.world_size > MOST:
        raise ValueError(f"{topology.world_size} ranks are too many to print, expected at most {MOST}")
    groups = {axis: list(topology.groups(axis)) for axis in topology.axes}
    if arguments.json:
        coordinates = [dict(zip(topology.axes, c, strict=True)) for c in topology.coordinates()]
        print(json.dumps({"world_size": topology.world_size, "coordinates": coordinates, "groups": groups}))
        return 0
    print(f"{topology}: {topology.world_size} ranks")
    for rank, coordinate in enumerate(topology.coordinates()):
        print(
            f"rank {rank}:"
            f" {', '.join(f'{axis}={i}' for axis, i in zip(topology.axes, coordinate, strict=True))}"
        )
    for axis, of_axis in groups.items():
        print(f"groups along {axis}: {' '.join(str(list(group)) for group in of_axis)}")
    return 0


def _partition(arguments: argparse.Namespace) -> int:
    stages, first, last = arguments.stages, arguments.input_weight, arguments.output_weight
    if arguments.layers is not None and arguments.layers < 1:
        raise ValueError(f"--layers must be at least 1, got {arguments.layers}")
    split_points: tuple[str, ...] | None = None
    if arguments.weights is None:
        ends = (1 if first is None else first, 1 if last is None else last)
        partition = partition_layers(arguments.layers, stages, *ends, allow_empty=arguments.allow_empty)
        loads, split_points = effective_loads(partition, *ends), partition.split_points()
    else:
        weights = list(arguments.weights) if isinstance(arguments.weights, tuple) else [arguments.weights]
        weights[0] += first or 0
        weights[-1] += last or 0
        partition = partition_balanced(weights, stages, allow_empty=arguments.allow_empty)
        loads = partition.loads(weights)
    results: dict[str, tuple[Any, ...]] = {"boundaries": partition.boundaries, "loads": loads}
    if split_points is not None:
        results["split_points"] = split_points
    if arguments.json:
        print(json.dumps(results))
        return 0
    for name, values in results.items():
        print(f"{name.replace('_', ' ')}: {list(values)}")
    return 0

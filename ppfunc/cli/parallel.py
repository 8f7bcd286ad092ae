"""Run the subcommands on ranks and layers: ``ppfunc topology`` and ``partition``."""

import argparse
import json
from typing import Any

from ppfunc.parallel.letters import parse_layout
from ppfunc.parallel.partition import Partition
from ppfunc.parallel.stack import effective_loads, partition_layers
from ppfunc.parallel.topology import Topology
from ppfunc.parallel.weigh import partition_by_weights

from .number import count, number

_MOST = 1_000_000


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
    source.add_argument("--weights", help="the weight of each layer, as in 1,2,3")
    source.add_argument("--layers", type=count, help="the number of equal layers")
    source.add_argument("--layout", help="letters per layer, as in 'Et*3|(tt|)*29,m|L'")
    partition.add_argument("--stages", type=count, help="the number of stages")
    methods = "equal counts, least maximum load (the default for weights), or least maximum minus minimum"
    partition.add_argument("--method", choices=("uniform", "balanced", "min_range"), help=methods)
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
    if topology.world_size > _MOST:
        raise ValueError(f"{topology.world_size} ranks are too many to print, expected at most {_MOST}")
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
    try:
        return _cut(arguments)
    except ValueError as error:
        raise ValueError(str(error).replace("set allow_empty", "pass --allow-empty")) from None


def _cut(arguments: argparse.Namespace) -> int:
    if arguments.layout is not None:
        partition, loads, more = _from_layout(arguments)
    elif arguments.weights is not None:
        partition, loads, more = _from_weights(
            arguments, [number(text) for text in arguments.weights.split(",")]
        )
    else:
        partition, loads, more = _from_layers(arguments)
    if arguments.json:
        print(json.dumps({"boundaries": partition.boundaries, "loads": loads, **more}))
        return 0
    print(f"boundaries: {list(partition.boundaries)}")
    print(f"loads: {list(loads)}")
    for name, value in more.items():
        print(f"{name.replace('_', ' ')}: {list(value)}")
    return 0


_Cut = tuple[Partition, tuple[float, ...], dict[str, tuple[Any, ...]]]


def _from_weights(arguments: argparse.Namespace, weights: list[float]) -> _Cut:
    weights[0] += arguments.input_weight or 0
    weights[-1] += arguments.output_weight or 0
    partition = partition_by_weights(
        weights, _stages(arguments), arguments.method or "balanced", allow_empty=arguments.allow_empty
    )
    return partition, partition.loads(weights), {}


def _from_layers(arguments: argparse.Namespace) -> _Cut:
    if arguments.layers < 1:
        raise ValueError(f"--layers is one or more, got {arguments.layers}")
    if arguments.method is not None:
        return _from_weights(arguments, [1] * arguments.layers)
    ends = [1 if weight is None else weight for weight in (arguments.input_weight, arguments.output_weight)]
    partition = partition_layers(
        arguments.layers, _stages(arguments), *ends, allow_empty=arguments.allow_empty
    )
    return partition, effective_loads(partition, *ends), {"split_points": partition.split_points()}


def _from_layout(arguments: argparse.Namespace) -> _Cut:
    for option in ("method", "input_weight", "output_weight"):
        if getattr(arguments, option) is not None:
            raise ValueError(
                f"--layout says where every layer is: --{option.replace('_', '-')} has no meaning with it"
            )
    layout = parse_layout(arguments.layout, allow_empty=arguments.allow_empty)
    if arguments.stages is not None and arguments.stages != len(layout.stages):
        raise ValueError(f"the layout has {len(layout.stages)} stages, but --stages is {arguments.stages}")
    return layout.partition, layout.partition.sizes, {"stages": layout.stages, "decoders": layout.decoders}


def _stages(arguments: argparse.Namespace) -> int:
    if arguments.stages is None:
        raise ValueError("--stages is missing: say how many stages there are to be")
    return arguments.stages

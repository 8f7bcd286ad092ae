"""Run the subcommands on ranks and layers: ``ppfunc topology`` and ``partition``."""

import json
from typing import Any

from ppfunc.parallel import Topology, effective_loads, partition_balanced, partition_layers

from .options import Options, add_command, add_json, add_options

_MOST = 1_000_000  # ranks


def add_parallel(commands: Any) -> None:
    """Add ``topology`` and ``partition`` to the subparsers of a command line."""
    topology = add_command(
        commands,
        "topology",
        _topology,
        help="ranks, coordinates and groups of a grid of processes",
        description="Print a grid of processes.",
        example="  ppfunc topology --axes pipe=2,data=2,model=2",
    )
    axes = "names and sizes, slowest first, as in pipe=2,data=2,model=2"
    topology.add_argument("--axes", required=True, help=axes)
    partition = add_command(
        commands,
        "partition",
        _partition,
        help="cut layers into stages",
        description="Print where layers are cut into stages, and the loads.",
        example=(
            "  ppfunc partition --weights 1,2,3,2,1 --stages 3\n  ppfunc partition --layers 32 --stages 4"
        ),
    )
    source = partition.add_mutually_exclusive_group(required=True)
    add_options(source, weights="weight of each layer, as in 1,2,3", layers="number of equal layers")
    add_options(
        partition,
        ("stages",),
        stages="number of stages",
        input_weight="cost of the embedding in layers (1 with --layers)",
        output_weight="cost of norm and head in layers (1 with --layers)",
    )
    partition.add_argument("--allow-empty", action="store_true", help="accept stages without layers")
    for parser in (topology, partition):
        add_json(parser)


def _topology(options: Options) -> tuple[int, str]:
    topology = Topology.parse(options.pop("axes"))
    if topology.world_size > _MOST:
        raise ValueError(f"{topology.world_size} ranks are too many to print, expected at most {_MOST}")
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

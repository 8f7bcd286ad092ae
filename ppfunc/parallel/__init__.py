"""Arithmetic on ranks and layers: topologies, placements, partitions. The standard library only."""

from .balance import partition_balanced
from .chunks import chunks_balanced, chunks_uniform
from .config import build_schedule, count_microbatches, find_builder, split_points_for
from .groups import (
    Membership,
    NamedGroup,
    ParallelSizes,
    data_parallel_groups,
    groups_in_creation_order,
    membership,
    model_groups,
    neighbour_pairs,
    parallel_sizes,
    pipeline_groups,
    rank_of_stage,
    replica_groups,
    slice_groups,
)
from .layout import Layout, parse_layout
from .partition import Partition, partition_explicit, partition_uniform
from .placement import Placement, bidirectional, explicit, loop, place, stage_ids_of_rank, v_shape
from .split import count_stages, effective_loads, partition_layers, split_points
from .spread import partition_spread
from .topology import Topology, default_grid, pipe_data, pipe_model_data, prime_factors
from .weigh import (
    count_layer_parameters,
    layer_name,
    measure_layers,
    partition_by_parameters,
    partition_by_pattern,
    partition_by_time,
    partition_by_weights,
)

__all__ = [
    "Layout",
    "Membership",
    "NamedGroup",
    "ParallelSizes",
    "Partition",
    "Placement",
    "Topology",
    "bidirectional",
    "build_schedule",
    "chunks_balanced",
    "chunks_uniform",
    "count_layer_parameters",
    "count_microbatches",
    "count_stages",
    "data_parallel_groups",
    "default_grid",
    "effective_loads",
    "explicit",
    "find_builder",
    "groups_in_creation_order",
    "layer_name",
    "loop",
    "measure_layers",
    "membership",
    "model_groups",
    "neighbour_pairs",
    "parallel_sizes",
    "parse_layout",
    "partition_balanced",
    "partition_by_parameters",
    "partition_by_pattern",
    "partition_by_time",
    "partition_by_weights",
    "partition_explicit",
    "partition_layers",
    "partition_spread",
    "partition_uniform",
    "pipe_data",
    "pipe_model_data",
    "pipeline_groups",
    "place",
    "prime_factors",
    "rank_of_stage",
    "replica_groups",
    "slice_groups",
    "split_points",
    "split_points_for",
    "stage_ids_of_rank",
    "v_shape",
]

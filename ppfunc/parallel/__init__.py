"""Compute with ranks and layers: topologies, placements, partitions. Needs the standard library only."""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .balance import (
        chunks_balanced as chunks_balanced,
        chunks_uniform as chunks_uniform,
        count_layer_parameters as count_layer_parameters,
        partition_balanced as partition_balanced,
    )
    from .groups import (
        Membership as Membership,
        NamedGroup as NamedGroup,
        ParallelSizes as ParallelSizes,
        data_parallel_groups as data_parallel_groups,
        groups_in_creation_order as groups_in_creation_order,
        membership as membership,
        model_groups as model_groups,
        neighbour_pairs as neighbour_pairs,
        parallel_sizes as parallel_sizes,
        pipeline_groups as pipeline_groups,
        rank_of_stage as rank_of_stage,
        replica_groups as replica_groups,
        slice_groups as slice_groups,
    )
    from .partition import (
        Partition as Partition,
        partition_explicit as partition_explicit,
        partition_uniform as partition_uniform,
    )
    from .placement import (
        Placement as Placement,
        bidirectional as bidirectional,
        explicit as explicit,
        loop as loop,
        place as place,
        stages_of as stages_of,
        v_shape as v_shape,
    )
    from .stack import (
        count_stages as count_stages,
        effective_loads as effective_loads,
        partition_layers as partition_layers,
    )
    from .topology import (
        Topology as Topology,
        default_grid as default_grid,
        pipe_data as pipe_data,
        pipe_model_data as pipe_model_data,
        prime_factors as prime_factors,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)

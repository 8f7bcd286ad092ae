"""Compute with ranks and layers: topologies, placements, partitions. Needs the standard library only."""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .partition import (
        Partition as Partition,
        count_stages as count_stages,
        effective_loads as effective_loads,
        partition_balanced as partition_balanced,
        partition_layers as partition_layers,
        partition_uniform as partition_uniform,
        slice_lengths as slice_lengths,
    )
    from .topology import (
        Placement as Placement,
        Topology as Topology,
        default_grid as default_grid,
        explicit as explicit,
        loop as loop,
        place as place,
        prime_factors as prime_factors,
        stages_of as stages_of,
        v_shape as v_shape,
    )
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "partition": (
                "Partition count_stages effective_loads partition_balanced partition_layers partition_uniform"
                " slice_lengths"
            ),
            "topology": "Placement Topology default_grid explicit loop place prime_factors stages_of v_shape",
        },
    )

"""Arithmetic on ranks and layers: topologies, placements, partitions. The standard library only."""

from importlib import import_module
from typing import Any

# Loaded when first used: builders of schedules need the placements alone.
_HOMES = {
    "balance": ("partition_balanced",),
    "chunks": ("chunks_balanced", "chunks_uniform"),
    "config": ("build_schedule", "count_microbatches", "find_builder", "split_points_for"),
    "groups": (
        "Membership",
        "NamedGroup",
        "ParallelSizes",
        "data_parallel_groups",
        "groups_in_creation_order",
        "membership",
        "model_groups",
        "neighbour_pairs",
        "parallel_sizes",
        "pipeline_groups",
        "rank_of_stage",
        "replica_groups",
        "slice_groups",
    ),
    "layout": ("Layout", "parse_layout"),
    "partition": ("Partition", "partition_explicit", "partition_uniform"),
    "placement": ("Placement", "bidirectional", "explicit", "loop", "place", "stage_ids_of_rank", "v_shape"),
    "split": ("count_stages", "effective_loads", "partition_layers", "split_points"),
    "spread": ("partition_spread",),
    "topology": ("Topology", "default_grid", "pipe_data", "pipe_model_data", "prime_factors"),
    "weigh": (
        "count_layer_parameters",
        "layer_name",
        "measure_layers",
        "partition_by_parameters",
        "partition_by_pattern",
        "partition_by_time",
        "partition_by_weights",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__

"""Cut a stack of equal layers into stages, with the input and output modules counted as some layers."""

import heapq

from .counts import require_counts
from .partition import Partition


def partition_layers(
    layers: int,
    stages: int,
    input_weight: float = 1,
    output_weight: float = 1,
    *,
    allow_empty: bool = False,
) -> Partition:
    """Cut equal layers into stages; the first also holds the input modules, the last the output modules.

    The effective load of a stage is its layers plus those weights. The loads differ by at most one, unless
    a weight alone is above that, and the first and last stage are the lightest.

    Args:
        layers: number of layers.
        stages: number of stages, one or more.
        input_weight: the cost of the embedding, in layers.
        output_weight: the cost of the final norm and the head, in layers.
        allow_empty: whether a stage may have no layer, as one that holds the embedding alone.

    Raises:
        ValueError: for fewer layers than stages unless empty stages are allowed.

    References:
        torchtitan, ``generate_split_points``.

    >>> partition_layers(61, 8).sizes
    (7, 8, 8, 8, 8, 8, 8, 6)
    >>> partition_layers(8, 4).split_points()
    ('layers.1', 'layers.4', 'layers.7')
    """
    require_counts(stages=stages)
    require_counts(0, layers=layers)
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name} is the cost of modules in layers, zero or more; got {weight!r}")
    sizes = _lightest_get_more(layers, stages, input_weight, output_weight, 0 if allow_empty else 1)
    return Partition.from_sizes(sizes, allow_empty)


def effective_loads(
    partition: Partition, input_weight: float = 1, output_weight: float = 1
) -> tuple[float, ...]:
    """Add the weights of the input and output modules to the layers of the first and the last stage.

    >>> effective_loads(Partition((0, 2, 5)))
    (3, 4)
    """
    loads: list[float] = list(partition.sizes)
    loads[0] += input_weight
    loads[-1] += output_weight
    return tuple(loads)


def _lightest_get_more(
    layers: int, stages: int, input_weight: float, output_weight: float, floor: int
) -> list[int]:
    """Give one layer at a time to the lightest stage, the middle before the ends; return the sizes."""
    if layers < stages * floor:
        return [1] * layers + [0] * (stages - layers)
    sizes = [floor] * stages
    loads = effective_loads(Partition.from_sizes(sizes, allow_empty=True), input_weight, output_weight)
    turn = [*range(1, stages - 1), *([0, stages - 1] if stages > 1 else [0])]
    heap = [(loads[stage], place, stage) for place, stage in enumerate(turn)]
    heapq.heapify(heap)
    for _ in range(layers - stages * floor):
        load, place, stage = heap[0]
        sizes[stage] += 1
        heapq.heapreplace(heap, (load + 1, place, stage))
    return sizes

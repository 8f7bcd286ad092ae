"""Cut a stack of equal layers into stages, with the input and output modules counted as some layers."""

import heapq
from typing import Literal

from ppfunc._checks import require_counts, require_one_of

from .partition import Partition


def partition_layers(
    layers: int,
    stages: int,
    input_weight: float = 1,
    output_weight: float = 1,
    *,
    extra: Literal["middle", "first"] = "middle",
    allow_empty: bool = False,
) -> Partition:
    """Cut equal layers into stages; the first also holds the input modules, the last the output modules.

    The effective load of a stage is its layers plus those weights. With ``extra="middle"`` the
    loads differ by at most one, unless a weight alone is above that, and the first and last stage
    are the lightest. With ``extra="first"`` the remainder goes to the first stages.

    Args:
        layers: number of layers.
        stages: number of stages, one or more.
        input_weight: the cost of the embedding, in layers.
        output_weight: the cost of the final norm and the head, in layers.
        extra: which stages get the layers that do not divide.
        allow_empty: whether a stage may have no layer, as one that holds the embedding alone.

    Raises:
        ValueError: for fewer layers than stages unless empty stages are allowed; with
            ``extra="first"`` also where a weight is more than the stage's even share.

    References:
        torchtitan, ``generate_split_points``; its later ``generate_llm_fqn_per_model_part`` is
        ``extra="first"``.

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
    require_one_of("extra", extra, ("middle", "first"))
    if extra == "first":
        sizes = _first_get_more(layers, stages, input_weight, output_weight)
    else:
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


def count_stages(
    layers: int,
    ranks: int,
    *,
    several: bool,
    layers_per_stage: int | None = None,
    input_weight: int = 0,
    output_weight: int = 0,
) -> int:
    """Choose the number of stages for so many ranks, each with the same number of stages.

    Args:
        layers: number of layers.
        ranks: number of ranks of the pipeline.
        several: whether the schedule gives a rank several stages, or exactly one.
        layers_per_stage: gives the number of stages, ``layers / layers_per_stage`` rounded up; where it is
            None, a rank has one stage, or two if ``several``.
        input_weight, output_weight: added to the layers before they are divided.

    Raises:
        ValueError: where the stages do not divide among the ranks, do not fit the schedule, or are
            more than the layers.

    >>> count_stages(32, 4, several=True, layers_per_stage=4), count_stages(32, 4, several=True)
    (8, 8)
    """
    require_counts(ranks=ranks)
    require_counts(0, layers=layers)
    if layers_per_stage is None:
        stages = ranks * (2 if several else 1)
        if stages > layers:
            raise ValueError(
                f"{layers} layers cannot fill {stages} stages ({stages // ranks} on each of {ranks} ranks):"
                " use fewer ranks"
            )
        return stages
    require_counts(layers_per_stage=layers_per_stage)
    stages = -(-(layers + input_weight + output_weight) // layers_per_stage)
    if stages % ranks or not stages:
        raise ValueError(
            f"{layers} layers at {layers_per_stage} per stage make {stages} stages, which do not divide among"
            f" {ranks} ranks: change layers_per_stage so that their number is a multiple of the ranks"
        )
    if several != (stages > ranks):
        wanted = "two or more stages" if several else "exactly one stage"
        raise ValueError(
            f"the schedule has {wanted} per rank, but {layers} layers at {layers_per_stage} per stage make"
            f" {stages // ranks} on each of {ranks} ranks: {'decrease' if several else 'increase'}"
            " layers_per_stage"
        )
    return stages


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


def _first_get_more(layers: int, stages: int, input_weight: float, output_weight: float) -> list[int]:
    """Make effective loads equal, one more for the first stages until nothing is left; return the sizes."""
    if stages == 1:
        return [layers]
    first, last = int(input_weight), int(output_weight)
    if (first, last) != (input_weight, output_weight):
        raise ValueError(f"extra='first' takes whole weights, got {input_weight} and {output_weight}")
    effective = layers + first + last
    share, left_over = divmod(effective, stages)
    for name, weight in (("input_weight", first), ("output_weight", last)):
        if weight > share:
            raise ValueError(
                f"{name}={weight} is more than the {share} of {effective} effective layers that each of"
                f" {stages} stages has: use fewer stages or a smaller weight"
            )
    sizes = [share + (stage < left_over) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return sizes

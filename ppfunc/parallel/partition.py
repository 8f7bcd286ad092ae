"""Cut the layers of a model into stages: a partition is the boundaries between them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence, Sized
from dataclasses import InitVar, dataclass
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Any, Literal, Self, TypeVar

from ppfunc._checks import (
    limited,
    naming_arguments,
    require_counts,
    require_index,
    require_number,
    require_one_of,
    require_type,
)

T = TypeVar("T")
Interval = tuple[int, int]
"""``(start, end)``: the layers from ``start`` up to and without ``end``."""


@dataclass(frozen=True)
class Partition:
    """Assign consecutive layers to stages: stage ``s`` has ``range(boundaries[s], boundaries[s + 1])``.

    Every layer is in exactly one stage, since only the boundaries are stored.

    Args:
        boundaries: layers at which stages begin, ascending from 0, and the number of layers at the end.
        allow_empty: whether stages without layers are wanted.

    Raises:
        ValueError: the boundaries do not start at 0, do not ascend, or leave a stage empty without
            ``allow_empty``.

    >>> partition = Partition((0, 2, 5))
    >>> partition.sizes, list(partition.layers_of(1))
    ((2, 3), [2, 3, 4])
    >>> partition.loads([1, 1, 4, 1, 1])
    (2, 6)
    """

    boundaries: tuple[int, ...]
    allow_empty: InitVar[bool] = False

    def __post_init__(self, allow_empty: bool) -> None:
        require_type("boundaries", self.boundaries, Sequence, "the layers at which stages begin")
        boundaries = tuple(self.boundaries)
        object.__setattr__(self, "boundaries", boundaries)
        whole = all(isinstance(b, int) and not isinstance(b, bool) for b in boundaries)
        if not whole or len(boundaries) < 2 or boundaries[0] != 0 or min(self.sizes) < 0:
            raise ValueError(
                f"boundaries: got {limited(str(boundaries), 400)}, expected whole numbers that ascend from 0"
                " to the number of layers, as in (0, 3, 6)"
            )
        if not allow_empty and 0 in self.sizes:
            raise ValueError(
                f"stage {self.sizes.index(0)} would be empty: {self.layers} layers in {self.stages} stages of"
                f" sizes {limited(str(list(self.sizes)), 400)}; use fewer stages, or set allow_empty"
            )

    @classmethod
    def from_sizes(cls, sizes: Iterable[int], allow_empty: bool = False) -> Self:
        """Make a partition from the number of layers of each stage: ``Partition.from_sizes((2, 3))``."""
        return cls(tuple(accumulate(sizes, initial=0)), allow_empty)

    @property
    def stages(self) -> int:
        """Count the stages."""
        return len(self.boundaries) - 1

    @property
    def layers(self) -> int:
        """Count the layers."""
        return self.boundaries[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Count the layers of each stage."""
        return tuple(end - start for start, end in self.intervals)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """List the interval of layers of each stage."""
        return tuple(pairwise(self.boundaries))

    def layers_of(self, stage: int) -> range:
        """List the layers of a stage."""
        require_index("stage", stage, self.stages)
        return range(*self.boundaries[stage : stage + 2])

    def loads(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Add up the weights of each stage; sums of whole numbers stay whole."""
        self._require_length(weights)
        add = sum if all(isinstance(w, int) for w in weights) else math.fsum
        return tuple(add(weights[start:end]) for start, end in self.intervals)

    def split(self, items: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        """Cut a sequence of items of layers into a tuple for each stage."""
        self._require_length(items)
        return tuple(tuple(items[start:end]) for start, end in self.intervals)

    def split_points(self, prefix: str = "layers.") -> tuple[str, ...]:
        """Name the first layer of every stage but the first.

        >>> Partition((0, 3, 8)).split_points()
        ('layers.3',)
        """
        return tuple(f"{prefix}{boundary}" for boundary in self.boundaries[1:-1])

    def dealt(self, ranks: int) -> tuple[tuple[Interval, ...], ...]:
        """List the intervals of each rank when the stages are dealt round the ranks, as `loop` places them.

        Raises:
            ValueError: ``ranks`` does not divide the stages.

        >>> Partition((0, 1, 2, 4, 6)).dealt(2)
        (((0, 1), (2, 4)), ((1, 2), (4, 6)))
        """
        require_counts(ranks=ranks)
        if self.stages % ranks:
            raise ValueError(
                f"{self.stages} stages cannot be dealt evenly to {ranks} ranks: use a divisor of"
                f" {self.stages}"
            )
        return tuple(self.intervals[rank::ranks] for rank in range(ranks))

    def _require_length(self, items: Sequence[object]) -> None:
        if len(items) != self.layers:
            raise ValueError(
                f"got {len(items)} items, expected {self.layers}, one for each layer of the partition"
            )


@naming_arguments
def partition_uniform(
    layers: int, stages: int, *, remainder: Literal["first", "last"] = "first", allow_empty: bool = False
) -> Partition:
    """Cut layers into equal numbers; the remainder goes one each to the first stages, or to the last.

    Args:
        layers: number of layers.
        stages: number of stages.
        remainder: stages that are larger by one where the layers do not divide, ``"first"`` or ``"last"``.
        allow_empty: whether there may be fewer layers than stages. With ``"first"`` the last
            stages are then empty, with ``"last"`` the first.

    Raises:
        ValueError: for fewer layers than stages, unless empty stages are allowed.

    References:
        DeepSpeed gives the remainder to the first stages, ColossalAI to the last.

    >>> partition_uniform(10, 4).sizes, partition_uniform(10, 4, remainder="last").sizes
    ((3, 3, 2, 2), (2, 2, 3, 3))
    """
    require_counts(stages=stages)
    require_counts(0, layers=layers)
    require_one_of("remainder", remainder, ("first", "last"))
    size, left_over = divmod(layers, stages)
    sizes = (size + 1,) * left_over + (size,) * (stages - left_over)
    return Partition.from_sizes(sizes if remainder == "first" else sizes[::-1], allow_empty)


@naming_arguments
def partition_balanced(weights: Sequence[float], stages: int, *, allow_empty: bool = False) -> Partition:
    """Cut layers into stages with the least maximum load, exactly, for any weights that are not negative.

    Of the partitions with that maximum, it takes one whose stages are near the average of the layers
    left for them; of two cuts that are equally near, the later.

    Args:
        weights: weight of each layer, in any unit.
        stages: number of stages.
        allow_empty: whether there may be fewer layers than stages; the last are then empty.

    Raises:
        ValueError: for fewer layers than stages, or weights that are negative or not finite.

    >>> partition_balanced([1, 2, 3], 2).boundaries
    (0, 2, 3)
    """
    require_type("weights", weights, Sized, "a list of numbers, one per layer; the order is weights, stages")
    require_counts(stages=stages)
    prefix = list(accumulate(_exact(weights), initial=0))
    if len(weights) <= stages:
        return partition_uniform(len(weights), stages, allow_empty=allow_empty)
    return Partition(tuple(_even_cuts(prefix, stages, _least_maximum(prefix, stages))))


@naming_arguments
def slice_lengths(tokens: int, slices: int, attention: float = 0, *, multiple: int = 1) -> tuple[int, ...]:
    """Cut the tokens of a sequence into slices such that the dearest slice costs the least, exactly.

    A slice of n tokens after ``past`` tokens costs ``n + attention * n * (past + n / 2)``: causal attention
    makes later tokens cost more, so that earlier slices are longer. Give the result to
    ``ppfunc.microbatch(batch, sequences, slices=...)``, and the step ``loss_weights`` of as many tokens.

    Args:
        tokens: number of tokens of a sequence.
        slices: number of slices.
        attention: cost of the attention of a token to one token, in costs of all else that a token needs.
            By operations it is 1 / (6 d) in transformers of width d with products of 12 d^2 weights a layer.
        multiple: divisor of the lengths, in tokens.

    Raises:
        ValueError: ``tokens`` is no multiple of ``multiple``, or there are fewer parts than slices; a
            negative number.

    References:
        Sun et al., Seq1F1B (arXiv:2406.03488), section 3.3, computation-wise partition; Li et al., TeraPipe,
        ICML 2021 (arXiv:2102.07988), section 3.3, finds lengths for unequal costs by a dynamic programme.

    >>> slice_lengths(1024, 4, attention=1 / 256, multiple=64)
    (448, 256, 192, 128)
    """
    require_counts(tokens=tokens, slices=slices, multiple=multiple)
    require_number("attention", attention, 0)
    if tokens % multiple:
        raise ValueError(f"tokens = {tokens}, expected a multiple of {multiple}")
    if slices > tokens // multiple:
        raise ValueError(
            f"slices = {slices}, expected at most {tokens // multiple}, one per {multiple} tokens"
        )
    share = Fraction(attention) * multiple
    parts: list[Any] = [1 + share * (2 * n + 1) / 2 for n in range(tokens // multiple)]
    return tuple(multiple * size for size in partition_balanced(parts, slices).sizes)


def _exact(weights: Sequence[float]) -> list[int]:
    """Scale weights to whole numbers in one common unit, so that sums of them are exact."""
    for layer, weight in enumerate(weights):
        if not isinstance(weight, (int, float, Fraction)) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight of layer {layer} is a finite number, zero or more; got {weight!r}")
    fractions = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (unit // fraction.denominator) for fraction in fractions]


def _least_maximum(prefix: Sequence[int], stages: int) -> int:
    """Find the least load of the heaviest stage, over all cuts of the layers into at most ``stages`` stages.

    Args:
        prefix: sums of the weights of the first 0, 1, ... layers.
        stages: number of stages.
    """
    lower, upper = max(b - a for a, b in pairwise(prefix)), prefix[-1]
    while lower < upper:
        limit, start = (lower + upper) // 2, 0
        for _ in range(stages):  # each is filled up to the limit
            start = bisect_right(prefix, prefix[start] + limit, start) - 1
        lower, upper = (lower, limit) if start == len(prefix) - 1 else (limit + 1, upper)
    return upper


def _even_cuts(prefix: Sequence[int], stages: int, limit: int) -> list[int]:
    """Choose boundaries with loads up to ``limit``, each near the average of the layers left.

    No stage is empty.
    """
    last = len(prefix) - 1
    earliest = [last]
    for _ in range(stages):
        earliest.append(bisect_left(prefix, prefix[earliest[-1]] - limit, 0, earliest[-1]))
    earliest.reverse()
    boundaries = [0]
    for stage in range(1, stages):
        start, left = boundaries[-1], stages - stage + 1
        first = max(earliest[stage], start + 1)
        final = min(bisect_right(prefix, prefix[start] + limit, start) - 1, last - left + 1)
        # The cut whose stage is nearest to one share of what is left.
        rest = prefix[-1] - prefix[start]
        below = bisect_right(prefix, prefix[start] + rest // left) - 1
        above = bisect_right(prefix, prefix[min(below + 1, len(prefix) - 1)]) - 1
        below, above = (min(max(cut, first), final) for cut in (below, above))
        boundaries.append(min(above, below, key=lambda cut: abs((prefix[cut] - prefix[start]) * left - rest)))
    return [*boundaries, last]


@naming_arguments
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
        extra: stages that get the layers that do not divide, ``"middle"`` or ``"first"``.
        allow_empty: whether a stage may have no layer, as one that holds the embedding alone.

    Raises:
        ValueError: for fewer layers than stages unless empty stages are allowed; with
            ``extra="first"`` also where a weight is more than the stage's even share, which leaves no layer.

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
    require_number("input_weight", input_weight)
    require_number("output_weight", output_weight)
    require_one_of("extra", extra, ("middle", "first"))
    least = 0 if allow_empty or extra == "first" or layers < stages else 1
    sizes = [least] * stages
    loads: list[float] = [*sizes]
    loads[0] += input_weight
    loads[-1] += output_weight
    ends = (0, stages - 1) if extra == "middle" else ()  # which take a layer last, of equal loads
    lightest = [(load, stage in ends, stage) for stage, load in enumerate(loads)]
    heapify(lightest)
    for _ in range(layers - least * stages):
        load, last, stage = lightest[0]
        sizes[stage] += 1
        heapreplace(lightest, (load + 1, last, stage))
    return Partition.from_sizes(sizes, allow_empty)


@naming_arguments
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


@naming_arguments
def count_stages(
    layers: int,
    ranks: int,
    *,
    several: bool,
    layers_per_stage: int | None = None,
    input_weight: int = 0,
    output_weight: int = 0,
) -> int:
    """Choose the number of stages of a pipeline whose ranks have equal numbers of stages.

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

"""Weigh layers by their parameters, a pattern on their names, or their time, and cut them by that."""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from .balance import partition_balanced
from .counts import require_counts
from .min_range import partition_min_range
from .partition import Partition, partition_uniform

Method = Literal["uniform", "balanced", "min_range"]


def partition_by_weights(
    weights: Sequence[float], stages: int, method: Method = "balanced", *, allow_empty: bool = False
) -> Partition:
    """Cut layers by weights, with a method of choice.

    Args:
        weights: one per layer.
        stages: number of stages.
        method: ``"uniform"`` for equal numbers of layers, ``"balanced"`` for the least maximum load,
            ``"min_range"`` for the least maximum minus minimum.
        allow_empty: whether there may be fewer layers than stages.
    """
    if method == "uniform":
        return partition_uniform(len(weights), stages, allow_empty=allow_empty)
    if method not in ("balanced", "min_range"):
        raise ValueError(f"unknown method {method!r}: expected 'uniform', 'balanced' or 'min_range'")
    cut = partition_balanced if method == "balanced" else partition_min_range
    return cut(weights, stages, allow_empty=allow_empty)


def partition_by_parameters(
    layers: Sequence[Any], stages: int, method: Method = "balanced", *, allow_empty: bool = False
) -> Partition:
    """Cut layers by their numbers of parameters, as `count_layer_parameters` finds them."""
    return partition_by_weights(count_layer_parameters(layers), stages, method, allow_empty=allow_empty)


def partition_by_pattern(
    layers: Sequence[Any],
    pattern: str | re.Pattern[str],
    stages: int,
    method: Method = "balanced",
    *,
    allow_empty: bool = False,
) -> Partition:
    r"""Cut layers so that those whose name matches are shared out evenly; the others weigh nothing.

    Args:
        layers: names, or layers, which are named by their class or their function.
        pattern: a regular expression that is searched for in the name as it is written, case kept.
            Write ``(?i)`` in front, or pass a compiled pattern, to ignore case.
        stages: number of stages.
        method: as for `partition_by_weights`.

    Raises:
        ValueError: where the expression is not one, or no layer matches.

    >>> names = ["Embed", "Block", "Block", "Dropout", "Block", "Block", "Head"]
    >>> partition_by_pattern(names, r"^Block$", 2).boundaries
    (0, 4, 7)
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    names = [layer_name(layer) for layer in layers]
    weights = [int(expression.search(name) is not None) for name in names]
    if not any(weights):
        raise ValueError(
            f"no layer matches {expression.pattern!r}; the names, case kept, are {sorted(set(names))[:20]}"
        )
    return partition_by_weights(weights, stages, method, allow_empty=allow_empty)


def partition_by_time(
    layers: Sequence[Callable[[Any], Any]],
    example: Any,
    stages: int,
    method: Method = "balanced",
    *,
    allow_empty: bool = False,
    **options: Any,
) -> Partition:
    """Cut layers by their measured times; options as for `measure_layers`."""
    return partition_by_weights(
        measure_layers(layers, example, **options), stages, method, allow_empty=allow_empty
    )


def layer_name(layer: Any) -> str:
    """Name a layer by itself if it is text, else by its ``__name__``, else by its class."""
    if isinstance(layer, str):
        return layer
    return getattr(layer, "__name__", type(layer).__name__)


def count_layer_parameters(layers: Sequence[Any]) -> tuple[int, ...]:
    """Count the parameter elements of each layer.

    Args:
        layers: each a module (what ``parameters()`` yields that requires a gradient), a tree of
            tensors in dictionaries, lists and tuples (all of them), or the number itself. A tensor
            that occurs twice in one layer is counted once.

    >>> count_layer_parameters([12, {}])
    (12, 0)
    """
    return tuple(layer if isinstance(layer, int) else _count(layer) for layer in layers)


def measure_layers(
    layers: Sequence[Callable[[Any], Any]],
    example: Any,
    *,
    repeats: int = 5,
    warm_up: int = 1,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Measure the time of each layer in seconds: the median of several runs.

    Args:
        layers: functions of one argument, each taking what the one before returned.
        example: what the first layer takes.
        repeats: timed runs of each layer.
        warm_up: runs before them that are not timed.
        synchronize: waits until the device is idle, such as torch's for its accelerator.
        clock: a clock in seconds.
    """
    require_counts(repeats=repeats)
    require_counts(0, warm_up=warm_up)
    times = []
    for layer in layers:
        runs = []
        for _ in range(warm_up + repeats):
            synchronize()
            start = clock()
            output = layer(example)
            synchronize()
            runs.append(clock() - start)
        times.append(statistics.median(runs[warm_up:]))
        example = output
    return tuple(times)


def _count(layer: Any) -> int:
    tensors = (
        (p for p in layer.parameters() if p.requires_grad)
        if hasattr(layer, "parameters")
        else _tensors(layer)
    )
    return sum(tensor.numel() for tensor in {id(t): t for t in tensors}.values())


def _tensors(tree: Any) -> list[Any]:
    """List the tensors in a tree: its objects that have ``numel``."""
    if hasattr(tree, "numel"):
        return [tree]
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for child in children for tensor in _tensors(child)]

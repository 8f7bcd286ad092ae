"""Cut a list of layers, functions or modules, into stages."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ppfunc._checks import require_type, shown
from ppfunc.parallel.partition import Partition

Layer = Callable[..., Any]  # layer(params, x, *extras) -> y


def stages_from_layers(layers: Sequence[Layer], partition: Partition) -> list[Layer]:
    """Make one stage function per stage of the partition, which runs its layers one after the other.

    Equivalent to, for the stage with layers ``start..end-1``::

        def stage(params, x, *extras):
            for layer, p in zip(layers[start:end], params, strict=True):
                x = layer(p, x, *extras)
            return x

    Args:
        layers: pure functions ``layer(params, x, *extras) -> y``, in order.
        partition: the layers of each stage.

    Returns:
        Stages whose ``params`` are those of their layers, ``partition.split(params)[stage]``.

    Raises:
        TypeError: not a partition, or layers that are no functions.
        ValueError: the partition is for another number of layers.

    >>> layers = [lambda p, x: p + x, lambda p, x: p * x, lambda p, x: x - p]
    >>> stages = stages_from_layers(layers, Partition((0, 2, 3)))
    >>> stages[1]((1,), stages[0]((2, 3), 4))
    17
    """
    require_type("partition", partition, Partition, "a Partition, such as partition_layers(layers, stages)")
    for n, layer in enumerate(layers):
        if isinstance(layer, nn.Module) or not callable(layer):
            raise TypeError(
                f"layers[{n}]: got {shown(layer)}, expected a function layer(params, x) -> y;"
                " pp.split(torch.nn.Sequential(*modules), args, at=...) takes modules, those that LayerSpecs"
                " build"
            )
    return [
        _stage(chosen, interval)
        for chosen, interval in zip(partition.split(layers), partition.intervals, strict=True)
    ]


def _stage(layers: tuple[Layer, ...], interval: tuple[int, int]) -> Layer:
    def stage(params: Sequence[Any], x: Any, *extras: Any) -> Any:
        if len(params) != len(layers):
            raise ValueError(
                f"{stage.__name__} takes params for {len(layers)} layers, got {len(params)}: split them by"
                " partition.split(params)"
            )
        for layer, layer_params in zip(layers, params, strict=True):
            x = layer(layer_params, x, *extras)
        return x

    stage.__name__ = stage.__qualname__ = "layers_{}_to_{}".format(*interval)
    return stage

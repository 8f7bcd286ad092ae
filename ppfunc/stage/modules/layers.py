"""Cut a list of layers, functions or modules, into stages."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ppfunc._text import naming_arguments, shown
from ppfunc.parallel.partition import Partition
from ppfunc.schedule.arguments import require_type

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
        Stages whose ``params`` is the tuple of the params of their layers, see `params_of_stages`.

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
                " ppfunc.split_sequential(torch.nn.Sequential(*modules), partition) takes modules, those that"
                " LayerSpecs build"
            )
    return [
        _stage(chosen, interval)
        for chosen, interval in zip(partition.split(layers), partition.intervals, strict=True)
    ]


def _stage(layers: tuple[Layer, ...], interval: tuple[int, int]) -> Layer:
    def stage(params: Sequence[Any], x: Any, *extras: Any) -> Any:
        if len(params) != len(layers):
            got = f"{stage.__name__} takes params for {len(layers)} layers, got {len(params)}"
            raise ValueError(f"{got}: split them by pp.params_of_stages")
        for layer, layer_params in zip(layers, params, strict=True):
            x = layer(layer_params, x, *extras)
        return x

    stage.__name__ = stage.__qualname__ = "layers_{}_to_{}".format(*interval)
    return stage


def params_of_stages(params: Sequence[Any], partition: Partition) -> dict[int, tuple[Any, ...]]:
    """Group the params of layers, one tree per layer, by stage.

    >>> params_of_stages(["a", "b", "c"], Partition((0, 2, 3)))
    {0: ('a', 'b'), 1: ('c',)}
    """
    return dict(enumerate(partition.split(params)))


@naming_arguments
def split_sequential(
    module: nn.Sequential | nn.ModuleList, boundaries: Sequence[int] | Partition
) -> list[nn.Sequential]:
    """Cut a chain of modules before the given positions, without copying anything.

    Args:
        module: modules to be applied one after the other.
        boundaries: position of the first module of every stage but the first, ascending; or a partition of
            the modules.

    Returns:
        ``len(boundaries) + 1`` modules, one per stage; an empty one does nothing.

    Raises:
        ValueError: positions out of order or out of range.

    >>> layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> [len(part) for part in split_sequential(layers, [1, 1])]
    [1, 0, 2]
    """
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        raise TypeError(f"got {type(module).__name__}, expected an nn.Sequential or an nn.ModuleList")
    if not isinstance(boundaries, Sequence | Partition):
        raise TypeError(
            f"boundaries: got {boundaries!r}, expected a list of the modules that begin the stages after the"
            " first, such as [2], or a Partition"
        )
    if not isinstance(boundaries, Partition):
        boundaries = Partition((0, *boundaries, len(module)), allow_empty=True)
    return [nn.Sequential(*part) for part in boundaries.split([*module])]

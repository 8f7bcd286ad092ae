"""Cast what stages send to each other, for fewer bytes of messages."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import is_dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from ppfunc._checks import shown

from ..layout import Boundary
from ..output import Output, Received
from ..tree import tree_leaves, tree_map

S = TypeVar("S")


def cast_messages(stages: S, dtype: torch.dtype, after: Collection[int] | None = None) -> S:
    """Make stages that send their activations in a smaller dtype. Gradients of these travel in it as well.

    Equivalent to, for a stage in the middle whose activations are float32::

        def stage(params, x):
            return fn(params, x.to(torch.float32)).to(torch.bfloat16)

    Skip connections are cast like activations. Integers, and what is no larger than the dtype, are sent as
    they are. Each message says which dtypes its tensors have at the other end. It is the same in one process
    and in many. All ranks make the same call.

    Args:
        stages: a list of functions, None for those of other processes; or a model that was split.
        dtype: such as ``torch.bfloat16``.
        after: the stages whose messages are cast; all but the last by default.

    Returns:
        What was given, with other functions.

    Raises:
        TypeError: not a floating dtype, or not stages.
        ValueError: a stage that sends nothing, or one that declares how its activations lie over a mesh.

    >>> first, second = cast_messages([torch.mul, torch.mul], torch.bfloat16)
    >>> sent, dtypes = first(torch.ones(2), torch.ones(2))
    >>> sent.dtype, second(torch.ones(2), (sent, dtypes)).dtype
    (torch.bfloat16, torch.float32)
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: got {shown(dtype)}, expected a floating dtype, such as torch.bfloat16")
    if is_dataclass(stages) and not isinstance(stages, type):
        functions = cast_messages(stages.stages, dtype, after)  # type: ignore[attr-defined]
        return replace(stages, stages=functions)
    if not isinstance(stages, list | tuple):
        raise TypeError(f"stages: got {shown(stages)}, expected a list of functions, or a split model")
    casting = frozenset(range(len(stages) - 1) if after is None else after)
    if not casting <= set(range(len(stages) - 1)):
        raise ValueError(f"after: got {sorted(casting)}, expected some of the stages 0 to {len(stages) - 2}")
    made: dict[Any, Any] = {}  # equal stages stay equal
    functions = []
    for k, fn in enumerate(stages):
        key = id(fn), k - 1 in casting, k in casting
        functions.append(made.setdefault(key, fn and _casting(fn, k, casting, dtype)))
    return type(stages)(functions)


def _casting(
    fn: Callable[..., Any], k: int, casting: Collection[int], dtype: torch.dtype
) -> Callable[..., Any]:
    boundary, cast = Boundary.of(fn), partial(_cast, dtype)
    if boundary.inputs is not None or boundary.outputs is not None:
        raise ValueError(
            f"stages[{k}]: got one that declares how its activations lie over a mesh, expected plain tensors;"
            " cast them within the stage"
        )

    def restored(source: int, value: Any) -> Any:
        return _restored(*value) if source in casting else value

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        if isinstance(x, Received):
            x = Received(restored(k - 1, x.x), {a: restored(a, value) for a, value in x.skips.items()})
        else:
            x = restored(k - 1, x)
        out = fn(params, x, *extras)
        if k not in casting:
            return out
        if not isinstance(out, Output):
            return cast(out)
        skips = out.skips and {b: cast(value) for b, value in out.skips.items()}
        return out._replace(y=cast(out.y), skips=skips)

    return stage


def _cast(dtype: torch.dtype, value: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Cast the leaves; return with them an empty tensor of each former dtype, which is no message."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        smaller = t.is_floating_point() and t.dtype.itemsize > dtype.itemsize and t.numel()
        return t.to(dtype) if smaller else t

    return tree_map(cast, value), tuple(t.detach().new_empty(0) for t in tree_leaves(value))


def _restored(value: Any, likes: Sequence[torch.Tensor]) -> Any:
    dtypes = iter([like.dtype for like in likes])
    return tree_map(lambda t: t.to(next(dtypes)), value)

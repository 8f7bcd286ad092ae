"""Choose dtypes of computing, reducing and keeping parameters, and scale the loss."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import reduce

import torch

from ppfunc._checks import naming_arguments, require_counts, require_number, require_positive, shown
from ppfunc.stage.tree import tree_flatten, tree_map

from ..optim._torch import update_scale
from ..optim.optimizer import Tree

_LARGEST = torch.finfo(torch.float32).max  # scales are kept in float32


@naming_arguments
@dataclass(frozen=True)
class Precision:
    """Choose the dtypes of a training step, by default the dtypes of the parameters, and the loss scale.

    Buffers of modules keep their dtypes: tables of angles stay in float32. Under ``torch.autocast``, in which
    a step may be called instead, parameters stay in theirs, and each operator chooses.

    Args:
        compute: the dtype of parameters and floating inputs in the stages. A model that was split is
            traced for it.
        reduce: the dtype of the sums of gradients over ranks; also over microbatches if it is wider than the
            gradients.
        master: the dtype of the parameters in the state, and of their optimizer state.
        scale: the scale of the loss: :func:`dynamic_scale`, for a trainer that skips updates, or
            :func:`static_scale`.

    Raises:
        ValueError: a dtype that is not floating, or masters without ``compute``.
        TypeError: not a :class:`LossScale`.

    >>> Precision(compute=torch.bfloat16).to_compute({"w": torch.ones(2), "ids": torch.arange(2)})
    {'w': tensor([1., 1.], dtype=torch.bfloat16), 'ids': tensor([0, 1])}
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    scale: "LossScale | None" = None

    def __post_init__(self) -> None:
        if self.scale is not None and not isinstance(self.scale, LossScale):
            raise TypeError(
                f"scale: got {shown(self.scale)}, expected a LossScale; write ppfunc.static_scale(1024.0), or"
                " ppfunc.dynamic_scale()"
            )
        for name in ("compute", "reduce", "master"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"{name} is {dtype!r}, expected a floating dtype such as torch.bfloat16, or None"
                )
        if self.master is not None and self.compute is None:
            raise ValueError(
                f"master is {self.master} without compute: stages would compute in the dtype of the masters,"
                " whatever that of the model; give both, such as compute=torch.bfloat16"
            )

    def to_compute(self, tree: Tree) -> Tree:
        """Cast floating leaves to ``compute``; all others are returned as they are."""
        return cast(tree, self.compute)

    def to_kept(self, tree: Tree, fixed: Collection[int] = ()) -> Tree:
        """Cast floating leaves to ``master``; frozen leaves, of these numbers, only without ``compute``."""
        leaves, treedef = tree_flatten(tree)
        masters = cast(leaves, self.master)
        stays = () if self.compute is None else fixed
        return treedef.unflatten(leaves[n] if n in stays else leaf for n, leaf in enumerate(masters))


def cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """Cast the floating leaves of a tree; leaves that have the dtype are not copied."""
    if dtype is None:
        return tree
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        tree,
    )


@dataclass(frozen=True)
class LossScale:
    """Scale the loss by a factor that gradients are divided by before the update.

    Args:
        init: ``init(device) -> state``, a dictionary with ``scale``, float32[].
        update: ``update(state, found_inf) -> state``, after every step; ``found_inf``, float32[], is 1 if its
            gradients have overflowed. It leaves its argument as it is, and the host reads no value.
        text: the name and numbers, which ranks that train together compare.
        changes: ``update`` may change the state: steps have to skip updates that overflow.
    """

    init: Callable[[torch.device | str | None], dict[str, torch.Tensor]]
    update: Callable[[dict[str, torch.Tensor], torch.Tensor], dict[str, torch.Tensor]]
    text: str = "of functions of your own"
    changes: bool = True

    def __repr__(self) -> str:
        return f"<LossScale {self.text}>"


@naming_arguments
def static_scale(scale: float = 1.0) -> LossScale:
    """Make a scale that never changes.

    Raises:
        ValueError, TypeError: a number that is not positive and finite.
    """
    require_positive(scale=scale)
    require_number("scale", scale, below=_LARGEST)

    def first(device: torch.device | str | None) -> dict[str, torch.Tensor]:
        return {"scale": torch.full((), scale, dtype=torch.float32, device=device)}

    return LossScale(first, lambda state, found_inf: state, f"static_scale({scale})", changes=False)


@naming_arguments
def dynamic_scale(
    init: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
) -> LossScale:
    """Make a scale that falls when gradients overflow, and rises after ``interval`` steps without overflow.

    Equivalent to::

        if found_inf: scale, good = scale * backoff, 0
        elif good + 1 == interval: scale, good = scale * growth if that is finite else scale, 0
        else: good = good + 1

    The scale stays above the smallest normal number. The state also has ``good``, int32[].

    Args:
        init: the first scale.
        growth: factor after ``interval`` good steps, at least 1.
        backoff: factor after an overflow, less than 1.
        interval: good steps from one growth to the next.

    Raises:
        ValueError, TypeError: not a number, or one out of range.

    References:
        Micikevicius et al., Mixed Precision Training, 2018. The numbers are those of
        ``torch.amp.GradScaler``.

    >>> scale = dynamic_scale(init=8.0, interval=1)
    >>> state = scale.update(scale.init("cpu"), torch.tensor(1.0))
    >>> state["scale"].item(), scale.update(state, torch.tensor(0.0))["scale"].item()
    (4.0, 8.0)
    """
    require_positive(init=init, growth=growth, backoff=backoff)
    require_number("init", init, below=_LARGEST)
    require_counts(interval=interval)
    if growth < 1 or backoff >= 1:
        raise ValueError(
            f"growth is {growth} and backoff {backoff}, expected growth of at least 1 and backoff of less"
            " than 1"
        )

    def first(device: torch.device | str | None) -> dict[str, torch.Tensor]:
        return {
            "scale": torch.full((), init, dtype=torch.float32, device=device),
            "good": torch.zeros((), dtype=torch.int32, device=device),
        }

    @torch.no_grad()
    def update(state: dict[str, torch.Tensor], found_inf: torch.Tensor) -> dict[str, torch.Tensor]:
        scale, good = state["scale"].clone(), state["good"].clone()
        update_scale(scale, good, found_inf.to(scale.device, torch.float32), growth, backoff, interval)
        return {"scale": scale.clamp_(min=torch.finfo(torch.float32).tiny), "good": good}

    return LossScale(first, update, f"dynamic_scale({init}, {growth}, {backoff}, {interval})")


def overflow(*numbers: torch.Tensor) -> torch.Tensor:
    """Return 1 if any number, such as the loss, is not finite, else 0: float32[].

    >>> overflow(torch.tensor(1.0), torch.tensor(float("nan")))
    tensor(1.)
    """
    first, *others = numbers
    none = first - first  # or no number
    return reduce(torch.mul, (other.to(none.device) for other in others), none).isnan().to(torch.float32)

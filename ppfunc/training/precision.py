"""Choose dtypes of computing, reducing and keeping parameters, and scale losses so that small gradients are not lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..stage.tree import tree_map
from ._torch import update_scale
from .checks import require_count, require_positive
from .protocols import Tree


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training step, None for those of the parameters as they are given.

    Args:
        compute: of parameters and inputs in the stages.
        reduce: in which gradients are added up over ranks; over microbatches, too, where that is wider than their own.
        master: of the parameters that are kept, and of their optimizer state.

    Raises:
        ValueError: a dtype that is not floating.

    >>> Precision(compute=torch.bfloat16).to_compute({"w": torch.ones(2), "ids": torch.arange(2)})
    {'w': tensor([1., 1.], dtype=torch.bfloat16), 'ids': tensor([0, 1])}
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{field.name} is {dtype}, expected a floating dtype such as torch.bfloat16, or None")

    def to_compute(self, tree: Tree) -> Tree:
        """Cast floating leaves to ``compute``; complex, integer and boolean ones are returned as they are."""
        return cast(tree, self.compute)

    def to_master(self, tree: Tree) -> Tree:
        """Cast floating leaves to ``master``."""
        return cast(tree, self.master)


def cast(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """A tree whose floating leaves have this dtype; a leaf that has it already is not copied."""
    if dtype is None:
        return tree
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


@dataclass(frozen=True)
class LossScale:
    """A factor of the loss, which gradients are divided by before the update; its state is a tree of tensors.

    Args:
        init: ``init(device) -> state``, a dictionary with ``scale``, float32[].
        update: ``update(state, found_inf) -> state``, after a step whose gradients have overflowed where ``found_inf``,
            float32[], is 1. The state that it is given stays as it is, and no value is read by the host.
        text: its name and numbers, which ranks that train together compare.
        changes: whether ``update`` ever changes the state, so that it needs a step that skips updates which overflow.
    """

    init: Callable[[torch.device | str | None], dict[str, Tensor]]
    update: Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]
    text: str = "of functions of your own"
    changes: bool = True

    def __repr__(self) -> str:
        return f"<LossScale {self.text}>"


def static_scale(scale: float = 1.0) -> LossScale:
    """Make a scale that never changes.

    Raises:
        ValueError, TypeError: a number that is not positive and finite.
    """
    require_positive(scale=scale)

    def first(device: torch.device | str | None) -> dict[str, Tensor]:
        return {"scale": torch.full((), scale, dtype=torch.float32, device=device)}

    return LossScale(first, lambda state, found_inf: state, f"static_scale({scale})", changes=False)


def dynamic_scale(init: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> LossScale:
    """Make a scale that falls when gradients overflow, and rises after a number of steps in which none did.

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
        ValueError, TypeError: numbers out of range, or none.

    References:
        Micikevicius et al., Mixed Precision Training, 2018. The numbers are those of ``torch.amp.GradScaler``.

    >>> scale = dynamic_scale(init=8.0, interval=1)
    >>> state = scale.update(scale.init("cpu"), torch.tensor(1.0))
    >>> state["scale"].item(), scale.update(state, torch.tensor(0.0))["scale"].item()
    (4.0, 8.0)
    """
    require_positive(init=init, growth=growth, backoff=backoff)
    require_count("interval", interval)
    if growth < 1 or backoff >= 1:
        raise ValueError(f"growth is {growth} and backoff {backoff}, expected growth of at least 1 and backoff of less than 1")

    def first(device: torch.device | str | None) -> dict[str, Tensor]:
        return {
            "scale": torch.full((), init, dtype=torch.float32, device=device),
            "good": torch.zeros((), dtype=torch.int32, device=device),
        }

    @torch.no_grad()
    def update(state: dict[str, Tensor], found_inf: Tensor) -> dict[str, Tensor]:
        scale, good = state["scale"].clone(), state["good"].clone()
        update_scale(scale, good, found_inf.to(scale.device, torch.float32), growth, backoff, interval)
        return {"scale": scale.clamp_(min=torch.finfo(torch.float32).tiny), "good": good}

    return LossScale(first, update, f"dynamic_scale({init}, {growth}, {backoff}, {interval})")


def overflow(*numbers: Tensor) -> Tensor:
    """1 where any of these, such as the loss and the norm of the gradients, is not finite, else 0: float32[].

    >>> overflow(torch.tensor(1.0), torch.tensor(float("nan")))
    tensor(1.)
    """
    found = [~torch.isfinite(number) for number in numbers]
    return torch.stack([one.to(found[0].device) for one in found]).any().to(torch.float32)

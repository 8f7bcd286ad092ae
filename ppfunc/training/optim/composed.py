"""Make optimizers of others: one that clips first, and one of updates in optax's form."""

import inspect
from contextlib import nullcontext
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from ppfunc._text import naming_arguments, shown
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_flatten, tree_paths

from .norms import Clip
from .protocols import Optimizer, Tree, require_pair, selected, skipping, text_of, text_with
from .seen import looked_through


def from_updates(transform: Any) -> Optimizer:
    """Make an optimizer from one in optax's form, as TorchOpt's are, whose update returns differences.

    Equivalent to:
        updates, state = transform.update(grads, state, params=params)
        params = params + updates

    The transform sees the parameters of one stage at a time. Clip by the norm of the whole model with
    :func:`clip_by_global_norm`.

    Args:
        transform: any object with ``init(params)`` and ``update(grads, state, params=params)``, all of whose
            state is tensors.

    Raises:
        TypeError: ``transform`` lacks these functions, or a leaf of its state is no tensor.
        ValueError: updates that do not have the structure of the parameters.

    References:
        DeepMind, optax; Ren et al., TorchOpt: An Efficient Library for Differentiable Optimization, 2023.

    >>> import torch
    >>> halved = lambda grads, state, params: ([-0.5 * g for g in grads], state)
    >>> optimizer = from_updates(Optimizer(lambda params: (), halved))
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init([]), [torch.tensor(1.0)])[0]
    [tensor(0.)]
    """
    require_pair("transform", transform)
    # TorchOpt writes into the gradients by default.
    keywords = {"inplace": False} if "inplace" in inspect.signature(transform.update).parameters else {}

    def init(params: Tree) -> Tree:
        state = transform.init(params)
        leaves, structure = tree_flatten(state)
        for leaf, path in zip(leaves, tree_paths(structure, "state"), strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{path} is of type {type(leaf).__name__}, expected a tensor, which can be saved, moved"
                    " and skipped"
                )
        return state

    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        found_inf: Tensor | None = None,
    ) -> tuple[Tree, Tree]:
        with nullcontext() if looked_through((grads, state, params)) else torch.no_grad():
            return updated(grads, state, params, found_inf)

    def updated(grads: Tree, state: Tree, params: Tree, found_inf: Tensor | None) -> tuple[Tree, Tree]:
        updates, after = transform.update(grads, state, params=params, **keywords)
        wanted, structure = tree_flatten(params)
        got, got_structure = tree_flatten(updates)
        if got_structure != structure:
            raise ValueError(
                f"updates must have the structure of params, got {got_structure} and expected {structure}"
            )
        new = structure.unflatten(starmap(_added, zip(wanted, got, strict=True)))
        return selected(found_inf, (params, state), (new, after))

    return Optimizer(init, update, text=text_with(lambda: f"from_updates({text_of(transform)})", [transform]))


def _added(parameter: Tensor, change: Tensor) -> Tensor:
    return (parameter + change).to(parameter.dtype) if differentiable(parameter.dtype) else parameter


@naming_arguments
def chain(clip: Clip, optimizer: Optimizer) -> Optimizer:
    """Make an optimizer that clips gradients first. Its state is that of ``optimizer``.

    A trainer clips by the norm of all stages and ranks. Without a trainer, the norm is that of the gradients
    of the call.

    Raises:
        TypeError: not a clip, or not an optimizer.
        ValueError: the optimizer clips already.

    >>> import torch
    >>> from ppfunc.training.optim import clip_by_global_norm, sgd
    >>> optimizer = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
    >>> params = [torch.tensor([0.0, 0.0])]
    >>> optimizer.update([torch.tensor([3.0, 4.0])], optimizer.init(params), params)[0]
    [tensor([-0.6000, -0.8000])]
    """
    if not isinstance(clip, Clip):
        raise TypeError(
            f"clip: got {shown(clip)}, expected a clip first, such as ppfunc.optim.clip_by_global_norm(1.0)"
        )
    require_pair("optimizer", optimizer)
    if getattr(optimizer, "clipped", None) is not None:
        raise ValueError(f"optimizer: got {text_of(optimizer)}, which clips already; expected one clip")
    ending = skipping(optimizer)

    def update(
        grads: Tree, state: Tree, params: Tree, *, found_inf: Tensor | None = None
    ) -> tuple[Tree, Tree]:
        return ending.update(clip(grads), state, params, found_inf=found_inf)

    text = text_with(lambda: f"chain({clip.text}, {text_of(ending)})", [ending])
    return Optimizer(ending.init, update, (clip, ending), text)

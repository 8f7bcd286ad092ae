"""Make optimizers of transforms of gradients, one after the other."""

import inspect
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_flatten, tree_map, tree_paths

from .norms import clip_coefficient, global_norm, require_max_norm
from .protocols import (
    Clip,
    Optimizer,
    Transform,
    Tree,
    selected,
    skipping,
    text_of,
)


def from_updates(transform: Any) -> Optimizer:
    """Make an optimizer of one that returns differences: optax's form, as TorchOpt and :func:`chain` have it.

    Equivalent to:
        updates, state = transform.update(grads, state, params=params)
        params = params + updates

    The transform sees the parameters of one stage at a time. Clip by the norm of the whole model with
    :func:`clip_by_global_norm`.

    Args:
        transform: any object with ``init(params)`` and ``update(grads, state, params=params)``, all of whose
            state is tensors.

    Raises:
        TypeError: it has no such functions, or is :func:`clip_by_global_norm`, which makes no updates, or a
            leaf of its state is no tensor.
        ValueError: updates that do not have the structure of the parameters.

    References:
        DeepMind, optax; Ren et al., TorchOpt: An Efficient Library for Differentiable Optimization, 2023.

    >>> import torch
    >>> halved = lambda grads, state, params: (tree_map(lambda g: -0.5 * g, grads), state)
    >>> optimizer = from_updates(Transform(lambda params: (), halved))
    >>> optimizer.update([torch.tensor(2.0)], optimizer.init([]), [torch.tensor(1.0)])[0]
    [tensor(0.)]
    """
    if isinstance(transform, Clip):
        raise TypeError(
            "from_updates: got a clip, which returns gradients and no updates; expected"
            " chain(clip, optimizer)"
        )
    run = _update_of(transform)

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

    @torch.no_grad()
    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        found_inf: Tensor | None = None,
    ) -> tuple[Tree, Tree]:
        updates, after = run(grads, state, params)
        wanted, structure = tree_flatten(params)
        got, got_structure = tree_flatten(updates)
        if got_structure != structure:
            raise ValueError(
                f"updates must have the structure of params, got {got_structure} and expected {structure}"
            )
        new = structure.unflatten(starmap(_added, zip(wanted, got, strict=True)))
        return selected(found_inf, (params, state), (new, after))

    return Optimizer(init, update, text=f"from_updates({text_of(transform)})")


def _added(parameter: Tensor, change: Tensor) -> Tensor:
    return (parameter + change).to(parameter.dtype).detach() if differentiable(parameter.dtype) else parameter


def _update_of(transform: Any) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    """Return the update of a transform; it leaves its arguments as they are."""
    if not callable(getattr(transform, "init", None)) or not callable(getattr(transform, "update", None)):
        raise TypeError(
            f"got {type(transform).__name__}, expected an object with the functions init and update"
        )
    # TorchOpt writes into the gradients by default.
    keywords = {"inplace": False} if "inplace" in inspect.signature(transform.update).parameters else {}
    return lambda grads, state, params: transform.update(grads, state, params=params, **keywords)


def chain(*parts: Any) -> Any:
    """Run transforms of gradients one after the other, and an optimizer last.

    Args:
        parts: transforms, in optax's form; the last may be an optimizer.

    Returns:
        An optimizer where the last part is one, else a transform. The state is a tuple of the states of the
        parts.

    Raises:
        ValueError: no part; an optimizer that is not the last; clipping that is not the first.
        TypeError: a part without the functions ``init`` and ``update``.

    >>> import torch
    >>> from ppfunc.training.optim import sgd
    >>> optimizer = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
    >>> params = [torch.tensor([0.0, 0.0])]
    >>> optimizer.update([torch.tensor([3.0, 4.0])], optimizer.init(params), params)[0]
    [tensor([-0.6000, -0.8000])]
    """
    _require_order(parts)
    *transforms, last = parts
    if not transforms and isinstance(last, Clip | Optimizer):
        return last
    optimizer = last if isinstance(last, Optimizer) else None
    runs = [_update_of(part) for part in (transforms if optimizer else parts)]

    def init(params: Tree) -> tuple[Tree, ...]:
        return tuple(part.init(params) for part in parts)

    def changed(grads: Tree, state: tuple[Tree, ...], params: Tree) -> tuple[Tree, tuple[Tree, ...]]:
        after = []
        for run, part_state in zip(runs, state, strict=True):
            grads, new = run(grads, part_state, params)
            after.append(new)
        return grads, tuple(after)

    if optimizer is None:
        return Transform(init, changed)
    ending, text = skipping(optimizer), f"chain({', '.join(map(text_of, parts))})"

    @torch.no_grad()
    def update(
        grads: Tree,
        state: tuple[Tree, ...],
        params: Tree,
        *,
        found_inf: Tensor | None = None,
    ) -> tuple[Tree, Tree]:
        if not isinstance(state, tuple) or len(state) != len(parts):
            got = f"{len(state)} parts" if isinstance(state, tuple) else f"a {type(state).__name__}"
            raise ValueError(
                f"state: got {got}, expected those of the {len(parts)} of {text}; it is that of another"
                " optimizer"
            )
        grads, after = changed(grads, state[:-1], params)
        new, last_state = ending.update(grads, state[-1], params, found_inf=found_inf)
        return new, (*selected(found_inf, state[:-1], after), last_state)

    first = parts[0]
    return Optimizer(
        init, update, (first, chain(*parts[1:])) if isinstance(first, Clip) else ending.clipped, text
    )


def _require_order(parts: Sequence[Any]) -> None:
    """Raise ValueError unless clipping by the norm of all gradients comes first, and an optimizer last."""
    if not parts:
        raise ValueError("got no part, expected transforms of gradients, and an optimizer in the end")
    for n, part in enumerate(parts):
        if isinstance(part, Optimizer) and n < len(parts) - 1:
            raise ValueError(
                f"part {n} of {len(parts)} is an optimizer, which makes parameters of gradients: expected it"
                " in the end"
            )
        if isinstance(part, Clip) and n:
            raise ValueError(
                f"part {n} clips by the norm of all gradients: expected it first, before they are changed"
            )
    if len(parts) > 1 and isinstance(parts[0], Clip) and not isinstance(parts[-1], Optimizer):
        raise ValueError(
            "got clipping by the norm of all gradients without an optimizer: expected both in one chain"
        )
    if len(parts) > 1 and getattr(parts[-1], "clipped", None) is not None:
        raise ValueError(
            "the optimizer clips by the norm of all gradients: expected that first, before they are changed,"
            " in one chain"
        )


def clip_by_global_norm(max_norm: float) -> Clip:
    """Make a transform: scale all gradients by one factor, so that their norm is at most ``max_norm``.

    Equivalent to ``torch.nn.utils.clip_grad_norm_``: the factor is ``min(1, max_norm / (norm + 1e-6))``.

    Args:
        max_norm: 0 makes all gradients 0, infinity changes nothing.

    Raises:
        ValueError, TypeError: a negative number, or one that is none.
    """
    require_max_norm("max_norm", max_norm)

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        factor = clip_coefficient(global_norm(grads), max_norm)
        if factor is None:
            return grads, state
        return (
            tree_map(
                lambda g: g * factor.to(g.device, g.real.dtype) if differentiable(g.dtype) else g, grads
            ),
            state,
        )

    return Clip(lambda params: (), update, max_norm)

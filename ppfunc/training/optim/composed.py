"""Make optimizers of others: clip first, add differences in optax's form, average over updates."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ppfunc._checks import naming_arguments, require_counts, require_number, require_type
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from .._torch import looked_through
from .norms import Clip
from .protocols import Optimizer, Tree, require_pair, selected, text_of, unclipped
from .updates import zero_count


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
            require_type(path, leaf, torch.Tensor, "a tensor, which can be saved, moved and skipped")
        return state

    def update(
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        found_inf: torch.Tensor | None = None,
    ) -> tuple[Tree, Tree]:
        wanted, structure = tree_flatten(params)
        with nullcontext() if looked_through((grads, state, params)) else torch.no_grad():
            updates, after = transform.update(grads, state, params=params, **keywords)
            got, got_structure = tree_flatten(updates)
            if got_structure != structure:
                raise ValueError(
                    f"updates must have the structure of params, got {got_structure} and expected {structure}"
                )
            new = structure.unflatten(
                (p + change).to(p.dtype) if differentiable(p.dtype) else p
                for p, change in zip(wanted, got, strict=True)
            )
            return selected(found_inf, (params, state), (new, after))

    return Optimizer(init, update, text=lambda: f"from_updates({text_of(transform)})")


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
    require_type("clip", clip, Clip, "a clip first, such as ppfunc.optim.clip_by_global_norm(1.0)")
    ending = unclipped("optimizer", optimizer, "already; expected one clip")

    def update(
        grads: Tree, state: Tree, params: Tree, *, found_inf: torch.Tensor | None = None
    ) -> tuple[Tree, Tree]:
        return ending.update(clip(grads), state, params, found_inf=found_inf)

    def write() -> str:
        return f"chain({clip.text}, {text_of(ending)})"

    return ending._replace(update=update, clipped=(clip, ending), text=write, elementwise=False)


def ema(optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """Make an optimizer that also keeps an exponential moving average of the parameters.

    Equivalent to, after every update that is not skipped:
        average = decay * average + (1 - decay) * p

    Its state is a dictionary: ``average``, which begins with the parameters, in float32 or wider, and
    ``inner``, the state of ``optimizer``. To evaluate the average, give a trainer
    ``state._replace(params={s: own["average"] for s, own in state.optimizer.items()})``; where
    ``shard="optimizer"`` cuts it, gather its leaves by ``full_tensor()`` first.

    Args:
        decay: less than 1.

    Raises:
        ValueError, TypeError: another decay; not an optimizer, or one that clips: write
            ``chain(clip, ema(...))``.

    >>> from ppfunc.training.optim import sgd
    >>> optimizer, params = ema(sgd(1.0), decay=0.5), [torch.tensor(4.0)]
    >>> _, state = optimizer.update([torch.tensor(2.0)], optimizer.init(params), params)
    >>> state["average"]
    [tensor(3.)]
    """
    require_number("decay", decay, below=1.0)

    def average(new: Tree, state: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        return new, {"average": tree_map(lambda old, p: _between(old, p, 1 - decay), state["average"], new)}

    return _averaging(optimizer, f"ema {decay} of", lambda params: {"average": params}, average)


def lookahead(optimizer: Optimizer, every: int = 5, share: float = 0.5) -> Optimizer:
    """Make an optimizer that goes back a part of the way after every ``every`` updates.

    Equivalent to, after every ``every`` updates:
        slow = slow + share * (p - slow)
        p = slow

    Its state is a dictionary: ``updates``, the number of updates made, ``slow``, and ``inner``, the state of
    ``optimizer``.

    Raises:
        ValueError, TypeError: numbers out of range; not an optimizer, or one that clips: write
            ``chain(clip, lookahead(...))``.

    References:
        Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, NeurIPS 2019.
    """
    require_counts(every=every)
    require_number("share", share)

    def begin(params: Tree) -> dict[str, Tree]:
        return {"updates": zero_count(tree_leaves(params)), "slow": params}

    def go_back(new: Tree, state: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        updates = state["updates"] + 1
        due = (updates % every == 0).float()
        moved = tree_map(lambda old, p: _between(old, p, share), state["slow"], new)
        slow = selected(due, moved, state["slow"])  # selects the first where it is due
        back = tree_map(lambda p, old: old.to(p.dtype), new, slow)
        return selected(due, back, new), {"updates": updates, "slow": slow}

    return _averaging(optimizer, f"lookahead {every} {share} of", begin, go_back)


def _averaging(
    optimizer: Optimizer,
    name: str,
    begin: Callable[[Tree], dict[str, Tree]],
    average: Callable[[Tree, dict[str, Tree]], tuple[Tree, dict[str, Tree]]],
) -> Optimizer:
    """Make an optimizer that also averages the parameters that another one updates.

    Args:
        begin: makes its own state, of parameters.
        average: from new parameters and its own state to the parameters and state after them.
    """
    inner = unclipped("optimizer", optimizer, "inside; expected the clip around all, chain(clip, ...)")

    def init(params: Tree) -> dict[str, Tree]:
        def wide(p: torch.Tensor) -> torch.Tensor:  # in which small changes are not lost
            wider = torch.promote_types(p.dtype, torch.float32)
            return p.detach().to(wider).clone() if differentiable(p.dtype) else p

        return {**begin(tree_map(wide, params)), "inner": inner.init(params)}

    def update(
        grads: Tree, state: dict[str, Tree], params: Tree, *, found_inf: torch.Tensor | None = None
    ) -> tuple[Tree, dict[str, Tree]]:
        own = {key: tree for key, tree in state.items() if key != "inner"}
        with nullcontext() if looked_through((grads, state, params)) else torch.no_grad():
            new, after = inner.update(grads, state["inner"], params, found_inf=found_inf)
            averaged, own_after = average(new, own)
            return selected(found_inf, new, averaged), {**selected(found_inf, own, own_after), "inner": after}

    rate = inner.rate
    own_rate = None if rate is None else lambda state, since: rate(state["inner"], since)

    def observed(state: dict[str, Tree], metric: torch.Tensor) -> dict[str, Tree]:
        assert inner.observe is not None
        return {**state, "inner": inner.observe(state["inner"], metric)}

    return Optimizer(
        init,
        update,
        text=lambda: f"{name} {text_of(inner)}",
        elementwise=inner.elementwise,
        rate=own_rate,
        observe=None if inner.observe is None else observed,
    )


def _between(one: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
    """Return what is ``share`` of the way from one leaf to another; leaves that do not train as they are."""
    return one + share * (other - one) if differentiable(one.dtype) else one

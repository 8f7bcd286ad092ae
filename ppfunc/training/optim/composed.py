"""Make optimizers of others: clip first, add differences in optax's form, average over updates."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch

from ppfunc._checks import naming_arguments, require_number, require_type
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_flatten, tree_map, tree_paths

from ._torch import looked_through
from .norms import Clip
from .protocols import Optimizer, Tree, require_pair, selected, text_of, unclipped


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
def chain(clip: Clip, optimizer: Optimizer | None = None) -> Optimizer:
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
    require_type(
        "clip", clip, Clip, "a clip, then an optimizer: chain(clip_by_global_norm(1.0), adamw(1e-3))"
    )
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
    inner = unclipped("optimizer", optimizer, "inside; expected the clip around all, chain(clip, ema(...))")

    def init(params: Tree) -> dict[str, Tree]:
        def wide(p: torch.Tensor) -> torch.Tensor:  # in which small changes are not lost
            wider = torch.promote_types(p.dtype, torch.float32)
            return p.detach().to(wider).clone() if differentiable(p.dtype) else p

        return {"average": tree_map(wide, params), "inner": inner.init(params)}

    def towards(old: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return old + (1 - decay) * (p - old) if differentiable(old.dtype) else old

    def update(
        grads: Tree, state: dict[str, Tree], params: Tree, *, found_inf: torch.Tensor | None = None
    ) -> tuple[Tree, dict[str, Tree]]:
        with nullcontext() if looked_through((grads, state, params)) else torch.no_grad():
            new, after = inner.update(grads, state["inner"], params, found_inf=found_inf)
            average = selected(found_inf, state["average"], tree_map(towards, state["average"], new))
            return new, {"average": average, "inner": after}

    rate = inner.rate
    return Optimizer(
        init,
        update,
        text=lambda: f"ema {decay} of {text_of(inner)}",
        elementwise=inner.elementwise,
        rate=None if rate is None else lambda state, since: rate(state["inner"], since),
    )

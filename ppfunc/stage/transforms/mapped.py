"""Map stages along a leading axis: k models in one pipeline, or parameters of its own for every sample."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from einops import einsum, rearrange, reduce, repeat

from ..abstract.output import Output
from ..layout import Boundary, declaring, distributed, layout_of, local, whole
from ..program import Loss, Stage, without_aux
from ..signature import differentiable
from ..tree import tree_flatten, tree_leaves, tree_map


def batched(
    fn: Callable[..., Any], args: Sequence[Any], axes: Sequence[bool], randomness: str = "error"
) -> Any:
    """Map ``fn`` over a leading axis of the marked arguments: :func:`torch.func.vmap` for any trees.

    >>> batched(lambda x, y: {"sum": x + y}, (torch.arange(3), torch.tensor(1)), (True, False))
    {'sum': tensor([1, 2, 3])}
    """
    leaves, treedef = tree_flatten(tuple(args))
    along = [0 if axis else None for axis, arg in zip(axes, args, strict=True) for _ in tree_leaves(arg)]
    returned: list[Any] = []  # leaves and structure

    def run(*inside: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned[:] = tree_flatten(fn(*treedef.unflatten(inside)), "y")
        return tuple(leaf for leaf in returned[0] if isinstance(leaf, torch.Tensor))

    if 0 not in along:
        raise ValueError(
            "got nothing with a leading axis to go along: a stage of an ensemble without parameters cannot be"
            " the first; join it with the next"
        )
    try:
        mapped = iter(torch.func.vmap(run, tuple(along), randomness=randomness)(*leaves))
    except RuntimeError as error:
        if "randomness flag" in str(error):
            error.add_note(
                'it draws random numbers: pass randomness="different" or "same" to pp.ensemble or'
                " pp.per_sample_grad"
            )
        raise
    leaves, treedef = returned
    return treedef.unflatten(next(mapped) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)


def ensemble(
    stages: Sequence[Stage], loss_fn: Loss, *, randomness: str = "error"
) -> tuple[list[Stage], Loss]:
    """Make stages and a loss for k models of the same architecture that see the same batch.

    Every leaf of the parameters gets a leading axis k (``torch.func.stack_module_state``, or
    ``torch.stack``), and so does every leaf between stages. The losses are a tensor[k]. Their sum has
    the gradients of k separate trainings::

        step = pp.value_and_grad(*pp.ensemble(stages, loss_fn), schedule, transport, loss_shape=(k,))
        losses, grads = step(params, inputs, targets)

    All models see the same extras. An auxiliary loss becomes a tensor[k]. Metrics get the axis k.

    Args:
        stages: one per stage of the model. The first has parameters, none has a state.
        loss_fn: ``loss(y, target) -> scalar``.
        randomness: random numbers of a stage that draws some: ``"different"`` for each model, or ``"same"``
            for all; by default such a stage raises.

    >>> stages, loss = ensemble([lambda w, x: w * x] * 2, lambda y, target: y - target)
    >>> hidden = stages[0](torch.tensor([1.0, 2.0]), torch.tensor(3.0))
    >>> loss(stages[1](torch.tensor([1.0, 10.0]), hidden), torch.tensor(1.0))
    tensor([ 2., 59.])
    """

    def stage(fn: Stage, first: bool) -> Stage:
        @wraps(fn)
        def models(params: Any, x: Any, *extras: Any) -> Any:
            out = batched(fn, (params, x, *extras), (True, not first, *(False for _ in extras)), randomness)
            if isinstance(out, Output) and out.state is not None:
                raise ValueError(
                    "it returns a state, which an ensemble would need k of; take stages without state"
                )
            return out

        boundary = Boundary.of(fn)
        behind = boundary.map(_inward)
        return declaring(models, behind._replace(inputs=boundary.inputs) if first else behind)

    def losses(y: Any, target: Any) -> torch.Tensor:
        return batched(loss_fn, (y, target), (True, False), randomness)

    return [stage(fn, number == 0) for number, fn in enumerate(stages)], losses


def _inward(prefix: Any) -> Any:
    """Shift placements by a new axis in front of a tensor."""
    from torch.distributed.tensor import Shard

    return tree_map(
        lambda placement: Shard(placement.dim + (placement.dim >= 0)) if placement.is_shard() else placement,
        prefix,
    )


def per_sample(fn: Stage, *, randomness: str = "error", alone: bool = True, joined: bool = True) -> Stage:
    """Give every sample parameters of its own, so that gradients do not add up over samples.

    Equivalent to ``torch.func.vmap(fn)``, with every sample a batch of one: parameters (see
    :func:`for_samples`), ``x`` and the further arguments have a leading axis b.

    Args:
        randomness: that of ``vmap``.
        alone: whether ``x`` and the further arguments have a batch axis, which becomes one sample long; else
            the stage gets what the one before it returned for that sample.
        joined: whether outputs have a batch axis, which becomes b long; else they get a further axis b.
    """

    def one(params: Any, *sample: Any) -> Any:
        with WithoutAsStrided():
            out = fn(params, *(_alone(sample) if alone else sample))
        if isinstance(out, Output) and (out.loss, out.metrics, out.state) != (None, None, None):
            raise ValueError(
                "it returns an auxiliary loss, metrics or a state, of which there are none per sample; return"
                " y and skips alone"
            )
        return out

    @wraps(fn)
    def stage(params: Any, x: Any, *extras: Any) -> Any:
        out = batched(one, (params, x, *extras), (True,) * (2 + len(extras)), randomness)
        return tree_map(_joined, out) if joined else out

    return stage


class WithoutAsStrided(torch.overrides.TorchFunctionMode):
    """Refuse ``as_strided``: its gradient is wrong where all samples share the memory of a parameter."""

    looks_on = True  # no operator is another one by it

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.as_strided, torch.Tensor.as_strided):
            refuse_as_strided()
        return func(*args, **(kwargs or {}))


def refuse_as_strided() -> None:
    """Raise ValueError for ``as_strided`` in a stage with gradients of every sample."""
    raise ValueError(
        "it calls as_strided, whose gradient for every sample would be wrong; index, or use unfold, diagonal"
        " or flatten"
    )


def per_sample_loss(loss_fn: Loss, *, joined: bool = True) -> Loss:
    """Return ``loss(y, target) -> tensor[b]``, the losses of every sample as a batch of one."""

    def one(y: Any, target: Any) -> torch.Tensor:
        return without_aux(loss_fn)(_alone(y) if joined else y, _alone(target))

    def losses(y: Any, target: Any) -> torch.Tensor:
        return batched(one, (y, target), (True, True))

    return losses


def for_samples(params: Any, samples: int) -> Any:
    """Expand the parameters along a leading axis of samples: views, without a copy.

    >>> for_samples({"w": torch.zeros(3)}, 5)["w"].shape
    torch.Size([5, 3])
    """

    def copies(p: torch.Tensor) -> torch.Tensor:
        layout = layout_of(p)
        return distributed(
            repeat(local(p).detach(), "... -> b ...", b=samples), layout and layout.stacked(samples)
        )

    return tree_map(copies, params)


def square_norms(grads: Any) -> torch.Tensor:
    """Compute the squared norm of every per-sample gradient, over all leaves of ``grads``.

    Args:
        grads: a tree of per-sample gradients, [m, b, ...] each. Where the stages of a model are on several
            ranks, add up the norms of all of them before using them.

    Returns:
        tensor[m, b].

    >>> square_norms([torch.ones(2, 3, 4), 2 * torch.ones(2, 3)])
    tensor([[8., 8., 8.],
            [8., 8., 8.]])
    """
    floating = [g for g in tree_leaves(grads) if differentiable(g.dtype)]
    return torch.stack([whole(reduce(g.abs().square(), "m b ... -> m b", "sum")) for g in floating]).sum(0)


def clipped_sum(grads: Any, square_norms: torch.Tensor, max_norm: float) -> Any:
    """Sum per-sample gradients, each scaled down to a norm of ``max_norm`` at most.

    Args:
        grads: a tree of per-sample gradients, [m, b, ...] each.
        square_norms: of the gradients of all stages, [m, b].
        max_norm: the largest norm, positive.

    Returns:
        A tree like the parameters.

    Raises:
        ValueError: ``max_norm`` is not positive.

    References:
        Abadi et al., Deep learning with differential privacy, 2016, algorithm 1.

    >>> grads = {"w": torch.tensor([[3.0, 0.5]])}
    >>> clipped_sum(grads, square_norms(grads), 1.0)
    {'w': tensor(1.5000)}
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: got {max_norm}, expected a positive number")
    scale = (max_norm / square_norms.sqrt()).clamp(max=1)

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        if not differentiable(gradient.dtype):
            return gradient[0, 0]
        layout = layout_of(gradient)
        total = einsum(scale.to(gradient.dtype), local(gradient), "m b, m b ... -> ...")
        return distributed(total, layout and layout.without(2))

    return tree_map(clip, grads)


def _alone(sample: Any) -> Any:
    """Make a sample a batch of one."""
    return tree_map(lambda t: rearrange(t, "... -> 1 ..."), sample)


def _joined(t: torch.Tensor) -> torch.Tensor:
    """Join batches of one to one batch: [b, 1, ...] becomes [b, ...]."""
    if t.ndim < 2 or t.shape[1] != 1:
        raise ValueError(
            f"got an output of shape {list(t.shape[1:])} for a batch of one; a stage with per-sample"
            " gradients must return leaves with a leading batch axis"
        )
    return rearrange(t, "b 1 ... -> b ...")

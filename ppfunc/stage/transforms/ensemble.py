"""Run an ensemble of k models in one pipeline: functions of trees, mapped along a leading axis."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from ..layout import Boundary, declaring
from ..output import Output
from ..program import Loss, Stage
from ..tree import tree_flatten, tree_leaves, tree_map


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

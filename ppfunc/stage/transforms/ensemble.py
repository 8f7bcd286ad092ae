"""Run an ensemble of k models in one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from ..output import Output
from .batched import batched
from .dual import Loss, Stage


def ensemble(stages: Sequence[Stage], loss_fn: Loss, *, randomness: str = "error") -> tuple[list[Stage], Loss]:
    """Stages and a loss for k models of the same architecture, that see the same batch.

    Every leaf of the parameters gets a leading axis k (``torch.func.stack_module_state``, or
    ``torch.stack``); what travels between the stages has it too. The losses are a tensor[k]; their
    sum has the gradients of k separate trainings::

        step = pp.value_and_grad(*pp.ensemble(stages, loss_fn), schedule, transport, loss_shape=(k,))
        losses, grads = step(params, inputs, targets)

    Extras are seen by all models, an auxiliary loss becomes a tensor[k], metrics get the axis k.

    Args:
        stages: one per stage of the model; without state, the first with parameters.
        loss_fn: ``loss(y, target) -> scalar``.
        randomness: ``"different"`` for models that draw each its own random numbers, ``"same"`` for all
            the same ones; by default a stage that draws is refused.

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
                raise ValueError("it returns a state, which an ensemble would need k of; take stages without state")
            return out

        return models

    def losses(y: Any, target: Any) -> torch.Tensor:
        return batched(loss_fn, (y, target), (True, False), randomness)

    return [stage(fn, number == 0) for number, fn in enumerate(stages)], losses

"""Define the state of training and the metrics of a step: trees of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ..stage.layout import local
from ..stage.tree import tree_leaves
from .protocols import Tree

_GIVEN_UP, _KNOWN = "_ppfunc_given_up", "_ppfunc_known"  # attributes of tensors


class TrainState(NamedTuple):
    """Everything that training goes on from; every leaf is a tensor or a DTensor.

    Args:
        step: updates so far, without those that were skipped, int64[].
        params: by stage of the model, of this process, in the dtype of ``precision.master``.
        optimizer: its state, by stage.
        scale: of the loss, as :class:`LossScale` keeps it; empty where there is none.
        stage_state: the state of the stages that have one, such as running statistics, by stage; empty where none has.
    """

    step: Tensor
    params: dict[int, Tree]
    optimizer: dict[int, Tree]
    scale: dict[str, Tensor]
    stage_state: dict[int, Tree]


class Metrics(NamedTuple):
    """Describe a step; tensors on the device, which nothing has read. All but ``stages`` are the same on all ranks.

    Args:
        loss: the weighted sum over the microbatches of all data ranks, float64[].
        grad_norm: of all gradients, before they were clipped, float64[].
        scale: of the loss in this step, float64[].
        skipped: 1 where the update was left out since loss or gradients were not finite, else 0, float32[].
        stages: what the stages of this process return as metrics, by stage: trees with a leading axis of the microbatches that
            it ran, of all passes; Microbatches where they differ in form.
    """

    loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor
    stages: dict[int, Any]


def give_up(state: TrainState, written: Iterable[Tensor], reason: str) -> None:
    """Mark a state, of which these leaves were updated in place, so that its next use raises.

    Other states may hold the same leaves: those after it.
    """
    for leaf in written:
        vars(leaf)[_GIVEN_UP] = True
        vars(state.step)[_GIVEN_UP] = reason


def require_not_given_up(state: TrainState) -> None:
    """Raise ValueError for a state that was given up: its leaves are no longer all of one step."""
    reason = vars(state.step).get(_GIVEN_UP)
    if reason is not None and any(_GIVEN_UP in vars(local(leaf)) for leaf in tree_leaves((state.params, state.optimizer))):
        raise ValueError(f"state: {reason}; go on from the state that the last step returned, a copy from before it, or a checkpoint")


def mark_known(state: TrainState, trainer: str) -> None:
    """Note that a state has the form that a trainer of this name works on."""
    vars(state.step)[_KNOWN] = trainer, id(state.optimizer)


def is_known(state: TrainState, trainer: str) -> bool:
    """Whether a state was marked for this trainer, and has the same optimizer state since."""
    return vars(state.step).get(_KNOWN) == (trainer, id(state.optimizer))

"""Define the state of training and the metrics of a step: trees of tensors."""

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ppfunc.stage.tree import tree_leaves

from ..optim._torch import note_on_memory, noted_on_memory
from ..optim.protocols import Tree

_made: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # by the step of a state: the count when it was made, and its stages
_count = [0]  # of updates in place


# By their names in safetensors: a state holds tensors of these, as checkpoints do.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class TrainState(NamedTuple):
    """Hold the state of training; every leaf is a tensor or a DTensor.

    Args:
        step: number of updates so far, without those that were skipped, int64[].
        params: parameters of this process, by stage of the model, in the dtype of ``precision.master``.
        optimizer: state of the optimizer, by stage.
        scale: state of the :class:`LossScale`; empty without one.
        stage_state: states of the stages that have one, such as running statistics, by stage.
    """

    step: Tensor
    params: dict[int, Tree]
    optimizer: dict[int, Tree]
    scale: dict[str, Tensor]
    stage_state: dict[int, Tree]


class Metrics(NamedTuple):
    """Hold the results of a training step beside the new state, as tensors on the device.

    ``stages``, ``aux`` and ``outputs`` are those of this process, all others are the same on all ranks.

    Args:
        loss: the weighted sum over the microbatches of all data ranks, float64[].
        grad_norm: of all gradients, before they were clipped, float64[].
        scale: of the loss in this step, float64[].
        skipped: 1 if the update was left out since loss or gradients were not finite, else 0, float32[].
        stages: metrics of the stages of this process, by stage: trees with a leading axis of the microbatches
            that it ran; Microbatches if they differ in form.
        aux: the tree that the loss function has returned beside the loss, likewise; None on ranks that run no
            last stage, and if it returns the loss alone.
        losses: of the microbatches of all data ranks, in the order of the ranks, float64[ranks * m]: not
            weighted, with auxiliary losses of stages; None unless asked for.
        outputs: of the last stages of this process; None unless asked for.
        lr: the learning rate of this update, float64[]; of an optimizer of groups a dictionary, by group.
            None if the optimizer does not tell its rate.
        stage_norms: of the gradients of every stage of the model, float64[stages]; None unless asked for.
        leaf_norms: of the gradient of every parameter of this process that trains, whole over all ranks:
            float64[] by stage and name, 0 where a tied parameter has its first place elsewhere; None unless
            asked for.
    """

    loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor
    stages: dict[int, Any]
    aux: Any = None
    losses: Tensor | None = None
    outputs: Any = None
    lr: Any = None
    stage_norms: Tensor | None = None
    leaf_norms: dict[int, dict[str, Tensor]] | None = None


def note_made(state: TrainState, stages: Mapping[int, Any]) -> TrainState:
    """Note that the leaves of a state have their values from now on, and what is known of them, by stage."""
    _made[state.step] = _count[0], stages
    return state


def stages_made(state: TrainState) -> Mapping[int, Any]:
    """Return what is known of the leaves of a state; nothing of a copy that a caller has made."""
    return _made.get(state.step, (0, {}))[1]


def refs(leaves: Iterable[Tensor]) -> list[ref[Tensor]]:
    """Refer to tensors without keeping them alive."""
    return list(map(ref, leaves))


def are(known: Sequence[ref[Tensor]], leaves: Sequence[Tensor]) -> bool:
    """Tell whether these are the tensors that are referred to: one that lives has one reference."""
    return len(known) == len(leaves) and all(map(is_, known, map(ref, leaves)))


class Donation:
    """Notes on the memory of leaves their last update in place: its number, and the step of the given state.

    A state of these leaves from before that update raises at its next use.

    Args:
        stage: whose update it is.
    """

    count: int
    step: ref[Tensor]

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def mark(self, step: Tensor, written: Sequence[Tensor]) -> None:
        """Note an update from the state of this ``step``, of leaves that are marked, and of ``written``."""
        _count[0] += 1
        self.count, self.step = _count[0], ref(step)
        for leaf in written:
            note_on_memory(leaf, self)


def updated_from(step: Tensor, leaves: Iterable[Tensor]) -> tuple[int, int] | None:
    """Find a leaf that an update in place from the state of this ``step`` has written into.

    Returns:
        The number of the first, and the stage of that update; None if there is none.
    """
    for n, note in enumerate(map(noted_on_memory, leaves)):
        if note is not None and note.step() is step:
            return n, note.stage
    return None


def require_not_donated(state: TrainState) -> None:
    """Raise ValueError for a state whose leaves were updated in place: they have values of a later step."""
    since, _ = _made.get(state.step, (None, {}))
    for leaf in () if since == _count[0] else tree_leaves((state.params, state.optimizer)):
        donation: Donation | None = noted_on_memory(leaf)
        own = donation is not None and donation.step() is state.step
        if own or (donation is not None and since is not None and donation.count > since):
            one = "it" if own else "another state of the same tensors"
            raise ValueError(
                f"state: a step was given {one}, and has updated it in place, as donate=True says; go on from"
                " the state that the last step returned, a copy from before it, or a checkpoint; give each"
                " trainer tensors of its own"
            )

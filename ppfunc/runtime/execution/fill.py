"""Fill the buffers of a step with its arguments."""

from functools import lru_cache

import torch

from ..call.arguments import StepArguments
from ..lowering.compile import gradients_of
from ..lowering.lowered import BATCH, LoweredStep
from ..lowering.tail_calls import loss_dtype
from .buffers import Buffers, Tag
from .torch_state import values


def fill(lowered: LoweredStep, arguments: StepArguments, before: Buffers | None = None) -> Buffers:
    """Make buffers with the arguments in their places.

    Args:
        before: the buffers of the step before it in the same call, whose parameters and states go on.

    Raises:
        ValueError: a stage draws random numbers, and there is no seed; a loss in float16 is to be scaled.
    """
    if arguments.seed is None and lowered.drawing:
        raise ValueError(
            f"stage {lowered.drawing[0]} draws random numbers; pass seed=(seed, step) to the step, two"
            " integers"
        )
    buffers = Buffers(params=dict(arguments.params), state=dict(arguments.state), seed=arguments.seed)
    buffers.microbatch_offset, buffers.left_out = arguments.microbatch_offset, arguments.left_out
    buffers.scale, buffers.update = arguments.scale, arguments.update
    buffers.bare = arguments.params
    if before is not None:
        buffers.params, buffers.state = dict(before.params), dict(before.state)
        buffers.scale = before.scale
        buffers.kept_before = [*before.kept_before, before.kept] if "aux" in lowered.spec.wants else []
    for chain in lowered.schedule.chains:
        for stage in chain.stages:
            if lowered.schedule.placement[stage] in lowered.ranks:
                _fill_stage(lowered, arguments, buffers, stage, chain.microbatches)
    return buffers


def _fill_stage(
    lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, stage: int, microbatches: range
) -> None:
    schedule, model_stage = lowered.schedule, lowered.schedule.model_stages[stage]
    if not schedule.forward_only:
        buffers.gradients[stage] = gradients_of(lowered, buffers, model_stage)
    batches = [arguments.targets] if schedule.successor(stage) is None and arguments.targets else []
    batches += [arguments.extras[model_stage]] if model_stage in arguments.extras else []
    if batches:
        buffers.extras.update(((stage, m), sum((tuple(b[m]) for b in batches), ())) for m in microbatches)
    if stage in lowered.losses:
        weights = buffers.weights[stage] = _weights_of(lowered, arguments, stage)
        shape, dtype = lowered.losses[stage].leaf.shape[1:], loss_dtype(lowered, stage)
        if buffers.scale is not None:
            if dtype == torch.float16:
                raise ValueError(
                    f"the loss of stage {model_stage} is float16, in which a scaled loss overflows; compute"
                    " it in float32, as loss_fn(y.float(), target) does, or leave out the scale"
                )
            weights = tuple([weight * buffers.scale.to(weight.device, weight.dtype) for weight in weights])
        buffers.cotangents.update(((stage, m), (weights[m].to(dtype).expand(shape),)) for m in microbatches)
    if schedule.predecessor(stage) is None:
        buffers.values.update((Tag("F", BATCH, stage, m), tuple(arguments.inputs[m])) for m in microbatches)


def _weights_of(lowered: LoweredStep, arguments: StepArguments, stage: int) -> tuple[torch.Tensor, ...]:
    """Return the weight of every microbatch, a scalar each, where a stage computes and in the dtype in which
    losses are added up.
    """
    m, weights = lowered.schedule.microbatches, arguments.loss_weights
    if weights is None:
        weights = torch.full((m,), 1 / m, dtype=torch.float64, device="cpu")
    device, dtype = lowered.form.devices[lowered.schedule.model_stages[stage]], loss_dtype(lowered, stage)
    wide = weights.to(device, lowered.losses[stage].leaf.dtype)
    if arguments.loss_weights is not None:
        rows = values(weights)  # of all rows, under a transform
        if rows.device.type == "cpu":
            _require_representable(tuple(rows.flatten().tolist()), dtype)
        else:  # where nothing may be read, they make no number
            wide = torch.where((weights.to(device) != 0) & (wide.to(dtype) == 0), torch.nan, wide)
    return wide.unbind()


@lru_cache(maxsize=64)
def _require_representable(weights: tuple[float, ...], dtype: torch.dtype) -> None:
    """Raise ValueError for weights that the dtype of a loss cannot hold."""
    wide = torch.tensor(weights, dtype=torch.float64, device="cpu")
    narrow = wide.to(dtype)
    if any((((wide != 0) & (narrow == 0)) | (wide.isfinite() & ~narrow.isfinite())).tolist()):
        raise ValueError(
            f"loss_weights: got {list(weights)}, of which some become 0 or infinite in {dtype}, the dtype of"
            " the loss; compute the loss in float32"
        )

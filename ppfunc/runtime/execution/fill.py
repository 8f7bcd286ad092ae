"""Fill the buffers of a step with its arguments, and read its losses from them."""

from functools import lru_cache

import torch

from ppfunc.schedule import Chain
from ppfunc.stage.device import upload

from ..call.arguments import StepArguments
from ..lowering.lowered import BATCH, LoweredStep
from .buffers import Buffers, Tag
from .gradients import Gradients, Stack, Sum
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
        buffers.gathering, buffers.scale = dict(before.gathering), before.scale
        buffers.kept_before = [*before.kept_before, before.kept] if "aux" in lowered.spec.wants else []
    for chain in lowered.schedule.chains:
        for stage in chain.stages:
            if lowered.schedule.placement[stage] in lowered.ranks:
                _fill_stage(lowered, arguments, buffers, stage, chain)
    return buffers


def _fill_stage(
    lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, stage: int, chain: Chain
) -> None:
    microbatches, model_stage = chain.microbatches, lowered.schedule.model_stages[stage]
    if not lowered.schedule.forward_only:
        buffers.gradients[stage] = _gradients_of(lowered, buffers, model_stage)
    batches = [arguments.targets] if stage == chain.stages[-1] and arguments.targets else []
    batches += [arguments.extras[model_stage]] if model_stage in arguments.extras else []
    if batches:
        buffers.extras.update(((stage, m), sum((tuple(b[m]) for b in batches), ())) for m in microbatches)
    if stage in lowered.losses:
        losses = (lowered.stages[stage, m].loss for m in microbatches)
        leaf = next(loss for loss in losses if loss is not None).leaves[0]
        weights = buffers.weights[stage] = _weights_of(lowered, arguments, stage, leaf.dtype)
        if buffers.scale is not None:
            if leaf.dtype == torch.float16:
                raise ValueError(
                    f"the loss of stage {model_stage} is float16, in which a scaled loss overflows; compute"
                    " it in float32, as loss_fn(y.float(), target) does, or leave out the scale"
                )
            weights = tuple([weight * buffers.scale.to(weight.device, weight.dtype) for weight in weights])
        cotangents = ((weights[m].to(leaf.dtype).expand(leaf.shape),) for m in microbatches)
        buffers.cotangents.update(zip(((stage, m) for m in microbatches), cotangents, strict=True))
    if stage == chain.stages[0]:
        buffers.values.update((Tag("F", BATCH, stage, m), tuple(arguments.inputs[m])) for m in microbatches)


def new_gradients(lowered: LoweredStep) -> Gradients:
    """Make the sum of the gradients of one stage."""
    if lowered.spec.per_microbatch:
        return Stack(lowered.schedule.microbatches)
    return Sum(lowered.spec.sum_dtype)


def _gradients_of(lowered: LoweredStep, buffers: Buffers, model_stage: int) -> Gradients:
    """Make the sum of the gradients of a stage of the model, in memory of the update if it has some."""
    gradients = new_gradients(lowered)
    if buffers.update is None:
        return gradients
    leaves = enumerate(lowered.form.params[model_stage].leaves)
    forms = {n: gradients.signature(leaf) for n, leaf in leaves if leaf.grad}
    return buffers.update.sums(model_stage, forms) or gradients


def _weights_of(
    lowered: LoweredStep, arguments: StepArguments, stage: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return the weight of every microbatch, a scalar each, where a stage computes and in the dtype in which
    losses are added up.

    Args:
        dtype: in which the stage makes its losses.
    """
    weights, form = arguments.loss_weights, lowered.losses[stage].leaf
    device = lowered.form.devices[lowered.schedule.model_stages[stage]]
    if weights is None:
        m = lowered.schedule.microbatches
        return torch.full((m,), 1 / m, dtype=form.dtype, device=device).unbind()
    wide = upload(weights.to(form.dtype), device)
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


def losses_of(lowered: LoweredStep, buffers: Buffers) -> dict[int, torch.Tensor]:
    """Return the losses of a step, each times the weight of its microbatch, by stage of this process.

    A loss of weight 0 counts as 0, also where it is NaN, as the mean over no tokens is. If the loss of each
    microbatch is wanted, those before they were weighted come with them, see :class:`LossPart`.
    """
    weighted: dict[int, torch.Tensor] = {}
    for stage, part in lowered.losses.items():
        chain = next(chain for chain in lowered.schedule.chains if stage in chain.stages)
        own = [m for m in chain.microbatches if lowered.stages[stage, m].loss is not None]
        each = [buffers.kept[stage, m][0] for m in own]
        rows = [
            torch.zeros_like(loss) if m in buffers.left_out else loss
            for m, loss in zip(own, each, strict=True)
        ]
        losses = torch.stack(rows).to(part.leaf.dtype)
        weights = torch.stack([buffers.weights[stage][m] for m in own])
        weights = weights.view(-1, *(1,) * (losses.ndim - 1))
        losses = torch.where(weights == 0, torch.zeros_like(losses), losses * weights)
        if part.each:
            losses = torch.stack([losses, torch.stack(each).to(part.leaf.dtype)])
        weighted[stage] = losses
    return weighted

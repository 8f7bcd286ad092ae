"""Execute the calls of a compiled step, with buffers made for this step alone."""

from functools import lru_cache, partial

import torch

from ppfunc.schedule import Op, parts_of
from ppfunc.schedule.instruction import TAIL
from ppfunc.stage.errors import line_of

from .arguments import StepArguments
from .buffers import Buffers, Tag
from .compile import CompiledStep, gradients_of
from .errors import Failure, StepFailed
from .functorch import values
from .losses import loss_dtype, losses_of
from .lowered import BATCH, LoweredStep


def execute(compiled: CompiledStep, buffers: Buffers) -> Buffers:
    """Run every call in turn; those that end a program where the gradients are complete.

    Args:
        compiled: what to run.
        buffers: the arguments, see :func:`fill`; hold the results afterwards.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    index = 0
    try:
        for index, call in enumerate(compiled.calls):
            if buffers.ends or compiled.places[index].instruction.op not in TAIL:
                call(buffers)
    except BaseException as cause:
        place = compiled.places[index]
        failure = Failure(place.rank, place.position, place.instruction, cause)
        raise StepFailed(failure, partial(context_of, failure, compiled.lowered)) from cause
    return buffers


def fill(lowered: LoweredStep, arguments: StepArguments, before: Buffers | None = None) -> Buffers:
    """New buffers with the arguments in their places.

    Args:
        before: the buffers of the pass before, whose parameters and states go on; its gradients and losses, too, where they
            were not complete.

    Raises:
        ValueError: a stage draws random numbers, and there is no seed; a loss in float16 is to be scaled.
    """
    if arguments.seed is None and lowered.drawing:
        raise ValueError(f"stage {lowered.drawing[0]} draws random numbers; pass seed=(seed, step) to the step, two integers")
    schedule = lowered.schedule
    buffers = Buffers(params=dict(arguments.params), state=dict(arguments.state), seed=arguments.seed)
    buffers.ends, buffers.first, buffers.left_out = arguments.ends, arguments.first, arguments.left_out
    buffers.scale, buffers.update_state = arguments.scale, arguments.update_state
    buffers.bare = arguments.params
    if before is not None:
        buffers.params, buffers.state, buffers.scale, buffers.update_state = before.params, before.state, before.scale, before.update_state
        buffers.kept_before = [*before.kept_before, before.kept] if "aux" in lowered.spec.wants else []
        if not before.ends:
            buffers.gradients = before.gradients
            buffers.losses = {stage: [losses] for stage, losses in losses_of(lowered, before).items()}
    for chain in schedule.chains:
        last = chain.stages[-1]
        for stage in chain.stages:
            if schedule.placement[stage] not in lowered.ranks:
                continue
            model = schedule.model_stages[stage]
            if not schedule.forward_only and stage not in buffers.gradients:
                buffers.gradients[stage] = gradients_of(lowered, buffers, model)
            batches = [arguments.targets] if stage == last and arguments.targets else []
            batches += [arguments.extras[model]] if model in arguments.extras else []
            if batches:
                buffers.extras.update(((stage, m), sum((tuple(b[m]) for b in batches), ())) for m in chain.microbatches)
            if stage in lowered.losses:
                weights = buffers.weights[stage] = weights_of(lowered, arguments, stage)
                if buffers.scale is not None:
                    _require_scalable(lowered, stage)
                    weights = tuple([weight * buffers.scale.to(weight.device, weight.dtype) for weight in weights])
                shape, dtype = lowered.losses[stage].leaf.shape[1:], loss_dtype(lowered, stage)
                buffers.cotangents.update(((stage, m), (weights[m].to(dtype).expand(shape),)) for m in chain.microbatches)
            if stage == chain.stages[0]:
                buffers.values.update((Tag("F", BATCH, stage, m), tuple(arguments.inputs[m])) for m in chain.microbatches)
    return buffers


def _require_scalable(lowered: LoweredStep, stage: int) -> None:
    if loss_dtype(lowered, stage) == torch.float16:
        raise ValueError(
            f"the loss of stage {lowered.schedule.model_stages[stage]} is float16, in which a scaled loss overflows; compute it in "
            "float32, as loss_fn(y.float(), target) does, or leave out the scale"
        )


def weights_of(lowered: LoweredStep, arguments: StepArguments, stage: int) -> tuple[torch.Tensor, ...]:
    """The weight of every microbatch, a scalar each, where a stage computes and in the dtype in which losses are added up."""
    m, weights = lowered.schedule.microbatches, arguments.loss_weights
    if weights is None:
        weights = torch.full((m,), 1 / m, dtype=torch.float64, device="cpu")
    device, dtype = lowered.form.devices[lowered.schedule.model_stages[stage]], loss_dtype(lowered, stage)
    wide = weights.to(device, lowered.losses[stage].leaf.dtype)
    if arguments.loss_weights is not None:
        given = values(weights)  # of all rows, under a transform
        if given.device.type == "cpu":
            _require_representable(tuple(given.flatten().tolist()), dtype)
        else:  # where nothing may be read, they make no number
            wide = torch.where((weights.to(device) != 0) & (wide.to(dtype) == 0), torch.nan, wide)
    return wide.unbind()


@lru_cache(maxsize=64)
def _require_representable(weights: tuple[float, ...], dtype: torch.dtype) -> None:
    """Raise ValueError for weights that the dtype of a loss does not know."""
    given = torch.tensor(weights, dtype=torch.float64, device="cpu")
    narrow = given.to(dtype)
    if any((((given != 0) & (narrow == 0)) | (given.isfinite() & ~narrow.isfinite())).tolist()):
        raise ValueError(
            f"loss_weights: got {list(weights)}, of which some become 0 or infinite in {dtype}, the dtype of the loss; "
            "compute the loss in float32"
        )


def context_of(failure: Failure, lowered: LoweredStep) -> str:
    """The line of the user's code that failed, and the shapes that the stage of a failed forward was given."""
    if failure.instruction is None or not isinstance(failure.cause, Exception):
        return ""
    line = line_of(failure.cause)
    for part in parts_of(failure.instruction):
        if part.op is Op.F and part.microbatch is not None:
            low = lowered.stages[part.stage, part.microbatch]
            return f"{line}; its input was {', '.join(str(edge.signature) for edge in low.sources)}, its parameters {low.params}"
    return line

"""Run a compiled step to its end on all ranks, with buffers made for this step alone."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch

from ppfunc.schedule import Chain, Timeline
from ppfunc.stage import LeafSignature
from ppfunc.stage._torch import transforming, values
from ppfunc.stage.device import preserve_rng, upload
from ppfunc.stage.process import act_on_interrupts, this_thread
from ppfunc.stage.tree import tree_leaves

from ..compiling.calls import Sum
from ..compiling.compile import CompiledStep
from ..compiling.compiled_steps import Entry
from ..lowering.lowered import BATCH, LoweredStep
from ..lowering.results import StepResult, collect, losses_of
from ..ports.protocols import Transport
from ..values.arguments import StepArguments
from ..values.buffers import Buffers, Gradients, Leaves, Numbers, Owner, Tag
from ..values.errors import Failure, StepFailed
from .nonfinite import NotFinite, count_nonfinite, locate_nonfinite
from .record import Recorder, gather


def run_step(
    entry: Entry, steps: Sequence[StepArguments], transport: Transport, recorder: Recorder | None = None
) -> tuple[StepResult, Timeline | None]:
    """Run a compiled step with the arguments of every step of the call; return once all ranks are at its end.

    Args:
        recorder: measures the step, whose timeline is returned.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    spec, loss_parts = entry.compiled.lowered.spec, entry.agreed.losses
    compiled = entry.compiled if recorder is None else recorder.attach(entry.compiled)
    lowered = compiled.lowered
    transport.ready(entry.layouts)
    # Under a torch.func transform from outside, that transform decides what is recorded.
    with (
        torch.set_grad_enabled(torch.is_grad_enabled() and transforming() is not None),
        nullcontext() if steps[0].seed is None else preserve_rng(lowered.form.devices.values()),
    ):
        if (update := steps[0].update) is not None:
            weights = update.begin([arguments.loss_weights for arguments in steps])
            pairs = zip(steps, weights, strict=True)
            steps = [
                args if divided is None else replace(args, loss_weights=divided) for args, divided in pairs
            ]
            loss_parts = {}  # the update has the losses, and sums them over all pipelines
        buffers = execute_steps(compiled, steps, transport)
        if update is not None:
            update.finish()
        losses = losses_of(lowered, buffers) if loss_parts else {}
        result, compared = collect(lowered, steps, buffers), buffers.compared
        del buffers  # the step may run again
        if spec.finite and update is None:
            tensors = [*losses.values(), *tree_leaves((result.grads, result.input_grads))]
            compared = [count_nonfinite(tensors, entry.compiled, transport), *compared]
        guards = entry.guards
        timeline = None if recorder is None else gather(entry.compiled, recorder.intervals(), transport)
        try:
            loss = transport.end(losses, loss_parts, guards.mode, compared, guards.changed)
        except NotFinite as cause:  # on all ranks
            raise locate_nonfinite(entry.compiled, fill(lowered, steps[0]), transport, cause) from cause
        if loss is not None and "losses" in spec.wants:
            return result._replace(loss=loss[0].clone(), losses=loss[1:].clone()), timeline
        return result._replace(loss=loss), timeline


def execute_steps(compiled: CompiledStep, steps: Sequence[StepArguments], transport: Transport) -> Buffers:
    """Run the steps of a call, each from the buffers of the one before; return the buffers of the last.

    Raises:
        StepFailed: with the place of the call that raised; where an update finds numbers that are not finite,
            of the first of them.
    """
    buffers: Buffers | None = None
    for n, arguments in enumerate(steps):
        before = buffers
        try:
            buffers = execute(compiled, fill(compiled.lowered, arguments, before))
        except StepFailed as failed:
            which = f"; in step {n} of {len(steps)}, counted from 0" if len(steps) > 1 else ""
            if not isinstance(failed.failure.cause, NotFinite):
                failed.which = which
                raise
            cause = failed.failure.cause
            buffers = fill(compiled.lowered, arguments, before)
            raise locate_nonfinite(compiled, buffers, transport, cause, which) from cause
    assert buffers is not None
    return buffers


def execute(compiled: CompiledStep, buffers: Buffers) -> Buffers:
    """Run every call in turn.

    Args:
        compiled: what to run.
        buffers: the arguments, see :func:`fill`; hold the results afterwards.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    index, held = 0, this_thread.held
    try:
        for index, call in enumerate(compiled.calls):  # noqa: B007
            if held is not None and held.pending:
                act_on_interrupts()
            call(buffers)
    except BaseException as cause:
        place = compiled.places[index]
        # Without a name for the failure: its cause keeps this frame, and so the buffers.
        raise StepFailed(
            Failure(place.rank, place.position, place.instruction, cause), compiled.lowered.context_of
        ) from cause
    return buffers


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
            " integers, or, to leave out the dropout of a model that was split, call model.eval()"
        )
    buffers = Buffers(
        dict(arguments.params), bare=arguments.params, state=dict(arguments.state), seed=arguments.seed,
        microbatch_offset=arguments.microbatch_offset, left_out=arguments.left_out, scale=arguments.scale,
        update=arguments.update,
    )  # fmt: skip
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
        weights = _weights_of(lowered, arguments, stage, leaf.dtype)
        buffers.weights[stage] = weights.unbind()
        if buffers.scale is not None:
            if leaf.dtype == torch.float16:
                raise ValueError(
                    f"the loss of stage {model_stage} is float16, in which a scaled loss overflows; compute"
                    " it in float32, as loss_fn(y.float(), target) does, or leave out the scale"
                )
            weights = weights * buffers.scale.to(weights.device, weights.dtype)
        each = weights.to(leaf.dtype).unbind()
        cotangents = ((each[m].expand(leaf.shape),) for m in microbatches)
        buffers.cotangents.update(zip(((stage, m) for m in microbatches), cotangents, strict=True))
    if stage == chain.stages[0]:
        buffers.values.update((Tag("F", BATCH, stage, m), tuple(arguments.inputs[m])) for m in microbatches)


def _gradients_of(lowered: LoweredStep, buffers: Buffers, model_stage: int) -> Gradients:
    """Make the sum of the gradients of a stage of the model, in memory of the update if it has some."""
    spec = lowered.spec
    gradients = Stack(lowered.schedule.microbatches) if spec.per_microbatch else Sum(spec.sum_dtype)
    if buffers.update is None:
        return gradients
    leaves = enumerate(lowered.form.params[model_stage].leaves)
    forms = ((n, gradients.signature(leaf)) for n, leaf in leaves if leaf.grad)
    return buffers.update.accumulator(model_stage, forms) or gradients


def _weights_of(
    lowered: LoweredStep, arguments: StepArguments, stage: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of all microbatches, where a stage computes and in the dtype in which losses are
    added up.

    Args:
        dtype: in which the stage makes its losses.
    """
    weights, form = arguments.loss_weights, lowered.losses[stage].leaf
    device = lowered.form.devices[lowered.schedule.model_stages[stage]]
    if weights is None:
        m = lowered.schedule.microbatches
        return torch.full((m,), 1 / m, dtype=form.dtype, device=device)
    wide = upload(weights.to(form.dtype), device)
    rows = values(weights)  # of all rows, under a transform
    if rows.device.type == "cpu":
        _require_representable(tuple(rows.flatten().tolist()), dtype)
    else:  # where nothing may be read, they make no number
        wide = torch.where((weights.to(device) != 0) & (wide.to(dtype) == 0), torch.nan, wide)
    return wide


@lru_cache(maxsize=64)
def _require_representable(weights: tuple[float, ...], dtype: torch.dtype) -> None:
    wide = torch.tensor(weights, dtype=torch.float64, device="cpu")
    narrow = wide.to(dtype)
    if any((((wide != 0) & (narrow == 0)) | (wide.isfinite() & ~narrow.isfinite())).tolist()):
        raise ValueError(
            f"loss_weights: got {list(weights)}, of which some become 0 or infinite in {dtype}, the dtype of"
            " the loss; compute the loss in float32"
        )


class Stack:
    """Keeps the gradients of all microbatches beside each other, in their order.

    Equivalent to: ``torch.stack([g0, g1, ...])``, zeros for microbatches that never came.

    Args:
        microbatches: length of the new leading axis.
    """

    def __init__(self, microbatches: int) -> None:
        self._rows: list[dict[int, torch.Tensor]] = [{} for _ in range(microbatches)]
        self._sums = Sum()

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int, fresh: bool = False) -> None:
        self._rows[microbatch].update(zip(numbers, gradients, strict=True))

    def totals(self) -> None:
        return None

    def put_back(self, gradients: Leaves) -> None:
        self._sums.put_back(gradients)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return leaf.stacked(len(self._rows))

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        if any(self._rows):
            self.put_back(
                tuple(
                    torch.stack([row[n] if n in row else torch.zeros_like(leaf) for row in self._rows])
                    for n, leaf in enumerate(like)
                )
            )
            self._rows = [{} for _ in self._rows]
        return self._sums.take(tuple(leaf.expand(len(self._rows), *leaf.shape) for leaf in like), owned)

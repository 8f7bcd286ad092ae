"""Lower stages, a loss and a schedule to the meaning of every instruction for given shapes; values only.

Stages are visited in the order of the data. Each is evaluated abstractly, once for every distinct input,
which gives the signature of every edge. Nothing is traced, nothing runs, and no message is sent but the
signatures that cross from process to process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Loss, Signature, Stage
from ppfunc.stage._torch import load_tracer
from ppfunc.stage.layout import Boundary
from ppfunc.stage.output import StageFunction, children, received_signature

from ..agreement.agreement import Exchange
from ..call.forms import StepForm
from ..execution.buffers import Key
from ..transport.protocols import LossPart
from .lowered import BATCH, Edge, LoweredStage, LoweredStep, StepSpec
from .refusals import (
    require_declared_frozen,
    require_honoured,
    require_layouts,
    require_loss,
    require_same_rows,
    require_wanted,
    warn_of_detached,
)
from .stage_programs import StageCall, StagePrograms


def lower(
    stages: Sequence[Stage | None],
    loss_fn: Loss | None,
    schedule: Schedule,
    form: StepForm,
    spec: StepSpec,
    programs: StagePrograms,
    *,
    ranks: Sequence[int] | None = None,
    exchange: Exchange | None = None,
    example: Callable[[int], Any] | None = None,
) -> LoweredStep:
    """Find the meaning of every instruction of the schedule for arguments of this form.

    Args:
        stages: one function per stage of the model, None for those that no rank of this process runs.
        loss_fn: ``loss(y, target) -> scalar``, None where no loss is wanted.
        schedule: proved, with communication placed.
        form: signatures of the arguments.
        spec: the results that the caller wants.
        programs: of the stages, kept from step to step.
        ranks: the ranks of this process; by default all.
        exchange: passes signatures to and from other processes; needed where ``ranks`` are not all.
        example: the parameters of a stage of the model as tensors, for what signatures do not tell.

    Raises:
        ValueError: an instruction, or an output of a stage, that nothing will honour.
        StageError: a stage cannot be evaluated.
    """
    load_tracer()
    require_honoured(schedule, spec)
    require_same_rows(form, schedule.microbatches)
    local = set(range(schedule.ranks) if ranks is None else ranks)
    home, model_stages = schedule.placement, schedule.model_stages
    edges: dict[tuple[int, int], Sequence[Signature]] = {}
    lowered: dict[Key, LoweredStage] = {}
    for stage, microbatches in stages_in_order(schedule):
        if home[stage] not in local:
            continue
        sources, sinks = sources_of(schedule, stage), sinks_of(schedule, stage)
        for source in sources:
            if source == BATCH:
                edges[source, stage] = _inputs(form, spec, microbatches)
            elif home[source] not in local:
                assert exchange is not None  # of a process that does not run all ranks
                edges[source, stage] = exchange.recv((source, stage))
        function = _function(stages[model_stages[stage]], loss_fn, schedule, form, spec, stage)
        params = form.params[model_stages[stage]] if example is None else example(model_stages[stage])
        # Microbatches of one form share it.
        lower_one = cache(partial(_lower_stage, schedule, form, spec, programs, stage, function, params))
        for n, m in enumerate(microbatches):
            received = tuple(Edge(source, edges[source, stage][n]) for source in sources)
            lowered[stage, m] = lower_one(received, _extras(form, model_stages[stage], m, function))
        for n, sink in enumerate(sinks):
            edges[stage, sink] = [lowered[stage, m].sinks[n].signature for m in microbatches]
            if home[sink] not in local:
                assert exchange is not None
                exchange.send((stage, sink), edges[stage, sink])
    drawing = tuple(sorted({low.model_stage for low in lowered.values() if low.outline.random}))
    return LoweredStep(
        schedule, spec, form, tuple(sorted(local)), lowered, _losses(schedule, spec, lowered), drawing
    )


def stages_in_order(schedule: Schedule) -> Iterator[tuple[int, range]]:
    """Yield every stage with its microbatches, each after the stages that send to it.

    The order is the same on every rank.
    """
    for chain in schedule.chains:
        for stage in chain.stages:
            yield stage, chain.microbatches


def sources_of(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """List where the input of a stage comes from: the stage before it or the batch, then skip connections."""
    before = schedule.predecessor(stage)
    skips = sorted((a for a, b in schedule.skips if b == stage), key=schedule.model_stages.__getitem__)
    return (BATCH if before is None else before, *skips)


def sinks_of(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """List where the output of a stage goes: the stage after it, if any, then skip connections."""
    after = schedule.successor(stage)
    skips = sorted((b for a, b in schedule.skips if a == stage), key=schedule.model_stages.__getitem__)
    return (*(() if after is None else (after,)), *skips)


def _function(
    fn: Stage | None, loss_fn: Loss | None, schedule: Schedule, form: StepForm, spec: StepSpec, stage: int
) -> StageFunction:
    """Put together a stage at its place in the chain: with loss, outputs, skips and frozen leaves."""
    last, k = schedule.successor(stage) is None, schedule.model_stages[stage]
    if fn is None:
        raise ValueError(f"stages[{k}]: got None, but this process runs that stage; give its function")
    skips = sinks_of(schedule, stage)[int(not last) :]
    return StageFunction(
        fn,
        loss_fn if last else None,
        last,
        last and "outputs" in spec.wants,
        tuple(schedule.model_stages[sink] for sink in skips),
        spec.frozen_in(k, form.params[k]),
    )


def _extras(form: StepForm, model_stage: int, m: int, function: StageFunction) -> tuple[Signature, ...]:
    """Return the signatures of the arguments after the input: the target, the extras, the state."""
    target = (form.targets[m],) if function.loss_fn is not None and form.targets is not None else ()
    extras = (form.extras[model_stage][m],) if model_stage in form.extras else ()
    state = (form.state[model_stage],) if model_stage in form.state else ()
    return (*target, *extras, *state)


def _lower_stage(
    schedule: Schedule,
    form: StepForm,
    spec: StepSpec,
    programs: StagePrograms,
    stage: int,
    function: StageFunction,
    params: Any,
    received: tuple[Edge, ...],
    extras: tuple[Signature, ...],
) -> LoweredStage:
    """Lower a stage for these parts of its input."""
    model_stage = schedule.model_stages[stage]
    boundary = Boundary.of(function.fn)
    givers = [BATCH if edge.stage == BATCH else schedule.model_stages[edge.stage] for edge in received]
    signatures = [edge.signature for edge in received]
    require_layouts(model_stage, boundary, form.params[model_stage], zip(givers, signatures, strict=True))
    example = (params, received_signature(givers, signatures), *extras)
    call = StageCall(function, example, f"stage {model_stage}", form.devices[model_stage])
    outline = programs.outline(call)
    activation, skips, loss = children(outline.y)
    outputs, metrics, aux, state = children(outline.aux)
    activation, outputs = (
        tree.laid_out(boundary.mesh, boundary.outputs, f"the output of stage {model_stage}")
        for tree in (activation, outputs)
    )
    sent = (*(() if schedule.successor(stage) is None else (activation,)), *children(skips))
    sinks = tuple(map(Edge, sinks_of(schedule, stage), sent))
    low = LoweredStage(
        model_stage, call, form.params[model_stage], outline, received, sinks, loss if loss.leaves else None,
        outputs, metrics, aux, state,
    )  # fmt: skip
    if not schedule.forward_only:  # which updates nothing
        require_declared_frozen(low, spec)
    require_loss(low, loss, spec)
    require_wanted(low, form, spec, bool(schedule.replicas))
    if not schedule.forward_only and (spec.updates is not None or "grads" in spec.wants):
        warn_of_detached(low)
    return low


def _inputs(form: StepForm, spec: StepSpec, microbatches: range) -> list[Signature]:
    """Return signatures of the batch for the microbatches of a chain."""
    assert form.inputs is not None  # of a process that runs the first stage
    signatures = form.inputs[microbatches.start : microbatches.stop]
    if "input_grads" not in spec.wants:
        return list(signatures)
    wanted = [s.with_grad() for s in signatures]
    if not any(leaf.grad for s in wanted for leaf in s.leaves):
        raise ValueError(
            f"inputs: got {signatures[0]} and argnums=1, expected a floating leaf: integers have no gradient;"
            " differentiate in the parameters, argnums=0, or give embeddings as inputs"
        )
    return wanted


def _losses(schedule: Schedule, spec: StepSpec, lowered: Mapping[Key, LoweredStage]) -> dict[int, LossPart]:
    """Describe the losses of every stage that has some: those of its microbatches beside each other."""
    parts: dict[int, LossPart] = {}
    for stage, microbatches in stages_in_order(schedule):
        of_each = {
            m: low.loss.leaves[0]
            for m in microbatches
            if (low := lowered.get((stage, m))) and low.loss is not None
        }
        losses = list(of_each.values())
        if len(set(losses)) > 1:
            raise ValueError(
                f"stage {schedule.model_stages[stage]} gives losses of different forms for different"
                f" microbatches, {' and '.join(map(str, dict.fromkeys(losses)))}; expected one dtype: cast"
                " the loss"
            )
        if losses:
            wide = torch.promote_types(
                losses[0].dtype, torch.float32
            )  # float16 and bfloat16 are too narrow for a sum
            shape, each = (len(losses), *losses[0].shape), "losses" in spec.wants
            leaf = LeafSignature((2, *shape) if each else shape, wide, False)
            parts[stage] = LossPart(schedule.placement[stage], leaf, tuple(of_each) if each else ())
    return parts

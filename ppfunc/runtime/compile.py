"""Compile a lowered step: the programs of its stages and one flat list of calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import Engine, Signature, StageProgram

from .bind import bind, share_input_gradients
from .calls import CompiledStage, Edge, Place
from .gradients import Gradients, Stack, Sum
from .lower import Key, LoweredStage, LoweredStep
from .stage_programs import program_of
from .transport import Call, Transport


class CompiledStep(NamedTuple):
    """A step that is ready to run; it holds no memory of a call.

    Args:
        lowered: where it comes from.
        programs: of every stage of this process, by (stage of the schedule, microbatch).
        calls: what a step runs, in order.
        places: where in the schedule each call comes from.
    """

    lowered: LoweredStep
    programs: Mapping[Key, StageProgram]
    calls: tuple[Call, ...]
    places: tuple[Place, ...]

    def __repr__(self) -> str:
        return f"<compiled {self.lowered.spec.name}, {self.lowered.schedule!r}, {len(self.calls)} calls>"


def compile_step(lowered: LoweredStep, engine: Engine, transport: Transport) -> CompiledStep:
    """Build the program of every stage, and bind every instruction.

    Args:
        lowered: what every instruction means.
        engine: how a stage is differentiated.
        transport: carries the messages; its connections are open.

    Raises:
        StageError: the engine cannot serve a stage.
    """
    schedule, spec = lowered.schedule, lowered.spec
    programs = build_programs(lowered, engine)
    made: dict[int, CompiledStage] = {}
    for (stage, m), low in lowered.stages.items():
        if id(low) not in made:
            made[id(low)] = _compiled(schedule, stage, low, programs[stage, m], lowered.form.params)
    stages = {key: made[id(low)] for key, low in lowered.stages.items()}
    bound = bind(schedule, stages, transport, lowered.ranks, spec.overlapped, new_gradients(lowered).signature)
    if "input_grads" in spec.wants:
        inputs = [s.with_grad() for s in lowered.form.inputs or ()]
        bound += share_input_gradients(schedule, inputs, lowered.form.devices.get(0, torch.device("cpu")), transport, lowered.ranks)
    bare = {id(low): low._replace(example=tuple(map(Signature.of, low.example))) for low in lowered.stages.values()}
    lowered = lowered._replace(stages={key: bare[id(low)] for key, low in lowered.stages.items()})  # keeps no parameters alive
    return CompiledStep(lowered, programs, tuple(call for call, _ in bound), tuple(place for _, place in bound))


def build_programs(lowered: LoweredStep, engine: Engine) -> dict[Key, StageProgram]:
    """The program of every stage, built once for equal stages and forms."""
    known: dict[Any, StageProgram] = {}
    built: dict[int, StageProgram] = {}
    for (stage, _), low in lowered.stages.items():
        if id(low) in built:
            continue
        key = low.function.key(low.example, low.device)
        if key not in known:
            name = f"stage {lowered.schedule.model_stages[stage]}"
            known[key] = program_of(low.function, low.example, low.outline, engine, name, low.device)
        built[id(low)] = known[key]
    return {key: built[id(low)] for key, low in lowered.stages.items()}


def new_gradients(lowered: LoweredStep) -> Gradients:
    """Make the sum of the gradients of one stage."""
    return Stack(lowered.schedule.microbatches) if lowered.spec.per_microbatch else Sum()


def _compiled(schedule: Schedule, stage: int, low: LoweredStage, program: StageProgram, params: Mapping[int, Signature]) -> CompiledStage:
    model = schedule.model_stages[stage]
    sources = tuple(Edge(n, s.leaves) for n, s in zip(low.sources, low.received, strict=True))
    sinks = tuple(Edge(n, s.leaves) for n, s in zip(low.sinks, low.sent, strict=True))
    kept = (low.loss is not None) + len(low.outputs.leaves) + len(low.metrics.leaves)
    weighted = low.loss is not None and low.loss.leaves[0].grad and not schedule.forward_only
    return CompiledStage(
        program.flat, model, low.device, params[model].leaves, sources, sinks, weighted, kept, len(low.state.leaves), low.outline.random
    )

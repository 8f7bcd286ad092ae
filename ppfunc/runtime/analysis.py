"""Lowered steps for people: their text, their memory and their cost, from shapes alone."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ppfunc.schedule import Instruction, Op, Schedule, parts_of
from ppfunc.schedule.instruction import COMMUNICATION
from ppfunc.stage import Engine, StageProgram
from ppfunc.stage.abstract import without_values
from ppfunc.stage.example import Example
from ppfunc.stage.output import children
from ppfunc.stage.tracing.emit import emit

from .buffers import Key
from .compile import CompiledStep, build_programs, compile_step, new_gradients
from .lowered import BATCH, LoweredStage, LoweredStep
from .transport import Transport


class Memory(NamedTuple):
    """Bytes that one rank holds in a step, by kind.

    Args:
        params: the parameters of its stages.
        gradients: their sums.
        batch: inputs, targets and extras that this rank reads.
        residuals: what forwards keep for their backwards, at the peak of live microbatches; None where an
            engine cannot know it.
        messages: the largest message that it sends or receives.
        outputs: what is kept for the caller: losses, outputs, metrics, the last state.
    """

    params: int
    gradients: int
    batch: int
    residuals: int | None
    messages: int
    outputs: int


class Cost(NamedTuple):
    """Floating point operations of one rank in a step, by instruction."""

    forward: int
    backward: int
    backward_input: int
    backward_weight: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Lowered:
    """A step that was lowered for some arguments, and has not run.

    Args:
        step: the value that :func:`ppfunc.runtime.lower` returns.
        engine, transport: with which it is compiled.
        runs: makes the function that runs the step of it, compiled.
    """

    def __init__(self, step: LoweredStep, engine: Engine, transport: Transport, runs: Callable[[CompiledStep], Callable[..., Any]]) -> None:
        self.step, self._engine, self._transport, self._runs = step, engine, transport, runs

    def __repr__(self) -> str:
        return f"<lowered {self.step.spec.name}, {self.step.schedule!r}>"

    def compile(self) -> CompiledStep:
        """Build the stage programs and the list of calls. The result is called as the step function, with arguments of this form.

        Raises:
            StageError: the engine cannot serve a stage.
        """
        compiled = compile_step(self.step, self._engine, self._transport)
        return compiled._replace(run=self._runs(compiled))

    def as_text(self) -> str:
        """The program of every rank of this process, its stages, and its messages with their bytes."""
        return "\n".join(_text(self.step))

    def memory_analysis(self) -> dict[int, Memory]:
        """Bytes per rank and kind, from abstract values: stages are traced, nothing runs."""
        programs = build_programs(self.step, self._engine)
        return {rank: _memory(self.step, programs, rank) for rank in self.step.ranks}

    def cost_analysis(self) -> dict[int, Cost]:
        """Floating point operations per rank, as torch's flop counter counts them; stages are traced, nothing runs."""
        programs = build_programs(self.step, self._engine)
        counted: dict[int, tuple[int, int, int, int]] = {}
        for key, program in programs.items():
            if id(program) not in counted:
                counted[id(program)] = _flops(program, self.step.stages[key], training=not self.step.schedule.forward_only)
        flops = {key: counted[id(program)] for key, program in programs.items()}
        return {rank: _cost(self.step.schedule, flops, rank) for rank in self.step.ranks}


def _text(step: LoweredStep) -> Iterator[str]:
    schedule = step.schedule
    yield f"{step.spec.name} under {schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches"
    for rank in step.ranks:
        yield f"rank {rank}"
        for stage in schedule.stages_of(rank):
            yield from _stage_text(step, stage)
        yield "  program"
        for position, instructions in enumerate(schedule.programs[rank]):
            yield f"    {position}: {' '.join(_instruction_text(step, i) for i in instructions)}"


def _stage_text(step: LoweredStep, stage: int) -> Iterator[str]:
    model = step.schedule.model_stages[stage]
    named = f"stage {stage}" if stage == model else f"stage {stage}, replica of stage {model}"
    yield f"  {named} on {step.form.devices[model]}: params {step.form.params[model]}"
    distinct = dict.fromkeys(id(low) for (s, _), low in step.stages.items() if s == stage)
    by_id = {id(low): low for low in step.stages.values()}
    for found in distinct:
        low, given = by_id[found], [m for (s, m), other in step.stages.items() if s == stage and id(other) == found]
        received, sent = (", ".join(str(edge.signature) for edge in edges) for edges in (low.sources, low.sinks))
        yield f"    microbatches {_ranges(given)}: x {received} -> {sent or 'nothing'}"
        for name in ("loss", "outputs", "metrics", "state"):
            signature = getattr(low, name)
            if signature is not None and signature.leaves:
                yield f"      {name} {signature}"


def _instruction_text(step: LoweredStep, instruction: Instruction) -> str:
    if instruction.op not in COMMUNICATION:
        return str(instruction)
    return f"{instruction}({_message_bytes(step, instruction)} B)"


def _message_bytes(step: LoweredStep, i: Instruction) -> int:
    edge = step.edge_of(i)
    leaves = edge.leaves if i.op in (Op.SEND_F, Op.RECV_F) else edge.carrying
    return sum(leaf.nbytes for leaf in leaves)


def _ranges(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _memory(step: LoweredStep, programs: dict[Key, StageProgram], rank: int) -> Memory:
    schedule, form = step.schedule, step.form
    stages = schedule.stages_of(rank)
    models = {schedule.model_stages[s] for s in stages}
    params = sum(form.params[model].nbytes for model in models)
    summed = [leaf for s in stages for leaf in form.params[schedule.model_stages[s]].leaves if leaf.grad and not schedule.forward_only]
    gradients = sum(new_gradients(step).signature(leaf).nbytes for leaf in summed)
    own = [(key, low) for key, low in step.stages.items() if key[0] in stages]
    batch = sum(low.sources[0].signature.nbytes for _, low in own if low.sources[0].stage == BATCH)
    batch += sum(form.targets[m].nbytes for (_, m), low in own if not low.sinks) if form.targets else 0
    batch += sum(form.extras[model][m].nbytes for (s, m), _ in own if (model := schedule.model_stages[s]) in form.extras)
    messages = [_message_bytes(step, i) for program in (schedule.programs[rank],) for s in program for i in s if i.op in COMMUNICATION]
    kept = sum(low.outputs.nbytes + low.metrics.nbytes + (low.loss.nbytes if low.loss else 0) for _, low in own)
    kept += sum(form.state[model].nbytes for model in models if model in form.state)
    return Memory(params, gradients, batch, _residuals(schedule, programs, rank), max(messages, default=0), kept)


def _residuals(schedule: Schedule, programs: dict[Key, StageProgram], rank: int) -> int | None:
    """The most bytes of residuals alive at once: from each forward to the end of its backward."""
    now = most = 0
    for step in schedule.programs[rank]:
        for part in (p for i in step for p in parts_of(i)):
            if part.op not in (Op.F, Op.B, Op.W) or part.microbatch is None or schedule.forward_only:
                continue
            size = programs[part.stage, part.microbatch].residual_bytes
            if size is None:
                return None
            now += size if part.op is Op.F else -size
            most = max(most, now)
    return most


def _flops(program: StageProgram, low: LoweredStage, *, training: bool) -> tuple[int, int, int, int]:
    """Operations of the forward, the backward, the input and the weight gradient of one microbatch."""
    y = children(low.outline.y)  # what is differentiated: the activation, the skip connections, the loss
    gy = [leaf for part in y for leaf in part.leaves if leaf.grad]
    with torch.no_grad(), without_values():
        seen = Example.of(low.example, low.device)
        (_, saved), forward = _counted(program.flat.forward, *seen.make())
        if not training:
            return forward, 0, 0, 0
        cotangents = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=seen.device) for leaf in gy)
        _, backward = _counted(program.flat.backward, saved, cotangents)
        (_, rest), backward_input = _counted(program.flat.backward_input, _counted(program.flat.forward, *seen.make())[0][1], cotangents)
        _, backward_weight = _counted(program.flat.backward_weight, rest)
    return forward, backward, backward_input, backward_weight


def _counted(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """The result of a function of a program, as traced where it is compiled, and its operations."""
    recipe = getattr(function, "recipe", None)
    if recipe is not None and recipe.compile:
        function = emit(recipe._replace(compile=False))
    with FlopCounterMode(display=False) as counter:
        result = function(*args)
    return result, counter.get_total_flops()


def _cost(schedule: Schedule, flops: dict[Key, tuple[int, int, int, int]], rank: int) -> Cost:
    totals = {Op.F: 0, Op.B: 0, Op.I: 0, Op.W: 0}
    for step in schedule.programs[rank]:
        for part in (p for i in step for p in parts_of(i)):
            if part.op in totals and part.microbatch is not None:
                totals[part.op] += flops[part.stage, part.microbatch][list(totals).index(part.op)]
    return Cost(*totals.values())

"""Show lowered steps to people: their text, memory, cost and results, from shapes alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ppfunc._checks import not_copied
from ppfunc.schedule import Costs, Instruction, Op, Schedule, parts_of
from ppfunc.schedule.costs import OF_A_STAGE, require_costs
from ppfunc.schedule.dataflow import Dataflow
from ppfunc.schedule.instruction import COMMUNICATION
from ppfunc.stage.abstract.evaluation import without_values
from ppfunc.stage.operators import flop_counter
from ppfunc.stage.program import Example, StageProgram
from ppfunc.stage.tree import tree_map

from ..lowering.lower import BATCH, CALLER, NOWHERE, LoweredStage, LoweredStep, StepResult
from ..lowering.stage_programs import StagePrograms
from ..ports.protocols import LossPart, Transport, form_of_sum
from ..running.compile import CompiledStep, build_programs, compile_step
from ..running.execute import collect, fill
from ..values.arguments import StepArguments
from ..values.buffers import Key, Tag
from .ledger import Memories
from .memory import Completed, cotangents_of, empty, memory_of, residual_bytes


class Cost(NamedTuple):
    """Hold the floating point operations of one rank in a step, by kind of instruction."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Return the floating point operations of all kinds together."""
        return sum(self)


class Shown:
    """Shows the step that a step function runs for some arguments.

    Args:
        lowered: the step.
        programs: function that builds the programs of its stages.

    Its ``schedule`` has all instructions of the step, such as for :func:`ppfunc.schedule.to_svg`.
    """

    def __init__(self, lowered: LoweredStep, programs: Callable[[], Mapping[Key, StageProgram]]) -> None:
        self._lowered, self.programs, self.schedule = lowered, programs, lowered.schedule

    __reduce__ = not_copied("a lowered or compiled step", "keep its as_text(), or make it in each process")

    def __repr__(self) -> str:
        return repr(self._lowered)

    def as_text(self) -> str:
        """Return the program of every rank of this process, its stages, and its messages with their bytes."""
        return "\n".join(_text(self._lowered))

    def memory_analysis(self) -> Memories:
        """Return the bytes of every rank over the step, by running it on tensors without values.

        Printed, they are a line for each rank; one of them is its tables.

        Programs that are compiled are counted as they are traced. A message counts at its sender until that
        has waited for it, at its receiver from when it is expected. Through memory that two processes map
        (see :class:`P2P`) it is held for less time; the copy there does not count.
        """
        step, programs = self._lowered, self.programs()
        return Memories((rank, memory_of(step, programs, rank, self._completed)) for rank in step.ranks)

    def _completed(self, step: LoweredStep, arguments: StepArguments) -> Completed:
        return arguments, {}

    def costs(self, times: Costs | None = None) -> Costs:
        """Return the bytes of the stages of this process as costs of schedules, such as for ``plan``.

        They are the bytes of the first microbatch, or of each slice of the first sequence: what its forward
        keeps, the share of it that its input gradient leaves for the weight gradient, its message; and of the
        parameters with their gradients. A slice keeps the carry that it hands on, not the carry before.

        Args:
            times: the costs that are completed, such as those that :func:`ppfunc.measure` returns. Without
                costs of each slice, every slice takes these times.
        """
        return completed(require_costs(times), self._lowered, self.programs())

    def cost_analysis(self, counter: Callable[[], Any] | None = None) -> dict[int, Cost]:
        """Return floating point operations per rank, by the formulas of torch's flop counter; nothing runs.

        Args:
            counter: makes a mode that counts something else, and returns it by ``get_total_flops()``.
        """
        step, programs = self._lowered, self.programs()
        by, training = counter or flop_counter, not step.schedule.forward_only
        keys = {id(program): key for key, program in programs.items()}  # one of each program
        counted = {
            n: _flops(programs[key], step.stages[key], by, training=training) for n, key in keys.items()
        }
        flops = {key: counted[id(program)] for key, program in programs.items()}
        return {rank: _cost(step.schedule, flops, rank) for rank in step.ranks}


class LoweredFunction(Shown):
    """Shows a step function lowered for some arguments, which has not run; ``step.lower(...)`` returns it.

    Args:
        step: the value that :func:`ppfunc.runtime.lowering.lower` returns.
        programs, transport: programs of stages and the transport with which the step is compiled.
        runner: maker of the function that runs a compiled step.
    """

    def __init__(
        self,
        step: LoweredStep,
        programs: StagePrograms,
        transport: Transport,
        runner: Callable[[CompiledStep], Callable[..., Any]],
    ) -> None:
        super().__init__(step, partial(build_programs, step, programs))
        self.step, self._runner = step, runner
        self._compile = partial(compile_step, step, programs, transport)

    def compile(self) -> "CompiledFunction":
        """Build the stage programs and the list of calls.

        Raises:
            StageError: the engine cannot serve a stage.
        """
        compiled = self._compile()
        return CompiledFunction(compiled, self._runner(compiled))


class CompiledFunction(Shown):
    """Runs a step that was compiled ahead of time: called as the step function, with arguments of one form.

    Where ranks are processes, every one calls what it has compiled. Raises, beside what the step function
    does:

    * ValueError: the arguments have another form than those for which the step was lowered.
    * RuntimeError: a step has failed since: what the ranks agreed on has to be agreed on again.

    Args:
        step: the compiled step: its calls, and the instructions they come from.
        run: function that runs the step.
    """

    def __init__(self, step: CompiledStep, run: Callable[..., Any]) -> None:
        super().__init__(step.lowered, lambda: step.programs)
        self.step, self.run = step, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.step)


def _text(step: LoweredStep) -> Iterator[str]:
    schedule, flow = step.schedule, Dataflow(step.schedule)
    yield (
        f"{step.spec.name} under {schedule.name}: {schedule.ranks} ranks, {schedule.microbatches}"
        " microbatches"
    )
    for rank in step.ranks:
        yield f"rank {rank}"
        for stage in schedule.stages_of(rank):
            yield from _stage_text(step, stage)
        yield "  program"
        for position, instructions in enumerate(schedule.programs[rank]):
            yield f"    {position}: {' '.join(_instruction_text(step, flow, i) for i in instructions)}"


def _stage_text(step: LoweredStep, stage: int) -> Iterator[str]:
    model_stage = step.schedule.model_stages[stage]
    name = f"stage {stage}" if stage == model_stage else f"stage {stage}, replica of stage {model_stage}"
    yield f"  {name} on {step.form.devices[model_stage]}: params {step.form.params[model_stage]}"
    # By identity of what is lowered once for microbatches of one form.
    microbatches: dict[int, list[int]] = {}
    for s, m in step.stages:
        if s == stage:
            microbatches.setdefault(id(step.stages[s, m]), []).append(m)
    for numbers in microbatches.values():
        low = step.stages[stage, numbers[0]]
        received, sent = (
            ", ".join(str(edge.signature) for edge in edges) for edges in (low.sources, low.sinks)
        )
        yield f"    microbatches {_ranges(numbers)}: x {received} -> {sent or 'nothing'}"
        for part in ("loss", "outputs", "metrics", "aux", "state"):
            signature = getattr(low, part)
            if signature is not None and signature.leaves:
                yield f"      {part} {signature}"


def _instruction_text(step: LoweredStep, flow: Dataflow, instruction: Instruction) -> str:
    if instruction.op not in COMMUNICATION:
        return str(instruction)
    sent = (leaf for part in step.message_parts(instruction, flow) for leaf in part.leaves)
    return f"{instruction}({sum(leaf.nbytes for leaf in sent)} B)"


def _ranges(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def completed(times: Costs, step: LoweredStep, programs: Mapping[Key, StageProgram]) -> Costs:
    """Return costs with the bytes of stages, and of each slice: with programs, of residuals too."""
    times.fitting(slices=(k := step.schedule.slices))
    if not k:
        return replace(times, **costs_of(step, programs))
    each = [costs_of(step, programs, n) for n in range(k)]
    parameters = [sizes.pop("parameters") for sizes in each]  # as many for every slice
    whole = replace(times, parameters=parameters[0])
    if programs:  # of all that a sequence keeps
        kept = [(sizes["activation"], sizes["weight_share"]) for sizes in each]
        parts = {s: sum(of[s] * share[s] for of, share in kept) for s in kept[0][0]}
        shares = {s: part / (sum(of[s] for of, _ in kept) or 1) for s, part in parts.items()}
        whole = replace(whole, weight_share=shares)
    alike = replace(times, **{name: getattr(Costs, name) for name in OF_A_STAGE}, slices=())
    return whole.in_slices([replace(times.slices[n] if times.slices else alike, **each[n]) for n in range(k)])


def costs_of(step: LoweredStep, programs: Mapping[Key, StageProgram], of_slice: int = 0) -> dict[str, Any]:
    """Return bytes, by cost and stage of the model: messages and parameters; with programs also residuals and
    checkpoints.

    Args:
        of_slice: number of the slice of a sequence whose bytes they are.
    """
    k, every = step.schedule.per_sequence, sorted(step.stages.items(), reverse=True)
    lows = {low.model_stage: (key, low) for key, low in every if key[1] % k == of_slice}
    sizes: dict[str, dict[int, float]] = {
        "bytes": {
            s: sum(e.signature.nbytes for e in low.sinks[:1] if e.stage not in (key[0], CALLER, NOWHERE))
            for s, (key, low) in sorted(lows.items())
        },
        "parameters": {s: 2 * low.params.nbytes for s, (_, low) in sorted(lows.items())},
    }
    if programs:
        inputs = {s: sum(e.signature.nbytes for e in low.sources) for s, (_, low) in sorted(lows.items())}
        sizes["checkpoint"] = {s: size + lows[s][1].state.nbytes for s, size in inputs.items()}
        residuals = {s: residual_bytes(programs[key], low) for s, (key, low) in sorted(lows.items())}
        sizes["activation"] = {s: most for s, (most, _) in residuals.items()}
        sizes["weight_share"] = {
            s: min(1.0, rest / most) if most else 0.0 for s, (most, rest) in residuals.items()
        }
    return sizes


def _flops(
    program: StageProgram, low: LoweredStage, counter: Callable[[], Any], *, training: bool
) -> Sequence[float]:
    """Count the operations of forward, backward, input and weight gradient of one microbatch."""
    flat, counted = program.flat, partial(_counted, counter)
    with torch.no_grad(), without_values():
        example = Example.of(low.call.example, low.device)
        (_, saved), forward = counted(flat.forward, *example.make())
        if not training:
            return forward, 0, 0, 0
        cotangents = cotangents_of(low)
        _, backward = counted(flat.backward, saved, cotangents)
        (_, saved), _ = counted(flat.forward, *example.make())
        (_, rest), backward_input = counted(flat.backward_input, saved, cotangents)
        _, backward_weight = counted(flat.backward_weight, rest)
    return forward, backward, backward_input, backward_weight


def _counted(counter: Callable[[], Any], function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Return the result of a function of a program, as traced where it is compiled, and its operations."""
    recipe = getattr(function, "recipe", None)
    if recipe is not None and recipe.compile:
        from ppfunc.stage.engines.tracing.emit import TracedFunction

        function = TracedFunction(recipe._replace(compile=False))
    with counter() as counting:
        result = function(*args)
    return result, counting.get_total_flops()


def _cost(schedule: Schedule, flops: Mapping[Key, Sequence[float]], rank: int) -> Cost:
    totals: dict[Op, float] = {Op.F: 0, Op.B: 0, Op.I: 0, Op.W: 0}
    for instruction in schedule.instructions(rank):
        for part in parts_of(instruction):
            op = Op.F if part.op is Op.RECOMPUTE else part.op
            if op in totals and part.microbatch is not None:
                totals[op] += flops[part.stage, part.microbatch][list(totals).index(op)]
    return Cost(*totals.values())


def shapes_of(lowered: LoweredStep, arguments: StepArguments, parts: Mapping[int, LossPart]) -> StepResult:
    """Return the results of a step, all of whose tensors are on the device meta.

    Args:
        parts: the form of the losses of all ranks.
    """
    arguments = replace(
        arguments, params=tree_map(_bare, arguments.params), state=tree_map(_bare, arguments.state),
        inputs=tree_map(_bare, arguments.inputs), seed=(0, 0),
    )  # fmt: skip
    buffers, schedule, meta = fill(lowered, arguments), lowered.schedule, torch.device("meta")
    for key, low in lowered.stages.items():
        loss = () if low.loss is None else low.loss.leaves
        kept = (*loss, *low.outputs.leaves, *low.metrics.leaves, *low.aux.leaves)
        buffers.kept[key] = empty(kept, meta)
        gradients = [("B", edge, edge.carrying) for edge in low.sources if edge.stage in (BATCH, CALLER)]
        values = [("F", edge, edge.leaves) for edge in low.sinks if edge.stage == CALLER]
        for direction, edge, leaves in (*gradients, *values):
            buffers.values[Tag(direction, key[0], edge.stage, key[1])] = empty(leaves, meta)
    for stage, sums in buffers.gradients.items():
        numbers, leaves = lowered.differentiated(stage), arguments.params[schedule.model_stages[stage]]
        for m in range(schedule.microbatches):
            sums.add(tuple(leaves[n] for n in numbers), numbers, m)
    result = collect(lowered, [arguments], buffers)
    if not parts:
        return result
    shape, dtype = form_of_sum(parts)
    total = torch.empty(shape, dtype=dtype, device="meta")
    if "losses" in lowered.spec.wants:
        return result._replace(loss=total[0], losses=total[1:])
    return result._replace(loss=total)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")

"""Show lowered steps to people: their text, memory, cost and results, from shapes alone.

For the bytes that each rank holds, its calls run in order on tensors without values. They are those of a step
that runs, so that values live as long. Traced programs are written again with operators that only make their
results; those of other engines run as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from ppfunc._checks import naming_arguments, naming_attributes, not_copied
from ppfunc.schedule import Costs, Instruction, Op, Schedule, parts_of
from ppfunc.schedule.costs import OF_A_STAGE, require_costs
from ppfunc.schedule.dataflow import Dataflow
from ppfunc.schedule.instruction import COMMUNICATION
from ppfunc.stage import LeafSignature, Signature, StageError, StageProgram
from ppfunc.stage.abstract.evaluation import DATA_DEPENDENT, data_dependence, without_values
from ppfunc.stage.abstract.output import children
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.engines.tracing.cut import Addition, calls_of, source
from ppfunc.stage.engines.tracing.emit import OperatorCall, TracedFunction, write
from ppfunc.stage.engines.tracing.graph import is_of_forward
from ppfunc.stage.layout import local
from ppfunc.stage.operators import flop_counter
from ppfunc.stage.program import Example, FlatProgram
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from ..lowering.lower import BATCH, CALLER, NOWHERE, LoweredStage, LoweredStep, StepResult, places_of
from ..lowering.stage_programs import StagePrograms
from ..ports.protocols import (
    Among,
    Axes,
    Call,
    Collective,
    CollectiveOnPaper,
    InProcess,
    LossPart,
    ShardWhat,
    Transfer,
    Transport,
    form_of_sum,
    grid_of,
    joining,
    require_shardable,
)
from ..running.calls import losses_of
from ..running.compile import CompiledStep, bind, build_programs, compile_step
from ..running.execute import collect, fill
from ..values.arguments import LaidOut, StepArguments
from ..values.buffers import Buffers, Key, Leaves, Tag
from .ledger import Ledger, Memory
from .memories import Memories

Completed = tuple[StepArguments, Mapping[str, Any]]
"""The arguments of a rank, and trees of more that it holds, by kind."""


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


@naming_attributes
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

    @naming_arguments
    def memory_analysis(self) -> Memories:
        """Return the bytes of every rank over the step, by running it on tensors without values.

        Printed, they are a line for each rank; one of them is its tables. ``.to_svg()`` draws them.

        Programs that are compiled are counted as they are traced. A message counts at its sender until that
        has waited for it, at its receiver from when it is expected. Through memory that two processes map
        (see :class:`P2P`) it is held for less time; the copy there does not count.
        """
        step, programs = self._lowered, self.programs()
        memories = ((rank, memory_of(step, programs, rank, self._completed)) for rank in step.ranks)
        return Memories(memories, step.schedule)

    def _completed(self, step: LoweredStep, arguments: StepArguments) -> Completed:
        return arguments, {}

    @naming_arguments
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

    @naming_arguments
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


# -- the bytes of a rank

# The kinds of what is there after an instruction and has no other: residuals of a stage may be in closures.
_LEFT = {
    Op.F: "residuals",
    Op.I: "residuals",
    Op.FETCH: "residuals",
    Op.RECOMPUTE: "residuals",
    Op.UNSHARD: "gathered",
    Op.STEP: "updated",
}


def memory_of(
    step: LoweredStep,
    programs: Mapping[Key, StageProgram],
    rank: int,
    complete: Callable[[LoweredStep, StepArguments], Completed],
) -> Memory:
    """Run the calls of a rank without values.

    Args:
        complete: completes the arguments, such as by an update, for the step of the rank.
    """
    step, device = _of_rank(step, rank), step.form.devices[step.schedule.model_stages_of(rank)[0]]
    ledger = Ledger(device)
    flat = {id(p): p._replace(flat=_on_paper(p.flat, ledger)) for p in programs.values()}
    programs = {key: flat[id(program)] for key, program in programs.items()}
    with _running(ledger, step.form.devices.values()):
        compiled, arguments = bind(step, programs, MessagesOnPaper()), _arguments(step, rank)
        arguments, more = complete(step, arguments)
        paths = {s: signature.paths for s, signature in step.form.params.items()}
        with ledger:
            for s, leaves in arguments.params.items():
                ledger.mark("params", leaves)
                for leaf, path in zip(leaves, paths[s], strict=True):
                    ledger.name(leaf, f"params[{s}]{path}")
            ledger.mark("params", chain(*arguments.state.values()))
            ledger.mark("batch", tree_leaves([arguments.inputs, arguments.targets, arguments.extras]))
            for kind, tree in more.items():
                leaves, treedef = tree_flatten(tree)
                for leaf, path in zip(leaves, tree_paths(treedef, kind), strict=True):
                    ledger.mark(kind, [local(leaf)], name=path)
            calls = _run(step, compiled, arguments, ledger)
    return ledger.memory(calls)


@contextmanager
def _running(ledger: Ledger, devices: Iterable[torch.device]) -> Iterator[None]:
    try:
        with torch.no_grad(), preserve_rng(devices), without_values():
            yield
    except DATA_DEPENDENT as error:
        mend = "count the bytes of a step that runs"
        raise StageError(ledger.owner, f"its memory is not known: {data_dependence(error)}", mend) from error


def residual_bytes(program: StageProgram, low: LoweredStage) -> tuple[int, int]:
    """Count the bytes that a forward keeps of one microbatch, and that its input gradient leaves for W.

    Parameters, extras and the cotangents of the loss are not counted. Of slices, the carry that a forward
    hands on is counted, and the carry that it takes is not: the slice before has counted it.
    """
    ledger = Ledger(low.device)
    flat = _on_paper(program.flat, ledger)
    with _running(ledger, [low.device]):
        params, x, extras = Example.of(low.call.example, low.device).make()
        gy = cotangents_of(low)
        with ledger:
            before = [t for edge, place in places_of(low.sources) if edge.shift for t in x[place]]
            ledger.mark("params", (*params, *extras, *gy, *before))
            given = ledger.live
            ledger.mark(
                "residuals", [t for e, place in places_of(low.sources) if not e.shift for t in x[place]]
            )
            arguments = [x]
            del x
            y, saved = flat.forward(params, arguments.pop(), extras)
            places = [place for edge, place in places_of(low.sinks) if edge.shift and edge.stage != NOWHERE]
            held, after = [saved], [y[place] for place in places]
            del y, saved
            kept = ledger.live - given
            del after
            rest = flat.backward_input(held.pop(), gy)[1:]
            return kept, ledger.live - given if rest else 0


def cotangents_of(low: LoweredStage) -> Leaves:
    """Make gradients of the differentiated results: the activation, the skip connections, the loss."""
    leaves = (leaf for part in children(low.outline.y) for leaf in part.leaves if leaf.grad)
    return empty(leaves, low.device)


def empty(leaves: Iterable[LeafSignature], device: torch.device) -> Leaves:
    """Make tensors of these signatures."""
    return tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves)


def _of_rank(step: LoweredStep, rank: int) -> LoweredStep:
    """Take the part of a rank, as a process of its own lowers it."""
    stages = set(step.schedule.stages_of(rank))
    return step._replace(
        ranks=(rank,),
        order=tuple(place for place in step.order if place[0] == rank),
        stages={key: low for key, low in step.stages.items() if key[0] in stages},
        losses={stage: part for stage, part in step.losses.items() if stage in stages},
    )


def _arguments(step: LoweredStep, rank: int) -> StepArguments:
    form, schedule = step.form, step.schedule
    stages = schedule.model_stages_of(rank)

    def batch(rows: tuple[Signature, ...] | None, stage: int) -> list[Leaves]:
        return [empty(row.leaves, form.devices[stage]) for row in rows or ()] if stage in stages else []

    heads = {schedule.model_stages[stage] for stage in schedule.heads}
    first, last = (min(some.intersection(stages), default=-1) for some in (heads, step.targeted))
    return StepArguments(
        {s: empty(form.params[s].leaves, form.devices[s]) for s in stages},
        batch(form.inputs, first),
        batch(form.targets, last),
        (0, 0),
        extras={s: batch(rows, s) for s, rows in form.extras.items() if s in stages},
        state={s: empty(form.state[s].leaves, form.devices[s]) for s in stages if s in form.state},
        carry={
            s: [empty(row.leaves, form.devices[s]) for row in rows]
            for s, rows in form.carry.items()
            if s in stages
        },
        loss_weights=None,
        form=form,
        left_out=frozenset(),
    )


def _run(
    step: LoweredStep, compiled: CompiledStep, arguments: StepArguments, ledger: Ledger
) -> list[tuple[Instruction, list[tuple[int, int]]]]:
    """Run the calls of a rank; return its instructions, each with start and end of its calls."""
    (rank,) = step.ranks
    program, flat = step.schedule.programs[rank], tuple(step.schedule.instructions(rank))
    starts = [0, *accumulate(map(len, program))]
    spans: list[list[tuple[int, int]]] = [[] for _ in flat]
    buffers = fill(step, arguments)
    ledger.mark("batch", chain(*buffers.weights.values(), *buffers.cotangents.values()))
    ledger.mark_rest("gradients")
    for call, place in zip(compiled.calls, compiled.places, strict=True):
        instructions, instruction = program[place.position], place.instruction
        ledger.begin(instruction)
        begun = ledger.now
        call(buffers)
        _mark(ledger, buffers, instruction, step.schedule.model_stages[instruction.stage])
        found = instructions.index(instruction) if instruction in instructions else len(instructions) - 1
        number = max(0, starts[place.position] + found)  # of what a step without instructions waits for
        spans[number].append((begun, ledger.now))
    ledger.begin(None)
    if buffers.update is None:
        losses_of(step, buffers)
    else:
        buffers.update.finish()
        ledger.mark_rest("updated")
    results = collect(step, [arguments], buffers)
    ledger.mark_rest("outputs")
    del results, buffers
    return list(zip(flat, spans, strict=True))


def _mark(ledger: Ledger, buffers: Buffers, instruction: Instruction, model_stage: int) -> None:
    """Mark the tensors that an instruction leaves behind, by the buffers that keep them."""
    key: Any = instruction.stage, instruction.microbatch
    pending = chain.from_iterable(buffers.pending.values())
    ledger.mark("shards", buffers.shards.get(model_stage, ()))
    ledger.mark("messages", chain(pending, chain.from_iterable(buffers.values.values())))
    ledger.mark("outputs", (*buffers.kept.get(key, ()), *buffers.state.get(model_stage, ())))
    residuals = buffers.residuals.get(key, ())
    ledger.mark("residuals", residuals if isinstance(residuals, tuple) else (), also="messages")
    ledger.mark_rest(_LEFT.get(instruction.op, "gradients"))


def _on_paper(program: FlatProgram, ledger: Ledger) -> FlatProgram:
    """Replace the traced functions of a program by functions that allocate and free, and compute nothing."""
    functions: Any = (_OnPaper(f, ledger) if isinstance(f, TracedFunction) else f for f in program)
    return FlatProgram(*functions)


class _OnPaper(TracedFunction):
    """A traced function, written again with operators that only make their results."""

    def __init__(self, traced: TracedFunction, ledger: Ledger) -> None:
        self.recipe, self.results, self.written = traced.recipe._replace(compile=False), traced.results, None
        self._traced, self._ledger = traced, ledger

    def fastest(self) -> Callable[..., Any]:
        return self.function

    @property
    def accumulating(self) -> TracedFunction | None:
        other = self._traced.accumulating
        return None if other is None else _OnPaper(other, self._ledger)

    @property
    def additions(self) -> tuple[Addition, ...]:
        return self._traced.additions

    def _write(self) -> Callable[..., Any]:
        block = self.recipe.block.copied(graph := Graph())
        for node in graph.nodes:
            if node.op == "get_attr":  # a constant, which is there anyway
                like = node.meta["val"]
                node.meta["constant"] = torch.empty((), dtype=like.dtype, device=like.device).expand(
                    like.shape
                )
        for node in calls_of(block):
            if node.op != "call_method":  # which adds gradients up
                self._only_make(node)
        return write(self.recipe._replace(block=block))

    def _only_make(self, node: Node) -> None:
        """Let a call make its results, in new memory or in the memory of its arguments."""
        value: Any = node.meta.get("val")
        several, name = "results" in node.meta, _name(node)
        forms = [form if isinstance(form, torch.Tensor) else None for form in (value if several else [value])]
        again = self.recipe.names[0] != "params" and is_of_forward(node)  # a forward operator in a backward

        def make(*args: Any, sources: tuple[Any, ...], **kwargs: Any) -> Any:
            pairs = zip(forms, sources, strict=True)
            made = [f if f is None else self._ledger.make(f, within, name, again) for f, within in pairs]
            return made if several else made[0]

        sources = tuple([form if form is None else source(node, form) for form in forms])
        node.kwargs = {**node.kwargs, "sources": sources}
        node.meta["call"] = OperatorCall(make)


def _name(node: Node) -> str:
    """Name the operator of a call, and the user's line of the call, of its forward, or of its arguments.

    Where no line is known, the path of the module is in its place.
    """
    origins = (m for n in (node, *node.all_input_nodes) for m in (n.meta, n.meta.get("reverses", {})))
    return f"{node.target}{next(filter(None, map(_place, origins)), '')}"


def _place(origin: dict[str, Any]) -> str:
    module = origin.get("module")
    return origin.get("place") or (f", called at {module.name}" if module and module.name else "")


# -- ranks without processes


class MessagesOnPaper(InProcess):
    """Holds the messages of one rank as :class:`P2P` does, and moves nothing."""

    def collective(self, among: Among) -> Collective:
        return CollectiveOnPaper(len(among))

    def post(self, batch: Sequence[Transfer]) -> Call:
        joins = [joining(each) if each.device.type == "cpu" else None for each in batch]

        def post_all(buffers: Buffers) -> None:
            for (outgoing, tag, _, leaves, device), join in zip(batch, joins, strict=True):
                tensors = (
                    [t.contiguous() for t in buffers.values.pop(tag)]
                    if outgoing
                    else [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves]
                )
                posted = tensors if join is None else join(tensors)
                buffers.pending[tag] = posted if outgoing else tensors

        return post_all

    def wait(self, transfer: Transfer) -> Call:
        def take(buffers: Buffers) -> None:
            tensors = buffers.pending.pop(transfer.tag)
            if not transfer.outgoing:
                buffers.values[transfer.tag] = tuple(tensors)

        return take


class OnPaper(InProcess):
    """Stands for the ranks of a mesh, of which only sizes are known: steps are lowered, and never run.

    This process is the first of the mesh's data ranks and model ranks, and holds all ranks of its pipeline.
    A mesh of torch's backend ``fake`` has no processes, and as many ranks as one likes::

        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8 * 16)
        mesh = torch.distributed.init_device_mesh("cpu", (8, 16), mesh_dim_names=("pp", "dp"))
        transport = ppfunc.OnPaper(mesh=mesh, axes=ppfunc.Axes("pp", data="dp"), shard="params")

    Args:
        mesh, axes, shard: arguments as of :class:`P2P`.

    Raises:
        TypeError, ValueError: as :class:`P2P`.
    """

    @naming_arguments
    def __init__(self, *, mesh: DeviceMesh, axes: Axes | None = None, shard: ShardWhat = "none") -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: got {mesh!r}, expected a DeviceMesh, such as init_device_mesh makes")
        self.mesh, self.axes, self.shard = mesh, axes or Axes(), shard
        require_shardable(self.axes, shard)
        self._grid = grid_of(mesh, self.axes, int(mesh.mesh.flatten()[0]))

    def __repr__(self) -> str:
        return f"OnPaper(mesh={self.mesh!r}, axes={self.axes!r}, shard={self.shard!r})"

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        if ranks != len(self._grid.pipeline):
            raise ValueError(
                f"got a schedule of {ranks} ranks, the axis {self.axes.pipe!r} of the mesh has"
                f" {len(self._grid.pipeline)}; build the schedule for that many, or make another mesh"
            )
        return super().local_ranks(ranks)

    def collective(self, among: Among) -> Collective:
        if among == "world":
            return CollectiveOnPaper(self._grid.size)
        axes = tuple(axis for axis in among if isinstance(axis, str))
        return CollectiveOnPaper(len(self._grid.along(axes)) if axes else 1)  # all of the pipeline are here

    def ready(self, layouts: LaidOut) -> None:
        raise RuntimeError(
            "got a step to run on a transport that is on paper, whose ranks have no processes; call lower()"
            " for its text, memory and cost, or take ppfunc.P2P(mesh=mesh, axes=axes) in every process"
        )

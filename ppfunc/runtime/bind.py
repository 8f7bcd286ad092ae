"""Binding: the instructions of a process's ranks become one flat list of calls, with every lookup resolved.

A call reads and writes the buffers of the running step. A forward pops its input from ``buffers.values`` and puts
its output there; a message posts what is there, or puts there what has arrived; a backward pops gradients and puts
gradients. Residuals are kept by (stage, microbatch), used once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Instruction, Op, Schedule, linearize, parts_of, send_completion
from ppfunc.schedule.instruction import COMMUNICATION, SENDS
from ppfunc.stage import FlatProgram, LeafSignature, Signature

from .buffers import Buffers, Leaves
from .gradients import Absent, Given
from .lower import BATCH, Key
from .overlap import Overlapped
from .replicas import reduce_replicas
from .rng import generator_of, process_lock
from .transport import Call, DataTransport, Tag, Transfer


class Place(NamedTuple):
    """Where in the schedule a call comes from."""

    rank: int
    position: int
    instruction: Instruction


class Edge(NamedTuple):
    """Where one part of a stage's input comes from, or where one part of its output goes.

    Args:
        stage: the stage at the other end, -1 for the batch.
        leaves: the signature of what travels.
    """

    stage: int
    leaves: tuple[LeafSignature, ...]

    @property
    def carrying(self) -> tuple[LeafSignature, ...]:
        """The leaves whose gradients travel back."""
        return tuple(leaf for leaf in self.leaves if leaf.grad)


class CompiledStage(NamedTuple):
    """One stage for one form of its arguments, as the program calls it.

    Args:
        program: functions over flat tuples of leaves.
        model: number of the stage in the model.
        device: where it computes.
        params: signature of its parameters; the leaves with ``grad`` get gradients.
        sources: the edges that make up its input, in the order of the leaves.
        sinks: the edges that make up the first leaves of its output; what follows is kept for the caller.
        weighted: whether its output has a loss, whose cotangent is the weight of the microbatch.
        kept: number of leaves that follow those of the sinks.
        state: number of leaves of the state: the last of its extras, and the last of its output.
        random: whether its forward draws random numbers; None where that is not known.
    """

    program: FlatProgram
    model: int
    device: torch.device
    params: tuple[LeafSignature, ...]
    sources: tuple[Edge, ...]
    sinks: tuple[Edge, ...]
    weighted: bool
    kept: int
    state: int
    random: bool | None


class ProgramCall(NamedTuple):
    """One call of a program, taken apart: ``put(buffers, run(*take(buffers)))`` is the whole of it.

    Args:
        run: the function of the program.
        take: gathers its arguments from the buffers.
        put: puts its result into the buffers.
    """

    run: Callable[..., Any]
    take: Callable[[Buffers], tuple[Any, ...]]
    put: Callable[[Buffers, Any], None]

    def whole(self) -> Call:
        """The call in one."""
        run, take, put = self
        return lambda buffers: put(buffers, run(*take(buffers)))


Calls = list[tuple[Call, Place]]


def bind(
    schedule: Schedule,
    stages: Mapping[Key, CompiledStage],
    data: DataTransport,
    ranks: Sequence[int],
    overlapped: Overlapped | None = None,
    summed: Callable[[LeafSignature], LeafSignature] = lambda leaf: leaf,
) -> Calls:
    """Resolve every lookup of a lowered schedule once.

    Args:
        schedule: with communication placed.
        stages: the stages of this process, by (stage of the schedule, microbatch).
        data: carries messages between processes.
        ranks: those of this process.
        overlapped: runs the two parts of an overlapped pair; in turn where there is none.
        summed: signature of the gradient, over all microbatches, of a parameter of a signature.

    Returns:
        The calls of these ranks, in an order in which none waits for a later one, and where each comes from.
    """
    binding = _Binding(schedule, stages, data, overlapped, set())
    completed = {rank: send_completion(schedule, rank) for rank in ranks} if len(ranks) < schedule.ranks else {}
    calls: Calls = []
    for rank, position in _order(schedule, ranks):
        calls += _step(binding, rank, position, completed.get(rank, {}).get(position, ()))
    calls += reduce_replicas(schedule, stages, data, ranks, summed, Place)
    return calls


def share_input_gradients(
    schedule: Schedule, inputs: Sequence[Signature], device: torch.device, data: DataTransport, ranks: Sequence[int]
) -> Calls:
    """Exchange gradients of the inputs with the processes where other chains begin, so that each has those of the whole batch.

    Args:
        inputs: the signature of every microbatch, with the leaves that want gradients.
        device: where the first stage computes.
    """
    home, firsts = schedule.placement, {chain.stages[0]: chain.microbatches for chain in schedule.chains}
    here = [stage for stage in firsts if home[stage] in ranks]
    ends: dict[int, list[Transfer]] = {}
    for own in here:
        for other in firsts.keys() - set(here):
            for m in (*firsts[own], *firsts[other]):
                outgoing = m in firsts[own]
                tag = Tag("R", own, other, m) if outgoing else Tag("R", other, own, m)
                if leaves := tuple(leaf for leaf in inputs[m].leaves if leaf.grad):
                    ends.setdefault(home[own], []).append(Transfer(outgoing, tag, home[other], leaves, device))

    def publish(buffers: Buffers) -> None:
        for transfer in (t for batch in ends.values() for t in batch if t.outgoing):
            buffers.values[transfer.tag] = buffers.values[Tag("B", transfer.tag.source, BATCH, transfer.tag.microbatch)]

    def collect(buffers: Buffers) -> None:
        for transfer in (t for batch in ends.values() for t in batch if not t.outgoing):
            buffers.values[Tag("B", transfer.tag.source, BATCH, transfer.tag.microbatch)] = buffers.values.pop(transfer.tag)

    calls: Calls = []
    for rank, batch in ends.items():
        batch.sort(key=lambda t: t.tag)
        place = Place(rank, len(schedule.programs[rank]) - 1, schedule.programs[rank][-1][-1])
        incoming = [data.wait_recv(rank, t) for t in batch if not t.outgoing]
        outgoing = [data.wait_send(rank, t) for t in batch if t.outgoing]
        calls += _placed(place, publish, data.post(rank, batch), *incoming, collect, *outgoing)
    return calls


class _Binding(NamedTuple):
    """What binding an instruction needs to know."""

    schedule: Schedule
    stages: Mapping[Key, CompiledStage]
    data: DataTransport
    overlapped: Overlapped | None
    loaded: set[Key]


def _order(schedule: Schedule, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The steps of these ranks as ``(rank, position)``, each after what it consumes."""
    if len(ranks) == 1:
        return ((ranks[0], position) for position in range(len(schedule.programs[ranks[0]])))
    return ((rank, position) for rank, position in linearize(schedule) if rank in ranks)


def _step(binding: _Binding, rank: int, position: int, completed: Sequence[Instruction]) -> Iterator[tuple[Call, Place]]:
    """The calls of one step: post its messages, compute, wait for the sends that are known to be received."""
    data, step = binding.data, binding.schedule.programs[rank][position]
    posted = [i for i in step if i.op in COMMUNICATION]
    if batch := [t for i in posted for t in _transfers(binding, i)]:
        yield from _placed(Place(rank, position, posted[0]), data.post(rank, batch))
    for instruction in step:
        if instruction.op is Op.OVERLAP_F_B and binding.overlapped is not None and not binding.schedule.forward_only:
            yield from _overlap(binding, Place(rank, position, instruction), *instruction.parts)
        elif instruction.op not in COMMUNICATION:
            for part in parts_of(instruction):
                yield from _instruction(binding, Place(rank, position, part))
    for instruction in completed:
        for transfer in _transfers(binding, instruction):
            yield from _placed(Place(rank, position, instruction), data.wait_send(rank, transfer))


def _placed(place: Place, *calls: Call | None) -> Iterator[tuple[Call, Place]]:
    return ((call, place) for call in calls if call is not None)


# -- communication -------------------------------------------------------------------------------------------------


def _transfers(binding: _Binding, instruction: Instruction) -> Iterator[Transfer]:
    """The transfer of a SEND or RECV; none where no tensor travels that edge."""
    stage, microbatch, op = instruction.stage, instruction.microbatch, instruction.op
    compiled = binding.stages[stage, microbatch]
    forward, outgoing = op in (Op.SEND_F, Op.RECV_F), op in SENDS
    edges = compiled.sinks if op in (Op.SEND_F, Op.RECV_B) else compiled.sources
    edge = edges[0] if instruction.peer is None else next(e for e in edges if e.stage == instruction.peer)
    ends = (stage, edge.stage) if outgoing else (edge.stage, stage)
    if leaves := edge.leaves if forward else edge.carrying:
        tag = Tag("F" if forward else "B", *ends, microbatch)
        yield Transfer(outgoing, tag, binding.schedule.placement[edge.stage], leaves, compiled.device)


def _arrivals(binding: _Binding, place: Place, part: Instruction) -> Iterator[tuple[Call, Place]]:
    """Wait for what a forward or a backward consumes of other ranks."""
    compiled = binding.stages[part.stage, part.microbatch]
    forward = part.op is Op.F
    for edge in compiled.sources if forward else compiled.sinks:
        leaves = edge.leaves if forward else edge.carrying
        peer = place.rank if edge.stage == BATCH else binding.schedule.placement[edge.stage]
        if leaves and peer != place.rank:
            tag = Tag("F" if forward else "B", edge.stage, part.stage, part.microbatch)
            yield from _placed(place, binding.data.wait_recv(place.rank, Transfer(False, tag, peer, leaves, compiled.device)))


# -- instructions that compute -------------------------------------------------------------------------------------


def _instruction(binding: _Binding, place: Place) -> Iterator[tuple[Call, Place]]:
    part = place.instruction
    stage, microbatch = part.stage, part.microbatch
    compiled = binding.stages.get((stage, microbatch))
    match part.op:
        case Op.LOAD:
            yield from _placed(place, _load(binding, part))
        case Op.F:
            yield from _placed(place, _load(binding, part))
            yield from _arrivals(binding, place, part)
            forward = _forward(compiled, stage, microbatch, not binding.schedule.forward_only)
            yield from _placed(place, _seeded(binding, compiled, part, forward))
        case Op.B | Op.I:
            yield from _arrivals(binding, place, part)
            yield from _placed(place, _backward_call(compiled, stage, microbatch, part.op is Op.B).whole())
        case Op.W:
            yield from _placed(place, _weight(compiled, stage, microbatch))
        case Op.OFFLOAD | Op.FETCH:
            target = torch.device("cpu") if part.op is Op.OFFLOAD else compiled.device
            yield from _placed(place, _move_residuals(compiled, stage, microbatch, target))
        case Op.REDUCE_TIED | Op.REDUCE_GRAD:
            pass  # sums over replicas end the program, see reduce_replicas
        case _:
            raise AssertionError(part)  # lowering refuses it


def _overlap(binding: _Binding, place: Place, forward: Instruction, backward: Instruction) -> Iterator[tuple[Call, Place]]:
    """A forward and a backward that the caller's function runs as one: both wait for what they consume first."""
    ahead, back = (binding.stages[part.stage, part.microbatch] for part in (forward, backward))
    yield from _placed(place, _load(binding, forward))
    yield from _arrivals(binding, place, forward)
    yield from _arrivals(binding, place, backward)
    first = _forward_call(ahead, forward.stage, forward.microbatch, True)
    second = _backward_call(back, backward.stage, backward.microbatch, backward.op is Op.B)
    run = binding.overlapped

    def both(buffers: Buffers) -> None:
        outputs, gradients = run(first.run, first.take(buffers), second.run, second.take(buffers))
        first.put(buffers, outputs)
        second.put(buffers, gradients)

    yield from _placed(place, _seeded(binding, ahead, forward, both))


def _load(binding: _Binding, part: Instruction) -> Call | None:
    """Bring inputs and targets of a microbatch to the stage's device, once."""
    key = (part.stage, part.microbatch)
    device, tag = binding.stages[key].device, Tag("F", BATCH, *key)
    if device.type == "cpu" or key in binding.loaded:
        return None
    binding.loaded.add(key)

    def load(buffers: Buffers) -> None:
        for store, name in ((buffers.values, tag), (buffers.constants, key)):
            if name in store:
                store[name] = tuple(t.to(device, non_blocking=True) for t in store[name])

    return load


def _forward_call(compiled: CompiledStage, stage: int, microbatch: int, keep_residuals: bool) -> ProgramCall:
    """A forward: values in, values out, residuals, and the outputs that the caller wants."""
    key, model, states = (stage, microbatch), compiled.model, compiled.state
    # An edge without leaves carries no message.
    sources = [Tag("F", e.stage, stage, microbatch) for e in compiled.sources if e.leaves]
    sinks = [(Tag("F", stage, e.stage, microbatch), place) for e, place in _places(compiled.sinks) if e.leaves]
    passed = sum(len(e.leaves) for e in compiled.sinks)

    def take(buffers: Buffers) -> tuple[Leaves, Leaves, Leaves]:
        x = tuple(t for tag in sources for t in buffers.values.pop(tag))
        return buffers.params[model], x, buffers.constants.get(key, ()) + buffers.state.get(model, ())

    def put(buffers: Buffers, result: tuple[Leaves, tuple[Any, ...]]) -> None:
        outputs, saved = result
        for tag, place in sinks:
            buffers.values[tag] = outputs[place]
        if keep_residuals:
            buffers.residuals[key] = saved
        if compiled.kept:
            buffers.kept[key] = outputs[passed : len(outputs) - states]
        if states:
            buffers.state[model] = outputs[len(outputs) - states :]

    return ProgramCall(compiled.program.forward, take, put)


def _forward(compiled: CompiledStage, stage: int, microbatch: int, keep_residuals: bool) -> Call:
    """The call of a forward; in fewer steps for a stage that has one way in and one way out."""
    sources, sinks = ([e for e in edges if e.leaves] for edges in (compiled.sources, compiled.sinks))
    if len(sources) != 1 or len(sinks) != 1 or compiled.kept or compiled.state or not keep_residuals:
        return _forward_call(compiled, stage, microbatch, keep_residuals).whole()
    run, key, model = compiled.program.forward, (stage, microbatch), compiled.model
    source, sink = Tag("F", sources[0].stage, stage, microbatch), Tag("F", stage, sinks[0].stage, microbatch)

    def forward(buffers: Buffers) -> None:
        values = buffers.values
        values[sink], buffers.residuals[key] = run(
            buffers.params[model], values.pop(source), buffers.constants.get(key, ()) + buffers.state.get(model, ())
        )

    return forward


def _seeded(binding: _Binding, compiled: CompiledStage, part: Instruction, forward: Call) -> Call:
    """The forward with its generator set, so that it draws by (seed, step, stage of the model, microbatch) alone.

    Without a seed, raise if the stage draws random numbers.
    """
    if compiled.random is False:
        return forward
    generator, model, microbatch = generator_of(compiled.device), compiled.model, part.microbatch

    def seeded(buffers: Buffers) -> None:
        with process_lock:
            if buffers.seed is None:
                before = generator.get_state()
                forward(buffers)
                if not torch.equal(before, generator.get_state()):
                    raise ValueError(f"stage {model} drew random numbers; pass seed=(seed, step) to the step, two integers")
                return
            text = repr((*buffers.seed, model, microbatch)).encode()
            generator.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True))
            forward(buffers)

    return seeded


def _backward_call(compiled: CompiledStage, stage: int, microbatch: int, whole: bool) -> ProgramCall:
    """A full backward, or an input gradient that leaves the rest to a weight gradient."""
    key, device, weighted = (stage, microbatch), compiled.device, compiled.weighted
    sinks = [Tag("B", e.stage, stage, microbatch) for e in compiled.sinks if e.carrying]
    edges = list(_places(compiled.sources, carrying=True))
    sources = [(Tag("B", stage, e.stage, microbatch), e.carrying, place) for e, place in edges if e.carrying]
    absent = _absent(compiled.program.backward)

    def take(buffers: Buffers) -> tuple[tuple[Any, ...], Leaves]:
        # Hands over the only reference to the residuals, which are freed on the way.
        gy = tuple(t for tag in sinks for t in buffers.values.pop(tag))
        return buffers.residuals.pop(key), gy + buffers.cotangents[key] if weighted else gy

    def put(buffers: Buffers, result: tuple[Any, Any]) -> None:
        gradients, rest = result
        if whole:
            buffers.gradients[stage].add(gradients, microbatch, absent)
            gradients = rest
        else:
            buffers.residuals[key] = rest
        for tag, leaves, place in sources:
            buffers.values[tag] = _dense(gradients[place], leaves, device)

    return ProgramCall(compiled.program.backward if whole else compiled.program.backward_input, take, put)


def _weight(compiled: CompiledStage, stage: int, microbatch: int) -> Call:
    """The call of a weight gradient."""
    run, key = compiled.program.backward_weight, (stage, microbatch)
    absent = _absent(run)
    return lambda buffers: buffers.gradients[stage].add(run(buffers.residuals.pop(key)), microbatch, absent)


def _absent(program: Callable[..., Any]) -> Absent | None:
    """Which parameter gradients a traced program never has; None where only its results tell."""
    recipe = getattr(program, "recipe", None)
    return None if recipe is None else tuple(gradient is None for gradient in recipe.part.results[0])


def _dense(gradients: Given, leaves: tuple[LeafSignature, ...], device: torch.device) -> Leaves:
    """Zeros where a gradient is structurally zero: the other end expects a tensor."""
    for gradient in gradients:
        if gradient is None:
            zeros = (torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves)
            return tuple(zero if g is None else g for g, zero in zip(gradients, zeros, strict=True))
    return gradients


def _move_residuals(compiled: CompiledStage, stage: int, microbatch: int, target: torch.device) -> Call | None:
    """Move residuals to ``target``; parameters, held by reference, stay where they are."""
    if compiled.device.type == "cpu":
        return None
    key, model = (stage, microbatch), compiled.model

    def move(buffers: Buffers) -> None:
        if not all(isinstance(t, torch.Tensor) for t in buffers.residuals[key]):
            raise TypeError(
                f"the residuals of stage {model} cannot be moved: its engine keeps something else than tensors; "
                f"use the graph engine without cuda_graphs=True, or a schedule without OFFLOAD"
            )
        stay = {t.untyped_storage().data_ptr() for t in buffers.params[model]}
        buffers.residuals[key] = tuple(
            t if t.untyped_storage().data_ptr() in stay else t.to(target, non_blocking=True) for t in buffers.residuals[key]
        )

    return move


def _places(edges: tuple[Edge, ...], carrying: bool = False) -> Iterator[tuple[Edge, slice]]:
    """Each edge with the place of its leaves in the tuple of all of them."""
    start = 0
    for edge in edges:
        stop = start + len(edge.carrying if carrying else edge.leaves)
        yield edge, slice(start, stop)
        start = stop

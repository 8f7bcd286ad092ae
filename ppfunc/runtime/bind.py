"""Bind the instructions of a process's ranks: one flat list of calls, with every lookup resolved.

A call reads and writes the buffers of the running step: `calls.py` has those of stage programs, a transport those
of messages, which post what is in ``buffers.values``, or put there what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ppfunc.schedule import Instruction, Op, Schedule, linearize, parts_of, send_completion
from ppfunc.schedule.instruction import COMMUNICATION, SENDS
from ppfunc.stage import LeafSignature, Signature

from .buffers import Buffers, Key, Tag
from .calls import CompiledStage, Place, backward, backward_call, forward, forward_call, load, move_residuals, seeded, weight
from .lower import BATCH
from .overlap import Overlapped
from .replicas import reduce_replicas
from .transport import Call, DataTransport, Transfer

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
    calls += reduce_replicas(schedule, stages, data, ranks, summed)
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
        received = [data.wait_recv(rank, t) for t in batch if not t.outgoing]
        sent = [data.wait_send(rank, t) for t in batch if t.outgoing]
        calls += _placed(place, publish, data.post(rank, batch), *received, collect, *sent)
    return calls


class _Binding(NamedTuple):
    """The context in which an instruction is bound."""

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
            yield from _overlap(binding, binding.overlapped, Place(rank, position, instruction))
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
    (stage, microbatch), op = _key(instruction), instruction.op
    compiled = binding.stages[stage, microbatch]
    ahead, outgoing = op in (Op.SEND_F, Op.RECV_F), op in SENDS
    edges = compiled.sinks if op in (Op.SEND_F, Op.RECV_B) else compiled.sources
    edge = edges[0] if instruction.peer is None else next(e for e in edges if e.stage == instruction.peer)
    ends = (stage, edge.stage) if outgoing else (edge.stage, stage)
    if leaves := edge.leaves if ahead else edge.carrying:
        tag = Tag("F" if ahead else "B", *ends, microbatch)
        yield Transfer(outgoing, tag, binding.schedule.placement[edge.stage], leaves, compiled.device)


def _arrivals(binding: _Binding, place: Place, part: Instruction) -> Iterator[tuple[Call, Place]]:
    """Wait for what a forward or a backward consumes of other ranks."""
    stage, microbatch = _key(part)
    compiled, ahead = binding.stages[stage, microbatch], part.op is Op.F
    for edge in compiled.sources if ahead else compiled.sinks:
        leaves = edge.leaves if ahead else edge.carrying
        peer = place.rank if edge.stage == BATCH else binding.schedule.placement[edge.stage]
        if leaves and peer != place.rank:
            tag = Tag("F" if ahead else "B", edge.stage, stage, microbatch)
            yield from _placed(place, binding.data.wait_recv(place.rank, Transfer(False, tag, peer, leaves, compiled.device)))


# -- instructions that compute -------------------------------------------------------------------------------------


def _instruction(binding: _Binding, place: Place) -> Iterator[tuple[Call, Place]]:
    part = place.instruction
    if part.op is Op.REDUCE_TIED:
        return  # sums over replicas end the program, see reduce_replicas
    key = _key(part)
    compiled = binding.stages[key]
    match part.op:
        case Op.LOAD:
            yield from _placed(place, _load(binding, key))
        case Op.F:
            yield from _placed(place, _load(binding, key))
            yield from _arrivals(binding, place, part)
            run = forward(compiled, key, not binding.schedule.forward_only)
            yield from _placed(place, seeded(compiled, key[1], run))
        case Op.B | Op.I:
            yield from _arrivals(binding, place, part)
            yield from _placed(place, backward(compiled, key, part.op is Op.B))
        case Op.W:
            yield from _placed(place, weight(compiled, key))
        case Op.OFFLOAD | Op.FETCH:
            target = torch.device("cpu") if part.op is Op.OFFLOAD else compiled.device
            yield from _placed(place, move_residuals(compiled, key, target))
        case _:
            raise AssertionError(part)  # lowering refuses it


def _overlap(binding: _Binding, run: Overlapped, place: Place) -> Iterator[tuple[Call, Place]]:
    """A forward and a backward that the caller's function runs as one: both wait for what they consume first."""
    ahead, back = place.instruction.parts
    yield from _placed(place, _load(binding, _key(ahead)))
    yield from _arrivals(binding, place, ahead)
    yield from _arrivals(binding, place, back)
    first = forward_call(binding.stages[_key(ahead)], _key(ahead), True)
    second = backward_call(binding.stages[_key(back)], _key(back), back.op is Op.B)

    def both(buffers: Buffers) -> None:
        outputs, gradients = run(first.run, first.take(buffers), second.run, second.take(buffers))
        first.put(buffers, outputs)
        second.put(buffers, gradients)

    yield from _placed(place, seeded(binding.stages[_key(ahead)], _key(ahead)[1], both))


def _load(binding: _Binding, key: Key) -> Call | None:
    """Bring inputs and targets of a microbatch to the stage's device, once."""
    if key in binding.loaded:
        return None
    binding.loaded.add(key)
    return load(binding.stages[key], key)


def _key(part: Instruction) -> Key:
    """Stage and microbatch of an instruction that has both."""
    assert part.microbatch is not None
    return part.stage, part.microbatch

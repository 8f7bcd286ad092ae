"""The interpreter: a schedule becomes a flat list of thunks once, and every step calls them.

Data flows through ``values``, a dictionary from tags to tuples of leaves. A forward takes its
input from it and puts its output there; a message posts what is there or puts there what has
arrived; a backward takes gradients and puts gradients. Residuals are held by (stage,
microbatch), used once and dropped. Parameter gradients are added up in the order in which the
schedule computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from ppfunc.schedule import Instruction, Op, Schedule, linearize, parts_of
from ppfunc.schedule.instruction import COMMUNICATION, SENDS

from . import thunks as make
from .calls import BATCH, Edge, Home, StageCall
from .gradients import Gradients
from .memory import Memory
from .releases import release_points
from .transport import Failure, Tag, Thunk, Transfer, Transport


class Place(NamedTuple):
    """Where in the schedule a thunk comes from."""

    rank: int
    position: int
    instruction: Instruction


class Bound(NamedTuple):
    """A program ready to run: thunks, where each comes from, and the memory they share."""

    thunks: tuple[Thunk, ...]
    places: tuple[Place, ...]
    memory: Memory


class StepFailed(Exception):
    """Carries where a bound program failed to the caller, who knows the transport."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure)


def run(bound: Bound) -> None:
    """Call every thunk in turn.

    Raises:
        StepFailed: with the place of the thunk that raised.
    """
    index = 0
    try:
        for index, thunk in enumerate(bound.thunks):
            thunk()
    except BaseException as cause:
        place = bound.places[index]
        raise StepFailed(Failure(place.rank, place.position, place.instruction, cause)) from cause


def bind(
    schedule: Schedule,
    calls: Mapping[tuple[int, int], StageCall],
    transport: Transport,
    homes: Mapping[int, Home],
    gradients: Callable[[], Gradients],
    together: make.Overlapped | None = None,
) -> Bound:
    """Resolve every lookup of a lowered schedule once.

    Args:
        schedule: with communication placed.
        calls: the calls of the stages on the ranks of this process, by (stage, microbatch).
        transport: carries the messages of this process's ranks.
        homes: where each stage of this process lives.
        gradients: makes what takes the gradients of one stage.
        together: runs the two parts of an overlapped pair; in turn where there is none.

    Returns:
        The thunks of this process's ranks, in an order in which none waits for a later one.
    """
    return _Binder(schedule, calls, transport, homes, gradients, together).bind()


class _Binder:
    """Builds the list of thunks; owns nothing after ``bind`` has returned."""

    def __init__(
        self,
        schedule: Schedule,
        calls: Mapping[tuple[int, int], StageCall],
        transport: Transport,
        homes: Mapping[int, Home],
        gradients: Callable[[], Gradients],
        together: make.Overlapped | None,
    ) -> None:
        self.together = together
        self.schedule, self.calls, self.transport, self.homes = schedule, calls, transport, homes
        self.memory = Memory(gradients={stage: gradients() for stage in homes})
        self.thunks: list[Thunk] = []
        self.places: list[Place] = []
        self.loaded: set[tuple[int, int]] = set()
        self.reduced: dict[int, Place] = {}

    def bind(self) -> Bound:
        local = set(self.transport.local_ranks(self.schedule.ranks))
        order = linearize(self.schedule)
        releases = {rank: release_points(self.schedule, rank) for rank in local}
        for rank, position in order:
            if rank not in local:
                continue
            step = self.schedule.programs[rank][position]
            self._post(rank, position, [i for i in step if i.op in COMMUNICATION])
            for instruction in step:
                if instruction.op not in COMMUNICATION:
                    place = Place(rank, position, instruction)
                    if instruction.op is Op.OVERLAP_F_B and self.together is not None and not self.schedule.forward_only:
                        self._overlap(place, *instruction.parts)
                        continue
                    for part in parts_of(instruction):
                        self._compute(place._replace(instruction=part), part)
            for instruction in releases[rank].get(position, ()):
                for transfer in self._transfers(rank, instruction):
                    self._append(Place(rank, position, instruction), self.transport.release(rank, transfer, self.memory.values))
        self._reduce()
        return Bound(tuple(self.thunks), tuple(self.places), self.memory)

    def _append(self, place: Place, thunk: Thunk | None) -> None:
        if thunk is not None:
            self.thunks.append(thunk)
            self.places.append(place)

    # -- communication ---------------------------------------------------------------------

    def _transfers(self, rank: int, instruction: Instruction) -> Iterator[Transfer]:
        """The transfer of a SEND or RECV instruction; none where no tensor travels that edge."""
        stage, microbatch, op = instruction.stage, instruction.microbatch, instruction.op
        call = self.calls[stage, microbatch]
        forward = op in (Op.SEND_F, Op.RECV_F)
        outgoing = op in SENDS
        edges = call.sinks if op in (Op.SEND_F, Op.RECV_B) else call.sources
        edge = edges[0] if instruction.peer is None else next(e for e in edges if e.stage == instruction.peer)
        ends = (stage, edge.stage) if outgoing else (edge.stage, stage)
        leaves = edge.leaves if forward else edge.carrying
        if leaves:
            tag = Tag("F" if forward else "B", *ends, microbatch)
            yield Transfer(outgoing, tag, self.schedule.placement[edge.stage], leaves, self.homes[stage].device)

    def _post(self, rank: int, position: int, communications: list[Instruction]) -> None:
        batch = [t for i in communications for t in self._transfers(rank, i)]
        if batch:
            self._append(Place(rank, position, communications[0]), self.transport.post(rank, batch, self.memory.values))

    def _arrivals(self, place: Place, stage: int, microbatch: int, direction: str, edges: tuple[Edge, ...]) -> None:
        """Wait for what comes from other ranks."""
        for edge in edges:
            leaves = edge.leaves if direction == "F" else edge.carrying
            peer = place.rank if edge.stage == BATCH else self.schedule.placement[edge.stage]
            if leaves and peer != place.rank:
                tag = Tag(direction, edge.stage, stage, microbatch)
                transfer = Transfer(False, tag, peer, leaves, self.homes[stage].device)
                self._append(place, self.transport.arrive(place.rank, transfer, self.memory.values))

    # -- the other instructions ------------------------------------------------------------

    def _compute(self, place: Place, part: Instruction) -> None:
        stage, microbatch = part.stage, part.microbatch
        match part.op:
            case Op.LOAD:
                self._load(place, stage, microbatch)
            case Op.F:
                self._load(place, stage, microbatch)
                call = self.calls[stage, microbatch]
                self._arrivals(place, stage, microbatch, "F", call.sources)
                forward = make.forward(self.memory, call, stage, microbatch, not self.schedule.forward_only)
                self._append(place, self._drawing(call, part, forward))
            case Op.B | Op.I:
                call = self.calls[stage, microbatch]
                self._arrivals(place, stage, microbatch, "B", call.sinks)
                self._append(place, make.backward(self.memory, call, self.homes[stage], stage, microbatch, part.op is Op.B))
            case Op.W:
                self._append(place, make.weight(self.memory, self.calls[stage, microbatch], stage, microbatch))
            case Op.REDUCE_TIED | Op.REDUCE_GRAD:
                self.reduced.setdefault(stage, place)
            case Op.OFFLOAD | Op.FETCH:
                target = torch.device("cpu") if part.op is Op.OFFLOAD else self.homes[stage].device
                self._append(place, make.move_residuals(self.memory, self.homes[stage], stage, microbatch, target))
            case Op.STEP | Op.UNSHARD | Op.RESHARD:
                pass  # the optimizer and sharded parameters belong to the caller of the step

    def _overlap(self, place: Place, forward: Instruction, backward: Instruction) -> None:
        """A forward and a backward that the caller's function runs as one: both wait for what they consume first."""
        first, second = (self.calls[part.stage, part.microbatch] for part in (forward, backward))
        self._load(place, forward.stage, forward.microbatch)
        self._arrivals(place, forward.stage, forward.microbatch, "F", first.sources)
        self._arrivals(place, backward.stage, backward.microbatch, "B", second.sinks)
        home = self.homes[backward.stage]
        whole = backward.op is Op.B
        calls = (
            make.forward_call(self.memory, first, forward.stage, forward.microbatch, True),
            make.backward_call(self.memory, second, home, backward.stage, backward.microbatch, whole),
        )
        self._append(place, self._drawing(first, forward, make.overlapped(*calls, self.together)))

    def _drawing(self, call: StageCall, forward: Instruction, thunk: Thunk) -> Thunk:
        """The thunk, with the generator set before it if the stage of its forward may draw random numbers."""
        if call.random is False:
            return thunk
        stage = forward.stage
        position = next(c.stages.index(stage) for c in self.schedule.chains if stage in c.stages)
        return make.seeded(self.memory, self.homes[stage].device, position, stage, forward.microbatch, thunk)

    def _load(self, place: Place, stage: int, microbatch: int) -> None:
        """Bring the inputs and targets of a microbatch to the stage's device, once."""
        device = self.homes[stage].device
        if device.type == "cpu" or (stage, microbatch) in self.loaded:
            return
        self.loaded.add((stage, microbatch))
        values, constants, tag = self.memory.values, self.memory.constants, Tag("F", BATCH, stage, microbatch)

        def load() -> None:
            for store, key in ((values, tag), (constants, (stage, microbatch))):
                if key in store:
                    store[key] = tuple(t.to(device, non_blocking=True) for t in store[key])

        self._append(place, load)

    def _reduce(self) -> None:
        """Sum the gradients of the copies of each stage, in the order of the stages, wherever one lives.

        Reductions end the program, and both ends of a pair put them in the same order, so they
        can be posted together: no rank waits for a sum before it has sent its own parts.
        """
        groups = [(group, stage) for group in self.schedule.replicas for stage in group if stage in self.reduced]
        values, memory = self.memory.values, self.memory
        batches: dict[int, list[Transfer]] = {}
        for group, stage in groups:
            self._append(self.reduced[stage], make.publish(memory, self.homes[stage], stage, group))
            home, rank = self.homes[stage], self.schedule.placement[stage]
            leaves = tuple(memory.gradients[stage].signature(leaf) for leaf in home.params if leaf.grad)
            for other in group:
                peer = self.schedule.placement[other]
                if peer != rank and leaves:
                    batch = batches.setdefault(rank, [])
                    batch.append(Transfer(True, Tag("R", stage, other, -1), peer, leaves, home.device))
                    batch.append(Transfer(False, Tag("R", other, stage, -1), peer, leaves, home.device))
        for rank, batch in batches.items():
            batch.sort(key=lambda t: t.tag)
            place = next(p for p in self.reduced.values() if p.rank == rank)
            self._append(place, self.transport.post(rank, batch, values))
            for transfer in batch:
                if not transfer.outgoing:
                    self._append(place, self.transport.arrive(rank, transfer, values))
        for group, stage in groups:
            self._append(self.reduced[stage], make.collect(memory, stage, group))
        for rank, batch in batches.items():
            place = next(p for p in self.reduced.values() if p.rank == rank)
            for transfer in batch:
                if transfer.outgoing:
                    self._append(place, self.transport.release(rank, transfer, values))

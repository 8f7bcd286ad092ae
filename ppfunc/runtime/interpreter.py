"""The interpreter: a schedule becomes a flat list of thunks once, and every step calls them.

Data flows through ``values``, a dictionary from tags to tuples of leaves. A forward takes its
input from it and puts its output there; a message posts what is there or puts there what has
arrived; a backward takes gradients and puts gradients. Residuals are held by (stage,
microbatch), used once and dropped. Parameter gradients are added up in the order in which the
schedule computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch

from ppfunc.schedule import Instruction, Op, Schedule, linearize
from ppfunc.schedule.instruction import COMMUNICATION, SENDS
from ppfunc.stage import FlatProgram, LeafSignature

from .gradients import Accumulator
from .releases import release_points
from .transport import Failure, Tag, Thunk, Transfer, Transport, Values

Leaves = tuple[torch.Tensor, ...]
BATCH = -1  # the "stage" that the batch comes from


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


class StageCall(NamedTuple):
    """One stage as called for one microbatch: its program, and where its values come from and go.

    Args:
        program: functions over flat tuples of leaves.
        sources: the edges that make up its input, in the order of the leaves.
        sinks: the edges that make up the first leaves of its output; what follows is kept for the caller.
        weighted: whether its output has a loss, whose cotangent is the weight of the microbatch.
        keeps: whether outputs follow those of the sinks, for the caller.
        random: whether its forward draws random numbers; None where that is not known.
    """

    program: FlatProgram
    sources: tuple[Edge, ...]
    sinks: tuple[Edge, ...]
    weighted: bool
    keeps: bool
    random: bool | None


@dataclass
class Memory:
    """What a bound program reads and writes while it runs; what belongs to one step is let go after it.

    Args:
        params: leaves of the parameters, by stage.
        constants: leaves that are not differentiated (side inputs, targets, state), by (stage, microbatch).
        weights: cotangent of the loss, by (stage, microbatch).
        values: messages on their way between stages.
        residuals: what a backward needs of its forward, and a weight gradient of its input gradient, by (stage, microbatch).
        kept: outputs that belong to the caller, by (stage, microbatch).
        gradients: sums of parameter gradients, by stage.
        seed: ``(seed, step)`` of the randomness of one step, None where the caller gave none.
    """

    params: dict[int, Leaves] = field(default_factory=dict)
    constants: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    weights: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    residuals: dict[tuple[int, int], tuple] = field(default_factory=dict)
    kept: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    gradients: dict[int, Accumulator] = field(default_factory=dict)
    seed: tuple[int, int] | None = None

    def clear(self) -> None:
        """Let go of everything that belongs to one step."""
        for part in (self.params, self.constants, self.weights, self.values, self.residuals, self.kept):
            part.clear()
        for accumulator in self.gradients.values():
            accumulator.clear()


class Home(NamedTuple):
    """Where a stage lives.

    Args:
        device: of its parameters and of everything that it computes.
        params: the signature of its parameters; the leaves with ``grad`` get gradients.
    """

    device: torch.device
    params: tuple[LeafSignature, ...]

    def differentiated(self, leaves: Leaves) -> Leaves:
        """Those of the parameter leaves that get gradients."""
        return tuple(t for t, leaf in zip(leaves, self.params, strict=True) if leaf.grad)


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
) -> Bound:
    """Resolve every lookup of a lowered schedule once.

    Args:
        schedule: with communication placed.
        calls: the calls of the stages on the ranks of this process, by (stage, microbatch).
        transport: carries the messages of this process's ranks.
        homes: where each stage of this process lives.

    Returns:
        The thunks of this process's ranks, in an order in which none waits for a later one.
    """
    return _Binder(schedule, calls, transport, homes).bind()


class _Binder:
    """Builds the list of thunks; owns nothing after ``bind`` has returned."""

    def __init__(
        self,
        schedule: Schedule,
        calls: Mapping[tuple[int, int], StageCall],
        transport: Transport,
        homes: Mapping[int, Home],
    ) -> None:
        self.schedule, self.calls, self.transport, self.homes = schedule, calls, transport, homes
        self.memory = Memory()
        self.thunks: list[Thunk] = []
        self.places: list[Place] = []
        self.loaded: set[tuple[int, int]] = set()
        self.reduced: dict[int, Place] = {}

    def bind(self) -> Bound:
        local = set(self.transport.local_ranks(self.schedule.ranks))
        self.memory.gradients.update((stage, Accumulator()) for stage in self.homes)
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
                    for part in instruction.parts or (instruction,):
                        self._compute(place, part)
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
                forward = _forward(self.memory, call, stage, microbatch, self.schedule.forward_only)
                if call.random is not False:
                    position = next(c.stages.index(stage) for c in self.schedule.chains if stage in c.stages)
                    forward = _seeded(self.memory, self.homes[stage].device, position, stage, microbatch, forward)
                self._append(place, forward)
            case Op.B | Op.I:
                call = self.calls[stage, microbatch]
                self._arrivals(place, stage, microbatch, "B", call.sinks)
                self._append(place, _backward(self.memory, call, self.homes[stage], stage, microbatch, part.op is Op.B))
            case Op.W:
                self._append(place, _weight(self.memory, self.calls[stage, microbatch], stage, microbatch))
            case Op.REDUCE_TIED | Op.REDUCE_GRAD:
                self.reduced.setdefault(stage, place)
            case Op.OFFLOAD | Op.FETCH:
                target = torch.device("cpu") if part.op is Op.OFFLOAD else self.homes[stage].device
                self._append(place, _move_residuals(self.memory, self.homes[stage], stage, microbatch, target))
            case Op.STEP | Op.UNSHARD | Op.RESHARD:
                pass  # the optimizer and sharded parameters belong to the caller of the step

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
        groups = [(group, stage) for group in self.schedule.copies for stage in group if stage in self.reduced]
        values, memory = self.memory.values, self.memory
        batches: dict[int, list[Transfer]] = {}
        for group, stage in groups:
            self._append(self.reduced[stage], _publish(memory, self.homes[stage], stage, group))
            home, rank = self.homes[stage], self.schedule.placement[stage]
            leaves = tuple(leaf for leaf in home.params if leaf.grad)
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
            self._append(self.reduced[stage], _collect(memory, stage, group))
        for rank, batch in batches.items():
            place = next(p for p in self.reduced.values() if p.rank == rank)
            for transfer in batch:
                if transfer.outgoing:
                    self._append(place, self.transport.release(rank, transfer, values))


def _forward(memory: Memory, call: StageCall, stage: int, microbatch: int, forward_only: bool) -> Thunk:
    """The thunk of a forward: values in, values out, residuals and what the caller wants kept."""
    forward = call.program.forward
    key = (stage, microbatch)
    params, constants, values = memory.params, memory.constants, memory.values
    residuals, kept = memory.residuals, memory.kept
    # An edge without leaves carries no message.
    sources = [Tag("F", e.stage, stage, microbatch) for e in call.sources if e.leaves]
    sinks = [(Tag("F", stage, e.stage, microbatch), place) for e, place in _places(call.sinks) if e.leaves]
    passed = sum(len(e.leaves) for e in call.sinks)

    def forward_general() -> None:
        x = tuple(t for tag in sources for t in values.pop(tag))
        outputs, saved = forward(params[stage], x, constants.get(key, ()))
        for tag, place in sinks:
            values[tag] = outputs[place]
        kept[key] = outputs[passed:]
        if not forward_only:
            residuals[key] = saved

    if len(sources) != 1 or len(sinks) != 1 or call.weighted or call.keeps or forward_only:
        return forward_general
    (source,), ((sink, _),) = sources, sinks

    def forward_between() -> None:
        values[sink], residuals[key] = forward(params[stage], values.pop(source), constants.get(key, ()))

    return forward_between


def _seeded(
    memory: Memory, device: torch.device, position: int, stage: int, microbatch: int, forward: Thunk
) -> Thunk:
    """The forward, what it draws depending on nothing but (seed, step, stage, microbatch).

    The copies of a stage in a second chain count as the first. Without a seed a stage that may
    draw, for all that is known, must not.
    """
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator

    def seeded() -> None:
        if memory.seed is None:
            before = generator.get_state()
            forward()
            if not torch.equal(before, generator.get_state()):
                raise ValueError(f"stage {stage} drew random numbers; pass seed=(seed, step) to the step, two integers")
            return
        text = repr((*memory.seed, position, microbatch)).encode()
        generator.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True))
        forward()

    return seeded


def _backward(memory: Memory, call: StageCall, home: Home, stage: int, microbatch: int, whole: bool) -> Thunk:
    """The thunk of a full backward, or of an input gradient that leaves the rest to a weight gradient."""
    backward = call.program.backward if whole else call.program.backward_input
    key = (stage, microbatch)
    values, residuals, weights = memory.values, memory.residuals, memory.weights
    accumulate = memory.gradients[stage].add
    sinks = [Tag("B", e.stage, stage, microbatch) for e in call.sinks if e.carrying]
    sources = [(Tag("B", stage, e.stage, microbatch), e.carrying, place) for e, place in _places(call.sources, carrying=True)]
    sources = [s for s in sources if s[1] and s[0].destination != BATCH]
    weighted, device = call.weighted, home.device

    def backward_step() -> None:
        cotangents = tuple(t for tag in sinks for t in values.pop(tag))
        if weighted:
            cotangents += weights[key]
        first, second = backward(residuals.pop(key), cotangents)
        if whole:
            accumulate(first)
            gradients = second
        else:
            gradients, residuals[key] = first, second
        for tag, leaves, place in sources:
            values[tag] = _dense(gradients[place], leaves, device)

    return backward_step


def _weight(memory: Memory, call: StageCall, stage: int, microbatch: int) -> Thunk:
    """The thunk of a weight gradient."""
    weight, key = call.program.backward_weight, (stage, microbatch)
    residuals, accumulate = memory.residuals, memory.gradients[stage].add

    def weight_step() -> None:
        accumulate(weight(residuals.pop(key)))

    return weight_step


def _dense(gradients: tuple[torch.Tensor | None, ...], leaves: tuple[LeafSignature, ...], device: torch.device) -> Leaves:
    """Zeros where a gradient is structurally zero: the other end expects a tensor."""
    for gradient in gradients:
        if gradient is None:
            return tuple(
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if g is None else g
                for g, leaf in zip(gradients, leaves, strict=True)
            )
    return gradients


def _places(edges: tuple[Edge, ...], carrying: bool = False) -> Iterator[tuple[Edge, slice]]:
    """Each edge with the place of its leaves in the tuple of all of them."""
    start = 0
    for edge in edges:
        stop = start + len(edge.carrying if carrying else edge.leaves)
        yield edge, slice(start, stop)
        start = stop


def _move_residuals(memory: Memory, home: Home, stage: int, microbatch: int, target: torch.device) -> Thunk | None:
    """The thunk that moves residuals to ``target``; parameters, held by reference, stay where they are."""
    if home.device.type == "cpu":
        return None
    residuals, params, key = memory.residuals, memory.params, (stage, microbatch)

    def move() -> None:
        stay = {t.untyped_storage().data_ptr() for t in params[stage]}
        residuals[key] = tuple(
            t.to(target, non_blocking=True)
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in stay
            else t
            for t in residuals[key]
        )

    return move


def _publish(memory: Memory, home: Home, stage: int, group: tuple[int, ...]) -> Thunk:
    """The thunk that shows a stage's gradients to its copies and to itself."""

    def publish() -> None:
        total = memory.gradients[stage].take(home.differentiated(memory.params[stage]), set())
        for copy in group:
            memory.values[Tag("R", stage, copy, -1)] = total

    return publish


def _collect(memory: Memory, stage: int, group: tuple[int, ...]) -> Thunk:
    """The thunk that adds up what the copies of a stage have shown, in the order of the stages."""

    def collect() -> None:
        for copy in group:
            memory.gradients[stage].add(memory.values.pop(Tag("R", copy, stage, -1)))

    return collect

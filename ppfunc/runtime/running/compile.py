"""Compile a lowered step: the programs of its stages, and one flat list of calls with every lookup resolved.

A call reads and writes the buffers of the running step. `calls.py` makes the calls of stage programs and of
the end of a program. A transport makes the calls of messages: they send from ``buffers.values``, and receive
into it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

from ppfunc.schedule import Instruction, Op
from ppfunc.schedule.dataflow import Dataflow
from ppfunc.schedule.instruction import COMMUNICATION, SENDS, WITHOUT_VALUE, microbatch_of
from ppfunc.schedule.passes.running import send_completion
from ppfunc.stage import Signature, StageProgram
from ppfunc.stage.device import SideStreams, accelerates, available
from ppfunc.stage.errors import warn
from ppfunc.stage.process import act_on_interrupts

from ..lowering.lower import BATCH, LoweredStage, LoweredStep, MessagePart
from ..lowering.stage_programs import StagePrograms
from ..ports.protocols import Call, Transfer, Transport
from ..values.buffers import Buffers, Key, Origin, Tag, moved
from . import calls
from .calls import PlacedCall


class CompiledStep(NamedTuple):
    """Hold a step that is ready to run, without any memory of a call.

    Args:
        lowered: the lowered step of which it is made.
        programs: program of every stage of this process, by (stage of the schedule, microbatch).
        calls: the functions that a step calls, in order.
        places: place in the schedule of each call.
    """

    lowered: LoweredStep
    programs: Mapping[Key, StageProgram]
    calls: tuple[Call, ...]
    places: tuple[Origin, ...]

    def __repr__(self) -> str:
        return f"<compiled {self.lowered.spec.name}, {self.lowered.schedule!r}, {len(self.calls)} calls>"


def compile_step(lowered: LoweredStep, programs: StagePrograms, transport: Transport) -> CompiledStep:
    """Build the program of every stage, and bind every instruction.

    Args:
        lowered: the meaning of every instruction.
        programs: programs of the stages with which the step was lowered.
        transport: carries the messages; its connections are open.

    Raises:
        StageError: the engine cannot serve a stage.
    """
    return bind(lowered, build_programs(lowered, programs), transport)


def bind(lowered: LoweredStep, programs: Mapping[Key, StageProgram], transport: Transport) -> CompiledStep:
    """Bind every instruction to these programs."""
    # What is bound holds stages. Signatures take the place of their tensors: no parameters are kept alive.
    bare = {
        id(low): low._replace(call=low.call._replace(example=tuple(map(Signature.of, low.call.example))))
        for low in lowered.stages.values()
    }
    lowered = lowered._replace(stages={key: bare[id(low)] for key, low in lowered.stages.items()})
    binder = _Binder(lowered, programs, transport)
    placed = binder.bind_all()
    if lowered.spec.shares(lowered.schedule):
        placed += calls.sum_over_places(lowered, transport)
    if lowered.spec.updates:
        placed += calls.update_parameters(lowered, binder.deferred)
    return CompiledStep(
        lowered,
        programs,
        tuple(call for call, _ in placed),
        tuple(place for _, place in placed),
    )


def build_programs(lowered: LoweredStep, programs: StagePrograms) -> dict[Key, StageProgram]:
    """Build the program of every stage, once for equal stages and forms."""
    built: dict[int, StageProgram] = {}  # by identity of the outline, which equal ones share
    for low in lowered.stages.values():
        act_on_interrupts()
        if id(low.outline) not in built:
            built[id(low.outline)] = programs.program(low.call, low.outline)
    if not lowered.schedule.forward_only and (lowered.spec.updates or "grads" in lowered.spec.wants):
        _warn_of_unread(lowered, built)
    return {key: built[id(low.outline)] for key, low in lowered.stages.items()}


def _warn_of_unread(lowered: LoweredStep, built: Mapping[int, StageProgram]) -> None:
    """Warn of parameters on which nothing depends in any microbatch."""
    unread: dict[int, dict[str, None]] = {}  # by stage of the model
    for low in {(low.model_stage, id(low.outline)): low for low in lowered.stages.values()}.values():
        backward: Any = built[id(low.outline)].flat.backward
        while isinstance(backward, partial):  # that of a loss comes before it
            backward = backward.args[0]
        paths = dict.fromkeys(getattr(unwrap(backward), "unread", ()))
        known = unread.setdefault(low.model_stage, paths)
        unread[low.model_stage] = {path: None for path in known if path in paths}
    for stage, paths in unread.items():
        if paths:
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            warn(
                f"stage {stage}: nothing depends on {', '.join([*paths][:3])}{more} for such inputs, so the"
                " gradient is zero; use it, or leave it out where that is so for all inputs"
            )


class _Binder:
    """Binds instructions to calls.

    Attributes:
        deferred: the updates that are left to the end of the program.
    """

    def __init__(
        self, lowered: LoweredStep, programs: Mapping[Key, StageProgram], transport: Transport
    ) -> None:
        self._lowered, self._programs, self._transport = lowered, programs, transport
        self._schedule = lowered.schedule
        self._trains = not self._schedule.forward_only
        self._frees = Op.RESHARD in self._schedule.ops  # parameters, between a forward and its backward
        own = (i for rank in lowered.ranks for step in self._schedule.programs[rank] for i in step)
        self._leaving = frozenset(_key(i) for i in own if i.op is Op.OFFLOAD and self._moves(_key(i)))
        self._fetched = set[Key]()
        self._flow = Dataflow(lowered.schedule)
        # Posted, and not waited for, by the tag of each part.
        self._received: dict[Tag, tuple[Transfer, list[MessagePart]]] = {}
        self._away, self._back = SideStreams(), SideStreams()  # of residuals
        # By stage of the model, the UNSHARD that gathers its parameters; None for the step before.
        self._gathering: dict[int, Origin | None] = {}
        if lowered.spec.updates and not lowered.spec.sharded:
            self._gathering = dict.fromkeys(low.model_stage for low in lowered.stages.values())
        self.deferred: list[Origin] = []

    def bind_all(self) -> list[PlacedCall]:
        """Bind the steps of this process, each after the steps whose values it consumes."""
        schedule, ranks = self._schedule, self._lowered.ranks
        completed: Mapping[int, Mapping[int, Sequence[Instruction]]] = {}
        if len(ranks) < schedule.ranks:
            completed = {rank: send_completion(schedule, rank) for rank in ranks}
        placed: list[PlacedCall] = []
        for rank, position in self._lowered.order:
            placed += self._step(rank, position, completed.get(rank, {}).get(position, ()))
        return placed

    def _step(self, rank: int, position: int, completed: Sequence[Instruction]) -> Iterator[PlacedCall]:
        """Post the messages of a step, compute, wait for the sends that are known to be received."""
        step = self._schedule.programs[rank][position]
        messages = [i for i in step if i.op in COMMUNICATION]
        if batch := [pair for i in messages for pair in self._transfers(i)]:
            place = Origin(rank, position, messages[0])
            packed = [parts for transfer, parts in batch if transfer.outgoing and len(_tags(parts)) > 1]
            yield from _at(place, *(partial(calls.pack, parts) for parts in packed))
            yield from _at(place, self._transport.post([transfer for transfer, _ in batch]))
            for transfer, parts in batch:
                if not transfer.outgoing:
                    self._received |= dict.fromkeys(_tags(parts), (transfer, parts))
        for instruction in step:
            place = Origin(rank, position, instruction)
            if (
                instruction.op is Op.OVERLAP_F_B
                and self._lowered.spec.overlapped is not None
                and self._trains
            ):
                yield from self._overlap(place)
            elif instruction.op in (Op.UNSHARD, Op.RESHARD):
                yield from self._await_gather(place, instruction.stage)
                yield from _at(place, calls.sharding_call(self._lowered, instruction))
                if instruction.op is Op.UNSHARD:
                    self._gathering[self._schedule.model_stages[instruction.stage]] = place
            elif instruction.op in (Op.REDUCE_GRAD, Op.STEP):
                if calls.is_deferred(self._lowered, instruction):
                    self.deferred.append(place)
                else:
                    yield from _at(place, calls.update_call(self._lowered, instruction))
            elif instruction.op is not Op.REDUCE_TIED and instruction.op not in COMMUNICATION:
                # REDUCE_TIED: sums over places end the program, see sum_over_places.
                for part in instruction.parts or (instruction,):
                    yield from self._compute(Origin(rank, position, part))
        for instruction in completed:
            for transfer, _ in self._transfers(instruction):
                place = Origin(rank, position, instruction, transfer.tag)
                yield from _at(place, self._transport.wait(transfer))

    def _await_gather(self, place: Origin, stage: int) -> Iterator[PlacedCall]:
        """Wait for the parameters of a stage before their first use since something may gather them."""
        model_stage = self._schedule.model_stages[stage]
        if model_stage in self._gathering:
            place = (self._gathering.pop(model_stage) or place)._replace(awaited=Op.UNSHARD)
            yield from _at(place, partial(calls.await_params, model_stage))

    # -- communication

    def _transfers(self, instruction: Instruction) -> Iterator[tuple[Transfer, list[MessagePart]]]:
        """Yield the transfer of a SEND or RECV with its parts, if a tensor travels.

        In one process each tag is a transfer: the value is there once it has been computed.
        """
        op, stage, _, other, _, _ = instruction
        parts = self._lowered.message_parts(instruction, self._flow)
        peer = self._flow.routes[op, stage, other].other
        device = self._lowered.form.devices[self._schedule.model_stages[stage]]
        apart = ([MessagePart([tag], part.leaves)] for part in parts for tag in part.tags)
        for some in apart if peer in self._lowered.ranks else [parts]:
            if leaves := tuple(leaf for part in some for leaf in part.leaves):
                yield Transfer(op in SENDS, some[0].tags[0], peer, leaves, device), some

    def _await_messages(self, place: Origin, part: Instruction) -> Iterator[PlacedCall]:
        """Bind the waits for the values of other ranks that a forward or a backward consumes."""
        (stage, microbatch), low = _key(part), self._lowered.stages[_key(part)]
        for edge in low.sources if part.op is Op.F else low.sinks:
            before = edge.shift if part.op is Op.F else 0
            tag = Tag("F" if part.op is Op.F else "B", edge.stage, stage, microbatch - before)
            if tag in self._received:
                transfer, parts = self._received[tag]
                for each in (tags := _tags(parts)):
                    del self._received[each]
                unpack = partial(calls.unpack, parts) if len(tags) > 1 else None
                yield from _at(place._replace(awaited=transfer.tag), self._transport.wait(transfer), unpack)

    # -- instructions that compute

    def _compute(self, place: Origin) -> Iterator[PlacedCall]:
        part, key = place.instruction, _key(place.instruction)
        low = self._lowered.stages[key]
        match part.op:
            case Op.LOAD:
                yield from _at(place, load(low, key))
            case Op.F | Op.B | Op.I | Op.W | Op.RECOMPUTE:
                yield from self._prepare(place, part)
                yield from _at(place, self._run(part), *self._finish(part))
            case Op.OFFLOAD | Op.FETCH if not self._moves(key):
                pass
            case Op.OFFLOAD:
                yield from _at(place, partial(calls.offload, low, key))
            case Op.FETCH:
                self._fetched.add(key)
                yield from _at(place, partial(calls.fetch, low, key, self._back))
            case _:
                raise AssertionError(part)  # lowering refuses it

    def _moves(self, key: Key) -> bool:
        """Tell whether residuals can move to the host: on the CPU they are there."""
        return accelerates(self._lowered.stages[key].device)

    def _prepare(self, place: Origin, part: Instruction) -> Iterator[PlacedCall]:
        """Bind the loads, waits and gathers before a forward, or before a whole or partial backward."""
        key, low = _key(part), self._lowered.stages[_key(part)]
        if part.op is Op.F:  # nothing is left to move after a LOAD
            yield from _at(place._replace(awaited=Op.LOAD), load(low, key))
        if part.op not in WITHOUT_VALUE:
            yield from self._await_messages(place, part)
        yield from self._await_gather(place, part.stage)
        if key in self._fetched:
            self._fetched.remove(key)
            yield from _at(place, partial(calls.await_residuals, low, key))
        if part.op not in (Op.F, Op.RECOMPUTE) and self._frees:
            yield from _at(place, partial(calls.restore_params, low, key))

    def _run(self, part: Instruction) -> Call:
        key, op = _key(part), part.op
        low, program = self._lowered.stages[key], self._programs[key].flat
        if op is Op.RECOMPUTE:
            again = partial(calls.recompute, low, key, calls.fastest(program.forward))
            return calls.seeded(low, key[1], again)
        if op is Op.F:
            forward = self._checkpointed(key, calls.forward(low, program, key, self._trains))
            return calls.seeded(low, key[1], forward)
        run = calls.weight(program, key) if op is Op.W else calls.backward(low, program, key, op is Op.B)
        return calls.unless_left_out(key[1], run, calls.leave_out(low, key, op))

    def _checkpointed(self, key: Key, forward: Call) -> Call:
        low = self._lowered.stages[key]
        return partial(calls.checkpointed, low, key, forward) if key in self._schedule.recomputed else forward

    def _finish(self, part: Instruction) -> Iterator[Call | None]:
        """Release the parameters among residuals that wait for a later part, and begin to move residuals."""
        key, low = _key(part), self._lowered.stages[_key(part)]
        if self._frees and self._trains and part.op in (Op.F, Op.I, Op.RECOMPUTE):
            yield partial(calls.release_params, low, key)
        if part.op is Op.F and key in self._leaving:
            yield partial(calls.begin_offload, low, key, self._away)

    def _overlap(self, place: Origin) -> Iterator[PlacedCall]:
        """Run a forward and a backward together: both wait for their values first."""
        forward, backward = place.instruction.parts
        f_key, b_key = _key(forward), _key(backward)
        f_low, b_low = self._lowered.stages[f_key], self._lowered.stages[b_key]
        f_program, b_program = self._programs[f_key].flat, self._programs[b_key].flat
        overlapped = self._lowered.spec.overlapped
        assert overlapped is not None
        first = calls.forward_call(f_low, f_program, f_key, True)
        second = calls.backward_call(b_low, b_program, b_key, backward.op is Op.B)
        alone = calls.forward(f_low, f_program, f_key, True)
        without = calls.leave_out(b_low, b_key, backward.op)

        def both(buffers: Buffers) -> None:
            outputs, gradients = overlapped(first.run, first.take(buffers), second.run, second.take(buffers))
            first.put(buffers, outputs)
            second.put(buffers, gradients)

        def one(buffers: Buffers) -> None:
            alone(buffers)
            without(buffers)

        run = self._checkpointed(f_key, calls.unless_left_out(b_key[1], both, one))
        run = calls.seeded(f_low, f_key[1], run)
        yield from self._prepare(place, forward)
        yield from self._prepare(place, backward)
        yield from _at(place, run, *self._finish(forward), *self._finish(backward))


def _tags(parts: Sequence[MessagePart]) -> list[Tag]:
    return [tag for part in parts for tag in part.tags]


def _at(place: Origin, *calls: Call | None) -> Iterator[PlacedCall]:
    return ((call, place) for call in calls if call is not None)


def load(low: LoweredStage, key: Key) -> Call | None:
    """Bring inputs and targets of a microbatch to the stage's device."""
    device, tag = low.device, Tag("F", BATCH, *key)
    if device.type == "cpu" and not available():
        return None

    def run_load(buffers: Buffers) -> None:
        if tag in buffers.values:
            buffers.values[tag] = moved(buffers.values[tag], device)
        if key in buffers.extras:
            buffers.extras[key] = moved(buffers.extras[key], device)

    return run_load


def _key(part: Instruction) -> Key:
    return part.stage, microbatch_of(part)

"""Compile a lowered step: the programs of its stages, and one flat list of calls with every lookup resolved.

A call reads and writes the buffers of the running step: `calls.py` has those of stage programs, `shared_sums.py`, `input_gradients.py`
and `update_calls.py` those that end a program, a transport those of messages, which post what is in ``buffers.values``, or put
there what has arrived.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Instruction, Op, Schedule, linearize, parts_of, send_completion
from ppfunc.schedule.instruction import COMMUNICATION, SENDS, TAIL
from ppfunc.stage import Engine, Signature, StageProgram

from .buffers import Buffers, Key, Tag
from .calls import (
    Origin,
    PlacedCall,
    backward,
    backward_call,
    forward,
    forward_call,
    leave_out,
    leave_out_weight,
    load,
    seeded,
    unless_left_out,
    weight,
)
from .gradients import Gradients, Stack, Sum
from .input_gradients import share_input_gradients
from .lowered import BATCH, LoweredStep
from .overlap import Overlapped
from .residual_calls import move_residuals, release_params, restore_params
from .shared_sums import sum_over_places
from .stage_programs import program_of
from .transport import Call, DataTransport, Transfer
from .update_calls import is_late, sharding_call, update_call, update_parameters


class CompiledStep(NamedTuple):
    """A step that is ready to run; it holds no memory of a call.

    Args:
        lowered: where it comes from.
        programs: of every stage of this process, by (stage of the schedule, microbatch).
        calls: what a step runs, in order.
        places: where in the schedule each call comes from.
        run: runs the step function with this program, where it was compiled by itself.
    """

    lowered: LoweredStep
    programs: Mapping[Key, StageProgram]
    calls: tuple[Call, ...]
    places: tuple[Origin, ...]
    run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, as a call of the step function does; where ranks are processes, every one calls what it has compiled.

        Raises:
            ValueError: the arguments have another form than those for which the step was lowered.
            RuntimeError: a step has failed since: what the ranks agreed on has to be agreed on again.
        """
        assert self.run is not None
        return self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<compiled {self.lowered.spec.name}, {self.lowered.schedule!r}, {len(self.calls)} calls>"


def compile_step(lowered: LoweredStep, engine: Engine, data: DataTransport) -> CompiledStep:
    """Build the program of every stage, and bind every instruction.

    Args:
        lowered: what every instruction means.
        engine: how a stage is differentiated.
        data: carries the messages; its connections are open.

    Raises:
        StageError: the engine cannot serve a stage.
    """
    return bind(lowered, build_programs(lowered, engine), data)


def bind(lowered: LoweredStep, programs: Mapping[Key, StageProgram], data: DataTransport, *, tail: bool = True) -> CompiledStep:
    """Bind every instruction to these programs; without a tail, nothing that ends a program."""
    binding = _Binding(lowered, programs, data, set(), [])
    schedule, ranks = lowered.schedule, lowered.ranks
    completed = {rank: send_completion(schedule, rank) for rank in ranks} if len(ranks) < schedule.ranks else {}
    placed: list[PlacedCall] = []
    for rank, position in _order(schedule, ranks):
        placed += _step(binding, rank, position, completed.get(rank, {}).get(position, ()))
    if tail:
        placed += sum_over_places(lowered, data, new_gradients(lowered).signature)
        placed += share_input_gradients(lowered, data)
        placed += update_parameters(lowered, binding.late)
    else:
        placed = [(call, place) for call, place in placed if place.instruction.op not in TAIL]
    bare = {id(low): low._replace(example=tuple(map(Signature.of, low.example))) for low in lowered.stages.values()}
    lowered = lowered._replace(stages={key: bare[id(low)] for key, low in lowered.stages.items()})  # keeps no parameters alive
    return CompiledStep(lowered, binding.programs, tuple(call for call, _ in placed), tuple(place for _, place in placed))


def build_programs(lowered: LoweredStep, engine: Engine) -> dict[Key, StageProgram]:
    """The program of every stage, built once for equal stages and forms."""
    built: dict[Any, StageProgram] = {}
    keys = {id(low): low.function.key(low.example, low.device) for low in lowered.stages.values()}
    for low in lowered.stages.values():
        if keys[id(low)] not in built:
            built[keys[id(low)]] = program_of(low.function, low.example, low.outline, engine, f"stage {low.model}", low.device)
    return {key: built[keys[id(low)]] for key, low in lowered.stages.items()}


def gradients_of(lowered: LoweredStep, buffers: Buffers, model: int) -> Gradients:
    """Make the sum of the gradients of a stage of the model, for one step."""
    made, update = new_gradients(lowered), lowered.spec.update
    if update is None or update.sums is None:
        return made
    leaves = enumerate(lowered.form.params[model].leaves)
    return update.sums(buffers, model, {n: made.signature(leaf) for n, leaf in leaves if leaf.grad})


def new_gradients(lowered: LoweredStep) -> Gradients:
    """Make the sum of the gradients of one stage."""
    return Stack(lowered.schedule.microbatches) if lowered.spec.per_microbatch else Sum(lowered.spec.sum_dtype)


class _Binding(NamedTuple):
    """The context in which an instruction is bound; ``late`` are those that are left to the end of the program."""

    lowered: LoweredStep
    programs: Mapping[Key, StageProgram]
    data: DataTransport
    loaded: set[Key]
    late: list[Origin]

    @property
    def frees(self) -> bool:
        """Whether parameters are freed between a forward and its backward."""
        return Op.RESHARD in self.lowered.schedule.ops


def _order(schedule: Schedule, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The steps of these ranks as ``(rank, position)``, each after what it consumes."""
    if len(ranks) == 1:
        return ((ranks[0], position) for position in range(len(schedule.programs[ranks[0]])))
    return ((rank, position) for rank, position in linearize(schedule) if rank in ranks)


def _step(binding: _Binding, rank: int, position: int, completed: Sequence[Instruction]) -> Iterator[PlacedCall]:
    """The calls of one step: post its messages, compute, wait for the sends that are known to be received."""
    lowered, data = binding.lowered, binding.data
    step, overlapped = lowered.schedule.programs[rank][position], lowered.spec.overlapped
    posted = [i for i in step if i.op in COMMUNICATION]
    if batch := [t for i in posted for t in _transfers(lowered, i)]:
        yield from _at(Origin(rank, position, posted[0]), data.post(batch))
    for instruction in step:
        if instruction.op is Op.OVERLAP_F_B and overlapped is not None and not lowered.schedule.forward_only:
            yield from _overlap(binding, overlapped, Origin(rank, position, instruction))
        elif instruction.op not in COMMUNICATION:
            for part in parts_of(instruction):
                yield from _instruction(binding, Origin(rank, position, part))
    for instruction in completed:
        for transfer in _transfers(lowered, instruction):
            yield from _at(Origin(rank, position, instruction, transfer.tag), data.wait_send(transfer))


def _at(place: Origin, *calls: Call | None) -> Iterator[PlacedCall]:
    return ((call, place) for call in calls if call is not None)


# -- communication -------------------------------------------------------------------------------------------------


def _transfers(lowered: LoweredStep, instruction: Instruction) -> Iterator[Transfer]:
    """The transfer of a SEND or RECV; none where no tensor travels that edge."""
    edge, low = lowered.edge_of(instruction), lowered.stages[_key(instruction)]
    if leaves := edge.leaves if instruction.op in (Op.SEND_F, Op.RECV_F) else edge.carrying:
        peer = lowered.schedule.placement[edge.stage]
        yield Transfer(instruction.op in SENDS, tag_of(lowered.schedule, instruction), peer, leaves, low.device)


def tag_of(schedule: Schedule, message: Instruction) -> Tag:
    """The name of the message of a SEND or RECV."""
    stage, other = message.stage, schedule.other_end(message)
    assert other is not None and message.microbatch is not None
    source, destination = (stage, other) if message.op in SENDS else (other, stage)
    return Tag("F" if message.op in (Op.SEND_F, Op.RECV_F) else "B", source, destination, message.microbatch)


def _arrivals(binding: _Binding, place: Origin, part: Instruction) -> Iterator[PlacedCall]:
    """Wait for what a forward or a backward consumes of other ranks."""
    stage, microbatch = _key(part)
    low, ahead = binding.lowered.stages[stage, microbatch], part.op is Op.F
    for edge in low.sources if ahead else low.sinks:
        leaves = edge.leaves if ahead else edge.carrying
        peer = place.rank if edge.stage == BATCH else binding.lowered.schedule.placement[edge.stage]
        if leaves and peer != place.rank:
            tag = Tag("F" if ahead else "B", edge.stage, stage, microbatch)
            yield from _at(place._replace(awaited=tag), binding.data.wait_recv(Transfer(False, tag, peer, leaves, low.device)))


# -- instructions that compute -------------------------------------------------------------------------------------


def _instruction(binding: _Binding, place: Origin) -> Iterator[PlacedCall]:
    part = place.instruction
    if part.op is Op.REDUCE_TIED:
        return  # sums over places end the program, see sum_over_places
    if part.op in (Op.UNSHARD, Op.RESHARD):
        yield from _at(place, sharding_call(binding.lowered, part))
        return
    if part.op in (Op.REDUCE_GRAD, Op.STEP):
        if is_late(binding.lowered, part):
            binding.late.append(place)
        else:
            yield from _at(place, update_call(binding.lowered, part))
        return
    key = _key(part)
    low, program = binding.lowered.stages[key], binding.programs[key].flat
    match part.op:
        case Op.LOAD:
            yield from _at(place, _load(binding, key))
        case Op.F:
            yield from _at(place, _load(binding, key))
            yield from _arrivals(binding, place, part)
            keeps = not binding.lowered.schedule.forward_only
            run = forward(low, program, key, keeps)
            yield from _at(place, seeded(low, key[1], run), release_params(low, key) if binding.frees and keeps else None)
        case Op.B | Op.I:
            yield from _arrivals(binding, place, part)
            yield from _at(place, restore_params(low, key) if binding.frees else None)
            whole = part.op is Op.B
            yield from _at(place, unless_left_out(key[1], backward(low, program, key, whole), leave_out(low, key, whole)))
            yield from _at(place, release_params(low, key) if binding.frees and part.op is Op.I else None)
        case Op.W:
            run = unless_left_out(key[1], weight(program, key), leave_out_weight(key))
            yield from _at(place, restore_params(low, key) if binding.frees else None, run)
        case Op.OFFLOAD | Op.FETCH:
            target = torch.device("cpu") if part.op is Op.OFFLOAD else low.device
            yield from _at(place, move_residuals(low, key, target))
        case _:
            raise AssertionError(part)  # lowering refuses it


def _overlap(binding: _Binding, run: Overlapped, place: Origin) -> Iterator[PlacedCall]:
    """A forward and a backward that the caller's function runs as one: both wait for what they consume first."""
    ahead, back = place.instruction.parts
    (first_low, first_program), (second_low, second_program) = (
        (binding.lowered.stages[key], binding.programs[key].flat) for key in (_key(ahead), _key(back))
    )
    yield from _at(place, _load(binding, _key(ahead)))
    yield from _arrivals(binding, place, ahead)
    yield from _arrivals(binding, place, back)
    first = forward_call(first_low, first_program, _key(ahead), True)
    second = backward_call(second_low, second_program, _key(back), back.op is Op.B)
    alone, without = forward(first_low, first_program, _key(ahead), True), leave_out(second_low, _key(back), back.op is Op.B)

    def both(buffers: Buffers) -> None:
        outputs, gradients = run(first.run, first.take(buffers), second.run, second.take(buffers))
        first.put(buffers, outputs)
        second.put(buffers, gradients)

    def one(buffers: Buffers) -> None:
        alone(buffers)
        without(buffers)

    if binding.frees:
        yield from _at(place, restore_params(second_low, _key(back)))
    yield from _at(place, seeded(first_low, _key(ahead)[1], unless_left_out(_key(back)[1], both, one)))
    if binding.frees:
        yield from _at(place, release_params(first_low, _key(ahead)))
        yield from _at(place, release_params(second_low, _key(back)) if back.op is Op.I else None)


def _load(binding: _Binding, key: Key) -> Call | None:
    """Bring inputs and targets of a microbatch to the stage's device, once."""
    if key in binding.loaded:
        return None
    binding.loaded.add(key)
    return load(binding.lowered.stages[key], key)


def _key(part: Instruction) -> Key:
    """Stage and microbatch of an instruction that has both."""
    assert part.microbatch is not None
    return part.stage, part.microbatch

"""Bind the update of parameters: REDUCE_GRAD, STEP, UNSHARD and RESHARD."""

from collections.abc import Iterator, Sequence

from ppfunc.schedule import Instruction, Op

from .calls import Origin, PlacedCall
from .losses import losses_of
from .lowered import LoweredStep
from .ties import shared_leaves
from .transport import Call


def update_parameters(lowered: LoweredStep, updates: Sequence[Origin]) -> Iterator[PlacedCall]:
    """Bind the REDUCE_GRAD and STEP that cannot be carried out where the schedule has them; see :func:`update_call`."""
    update, rank = lowered.spec.update, lowered.ranks[-1]
    if update is None:  # lowering refuses both
        return
    reductions, steps = ([place for place in updates if place.instruction.op is op] for op in (Op.REDUCE_GRAD, Op.STEP))
    yield from ((call, place) for place in reductions if (call := update_call(lowered, place.instruction)))
    made = [(call, place) for place in steps if (call := update_call(lowered, place.instruction))]
    end = Instruction(Op.STEP, lowered.schedule.stages_of(rank)[-1])
    last = Origin(rank, len(lowered.schedule.programs[rank]) - 1, end)
    joined = [(lambda buffers: update.join(buffers, losses_of(lowered, buffers)), last)]
    yield from [*joined, *made] if update.together else [*made, *joined]


def is_late(lowered: LoweredStep, instruction: Instruction) -> bool:
    """Whether a REDUCE_GRAD or STEP has to wait until the program has run: for a sum over places, or for the other stages."""
    update, model = lowered.spec.update, lowered.schedule.model_stages
    assert update is not None
    shared = {model[s] for leaf in shared_leaves(lowered.schedule, lowered.form.params, lowered.spec.tied) for s, _ in leaf.holders}
    return model[instruction.stage] in shared or (instruction.op is Op.STEP and update.together)


def update_call(lowered: LoweredStep, instruction: Instruction) -> Call | None:
    """The call of a REDUCE_GRAD or STEP; None where that of another replica in this process does it."""
    schedule, update, model = lowered.schedule, lowered.spec.update, lowered.schedule.model_stages[instruction.stage]
    assert update is not None
    own = (s for s, k in enumerate(schedule.model_stages) if k == model and schedule.placement[s] in lowered.ranks)
    if instruction.stage != (first := next(own)):
        return None
    if instruction.op is Op.STEP:
        return lambda buffers: update.step(buffers, model)
    numbers = lowered.differentiated(first)
    return lambda buffers: update.reduce(buffers, model, buffers.gradients[first], numbers)


def sharding_call(lowered: LoweredStep, instruction: Instruction) -> Call:
    """The call of an UNSHARD or RESHARD."""
    update, stage = lowered.spec.update, lowered.schedule.model_stages[instruction.stage]
    assert update is not None and update.unshard is not None
    unshard = update.unshard
    if instruction.op is Op.UNSHARD:
        return lambda buffers: unshard(buffers, stage)
    return lambda buffers: buffers.params.update({stage: buffers.bare[stage]})

"""Make the calls that end a program: gradients of the inputs are shared, parameters are updated.

The sums over the places of a parameter come before them, see :mod:`ppfunc.runtime.agreement.shared_sums`.
"""

from collections.abc import Iterator, Sequence

import torch

from ppfunc.schedule import Instruction, Op

from ..agreement.ties import shared_leaves
from ..execution.buffers import Buffers, ParameterUpdate, Tag
from ..transport.protocols import Call, DataTransport, Transfer
from .calls import Origin, PlacedCall
from .lowered import BATCH, LoweredStep


def share_input_gradients(lowered: LoweredStep, data: DataTransport) -> Iterator[PlacedCall]:
    """Exchange gradients of the inputs between the processes where chains begin: each gets all of them."""
    schedule, home = lowered.schedule, lowered.schedule.placement
    microbatches = {chain.stages[0]: chain.microbatches for chain in schedule.chains}
    here = [stage for stage in microbatches if home[stage] in lowered.ranks]
    if "input_grads" not in lowered.spec.wants or len(here) in (0, len(microbatches)):
        return
    gradients: dict[Tag, Tag] = {}  # by message, where the buffers have the gradient that it carries
    batch: list[Transfer] = []
    wanted = [tuple(leaf for leaf in s.with_grad().leaves if leaf.grad) for s in lowered.form.inputs or ()]
    for own, other in ((own, other) for own in here for other in microbatches if other not in here):
        device = lowered.form.devices[schedule.model_stages[own]]
        for source, destination in ((own, other), (other, own)):
            for m in (m for m in microbatches[source] if wanted[m]):
                tag = Tag("R", source, destination, m)
                gradients[tag] = Tag("B", source, BATCH, m)
                batch.append(Transfer(source == own, tag, home[other], wanted[m], device))

    def publish(buffers: Buffers) -> None:
        buffers.values.update((t.tag, buffers.values[gradients[t.tag]]) for t in batch if t.outgoing)

    def collect(buffers: Buffers) -> None:
        buffers.values.update((gradients[t.tag], buffers.values.pop(t.tag)) for t in batch if not t.outgoing)

    rank = home[here[0]]
    place = Origin(rank, len(schedule.programs[rank]) - 1, schedule.programs[rank][-1][-1])
    batch.sort(key=lambda transfer: transfer.tag)  # one order at both ends
    received = [data.wait_recv(t) for t in batch if not t.outgoing]
    sent = [data.wait_send(t) for t in batch if t.outgoing]
    # All are posted before any is waited for, so that no rank waits before it has sent its own.
    calls = [publish, data.post(batch), *received, collect, *sent]
    yield from ((call, place) for call in calls if call is not None)


# -- the update of parameters


def update_parameters(lowered: LoweredStep, places: Sequence[Origin]) -> Iterator[PlacedCall]:
    """Bind the REDUCE_GRAD and STEP that :func:`is_late` leaves to the end of the program."""
    updates, rank = lowered.spec.updates, lowered.ranks[-1]
    if updates is None:  # lowering refuses both
        return
    late: dict[Op, list[PlacedCall]] = {Op.REDUCE_GRAD: [], Op.STEP: []}
    for place in places:
        call = update_call(lowered, place.instruction)
        if call is not None:
            late[place.instruction.op].append((call, place))
    end = Instruction(Op.STEP, lowered.schedule.stages_of(rank)[-1])
    place = Origin(rank, len(lowered.schedule.programs[rank]) - 1, end)
    join = (lambda buffers: _update(buffers).join(buffers, losses_of(lowered, buffers)), place)
    yield from late[Op.REDUCE_GRAD]
    yield from [join, *late[Op.STEP]] if updates.together else [*late[Op.STEP], join]


def is_late(lowered: LoweredStep, instruction: Instruction) -> bool:
    """Tell whether a REDUCE_GRAD or STEP has to wait until the program has run: for a sum over places, or for
    the other stages.
    """
    updates, model_stages = lowered.spec.updates, lowered.schedule.model_stages
    assert updates is not None
    if instruction.op is Op.STEP and updates.together:
        return True
    leaves = shared_leaves(lowered.schedule, lowered.form.params, lowered.spec.tied)
    shared = {model_stages[stage] for leaf in leaves for stage, _ in leaf.holders}
    return model_stages[instruction.stage] in shared


def update_call(lowered: LoweredStep, instruction: Instruction) -> Call | None:
    """Make the call of a REDUCE_GRAD or STEP; None where that of another replica in this process does it."""
    schedule = lowered.schedule
    model_stage = schedule.model_stages[instruction.stage]
    first = next(
        stage
        for stage, k in enumerate(schedule.model_stages)
        if k == model_stage and schedule.placement[stage] in lowered.ranks
    )
    if instruction.stage != first:
        return None
    if instruction.op is Op.STEP:
        return lambda buffers: _update(buffers).step(buffers, model_stage)
    numbers = lowered.differentiated(first)
    return lambda buffers: _update(buffers).reduce(buffers, model_stage, buffers.gradients[first], numbers)


def sharding_call(lowered: LoweredStep, instruction: Instruction) -> Call:
    """Make the call of an UNSHARD or RESHARD."""
    model_stage = lowered.schedule.model_stages[instruction.stage]
    if instruction.op is Op.UNSHARD:
        return lambda buffers: _update(buffers).unshard(buffers, model_stage)
    return lambda buffers: buffers.params.update({model_stage: buffers.bare[model_stage]})


def _update(buffers: Buffers) -> ParameterUpdate:
    assert buffers.update is not None  # of a step with updates
    return buffers.update


# -- the losses of a program that has run


def loss_dtype(lowered: LoweredStep, stage: int) -> torch.dtype:
    """Return the dtype in which a stage makes its losses, and their gradients begin."""
    losses = (low.loss for (s, _), low in lowered.stages.items() if s == stage and low.loss is not None)
    return next(losses).leaves[0].dtype


def losses_of(lowered: LoweredStep, buffers: Buffers) -> dict[int, torch.Tensor]:
    """Return the losses of a step, each times the weight of its microbatch, by stage of this process.

    A loss of weight 0 counts as 0, also where it is NaN, as the mean over no tokens is.
    """
    weighted: dict[int, torch.Tensor] = {}
    for stage, part in lowered.losses.items():
        chain = next(chain for chain in lowered.schedule.chains if stage in chain.stages)
        own = [m for m in chain.microbatches if lowered.stages[stage, m].loss is not None]
        rows = [buffers.kept[stage, m][0] for m in own]
        rows = [
            torch.zeros_like(loss) if m in buffers.left_out else loss
            for m, loss in zip(own, rows, strict=True)
        ]
        losses = torch.stack(rows).to(part.leaf.dtype)
        weights = torch.stack([buffers.weights[stage][m] for m in own])
        weights = weights.view(-1, *(1,) * (losses.ndim - 1))
        losses = torch.where(weights == 0, torch.zeros_like(losses), losses * weights)
        weighted[stage] = losses
    return weighted

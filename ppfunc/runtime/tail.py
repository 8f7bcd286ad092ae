"""Bind what ends a program: sums over the places of a parameter, gradients of the inputs, and the calls of an update."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch

from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature

from .buffers import Buffers, Leaves, Tag
from .calls import Origin
from .errors import AgreementError
from .functorch import transformed
from .lowered import BATCH, LoweredStep
from .ties import DIGEST, SharedLeaf, digest, same_bits, shared_leaves
from .transport import Call, DataTransport, Transfer

PlacedCall = tuple[Call, Origin]


def sum_over_places(lowered: LoweredStep, data: DataTransport, summed: Callable[[LeafSignature], LeafSignature]) -> Iterator[PlacedCall]:
    """Sum the gradient of every shared leaf over its places, in the order of the stages, and compare its values.

    Every process gets the sum, in the gradients of the first stage that it runs of that part of the model. A message
    also carries a digest of the leaves.

    Args:
        summed: signature of the gradient, over all microbatches, of a parameter of a signature.
    """
    schedule, home, model = lowered.schedule, lowered.schedule.placement, lowered.schedule.model_stages
    leaves = shared_leaves(schedule, lowered.form.params, lowered.spec.tied)
    stages = sorted({stage for leaf in leaves for stage, _ in leaf.holders})
    here = [stage for stage in stages if home[stage] in lowered.ranks]
    messages: list[_Message] = []
    for sender, receiver in ((a, b) for a in stages for b in stages if (a in here) != (b in here)):
        own, other = (sender, receiver) if sender in here else (receiver, sender)
        if parts := tuple(_common(leaves, sender, receiver, own)):
            params = lowered.form.params[model[own]].leaves
            gradients = [summed(params[n]) for _, _, n in parts if params[n].grad and not schedule.forward_only]
            tag, device = Tag("R", sender, receiver, -1), lowered.form.devices[model[own]]
            messages.append(_Message(Transfer(own == sender, tag, home[other], (*gradients, DIGEST), device), own, parts))
    yield from ((_compare(lowered, leaf), _last_place(lowered, here[0])) for leaf in leaves if len(set(_held(lowered, leaf))) > 1)
    for stage in here:
        outgoing = [message for message in messages if message.transfer.outgoing and message.own == stage]
        yield _publish(lowered, stage, outgoing), _last_place(lowered, stage)
    if here and (messages or not schedule.forward_only):
        collect = _collect(lowered, leaves, here, [message for message in messages if not message.transfer.outgoing])
        yield from _exchange(_last_place(lowered, here[0]), data, [message.transfer for message in messages], collect)


class _Message(NamedTuple):
    """Gradients of the leaves that two stages share, and a digest of their values.

    Args:
        transfer: this end.
        own: the stage at this end.
        parts: of every gradient the leaf, the number of the holder among its holders, and the leaf's number at this end.
    """

    transfer: Transfer
    own: int
    parts: tuple[tuple[SharedLeaf, int, int], ...]

    def digest(self, params: Leaves) -> torch.Tensor:
        """Of the values at this end."""
        return digest(tuple(params[n] for _, _, n in self.parts))


def _common(leaves: Sequence[SharedLeaf], sender: int, receiver: int, own: int) -> Iterator[tuple[SharedLeaf, int, int]]:
    """The parts of a message from one stage to another, as the end ``own`` sees them."""
    for leaf in leaves:
        mine = [n for stage, n in leaf.holders if stage == own and n is not None]
        theirs = receiver if own == sender else sender
        if mine and any(stage == theirs for stage, _ in leaf.holders):
            for h, (stage, number) in enumerate(leaf.holders):
                if stage == sender:
                    yield leaf, h, mine[0] if number is None or own != sender else number


def _held(lowered: LoweredStep, leaf: SharedLeaf) -> list[tuple[int, int]]:
    """Where this process holds a leaf: (stage of the model, number)."""
    schedule = lowered.schedule
    return [(schedule.model_stages[s], n) for s, n in leaf.holders if n is not None and schedule.placement[s] in lowered.ranks]


def _compare(lowered: LoweredStep, leaf: SharedLeaf) -> Call:
    """Compare the values of a tied parameter at the places of this process."""
    first, *others = dict.fromkeys(_held(lowered, leaf))

    def compare(buffers: Buffers) -> None:
        value = buffers.kept_params(first[0])[first[1]]
        for model, number in others:
            other = buffers.kept_params(model)[number]
            if transformed(other) != transformed(value):
                raise ValueError(f"{leaf.name} is transformed by torch.func in stage {first[0]} or {model} alone; map both places")
            if other is not value and not transformed(value) and not same_bits(other.to(value.device), value):
                raise AgreementError(f"{leaf.name} has other values in stage {first[0]} than in stage {model}; give both places the same")

    return compare


def _publish(lowered: LoweredStep, stage: int, outgoing: Sequence[_Message]) -> Call:
    """Take the gradients of a stage out of its sum, for itself and for stages of other processes that share some."""
    model, training, wanted = lowered.schedule.model_stages[stage], not lowered.schedule.forward_only, wanted_of(lowered, stage)

    def publish(buffers: Buffers) -> None:
        params = buffers.params[model]
        total = buffers.gradients[stage].take(tuple(params[n] for n in wanted), torch.clone) if training else ()
        gradients = dict(zip(wanted, total, strict=training))
        buffers.values[Tag("R", stage, stage, -1)] = total
        for message in outgoing:
            sent = tuple(gradients[n] for _, _, n in message.parts if n in gradients)
            buffers.values[message.transfer.tag] = (*sent, message.digest(buffers.kept_params(model)).to(message.transfer.device))

    return publish


def _collect(lowered: LoweredStep, leaves: Sequence[SharedLeaf], here: Sequence[int], incoming: Sequence[_Message]) -> Call:
    """Sum what the places of every leaf have published, and give the first stage of each part of the model the sums."""
    model, wanted = lowered.schedule.model_stages, {stage: wanted_of(lowered, stage) for stage in here}
    firsts = {model[stage]: stage for stage in reversed(here)}

    def arrived(buffers: Buffers, message: _Message) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        *gradients, theirs = buffers.values.pop(message.transfer.tag)
        mine = message.digest(buffers.kept_params(model[message.own]))
        if not torch.equal(mine, theirs.cpu()):
            sender = message.transfer.tag.source
            raise AgreementError(
                f"the parameters of stage {model[message.own]} differ between the processes that hold them: their digests are "
                f"{_short(mine)} here and {_short(theirs)} where the schedule's stage {sender} lives; give all the same values"
            )
        carrying = [(leaf.name, h) for leaf, h, n in message.parts if n in wanted[message.own]]
        return zip(carrying, gradients, strict=bool(gradients))

    def collect(buffers: Buffers) -> None:
        given = {key: gradient for message in incoming for key, gradient in arrived(buffers, message)}
        own = {s: dict(zip(wanted[s], buffers.values.pop(Tag("R", s, s, -1)), strict=False)) for s in here}
        for leaf in leaves if not lowered.schedule.forward_only else ():
            mine = [(s, n) for s, n in leaf.holders if s in own and n is not None]
            if mine and mine[0][1] in own[mine[0][0]]:
                parts = (own[s][n] if s in own and n is not None else given[leaf.name, h] for h, (s, n) in enumerate(leaf.holders))
                total = reduce(torch.add, parts)
                for s, n in mine:
                    if s == firsts[model[s]]:
                        own[s][n] = total
        for stage in firsts.values() if not lowered.schedule.forward_only else ():
            buffers.gradients[stage].merge(tuple(own[stage].values()))

    return collect


def wanted_of(lowered: LoweredStep, stage: int) -> tuple[int, ...]:
    """The numbers of the leaves of a stage that have gradients."""
    leaves = lowered.form.params[lowered.schedule.model_stages[stage]].leaves
    return () if lowered.schedule.forward_only else tuple(n for n, leaf in enumerate(leaves) if leaf.grad)


def _short(value: torch.Tensor) -> str:
    return bytes(value.cpu().tolist()).hex()[:12]


def share_input_gradients(lowered: LoweredStep, data: DataTransport) -> Iterator[PlacedCall]:
    """Exchange gradients of the inputs with the processes where other chains begin, so that each has those of the whole batch."""
    schedule, home = lowered.schedule, lowered.schedule.placement
    firsts = {chain.stages[0]: chain.microbatches for chain in schedule.chains}
    here = [stage for stage in firsts if home[stage] in lowered.ranks]
    if "input_grads" not in lowered.spec.wants or len(here) in (0, len(firsts)):
        return
    moved: dict[Tag, Tag] = {}  # by message, the gradient that it carries
    batch: list[Transfer] = []
    wanted = [tuple(leaf for leaf in s.with_grad().leaves if leaf.grad) for s in lowered.form.inputs or ()]
    for own, other in ((own, other) for own in here for other in firsts if other not in here):
        for m in (m for stage in (own, other) for m in firsts[stage] if wanted[m]):
            outgoing = m in firsts[own]
            tag = Tag("R", own, other, m) if outgoing else Tag("R", other, own, m)
            moved[tag] = Tag("B", tag.source, BATCH, m)
            batch.append(Transfer(outgoing, tag, home[other], wanted[m], lowered.form.devices[schedule.model_stages[own]]))

    def publish(buffers: Buffers) -> None:
        buffers.values.update((t.tag, buffers.values[moved[t.tag]]) for t in batch if t.outgoing)

    def collect(buffers: Buffers) -> None:
        buffers.values.update((moved[t.tag], buffers.values.pop(t.tag)) for t in batch if not t.outgoing)

    place = _last_place(lowered, here[0])._replace(instruction=schedule.programs[home[here[0]]][-1][-1])
    yield publish, place
    yield from _exchange(place, data, batch, collect)


def _exchange(place: Origin, data: DataTransport, batch: Sequence[Transfer], collect: Call) -> Iterator[PlacedCall]:
    """Post messages all together, in one order at both ends, so that no rank waits before it has sent its own parts;
    ``collect`` runs once all have arrived."""
    batch = sorted(batch, key=lambda transfer: transfer.tag)
    calls = [data.post(batch)] if batch else []
    calls += [data.wait_recv(transfer) for transfer in batch if not transfer.outgoing]
    calls += [collect]
    calls += [data.wait_send(transfer) for transfer in batch if transfer.outgoing]
    return ((call, place) for call in calls if call is not None)


def _last_place(lowered: LoweredStep, stage: int) -> Origin:
    rank = lowered.schedule.placement[stage]
    return Origin(rank, len(lowered.schedule.programs[rank]) - 1, Instruction(Op.REDUCE_TIED, stage))

"""Sum the gradients of a shared parameter over its places, and compare its values there, at the end of a program.

In every process: each stage *publishes* the sums over its microbatches, to itself and, with a digest of the values, to stages of other
processes that hold some of the leaves too; all messages are posted at once; then the process *collects*: it compares the digests,
and adds up the gradients of all places of a leaf in the order of the stages, so that every process has the same bits. Steps that
update parameters compare them where the ranks meet, and send no digests.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch

from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature

from .buffers import Buffers, Leaves, Tag
from .calls import Origin, PlacedCall, post_and_collect
from .errors import AgreementError
from .functorch import transformed
from .lowered import LoweredStep
from .ties import DIGEST, SharedLeaf, digest, same_bits, shared_leaves
from .transport import Call, DataTransport, Transfer


class _PlacedGradient(NamedTuple):
    """One place of a shared leaf, whose gradient a message carries.

    Args:
        leaf: the leaf.
        place: the number of the sender's place among the holders of the leaf.
        number: of the leaf among the parameters of the stage at this end.
    """

    leaf: SharedLeaf
    place: int
    number: int


class _Message(NamedTuple):
    """Gradients of the leaves that two stages share, and a digest of their values if these are compared.

    Args:
        transfer: this end.
        own: the stage at this end.
        numbers: of the leaves of that stage whose values are compared, none where nothing is.
        carried: what each gradient is of.
    """

    transfer: Transfer
    own: int
    numbers: tuple[int, ...]
    carried: tuple[_PlacedGradient, ...]

    def digest(self, params: Leaves) -> torch.Tensor:
        """Of the values at this end."""
        return digest(tuple(params[number] for number in self.numbers))


def sum_over_places(lowered: LoweredStep, data: DataTransport, summed: Callable[[LeafSignature], LeafSignature]) -> Iterator[PlacedCall]:
    """Sum the gradient of every shared leaf over its places, into the first stage of each part of the model that this process runs.

    Args:
        summed: signature of the gradient, over all microbatches, of a parameter of a signature.
    """
    leaves = shared_leaves(lowered.schedule, lowered.form.params, lowered.spec.tied)
    stages = sorted({stage for leaf in leaves for stage, _ in leaf.holders})
    here = [stage for stage in stages if lowered.schedule.placement[stage] in lowered.ranks]
    messages = list(_messages(lowered, leaves, stages, summed))
    for leaf in leaves if lowered.spec.update is None else ():
        if len(places := _places_here(lowered, leaf)) > 1:
            yield _compare(leaf, places), _last_place(lowered, here[0])
    if not messages and lowered.schedule.forward_only:
        return
    for stage in here:
        outgoing = [message for message in messages if message.transfer.outgoing and message.own == stage]
        yield _publish(lowered, stage, outgoing), _last_place(lowered, stage)
    if here:
        collect = _collect(lowered, leaves, here, [message for message in messages if not message.transfer.outgoing])
        yield from post_and_collect(_last_place(lowered, here[0]), data, [message.transfer for message in messages], collect)


def _messages(
    lowered: LoweredStep, leaves: Sequence[SharedLeaf], stages: Sequence[int], summed: Callable[[LeafSignature], LeafSignature]
) -> Iterator[_Message]:
    """The messages between stages of this process and of others, in both directions."""
    schedule, home, compared = lowered.schedule, lowered.schedule.placement, lowered.spec.update is None
    for sender, receiver in ((a, b) for a in stages for b in stages if (home[a] in lowered.ranks) != (home[b] in lowered.ranks)):
        own, other = (sender, receiver) if home[sender] in lowered.ranks else (receiver, sender)
        if parts := tuple(_parts(leaves, sender, own, other)):
            model = schedule.model_stages[own]
            params = lowered.form.params[model].leaves
            carried = tuple(part for part in parts if params[part.number].grad and not schedule.forward_only)
            forms = (*(summed(params[part.number]) for part in carried), *[DIGEST] * compared)
            transfer = Transfer(own == sender, Tag("R", sender, receiver, -1), home[other], forms, lowered.form.devices[model])
            if forms:
                yield _Message(transfer, own, tuple(part.number for part in parts if compared), carried)


def _parts(leaves: Sequence[SharedLeaf], sender: int, own: int, other: int) -> Iterator[_PlacedGradient]:
    """The places that a stage has of the leaves that both ends hold."""
    for leaf in leaves:
        numbers = [n for stage, n in leaf.holders if stage == own and n is not None]
        if numbers and any(stage == other for stage, _ in leaf.holders):
            for place, (stage, number) in enumerate(leaf.holders):
                if stage == sender:
                    yield _PlacedGradient(leaf, place, number if own == sender and number is not None else numbers[0])


def _places_here(lowered: LoweredStep, leaf: SharedLeaf) -> list[tuple[int, int]]:
    """Where this process holds a leaf: (stage of the model, number), each once."""
    schedule = lowered.schedule
    held = ((s, n) for s, n in leaf.holders if n is not None and schedule.placement[s] in lowered.ranks)
    return list(dict.fromkeys((schedule.model_stages[s], n) for s, n in held))


def _compare(leaf: SharedLeaf, places: Sequence[tuple[int, int]]) -> Call:
    """Compare the values of a tied parameter at the places of this process."""
    (first, at), *others = places

    def compare(buffers: Buffers) -> None:
        value = buffers.kept_params(first)[at]
        for model, number in others:
            other = buffers.kept_params(model)[number]
            if transformed(other) != transformed(value):
                raise ValueError(f"{leaf.name} is transformed by torch.func in stage {first} or {model} alone; map both places")
            if other is not value and not transformed(value) and not same_bits(other.to(value.device), value):
                raise AgreementError(f"{leaf.name} has other values in stage {first} than in stage {model}; give both places the same")

    return compare


def _publish(lowered: LoweredStep, stage: int, outgoing: Sequence[_Message]) -> Call:
    """Take the gradients of a stage out of its sum, for itself and for stages of other processes that share some."""
    model, training, numbers = lowered.schedule.model_stages[stage], not lowered.schedule.forward_only, lowered.differentiated(stage)

    def publish(buffers: Buffers) -> None:
        params = buffers.params[model]
        total = buffers.gradients[stage].take(tuple(params[n] for n in numbers), torch.clone) if training else ()
        gradients = dict(zip(numbers, total, strict=True))
        buffers.values[Tag("R", stage, stage, -1)] = total
        for message in outgoing:
            sent = tuple(gradients[part.number] for part in message.carried)
            told = [message.digest(buffers.kept_params(model)).to(message.transfer.device)] if message.numbers else []
            buffers.values[message.transfer.tag] = (*sent, *told)

    return publish


def _collect(lowered: LoweredStep, leaves: Sequence[SharedLeaf], here: Sequence[int], incoming: Sequence[_Message]) -> Call:
    """Sum what the places of every leaf have published, and give the first stage of each part of the model the sums."""
    model, numbers = lowered.schedule.model_stages, {stage: lowered.differentiated(stage) for stage in here}
    firsts = set({model[stage]: stage for stage in reversed(here)}.values())

    def collect(buffers: Buffers) -> None:
        placed = {key: gradient for message in incoming for key, gradient in _received(lowered, buffers, message)}
        own = {s: dict(zip(numbers[s], buffers.values.pop(Tag("R", s, s, -1)), strict=True)) for s in here}
        for leaf in leaves:
            held = [(place, s, n) for place, (s, n) in enumerate(leaf.holders) if s in own and n in own[s]]
            placed.update(((leaf.name, place), own[s][n]) for place, s, n in held)
            if held:
                total = reduce(torch.add, (placed[leaf.name, place] for place in range(len(leaf.holders))))
                for s, n in ((s, n) for _, s, n in held if s in firsts):
                    own[s][n] = total
        for stage in firsts if not lowered.schedule.forward_only else ():
            buffers.gradients[stage].put_back(tuple(own[stage].values()))

    return collect


def _received(lowered: LoweredStep, buffers: Buffers, message: _Message) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    """The gradients of a message that has arrived, by leaf and place.

    Raises:
        AgreementError: the sender has other values.
    """
    model = lowered.schedule.model_stages[message.own]
    received = buffers.values.pop(message.transfer.tag)
    if message.numbers and not torch.equal(mine := message.digest(buffers.kept_params(model)), (theirs := received[-1]).cpu()):
        raise AgreementError(
            f"the parameters of stage {model} differ between the processes that hold them: their digests are {_short(mine)} here and "
            f"{_short(theirs)} where the schedule's stage {message.transfer.tag.source} lives; give all the same values"
        )
    return zip(((part.leaf.name, part.place) for part in message.carried), received, strict=False)


def _short(value: torch.Tensor) -> str:
    return bytes(value.cpu().tolist()).hex()[:12]


def _last_place(lowered: LoweredStep, stage: int) -> Origin:
    rank = lowered.schedule.placement[stage]
    return Origin(rank, len(lowered.schedule.programs[rank]) - 1, Instruction(Op.REDUCE_TIED, stage))

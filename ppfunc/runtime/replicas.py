"""Sum the gradients of replicas of a stage, and compare their parameters where they live in several processes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from ppfunc.schedule import Instruction, Op, Schedule
from ppfunc.stage import LeafSignature, Signature

from .buffers import Buffers, Leaves, Tag
from .calls import CompiledStage, Place
from .errors import AgreementError
from .ownership import Owned
from .transport import Call, DataTransport, Link, Transfer

_DIGEST = LeafSignature((32,), torch.uint8, False)


def reduce_replicas(
    schedule: Schedule,
    stages: Mapping[tuple[int, int], CompiledStage],
    data: DataTransport,
    ranks: Sequence[int],
    summed: Callable[[LeafSignature], LeafSignature],
) -> Iterator[tuple[Call, Place]]:
    """Sum the gradients of the replicas of each stage, in the order of the stages, wherever one lives.

    Every process of a group gets the sum, in the gradients of the first of the group that it runs. A message
    also carries a digest of the parameters, which have to be the same everywhere. The sums end a program
    and both ends of a pair put them in the same order, so all are posted together: no rank waits for a sum
    before it has sent its own parts.

    Args:
        schedule, stages, data, ranks, summed: as of :func:`ppfunc.runtime.bind.bind`.
    """
    home, training = schedule.placement, not schedule.forward_only
    local = [(group, [s for s in group if home[s] in ranks]) for group in schedule.replicas]
    batches: dict[int, list[Transfer]] = {}
    publish: list[tuple[Call, Place]] = []
    collect: list[tuple[Call, Place]] = []
    for group, here in local:
        if not here or len(group) == 1:
            continue
        compiled = next(c for (s, _), c in stages.items() if s == here[0])
        gradients = tuple(summed(leaf) for leaf in compiled.params if leaf.grad) if training else ()
        apart = [s for s in group if s not in here]
        place = Place(home[here[0]], len(schedule.programs[home[here[0]]]) - 1, Instruction(Op.REDUCE_TIED, here[0]))
        for stage in here:
            publish.append((_publish(compiled, stage, apart, training), place))
        for other in apart:
            for stage in here:
                ends = batches.setdefault(home[stage], [])
                ends.append(Transfer(True, Tag("R", stage, other, -1), home[other], (*gradients, _DIGEST), compiled.device))
                ends.append(Transfer(False, Tag("R", other, stage, -1), home[other], (*gradients, _DIGEST), compiled.device))
        if training or apart:
            collect.append((_collect(compiled.model, here, group, training), place))
    yield from publish
    yield from _moved(batches, data, schedule, collect)


def links_of_replicas(schedule: Schedule) -> Iterator[Link]:
    """Where the messages of sums travel between ranks."""
    home = schedule.placement
    for group in schedule.replicas:
        yield from (Link("R", home[a], home[b]) for a in group for b in group if home[a] != home[b])


def shared_forms(schedule: Schedule, params: Mapping[int, Signature]) -> dict[int, Signature]:
    """Of the parameters of a process, by stage of the model, those that other processes hold too."""
    home, model = schedule.placement, schedule.model_stages
    apart = {model[group[0]] for group in schedule.replicas if len({home[stage] for stage in group}) > 1}
    return {stage: form for stage, form in params.items() if stage in apart}


def require_same_forms(told: Sequence[Mapping[int, Signature]]) -> None:
    """Raise where ranks hold parameters of one stage in different forms, whose gradients could not be summed.

    Args:
        told: by rank, what :func:`shared_forms` gives there.
    """
    first: dict[int, tuple[int, Signature]] = {}
    for rank, forms in enumerate(told):
        for stage, form in forms.items():
            other, known = first.setdefault(stage, (rank, form))
            if form != known:
                raise AgreementError(
                    f"the parameters of stage {stage} differ between the processes that hold it: rank {other} has {known}, "
                    f"rank {rank} has {form}; give all the same"
                )


def digest(leaves: Leaves) -> torch.Tensor:
    """SHA-256 of the values, shapes and dtypes of tensors, as uint8[32] on the CPU."""
    state = sha256()
    for leaf in leaves:
        host = leaf.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        state.update(f"{host.dtype}{list(host.shape)}".encode())
        if host.numel():
            state.update((ctypes.c_char * (host.numel() * host.element_size())).from_address(host.data_ptr()))
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


def _moved(
    batches: Mapping[int, list[Transfer]],
    data: DataTransport,
    schedule: Schedule,
    collect: list[tuple[Call, Place]],
) -> Iterator[tuple[Call, Place]]:
    """Post all messages, wait for those that arrive, run ``collect``, wait for those that were sent."""

    def placed(rank: int, transfer: Transfer, call: Call | None) -> list[tuple[Call, Place]]:
        stage = transfer.tag.source if transfer.outgoing else transfer.tag.destination
        place = Place(rank, len(schedule.programs[rank]) - 1, Instruction(Op.REDUCE_TIED, stage))
        return [] if call is None else [(call, place)]

    for rank, batch in batches.items():
        batch.sort(key=lambda t: t.tag)
        yield from placed(rank, batch[0], data.post(rank, batch))
        for transfer in batch:
            if not transfer.outgoing:
                yield from placed(rank, transfer, data.wait_recv(rank, transfer))
    yield from collect
    for rank, batch in batches.items():
        for transfer in batch:
            if transfer.outgoing:
                yield from placed(rank, transfer, data.wait_send(rank, transfer))


def _publish(compiled: CompiledStage, stage: int, apart: Sequence[int], training: bool) -> Call:
    """Take the gradients of a stage out of its sum, for itself and for its replicas in other processes."""
    model, params = compiled.model, compiled.params

    def publish(buffers: Buffers) -> None:
        leaves = buffers.params[model]
        wanted = tuple(t for t, leaf in zip(leaves, params, strict=True) if leaf.grad)
        total = buffers.gradients[stage].take(wanted, Owned()) if training else ()
        buffers.values[Tag("R", stage, stage, -1)] = total
        if apart:
            sent = (*total, digest(leaves).to(compiled.device))
            buffers.values.update((Tag("R", stage, other, -1), sent) for other in apart)

    return publish


def _collect(model: int, here: Sequence[int], group: Sequence[int], training: bool) -> Call:
    """Sum what the replicas of a stage have published, in the order of the group."""
    first = here[0]

    def collect(buffers: Buffers) -> None:
        mine: Any = None
        for stage in group:
            if stage in here:
                total = buffers.values.pop(Tag("R", stage, stage, -1))
            else:
                for other in here[1:]:
                    buffers.values.pop(Tag("R", stage, other, -1))
                *gradients, theirs = buffers.values.pop(Tag("R", stage, first, -1))
                total = tuple(gradients)
                mine = digest(buffers.params[model]) if mine is None else mine
                if not torch.equal(mine, theirs.cpu()):
                    raise AgreementError(
                        f"the parameters of stage {model} differ between the processes that hold it: their digests are "
                        f"{_shown(mine)} here and {_shown(theirs)} where the schedule's stage {stage} lives; give all the same values"
                    )
            if training:
                buffers.gradients[first].merge(total)

    return collect


def _shown(value: torch.Tensor) -> str:
    return bytes(value.cpu().tolist()).hex()[:12]

"""Sum the gradients of shared parameters over their places at the end of a program, and compare the values.

Gradients are added up in the order of the stages, so that any number of processes gets the same bits.
Processes that hold places exchange gradients by one all-to-all, and compare checksums of the values. Steps
that update parameters compare the values when the ranks meet.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature
from ppfunc.stage._torch import is_wrapped

from ..errors import AgreementError
from ..execution.buffers import Buffers
from ..lowering.calls import Origin, PlacedCall
from ..lowering.lowered import LoweredStep
from ..transport.collective import Collective
from ..transport.protocols import Call, DataTransport
from .checksums import checksum, same_bits
from .ties import SharedLeaf, shared_leaves


class _HeldPlace(NamedTuple):
    """Locate a leaf in this process, by stage of the schedule and of the model, and number of the leaf."""

    stage: int
    model: int
    number: int


class _Group(NamedTuple):
    """Leaves whose places lie on the same ranks in the same order, and whose sums have one dtype.

    Args:
        leaves: what is shared.
        homes: the rank of every place, in the order of the stages.
    """

    leaves: list[SharedLeaf]
    homes: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """List the ranks of the places, ascending."""
        return tuple(sorted(set(self.homes)))


def sum_over_places(
    lowered: LoweredStep, data: DataTransport, summed: Callable[[LeafSignature], LeafSignature]
) -> Iterator[PlacedCall]:
    """Sum the gradient of every shared leaf over its places.

    Each stage of the model gets the sum at its first place in this process.

    Args:
        summed: signature of the gradient, over all microbatches, of a parameter of a signature.
    """
    leaves = shared_leaves(lowered.schedule, lowered.form.params, lowered.spec.tied)
    here = sorted({place.stage for leaf in leaves for place in _places(lowered, leaf)})
    if not here:
        return
    origin = _last_place(lowered, here[0])
    if lowered.spec.updates is None:
        for leaf in leaves:
            yield _compare_here(leaf, _places(lowered, leaf)), origin
        for group in _groups(lowered, leaves, lambda leaf: None):
            if len(group.ranks) > 1:
                yield _compare(lowered, group, data.collective(group.ranks)), origin
    if not lowered.schedule.forward_only:
        yield _sum(lowered, data, leaves, here, summed), origin


def _places(lowered: LoweredStep, leaf: SharedLeaf) -> list[_HeldPlace]:
    """List the places of a leaf in this process, in the order of the stages."""
    home, model = lowered.schedule.placement, lowered.schedule.model_stages
    return [_HeldPlace(s, model[s], n) for s, n in leaf.holders if n is not None and home[s] in lowered.ranks]


def _groups(
    lowered: LoweredStep, leaves: Sequence[SharedLeaf], kind: Callable[[LeafSignature], object]
) -> list[_Group]:
    """Group leaves by the ranks of their places and the kind of their signatures, alike on all ranks."""
    home = lowered.schedule.placement
    groups: dict[tuple[tuple[int, ...], object], _Group] = {}
    for leaf in leaves:
        homes = tuple(home[stage] for stage, _ in leaf.holders)
        place = _places(lowered, leaf)[0]
        key = homes, kind(lowered.form.params[place.model].leaves[place.number])
        groups.setdefault(key, _Group([], homes)).leaves.append(leaf)
    return sorted(groups.values(), key=lambda group: (group.ranks, group.homes))


def _compare_here(leaf: SharedLeaf, places: Sequence[_HeldPlace]) -> Call:
    """Compare the values of a leaf at the places of this process."""
    (_, first, at), *others = places

    def compare(buffers: Buffers) -> None:
        value = buffers.params[first][at]
        for _, model, number in others:
            other = buffers.params[model][number]
            if is_wrapped(other) != is_wrapped(value):
                raise ValueError(
                    f"{leaf.name} is transformed by torch.func in stage {first} or {model} alone; map both"
                    " places"
                )
            if other is not value and not is_wrapped(value) and not same_bits(other.to(value.device), value):
                raise AgreementError(
                    f"{leaf.name} has other values in stage {first} than in stage {model}; give both places"
                    " the same"
                )

    return compare


def _compare(lowered: LoweredStep, group: _Group, collective: Collective) -> Call:
    """Compare the values of leaves with those of other processes, by checksums that their device computes."""
    places = [_places(lowered, leaf)[0] for leaf in group.leaves]

    def compare(buffers: Buffers) -> None:
        mine = torch.stack([checksum(buffers.params[model][number]) for _, model, number in places])
        whole, wait = collective.all_gather(mine)
        wait()
        sums = whole.view(collective.size, -1)
        if torch.equal(sums, mine.expand_as(sums)):
            return
        for leaf, column in zip(group.leaves, sums.T.tolist(), strict=True):
            other = next((n for n, value in enumerate(column) if value != column[0]), None)
            if other is not None:
                raise AgreementError(
                    f"{leaf.name} has other values on rank {group.ranks[0]} than on rank"
                    f" {group.ranks[other]} (checksums {_hex(column[0])} and {_hex(column[other])}); give all"
                    " places the same"
                )

    return compare


def _sum(
    lowered: LoweredStep,
    data: DataTransport,
    leaves: Sequence[SharedLeaf],
    here: Sequence[int],
    summed: Callable[[LeafSignature], LeafSignature],
) -> Call:
    """Sum the gradients of every group of leaves, and give the sums to the first of the stages that share."""
    model, numbers = lowered.schedule.model_stages, {stage: lowered.differentiated(stage) for stage in here}
    firsts = set({model[stage]: stage for stage in reversed(here)}.values())
    trained = [leaf for leaf in leaves if (place := _places(lowered, leaf)[0]).number in numbers[place.stage]]
    groups = []
    for group in _groups(lowered, trained, lambda leaf: summed(leaf).dtype):
        collective = data.collective(group.ranks) if len(group.ranks) > 1 else Collective()
        places = [_places(lowered, leaf) for leaf in group.leaves]
        groups.append((collective, places, [group.ranks.index(home) for home in group.homes]))

    def sum_gradients(buffers: Buffers) -> None:
        gradients = {}
        for stage in here:
            params = buffers.params[model[stage]]
            total = buffers.gradients[stage].take(tuple(params[n] for n in numbers[stage]), torch.clone)
            gradients[stage] = dict(zip(numbers[stage], total, strict=True))
        for collective, places, owners in groups:
            rows = [[gradients[p.stage][p.number] for p in row] for row in zip(*places, strict=True)]
            sums = collective.all_reduce_in_order(rows, owners)
            for gradient, of_leaf in zip(sums, places, strict=True):
                for stage, _, number in of_leaf:
                    gradients[stage][number] = gradient
        for stage in firsts:
            buffers.gradients[stage].put_back(tuple(gradients[stage].values()))

    return sum_gradients


def _hex(checksum: int) -> str:
    return f"{checksum % 2**64:016x}"


def _last_place(lowered: LoweredStep, stage: int) -> Origin:
    rank = lowered.schedule.placement[stage]
    return Origin(rank, len(lowered.schedule.programs[rank]) - 1, Instruction(Op.REDUCE_TIED, stage))

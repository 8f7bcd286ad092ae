"""Make the calls that end a program: shared gradients are summed, parameters are updated.

Gradients of a shared parameter are added up in the order of the stages, so that any number of processes gets
the same bits. Processes that hold its places exchange gradients by one all-to-all, and checksums of the
values, which are read at the end of the step. Steps that update parameters compare the values when the ranks
meet.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature
from ppfunc.stage._torch import is_wrapped

from ..lowering.comparison import checksum, differing
from ..lowering.lowered import LoweredStep
from ..lowering.results import apart, losses_of
from ..lowering.ties import OTHER_VALUES, Place, SharedLeaf, differs
from ..ports.collective import Collective
from ..ports.protocols import Call, DataTransport
from ..values.buffers import Buffers, Compared, Origin, ParameterUpdate
from ..values.errors import AgreementError
from .calls import PlacedCall, Sum

# -- sums over the places of a parameter


_Group = tuple[tuple[int, ...], tuple[int, ...], list[SharedLeaf]]
"""Ranks of the places, ascending; the rank of every place, in the order of the stages; the leaves."""


def sum_over_places(lowered: LoweredStep, transport: DataTransport) -> Iterator[PlacedCall]:
    """Sum the gradient of every shared leaf over its places.

    Each stage of the model gets the sum at its first place in this process.
    """
    leaves = lowered.shared_leaves()
    here = sorted({place.stage for leaf in leaves for place in leaf.places})
    if not here:
        return
    stage = here[0]
    rank = lowered.schedule.placement[stage]
    origin = Origin(rank, len(lowered.schedule.programs[rank]) - 1, Instruction(Op.REDUCE_TIED, stage))
    if not lowered.spec.updates:
        pairs = [(leaf, leaf.places[0], place) for leaf in leaves for place in leaf.places[1:]]
        yield partial(_compare_here, pairs), origin
        for ranks, _, of_group in _groups(lowered, leaves, lambda leaf: None):
            if len(ranks) > 1 and (collective := transport.collective(ranks)).size > 1:
                yield partial(_compare, ranks, of_group, collective), origin
    if not lowered.schedule.forward_only:
        yield _sum(lowered, transport, leaves, here), origin


def _groups(
    lowered: LoweredStep, leaves: Sequence[SharedLeaf], kind: Callable[[LeafSignature], object]
) -> list[_Group]:
    """Group leaves by the ranks of their places and the kind of their signatures, alike on all ranks."""
    groups: dict[tuple[tuple[int, ...], object], list[SharedLeaf]] = {}
    for leaf in leaves:
        _, model, number = leaf.places[0]
        key = leaf.homes, kind(lowered.form.params[model].leaves[number])
        groups.setdefault(key, []).append(leaf)
    placed = [(tuple(sorted(set(homes))), homes, of_group) for (homes, _), of_group in groups.items()]
    return sorted(placed, key=lambda group: group[:2])


def _compare_here(pairs: Sequence[tuple[SharedLeaf, Place, Place]], buffers: Buffers) -> None:
    names, flags = [], list[torch.Tensor]()
    for leaf, (_, first, at), (_, model, number) in pairs:
        value, other = buffers.params[first][at], buffers.params[model][number]
        if is_wrapped(other) != is_wrapped(value):
            raise ValueError(
                f"tied parameter {leaf.name}: a torch.func transform applies to one of the stages {first} and"
                f" {model} only; apply it to both"
            )
        if other is not value and not is_wrapped(value):
            names.append((f"{leaf.name} {OTHER_VALUES}", f"in stage {first}", f"in stage {model}"))
            flags.append(differing(other.to(value.device), value))

    def require(flags: torch.Tensor) -> None:
        if flags.any():
            raise AgreementError(differs(*names[int(flags.int().argmax())]))

    if flags:
        device = flags[0].device
        buffers.compared.append(Compared(torch.stack([flag.to(device) for flag in flags]), require))


def _compare(
    ranks: Sequence[int], leaves: Sequence[SharedLeaf], collective: Collective, buffers: Buffers
) -> None:
    """Compare the values of leaves with those of other processes, by checksums that their device computes."""
    places = (leaf.places[0] for leaf in leaves)
    mine = torch.stack([checksum(buffers.params[model][number]) for _, model, number in places])
    whole, wait = collective.all_gather(mine)
    wait()

    def require(sums: torch.Tensor) -> None:
        if (sums == sums[0]).all():
            return
        for leaf, column in zip(leaves, sums.T.tolist(), strict=True):
            other = next((n for n, value in enumerate(column) if value != column[0]), None)
            if other is not None:
                one, another = (f"on rank {ranks[n]} (checksum {column[n] % 2**64:016x})" for n in (0, other))
                raise AgreementError(differs(f"{leaf.name} {OTHER_VALUES}", one, another))

    buffers.compared.append(Compared(whole.view(collective.size, -1), require))


def _sum(
    lowered: LoweredStep, transport: DataTransport, leaves: Sequence[SharedLeaf], here: Sequence[int]
) -> Call:
    """Sum the gradients of every group of leaves, and give the sums to the first of the stages that share."""
    model, numbers = lowered.schedule.model_stages, {stage: lowered.differentiated(stage) for stage in here}
    firsts = set({model[stage]: stage for stage in reversed(here)}.values())
    trained = [leaf for leaf in leaves if _trains(lowered, leaf.places[0])]
    groups, summed = [], Sum(lowered.spec.sum_dtype)
    for ranks, homes, of_group in _groups(lowered, trained, lambda leaf: summed.signature(leaf).dtype):
        collective = transport.collective(ranks) if len(ranks) > 1 else Collective()
        places = [leaf.places for leaf in of_group]
        groups.append((collective, places, list(map(ranks.index, homes))))

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


def _trains(lowered: LoweredStep, place: Place) -> bool:
    """Tell whether a leaf gets gradients other than zeros."""
    frozen = lowered.spec.frozen_in(place.model, lowered.form.params[place.model])
    return place.number in lowered.differentiated(place.stage) and place.number not in frozen


# -- the update of parameters


def update_parameters(lowered: LoweredStep, places: Sequence[Origin]) -> Iterator[PlacedCall]:
    """Bind the REDUCE_GRAD and STEP that :func:`is_deferred` leaves to the end of the program."""
    rank = lowered.ranks[-1]
    deferred = [(call, place) for place in places if (call := update_call(lowered, place.instruction))]
    steps = [one for one in deferred if one[1].instruction.op is Op.STEP]
    end = Instruction(Op.STEP, lowered.schedule.stages_of(rank)[-1])
    place = Origin(rank, len(lowered.schedule.programs[rank]) - 1, end)

    def join_losses(buffers: Buffers) -> None:
        weighted, each = apart(losses_of(lowered, buffers).values(), lowered.losses.values())
        _update(buffers).join(buffers, weighted, each if "losses" in lowered.spec.wants else None)

    join = join_losses, place
    yield from (one for one in deferred if one not in steps)
    yield from [join, *steps]


def is_deferred(lowered: LoweredStep, instruction: Instruction) -> bool:
    """Tell whether an instruction has to wait until the program has run: a STEP for the gradients of all
    stages, a REDUCE_GRAD for a sum over places.
    """
    if instruction.op is Op.STEP:
        return True
    model_stages = lowered.schedule.model_stages
    places = (place for leaf in lowered.shared_leaves() for place in leaf.places)
    return model_stages[instruction.stage] in {place.model for place in places}


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


def await_params(model_stage: int, buffers: Buffers) -> None:
    """Wait for parameters that an UNSHARD, or the step before, gathers."""
    if model_stage in buffers.gathering:
        buffers.params[model_stage] = buffers.gathering.pop(model_stage)()


def _update(buffers: Buffers) -> ParameterUpdate:
    assert buffers.update is not None  # of a step with updates
    return buffers.update

"""Find parameters that several stages hold: replicas of a stage, and weights that the caller has tied.

They are one parameter in several places. Its gradient is the sum over all places, the same at each of them.
Its values have to be equal at all places. A plain step checks this each time. A trainer checks it before the
first step, and again if somebody has written into the state; it also checks that the optimizer treats all
places alike.
"""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage._torch import is_wrapped
from ppfunc.stage.layout import local
from ppfunc.stage.signature import Signature, differentiable, leaf_names, leaf_number
from ppfunc.stage.tree import tree_leaves

from ..ports.protocols import Transport
from ..values.arguments import extent, overlap
from ..values.buffers import Leaves
from ..values.errors import AgreementError
from .comparison import checksum, differences

Tied = tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
"""By name, in order, the places of each tied parameter: (stage of the model, name of the leaf)."""

TiedPlaces = Mapping[str, Sequence[tuple[int, str]]] | None
"""By name, the places of each tied parameter, as callers write them."""


def read_tied(
    tied: TiedPlaces, schedule: Schedule, prefixes: Sequence[str] = ("",), of_split: TiedPlaces = None
) -> Tied:
    """Read tied parameters as the caller gives them, and tied parameters of a split.

    Args:
        prefixes: the keys of the trees in the parameters of a transformed stage, such as ``"0"`` and
            ``"1"``; each tie then holds in every tree.

    Raises:
        TypeError, ValueError: not a mapping of places, or a place that does not exist or comes twice.
    """
    by_caller, by_split = {} if tied is None else tied, of_split or {}
    if not isinstance(by_caller, Mapping) or not all(isinstance(name, str) for name in by_caller):
        raise TypeError(f"tied: got {reprlib.repr(tied)}, expected {{name: [(stage, name of a leaf), ...]}}")
    if twice := by_split.keys() & by_caller.keys():
        raise ValueError(
            f"tied: got {min(twice)!r}, which the split has tied; leave it out, or take another name"
        )
    every: list[tuple[str, tuple[tuple[int, str], ...]]] = []
    taken: set[tuple[int, str]] = set()
    for name, places in sorted({**by_split, **by_caller}.items()):
        if not isinstance(places, Sequence) or not all(
            isinstance(p, tuple | list) and [*map(type, p)] == [int, str] for p in places
        ):
            raise TypeError(
                f"tied[{name!r}]: got {places!r}, expected places, such as [(0, 'wte.weight'), (3,"
                " 'lm_head.weight')]"
            )
        if len(places) < 2:
            raise ValueError(f"tied[{name!r}]: got {places!r}, expected at least two places")
        for place in ((stage, leaf) for stage, leaf in places):
            if place in taken:
                raise ValueError(f"tied[{name!r}]: the place {place} is named twice")
            if place[0] not in schedule.model_stages:
                stages = sorted(set(schedule.model_stages))
                raise ValueError(
                    f"tied[{name!r}]: the place {place} has a stage that does not exist; the stages are"
                    f" {stages}"
                )
            taken.add(place)
        for prefix in prefixes:
            full = tuple((stage, ".".join(filter(None, (prefix, leaf)))) for stage, leaf in places)
            every.append((f"{name} {prefix}" if prefix else name, full))
    return tuple(every)


class Place(NamedTuple):
    """Locate a leaf in this process, by stage of the schedule and of the model, and number of the leaf."""

    stage: int
    model: int
    number: int


class SharedLeaf(NamedTuple):
    """Describe one leaf that several stages hold.

    Args:
        name: name in errors.
        homes: the rank of every place, in the order of the stages.
        places: places in this process, in the order of the stages.
    """

    name: str
    homes: tuple[int, ...]
    places: tuple[Place, ...]


def shared_leaves(
    schedule: Schedule, ranks: Sequence[int], params: Mapping[int, Signature], tied: Tied
) -> list[SharedLeaf]:
    """List the leaves of this process that several stages of the schedule hold, or one stage twice.

    Two processes list those that both hold in one order.

    Args:
        ranks: ranks of this process.
        params: signatures of its parameters, by stage of the model.

    Raises:
        ValueError: a tied parameter has no such leaf, or leaves of other shapes or dtypes.
    """
    shared: list[SharedLeaf] = []

    def add(name: str, holders: Sequence[tuple[int, int | None]]) -> None:
        homes = [schedule.placement[stage] for stage, _ in holders]
        places = [
            Place(stage, schedule.model_stages[stage], number)
            for home, (stage, number) in zip(homes, holders, strict=True)
            if number is not None and home in ranks
        ]
        if places:
            shared.append(SharedLeaf(name, tuple(homes), tuple(places)))

    for name, places in tied:
        if _without_tangents(params, places):
            continue
        numbers = {
            (k, leaf): leaf_number(params[k], leaf, f"tied[{name!r}]: params[{k}]")
            for k, leaf in places
            if k in params
        }
        forms = {str(params[k].leaves[n]): f"{leaf!r} of stage {k}" for (k, leaf), n in numbers.items()}
        if len(forms) > 1:
            listed = ", ".join(f"{place} is {form}" for form, place in forms.items())
            raise ValueError(f"tied[{name!r}]: {listed}; tied parameters have one shape and dtype")
        stages = enumerate(schedule.model_stages)
        add(f"tied[{name!r}]", [(s, numbers.get(p)) for s, k in stages for p in places if p[0] == k])
    taken = {(place.stage, place.number) for leaf in shared for place in leaf.places}
    for group in schedule.replicas:
        here = [stage for stage in group if schedule.placement[stage] in ranks]
        model = schedule.model_stages[group[0]]
        for n, path in enumerate(params[model].paths if here and len(group) > 1 else ()):
            if (here[0], n) not in taken:
                add(f"params[{model}]{path}", [(stage, n) for stage in group])
    return shared


def _without_tangents(params: Mapping[int, Signature], places: Sequence[tuple[int, str]]) -> bool:
    """Tell whether `read_tied` made these places for tangents of integer leaves, which do not exist."""
    return any(
        leaf.startswith("1.") and leaf not in (names := leaf_names(params[k])) and f"0{leaf[1:]}" in names
        for k, leaf in places
        if k in params
    )


def sharing_ranks(schedule: Schedule, tied: Tied) -> Iterator[tuple[int, ...]]:
    """List the ranks that hold one parameter together, ascending, for every set of several."""
    home, model = schedule.placement, schedule.model_stages
    groups = [*schedule.replicas]
    groups += [tuple(s for s, k in enumerate(model) if k in {k for k, _ in places}) for _, places in tied]
    ranks = (tuple(sorted({home[stage] for stage in group})) for group in groups)
    yield from dict.fromkeys(group for group in ranks if len(group) > 1)


def shared_forms(
    schedule: Schedule,
    params: Mapping[int, Signature],
    tied: Tied,
    frozen: Mapping[int, frozenset[int]],
) -> dict[str, str]:
    """Describe the parameters that other processes hold too, by name: their forms, and if they are frozen.

    Args:
        frozen: numbers of the frozen leaves, by stage of the model.

    Raises:
        ValueError: a tied parameter is frozen at some of its places only.
    """
    home, model, forms = schedule.placement, schedule.model_stages, dict[str, str]()
    replicas = {model[group[0]] for group in schedule.replicas if len({home[stage] for stage in group}) > 1}
    for k in sorted(replicas & params.keys()):
        names = leaf_names(params[k])
        forms[f"the parameters of stage {k}"] = params[k].to_json()
        fixed_names = ", ".join(names[n] for n in sorted(frozen[k]))
        forms[f"the frozen parameters of stage {k}"] = fixed_names or "none"
    for name, places in tied:
        here = [] if _without_tangents(params, places) else [place for place in places if place[0] in params]
        numbers = [(k, leaf, leaf_number(params[k], leaf, f"params[{k}]")) for k, leaf in here]
        fixed, free = ([p for p in numbers if (p[2] in frozen[p[0]]) is flag] for flag in (True, False))
        if fixed and free:
            (a, one, _), (b, other, _) = fixed[0], free[0]
            raise ValueError(
                f"tied[{name!r}]: {one} of stage {a} is frozen, {other} of stage {b} is not, and both are one"
                " parameter; freeze it at both places, or at none"
            )
        for k, _, n in numbers:
            forms[f"the tied parameters {name!r}"] = f"{params[k].leaves[n]}{' frozen' if fixed else ''}"
    return forms


def require_same_forms(
    by_rank: Mapping[int, Mapping[str, str]],
    agreed: Mapping[str, str] | None = None,
    mend: str = "give all the same",
) -> None:
    """Raise AgreementError for a parameter that ranks hold in different forms.

    Args:
        by_rank: results of :func:`shared_forms`.
        agreed: forms of all ranks before, if they have agreed.
    """
    before = [] if agreed is None else [("all had", agreed)]
    now = [(f"rank {rank} has", forms) for rank, forms in by_rank.items()]
    for name, (one, known), (other, form) in differences([*before, *now]):
        raise AgreementError(
            f"{name} differ between the processes that hold them: {one} {_readable(known)}, {other}"
            f" {_readable(form)}; {mend}"
        )


def _readable(form: str) -> str:
    return str(Signature.from_json(form)) if form.startswith("[") else form


def require_same_values(
    schedule: Schedule,
    ranks: Sequence[int],
    params: Mapping[int, Signature],
    alike: Iterable[tuple[str, Mapping[int, Sequence[torch.Tensor | None]]]],
    tied: Tied,
    control: Transport,
) -> None:
    """Raise AgreementError for a parameter whose places have different values, here or in other processes.

    All processes of the pipeline call it. It reads values from the device.

    Args:
        params: signatures of the parameters of this process, by stage of the model.
        alike: pairs: words for an error, and by stage of the model one tensor per leaf: whole, or this rank's
            shard; None for a leaf that is not compared.
    """
    mine: dict[str, int] = {}
    shared = shared_leaves(schedule, ranks, params, tied)
    for words, leaves in alike if shared else ():
        for leaf in shared:
            name, places = f"{leaf.name} {words}", dict.fromkeys((p.model, p.number) for p in leaf.places)
            values = ((k, leaves[k][n]) for k, n in places)
            sums = [(k, int(checksum(local(value)))) for k, value in values if value is not None]
            for model, other in sums:
                if other != sums[0][1]:
                    raise AgreementError(differs(name, f"in stage {sums[0][0]}", f"in stage {model}"))
                mine[name] = other
    sums_of = enumerate(map(json.loads, control.all_gather(json.dumps(mine))))
    for name, (one, _), (another, _) in differences(sums_of):
        raise AgreementError(differs(name, f"on rank {one}", f"on rank {another}"))


def differs(what: str, here: str, there: str) -> str:
    """Describe a difference between two places of a parameter."""
    return f"{what} {here} than {there}; give all places the same"


OTHER_VALUES = "has other values"
"""Words for a parameter of which places have different values."""


# -- parameters that share memory


def require_declared(
    params: Mapping[int, Leaves],
    forms: Mapping[int, Signature],
    extents: Sequence[int],
    tied: Tied,
    primal: str = "",
) -> None:
    """Raise ValueError for parameters of two stages that share memory and are not tied.

    Each would get a part of the gradient. Leaves of one stage may share memory, as under ``torch.func.grad``,
    unless one of them is tied.

    Args:
        forms: signatures of the parameters.
        extents: extent of each leaf, from its first element to its last, in bytes.
        primal: prefix of the names of parameters that are no tangents.
    """
    leaves = [leaf for stage in forms for leaf in params[stage]]
    names: list[tuple[int, str]] = []
    for one, other in sharing(leaves, extents):
        names = names or [
            (stage, name) for stage, signature in forms.items() for name in leaf_names(signature)
        ]
        groups = [{name for name, group in tied if names[n] in group} for n in (one, other)]
        proper = all(names[n][1].startswith(primal) and differentiable(leaves[n].dtype) for n in (one, other))
        if proper and not groups[0] & groups[1] and (names[one][0] != names[other][0] or any(groups)):
            (a, first), (b, second) = sorted((names[one], names[other]))
            mend = "give each a copy of its own"
            same = (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.data_ptr)
            if all(read(leaves[one]) == read(leaves[other]) for read in same):
                declared = f"tied={{'name': [({a}, {first!r}), ({b}, {second!r})]}}"
                mend = f"declare it, {declared}, to get the sum of both gradients at each, or {mend}"
            else:
                mend = f"{mend}, or, of an output layer in parts, give vocabulary_parallel the tie, tied="
            raise ValueError(f"params[{a}] {first!r} and params[{b}] {second!r} share memory; {mend}")


def require_declared_trees(params: Mapping[int, Any], tied: Tied) -> None:
    """Apply :func:`require_declared` to trees as a caller gives them, which may have no values yet."""
    leaves = {stage: tuple(local(leaf) for leaf in tree_leaves(tree)) for stage, tree in params.items()}
    extents = [0 if leaf.is_meta else extent(leaf) for tree in leaves.values() for leaf in tree]
    require_declared(leaves, {stage: Signature.of(tree) for stage, tree in params.items()}, extents, tied)


def sharing(tensors: Sequence[torch.Tensor], extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Find tensors whose memory overlaps, as pairs of numbers; views that lie between each other count too.

    Args:
        extents: extent of each tensor, from its first element to its last, in bytes.
    """
    # What is transformed has no memory to look at.
    addresses = [0 if is_wrapped(t) else t.data_ptr() for t in tensors]
    if not overlap(addresses, extents):
        return
    before: list[int] = []  # those that may reach beyond the address
    for address, number in sorted(zip(addresses, range(len(tensors)), strict=True)):
        if address and extents[number]:
            before = [other for other in before if addresses[other] + extents[other] > address]
            yield from ((other, number) for other in before)
            before.append(number)

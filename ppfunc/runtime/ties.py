"""Parameters that several stages hold: replicas of a stage in a second chain, and weights that the caller has tied.

They are one parameter in several places. Its values are the same everywhere, which is checked at every step, or once where steps
update them, and its gradient is the sum over all places, the same at each of them.
"""

import ctypes
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from optree import treespec_paths
from torch import Tensor

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.layout import local
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_leaves

from .buffers import Leaves
from .errors import AgreementError
from .ownership import extent, sharing
from .transport import ControlTransport, Route

TiedPlaces = Mapping[str, Sequence[tuple[int, str]]] | None
"""By name, the places of each tied parameter, as callers write them."""

Tied = tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
"""By name, in order, the places of each tied parameter: (stage of the model, name of the leaf)."""


def read_tied(tied: TiedPlaces, schedule: Schedule, parts: Sequence[str] = ("",), of_split: TiedPlaces = None) -> Tied:
    """Tied parameters as the caller gives them, and those that a split has tied.

    Args:
        parts: where the parameters are among those of a transformed stage: the keys before the name of each leaf.

    Raises:
        TypeError, ValueError: something else than a mapping of places, or a place that does not exist or comes twice.
    """
    given, own = {} if tied is None else tied, of_split or {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"tied: got {reprlib.repr(tied)}, expected {{name: [(stage, name of a leaf), ...]}}")
    if twice := own.keys() & given.keys():
        raise ValueError(f"tied: got {min(twice)!r}, which the split has tied; leave it out, or take another name")
    found: list[tuple[str, tuple[tuple[int, str], ...]]] = []
    taken: set[tuple[int, str]] = set()
    for name, places in sorted({**own, **given}.items()):
        if not isinstance(places, Sequence) or not all(isinstance(p, tuple | list) and [*map(type, p)] == [int, str] for p in places):
            raise TypeError(f"tied[{name!r}]: got {places!r}, expected places, such as [(0, 'wte.weight'), (3, 'lm_head.weight')]")
        if len(places) < 2:
            raise ValueError(f"tied[{name!r}]: got {places!r}, expected at least two places")
        for place in ((stage, leaf) for stage, leaf in places):
            if place in taken:
                raise ValueError(f"tied[{name!r}]: the place {place} is named twice")
            if place[0] not in schedule.model_stages:
                stages = sorted(set(schedule.model_stages))
                raise ValueError(f"tied[{name!r}]: the place {place} has a stage that does not exist; the stages are {stages}")
            taken.add(place)
        for part in parts:
            moved = tuple((stage, ".".join(filter(None, (part, leaf)))) for stage, leaf in places)
            found.append((f"{name} {part}" if part else name, moved))
    return tuple(found)


def require_declared(
    params: Mapping[int, Leaves], forms: Mapping[int, Signature], extents: Sequence[int], tied: Tied, primal: str = ""
) -> None:
    """Raise ValueError where parameters of two stages share memory and are not tied: each would get a part of the gradient.

    Leaves of one stage may, as under ``torch.func.grad``, unless one of them is tied, and so means a parameter.

    Args:
        forms: of the parameters.
        extents: of all leaves, bytes from the first element to the last.
        primal: how the names of parameters proper begin.
    """
    leaves = [leaf for stage in forms for leaf in params[stage]]
    names: list[tuple[int, str]] = []
    for one, other in sharing(leaves, extents):
        names = names or [(stage, name) for stage, signature in forms.items() for name in leaf_names(signature)]
        groups = [{name for name, group in tied if names[n] in group} for n in (one, other)]
        proper = all(names[n][1].startswith(primal) and differentiable(leaves[n].dtype) for n in (one, other))
        if proper and not groups[0] & groups[1] and (names[one][0] != names[other][0] or any(groups)):
            (a, first), (b, second) = sorted((names[one], names[other]))
            mend = "give each a copy of its own"
            if all(getter(leaves[one]) == getter(leaves[other]) for getter in (Tensor.size, Tensor.stride, Tensor.data_ptr)):
                declared = f"tied={{'name': [({a}, {first!r}), ({b}, {second!r})]}}"
                mend = f"declare it, {declared}, to get the sum of both gradients at each, or {mend}"
            raise ValueError(f"params[{a}] {first!r} and params[{b}] {second!r} share memory; {mend}")


def require_declared_trees(params: Mapping[int, Any], tied: Tied) -> None:
    """:func:`require_declared` of trees as a caller gives them, which may have no values yet."""
    leaves = {stage: tuple(local(leaf) for leaf in tree_leaves(tree)) for stage, tree in params.items()}
    extents = [0 if leaf.is_meta else extent(leaf) for own in leaves.values() for leaf in own]
    require_declared(leaves, {stage: Signature.of(tree) for stage, tree in params.items()}, extents, tied)


class SharedLeaf(NamedTuple):
    """One leaf that several stages hold.

    Args:
        name: for errors.
        holders: (stage of the schedule, number of the leaf in its parameters), ascending; the number is None for
            a stage that this process does not hold.
    """

    name: str
    holders: tuple[tuple[int, int | None], ...]


def shared_leaves(schedule: Schedule, params: Mapping[int, Signature], tied: Tied) -> list[SharedLeaf]:
    """The leaves of this process's parameters that more than one stage of the schedule holds, or one stage twice.

    Two processes list those that both hold in one order.

    Args:
        params: signatures of the parameters of this process, by stage of the model.

    Raises:
        ValueError: a tied parameter has no such leaf, or leaves of other shapes or dtypes.
    """
    found = []
    for name, places in tied:
        if _without_tangents(params, places):
            continue
        numbers = {(k, leaf): leaf_number(params[k], leaf, f"tied[{name!r}]: params[{k}]") for k, leaf in places if k in params}
        forms = {str(params[k].leaves[n]): f"{leaf!r} of stage {k}" for (k, leaf), n in numbers.items()}
        if len(forms) > 1:
            told = ", ".join(f"{place} is {form}" for form, place in forms.items())
            raise ValueError(f"tied[{name!r}]: {told}; tied parameters have one shape and dtype")
        stages = ((s, k, leaf) for s, model in enumerate(schedule.model_stages) for k, leaf in places if k == model)
        if numbers:
            found.append(SharedLeaf(f"tied[{name!r}]", tuple((s, numbers.get((k, leaf))) for s, k, leaf in stages)))
    taken = {holder for leaf in found for holder in leaf.holders}
    for group in schedule.replicas:
        model = schedule.model_stages[group[0]]
        for n, path in enumerate(params[model].paths if model in params and len(group) > 1 else ()):
            if (group[0], n) not in taken:
                found.append(SharedLeaf(f"params[{model}]{path}", tuple((stage, n) for stage in group)))
    return found


def _without_tangents(params: Mapping[int, Signature], places: Sequence[tuple[int, str]]) -> bool:
    """Whether these are places of the tangents, made by `read_tied`, of leaves that have none: integers."""
    return any(
        leaf.startswith("1.") and leaf not in (names := leaf_names(params[k])) and f"0{leaf[1:]}" in names
        for k, leaf in places
        if k in params
    )


def leaf_number(signature: Signature, name: str, tree: str) -> int:
    """The number of the leaf whose keys, joined by dots, are ``name``.

    Raises:
        ValueError: there is none.

    >>> leaf_number(Signature.of({"head": {"weight": torch.zeros(1)}, "wte.weight": torch.zeros(1)}), "head.weight", "params")
    0
    """
    names = leaf_names(signature)
    if names.count(name) > 1:
        raise ValueError(f"{tree} has {names.count(name)} leaves {name!r}, whose keys are joined by dots; rename one of them")
    if name not in names:
        raise ValueError(f"{tree} has no leaf {name!r}; it has {', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}")
    return names.index(name)


def leaf_names(signature: Signature) -> list[str]:
    """The keys on the way to each leaf, joined by dots."""
    return [".".join(map(str, path)) for path in treespec_paths(signature.treedef)]


def routes_of_shared(schedule: Schedule, tied: Tied) -> Iterator[Route]:
    """Where the messages of sums travel between ranks."""
    home, model = schedule.placement, schedule.model_stages
    groups = [*schedule.replicas]
    groups += [tuple(s for s, k in enumerate(model) if k in {k for k, _ in places}) for _, places in tied]
    yield from (Route("R", home[a], home[b]) for group in groups for a in group for b in group if home[a] != home[b])


def shared_forms(schedule: Schedule, params: Mapping[int, Signature], tied: Tied) -> dict[str, str]:
    """The forms, by name, of what this process holds and others hold too."""
    home, model = schedule.placement, schedule.model_stages
    groups = [group for group in schedule.replicas if len({home[stage] for stage in group}) > 1]
    forms = {f"the parameters of stage {k}": params[k].to_json() for k in (model[group[0]] for group in groups) if k in params}
    for name, places in tied:
        for k, leaf in places if not _without_tangents(params, places) else ():
            if k in params:
                forms[f"the tied parameters {name!r}"] = str(params[k].leaves[leaf_number(params[k], leaf, f"params[{k}]")])
    return forms


def require_same_forms(told: Sequence[Mapping[str, str]]) -> None:
    """Raise AgreementError where ranks hold one parameter in different forms.

    Args:
        told: by rank, what :func:`shared_forms` gives there.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, forms in enumerate(told):
        for name, form in forms.items():
            other, known = first.setdefault(name, (rank, form))
            if form != known:
                raise AgreementError(
                    f"{name} differ between the processes that hold them: rank {other} has {_readable(known)}, "
                    f"rank {rank} has {_readable(form)}; give all the same"
                )


def _readable(form: str) -> str:
    return str(Signature.from_json(form)) if form.startswith("[") else form


def require_same_values(
    schedule: Schedule,
    params: Mapping[int, Signature],
    kept: Mapping[int, tuple[Any, frozenset[int]]],
    tied: Tied,
    control: ControlTransport,
) -> None:
    """Raise AgreementError where the places of a parameter have other values, in this process or in others of the pipeline.

    All of them call it. It reads the values: a step that updates parameters calls it where the ranks meet, since each state
    follows from the one before, and others compare in every step.

    Args:
        params: signatures of the parameters of this process, by stage of the model.
        kept: their values, whole or the shards of this rank, and the numbers of those that are frozen.
    """
    found: dict[str, tuple[int, str]] = {}
    frozen: dict[str, bool] = {}
    leaves = {model: tree_leaves(tree) for model, (tree, _) in kept.items()}
    for leaf in shared_leaves(schedule, params, tied):
        for model, number in dict.fromkeys((schedule.model_stages[s], n) for s, n in leaf.holders if n is not None):
            value = bytes(digest((local(leaves[model][number]),)).tolist()).hex()
            first, known = found.setdefault(leaf.name, (model, value))
            if value != known:
                raise AgreementError(f"{leaf.name} has other values in stage {first} than in stage {model}; give both places the same")
            frozen[leaf.name] = number in kept[model][1]
    first_told: dict[str, tuple[int, str, bool]] = {}
    for rank, text in enumerate(control.all_gather(json.dumps({name: [value, frozen[name]] for name, (_, value) in found.items()}))):
        for name, (value, fixed) in json.loads(text).items():
            other, known, before = first_told.setdefault(name, (rank, value, fixed))
            if value != known:
                raise AgreementError(f"{name} has other values on rank {other} than on rank {rank}; give all places the same")
            if fixed != before:
                one, free = (rank, other) if fixed else (other, rank)
                raise AgreementError(f"{name} is frozen on rank {one}, and not on rank {free}; freeze it on all ranks, or on none")


DIGEST = LeafSignature((32,), torch.uint8, False)
"""The form of a digest."""


def digest(leaves: Leaves) -> torch.Tensor:
    """SHA-256 of the values, shapes and dtypes of tensors, as uint8[32] on the CPU.

    For the few tensors that are compared in every step. A state is compared once, by sums that its device makes faster
    (:mod:`ppfunc.training.checksums`).
    """
    state = sha256()
    for leaf in leaves:
        host = leaf.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        state.update(f"{host.dtype}{list(host.shape)}".encode())
        if host.numel():
            state.update((ctypes.c_char * (host.numel() * host.element_size())).from_address(host.data_ptr()))
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and device have the same shape and the same bits."""
    bits = (t.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for t in (one, other))
    return one.shape == other.shape and torch.equal(*bits)

"""Find parameters that several stages hold: replicas in a second chain, and weights that the caller has tied.

They are one parameter in several places. Its gradient is the sum over all places, the same at each of them.
Its values are the same at all places: plain steps check this each time, steps that update parameters once.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ppfunc.schedule import Schedule
from ppfunc.stage import Signature
from ppfunc.stage.layout import local
from ppfunc.stage.signature import leaf_names
from ppfunc.stage.tree import tree_leaves

from ..errors import AgreementError
from ..transport.protocols import ControlTransport
from .checksums import checksum

TiedPlaces = Mapping[str, Sequence[tuple[int, str]]] | None
"""By name, the places of each tied parameter, as callers write them."""

Tied = tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
"""By name, in order, the places of each tied parameter: (stage of the model, name of the leaf)."""


def read_tied(
    tied: TiedPlaces, schedule: Schedule, prefixes: Sequence[str] = ("",), of_split: TiedPlaces = None
) -> Tied:
    """Read tied parameters as the caller gives them, and those that a split has tied.

    Args:
        prefixes: the keys before the name of each leaf, of the trees of a transformed stage.

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


class SharedLeaf(NamedTuple):
    """Describe one leaf that several stages hold.

    Args:
        name: for errors.
        holders: (stage of the schedule, number of the leaf in its parameters), ascending; the number is None
            for a stage that this process does not hold.
    """

    name: str
    holders: tuple[tuple[int, int | None], ...]


def shared_leaves(schedule: Schedule, params: Mapping[int, Signature], tied: Tied) -> list[SharedLeaf]:
    """List the leaves of this process that several stages of the schedule hold, or one stage twice.

    Two processes list those that both hold in one order.

    Args:
        params: signatures of the parameters of this process, by stage of the model.

    Raises:
        ValueError: a tied parameter has no such leaf, or leaves of other shapes or dtypes.
    """
    shared = []
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
        stages = (
            (s, k, leaf) for s, model in enumerate(schedule.model_stages) for k, leaf in places if k == model
        )
        if numbers:
            shared.append(
                SharedLeaf(f"tied[{name!r}]", tuple((s, numbers.get((k, leaf))) for s, k, leaf in stages))
            )
    taken = {holder for leaf in shared for holder in leaf.holders}
    for group in schedule.replicas:
        model = schedule.model_stages[group[0]]
        for n, path in enumerate(params[model].paths if model in params and len(group) > 1 else ()):
            if (group[0], n) not in taken:
                shared.append(SharedLeaf(f"params[{model}]{path}", tuple((stage, n) for stage in group)))
    return shared


def _without_tangents(params: Mapping[int, Signature], places: Sequence[tuple[int, str]]) -> bool:
    """Return whether these are places of tangents, made by `read_tied`, of integers, which have none."""
    return any(
        leaf.startswith("1.") and leaf not in (names := leaf_names(params[k])) and f"0{leaf[1:]}" in names
        for k, leaf in places
        if k in params
    )


def leaf_number(signature: Signature, name: str, tree: str) -> int:
    """Return the number of the leaf whose keys, joined by dots, are ``name``.

    Raises:
        ValueError: no leaf, or several, have that name.

    >>> import torch
    >>> tree = {"head": {"weight": torch.zeros(1)}, "wte.weight": torch.zeros(1)}
    >>> leaf_number(Signature.of(tree), "head.weight", "params")
    0
    """
    names = leaf_names(signature)
    if names.count(name) > 1:
        raise ValueError(
            f"{tree} has {names.count(name)} leaves {name!r}, whose keys are joined by dots; rename one of"
            " them"
        )
    if name not in names:
        raise ValueError(
            f"{tree} has no leaf {name!r}; it has"
            f" {', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}"
        )
    return names.index(name)


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
    """Describe, by name, what this process holds and others hold too: forms, and what is frozen.

    Args:
        frozen: numbers of the frozen leaves, by stage of the model.

    Raises:
        ValueError: a tied parameter is frozen at some of its places only.
    """
    home, model = schedule.placement, schedule.model_stages
    groups = [group for group in schedule.replicas if len({home[stage] for stage in group}) > 1]
    forms = {
        f"the parameters of stage {k}": params[k].to_json()
        for k in (model[group[0]] for group in groups)
        if k in params
    }
    for k in {model[group[0]] for group in groups} & params.keys():
        names = leaf_names(params[k])
        forms[f"the frozen parameters of stage {k}"] = (
            ", ".join(names[n] for n in sorted(frozen[k])) or "none"
        )
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


def require_same_forms(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise AgreementError for a parameter that ranks hold in different forms.

    Args:
        by_rank: results of :func:`shared_forms`.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, forms in enumerate(by_rank):
        for name, form in forms.items():
            other, known = first.setdefault(name, (rank, form))
            if form != known:
                raise AgreementError(
                    f"{name} differ between the processes that hold them: rank {other} has"
                    f" {_readable(known)}, rank {rank} has {_readable(form)}; give all the same"
                )


def _readable(form: str) -> str:
    return str(Signature.from_json(form)) if form.startswith("[") else form


def require_same_values(
    schedule: Schedule,
    params: Mapping[int, Signature],
    trees: Mapping[int, Any],
    tied: Tied,
    control: ControlTransport,
) -> None:
    """Raise AgreementError for a parameter whose places have different values, here or in other processes.

    All processes of the pipeline call it. It reads the values. A step that updates parameters calls it when
    the ranks meet, since each state follows from the one before; other steps compare in every call.

    Args:
        params: signatures of the parameters of this process, by stage of the model.
        trees: their values, whole or the shards of this rank.
    """
    local_sums: dict[str, tuple[int, int]] = {}
    leaves = {model: tree_leaves(tree) for model, tree in trees.items()}
    for leaf in shared_leaves(schedule, params, tied):
        for model, number in dict.fromkeys(
            (schedule.model_stages[s], n) for s, n in leaf.holders if n is not None
        ):
            value = int(checksum(local(leaves[model][number])))
            first, known = local_sums.setdefault(leaf.name, (model, value))
            if value != known:
                raise AgreementError(
                    f"{leaf.name} has other values in stage {first} than in stage {model}; give both places"
                    " the same"
                )
    all_sums: dict[str, tuple[int, int]] = {}
    mine = json.dumps({name: value for name, (_, value) in local_sums.items()})
    for rank, text in enumerate(control.all_gather(mine)):
        for name, value in json.loads(text).items():
            other, known = all_sums.setdefault(name, (rank, value))
            if value != known:
                raise AgreementError(
                    f"{name} has other values on rank {other} than on rank {rank}; give all places the same"
                )

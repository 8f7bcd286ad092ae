"""Compare ranks: their steps, facts, modes, layouts, programs, and the bits of their tensors.

Each function ``require_...`` raises :class:`~ppfunc.runtime.AgreementError` if they differ, with the values
of both ranks.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.stage import Outline
from ppfunc.stage.layout import gather_texts

from ..values.arguments import StepArguments, StepForm, digest
from ..values.errors import AgreementError

_GOLDEN, _MIX, _LOW = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 2**32 - 1
NEW_FORMS = "make a new step function, or trainer, for parameters or targets of other dtypes or shapes"
_PIECE = 2**17  # words that are mixed at a time, while they are in the cache


def differences(facts: Iterable[tuple[Any, Mapping[Any, Any]]]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the facts in which holders differ: the name, the first that has it, and one that has another.

    >>> list(differences([("rank 0", {"a": 1, "b": 2}), ("rank 1", {"b": 3})]))
    [('b', ('rank 0', 2), ('rank 1', 3))]
    """
    first: dict[Any, tuple[Any, Any]] = {}
    for holder, named in facts:
        for name, value in named.items():
            if (known := first.setdefault(name, (holder, value)))[1] != value:
                yield name, known, (holder, value)


_MENDS = {
    "lowered, not run": "call the same functions in the same order, lower() too",
    "steps ended": "go on from the same point: load the same checkpoint on every rank, and make a new P2P()",
    "step function": "make the same step functions in the same order, and call the same one",
    "schedule": "make the same schedule, with the same arguments",
    "autocast": "call the step under the same autocast",
    "loss weights": "be given the same loss_weights",
    "seed": "be given the same seed",
    "microbatches of": "be given batches of the same shapes, dtypes and forms",
    "optimizer": "make its trainer with the same optimizer, of the same numbers",
}
"""By a term of a step: what every rank must do where it differs."""


def require_same_terms(mine: str, theirs: str, rank: int, other: int, of: str = "") -> None:
    """Require that two ranks have the same terms, separated by ``"; "``; name the terms that differ.

    Args:
        mine: the terms of this rank.
        theirs: the terms of the other rank.
        rank: the number of this rank.
        other: the number of the other rank.
        of: the subject of the terms, such as ``" on the step that begins"``.
    """
    if mine == theirs:
        return
    pairs = zip_longest(mine.split("; "), theirs.split("; "), fillvalue="nothing")
    here, there = map("; ".join, zip(*[(a, b) for a, b in pairs if a != b], strict=True))
    mend = next((mend for term, mend in _MENDS.items() if term in here + there), "be given the same")
    raise AgreementError(
        f"the ranks disagree{of}: rank {rank} has {here}, rank {other} has {there}; every rank must {mend}"
    )


def require_same_modes(modes: Mapping[int, str]) -> None:
    """Require that modules of all ranks are in one mode. Ranks whose modules are in both do not count."""
    first = {mode: rank for rank, mode in sorted(modes.items(), reverse=True)}
    if "training" in first and "evaluation" in first:
        raise AgreementError(
            f"the ranks disagree on the mode of their modules: training on rank {first['training']},"
            f" evaluation on rank {first['evaluation']}; call train() or eval() on every rank (where a stage"
            " is frozen on purpose, leave its outermost module in training mode)"
        )


def require_same_changes(changed: Mapping[int, Mapping[str, str]]) -> None:
    """Require that ranks have changed alike the values that their stages read beside arguments.

    Args:
        changed: the changes of every rank, by name of the stage.
    """
    for name, (one, here), (other, there) in differences(changed.items()):
        raise AgreementError(
            f"the ranks disagree on values that {name} reads beside its arguments: rank {one} has changed"
            f" {here or 'none'}, rank {other} {there or 'none'}, since the first step; change them on every"
            " rank before the same step, or give them as inputs"
        )


def require_as_agreed(
    now: Mapping[tuple[int, int | None, int], tuple[object, ...]],
    before: Mapping[tuple[int, int | None, int], tuple[object, ...]],
    model_stages: Sequence[int],
) -> None:
    """Raise ValueError for a stage that returns other forms than the ranks agreed on."""
    for key in {**before, **now}:
        stage, sink, _ = key
        got, known = (of.get(key, ()) for of in (now, before))
        if got != known:
            texts = [
                " and ".join(map(str, dict.fromkeys(signatures))) or "none" for signatures in (got, known)
            ]
            what = "the losses" if sink is None else f"stage {model_stages[sink]}"
            raise ValueError(
                f"stage {model_stages[stage]} now gives {what} {texts[0]}, the ranks agreed on {texts[1]};"
                f" what a stage gives may change only with the shapes of the batch: {NEW_FORMS}"
            )


def require_alike(by_rank: Mapping[int, Mapping[str, str]], axis: str) -> None:
    """Require that all ranks lay out every leaf in one way.

    Args:
        by_rank: the leaves of :class:`LaidOut`.
        axis: axis of the mesh along which the ranks lie.
    """
    for name in sorted({name for leaves in by_rank.values() for name in leaves}):
        layouts = {rank: leaves.get(name, "no DTensor") for rank, leaves in by_rank.items()}
        if len(set(layouts.values())) > 1:
            listed = "; ".join(f"rank {rank} has {text}" for rank, text in layouts.items())
            raise AgreementError(
                f"{name} lies over {axis} in several ways: {listed}; give every rank the same placements"
            )


# The axis of a mesh over which a trainer keeps parts of parameters.
DATA_AXES: WeakKeyDictionary[DeviceMesh, str] = WeakKeyDictionary()


def require_whole_parameters(form: StepForm) -> None:
    """Raise ValueError for parameters of which this data rank holds a part, which no stage gathers."""
    for name, leaf in form.leaves():
        layout, mesh = leaf.layout, leaf.layout.mesh if leaf.layout is not None else None
        axis = None if mesh is None else DATA_AXES.get(mesh)
        if layout is None or axis is None or not name.startswith("params["):
            continue
        if layout.placements[layout.axes.index(axis)] != "R":
            raise ValueError(
                f"{name}: got a part of a parameter, which lies over the data ranks {axis!r} of a trainer;"
                " expected it whole: give leaf.full_tensor(), or call trainer.evaluate(state, ...), which"
                " gathers the parameters of a state"
            )


def require_same_layouts(form: StepForm) -> None:
    """Compare the layouts of all DTensors along every axis of their meshes, over the groups of these.

    It serves transports that have no link along these axes. Every rank of the mesh calls it.
    """
    mine = json.dumps(form.laid_out().leaves)
    for mesh in {leaf.layout.mesh: None for _, leaf in form.leaves() if leaf.layout is not None}:
        for axis in range(mesh.ndim if mesh is not None else 0):
            assert mesh is not None
            group = mesh.get_group(axis)
            # All ranks of a fake group are this process.
            if mesh.size(axis) > 1 and dist.get_backend(group) != "fake":
                leaves, names = map(json.loads, gather_texts(mesh, group, mine)), mesh.mesh_dim_names
                require_alike(
                    dict(enumerate(leaves)), f"the axis {names[axis]!r}" if names else f"axis {axis}"
                )


# -- batches


def require_same_batch(
    steps: Sequence[StepArguments], part: str, gather: Callable[[str], Mapping[int, str]]
) -> None:
    """Raise AgreementError for inputs, targets or extras with other values on another rank of one batch.

    Compared is what ranks were given, whether their stages read it or not: where a loader was sharded over
    the ranks of a pipeline, the first is given inputs of one batch, and the last targets of another, each
    with the rest of its own batch. It reads one tensor from the device.

    Args:
        steps: the arguments of every step of the call.
        part: names the place of this rank among those that may hold parts of a tensor.
        gather: gathers the texts of all ranks that run the batch.
    """
    cut = [
        name
        for name, tree in steps[0].form.trees.items()
        if any(layout is not None and layout.sharded for layout in tree.form.layouts or ())
    ]
    leaves = [
        (name + part * any(f"{tree}[".startswith(f"{name}[") for tree in cut), leaf)
        for step in steps
        for name, rows in (
            ("inputs", step.inputs),
            ("targets", step.targets),
            *((f"extras[{s}]", rows) for s, rows in step.extras.items()),
        )
        for row in rows
        for leaf in row
    ]
    sums = [checksum(leaf).to(leaves[0][1].device) for _, leaf in leaves]
    by_name: dict[str, list[int]] = {}
    for (name, _), number in zip(leaves, torch.stack(sums).tolist() if sums else (), strict=True):
        by_name.setdefault(name, []).append(number)
    mine = {name: digest(repr(numbers)) for name, numbers in by_name.items()}
    theirs = ((rank, json.loads(text)) for rank, text in sorted(gather(json.dumps(mine)).items()))
    if differing := [(name, one, other) for name, (one, _), (other, _) in differences(theirs)]:
        _, one, other = differing[0]
        names = " and ".join(name for name, *ranks in differing if ranks == [one, other])
        raise AgreementError(
            f"the ranks disagree on the batch: {names} of rank {one} differ from those of rank {other}; every"
            " rank of a pipeline must be given the same batch: shard loaders over data ranks only, as"
            " DistributedSampler(data, num_replicas=data_ranks, rank=data_rank) does, with one seed for the"
            " ranks of a pipeline; what the stages of a rank do not read may be None there"
        )


# -- programs of stages that several ranks hold: data ranks, and replicas


def require_same_programs(
    stages: Iterable[tuple[int, Outline]], gather: Callable[[str], Mapping[int, str]]
) -> None:
    """Raise AgreementError for a stage of which ranks run different programs for the same shapes.

    Compared is what a stage and its loss call when they are evaluated: operators, their attributes, shapes,
    and the bits of tensors that the functions capture; of autograd.Functions also the code of their backward.
    That is in the step in which the ranks meet: the first, and the one after a failure. Not compared are what
    custom operators do inside, hooks on gradients, shapes that come later, and ranks that were given other
    shapes.

    Args:
        stages: stages of this rank: the number of each in the model and its evaluation.
        gather: gathers the texts of all ranks that compare.
    """
    mine: dict[str, str] = {}
    for stage, evaluated in stages:
        if (program := evaluated.program) is not None:
            modes = sorted({module.training for module in evaluated.modules})
            sums = [int(checksum(t)) for t in program.constants if not t.is_meta]
            key = json.dumps([stage, modes, program.takes])
            mine.setdefault(key, f"{program.digest} {digest(repr(sums))}")
    texts = sorted(gather(json.dumps(mine, sort_keys=True)).items())
    for key, (one, _), (other, _) in differences((rank, json.loads(text)) for rank, text in texts):
        raise AgreementError(
            f"stage {json.loads(key)[0]} runs other programs on ranks {one} and {other}; give every rank that"
            " holds a stage the same function, the same loss and the same constants"
        )


# -- bits of tensors


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the bits of a tensor, 8 bytes at a time, each mixed with its position: int64[] on its device.

    Other values or another order change the sum. Another shape or dtype alone does not.

    References:
        Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014, for the constants.
    """
    flat = bits(tensor.detach())
    tail = flat.numel() % 8
    head, rest = flat[: flat.numel() - tail], flat[flat.numel() - tail :]
    words = (head if head.storage_offset() % 8 == 0 else head.clone()).view(torch.int64)
    total = _mixed(torch.cat([rest, rest.new_zeros(8 - tail)]).view(torch.int64), words.numel())
    for start in range(0, words.numel(), _PIECE):
        total += _mixed(words[start : start + _PIECE], start)
    return total


def _mixed(words: torch.Tensor, start: int) -> torch.Tensor:
    """Sum words, each mixed with its position, modulo 2**64."""
    mixed = torch.arange(start + 1, start + 1 + words.numel(), device=words.device).mul_(_GOLDEN).add_(words)
    mixed ^= (mixed >> 32) & _LOW
    mixed *= _MIX
    mixed ^= (mixed >> 32) & _LOW
    return mixed.sum()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8[bytes]: a view where it is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compare the bits of two tensors of one shape, dtype and device: bool[] on it, not waited for."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(one.itemsize, torch.int64)
    return (bits(one).view(word) != bits(other).view(word)).any()

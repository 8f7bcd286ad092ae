"""Read trees and batches, and describe them by all that a program depends on beside the values.

Every step compares its trees with the form of its program, so comparing has to be fast.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from numbers import Integral
from operator import add, gt
from typing import Any, NamedTuple, Self

import torch
from optree import PyTreeSpec

from ppfunc._checks import require_counts, shown
from ppfunc.stage._torch import guards, is_dtensor, transforming, values
from ppfunc.stage.constants import with_constants, without_constants
from ppfunc.stage.device import accelerates
from ppfunc.stage.layout import MeshLayout, layout_of, local, same_layout
from ppfunc.stage.signature import LeafSignature, Signature, flatten
from ppfunc.stage.tree import tree_flatten, tree_paths, tree_structure

from .batch import Leaves, Microbatches, refuse_microbatches, require_divisible, without_marks


class NestedDicts(NamedTuple):
    """A structure of dictionaries and lists alone, which are read faster than other nodes.

    Args:
        keys: of a dictionary, in order; the length of a list.
        below: what is at each of them, None for a leaf; None where all are leaves.
    """

    keys: list[Any] | int
    below: "list[NestedDicts | None] | None"

    @classmethod
    def of(cls, treedef: PyTreeSpec, levels: int = 32) -> Self | None:
        """Read a structure; None if it has other nodes, or more levels."""
        if treedef.type not in (dict, list) or not levels:
            return None
        below: list[NestedDicts | None] = []
        for child in treedef.children():
            below.append(cls.of(child, levels - 1))
            if below[-1] is None and not child.is_leaf():
                return None
        keys = treedef.entries() if treedef.type is dict else treedef.num_children
        return cls(keys, below if any(below) else None)

    def read(self, tree: Any, leaves: list[Any]) -> bool:
        """Append the leaves of a tree; return False if it has another structure above its leaves."""
        if type(tree) is dict and list(tree) == self.keys:
            values: Iterable[Any] = tree.values()
        elif type(tree) is list and len(tree) == self.keys:
            values = tree
        else:
            return False
        if self.below is None:
            leaves += values
            return True
        for value, below in zip(values, self.below, strict=True):
            if below is None:
                leaves.append(value)
            elif not below.read(value, leaves):
                return False
        return True


class Form(NamedTuple):
    """Describe a tree by all that a program depends on beside the values, laid out for fast comparison."""

    treedef: PyTreeSpec
    dicts: NestedDicts | None  # of a tree that is made of dictionaries and lists alone
    classes: frozenset[type]  # kept alive, since guards know them by their addresses
    guards: Callable[..., bool]
    layouts: tuple[MeshLayout | None, ...] | None  # of the leaves, where there are DTensors


def form_of(leaves: Sequence[torch.Tensor], treedef: PyTreeSpec) -> Form:
    """Return the form of a tree that :func:`flatten` took apart, which keeps no tensor alive."""
    layouts = tuple(map(layout_of, leaves))
    return Form(
        treedef,
        NestedDicts.of(treedef),
        frozenset(map(type, leaves)),
        guards(leaves),
        layouts if any(layouts) else None,
    )


def leaves_like(tree: Any, form: Form) -> list[Any] | None:
    """Return the leaves of ``tree`` if it has the structure of this form; else None."""
    if form.dicts is not None:
        leaves: list[Any] = []
        return leaves if form.dicts.read(tree, leaves) else None
    if form.treedef.is_leaf():  # the guards refuse what is no tensor
        return [tree]
    leaves, treedef = tree_flatten(tree)
    return leaves if treedef == form.treedef else None


def same_form(tree: Any, form: Form) -> tuple[torch.Tensor, ...] | None:
    """Return the leaves of ``tree``, of DTensors this rank's parts, if it has this form; else None.

    It takes 0.1 us per leaf of dictionaries and lists, 0.3 us of others.

    Compared are structure, order of keys, and of each leaf the class, dtype, device, shape, strides, whether
    it requires a gradient, and dispatch keys, which tell inference mode, transforms and autocast; of a
    DTensor the layout and the mesh. A tree that holds one tensor twice never has the form.
    """
    leaves = leaves_like(tree, form)
    if leaves is None or not has_form(leaves, form):
        return None
    return tuple(leaves if form.layouts is None else map(local, leaves))


def has_form(leaves: Sequence[Any], form: Form) -> bool:
    """Tell whether the leaves of a tree of this structure have this form, see :func:`same_form`."""
    return form.guards(*leaves) and (form.layouts is None or all(map(same_layout, leaves, form.layouts)))


@dataclass(frozen=True, slots=True, eq=False)
class TreeForm:
    """Describe one tree of tensors: all that a program depends on beside the values.

    Args:
        form: to compare another tree with it.
        types, strides, devices: of its leaves; of DTensors, strides and devices of their local tensors.
        signature: of the tree, or, of a whole batch, of one microbatch.
        tracked: whether a leaf requires a gradient, and so may have a history.
        rows: of one microbatch of a whole batch, 0 without leaves; None for other trees.
        whole: which leaves of a whole batch every microbatch takes whole; None if none.
    """

    form: Form
    types: tuple[type, ...]
    strides: tuple[tuple[int, ...], ...]
    devices: tuple[torch.device, ...]
    signature: Signature
    tracked: bool
    rows: int | None
    whole: tuple[bool, ...] | None

    def cut(self, leaves: Leaves, microbatches: int) -> list[Leaves]:
        """Cut the leaves of a whole batch into those of every microbatch, as views."""
        if not leaves:
            return [()] * microbatches
        columns = [
            [leaf] * microbatches if of_each else leaf.chunk(microbatches)
            for leaf, of_each in zip(leaves, self.whole or repeat(False), strict=False)
        ]
        return list(zip(*columns, strict=True))

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a hashable key, equal for equal forms."""
        return self.signature, self.types, self.strides, self.devices, self.whole


class StepForm(NamedTuple):
    """Describe all arguments of one call, by stage of the model: a program is lowered for one such form.

    Args:
        trees: the form of every tree, by its name.
        key: equal for arguments that run the same program.
        params, state: signatures.
        extents: of every leaf of the parameters, bytes from its first element to its last.
        devices: where each stage computes.
        accelerator: the first of them, None if it is the host.
        inputs, targets: signatures of the microbatches; None if this process was given none.
        rows: of a microbatch of a whole batch; None if the inputs came as Microbatches.
        extras: signatures of the microbatches.
    """

    trees: Mapping[str, TreeForm]
    key: tuple[Any, ...]
    params: Mapping[int, Signature]
    extents: tuple[int, ...]
    devices: Mapping[int, torch.device]
    accelerator: torch.device | None
    inputs: tuple[Signature, ...] | None
    targets: tuple[Signature, ...] | None
    rows: int | None
    extras: Mapping[int, tuple[Signature, ...]]
    state: Mapping[int, Signature]

    @property
    def distributed(self) -> bool:
        """Tell whether there are DTensors among the arguments."""
        return any(tree.form.layouts for tree in self.trees.values())


def read_tree(tree: Any, name: str, microbatches: int) -> tuple[Leaves, TreeForm]:
    """Read the leaves of a tree and its form."""
    marked, (tree, whole) = tree, without_marks(tree)
    leaves, treedef = flatten(tree, name)
    refuse_microbatches(treedef, name)
    if not microbatches and marked is not tree:
        raise TypeError(
            f"{name}: got ppfunc.replicated(x), which is for parts of a whole batch; give x itself"
        )
    for leaf, path in zip(leaves, tree_paths(treedef, name), strict=True) if transforming() else ():
        if is_dtensor(values(leaf)):
            raise ValueError(
                f"{path}: got a DTensor under a torch.func transform, which does not support it; use"
                " ppfunc.jvp or hvp"
            )
    local_leaves = tuple(map(local, leaves))
    signature = Signature(treedef, tuple(map(LeafSignature.of, leaves)))
    rows = None
    if microbatches:
        require_divisible(local_leaves, tree_paths(treedef), microbatches, name, whole)
        signature = signature.cut(microbatches, whole)
        cut_leaves = zip(signature.leaves, whole or repeat(False), strict=False)
        rows = next((leaf.shape[0] for leaf, of_each in cut_leaves if not of_each), 0)
    return local_leaves, TreeForm(
        form_of(leaves, tree_structure(marked)),
        tuple(map(type, leaves)),
        tuple(t.stride() for t in local_leaves),
        tuple(t.device for t in local_leaves),
        signature,
        any(t.requires_grad for t in leaves),
        rows,
        whole if microbatches else None,
    )


def microbatch(batch: Any, microbatches: int) -> Microbatches:
    """Cut a batch along axis 0: every leaf ``[m b, ...]`` becomes ``m`` views ``[b, ...]``.

    Of a DTensor, each rank cuts its local tensor.

    Args:
        batch: a tree of tensors with the same size of axis 0; others are :func:`replicated`.
        microbatches: ``m``, at least 1, which must divide that size.

    Raises:
        ValueError: a leaf has no axis 0, or one that is not divisible by ``m``, or leaves disagree on its
            size.
        TypeError: a leaf is not a tensor, or ``microbatches`` is not an integer.

    >>> microbatch({"x": torch.zeros(6, 2)}, 3)[0]["x"].shape
    torch.Size([2, 2])
    """
    if not isinstance(microbatches, Integral):
        raise TypeError(
            f"microbatches: got {shown(microbatches)}, expected an integer; the order is batch, microbatches"
        )
    require_counts(microbatches=int(microbatches))
    leaves, form = read_tree(with_constants(batch, "batch"), "batch", int(microbatches))
    parts = map(form.signature.wrap, form.cut(leaves, int(microbatches)))
    return Microbatches(map(without_constants, parts))


def step_form(
    trees: Mapping[str, TreeForm],
    stages: Sequence[int],
    microbatches: int,
    params: Mapping[int, Leaves],
    inputs: Sequence[Leaves],
    known: Mapping[int, torch.device],
) -> StepForm:
    """Put together the form of all arguments; ``known`` says where stages compute, before their leaves do."""

    def batch(name: str) -> tuple[Signature, ...] | None:
        if name in trees:
            return (trees[name].signature.without_grad(),) * microbatches
        forms = [trees[f"{name}[{i}]"] for i in range(microbatches) if f"{name}[{i}]" in trees]
        return tuple(form.signature.without_grad() for form in forms) or None

    extras = {s: batch(f"extras[{s}]") for s in stages}
    devices = {s: known.get(s) or _device(params, s, inputs) for s in stages}
    first = next(iter(devices.values()))
    return StepForm(
        trees,
        tuple((name, form.key) for name, form in sorted(trees.items())),
        {s: trees[f"params[{s}]"].signature for s in stages},
        tuple(extent(leaf) for s in stages for leaf in params[s]),
        devices,
        first if accelerates(first) else None,
        batch("inputs"),
        batch("targets"),
        trees["inputs"].rows if "inputs" in trees else None,
        {s: signatures for s, signatures in extras.items() if signatures},
        {s: trees[f"state[{s}]"].signature.without_grad() for s in stages if f"state[{s}]" in trees},
    )


def require_values(name: str, treedef: PyTreeSpec, devices: Sequence[torch.device]) -> None:
    """Raise ValueError for a leaf without values; of parameters, for leaves on several devices.

    Args:
        name: of the tree, for errors.
        devices: of its leaves.
    """
    for path, device in zip(tree_paths(treedef, name), devices, strict=True):
        if device.type == "meta":
            raise ValueError(
                f"{path}: got a tensor on the device meta, which has no values; load or materialise it"
                " (split.load, ppfunc.materialize), or lower the call, .lower(...), for shapes alone"
            )
        if device != devices[0] and name.startswith("params"):
            raise ValueError(
                f"{path}: got a tensor on {device}, others of this stage are on {devices[0]}; move all to one"
                " device"
            )


def _device(params: Mapping[int, Leaves], stage: int, inputs: Sequence[Leaves]) -> torch.device:
    """Choose where a stage computes: with its parameters, else those nearest to it, else the batch."""
    near = sorted(params, key=lambda s: abs(s - stage))
    device = next((params[s][0].device for s in near if params[s]), None)
    if device is None:
        device = next((t.device for row in inputs for t in row), None)
    return torch.get_default_device() if device is None or device.type == "meta" else device


def extent(tensor: torch.Tensor) -> int:
    """Count the bytes from the beginning of the first element of a tensor to the end of the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (1 + last) if tensor.numel() else 0


def overlap(addresses: Sequence[int], extents: Sequence[int]) -> bool:
    """Tell whether the memory of tensors may overlap: else each ends before the next begins."""
    return any(map(gt, sorted(map(add, addresses, extents)), sorted(addresses)[1:]))


class LaidOut(NamedTuple):
    """Describe how the DTensors among the arguments of a step lie over meshes.

    Args:
        leaves: dtype and layout, by the name of the leaf.
        digest: of all of them, equal where they are; empty without DTensors.
    """

    leaves: Mapping[str, str]
    digest: str

    def __str__(self) -> str:
        return "; ".join(f"{name}: {leaf}" for name, leaf in self.leaves.items()) or "no DTensors"

"""Describe the arguments of one call by all that a program depends on beside the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch

from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage._torch import is_dtensor, transforming, values
from ppfunc.stage.device import accelerates
from ppfunc.stage.form import Form, form_of
from ppfunc.stage.layout import local
from ppfunc.stage.signature import flatten
from ppfunc.stage.tree import tree_paths, tree_structure

from .batch import Leaves, refuse_microbatches, require_divisible, without_marks


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
                " ppfunc.jvp, hvp or gnvp"
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


def step_form(
    trees: Mapping[str, TreeForm],
    stages: Sequence[int],
    microbatches: int,
    params: Mapping[int, Leaves],
    inputs: Sequence[Leaves],
) -> StepForm:
    """Put together the form of all arguments."""

    def batch(name: str) -> tuple[Signature, ...] | None:
        if name in trees:
            return (trees[name].signature.without_grad(),) * microbatches
        forms = [trees[f"{name}[{i}]"] for i in range(microbatches) if f"{name}[{i}]" in trees]
        return tuple(form.signature.without_grad() for form in forms) or None

    extras = {s: batch(f"extras[{s}]") for s in stages}
    devices = {s: _device(params, s, inputs) for s in stages}
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


def require_values(trees: Mapping[str, TreeForm]) -> None:
    """Raise ValueError for a leaf without values, or on another device than the others of its stage."""
    for name, form in trees.items():
        devices = form.devices
        for path, device in zip(tree_paths(form.form.treedef), devices, strict=True):
            if device.type == "meta":
                raise ValueError(
                    f"{name}{path}: got a tensor on the device meta, which has no values; materialise it, or"
                    " call step.lower for shapes alone"
                )
            if device != devices[0] and name.startswith("params"):
                raise ValueError(
                    f"{name}{path}: got a tensor on {device}, others of this stage are on {devices[0]}; move"
                    " all to one device"
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

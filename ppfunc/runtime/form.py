"""The form of the arguments of a step: all that its program depends on beside the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.layout import local
from ppfunc.stage.signature import Form, flatten, form_of, same_form
from ppfunc.stage.tree import tree_paths

from .batch import Leaves, refuse_microbatches, require_divisible
from .functorch import is_transformed_dtensor, transforming
from .ownership import extent


@dataclass(frozen=True, slots=True, eq=False)
class TreeForm:
    """The form of one tree of tensors: all that a program depends on beside the values.

    Args:
        form: to compare another tree with it.
        types, strides, devices: of its leaves; of DTensors, those of the parts of this rank, which alone go on from here.
        signature: of the tree, or, of a whole batch, of one microbatch.
        tracked: whether a leaf requires a gradient, and so may have a history.
        whole: signature of the tree, of a whole batch too.
    """

    form: Form
    types: tuple[type, ...]
    strides: tuple[tuple[int, ...], ...]
    devices: tuple[torch.device, ...]
    signature: Signature
    tracked: bool
    whole: Signature

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable, equal for equal forms."""
        return self.signature, self.types, self.strides, self.devices


class StepForm(NamedTuple):
    """The form of all arguments of one call, by stage of the model: what a program is lowered for.

    Args:
        params, state: signatures.
        strides: of every leaf of the parameters, in elements.
        extents: of every leaf of the parameters, bytes from its first element to its last.
        devices: where each stage computes.
        inputs, targets: signatures of the microbatches; None where this process was given none.
        rows: rows of a microbatch, where the inputs came as a whole batch; None where they came as Microbatches.
        other_rows: likewise of targets and extras that came as whole batches, by name.
        extras: signatures of the microbatches.
    """

    params: Mapping[int, Signature]
    strides: Mapping[int, tuple[tuple[int, ...], ...]]
    extents: tuple[int, ...]
    devices: Mapping[int, torch.device]
    inputs: tuple[Signature, ...] | None
    targets: tuple[Signature, ...] | None
    rows: int | None
    other_rows: Mapping[str, int]
    extras: Mapping[int, tuple[Signature, ...]]
    state: Mapping[int, Signature]


def read_tree(tree: Any, form: TreeForm | None, name: str, microbatches: int) -> tuple[Leaves, TreeForm]:
    """The leaves of a tree, and its form: ``form`` itself where the tree has that."""
    if form is not None and (same := same_form(tree, form.form)) is not None:
        return same, form
    leaves, treedef = flatten(tree, name)
    refuse_microbatches(treedef, name)
    for leaf, path in zip(leaves, tree_paths(treedef, name), strict=True) if transforming() else ():
        if is_transformed_dtensor(leaf):
            raise ValueError(f"{path}: got a DTensor under a torch.func transform, which knows none; use ppfunc.jvp, hvp or gnvp")
    parts = tuple(map(local, leaves))
    signature = Signature(treedef, tuple(map(LeafSignature.of, leaves)))
    whole = signature
    if microbatches:
        require_divisible(parts, tree_paths(treedef), microbatches, name)
        signature = signature.cut(microbatches)
    metadata = (tuple(map(type, leaves)), tuple(t.stride() for t in parts), tuple(t.device for t in parts))
    tracked = any(t.requires_grad for t in leaves)
    return parts, TreeForm(form_of(leaves, treedef), *metadata, signature, tracked, whole)


def step_form(
    trees: Mapping[str, TreeForm], stages: Sequence[int], microbatches: int, params: Mapping[int, Leaves], inputs: Sequence[Leaves]
) -> StepForm:
    """The form of all arguments."""

    def batch(name: str) -> tuple[Signature, ...] | None:
        if name in trees:
            return (trees[name].signature.without_grad(),) * microbatches
        found = [trees[f"{name}[{i}]"] for i in range(microbatches) if f"{name}[{i}]" in trees]
        return tuple(form.signature.without_grad() for form in found) or None

    extras = {s: batch(f"extras[{s}]") for s in stages}
    return StepForm(
        {s: trees[f"params[{s}]"].signature for s in stages},
        {s: trees[f"params[{s}]"].strides for s in stages},
        tuple(extent(leaf) for s in stages for leaf in params[s]),
        {s: _device(params, s, inputs) for s in stages},
        batch("inputs"),
        batch("targets"),
        _rows(trees["inputs"]) if "inputs" in trees else None,
        {name: _rows(trees[name]) for name in ("targets", *(f"extras[{s}]" for s in stages)) if name in trees},
        {s: found for s, found in extras.items() if found},
        {s: trees[f"state[{s}]"].signature.without_grad() for s in stages if f"state[{s}]" in trees},
    )


def _rows(form: TreeForm) -> int:
    """Rows of one microbatch of a whole batch."""
    return next((leaf.shape[0] for leaf in form.signature.leaves), 0)


def require_values(trees: Mapping[str, TreeForm]) -> None:
    """Raise where a leaf has no values, or lives on another device than the others of its stage."""
    for name, form in trees.items():
        devices = form.devices
        for path, device in zip(tree_paths(form.form.treedef), devices, strict=True):
            if device.type == "meta":
                raise ValueError(
                    f"{name}{path}: got a tensor on the device meta, which has no values; materialise it, or call "
                    "step.lower for shapes alone"
                )
            if device != devices[0] and name.startswith("params"):
                raise ValueError(
                    f"{name}{path}: got a tensor on {device}, others of this stage are on {devices[0]}; move all to one device"
                )


def _device(params: Mapping[int, Leaves], stage: int, inputs: Sequence[Leaves]) -> torch.device:
    """Where a stage computes: with its parameters; without any, with those nearest to it or with the batch."""
    near = sorted(params, key=lambda s: abs(s - stage))
    found = next((params[s][0].device for s in near if params[s]), None)
    if found is None:
        found = next((t.device for row in inputs for t in row), None)
    return torch.get_default_device() if found is None or found.type == "meta" else found

"""Describe trees of tensors by structure, shapes, dtypes and gradient flags."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from fnmatch import fnmatchcase
from itertools import repeat
from typing import Any

import optree
import torch
from torch.distributed.device_mesh import DeviceMesh

from ._torch import is_dtensor
from .layout import MeshLayout, cut_by, distributed, layout_of, local, same_placement
from .tree import (
    NAMESPACE,
    structure_from_json,
    structure_to_json,
    tree_flatten,
    tree_paths,
)

_SHORT = reprlib.Repr()
_SHORT.maxother = 80
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


@dataclass(frozen=True, slots=True)
class LeafSignature:
    """One tensor of a tree: its sizes, its dtype, and whether a gradient is wanted; only floating and complex
    leaves can have one.

    Of a DTensor, the sizes are those of the part of this rank, and ``layout`` says what it is a part of.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    layout: MeshLayout | None = None

    def __post_init__(self) -> None:
        if self.grad and not differentiable(self.dtype):
            raise ValueError(
                f"a leaf of {self.dtype} was marked grad=True; only floating and complex leaves carry"
                " gradients"
            )

    @classmethod
    def of(cls, tensor: torch.Tensor, grad: bool = True) -> LeafSignature:
        """Describe a tensor; a gradient is wanted if ``grad`` and if the dtype can carry it."""
        return cls(
            tuple(local(tensor).shape), tensor.dtype, grad and differentiable(tensor.dtype), layout_of(tensor)
        )

    def cut(self, pieces: int) -> LeafSignature:
        """Return the signature of each of ``pieces`` equal pieces along axis 0."""
        return replace(
            self,
            shape=(self.shape[0] // pieces, *self.shape[1:]),
            layout=self.layout and self.layout.cut(pieces),
        )

    def stacked(self, rows: int) -> LeafSignature:
        """Return the signature of ``rows`` such tensors, stacked along a new axis 0."""
        return replace(self, shape=(rows, *self.shape), layout=self.layout and self.layout.stacked(rows))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        dtype, sizes = str(self.dtype).removeprefix("torch."), ",".join(map(str, self.shape))
        layout = "" if self.layout is None else f" {self.layout}"
        return f"{dtype}[{sizes}]{layout}{'' if self.grad else ' no grad'}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of a tree and its leaves: hashable, comparable, storable as JSON.

    Args:
        treedef: the structure, as ``optree`` gives it (``None`` is a node without leaves).
        leaves: an entry per tensor, in the order of :func:`~ppfunc.stage.tree.tree_leaves`.
    """

    treedef: optree.PyTreeSpec
    leaves: tuple[LeafSignature, ...]

    def __post_init__(self) -> None:
        if len(self.leaves) != self.treedef.num_leaves:
            raise ValueError(
                f"got {len(self.leaves)} leaves for a structure of {self.treedef.num_leaves}: {self.treedef}"
            )

    @classmethod
    def of(cls, tree: Any, name: str = "tree") -> Signature:
        """Describe ``tree``, with every floating or complex leaf marked as carrying a gradient.

        Args:
            tree: a tree of tensors. A signature is returned as it is.
            name: the name of the tree in errors.

        Raises:
            TypeError: a leaf is not a tensor; the message gives its path.

        >>> str(Signature.of({"w": torch.zeros(2, 3), "n": torch.zeros(4, dtype=torch.int64)}))
        "{'w': float32[2,3], 'n': int64[4] no grad}"
        """
        if isinstance(tree, Signature):
            return tree
        leaves, treedef = flatten(tree, name)
        return cls(treedef, tuple(map(LeafSignature.of, leaves)))

    def without_grad(self) -> Signature:
        """Return the same tree with no gradient wanted."""
        return replace(self, leaves=tuple(replace(leaf, grad=False) for leaf in self.leaves))

    def with_grad(self) -> Signature:
        """Return the same tree with the gradient of every floating or complex leaf wanted."""
        return replace(
            self, leaves=tuple(replace(leaf, grad=differentiable(leaf.dtype)) for leaf in self.leaves)
        )

    def beside(self, other: Signature) -> tuple[str, str]:
        """Write this and another signature: the first leaf that differs, where they have one structure.

        >>> two, three = (Signature.of({"h": torch.zeros(n), "k": torch.zeros(1)}) for n in (2, 3))
        >>> two.beside(three)
        ("['h'] float32[2]", "['h'] float32[3]")
        """
        if self.treedef == other.treedef:
            for path, one, another in zip(self.paths, self.leaves, other.leaves, strict=True):
                if one != another:
                    return f"{path} {one}".lstrip(), f"{path} {another}".lstrip()
        return str(self), str(other)

    @property
    def local(self) -> Signature:
        """Return the same tree without layouts, and of DTensors the parts of one rank."""
        return replace(self, leaves=tuple(replace(leaf, layout=None) for leaf in self.leaves))

    def laid_out(self, mesh: DeviceMesh | None, prefix: Any, name: str) -> Signature:
        """Return the same tree, whose leaves are this rank's parts of tensors cut over a mesh.

        Args:
            prefix: a placement, or a tree of them that the tree begins like; None for plain tensors.
            name: the name of the tree in errors.

        Raises:
            ValueError: the tree does not begin like ``prefix``, a leaf lacks the axis that is cut, or is a
                part of another.
        """
        if prefix is None or mesh is None or not self.leaves:
            return self
        try:
            placements = optree.broadcast_prefix(prefix, self.unflatten(self.leaves), namespace=NAMESPACE)
        except ValueError as error:
            raise ValueError(
                f"{name}: got {self}, expected a tree that begins like the declared placements, {prefix}"
            ) from error
        leaves = []
        for path, leaf, placement in zip(self.paths, self.leaves, placements, strict=True):
            layout = cut_by(mesh, [placement], leaf.shape)
            if leaf.layout is not None and not same_placement(leaf.layout, layout):
                raise ValueError(
                    f"{name}{path}: got {leaf}, expected the declared layout {layout}; redistribute it, or"
                    " declare its own"
                )
            leaves.append(replace(leaf, layout=leaf.layout or (layout if layout.sharded else None)))
        return replace(self, leaves=tuple(leaves))

    def cut(self, microbatches: int, whole: Sequence[bool] | None = None) -> Signature:
        """Return the signature of each of ``microbatches`` equal parts, cut along axis 0 on every rank.

        Leaves that are ``whole`` are the same in each.
        """
        pairs = zip(self.leaves, whole or repeat(False), strict=False)
        return replace(
            self, leaves=tuple(leaf if of_each else leaf.cut(microbatches) for leaf, of_each in pairs)
        )

    @property
    def nbytes(self) -> int:
        """Add up the sizes of all leaves in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of the leaves, such as ``"['w'][0]"``."""
        return tree_paths(self.treedef)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Return the tree with these leaves."""
        return self.treedef.unflatten(leaves)

    def wrap(self, leaves: Iterable[torch.Tensor]) -> Any:
        """Return the tree with these leaves, as DTensors where they have a layout."""
        layouts = [leaf.layout for leaf in self.leaves]
        return self.unflatten(map(distributed, leaves, layouts) if any(layouts) else leaves)

    def require(self, tree: Any, name: str) -> tuple[torch.Tensor, ...]:
        """Return the leaves of ``tree``, of DTensors the local parts. Flags of gradients are not compared.

        Raises:
            ValueError: another structure, shape or dtype; the message names the leaf.
        """
        leaves, treedef = flatten(tree, name)
        if treedef != self.treedef:
            raise ValueError(f"{name}: got the structure {treedef}, expected {self.treedef}")
        tensors = tuple(map(local, leaves))
        for n, (leaf, tensor, want) in enumerate(zip(leaves, tensors, self.leaves, strict=True)):
            if tensor.shape != want.shape or tensor.dtype != want.dtype or layout_of(leaf) != want.layout:
                got = LeafSignature.of(leaf, want.grad)
                raise ValueError(
                    f"{name}{self.paths[n]}: got {got}, expected {want}; build the program again for new"
                    " shapes"
                )
        return tensors

    def to_json(self) -> str:
        """Write JSON text, equal for equal signatures; :meth:`from_json` reads it.

        Raises:
            TypeError: a node of the tree has keys or fields that JSON cannot hold.
        """
        leaves = [
            [leaf.shape, str(leaf.dtype).removeprefix("torch."), leaf.grad]
            + ([] if leaf.layout is None else [leaf.layout.to_json()])
            for leaf in self.leaves
        ]
        return json.dumps([structure_to_json(self.treedef), leaves], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Signature:
        """Read the text of :meth:`to_json`. No code is imported and nothing is unpickled.

        Raises:
            ValueError: not such a text, or a class in it is not known in this process.

        >>> s = Signature.of((torch.zeros(2), None))
        >>> Signature.from_json(s.to_json()) == s
        True
        """
        try:
            structure, leaves = json.loads(text)
            read = tuple(_leaf_from_json(*leaf) for leaf in leaves)
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"not the JSON text of a signature: {text[:200]!r} ({error})") from error
        return cls(structure_from_json(structure), read)

    def __str__(self) -> str:
        try:
            return str(self.unflatten(Unquoted(str(leaf)) for leaf in self.leaves))
        except Exception:  # deep, or of classes that show themselves by what tensors alone have
            return (
                f"a tree of {', '.join(map(str, self.leaves[:8]))}{', ...' if len(self.leaves) > 8 else ''}"
            )


class Unquoted(str):
    """Shows a text without quotes."""

    __repr__ = str.__str__


def _leaf_from_json(shape: list[int], dtype: str, grad: bool, layout: Any = None) -> LeafSignature:
    if not all(type(n) is int and n >= 0 for n in shape) or type(grad) is not bool:
        raise ValueError(f"got the leaf {[shape, dtype, grad]}, expected [sizes, dtype, true or false]")
    return LeafSignature(
        tuple(shape), _DTYPES[dtype], grad, None if layout is None else MeshLayout.from_json(layout)
    )


def differentiable(dtype: torch.dtype) -> bool:
    """Tell whether tensors of this dtype can carry gradients.

    >>> differentiable(torch.complex64), differentiable(torch.bool)
    (True, False)
    """
    return dtype.is_floating_point or dtype.is_complex


def flatten(tree: Any, name: str = "tree") -> tuple[tuple[torch.Tensor, ...], optree.PyTreeSpec]:
    """Return the tensors of ``tree`` and its structure.

    Raises:
        TypeError: a leaf is not a dense tensor; the message gives its path below ``name``.
    """
    leaves, treedef = tree_flatten(tree, name)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            got, expected = f"{_SHORT.repr(leaf)} of type {type(leaf).__name__}", "a tensor"
            mend = "make it one, as torch.as_tensor does, or bind a constant with functools.partial"
            if name.startswith("returned") and isinstance(leaf, int | float):
                mend = (
                    f"return torch.tensor({leaf!r}), {str(torch.tensor(leaf).dtype).removeprefix('torch.')}"
                )
            if isinstance(leaf, torch.nn.Module):
                mend = "give ppfunc.stage_from_module(module).params"
            elif isinstance(leaf, Iterator) or type(leaf).__name__ == "DataLoader":
                mend = "take its next items, ppfunc.Microbatches.from_iterator(iter(...), microbatches)"
            elif isinstance(leaf, Mapping | list | tuple | set) or is_dataclass(leaf):
                got += ", a class that neither optree nor torch.utils._pytree knows"
                mend = "make it a dict or a tuple of tensors, or register its class with one of them"
                if is_dataclass(leaf):
                    mend += f", as torch.export.register_dataclass({type(leaf).__name__}) does"
        elif leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            got, expected = f"a {kind} tensor", "a dense one"
            mend = (
                "carry a padded tensor and the lengths"
                if leaf.is_nested
                else "carry its to_dense(), or parts"
            )
        elif is_dtensor(leaf) and any(placement.is_partial() for placement in leaf.placements):
            got, expected = "a DTensor whose ranks hold parts of a sum", "one that is whole or cut on a rank"
            mend = "redistribute it: x.redistribute(placements=[Replicate()])"
        else:
            continue
        path = tree_paths(treedef, name)[index]
        raise TypeError(f"{path}: got {got}, expected {expected}; {mend}")
    return tuple(leaves), treedef


def leaf_names(signature: Signature) -> list[str]:
    """Join the keys on the way to each leaf by dots."""
    return names_in(signature.treedef)


def names_in(treedef: optree.PyTreeSpec) -> list[str]:
    """Name the leaves of a structure, as :func:`leaf_names` does."""
    return [".".join(map(str, path)) for path in optree.treespec_paths(treedef)]


def leaf_number(signature: Signature, name: str, tree: str) -> int:
    """Return the number of the leaf whose keys, joined by dots, are ``name``.

    Raises:
        ValueError: no leaf, or several, have that name.

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


# -- names and patterns, as of a shell, with ``|`` between alternatives; the first match counts


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a name, if any does.

    >>> first_match("h.0.bias", ["*norm*|*.bias", "*"])
    '*norm*|*.bias'
    """
    return next((p for p in patterns if any(fnmatchcase(name, one) for one in p.split("|"))), None)


def note_patterns(used: dict[str, bool], what: str, patterns: Collection[str], names: Iterable[str]) -> None:
    """Note which patterns take any of these names. ``"*"`` need not, since it stands for the rest.

    An alternative has to match a name, which an earlier pattern may take.

    >>> used = {}
    >>> note_patterns(used, "groups", ["*bias", "*norm*", "*"], ["h.bias"])
    >>> [text for text, takes in used.items() if not takes]
    ["groups: '*norm*' of '*bias', '*norm*', '*'"]
    >>> used = {}
    >>> note_patterns(used, "groups", ["*bias|*bais", "h*|*bias"], ["h.bias", "h.weight"])
    >>> [text for text, takes in used.items() if not takes]
    ["groups: '*bais' of '*bias|*bais', 'h*|*bias'"]
    """
    names = list(names)
    taken = {"*", *(first_match(name, patterns) for name in names)}
    for pattern in patterns:
        for one in dict.fromkeys([pattern, *pattern.split("|")]):
            takes = (
                pattern in taken
                if one == pattern
                else one == "*" or any(first_match(n, [one]) for n in names)
            )
            text = f"{what}: {one!r} of {', '.join(map(repr, patterns))}"
            used[text] = used.get(text, False) or takes


def require_reachable(what: str, patterns: Iterable[str]) -> None:
    """Raise ValueError for a pattern that an earlier one hides, since it takes all of its names.

    >>> require_reachable("reduce_state", ["*", "*counts"])
    Traceback (most recent call last):
        ...
    ValueError: reduce_state: '*counts' comes after '*', which takes all of its names; put it before
    """
    earlier: list[str] = []
    for pattern in patterns:
        for one in pattern.split("|"):
            # Of an earlier pattern with stars alone: what stands for several characters meets a star.
            names = re.sub(r"\[!?.[^]]*\]", "?", one)
            for other in earlier:
                if one == other or (not set("?[") & set(other) and fnmatchcase(names, other)):
                    raise ValueError(
                        f"{what}: {one!r} comes after {other!r}, which takes all of its names; put it before"
                    )
        earlier += pattern.split("|")

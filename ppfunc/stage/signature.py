"""Describe trees of tensors by structure, shapes, dtypes and gradient flags."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec

from ._torch import guards
from .structure import structure_from_json, structure_to_json
from .tree import tree_flatten, tree_paths, tree_unflatten

_SHORT = reprlib.Repr()
_SHORT.maxother = 80
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


@dataclass(frozen=True, slots=True)
class LeafSignature:
    """One tensor of a tree: its sizes, its dtype, and whether a gradient is wanted; only floating and complex leaves can have one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def __post_init__(self) -> None:
        if self.grad and not differentiable(self.dtype):
            raise ValueError(f"a leaf of {self.dtype} was marked grad=True; only floating and complex leaves carry gradients")

    @classmethod
    def of(cls, tensor: torch.Tensor, grad: bool = True) -> LeafSignature:
        """That of a tensor, of which a gradient is wanted if ``grad`` and if it can have one."""
        return cls(tuple(tensor.shape), tensor.dtype, grad and differentiable(tensor.dtype))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        dtype, sizes = str(self.dtype).removeprefix("torch."), ",".join(map(str, self.shape))
        return f"{dtype}[{sizes}]{'' if self.grad else ' no grad'}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of a tree and its leaves: hashable, comparable, storable as JSON.

    Args:
        treedef: the structure, as ``optree`` gives it (``None`` is a node without leaves).
        leaves: one entry per tensor, in the order of :func:`~ppfunc.stage.tree.tree_leaves`.
    """

    treedef: PyTreeSpec
    leaves: tuple[LeafSignature, ...]

    def __post_init__(self) -> None:
        if len(self.leaves) != self.treedef.num_leaves:
            raise ValueError(f"got {len(self.leaves)} leaves for a structure of {self.treedef.num_leaves}: {self.treedef}")

    @classmethod
    def of(cls, tree: Any, name: str = "tree") -> Signature:
        """The signature of ``tree``; every floating or complex leaf is marked as carrying a gradient.

        Args:
            tree: a tree of tensors. A signature is returned as it is.
            name: how to call the tree in an error.

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
        """The same tree, no leaf of which wants a gradient."""
        return replace(self, leaves=tuple(replace(leaf, grad=False) for leaf in self.leaves))

    def with_grad(self) -> Signature:
        """The same tree, every floating or complex leaf of which wants a gradient."""
        return replace(self, leaves=tuple(replace(leaf, grad=differentiable(leaf.dtype)) for leaf in self.leaves))

    @property
    def nbytes(self) -> int:
        """Size of all leaves in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves, such as ``"['w'][0]"``."""
        return tree_paths(self.treedef)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves."""
        return tree_unflatten(self.treedef, leaves)

    def require(self, tree: Any, name: str) -> tuple[torch.Tensor, ...]:
        """The leaves of ``tree``, which must have this signature (gradient flags aside).

        Raises:
            ValueError: another structure, shape or dtype; the message names the leaf.
        """
        leaves, treedef = flatten(tree, name)
        if treedef != self.treedef:
            raise ValueError(f"{name}: got the structure {treedef}, expected {self.treedef}")
        for n, (leaf, want) in enumerate(zip(leaves, self.leaves, strict=True)):
            if leaf.shape != want.shape or leaf.dtype != want.dtype:
                got = LeafSignature.of(leaf, want.grad)
                raise ValueError(f"{name}{self.paths[n]}: got {got}, expected {want}; build the program again for new shapes")
        return leaves

    def to_json(self) -> str:
        """JSON text, equal for equal signatures; read back by :meth:`from_json`.

        Raises:
            TypeError: a node of the tree has keys or fields that JSON cannot hold.
        """
        leaves = [[list(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.grad] for leaf in self.leaves]
        return json.dumps([structure_to_json(self.treedef), leaves], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Signature:
        """Read what :meth:`to_json` wrote. No code is imported and nothing is unpickled.

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
            return str(self.unflatten(_Plain(str(leaf)) for leaf in self.leaves))
        except RecursionError:
            return f"a deep tree of {', '.join(map(str, self.leaves[:8]))}{', ...' if len(self.leaves) > 8 else ''}"


class _Plain(str):
    """A text that shows itself without quotes."""

    __repr__ = str.__str__


def _leaf_from_json(shape: list[int], dtype: str, grad: bool) -> LeafSignature:
    if not all(type(n) is int and n >= 0 for n in shape) or type(grad) is not bool:
        raise ValueError(f"got the leaf {[shape, dtype, grad]}, expected [sizes, dtype, true or false]")
    return LeafSignature(tuple(shape), _DTYPES[dtype], grad)


def differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can carry gradients.

    >>> differentiable(torch.complex64), differentiable(torch.bool)
    (True, False)
    """
    return dtype.is_floating_point or dtype.is_complex


def flatten(tree: Any, name: str = "tree") -> tuple[tuple[torch.Tensor, ...], PyTreeSpec]:
    """The tensors of ``tree`` and its structure.

    Raises:
        TypeError: a leaf is not a dense tensor; the message gives its path below ``name``.
    """
    leaves, treedef = tree_flatten(tree, name)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            got, expected = f"{_SHORT.repr(leaf)} of type {type(leaf).__name__}", "a tensor"
            mend = "bind constants with functools.partial, or make tensors of them"
            if isinstance(leaf, Mapping | list | tuple | set) or is_dataclass(leaf):
                got += ", a class that neither optree nor torch.utils._pytree knows"
                mend = "make it a dict or a tuple of tensors, or register its class with one of them"
        elif leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            got, expected = f"a {kind} tensor", "a dense one"
            mend = "carry a padded tensor and the lengths" if leaf.is_nested else "carry its to_dense(), or its parts"
        else:
            continue
        path = tree_paths(treedef, name)[index]
        raise TypeError(f"{path}: got {got}, expected {expected}; {mend}")
    return tuple(leaves), treedef


class Form(NamedTuple):
    """All that a program depends on in a tree beside the values, in the form in which it is compared fastest; see :func:`form_of`."""

    treedef: PyTreeSpec
    keys: list[Any] | None  # of a dictionary of tensors alone, whose leaves are its values
    classes: frozenset[type]  # kept alive, since guards know them by their addresses
    guards: Callable[..., bool]


def form_of(leaves: Sequence[torch.Tensor], treedef: PyTreeSpec) -> Form:
    """The form of a tree that :func:`flatten` took apart. No tensor is kept alive."""
    flat = treedef.type is dict and treedef.num_nodes == treedef.num_leaves + 1
    keys = treedef.entries() if flat else None
    return Form(treedef, keys, frozenset(map(type, leaves)), guards(leaves))


def same_form(tree: Any, form: Form) -> tuple[torch.Tensor, ...] | None:
    """The leaves of ``tree`` if it is like the one that ``form`` is of, else None: 0.1 us per leaf of a flat dictionary, 0.5 of others.

    Compared are structure, order of keys, and of each leaf the class, dtype, device, shape, strides, whether it
    requires a gradient, and dispatch keys, which tell inference mode, transforms and autocast. A tree with one
    tensor in two places is like no other.
    """
    if form.keys is not None and type(tree) is dict:
        leaves, same = list(tree.values()), list(tree) == form.keys
    else:
        leaves, treedef = tree_flatten(tree)
        same = treedef == form.treedef
    return tuple(leaves) if same and form.guards(*leaves) else None

"""Flatten trees of tensors, with the classes that are registered with optree or with ``torch.utils._pytree``.

Everything in the package flattens by these functions, so that a class known in one place is known in all.
Dictionaries are read in the order of their keys, which is part of the structure: a stage may see it. ``None`` is a node
without leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import optree
from optree import PyTreeSpec

from ._torch import PYTREE_NODES

NAMESPACE = "ppfunc"
"""Where classes known to torch alone are registered, and dictionaries are read in their own order."""

_ordered = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_ordered.__enter__()  # for as long as the process lives: no other library uses the namespace


def tree_flatten(tree: Any, name: str = "tree") -> tuple[list[Any], PyTreeSpec]:
    """The leaves of a tree, called ``name`` in errors, and its structure.

    Raises:
        ValueError: the tree is nested deeper than optree allows.

    >>> tree_flatten({"b": (1, None), "a": 2})[0]
    [1, 2]
    """
    if len(PYTREE_NODES) != len(_seen):
        _adopt()
    try:
        return optree.tree_flatten(tree, namespace=NAMESPACE)
    except RecursionError as error:
        raise ValueError(f"{name}: got a tree nested deeper than {optree.MAX_RECURSION_DEPTH} levels, expected a flatter one") from error


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    return tree_flatten(tree)[0]


def tree_structure(tree: Any) -> PyTreeSpec:
    """The structure of a tree."""
    return tree_flatten(tree)[1]


def tree_unflatten(treedef: PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return treedef.unflatten(leaves)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """A tree of ``fn`` of every leaf, and of what is at its place in ``rest``."""
    leaves, treedef = tree_flatten(tree)
    return treedef.unflatten(map(fn, leaves, *map(treedef.flatten_up_to, rest)))


def tree_paths(treedef: PyTreeSpec, name: str = "") -> tuple[str, ...]:
    """Paths of the leaves of a tree called ``name``.

    >>> tree_paths(tree_structure({"b": (1, None), "a": 2}), "x")
    ("x['b'][0]", "x['a']")
    """
    return tuple(accessor.codify(name) for accessor in optree.treespec_accessors(treedef))


class NestedDicts(NamedTuple):
    """A structure of dictionaries alone, which are read faster than other nodes.

    Args:
        keys: of a dictionary, in order.
        below: what is at each of them, None for a leaf; None where all are leaves.
    """

    keys: list[Any]
    below: list[NestedDicts | None] | None

    @classmethod
    def of(cls, treedef: PyTreeSpec, levels: int = 32) -> NestedDicts | None:
        """That of a tree; None where it has other nodes, or more levels."""
        if treedef.type is not dict or not levels:
            return None
        below: list[NestedDicts | None] = []
        for child in treedef.children():
            below.append(cls.of(child, levels - 1))
            if below[-1] is None and not child.is_leaf():
                return None
        return cls(treedef.entries(), below if any(below) else None)

    def read(self, tree: Any, leaves: list[Any]) -> bool:
        """Append the leaves of a tree; False where it has another structure, unless something else is in the place of a leaf."""
        if type(tree) is not dict or list(tree) != self.keys:
            return False
        if self.below is None:
            leaves += tree.values()
            return True
        for value, below in zip(tree.values(), self.below, strict=True):
            if below is None:
                leaves.append(value)
            elif not below.read(value, leaves):
                return False
        return True


class _NodeEntry(optree.PyTreeEntry):
    """A step of a path as torch writes it, ``.value`` or ``['key']``."""

    def codify(self, node: str = "") -> str:
        return f"{node}{self.entry}"


_seen: set[Any] = set()
_adopting = threading.Lock()


def _adopt() -> None:
    """Register the classes that torch knows and optree does not."""
    with _adopting:
        for kind, node in list(PYTREE_NODES.items()):
            known = kind in _seen or not isinstance(kind, type) or optree.is_structseq_class(kind)
            if not known and optree.register_pytree_node.get(kind, namespace=NAMESPACE) is None:
                optree.register_pytree_node(kind, *_functions_of(node), path_entry_type=_NodeEntry, namespace=NAMESPACE)
            _seen.add(kind)


def _functions_of(node: Any) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any, Any], Any]]:
    """Flatten and unflatten a node that torch knows, as optree wants it."""

    def flatten(tree: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(tree)
        keys = node.flatten_with_keys_fn
        entries = [f"[{n}]" for n in range(len(children))] if keys is None else [str(key) for key, _ in keys(tree)[0]]
        return children, _frozen(context), tuple(entries)

    return flatten, lambda context, children: node.unflatten_fn(list(children), _thawed(context))


class FrozenList(tuple):
    """A list among the metadata of a node, which must be hashable."""


class FrozenDict(tuple):
    """A dictionary among the metadata of a node, as its items."""


def _frozen(context: Any) -> Any:
    kind = type(context)
    if kind is list or kind is tuple:
        return (FrozenList if kind is list else tuple)(map(_frozen, context))
    return FrozenDict(map(_frozen, context.items())) if kind is dict else context


def _thawed(context: Any) -> Any:
    kind = type(context)
    if kind is FrozenList or kind is tuple:
        return (list if kind is FrozenList else tuple)(map(_thawed, context))
    return dict(map(_thawed, context)) if kind is FrozenDict else context

"""Flatten trees of tensors, with the classes that are registered with optree or with ``torch.utils._pytree``.

Everything in the package flattens by these functions, so that a class known in one place is known in all.
Dictionaries are read in the order of their keys, which is part of the structure: a stage may see it. ``None`` is a node
without leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import optree
from optree import PyTreeSpec
from torch import Tensor

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
    return optree.tree_unflatten(treedef, leaves)


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


def key_order(tree: Any) -> Any:
    """The keys of the dictionaries in a tree, in their order: trees of one structure may differ in it, and a stage may see that.

    >>> key_order({"b": 1, "a": {"d": 2, "c": 3}}) == key_order({"b": 1, "a": {"c": 3, "d": 2}})
    False
    """
    found, ahead = [], [tree]
    while ahead:  # not by recursion: trees may be as deep as optree allows
        node = ahead.pop()
        if isinstance(node, dict):
            found.append(tuple(node))
            ahead += node.values()
        elif isinstance(node, list | tuple):
            ahead += node
        elif node is not None and not isinstance(node, Tensor) and is_registered(type(node)):
            ahead += optree.tree_flatten_one_level(node, namespace=NAMESPACE)[0]
    return tuple(found)


def is_registered(kind: type) -> bool:
    """Whether a class is registered as a node of trees, named tuples and the like left aside."""
    tree_flatten(())
    return optree.register_pytree_node.get(kind, namespace=NAMESPACE) is not None


def rebuild(kind: type, metadata: Any, children: tuple[Any, ...]) -> Any:
    """The node of a registered class with these children."""
    entry = optree.register_pytree_node.get(kind, namespace=NAMESPACE)
    assert entry is not None  # see is_registered
    return entry.unflatten_func(metadata, children)


class _NodeEntry(optree.PyTreeEntry):
    """A step of a path as torch writes it, ``.value`` or ``['key']``."""

    def codify(self, node: str = "") -> str:
        return f"{node}{self.entry}"


_seen: set[Any] = set()
_adopting = threading.Lock()


def _adopt() -> None:
    """Register the classes that torch knows and optree does not."""
    with _adopting:
        _adopt_all()


def _adopt_all() -> None:
    for kind, node in list(PYTREE_NODES.items()):
        known = kind in _seen or not isinstance(kind, type) or optree.is_structseq_class(kind)
        if not known and optree.register_pytree_node.get(kind, namespace=NAMESPACE) is None:
            optree.register_pytree_node(kind, _flattener(node), _unflattener(node), path_entry_type=_NodeEntry, namespace=NAMESPACE)
        _seen.add(kind)


def _flattener(node: Any) -> Callable[[Any], tuple[Any, ...]]:
    def flatten(tree: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(tree)
        if node.flatten_with_keys_fn is None:
            entries = tuple(f"[{n}]" for n in range(len(children)))
        else:
            entries = tuple(str(key) for key, _ in node.flatten_with_keys_fn(tree)[0])
        return children, _frozen(context), entries

    return flatten


def _unflattener(node: Any) -> Callable[[Any, Any], Any]:
    return lambda context, children: node.unflatten_fn(list(children), _thawed(context))


class FrozenList(tuple):
    """A list among the metadata of a node, which must be hashable."""


class FrozenDict(tuple):
    """A dictionary among the metadata of a node, as its items."""


def _frozen(context: Any) -> Any:
    match context:
        case list():
            return FrozenList(map(_frozen, context))
        case dict():
            return FrozenDict((key, _frozen(value)) for key, value in context.items())
        case tuple() if type(context) is tuple:
            return tuple(map(_frozen, context))
    return context


def _thawed(context: Any) -> Any:
    match context:
        case FrozenList():
            return [_thawed(item) for item in context]
        case FrozenDict():
            return {key: _thawed(value) for key, value in context}
        case tuple() if type(context) is tuple:
            return tuple(map(_thawed, context))
    return context

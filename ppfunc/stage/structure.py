"""Write and read tree structures as JSON, without pickle and without importing anything that the data names.

A structure is the list of its nodes, parents before children, so that its depth costs no recursion. A leaf is ``"*"``,
``None`` is ``null``, every other node is ``[module, class, metadata, number of children]``.
"""

from __future__ import annotations

import sys
from typing import Any

import optree

from .tree import NAMESPACE, FrozenDict, FrozenList, tree_structure, tree_unflatten

_FACTORIES = {kind.__name__: kind for kind in (list, dict, int, float, set, tuple, str)}
_TAGS: dict[type, str] = {tuple: "tuple", list: "list", FrozenList: "list", dict: "dict", FrozenDict: "dict"}
_MADE = {"tuple": tuple, "list": list, "dict": dict}
_LEAF = 0


def structure_to_json(treedef: optree.PyTreeSpec) -> list[Any]:
    """The structure as lists, texts and numbers; a ``TypeError`` for a key or metadata that JSON cannot hold.

    >>> structure_to_json(tree_structure((0, None)))
    [['builtins', 'tuple', None, 2], '*', None]
    """
    nodes: list[Any] = []
    ahead = [tree_unflatten(treedef, [_LEAF] * treedef.num_leaves)]
    while ahead:
        tree = ahead.pop()
        if tree is None or tree is _LEAF:
            nodes.append("*" if tree is _LEAF else None)
            continue
        kind = type(tree)
        children, metadata, _, _ = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
        if isinstance(metadata, type):
            metadata = None  # the class, of named tuples
        nodes.append([kind.__module__, kind.__qualname__, _plain(metadata), len(children)])
        ahead += reversed(children)
    return nodes


def structure_from_json(data: Any) -> optree.PyTreeSpec:
    """The structure that :func:`structure_to_json` wrote; a ``ValueError`` for malformed data.

    Classes are looked up among modules that are already imported, and must be named tuples or registered with ``optree`` or
    ``torch.utils._pytree``.
    """
    try:
        built: list[Any] = []
        for node in reversed(data):
            built.append(_decode(node, built))
        (tree,) = built
        treedef = tree_structure(tree)
        if structure_to_json(treedef) != data:
            raise ValueError("it is not written so")
        return treedef
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"malformed tree structure {str(data)[:200]} ({error})") from error


def _decode(node: Any, built: list[Any]) -> Any:
    """The tree of a node; its children are taken from the end of ``built``."""
    if node is None or node == "*":
        return None if node is None else _LEAF
    module, qualname, metadata, count = node
    children = [built.pop() for _ in range(count)]
    kind: Any = sys.modules.get(module)
    for part in qualname.split("."):  # by plain look-up in dictionaries, so that no code of anyone runs
        kind = getattr(kind, "__dict__", {}).get(part)
    if not isinstance(kind, type):
        raise ValueError(
            f"the class {module}.{qualname} is not known in this process; import its module, and define it at the module's top"
        )
    entry = optree.register_pytree_node.get(kind, namespace=NAMESPACE)
    if entry is None:
        raise ValueError(f"{module}.{qualname} is neither a named tuple nor registered with optree or torch.utils._pytree in this process")
    named = optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)
    return entry.unflatten_func(kind if named else _read(metadata), children)


def _plain(value: Any) -> Any:
    """A key or metadata as JSON: numbers and texts as they are, containers and classes as lists that begin with their kind."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        if value != value:
            raise TypeError(f"{value!r} in a tree structure does not equal itself; expected another key or metadata")
        return value
    if kind is type and value in _FACTORIES.values():
        return ["class", value.__name__]
    if kind not in _TAGS and not isinstance(value, list):
        raise TypeError(
            f"{value!r} of type {kind.__name__} in a tree structure cannot be written as JSON; expected texts, numbers, tuples of such"
        )
    return [_TAGS.get(kind, "list"), *map(_plain, value.items() if kind is dict else value)]


def _read(data: Any) -> Any:
    match data:
        case ["class", name]:
            return _FACTORIES[name]
        case [tag, *items]:
            return _MADE[tag](map(_read, items))
    return data

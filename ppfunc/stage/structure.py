"""Write and read tree structures as JSON, without pickle and without importing anything that the data names.

A structure is the list of its nodes, parents before children, so that its depth costs no recursion. A leaf
is ``"*"``, ``None`` is ``null``, every other node is ``[kind, ..., keys or number of children]``.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import optree

from .tree import NAMESPACE, FrozenDict, FrozenList, is_registered, rebuild, tree_structure, tree_unflatten

_FACTORIES = {"list": list, "dict": dict, "int": int, "float": float, "set": set, "tuple": tuple, "str": str}
_SCALARS = (str, int, float, bool, type(None))
_LEAF = 0


def structure_to_json(treedef: optree.PyTreeSpec) -> list[Any]:
    """The structure as lists, texts and numbers; the inverse is :func:`structure_from_json`.

    Raises:
        TypeError: a key or a piece of metadata that JSON cannot hold.

    >>> structure_to_json(tree_structure({"a": 0, "b": (0, None)}))
    [['dict', ['a', 'b']], '*', ['tuple', 2], '*', None]
    """
    nodes, ahead = [], [tree_unflatten(treedef, [_LEAF] * treedef.num_leaves)]
    while ahead:
        node, children = _encode(ahead.pop())
        nodes.append(node)
        ahead += reversed(children)
    return nodes


def structure_from_json(data: Any) -> optree.PyTreeSpec:
    """The structure that :func:`structure_to_json` wrote.

    Classes are looked up among modules that are already imported, and must be named tuples or
    registered with ``optree`` or ``torch.utils._pytree``.

    Raises:
        ValueError: malformed data, or a class that is not known in this process.

    >>> structure_from_json([["tuple", 2], "*", None])
    PyTreeSpec((*, None))
    """
    try:
        built: list[Any] = []
        for node in reversed(data):
            built.append(_decode(node, built))
        (tree,) = built
        return tree_structure(tree)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"malformed tree structure {str(data)[:200]} ({error})") from error


def _encode(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """A node and its children."""
    kind = type(tree)
    if tree is None:
        return None, ()
    if tree is _LEAF:
        return "*", ()
    children, metadata, _, _ = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    below = tuple(children)
    if kind in (tuple, list):
        return [kind.__name__, len(below)], below
    if kind in (dict, OrderedDict, defaultdict):  # in its own order, which is not that of the leaves
        below, keys = tuple(tree.values()), [_plain(key) for key in tree]
        if kind is not defaultdict:
            return [kind.__name__, keys], below
        factory = tree.default_factory
        if factory is not None and factory not in _FACTORIES.values():
            raise TypeError(f"defaultdict({factory!r}) cannot be written as JSON; expected one of {sorted(_FACTORIES)}")
        return ["defaultdict", None if factory is None else factory.__name__, keys], below
    if kind is deque:
        return ["deque", tree.maxlen, len(below)], below
    named = [kind.__module__, kind.__qualname__]
    if optree.is_namedtuple(tree):
        return ["namedtuple", named, len(below)], below
    if optree.is_structseq(tree):
        return ["structseq", named, len(below)], below
    return ["registered", named, _plain(metadata), len(below)], below


def _decode(node: Any, built: list[Any]) -> Any:
    """The tree of a node; its children are taken from the end of ``built``."""

    def children(count: int) -> list[Any]:
        if type(count) is not int or not 0 <= count <= len(built):
            raise ValueError(f"expected {count!r} children, there are {len(built)}")
        return [built.pop() for _ in range(count)]

    def items(keys: list[Any]) -> dict[Any, Any]:
        return dict(zip(map(_unplain, keys), children(len(keys)), strict=True))

    match node:
        case None:
            return None
        case "*":
            return _LEAF
        case ["tuple", count]:
            return tuple(children(count))
        case ["list", count]:
            return children(count)
        case ["dict", keys]:
            return items(keys)
        case ["OrderedDict", keys]:
            return OrderedDict(items(keys))
        case ["defaultdict", factory, keys]:
            return defaultdict(None if factory is None else _FACTORIES[factory], items(keys))
        case ["deque", maxlen, count]:
            return deque(children(count), maxlen=maxlen)
        case ["namedtuple", named, count]:
            return _known_class(named, optree.is_namedtuple_class, "a named tuple")(*children(count))
        case ["structseq", named, count]:
            return _known_class(named, optree.is_structseq_class, "a struct sequence")(children(count))
        case ["registered", named, metadata, count]:
            kind = _known_class(named, is_registered, "registered with optree (in its global namespace) or torch.utils._pytree")
            return rebuild(kind, _unplain(metadata), tuple(children(count)))
    raise ValueError(f"got the node {str(node)[:200]}")


def _known_class(named: list[str], is_one: Callable[[type], bool], kind: str) -> type:
    """A class of an imported module, found by plain dictionary look-up so that no code of anyone runs."""
    module, qualname = named
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        raise ValueError(
            f"the class {module}.{qualname} is not known in this process; import its module, and define it at the module's top"
        )
    if not is_one(found):
        raise ValueError(f"{module}.{qualname} is not {kind} in this process")
    return found


def _plain(value: Any) -> Any:
    """A key or metadata as JSON; tuples become ``["tuple", ...]`` so that they come back as tuples."""
    if type(value) in _SCALARS:
        if value != value:
            raise TypeError(f"{value!r} in a tree structure does not equal itself; expected another key or metadata")
        return value
    if isinstance(value, FrozenList):
        return ["list", *map(_plain, value)]
    if isinstance(value, FrozenDict):
        return ["dict", *([_plain(k), _plain(v)] for k, v in value)]
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(_plain, value)]
    if type(value) is dict:
        return ["dict", *([_plain(k), _plain(v)] for k, v in value.items())]
    raise TypeError(
        f"{value!r} of type {type(value).__name__} in a tree structure cannot be written as JSON; expected texts, numbers, tuples"
    )


def _unplain(data: Any) -> Any:
    match data:
        case ["tuple", *items]:
            return tuple(map(_unplain, items))
        case ["list", *items]:
            return list(map(_unplain, items))
        case ["dict", *items]:
            return {_unplain(k): _unplain(v) for k, v in items}
    if type(data) not in _SCALARS:
        raise ValueError(f"malformed key or metadata in a tree structure: {data!r}")
    return data

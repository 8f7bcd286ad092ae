"""Tree structures as JSON, without pickle and without importing anything that the data names."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any

import optree

_FACTORIES = {"list": list, "dict": dict, "int": int, "float": float, "set": set, "tuple": tuple, "str": str}
_SCALARS = (str, int, float, bool, type(None))


def structure_to_json(treedef: optree.PyTreeSpec) -> Any:
    """The structure as lists, texts and numbers; the inverse is :func:`structure_from_json`.

    A leaf is ``"*"``, ``None`` is ``null``, every other node ``[kind, ..., children]``.

    Raises:
        TypeError: a key or a piece of metadata that JSON cannot hold.

    >>> structure_to_json(optree.tree_structure({"a": 0, "b": (0, None)}))
    ['dict', ['a', 'b'], ['*', ['tuple', ['*', None]]]]
    """
    return _encode(optree.tree_unflatten(treedef, [_LEAF] * treedef.num_leaves))


def structure_from_json(data: Any) -> optree.PyTreeSpec:
    """The structure that :func:`structure_to_json` wrote.

    Classes are looked up among modules that are already imported, and must be named tuples or
    registered with ``optree``.

    Raises:
        ValueError: malformed data, or a class that is not known in this process.

    >>> structure_from_json(["tuple", ["*", None]])
    PyTreeSpec((*, None))
    """
    try:
        return optree.tree_structure(_decode(data))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"malformed tree structure {str(data)[:200]} ({error})") from error


_LEAF = 0


def _encode(tree: Any) -> Any:
    kind = type(tree)
    if tree is None:
        return None
    if optree.tree_is_leaf(tree):
        return "*"
    children, metadata, entries, _ = optree.tree_flatten_one_level(tree)
    below = [_encode(child) for child in children]
    if kind in (tuple, list):
        return [kind.__name__, below]
    if kind in (dict, OrderedDict):
        return [kind.__name__, [_plain(key) for key in entries], below]
    if kind is defaultdict:
        factory = tree.default_factory
        if factory is not None and factory not in _FACTORIES.values():
            raise TypeError(f"defaultdict({factory!r}) cannot be written as JSON; expected one of {sorted(_FACTORIES)}")
        return ["defaultdict", None if factory is None else factory.__name__, [_plain(key) for key in entries], below]
    if kind is deque:
        return ["deque", tree.maxlen, below]
    named = [kind.__module__, kind.__qualname__]
    if optree.is_namedtuple(tree):
        return ["namedtuple", named, below]
    return ["registered", named, _plain(metadata), below]


def _decode(data: Any) -> Any:
    match data:
        case None:
            return None
        case "*":
            return _LEAF
        case ["tuple", children]:
            return tuple(map(_decode, children))
        case ["list", children]:
            return list(map(_decode, children))
        case ["dict", keys, children]:
            return _decode_items(keys, children)
        case ["OrderedDict", keys, children]:
            return OrderedDict(_decode_items(keys, children))
        case ["defaultdict", factory, keys, children]:
            return defaultdict(None if factory is None else _FACTORIES[factory], _decode_items(keys, children))
        case ["deque", maxlen, children]:
            return deque(map(_decode, children), maxlen=maxlen)
        case ["namedtuple", named, children]:
            return _named_tuple(*named)(*map(_decode, children))
        case ["registered", named, metadata, children]:
            unflatten = _registration(*named).unflatten_func
            return unflatten(_unplain(metadata), tuple(map(_decode, children)))
    raise ValueError(f"malformed tree structure: got the node {str(data)[:200]}")


def _decode_items(keys: list[Any], children: list[Any]) -> dict[Any, Any]:
    return dict(zip(map(_unplain, keys), map(_decode, children), strict=True))


def _named_tuple(module: str, qualname: str) -> type:
    found = _known_class(module, qualname)
    if not optree.is_namedtuple_class(found):
        raise ValueError(f"{module}.{qualname} is not a named tuple in this process")
    return found


def _registration(module: str, qualname: str) -> Any:
    entry = optree.register_pytree_node.get(_known_class(module, qualname))
    if entry is None:
        raise ValueError(f"{module}.{qualname} is not registered with optree (in its global namespace) in this process")
    return entry


def _known_class(module: str, qualname: str) -> type:
    """A class of an imported module, found by plain dictionary look-up so that no code of anyone runs."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        raise ValueError(
            f"the class {module}.{qualname} is not known in this process; "
            "import its module, and define it at the module's top"
        )
    return found


def _plain(value: Any) -> Any:
    """A key or metadata as JSON; tuples become ``["tuple", ...]`` so that they come back as tuples."""
    if type(value) in _SCALARS:
        return value
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(_plain, value)]
    if type(value) is dict:
        return ["dict", *([_plain(k), _plain(v)] for k, v in value.items())]
    raise TypeError(
        f"{value!r} of type {type(value).__name__} in a tree structure cannot be written as JSON; "
        "expected texts, numbers, tuples"
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

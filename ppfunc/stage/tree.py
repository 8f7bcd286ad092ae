"""Flatten trees, with the classes that are registered with optree for all namespaces, or with
``torch.utils._pytree``.

Everything in the package flattens by these functions, so that a class known in one place is known in all.
Dictionaries are read in the order of their keys, which is part of the structure: a stage may see it. ``None``
is a node without leaves.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from ._torch import PYTREE_NODES

NAMESPACE = "ppfunc"
"""Where classes of torch are registered, and dictionaries are read in their order."""

BLOCK_MASKS = "torch.nn.attention.flex_attention"

PLAIN = (bool, int, float, str, torch.dtype, torch.device)
"""Classes of values that a tree of inputs, or an output, may hold beside tensors."""

_ordered = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_ordered.__enter__()  # for as long as the process lives: no other library uses the namespace


def tree_flatten(tree: Any, name: str = "tree") -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a tree, called ``name`` in errors, and its structure.

    Raises:
        ValueError: the tree is nested deeper than optree allows.

    >>> tree_flatten({"b": (1, None), "a": 2})[0]
    [1, 2]
    """
    if len(PYTREE_NODES) != _known:
        _adopt()
    try:
        return optree.tree_flatten(tree, namespace=NAMESPACE)
    except RecursionError as error:
        raise ValueError(
            f"{name}: got a tree nested deeper than {optree.MAX_RECURSION_DEPTH} levels, expected a"
            " flatter one"
        ) from error


def register(
    kind: type, read: Callable[[Any], tuple[Sequence[Any], Any]], make: Callable[[Any, Iterable[Any]], Any]
) -> None:
    """Register a class as a node: of ``children, rest = read(node)``, ``make(rest, children)`` equals it."""
    optree.register_pytree_node(kind, read, make, namespace=NAMESPACE)


def register_leafless(kind: type, read: Callable[[Any], Any], make: Callable[[Any], Any]) -> None:
    """Register a class as a node without leaves: ``make(read(node))`` equals the node."""
    register(kind, lambda node: ((), read(node)), lambda known, _: make(known))


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    return tree_flatten(tree)[0]


def tree_structure(tree: Any) -> optree.PyTreeSpec:
    """Return the structure of a tree."""
    return tree_flatten(tree)[1]


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``fn`` to every leaf, and to the subtrees at its place in the trees ``rest``."""
    leaves, treedef = tree_flatten(tree)
    return treedef.unflatten(map(fn, leaves, *map(treedef.flatten_up_to, rest)))


def filled(leaves: Sequence[Any], places: Sequence[int], values: Iterable[Any]) -> list[Any]:
    """Return the leaves, with ``values`` at ``places``."""
    full = list(leaves)
    for place, value in zip(places, values, strict=True):
        full[place] = value
    return full


def tree_paths(treedef: optree.PyTreeSpec, name: str = "") -> tuple[str, ...]:
    """Return the paths of the leaves of a tree called ``name``.

    >>> tree_paths(tree_structure({"b": (1, None), "a": 2}), "x")
    ("x['b'][0]", "x['a']")
    """
    return tuple(accessor.codify(name) for accessor in optree.treespec_accessors(treedef))


class _NodeEntry(optree.PyTreeEntry):
    """A step of a path as torch writes it, ``.value`` or ``['key']``."""

    def codify(self, node: str = "") -> str:
        return f"{node}{self.entry}"


_known = 0  # classes of torch when they were last adopted
_adopting = threading.Lock()


def _adopt() -> None:
    """Register the classes that torch knows and optree does not."""
    global _known
    with _adopting:
        for kind, node in list(PYTREE_NODES.items()):
            if (
                not isinstance(kind, type)
                or optree.is_structseq_class(kind)
                or kind.__module__ == BLOCK_MASKS
            ):
                continue  # of block masks, see `constants`
            if optree.register_pytree_node.get(kind, namespace=NAMESPACE) is None:
                optree.register_pytree_node(
                    kind, *_functions_of(node), path_entry_type=_NodeEntry, namespace=NAMESPACE
                )
        _known = len(PYTREE_NODES)


def _functions_of(node: Any) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any, Any], Any]]:
    """Flatten and unflatten a node that torch knows, as optree wants it."""

    def flatten(tree: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(tree)
        keys = node.flatten_with_keys_fn
        entries = (
            [f"[{n}]" for n in range(len(children))]
            if keys is None
            else [str(key) for key, _ in keys(tree)[0]]
        )
        return children, _frozen(context), tuple(entries)

    return flatten, lambda context, children: node.unflatten_fn(list(children), _thawed(context))


class _FrozenList(tuple):
    """A list among the metadata of a node, which must be hashable."""


class _FrozenDict(tuple):
    """A dictionary among the metadata of a node, as its items."""


def _frozen(context: Any) -> Any:
    kind = type(context)
    if kind is list or kind is tuple:
        return (_FrozenList if kind is list else tuple)(map(_frozen, context))
    return _FrozenDict(map(_frozen, context.items())) if kind is dict else context


def _thawed(context: Any) -> Any:
    kind = type(context)
    if kind is _FrozenList or kind is tuple:
        return (list if kind is _FrozenList else tuple)(map(_thawed, context))
    return dict(map(_thawed, context)) if kind is _FrozenDict else context


# -- structures as JSON, without pickle, and without importing anything that the data names -----------
#
# A structure is the list of its nodes, parents before children, so that its depth costs no recursion. A leaf
# is "*", None is null, every other node is [module, class, metadata, number of children].

_FACTORIES = {kind.__name__: kind for kind in (list, dict, int, float, set, tuple, str)}
_TAGS: dict[type, str] = {
    tuple: "tuple",
    list: "list",
    _FrozenList: "list",
    dict: "dict",
    _FrozenDict: "dict",
}
_MADE = {"tuple": tuple, "list": list, "dict": dict}
_WRITTEN: dict[type, Callable[[str], Any]] = {
    torch.device: torch.device,
    torch.dtype: lambda name: getattr(torch, name),
}
"""Classes whose values are written as texts, and what reads them."""
_LEAF = 0


def structure_to_json(treedef: optree.PyTreeSpec) -> list[Any]:
    """Write a structure as lists, texts and numbers; raise ``TypeError`` for keys that JSON cannot hold.

    >>> structure_to_json(tree_structure((0, None)))
    [['builtins', 'tuple', None, 2], '*', None]
    """
    nodes: list[Any] = []
    ahead: list[Any] = [treedef.unflatten([_LEAF] * treedef.num_leaves)]
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
    """Read the data of :func:`structure_to_json`; raise ``ValueError`` for malformed data.

    Classes are looked up among modules that are already imported, and must be named tuples or registered with
    ``optree`` or ``torch.utils._pytree``.
    """
    try:
        built: list[Any] = []
        for node in reversed(data):
            built.append(_decode(node, built))
        (tree,) = built
        treedef = tree_structure(tree)
        if structure_to_json(treedef) != data:
            raise ValueError("structure_to_json writes the same structure otherwise")
        return treedef
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"malformed tree structure {str(data)[:200]} ({error})") from error


def _decode(node: Any, built: list[Any]) -> Any:
    """Build the tree of a node, whose children are taken from the end of ``built``."""
    if node is None or node == "*":
        return None if node is None else _LEAF
    module, qualname, metadata, count = node
    children = [built.pop() for _ in range(count)]
    kind: Any = sys.modules.get(module)
    for part in qualname.split("."):  # by plain look-up in dictionaries, so that no code of anyone runs
        kind = getattr(kind, "__dict__", {}).get(part)
    if not isinstance(kind, type):
        raise ValueError(
            f"the class {module}.{qualname} is not known in this process; import its module, and define it at"
            " the module's top"
        )
    entry = optree.register_pytree_node.get(kind, namespace=NAMESPACE)
    if entry is None:
        raise ValueError(
            f"{module}.{qualname} is neither a named tuple nor registered with optree or torch.utils._pytree"
            " in this process"
        )
    named = optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)
    return entry.unflatten_func(kind if named else _read(metadata), children)


def _plain(value: Any) -> Any:
    """Write a key or metadata as JSON; containers and classes become lists that begin with their kind."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        if value != value:
            raise TypeError(
                f"{value!r} in a tree structure does not equal itself; expected another key or metadata"
            )
        return value
    if kind in _WRITTEN:
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind is type and value in _FACTORIES.values():
        return ["class", value.__name__]
    if kind not in _TAGS and not isinstance(value, list):
        raise TypeError(
            f"{value!r} of type {kind.__name__} in a tree structure cannot be written as JSON; expected"
            " texts, numbers, tuples of such"
        )
    return [_TAGS.get(kind, "list"), *map(_plain, value.items() if kind is dict else value)]


def _read(data: Any) -> Any:
    match data:
        case ["class", name]:
            return _FACTORIES[name]
        case [tag, text] if tag in (readers := {kind.__name__: read for kind, read in _WRITTEN.items()}):
            return readers[tag](text)
        case [tag, *items]:
            return _MADE[tag](map(_read, items))
    return data

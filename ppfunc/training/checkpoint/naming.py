"""Name the leaves of a state as the model does, so that no name depends on the stages or the ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
import torch
from optree import PyTreeAccessor, PyTreeSpec

from ppfunc._checks import limited, require_type
from ppfunc.splitter import Split
from ppfunc.stage.tree import tree_flatten

from ..update.state import TrainState

_Known = Split | Mapping[int, Mapping[str, str]] | Callable[[int, str], str]
Names = _Known | None
"""From a stage and the name of a leaf in it to the name in the model; a split has those of its model."""

Leaf = torch.Tensor | bool | int | float | str

Path = tuple[Any, ...]


def named_leaves(tree: Any, names: Names, what: str) -> tuple[list[tuple[str, Leaf]], PyTreeSpec]:
    """Name the leaves of a tree, and give its structure.

    A name is the keys on the way to a leaf, joined by dots: ``params.0.w``. Where ``names`` are given, the
    first integer key of a dictionary is a stage, and it and what is behind it become the name in the model:
    ``params.h.3.w``, and in the state of the optimizer ``optimizer.mean.h.3.w``. What the optimizer keeps
    once per stage loses its stage, since all stages have the same.

    Args:
        what: the name of the tree, for errors.

    Raises:
        TypeError: a leaf is neither a tensor nor a number or text of Python.
        ValueError: two leaves of the tree have one name, and no ``names`` say that they are one; a stage
            without names.

    >>> named_leaves({"a": torch.zeros(1), 0: [1, 2.0]}, None, "state")[0]
    [('a', tensor([0.])), ('0.0', 1), ('0.1', 2.0)]
    """
    known = "a split, {stage: {leaf: name in the model}}, or a function of both"
    require_type("names", names, Mapping | Split | Callable | None, known)
    leaves, treedef = tree_flatten(tree, what)
    accessors = optree.treespec_accessors(treedef)
    parameters = _parameters(accessors)
    named = [
        (_name(accessor, parameters, names), leaf) for accessor, leaf in zip(accessors, leaves, strict=True)
    ]
    seen: dict[str, PyTreeAccessor] = {}
    for (name, leaf), accessor in zip(named, accessors, strict=True):
        if type(leaf) not in (bool, int, float, str) and not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{accessor.codify(what)} is of type {type(leaf).__name__}, expected a tensor, a number or a"
                f" text; leave it out"
            )
        if name == "__metadata__":
            raise ValueError(
                f"{accessor.codify(what)}: safetensors keeps the name {name!r} for itself; take another key"
            )
        if names is None and name in seen:
            raise ValueError(
                f"{seen[name].codify(what)} and {accessor.codify(what)} are both called {escaped(name)};"
                " change a key"
            )
        seen[name] = accessor
    return named, treedef


def _name(accessor: PyTreeAccessor, parameters: Mapping[int, set[Path]], names: Names) -> str:
    path = _keys(accessor)
    at = _stage_at(accessor)
    if names is None or at is None:
        return _joined(path)
    before, stage, rest = path[:at], path[at], path[at + 1 :]
    if _under(accessor, at, "optimizer"):
        start = next((n for n in range(len(rest)) if rest[n:] in parameters.get(stage, ())), None)
        if start is None:
            return _joined(before + rest)
        before, rest = before + rest[:start], rest[start:]
    return _joined((*before, _model_name(names, stage, _joined(rest))))


def _model_name(names: _Known, stage: int, leaf: str) -> str:
    name: Any
    if isinstance(names, Mapping):
        name = names.get(stage, {}).get(leaf)
    elif isinstance(names, Split):
        name = leaf if leaf in {**names.params.get(stage, {}), **names.state.get(stage, {})} else None
    else:
        name = names(stage, leaf)
    if not isinstance(name, str):
        raise ValueError(
            f"names: got {name!r} for {leaf!r} of stage {stage}, expected the model's name of it"
        )
    return name


def _parameters(accessors: Sequence[PyTreeAccessor]) -> dict[int, set[Path]]:
    """Collect the paths of the parameters of training states, by stage."""
    paths: dict[int, set[Path]] = {}
    for accessor in accessors:
        at = _stage_at(accessor)
        if at is not None and _under(accessor, at, "params"):
            path = _keys(accessor)
            paths.setdefault(path[at], set()).add(path[at + 1 :])
    return paths


def _stage_at(accessor: PyTreeAccessor) -> int | None:
    """Find the position of the stage in a path of keys: the first integer key of a dictionary."""
    return next(
        (n for n, e in enumerate(accessor) if isinstance(e, optree.MappingEntry) and type(e.entry) is int),
        None,
    )


def _under(accessor: PyTreeAccessor, at: int, field: str) -> bool:
    """Tell whether a path lies in this field of a training state."""
    entry = accessor[at - 1] if at else None
    return isinstance(entry, optree.NamedTupleEntry) and entry.type is TrainState and entry.field == field


def _keys(accessor: PyTreeAccessor) -> Path:
    return tuple(
        e.field if isinstance(e, optree.NamedTupleEntry | optree.DataclassEntry) else e.entry
        for e in accessor
    )


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def escaped(name: object) -> str:
    r"""Quote a foreign name, with its control characters escaped; cut it if it is long.

    >>> print(escaped("a\x1b[2J"))
    'a\x1b[2J'
    """
    return limited(repr(str(name)), 200)


def listed(names: Iterable[str], most: int = 3) -> str:
    """List the first of several names, and count the rest.

    >>> print(listed("abcde"))
    'a', 'b', 'c' and 2 more
    """
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(escaped, every[:most])) + more

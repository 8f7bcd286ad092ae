"""Fingerprints of functions: what they read from elsewhere, so that a trace is used again only while that is the same."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ppfunc.stage.abstract import is_of_a_library
from ppfunc.stage.layout import MeshLayout

_MOST = 5000  # objects
_PLAIN = (int, float, complex, str, bytes, type(None), type(...), range, slice, Enum, MeshLayout)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)

Fingerprint = dict[tuple[Hashable, ...], Any]
"""By path (of names of cells, globals, attributes, items), what is found there."""


class _Identity:
    """An object, compared by identity and not kept alive."""

    def __init__(self, value: Any) -> None:
        self.ref = ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.ref() is not None and self.ref() is other.ref()

    __hash__ = None  # type: ignore[assignment]  # it changes when the object goes


def fingerprint(*functions: Callable[..., Any] | None) -> Fingerprint | None:
    """Take down what functions read: closures, defaults, globals, helpers, and attributes of objects, modules and classes.

    Two fingerprints are equal where all numbers and texts are equal and all other objects are the same. The values of
    a tensor, and the globals of libraries, are taken for constant. No object is kept alive.

    Returns:
        None where there is too much to look at, or something that cannot be told from another.

    >>> def scaled(k):
    ...     return lambda x: k[0] * x
    >>> f = scaled([2])
    >>> fingerprint(f) == fingerprint(f), fingerprint(f) == fingerprint(scaled([2]))
    (True, False)
    >>> before = fingerprint(f)
    >>> f.__closure__[0].cell_contents[0] = 3
    >>> fingerprint(f) == before
    False
    """
    found: Fingerprint = {}
    seen: dict[int, tuple[Any, Any]] = {}  # holds what it has seen, so that no other gets its id
    ahead: list[tuple[tuple[Hashable, ...], Any]] = [((number,), function) for number, function in enumerate(functions)]
    while ahead:
        path, value = ahead.pop()
        if isinstance(value, _PLAIN + _PLAIN_OF_TORCH):
            found[path] = type(value), repr(value)
            continue
        if id(value) in seen:
            found[path] = "again", seen[id(value)][0]
            continue
        seen[id(value)] = path, value
        parts = list(_parts(value))
        if isinstance(value, (*_CONTAINERS, MethodType)):
            found[path] = type(value), len(parts)
        elif type(value).__weakrefoffset__:
            found[path] = _Identity(value)
        elif parts:
            found[path] = type(value)
        else:
            return None
        ahead += [((*path, name), part) for name, part in parts]
        if len(found) + len(ahead) > _MOST:
            return None
    return found


def modules_read(*functions: Callable[..., Any] | None) -> tuple[nn.Module, ...]:
    """The modules, and their submodules, that functions hold directly: a stage may read their mode without calling them."""
    held = [part for function in functions for _, part in _parts(function)]
    return tuple(module for part in held if isinstance(part, nn.Module) for module in part.modules())


def _parts(value: Any) -> Iterator[tuple[Hashable, Any]]:
    """The objects that a call of ``value``, or of a method of it, may read there, each with a name."""
    match value:
        case Tensor() | ModuleType():
            pass
        case dict():
            yield from (((n, which), part) for n, item in enumerate(value.items()) for which, part in enumerate(item))
        case list() | tuple() | set() | frozenset() | deque():
            yield from enumerate(value)
        case partial():
            yield from enumerate((value.func, value.args, value.keywords))
        case MethodType():
            yield from enumerate((value.__self__, value.__func__))
        case FunctionType():
            yield from _parts_of_function(value)
        case type():
            for kind in value.__mro__:
                if not _of_library(kind.__module__):
                    yield from _parts_of_class(kind)
        case _ if isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] != "torch":
            # Whether a module trains is not read here: a step follows it.
            own = getattr(value, "__dict__", {})
            yield from ((name, part) for name, part in own.items() if name != "training" or not isinstance(value, nn.Module))
            slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
            yield from ((name, getattr(value, name)) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name))
            if not _of_library(type(value).__module__):
                yield "class", type(value)


def _parts_of_function(fn: FunctionType) -> Iterator[tuple[Hashable, Any]]:
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))
    yield from enumerate((fn.__defaults__ or (), fn.__kwdefaults__ or {}, vars(fn)))
    if _of_library(fn.__module__):
        return
    names = set(_names(fn.__code__))
    for name in sorted(names & fn.__globals__.keys()):
        read = fn.__globals__[name]
        yield name, read
        if isinstance(read, ModuleType) and not _of_library(read.__name__):
            yield from (((name, inner), vars(read)[inner]) for inner in sorted(names & vars(read).keys()))


def _parts_of_class(kind: type) -> Iterator[tuple[Hashable, Any]]:
    """The functions of a class and its attributes, but for those that Python puts there."""
    for name, attribute in vars(kind).items():
        if isinstance(attribute, staticmethod | classmethod):
            yield (kind.__name__, name), attribute.__func__
        elif isinstance(attribute, property):
            yield (kind.__name__, name), attribute.fget
        elif isinstance(attribute, FunctionType) or not (name.startswith("__") or hasattr(type(attribute), "__get__")):
            yield (kind.__name__, name), attribute


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, that of functions within it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _of_library(module: str | None) -> bool:
    """Whether a module is of torch, of Python or of this library."""
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    return is_of_a_library(file) if file else module != "__main__" and str(module).partition(".")[0] in sys.stdlib_module_names

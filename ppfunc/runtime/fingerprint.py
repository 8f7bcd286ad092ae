"""Fingerprints of functions: what they read from elsewhere, so that a trace is used again only while that is the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch

from ppfunc.stage.abstract import is_of_a_library

_DEPTH = 8  # objects within objects
_ALL = 20_000  # objects in all
_MOST = 1000  # entries of a container
_PLAIN = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
_OWN = frozenset({"training", "_modules", "_parameters", "_buffers"})  # attributes of a module that a step is given, or follows


class _Identity:
    """An object, compared by identity and not kept alive."""

    def __init__(self, value: Any) -> None:
        self.ref = ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.ref() is not None and self.ref() is other.ref()

    __hash__ = None  # type: ignore[assignment]  # it changes when the object goes


Fingerprint = dict[tuple[int, Any], tuple[Any, ...]]
"""By function and name (of a cell, a global, an attribute), what is found there, a few objects deep."""


def fingerprint(*functions: Callable[..., Any] | None) -> Fingerprint:
    """Take down what functions read: closures, defaults, globals, helpers, and attributes of objects and modules.

    Two fingerprints are equal where all numbers and texts are equal and all other objects are the same. What cannot be
    compared is equal to nothing. No object is kept alive.

    >>> def scaled(k):
    ...     return lambda x: k * x
    >>> f = scaled(2)
    >>> fingerprint(f) == fingerprint(f), fingerprint(f) == fingerprint(scaled(2))
    (True, True)
    >>> fingerprint(f) == fingerprint(scaled(3))
    False
    """
    found: Fingerprint = {}
    for number, function in enumerate(functions):
        for name, part in _parts(function):
            parts: list[Any] = []
            _visit(part, parts, {id(function)}, _DEPTH)
            found[number, name] = tuple(parts)
    return found


def modules_read(*functions: Callable[..., Any] | None) -> tuple[torch.nn.Module, ...]:
    """The modules, and their submodules, that functions hold directly: a stage may read their mode without calling them."""
    held = [part for function in functions for _, part in _parts(function)]
    return tuple(module for part in held if isinstance(part, torch.nn.Module) for module in part.modules())


def _visit(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if isinstance(value, _PLAIN):
        found.append((type(value), repr(value)))
        return
    if id(value) in seen:
        found.append("again")
        return
    seen.add(id(value))
    container = isinstance(value, dict | list | tuple | set | frozenset)
    try:
        found.append(_Identity(value))
    except TypeError:
        found.append(type(value) if container or depth > 0 else object())
    if len(seen) > _ALL or (container and (len(value) > _MOST or depth == 0)):
        found.append(object())
    elif depth > 0:
        for name, part in _parts(value):
            found.append(name)
            _visit(part, found, seen, depth - 1)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The objects that a call of ``value``, or of a method of it, may read, each with a name."""
    match value:
        case dict():
            yield from enumerate(part for item in value.items() for part in item)
        case list() | tuple() | set() | frozenset():
            yield from enumerate(value)
        case partial():
            yield from enumerate((value.func, *value.args, value.keywords))
        case MethodType():
            yield from enumerate((value.__self__, value.__func__))
        case property():
            yield "fget", value.fget
        case staticmethod() | classmethod():
            yield "func", value.__func__
        case FunctionType():
            yield from _parts_of_function(value)
        case torch.nn.Module():
            for path, module in value.named_modules():
                yield f"{path}.type", type(module)
                yield from ((f"{path}.{name}", part) for name, part in vars(module).items() if name not in _OWN)
                yield from ((f"{path}.{name}", buffer) for name, buffer in module.named_buffers(recurse=False))
        case type() if not _is_of_a_library(sys.modules.get(value.__module__), value.__module__):
            kept = (FunctionType, property, staticmethod, classmethod)
            yield from ((name, part) for name, part in vars(value).items() if isinstance(part, kept) or not name.startswith("__"))
        case torch.Tensor() | type() | ModuleType() | BuiltinFunctionType():
            pass
        case _:
            yield "type", type(value)
            yield from getattr(value, "__dict__", {}).items()
            slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
            yield from ((name, getattr(value, name, None)) for name in slots if name not in ("__dict__", "__weakref__"))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[Any, Any]]:
    code = function.__code__
    typed = code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")  # into an interpreter
    if is_of_a_library(code.co_filename) and not typed:
        return
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))
    yield from enumerate((function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function)))
    names = set(_names(code))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and not _is_of_a_library(value, value.__name__):
            yield from ((f"{name}.{read}", getattr(value, read)) for read in sorted(names) if hasattr(value, read))


def _is_of_a_library(module: ModuleType | None, name: str) -> bool:
    """Whether a module is of torch, of Python or of this library."""
    file = getattr(module, "__file__", None)
    return name in sys.stdlib_module_names or (is_of_a_library(file) if file else name == "builtins")


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

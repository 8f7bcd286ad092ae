"""Know what functions read beside their arguments: a program is traced for these values, and for no others.

A function may read what it refers to, and what that refers to in turn::

    a function             its closure, its defaults, the globals that its code names, modules imported in it
    an object, a class     attributes and methods that code names; all where code has ``getattr`` or ``vars``
    a module of torch.nn   also parameters, buffers, submodules, hooks, mode; of torch's layers all attributes
    a module of Python     what code names of it
    a container            its entries, up to 10,000

Numbers, texts and flags count by their values, functions by their code, anything else by identity: a write
into a tensor is seen by programs, which read its memory. The code of torch, of Python and of this library is
not followed. Of installed packages functions are, which refer to functions and plain values, and classes to
code. What is not seen is what an extension in C keeps, what objects of torch, numpy and Python hold, and data
that packages keep for themselves.
"""

import re
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable
from dis import get_instructions
from enum import Enum
from functools import cache, partial
from itertools import chain
from numbers import Number
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import KERNEL_SWITCHES, FakeTensor, any_autocast, function_modes, mode_stack
from .abstract.evaluation import Evaluation
from .device import autocast
from .errors import StageError, is_of_a_library
from .layout import local
from .process import process_lock

READS = "ppfunc_reads"
"""An attribute of a function of this library: all that it reads beside its arguments."""

_Inside = Iterable[tuple[str, Any]] | None  # values in another, by name; None where nothing is looked at

_PLAIN = Number, str, bytes, Enum, type(None), torch.dtype, torch.device
_MOST_ENTRIES, _MOST_VALUES, _MOST_STATES = 10_000, 200_000, 32
_CALLED = {"training", "forward", "backward", "setup_context", "jvp"}  # named in torch's code alone
_BY_TEXT = {"getattr", "vars", "__dict__"}  # code with these may read any attribute
_PARTS = "__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget"  # of what is called
_DICTS = (
    "_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip
_OF_EVERY_MODULE, _OF_EVERY_TENSOR = {*vars(nn.Module())} - _CALLED, {*dir(Tensor)}
_UNCALLED = {"__init__", "__init_subclass__", "__new__", "__annotations__", "__dict__", "__doc__"}
_WRAPPERS = "builtins", "functools"
_HOLDERS = "argparse", "collections", "functools", "types"  # whose objects hold values of users
_CODE = (
    FunctionType, property, classmethod, staticmethod, type, ModuleType, Tensor, nn.Module, *_PLAIN
)  # fmt: skip
_CLASS, _parts = ".__class__", attrgetter("__code__", "__defaults__", "__kwdefaults__")


class State:
    """Holds what is read beside arguments, as it is now. It is equal to itself alone.

    Attributes:
        values: what counts of each value, by path.
        found: path and value, by identity.
    """

    def __init__(self, roots: dict[str, Any], names: set[str], left_out: set[str]) -> None:
        self.values: dict[str, Any] = {}
        self.found: dict[int, tuple[str, Any]] = {}
        self._names = names
        self._getters: list[tuple[Callable[[Any], Any], Any]] = []
        self._lists, self._sized, self._empty = list[Any](), list[Any](), list[Any]()
        ahead = [*roots.items()]
        while ahead:
            path, value = ahead.pop()
            if isinstance(value, _PLAIN):
                self.values[path] = type(value), repr(value)
            elif id(value) in self.found:
                self.values[path] = self.found[id(value)][0]
            elif path not in left_out:
                self.found[id(value)] = path, value
                if len(self.found) > _MOST_VALUES:
                    raise ValueError(
                        f"stages and loss refer to more than {_MOST_VALUES:,} values, such as {told(path)};"
                        " give them what they read as arguments, or by functools.partial"
                    )
                inside = self._inside(value)
                self.values[path] = id(value) if inside is None else getattr(value, "__code__", type(value))
                ahead += ((path + name, each) for name, each in inside or ())
        self._seen = self._look()

    def is_equal(self, other: "State") -> bool:
        """Tell whether all values are equal, and in the same order."""
        return [*self.values.items()] == [*other.values.items()]

    def _look(self) -> tuple[list[Any], list[int]]:
        gotten = (get(owner) for get, owner in self._getters)
        return [*chain.from_iterable(chain(self._lists, gotten))], [*map(len, self._sized)]

    def unchanged(self) -> bool:
        """Tell whether all values are the same objects."""
        try:
            (now, sizes), (then, sizes_then) = self._look(), self._seen
        except (LookupError, ValueError, RuntimeError, AttributeError):  # one is gone
            return False
        alike = sizes == sizes_then and len(now) == len(then) and not any(self._empty)
        return alike and all(map(is_, now, then))

    def _inside(self, value: Any) -> _Inside:
        """List the values that a value holds, and note how to look at them again."""
        match value:
            case Tensor() | BuiltinFunctionType():
                return None
            case FunctionType():
                return self._of_function(value)
            case dict() | list() | tuple() | set() | frozenset() | deque():
                return self._entries(value)
            case ModuleType():
                return None if _is_foreign(value.__name__) else self._named(value)
            case type():
                own = None if _is_foreign(value.__module__) else self._named(value)
                return own and chain(own, ((f".{base.__name__}", base) for base in value.__bases__))
            case nn.Module():
                dicts = (vars(value).get(name, ()) for name in _DICTS)
                return chain(
                    *(self._entries(d) or () for d in dicts), self._named(value), ((_CLASS, type(value)),)
                )
        inside: _Inside = None
        kind = type(value)
        slots = chain.from_iterable(getattr(base, "__slots__", ()) for base in kind.__mro__)
        parts = [n for n in (_PARTS if kind.__module__ in _WRAPPERS else slots) if hasattr(value, n)]
        if parts:
            self._getters.append((attrgetter(*parts, parts[0]), value))
            inside = [(f".{name}", getattr(value, name)) for name in parts]
        of_python = _is_foreign(kind.__module__) and kind.__module__ not in _HOLDERS
        if of_python or not hasattr(value, "__dict__"):
            return inside
        return chain(inside or (), self._named(value), ((_CLASS, kind),))

    def _entries(self, value: Any) -> _Inside:
        held = dict.keys(value) if isinstance(value, dict) else value  # that of a class may do anything
        if not held or len(held) > _MOST_ENTRIES:
            (self._sized if held else self._empty).append(value)
            return None if held else ()
        if isinstance(value, dict):
            self._lists.append(held)  # its keys, in order
            return self._got(value, [*held], "[{!r}]")
        self._lists += () if isinstance(value, tuple | frozenset) else (value,)
        if isinstance(value, set | frozenset):
            value = sorted(value, key=repr)  # as in every process
        return ((f"[{n}]", each) for n, each in enumerate(value))

    def _of_function(self, function: FunctionType) -> _Inside:
        code, names, cells = function.__code__, function.__globals__, function.__closure__ or ()
        filled = [(n, c) for n, c in zip(code.co_freevars, cells, strict=True) if _is_filled(c)]
        self._getters += ((_contents, cell) for _, cell in filled)
        inside: Any = [(f":{name}", cell.cell_contents) for name, cell in filled]
        self._getters.append((_parts, function))
        inside.append((".defaults", _parts(function)[1:]))
        if _is_foreign(names.get("__name__")):  # torch notes things in its functions when it calls them
            return [*inside, (f".{READS}", vars(function).get(READS))]
        inside.append((".dict", vars(function)))
        self._names |= _named_in(code)
        globals_ = sorted(names.keys() & _names_of(code, "LOAD_GLOBAL"))
        if _is_installed(names.get("__name__")):
            inside = [(name, each) for name, each in inside if isinstance(each, _CODE)]
            globals_ = [name for name in globals_ if isinstance(names[name], (FunctionType, *_PLAIN))]
        else:
            imported = sorted(_names_of(code, "IMPORT_NAME"))
            self._getters.append((_modules, imported))
            inside += [(f":{n}", each) for n, each in zip(imported, _modules(imported), strict=True)]
        return chain(inside, self._got(names, globals_, ":{}"))

    def _named(self, value: Any) -> Iterable[tuple[str, Any]]:
        """List the attributes that code names, or may read by texts; of a class also what operators call."""
        held, kind, module = vars(value), type(value), isinstance(value, nn.Module)
        every = module and any(_is_foreign(c.__module__) for c in {*kind.__mro__} - {nn.Module, object})
        every |= not isinstance(value, ModuleType | type) and not _BY_TEXT.isdisjoint(self._names)
        wanted = [n for n in held if every or n in self._names]
        if isinstance(value, type):  # what operators call, and no annotations
            hidden = (n for n, each in held.items() if n[:2] == "__" and isinstance(each, FunctionType))
            wanted = [n for n in {**dict.fromkeys(wanted), **dict.fromkeys(hidden)} if n not in _UNCALLED]
        if isinstance(value, ModuleType | type):
            home = held.get("__module__", held.get("__name__"))
            wanted = [n for n in wanted if isinstance(held[n], _CODE) or not _is_installed(home)]
        return self._got(held, [n for n in wanted if not (module and n in _OF_EVERY_MODULE)])

    def _got(self, owner: Any, names: list[Any], path: str = ".{}") -> Iterable[tuple[str, Any]]:
        self._sized.append(owner)
        if not names:
            return ()
        is_plain = not isinstance(owner, dict) or type(owner).__getitem__ is dict.__getitem__
        # An itemgetter of two names or more returns a tuple.
        get: Any = itemgetter(*names, names[0]) if is_plain else partial(_raw, names)
        self._getters.append((get, owner))
        each = zip(names, get(owner), strict=False)
        keys = (n if isinstance(n, _PLAIN) else (type(n).__name__, number) for number, n in enumerate(names))
        return ((path.format(key), value) for key, (_, value) in zip(keys, each, strict=False))


def _raw(names: Iterable[Any], owner: dict[Any, Any]) -> list[Any]:
    """Return the entries of these names: a class of its own may make others when it is asked."""
    return [dict.__getitem__(owner, name) for name in names]


def _modules(names: Iterable[str]) -> list[ModuleType | None]:
    return [sys.modules.get(name) for name in names]


def _contents(cell: Any) -> tuple[Any]:
    return (cell.cell_contents,)


def _is_filled(cell: Any) -> bool:
    try:
        return bool(_contents(cell))
    except ValueError:
        return False


@cache
def _is_foreign(module: str | None) -> bool:
    """Tell whether a module of Python is torch's, Python's or this library's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module != "__main__" and module in sys.modules and (file is None or is_of_a_library(file))


@cache
def _is_installed(module: str | None) -> bool:
    """Tell whether a module of Python is of an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@cache
def _named_in(code: CodeType) -> frozenset[str]:
    """List the names and texts in code, and in functions within it."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    inner = (_named_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset({*code.co_names, *texts}.union(*inner))


@cache
def _names_of(code: CodeType, operation: str) -> frozenset[str]:
    """List the names that code, and functions within it, give to operations of this name."""
    inner = (_names_of(constant, operation) for constant in code.co_consts if isinstance(constant, CodeType))
    own = {step.argval for step in get_instructions(code) if step.opname == operation}
    return frozenset(own.union(*inner))


def changes(then: State, now: State) -> list[str]:
    """Tell in what a state differs from an earlier one, in the same words in every process."""
    paths = (p for p in then.values.keys() | now.values.keys() if then.values.get(p) != now.values.get(p))
    counts = ((path, now.values.get(path)) for path in paths)
    return sorted(f"{told(path)} = {c[1] if isinstance(c, tuple) else 'another'}" for path, c in counts)


def told(path: str) -> str:
    """Name a value by its path, from the last function on."""
    return path.replace(_CLASS, "").rpartition(":")[2].lstrip(".") or "itself"


class Watch:
    """Watches what is read beside arguments from a function on.

    Attributes:
        modules: further ones, which have run.
        first: the first state; None before it is asked for.
    """

    def __init__(self, root: Any) -> None:
        self.modules: list[nn.Module] = []
        self._roots, self._names, self._left_out = {"": root, "ran": self.modules}, {*_CALLED}, set[str]()
        self._states: list[State] = []  # the last one comes last
        self.first: State | None = None

    def _look(self) -> State:
        tries = 100
        while True:
            names, tries = len(self._names), tries - 1
            try:
                now = State(self._roots, self._names, self._left_out)
            except (LookupError, RuntimeError):  # another thread changes what is looked at
                if tries:
                    continue
                raise
            if names == len(self._names):  # no code was found that names more
                return now

    def state(self) -> State:
        """Return the state of all values: the same object for the same values."""
        with process_lock:
            if not (self._states and self._states[-1].unchanged()):
                now = self._look()
                known = next((state for state in self._states if state.is_equal(now)), now)
                vars(known).update(vars(now))
                others = [state for state in self._states if state is not known]
                self._states = [*others[1 - _MOST_STATES :], known]
            self.first = self.first or self._states[-1]
            return self._states[-1]

    def settle(self, then: State, modules: Iterable[nn.Module], stage: str) -> None:
        """Take what an evaluation has changed, and the modules that ran in it.

        Raises:
            StageError: it has changed a number, which a program would not.
        """
        now = self.state().values
        for path in {path for path in {**then.values, **now} if then.values.get(path) != now.get(path)}:
            before, after = then.values.get(path), now.get(path)
            if isinstance(before, tuple) and isinstance(after, tuple) and issubclass(before[0], Number):
                raise StageError(
                    stage,
                    f"it changes {told(path)} from {before[1]}, which the program of a trace does not",
                    "give it to the stage as its state, and return the new value",
                )
            # Lists grow by each evaluation.
            self._left_out.add(path.rpartition("[")[0] if re.search(r"\[\d+\]$", path) else path)
        vars(self.state()).update(vars(self._look()))  # without what is left out now
        self.modules += [module for module in modules if id(module) not in self.state().found]
        self.first = None if then is self.first else self.first


def require_none_left(state: State, before: Container[int], stage: str) -> None:
    """Raise StageError for a tensor without values in what a function reads, left there by an evaluation.

    Args:
        before: identities of what the function read before the evaluation.
    """
    for path, value in state.found.values():
        if id(value) in before:
            continue
        part = local(value) if isinstance(value, Tensor) else None
        if isinstance(part, FakeTensor) and isinstance(part.fake_mode, Evaluation):
            raise StageError(
                stage,
                f"it leaves a tensor in {told(path)}, which no later step does: it is evaluated once, without"
                " values",
                "return it as a part of y, or, from a stage by hand, as Output(y, metrics=...); remove a hook"
                " that keeps tensors",
            )


def require_none_stale(state: State, reader: str) -> None:
    """Raise StageError for an attribute that is read, and set by a call of a module, which takes it back."""
    found = [*state.found.values()]
    read = (_names_of(f.__code__, "LOAD_ATTR") for path, f in found if _is_part(path, f))
    kinds = {type(value) for _, value in found if isinstance(value, nn.Module)}
    stale = (
        frozenset[str]().union(*read)
        & frozenset().union(*(_set_by_calls(k) for k in kinds)) - _OF_EVERY_TENSOR
    )
    if stale:
        raise StageError(
            reader,
            f"it reads the attribute {min(stale)}, which a module sets when it is called: the value is that"
            " of another call, without a gradient",
            "have the module return it, and the stage too: as Output(y, loss=...) or a part of y",
        )


def _is_part(path: str, value: Any) -> bool:
    """Tell whether a function calls another as a function, or as a method of its own; modules call others."""
    if not isinstance(value, FunctionType) or _CLASS in path.removeprefix(_CLASS):
        return False
    is_method = "." in value.__qualname__.rpartition("<locals>.")[2]
    own = not is_method or path.rpartition(".")[0] in ("", _CLASS)
    return own and not _is_foreign(value.__module__)


def _set_by_calls(kind: type[nn.Module]) -> frozenset[str]:
    """List the attributes that a call of a module assigns: by ``forward``, and by methods that it names."""
    names, codes = ["forward"], dict[str, CodeType]()
    for name in names:
        function = getattr(kind, name, None)
        if name not in codes and isinstance(function, FunctionType) and not _is_foreign(function.__module__):
            codes[name] = function.__code__
            names += _named_in(function.__code__)
    return frozenset().union(*(_names_of(code, "STORE_ATTR") for code in codes.values()))


def ambient() -> tuple[Any, ...]:
    """Return what torch holds beside arguments, and operators depend on.

    These are autocast, the default dtype, the kernels that are switched on, and function modes.
    """
    on = mode_stack() if function_modes() else ()
    modes = [(type(mode), repr(vars(mode))) for mode in on if not getattr(mode, "looks_on", False)]
    switches = [switch() for switch in KERNEL_SWITCHES]
    return autocast() if any_autocast() else (), torch.get_default_dtype(), *switches, *modes

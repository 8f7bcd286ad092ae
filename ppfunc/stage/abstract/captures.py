"""Find the values that functions read beside their arguments: a program is traced for these alone.

A function may read what it refers to, and what that refers to in turn::

    a function             its closure, its defaults, the globals and the modules that its code names
    an object, a class     attributes and methods that code names; all where code has ``getattr`` or ``vars``,
                           and where a base is of torch or Python
    a module of torch.nn   also parameters, buffers, submodules, hooks, mode
    a module of Python     what code names of it
    a container            its entries

Numbers, texts and flags count by their values, arrays of up to 64 KiB by their bytes, functions by their
code, anything else by identity: a write into a tensor is seen by programs, which read its memory. The code of
torch, of Python and of this library is not followed. Of installed packages functions are, which refer to
functions and plain values, and classes to code. What is not seen is what an extension in C keeps, what
objects of torch and Python hold, and data that packages keep for themselves. Code that looks up globals by
texts is refused, and so are iterators, which have another value in each call.
"""

import gc
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dis import get_instructions
from enum import Enum
from functools import _lru_cache_wrapper, cache
from hashlib import sha256
from itertools import accumulate, chain
from numbers import Number
from operator import attrgetter, is_, itemgetter, methodcaller
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from .._torch import (
    HOOKS_OF_ALL_MODULES,
    KERNEL_SWITCHES,
    FakeTensor,
    any_autocast,
    function_modes,
    mode_stack,
)
from ..device import autocast
from ..errors import StageError, is_of_a_library
from ..layout import local
from ..process import process_lock
from .evaluation import Evaluation

READS = "ppfunc_reads"
"""An attribute of a function of this library: all that it reads beside its arguments."""

_PLAIN = Number, str, bytes, Enum, type(None), torch.dtype, torch.device
_MOST_VALUES, _MOST_STATES, _MOST_BYTES = 200_000, 32, 2**16
# Names in the code of torch and Python alone.
_CALLED = {"training", "forward", "backward", "setup_context", "jvp", "__wrapped__"}
_BY_TEXT = {  # code with these may read any attribute
    "getattr", "vars", "__dict__", "__getattribute__", "getattr_static", "getmembers", "attrgetter",
    "methodcaller", "asdict", "astuple",
}  # fmt: skip
_DICTS = (
    "_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip
_OF_EVERY_MODULE, _OF_EVERY_TENSOR = {*vars(nn.Module())} - _CALLED, {*dir(Tensor)}
_UNCALLED = {"__init__", "__init_subclass__", "__new__", "__annotations__", "__dict__", "__doc__"}
_HOLDERS = "abc", "argparse", "types", "typing"  # of Python, whose objects hold values under names of users
_WRAPPERS = "builtins", "collections", "functools", "itertools", "weakref", "_weakrefset"  # under other names
_CODE = (
    FunctionType, _lru_cache_wrapper, property, classmethod, staticmethod, type, ModuleType, Tensor,
    nn.Module, *_PLAIN,
)  # fmt: skip
_CLASS = ".__class__"
_BY_CONSTANT = (  # getattr(object, constant), or with a default
    r"getattr (LOAD_(FAST|FAST_BORROW|DEREF|GLOBAL|NAME)( LOAD_ATTR)*) LOAD_CONST"
    r"( LOAD_CONST| LOAD_(FAST|FAST_BORROW|DEREF|GLOBAL|NAME)( LOAD_ATTR)*)? (PRE)?CALL"
)


class State:
    """Holds the value of all that is read, as far as it counts, by path. It is equal to itself alone."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


class _Look:
    """Looks at all that is read, and tells afterwards whether it is still the same.

    Attributes:
        values: the part of each value that counts, by path.
        found: path and value, by identity.
    """

    def __init__(self, roots: dict[str, Any], names: set[str], left_out: set[str]) -> None:
        self.values: dict[str, Any] = {}
        self.found: dict[int, tuple[str, Any]] = {}
        self._names = names
        self._held, self._keyed, self._objects = list[Any](), list[Any](), list[Any]()
        self._getters, self._sized, self._arrays = list[tuple[Any, Any]](), list[Any](), list[Any]()
        ahead = [*roots.items(), ("hooks of all modules", _hooks_of_all_modules())]
        while ahead:
            path, value = ahead.pop()
            kind = type(value)
            plain: Any = (kind, repr(value)) if isinstance(value, _PLAIN) else None
            if plain and not hasattr(value, "__dict__"):
                self.values[path] = plain
            elif id(value) in self.found:
                self.values[path] = self.found[id(value)][0]
            elif path not in left_out:
                self.found[id(value)] = path, value
                if len(self.found) > _MOST_VALUES:
                    raise ValueError(
                        f"stages and loss refer to more than {_MOST_VALUES:,} values, such as {told(path)};"
                        " give them what they read as arguments, or by functools.partial"
                    )
                inside = self._inside(path, value)
                if inside is None and not plain:  # it counts by identity, and is not kept: tensors are large
                    by_identity = ref if isinstance(value, type) else WeakIdRef  # which a class may not have
                    plain = [by_identity(value)] if kind.__weakrefoffset__ else (kind, repr(value))
                self.values[path] = plain or (value.__code__ if kind is FunctionType else kind)
                ahead += ((path + name, each) for name, each in inside or ())
        self._seen = self._now()

    def _now(self) -> tuple[list[Any], list[Any]]:
        gotten = (get(owner) for get, owner in self._getters)
        same = chain(
            gc.get_referents(*self._held), *self._keyed, *gotten,
            map(vars, self._objects), map(type, self._objects), _hooks_of_all_modules(),
        )  # fmt: skip
        return [*same], [*map(len, self._sized), *map(_bytes_of, self._arrays)]

    def unchanged(self) -> bool:
        """Tell whether all values are the same objects."""
        try:
            (now, equal), (then, equal_then) = self._now(), self._seen
        except (LookupError, RuntimeError):  # one is gone
            return False
        return equal == equal_then and len(now) == len(then) and all(map(is_, now, then))

    def _inside(self, path: str, value: Any) -> list[tuple[str, Any]] | None:
        """List the values that a value holds, and note how to look at them again."""
        kind: Any = type(value)
        own, wraps, inside = not _is_foreign(kind.__module__), kind.__module__ in _WRAPPERS, list[Any]()
        match value:
            case Tensor():
                return None
            case FunctionType():
                return self._of_function(value)
            case ModuleType():
                return None if _is_foreign(value.__name__) else self._named(value)
            case type():
                above = [*((f".{base.__name__}", base) for base in value.__bases__), (_CLASS, kind)]
                return None if _is_foreign(value.__module__) else [*self._named(value), *above]
            case ContextVar():
                self._getters.append((lambda variable: (variable.get(None),), value))
                return [(".get()", value.get(None))]
            case ref():
                self._getters.append((lambda weak: (weak(),), value))
                return [("()", value())]
            case attrgetter() | methodcaller():
                self._names.add("getattr")
                return [("", repr(value))]
            case Iterator() if wraps:
                raise ValueError(
                    f"stages and loss read {told(path)}, a {kind.__name__}, which has another value in each"
                    " call; give them its values as arguments"
                )
            case nn.Module():
                inside = [each for name in _DICTS for each in self._entries(vars(value).get(name, {}))]
            case dict():
                inside = self._entries(value)
            case list() | tuple() | deque() | set() | frozenset():
                self._held += [] if isinstance(value, tuple | frozenset) else [value]
                each = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
                inside = [(f"[{n}]", entry) for n, entry in enumerate(each)]  # sets: as in every process
            case _ if 0 < _size_of(value) <= _MOST_BYTES:  # more is not read in every step
                self._arrays.append(value)
                return [("", repr(_bytes_of(value)))]
            case MappingProxyType():
                inside = [("", part) for part in gc.get_referents(value)]
        members = [name for name in _members(kind) if hasattr(value, name)] if own or wraps else []
        self._held += [value] if members else []
        inside += [(f".{name}", getattr(value, name)) for name in members]
        looks = own or wraps or isinstance(value, nn.Module) or kind.__module__ in _HOLDERS
        if looks and isinstance(getattr(value, "__dict__", None), dict):
            self._objects.append(value)
            inside += self._named(value)
        inside += [(_CLASS, kind)] if own else []
        return inside if inside or isinstance(value, dict | list | tuple | deque | set | frozenset) else None

    def _entries(self, held: dict[Any, Any]) -> list[tuple[str, Any]]:
        # The keys of a class of its own may do anything.
        keys = held if _is_foreign(type(held).__module__) else dict.keys(held)
        (self._held if held else self._sized).append(held)
        self._keyed += [keys] if held else []
        inside = [(f"(key {n})", key) for n, key in enumerate(keys) if not isinstance(key, _PLAIN)]
        return inside + [
            (f"[{key!r}]" if isinstance(key, _PLAIN) else f"[key {n}]", dict.__getitem__(held, key))
            for n, key in enumerate(keys)
        ]

    def _of_function(self, function: FunctionType) -> list[tuple[str, Any]] | None:
        code, globals_, cells = function.__code__, function.__globals__, function.__closure__ or ()
        self._held += cells
        inside: Any = [
            (f":{name}", each)
            for name, cell in zip(code.co_freevars, cells, strict=True)
            for each in gc.get_referents(cell)
        ]
        inside.append((".defaults", (function.__defaults__, function.__kwdefaults__)))
        home = globals_.get("__name__")
        if _is_foreign(home):  # torch notes things in its functions when it calls them
            return [*inside, (f".{READS}", vars(function).get(READS))]
        inside.append((".dict", vars(function)))
        names, read = (
            named_in(code),
            _names_of(code, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
        )
        self._names |= names
        wanted = [name for name in sorted(read) if name in globals_]
        if _is_installed(home):
            inside = [(name, each) for name, each in inside if isinstance(each, _CODE)]
            wanted = [
                name
                for name in wanted
                if isinstance(globals_[name], (FunctionType, _lru_cache_wrapper, *_PLAIN))
            ]
        elif any_name := read & {"globals", "eval", "exec"} - globals_.keys():
            raise ValueError(
                f"{function.__qualname__}: its code calls {min(any_name)}(), so that what it reads is not"
                " known; name globals as they are, or look values up in a dictionary"
            )
        else:
            self._held.append(function)
            # Relative imports have names in packages around this module.
            around = "", *accumulate(f"{part}." for part in (home or "").split("."))
            words = {home, *names} if "__name__" in _names_of(code, "LOAD_GLOBAL") else names
            modules = {package + name for package in around for name in words if name} & sys.modules.keys()
            inside += self._got(sys.modules, sorted(modules), ":{}")
        return [*inside, *self._got(globals_, wanted, ":{}")]

    def _named(self, value: Any) -> list[tuple[str, Any]]:
        """List the attributes that code names, or reads by texts; of a class methods of operators too."""
        held, kind, module = vars(value), type(value), isinstance(value, nn.Module)
        home = held.get("__module__", held.get("__name__")) if isinstance(value, ModuleType | type) else None
        packaged = _is_installed(home)
        bases = {base.__module__ for base in {*kind.__mro__} - {nn.Module, object}}.difference(_HOLDERS)
        every = home is None and any(map(_is_foreign, bases))  # by code that is not followed
        every |= not (packaged or _BY_TEXT.isdisjoint(self._names))
        wanted = [n for n in held if n in self._names or (every and n[:2] != "__")]
        if isinstance(value, type):  # what operators call, and no annotations
            hidden = (n for n, each in held.items() if n[:2] == "__" and isinstance(each, FunctionType))
            wanted = [n for n in {**dict.fromkeys(wanted), **dict.fromkeys(hidden)} if n not in _UNCALLED]
        if packaged:
            wanted = [n for n in wanted if isinstance(held[n], _CODE)]
        return self._got(held, [n for n in wanted if not (module and n in _OF_EVERY_MODULE)])

    def _got(self, owner: Any, names: list[str], path: str = ".{}") -> list[tuple[str, Any]]:
        self._sized.append(owner)
        if names:  # an itemgetter of two names or more returns a tuple
            self._getters.append((itemgetter(*names, names[0]), owner))
        return [(path.format(name), owner[name]) for name in names]


def _hooks_of_all_modules() -> list[Any]:
    """List the hooks that torch calls at every module, without hooks that look on."""
    hooks = chain.from_iterable(hooks.values() for hooks in HOOKS_OF_ALL_MODULES)
    return [hook for hook in hooks if not getattr(hook, "looks_on", False)]


def _size_of(value: Any) -> int:
    """Count the bytes of an array; 0 for anything else."""
    try:
        return memoryview(value).nbytes
    except (TypeError, ValueError, BufferError):
        return 0


def _bytes_of(array: Any) -> tuple[str, Any]:
    """Describe an array by its bytes and its shape."""
    view = memoryview(array)
    return sha256(view.tobytes()).hexdigest(), view.shape


@cache
def _members(kind: Any) -> list[str]:
    """List the attributes that objects of a class keep outside of their dictionaries."""
    members = [
        n for base in kind.__mro__ for n, e in vars(base).items() if isinstance(e, MemberDescriptorType)
    ]
    return [*members, "__self__", "__name__"] if hasattr(kind, "__self__") else members  # functions in C


@cache
def _is_foreign(module: str | None) -> bool:
    """Tell whether a module of Python is torch's, Python's or this library's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module != "__main__" and module in sys.modules and (file is None or is_of_a_library(file))


@cache
def _is_installed(module: str | None) -> bool:
    """Tell whether a module of Python is of an installed package."""
    file = str(getattr(sys.modules.get(module or ""), "__file__", ""))
    return "site-packages" in file or "dist-packages" in file


@cache
def named_in(code: CodeType) -> frozenset[str]:
    """List the names and texts in code, and in functions within it."""
    names, ahead = set[str](), [code]
    for each in ahead:
        if isinstance(each, CodeType):
            names |= {*each.co_names} - (set() if _asks(each) else {"getattr"})
            ahead += each.co_consts
        elif isinstance(each, tuple | frozenset):
            ahead += each
        elif isinstance(each, str) and each.replace(".", "").isidentifier():
            names |= {each, *each.split(".")}
    # Patterns of classes name attributes by their number.
    return frozenset(names | ({"getattr"} if _names_of(code, "MATCH_CLASS") else set()))


def _asks(code: CodeType) -> bool:
    """Tell whether code gives names to ``getattr`` that are no constants."""
    steps = ("getattr" if step.argval == "getattr" else step.opname for step in get_instructions(code))
    return "getattr" in re.sub(_BY_CONSTANT, "", " ".join(steps))


@cache
def _names_of(code: CodeType, *operations: str) -> frozenset[str]:
    """List the names that code, and functions within it, give to these operations."""
    inner = (
        _names_of(constant, *operations) for constant in code.co_consts if isinstance(constant, CodeType)
    )
    own = {step.argval for step in get_instructions(code) if step.opname in operations}
    return frozenset(own.union(*inner))


def changes(then: State, now: State) -> list[str]:
    """List the differences of a state from an earlier state, in the same words in every process."""
    counts = ((path, now.values.get(path)) for path in _changed(then.values, now.values))
    return sorted(f"{told(path)} = {c[1] if isinstance(c, tuple) else 'another'}" for path, c in counts)


def _changed(then: dict[str, Any], now: dict[str, Any]) -> set[str]:
    return {path for path in then.keys() | now.keys() if then.get(path) != now.get(path)}


def told(path: str) -> str:
    """Name a value by its path, from the last function on."""
    return path.replace(_CLASS, "").rpartition(":")[2].lstrip(".") or "itself"


def reads(function: Any) -> Any:
    """Return the root of the reads of a stage: of a model that was split the model, else the stage."""
    return function if hasattr(function, "__wrapped__") else getattr(function, READS, function)


class Watch:
    """Watches the values that are read beside arguments from a function on.

    Attributes:
        modules: further ones, which have run.
        first: the first state; None before it is asked for.
        found: all values with their paths, by identity, as they were seen last.
    """

    def __init__(self, root: Any) -> None:
        self.modules: list[nn.Module] = []
        self._roots, self._names, self._left_out = {"": root, "ran": self.modules}, {*_CALLED}, set[str]()
        self._states: list[State] = []  # the last one comes last
        self._look: _Look | None = None
        self.found: dict[int, tuple[str, Any]] = {}
        self.first: State | None = None

    def _looked(self) -> _Look:
        for _ in range(100):
            names = len(self._names)
            with suppress(LookupError, RuntimeError):  # another thread changes what is looked at
                look = _Look(self._roots, self._names, self._left_out)
                if names == len(self._names):  # no code was found that names more
                    return look
        raise RuntimeError("other threads change what stages and loss read, while it is looked at")

    def state(self) -> State:
        """Return the state of all values: the same object for the same values, in the same order."""
        with process_lock:
            if self._look is None or not self._look.unchanged():
                self._look = self._looked()
                self.found = self._look.found
                values = [*self._look.values.items()]
                now = State(self._look.values)
                known = next((state for state in self._states if [*state.values.items()] == values), now)
                others = [state for state in self._states if state is not known]
                self._states = [*others[1 - _MOST_STATES :], known]
            self.first = self.first or self._states[-1]
            return self._states[-1]

    def settle(self, then: State, modules: Iterable[nn.Module], stage: str) -> None:
        """Take the changes of an evaluation, and the modules that ran in it.

        Args:
            then: the state before.

        Raises:
            StageError: it has left a tensor without values, or changed a number or text; a program would not.
        """
        before, now = self.found, self.state()
        for path, value in self.found.values():
            part = local(value) if isinstance(value, Tensor) and id(value) not in before else None
            if isinstance(part, FakeTensor) and isinstance(part.fake_mode, Evaluation):
                raise StageError(
                    stage,
                    f"it leaves a tensor in {told(path)}, which no later step does: it is evaluated once,"
                    " without values",
                    "return it as a part of y, or, from a stage by hand, as Output(y, metrics=...); remove a"
                    " hook that keeps tensors",
                )
        changed = _changed(then.values, now.values)
        for path in changed:
            earlier, later = then.values.get(path), now.values.get(path)
            if isinstance(earlier, tuple) and isinstance(later, tuple) and earlier[1] != "None":
                raise StageError(
                    stage,
                    f"it changes {told(path)} from {earlier[1]}, and calls of a pure function leave nothing"
                    " behind",
                    "give it to the stage as its state, and return the new value",
                )
            place, _, entry = path.rpartition("[")  # lists grow by each evaluation
            self._left_out.add(place if entry[:-1].isdigit() else path)
        self.modules += [module for module in modules if id(module) not in self.found]
        self.first = None if then is self.first else self.first
        if changed:  # look without what is left out now
            self._look = None
            self.state()

    def require_none_stale(self, set_by_calls: set[str], reader: str) -> None:
        """Raise StageError for an attribute that is read, and that calls of modules set, which take it back.

        Args:
            set_by_calls: names of such attributes. What modules call may read them within a call.
        """
        functions = ((path, f) for path, f in self.found.values() if isinstance(f, FunctionType))
        own = [e for e in functions if not (_is_foreign(e[1].__module__) or _is_installed(e[1].__module__))]
        called = {*_CALLED}
        while more := {n for _, f in own if f.__name__ in called for n in named_in(f.__code__)} - called:
            called |= more
        # Methods that no code names are read by texts at most.
        methods = {f.__name__ for _, f in own if "." in f.__qualname__.rpartition("<locals>.")[2]}
        called |= methods - self._names
        outside = (f.__code__ for path, f in own if not path or f.__name__ not in called)
        read = frozenset[str]().union(*(_names_of(code, "LOAD_ATTR") for code in outside))
        if stale := read & set_by_calls - _OF_EVERY_TENSOR:
            raise StageError(
                reader,
                f"it reads the attribute {min(stale)}, which a module sets when it is called: the value is"
                " that of another call, without a gradient",
                "have the module return it, and the stage too: as Output(y, loss=...) or a part of y",
            )


def ambient() -> tuple[Any, ...]:
    """Return the state of torch on which operators depend beside their arguments.

    These are autocast, the default dtype, the kernels that are switched on, and function modes.
    """
    on = mode_stack() if function_modes() else ()
    modes = [(type(mode), repr(vars(mode))) for mode in on if not getattr(mode, "looks_on", False)]
    switches = [switch() for switch in KERNEL_SWITCHES]
    return autocast() if any_autocast() else (), torch.get_default_dtype(), *switches, *modes

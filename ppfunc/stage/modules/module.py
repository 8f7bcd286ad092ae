"""Make stages of ``torch.nn`` modules: the pure function, its parameters, its state.

A call leaves its module unmodified.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from itertools import filterfalse, starmap
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ppfunc._checks import naming_arguments, shown

from .._torch import is_dtensor, version
from ..abstract.output import Output
from ..errors import StageError
from ..frozen import detached, note_parameters
from ..layout import Boundary, MeshLayout, as_dtensor, declaring, layout_of
from ..process import process_lock

State = dict[str, Tensor]
_Call = Callable[[State, tuple[Any, ...]], Any]

_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
_WRAPPERS = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"}


class ModuleStage(NamedTuple):
    """Hold a module as a pure function.

    Args:
        fn: ``(params, x) -> y``; given a state too, ``(params, x, state) -> Output(y, state=new)``. Extras of
            the stage come before the state.
        params: the parameters by name, detached; those of the module are not copied.
        state: the buffers by name.
    """

    fn: Callable[..., Any]
    params: State
    state: State


@naming_arguments
def stage_from_module(module: nn.Module, *, constants: bool = False, spread: bool = True) -> ModuleStage:
    """Make the pure function that ``module`` computes, in the mode that it is in when a step begins.

    A tuple ``x`` becomes positional arguments, a dictionary with texts as keys keyword arguments,
    anything else the one argument. Extras become further arguments in the same way. A parameter
    with two names is listed once, under the first, and gets one gradient. One that requires no
    gradient when a step function or trainer is made is frozen: it gets zeros. Buffers that the module writes
    into are a state: they go into a step as ``state={stage: state}``, and come back, with ``has_aux=True``,
    as ``aux.state[stage]``. Buffers that it only reads, as a trial without values shows, are constants, and
    need no state. Other attributes are read when a step begins. Make the stage anew after a
    parameter was replaced by another object, or a hook for all modules of the process was registered.
    Parameters may be DTensors, as torch's ``parallelize_module`` makes them. Frozen parameters of other
    subclasses, such as quantised weights, are constants.

    Args:
        module: any module. It is left unmodified: attributes set during a call, and changes to dicts, lists
            and sets held as attributes, are rolled back.
        constants: take the buffers (masks, tables of positions, the statistics of a batch norm in evaluation)
            as constants. There is no state then, and a module that writes into a buffer raises.
        spread: take tuples and dictionaries apart into arguments; if False, each is one argument.

    Raises:
        TypeError: not a module, or a scripted one.
        ValueError: a parameter of a lazy module is not initialised.

    References:
        ``torch.func.functional_call``.

    >>> fn, params, state = stage_from_module(nn.Linear(3, 2))
    >>> sorted(params), state, fn(params, torch.zeros(5, 3)).shape
    (['bias', 'weight'], {}, torch.Size([5, 2]))
    """
    require_usable(module)
    params = {
        name: p.detach() for name, p in module.named_parameters() if p.requires_grad or not is_subclass(p)
    }
    parameters = set(map(id, module.parameters()))  # a buffer may be one of them under another name
    state = (
        {}
        if constants
        else {name: b.detach() for name, b in module.named_buffers() if id(b) not in parameters}
    )
    call = _caller(module, params | state, spread)

    def plain(params: State, *arguments: Any) -> Any:
        return call(dict(params), arguments)

    fn = _stateful(module, tuple(state), call) if state else plain
    note_parameters(fn, module, params)
    layouts = _layouts(params)
    mesh = next((layout.mesh for layout in (layouts or _layouts(state)).values()), None)
    return ModuleStage(declaring(fn, Boundary(mesh, params=layouts)), params, state)


def is_subclass(tensor: Tensor) -> bool:
    """Tell whether a tensor is of a class other than torch's own and DTensor, such as a quantised weight."""
    return type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not is_dtensor(tensor)


def _layouts(tensors: State) -> dict[str, MeshLayout]:
    return {name: layout for name, t in tensors.items() if (layout := layout_of(t)) is not None}


def require_usable(module: Any) -> None:
    """Raise for an object that is no module, or a module whose parameters cannot be replaced."""
    mend = ""
    if isinstance(module, type) and issubclass(module, nn.Module):
        mend = f"make one: {module.__name__}(...)"
    if isinstance(module, list | tuple):
        mend = "make one of layers: torch.nn.Sequential(*layers)"
    elif isinstance(module, str):
        mend = "make one, such as transformers' AutoModelForCausalLM.from_pretrained(name)"
    if mend or not isinstance(module, nn.Module):
        raise TypeError(
            f"model: got {shown(module)}, expected a torch.nn.Module as it is;"
            f" {mend or 'a function is a stage by itself'}"
        )
    for name, part in module.named_modules():
        if wrappers := _WRAPPERS & {kind.__name__ for kind in type(part).__mro__}:
            raise TypeError(
                f"{name or 'module'}: got a module that {wrappers.pop()} has wrapped, expected the one from"
                " before; its parameters are cut over data ranks by transport=ppfunc.P2P(mesh=mesh,"
                " shard='params'), or 'none' to keep them whole"
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"got {type(module).__name__}, whose parameters cannot be replaced; give the module from before"
            " it was scripted"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} is not initialised, its shape is not known; run the module once on an example first"
            )


def _caller(module: nn.Module, own: State, spread: bool) -> _Call:
    """Return a call of the module with other tensors than its own, in which it leaves replaced buffers.

    A stage gets this rank's part of a DTensor; the module gets a DTensor again.
    """
    parameters = {name: p for name, p in module.named_parameters() if name in own}
    shared, layouts = further_places(module, set(own)), _layouts(own)

    def call(tensors: State, arguments: tuple[Any, ...]) -> Any:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        for x in arguments:
            if spread and isinstance(x, dict):
                kwargs |= x
            else:
                args += x if spread and type(x) is tuple else (x,)
        for name, layout in layouts.items():
            if not is_dtensor(tensors[name]):
                tensors[name] = as_dtensor(tensors[name], layout)
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                tensors[name] = detached(name, tensors[name])
        for place, name in shared.items():
            tensors[place] = tensors[name]
        with process_lock, unmodified(module):
            return torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)

    return call


def _stateful(module: nn.Module, names: tuple[str, ...], call: _Call) -> Callable[..., Any]:
    """Return the function of a module with buffers: given a state it returns the next; else it reads them."""
    mend = (
        f"the module has the buffers {', '.join(names)}, which are its state: give it to the step,"
        " state={stage: state}, and has_aux=True to get the next one; a trainer takes it in init(params,"
        " state)"
    )

    def reading(params: State, arguments: tuple[Any, ...]) -> Any:
        buffers = {name: module.get_buffer(name) for name in names}
        tensors, before = params | buffers, [version(b) for b in buffers.values()]
        try:
            y = call(tensors, arguments)
        except StageError as error:
            raise StageError(
                error.stage, error.reason, mend if "writes into" in error.reason else error.instead
            ) from error
        written = [
            name
            for (name, b), count in zip(buffers.items(), before, strict=True)
            if tensors[name] is not b or version(b) != count
        ]
        if written:
            raise ValueError(
                f"the module has written into its buffer {written[0]}, and was given no state; {mend}"
            )
        return y

    def stateful(params: State, *arguments: Any) -> Any:
        *rest, last = arguments
        buffers = last if rest and isinstance(last, dict) else {}
        if buffers.keys().isdisjoint(names):
            return reading(params, arguments)
        if buffers.keys() != set(names):
            raise ValueError(f"got a state with {', '.join(buffers)}; {mend}")
        tensors = params | {name: b.clone() for name, b in buffers.items()}
        y = call(tensors, tuple(rest))
        after = {name: tensors[name].detach() for name in names}
        if not isinstance(y, Output):
            return Output(y, state=after)
        if y.state is not None:
            raise ValueError(
                "the module has buffers, which are its state, and returns an Output with another state; leave"
                " that out"
            )
        return y._replace(state=after)

    return stateful


def further_places(module: nn.Module, names: set[str]) -> dict[str, str]:
    """Find the other places of the tensors of these names, each once, however often its submodule is listed.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> further_places(nn.Sequential(a, b, b), {"0.weight", "0.bias", "1.bias"})
    {'1.weight': '0.weight'}
    """
    places = [
        (f"{prefix}.{name}".lstrip("."), tensor)
        for prefix, part in module.named_modules()
        for listed in (part.named_parameters, part.named_buffers)
        for name, tensor in listed(recurse=False, remove_duplicate=False)
    ]
    first = {id(tensor): place for place, tensor in places if place in names}
    return {
        place: first[id(tensor)] for place, tensor in places if place not in names and id(tensor) in first
    }


@contextmanager
def unmodified(*modules: nn.Module) -> Iterator[Callable[[], bool]]:
    """Restore the attributes of modules and their submodules at the exit, and contents of containers.

    Yields a function that tells whether all are as they were.
    """
    parts = [part for module in modules for part in module.modules()]
    containers: list[Any] = [*map(vars, parts)]
    containers += [v for attributes in containers for v in attributes.values() if type(v) in _CONTAINERS]
    filled = [(values, values.copy()) for values in filter(None, containers)]
    empty = list(filterfalse(None, containers))  # most of them, so that they are looked at together
    try:
        yield lambda: not any(empty) and all(starmap(_same, filled))
    finally:
        modified = [*((n, b) for n, b in filled if not _same(n, b)), *((n, ()) for n in filter(None, empty))]
        changed = {id(now): before for now, before in modified}
        for part in parts if changed else ():
            before = changed.get(id(vars(part)), vars(part))
            names = {n for n, v in vars(part).items() if id(v) in changed or before.get(n, changed) is not v}
            set_by_calls.setdefault(part, set()).update(names)
        for now, before in modified:
            now.clear()
            (now.extend if hasattr(now, "extend") else now.update)(before)


# Names of the attributes that calls of a module have set, and `unmodified` has taken back.
set_by_calls: MutableMapping[nn.Module, set[str]] = WeakKeyDictionary()


def _same(now: Any, before: Any) -> bool:
    """Tell whether two containers hold the same objects in the same order."""
    alike = len(now) == len(before) and all(map(is_, now, before))
    return alike and (not isinstance(now, dict) or all(map(is_, now.values(), before.values())))

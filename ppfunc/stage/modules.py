"""Make stages of ``torch.nn`` modules and of layers, and lay parameters over the ranks of a mesh.

A module becomes a pure function of its parameters and its state; a call leaves it unmodified, and later
changes of submodules and hooks are seen. A list of functions of one layer each is cut by a partition. Modules
are laid out by torch's plans, any trees by a rule.
"""

import json
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from inspect import signature
from itertools import filterfalse, starmap, zip_longest
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ppfunc._checks import naming_arguments, require_type, shown
from ppfunc.parallel.partition import Partition

from ._torch import is_dtensor, version
from .errors import StageError
from .frozen import detached, note_parameters
from .layout import (
    Boundary,
    MeshLayout,
    as_dtensor,
    declaring,
    distributed,
    gather_texts,
    layout_of,
    require_axis,
    with_layouts,
)
from .process import process_lock
from .program import WITHOUT_CARRY, Output
from .signature import Signature, leaf_names

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

State = dict[str, Tensor]
_Call = Callable[[State, tuple[Any, ...]], Any]

_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
_WRAPPERS = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"}


class ModuleStage(NamedTuple):
    """Hold a module as a pure function.

    Args:
        fn: ``(params, x) -> y``; given a state too, ``(params, x, state) -> Output(y, state=new)``. Extras of
            the stage come before the state. With a carry, ``(params, x, carry) -> Output(y, carry=new)``.
        params: the parameters by name, detached; those of the module are not copied.
        state: the buffers by name.
    """

    fn: Callable[..., Any]
    params: State
    state: State


@naming_arguments
def stage_from_module(module: nn.Module, *, constants: bool = False, carry: str | None = None) -> ModuleStage:
    """Make the pure function that ``module`` computes, in the mode that it is in when a step begins.

    A tuple ``x`` becomes positional arguments, a dictionary with texts as keys keyword arguments,
    anything else the one argument: ``(x,)`` gives a tuple or a dictionary as one. Extras become further
    arguments in the same way. A parameter
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
        carry: name of the parameter of ``forward`` that takes the carry of slices, such as ``"hx"`` of LSTM,
            GRU and RNN, where ``forward`` returns ``(y, next carry)``. The first slice gets None.

    Raises:
        TypeError: not a module, or a scripted one.
        ValueError: a parameter of a lazy module is not initialised, or ``forward`` has no such parameter.

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
    call = _caller(module, params | state)

    def plain(params: State, *arguments: Any) -> Any:
        return call(dict(params), arguments)

    fn = _stateful(module, tuple(state), call) if state else plain
    fn = fn if carry is None else _carrying(module, carry, fn)
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


def _caller(module: nn.Module, own: State) -> _Call:
    """Return a call of the module with other tensors than its own, in which it leaves replaced buffers.

    A stage gets this rank's part of a DTensor; the module gets a DTensor again.
    """
    parameters = {name: p for name, p in module.named_parameters() if name in own}
    shared, layouts = further_places(module, set(own)), _layouts(own)

    def call(tensors: State, arguments: tuple[Any, ...]) -> Any:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        for x in arguments:
            if isinstance(x, dict):
                kwargs |= x
            else:
                args += x if type(x) is tuple else (x,)
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


def _carrying(module: nn.Module, carry: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a module that takes its carry by name, and returns it beside the result."""
    kind, parameters = type(module).__name__, signature(module.forward).parameters
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if carry not in names[1:]:
        raise ValueError(
            f"carry: got {shown(carry)}, expected a parameter of {kind}.forward after the first:"
            f" {', '.join(names[1:]) or 'none'}"
        )
    backwards = [type(m).__name__ for m in module.modules() if getattr(m, "bidirectional", False) is True]
    if backwards:
        raise ValueError(
            f"carry: got a bidirectional {backwards[0]}, which reads a sequence from its end too"
        )
    if isinstance(module, nn.RNNBase) and not module.batch_first:
        raise ValueError(
            f"carry: got {kind}(batch_first=False), but axis 0 has the rows of a microbatch; make it with"
            " batch_first=True"
        )

    def carrying(params: State, x: Any, before: Any = None, *extras: Any) -> Output:
        result = call(params, x, {carry: before}, *extras)
        out = result if isinstance(result, Output) else Output(result)
        if not isinstance(out.y, tuple) or len(out.y) != 2 or out.y[1] is None:
            raise ValueError(f"{kind} returns {shown(out.y)}, expected a pair (y, next {carry})")
        return out._replace(y=out.y[0], carry=out.y[1])

    return carrying


def further_places(module: nn.Module, names: set[str]) -> dict[str, str]:
    """Find further places of the tensors of these names, each once, however often its submodule is listed.

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


# -- layers

Layer = Callable[..., Any]  # layer(params, x, *extras) -> y


@naming_arguments
def stages_from_layers(layers: Sequence[Layer], partition: Partition) -> list[Layer]:
    """Make a function for each stage of the partition, which runs the layers of that stage in their order.

    Equivalent to, for the stage with layers ``start..end-1``::

        def stage(params, x, *extras):
            for layer, p in zip(layers[start:end], params, strict=True):
                x = layer(p, x, *extras)
            return x

    Args:
        layers: pure functions ``layer(params, x, *extras) -> y``, in order.
        partition: the layers of each stage.

    Returns:
        Stages whose ``params`` are those of their layers, ``partition.split(params)[stage]``.

    Raises:
        TypeError: not a partition, or layers that are no functions.
        ValueError: the partition is for another number of layers.

    >>> layers = [lambda p, x: p + x, lambda p, x: p * x, lambda p, x: x - p]
    >>> stages = stages_from_layers(layers, Partition((0, 2, 3)))
    >>> stages[1]((1,), stages[0]((2, 3), 4))
    17
    """
    require_type("partition", partition, Partition, "a Partition, such as partition_layers(layers, stages)")
    for n, layer in enumerate(layers):
        if isinstance(layer, nn.Module) or not callable(layer):
            raise TypeError(
                f"layers[{n}]: got {shown(layer)}, expected a function layer(params, x) -> y;"
                " pp.split(torch.nn.Sequential(*modules), args, at=...) takes modules, those that LayerSpecs"
                " build"
            )
    return [
        _stage(chosen, interval)
        for chosen, interval in zip(partition.split(layers), partition.intervals, strict=True)
    ]


def _stage(layers: tuple[Layer, ...], interval: tuple[int, int]) -> Layer:
    def stage(params: Sequence[Any], x: Any, *extras: Any) -> Any:
        if len(params) != len(layers):
            raise ValueError(
                f"{stage.__name__} takes params for {len(layers)} layers, got {len(params)}: split them by"
                " partition.split(params)"
            )
        for layer, layer_params in zip(layers, params, strict=True):
            x = layer(layer_params, x, *extras)
        return x

    stage.__name__ = stage.__qualname__ = "layers_{}_to_{}".format(*interval)
    if len(layers) > 1:
        vars(stage)[WITHOUT_CARRY] = "ppfunc.stages_from_layers, of several layers"
    return stage


# -- modules and trees over the ranks of a mesh

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in a text of it

Rule = Callable[[str, Tensor], "Placement | Sequence[Placement] | None"]
"""``(name, leaf) -> placements``, one for each axis of the mesh; None for a leaf that stays a plain
tensor.
"""


@naming_arguments
def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: "Mapping[str, ParallelStyle] | ParallelStyle",
    *,
    inputs: Any = None,
    outputs: Any = None,
    constants: bool = False,
) -> ModuleStage:
    """Make a stage of a module that torch has parallelised over one axis of a mesh.

    Equivalent to, with every parameter a DTensor outside of the stage and, where the plan says so, inside::

        torch.distributed.tensor.parallel.parallelize_module(module, mesh, plan)
        fn, params, state = ppfunc.stage_from_module(module)    # which a module that is laid out needs alone

    The graph engine traces through DTensors to operators on local tensors and collectives, so that a step
    does no more than a function over :func:`ppfunc.collectives.psum` and its siblings would. The eager engine
    runs them as they are. The functional engine, and transforms such as :func:`ppfunc.hvp`, cannot take
    torch's DTensors. Under ``loss_parallel()`` call the step within its context, with
    ``use_local_output=False`` in the plan of the head.

    Args:
        module: parallelised in place, as by torch; its values are those of the first rank of the axis.
        mesh: an axis of a mesh, such as ``mesh["tp"]``, all ranks of which call this.
        plan: torch's: ``{name of a submodule: ColwiseParallel(), ...}``, or the style of the module itself.
        inputs, outputs: placements of the activations that the stage takes and returns, as in
            :func:`ppfunc.with_layouts`; whole on every rank by default. Sequence parallel stages have
            ``Shard(1)``.
        constants: whether buffers are constants, as in :func:`ppfunc.stage_from_module`.

    Returns:
        ``(fn, params, state)``, as :func:`ppfunc.stage_from_module`; all parameters are DTensors, those that
        are not in the plan replicated ones.

    Raises:
        ValueError: the ranks have different plans or parameters, a name in the plan is that of no submodule,
            or one parameter in two places is laid out in two ways.
        TypeError: not a module, or not one axis of a mesh.

    References:
        Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing activation recomputation, 2022
        (sequence parallel).
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    require_axis(mesh, "parallelize")
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: got {type(module).__name__}, expected a torch.nn.Module")
    _require_agreed(module, mesh, plan)
    _require_found(module, plan)
    shared = further_places(module, {name for name, _ in module.named_parameters()})
    parallelize_module(module, mesh, plan if isinstance(plan, ParallelStyle) else dict(plan))
    _tie_again(module, shared)
    fn, plain, state = stage_from_module(module, constants=constants)
    params = {
        name: distributed(p, None if layout_of(p) else MeshLayout.of(mesh, [Replicate()], p.shape))
        for name, p in plain.items()
    }
    fn = with_layouts(fn, mesh, inputs=inputs, outputs=outputs)
    layouts = {name: layout for name, p in params.items() if (layout := layout_of(p)) is not None}
    return ModuleStage(declaring(fn, Boundary.of(fn)._replace(params=layouts)), params, state)


@naming_arguments
def shard(params: Any, mesh: DeviceMesh, rule: Rule) -> Any:
    """Lay the leaves of a tree over the ranks of a mesh, by a rule; every rank of the mesh calls it.

    Args:
        params: a tree of whole tensors, such as ``{stage: tree}``. The values are those of the first rank of
            each axis.
        mesh: a mesh of as many axes as there are placements.
        rule: ``(name, leaf) -> placements``: ``Shard(axis)`` or ``Replicate()``, or one for each axis of the
            mesh; None for a leaf that stays as it is. A name is the keys on the way to the leaf, joined by
            dots.

    Returns:
        The tree with DTensors, new tensors.

    Raises:
        TypeError, ValueError: the rule gives other values than placements that replicate or shard, or an
            axis that a leaf lacks.

    >>> import torch
    >>> shard({"w": torch.ones(2)}, None, lambda name, leaf: None)
    {'w': tensor([1., 1.])}
    """
    from torch.distributed.tensor import Placement, Shard, distribute_tensor

    signature = Signature.of(params, "params")
    leaves = signature.require(params, "params")

    def laid(name: str, leaf: Tensor) -> Tensor:
        answer = rule(name, leaf)
        if answer is None:
            return leaf
        placements = [answer] if isinstance(answer, Placement) else list(answer)
        if len(placements) != mesh.ndim or not all(
            isinstance(p, Placement) and not p.is_partial() for p in placements
        ):
            raise TypeError(
                f"{name}: the rule gave {answer!r}, expected {mesh.ndim} of Replicate() and Shard(axis), or"
                " None"
            )
        if any(isinstance(p, Shard) and not -leaf.ndim <= p.dim < leaf.ndim for p in placements):
            raise ValueError(
                f"{name}: the rule gave {answer!r} for a tensor of shape {list(leaf.shape)}, which lacks that"
                " axis"
            )
        return distribute_tensor(leaf.detach(), mesh, placements).detach()

    return signature.unflatten(map(laid, leaf_names(signature), leaves))


def _require_agreed(module: nn.Module, mesh: DeviceMesh, plan: Any) -> None:
    """Raise ValueError on all ranks of the axis unless they have one plan and parameters of one form.

    Torch communicates at once for every parameter in the plan, and cannot tell whose call a message is of.
    """
    styles = plan.items() if isinstance(plan, Mapping) else [("", plan)]
    lines = [f"{path!r} as {type(style).__name__} {vars(style)}" for path, style in styles]
    lines += [f"{name} of shape {list(p.shape)}, {p.dtype}" for name, p in module.named_parameters()]
    if mesh.size() > 1 and dist.get_backend(group := mesh.get_group()) != "fake":
        mine = json.dumps([_ADDRESS.sub("", line) for line in lines])
        every = list(map(json.loads, gather_texts(mesh, group, mine)))
        for rank, theirs in enumerate(every):
            if theirs != every[0]:
                first, other = next(pair for pair in zip_longest(every[0], theirs) if len(set(pair)) > 1)
                raise ValueError(
                    f"plan: rank 0 of the axis has {first or 'nothing more'}, rank {rank} has"
                    f" {other or 'nothing more'}; give all ranks the same module and plan"
                )


def _require_found(module: nn.Module, plan: Any) -> None:
    """Raise if a name in the plan fits no submodule: torch would only warn."""
    names = [name.split(".") for name, _ in module.named_modules() if name]
    for path in plan if isinstance(plan, Mapping) else ():
        keys = path.split(".")
        if path and not any(len(name) == len(keys) and all(map(fnmatch, name, keys)) for name in names):
            raise ValueError(
                f"plan: {path!r} is the name of no submodule; the names are"
                f" {', '.join('.'.join(n) for n in names[:20])}"
            )


def _tie_again(module: nn.Module, shared: Mapping[str, str]) -> None:
    """Re-tie shared parameters: ``parallelize_module`` made a new parameter at every place."""
    for place, first in shared.items():
        home, _, name = place.rpartition(".")
        one, other = attrgetter(first, place)(module)
        if layout_of(one) != layout_of(other):
            layouts = " and ".join(
                f"{path!r} is {layout_of(t) or 'plain'}" for path, t in ((first, one), (place, other))
            )
            raise ValueError(
                f"plan: one parameter in two places is laid out in two ways, {layouts}; give both"
                " submodules the same"
            )
        if one is not other and isinstance(one, nn.Parameter):
            module.get_submodule(home).register_parameter(name, one)

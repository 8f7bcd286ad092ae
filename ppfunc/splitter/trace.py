"""Trace one call of a model without values."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from inspect import unwrap
from operator import or_
from typing import Any, NamedTuple, NoReturn

import torch
from optree import PyTreeSpec
from torch import Tensor, nn
from torch.fx import Node

from ppfunc.stage import StageError
from ppfunc.stage._torch import (
    DynamicOutputShapeException,
    enable_python_dispatcher,
    without_modes,
    without_transforms,
)
from ppfunc.stage.abstract.captures import Watch
from ppfunc.stage.abstract.evaluation import (
    DATA_DEPENDENT,
    data_dependence,
    in_python,
    quiet,
    without_values,
)
from ppfunc.stage.constants import with_tensors, without_constants
from ppfunc.stage.errors import line_of, meant
from ppfunc.stage.layout import LAY_OTHERWISE, distributed, layout_of, local
from ppfunc.stage.modules import unmodified
from ppfunc.stage.process import process_lock, without_foreign_draws
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import tree_flatten

from .cache import WITHOUT_CACHE, CacheForm, closed, opened, with_cache
from .call import MODEL, CallForm, LeafForm, Tensors
from .record import BY_HAND, Recording, caches_emptied, changed, storages

PIPE_SPLIT = "pipe_split() "
"""Begins the names of the cuts that the model makes itself; their numbers, from 1, follow."""


class Trace(NamedTuple):
    """Hold the trace of one call of a model.

    Args:
        nodes: the operators in order; their ``meta`` is told in `Recording`.
        params, buffers: the nodes of the tensors of the model, by the first name of each.
        inputs: the nodes of the tensors among its arguments.
        treedef: structure of its result.
        results: the leaves of it: nodes, or values of Python.
        replaced: the nodes of the tensors that the model has put in the place of buffers.
        frozen: the parameters that require no gradient.
        starts: the numbers of operators before the first in each module, by every name of the module, and
            before each call of ``pipe_split()``.
        carried: the nodes of the tensors of the cache that it gets.
        kept: the nodes of the tensors of the cache that it returns.
        cache: the form of the returned cache; None without slices.
    """

    nodes: tuple[Node, ...]
    params: Mapping[str, Node]
    buffers: Mapping[str, Node]
    inputs: tuple[Node, ...]
    treedef: PyTreeSpec
    results: tuple[Any, ...]
    replaced: Mapping[str, Node]
    frozen: frozenset[str]
    starts: Mapping[str, int]
    carried: tuple[Node, ...]
    kept: tuple[Node, ...]
    cache: CacheForm | None


def trace(
    model: nn.Module,
    form: CallForm,
    inputs: Sequence[LeafForm],
    device: torch.device,
    compute: torch.dtype | None = None,
    mapped: bool = False,
    cache: str = "",
    before: CacheForm | None = None,
) -> Trace:
    """Call the model on tensors without values, and record its operators.

    Args:
        model: the model, which is left unmodified.
        form: the form of the call.
        inputs: the forms of the tensors among the arguments.
        device: the device that the model computes on, wherever its tensors are now.
        compute: the dtype of its floating parameters, by default that of each.
        mapped: whether it is to run within a ``vmap``.
        cache: the argument in which the model gets a cache; empty without slices.
        before: the form of the cache that the slice before returned, None in the first slice.

    Raises:
        StageError: it cannot be traced.
    """
    _require_no_hooks(model)
    # It sees draws by functions that `changed` does not replace.
    then = (watch := Watch(model)).state()
    with caches_emptied(value for _, value in watch.found.values()):
        traced = without_foreign_draws(
            partial(_trace, model, form, inputs, device, compute, mapped, cache, before), MODEL
        )
    watch.settle(then, (), MODEL)
    return traced


def _trace(
    model: nn.Module,
    form: CallForm,
    inputs: Sequence[LeafForm],
    device: torch.device,
    compute: torch.dtype | None,
    mapped: bool,
    cache: str,
    before: CacheForm | None,
) -> Trace:
    tensors, forwards = Tensors.of(model), (unwrap(type(module).forward) for module in model.modules())
    with (
        process_lock,
        without_transforms(),  # that are active outside
        without_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_values(),
    ):
        recording = Recording(mapped, [getattr(function, "__code__", None) for function in forwards])
        fakes = {name: _like(t, device, compute) for name, t in tensors.params.items()}
        fakes |= {name: _like(t, device) for name, t in tensors.buffers.items()}
        input_tensors = tuple(_input(leaf, device) for leaf in inputs)
        nodes = {name: recording.place(t, "v_" + re.sub(r"\W", "_", name)) for name, t in fakes.items()}
        input_nodes = tuple(recording.place(t, f"input{i}") for i, t in enumerate(input_tensors))
        carries = tuple(_input(leaf, device) for leaf in (before.leaves if before else ()))
        carried = tuple(recording.place(t, f"carried{i}") for i, t in enumerate(carries))
        recording.carried = storages(carries)
        tensors_by_name = fakes | {place: fakes[name] for place, name in tensors.places.items()}
        with unmodified(model), changed(recording), in_python():
            arguments = without_constants(form.arguments(input_tensors))
            named = {node.name: name for node, name in zip(input_nodes, form.names(model), strict=True)}
            result = _call(
                model, tensors_by_name, arguments, recording, device, named,
                lambda: with_cache(model, cache, opened(before, carries)) if cache else {},
            )  # fmt: skip
            after, new = closed(result, cache, recording.numbers) if cache else (None, [])
        leaves, treedef = tree_flatten(result, "the result of the model")
        results = tuple(recording.node(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        kept = tuple(map(recording.node, new))
        if cache:
            trained = [nodes[name] for name, p in tensors.params.items() if p.requires_grad]
            returned = [leaf for leaf in results if isinstance(leaf, Node)]
            _require_carried(cache, carried, kept, returned, trained, recording)
        replaced = {
            name: recording.node(tensors_by_name[name])
            for name in tensors.buffers
            if tensors_by_name[name] is not fakes[name]
        }
    starts = {
        name: recording.starts[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in recording.starts
    }
    return Trace(
        tuple(n for n in recording.graph.nodes if n.op != "placeholder"),
        {name: nodes[name] for name in tensors.params},
        {name: nodes[name] for name in tensors.buffers},
        input_nodes,
        treedef,
        results,
        replaced,
        frozenset(name for name, p in tensors.params.items() if not p.requires_grad),
        starts | {f"{PIPE_SPLIT}{n}": number for n, number in enumerate(recording.cuts, 1)},
        carried,
        kept,
        after,
    )


def _call(
    model: nn.Module,
    tensors: dict[str, Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    recording: Recording,
    device: torch.device,
    inputs: Mapping[str, str],
    further: Callable[[], dict[str, Any]],
) -> Any:
    """Call the model under the recording. Its errors become a StageError that names the line.

    ``inputs`` has the names of the arguments that tensors are in, by node; ``further`` makes more arguments.
    """
    try:
        with enable_python_dispatcher(), recording, quiet():
            args, kwargs = with_tensors(arguments, device)
            return torch.func.functional_call(model, tensors, args, kwargs | further(), tie_weights=False)
    except StageError:
        raise
    except DATA_DEPENDENT as error:
        reason, dynamic = data_dependence(error), isinstance(error, DynamicOutputShapeException)
    except Exception as error:
        reason = (
            f"it raised {type(error).__name__}{line_of(error)} when it was called without values:"
            f" {str(error).rstrip('.')}{meant(error)}"
        )
        if "fake impl" in reason:
            mend = "register one"
        elif isinstance(error, (RuntimeError, ValueError)) and any(map(layout_of, model.parameters())):
            mend = LAY_OTHERWISE
        else:
            mend = f"call the model itself on inputs of this form; if that works, {BY_HAND}"
        if any(isinstance(argument, list) for argument in arguments[0]):
            mend = f"a list is one argument, where several arguments are a tuple; else {mend}"
        raise StageError(MODEL, reason, mend) from error
    mend = f"make that part independent of values, or {BY_HAND}"
    asked = {node.name: node.meta["value"].dtype for node in recording.asked}
    if asked and all(name in inputs and not differentiable(dtype) for name, dtype in asked.items()):
        names = sorted({inputs[name] for name in asked})
        reason += f"; these are values of its input {' and '.join(names)}"
        mend = f"where few values occur, say so, ppfunc.split(..., constants={names}); else {mend}"
    if dynamic:
        mend = f"keep all elements and weigh them (torch.where, masked_scatter, ignore_index=); {mend}"
    if getattr(getattr(model, "config", None), "_experts_implementation", None) == "eager":
        mend = f'if it is an expert, model.set_experts_implementation("batched_mm"); else {mend}'
    raise StageError(MODEL, reason, mend)


def _require_carried(
    cache: str,
    before: Sequence[Node],
    after: Sequence[Node],
    results: Sequence[Node],
    trained: Iterable[Node],
    recording: Recording,
) -> None:
    """Raise where a model leaves a tensor of its cache unread, or reads or keeps it without its gradient.

    A gradient is lost where what is computed of a tensor, by floating numbers, takes none from any result, or
    the next value of the same tensor takes none.

    Args:
        cache: the name of the cache.
        before, after: the tensors of the cache that the model gets, and of the cache that it returns.
        results: the tensors that it returns beside the cache.
        trained: the parameters that have gradients.
        recording: the recording of the model.
    """
    read = set(recording.origins([*results, *after]))
    marks = {node: 1 << n for n, node in enumerate(before, 1)} | dict.fromkeys(trained, 1)
    uses = recording.reach(marks, lambda node: "value" not in node.meta or _is_floating(node))
    learns = recording.reach(marks, lambda node: node.meta.get("grad", True))
    of_results = reduce(or_, map(uses, filter(learns, results)), 0) & ~reduce(or_, map(learns, results), 0)
    for node in before:
        if _is_floating(node) and node not in read:
            _refuse_cache(cache, node, "which it does not read in the next slice")
        if of_results & marks[node]:
            stop = next(n for n in recording.graph.nodes if uses(n) & ~learns(n) & marks[node]).meta
            where = stop["module"].name if stop["module"] and stop["module"].name else "the model"
            _refuse_cache(cache, node, f"which {where} reads without its gradient{stop['place']}")
    for n, node in enumerate(after, 1):
        if _is_floating(node) and uses(node) & ~learns(node) & (1 | 1 << n):
            _refuse_cache(cache, node, "without its gradient")


def _is_floating(node: Node) -> bool:
    return differentiable(node.meta["value"].dtype)


def _refuse_cache(cache: str, node: Node, what: str) -> NoReturn:
    raise StageError(
        MODEL,
        f"its {cache} holds a tensor of shape {node.meta['value'].shape}, {what}",
        WITHOUT_CACHE,
    )


def _require_no_hooks(model: nn.Module) -> None:
    """Raise where backward hooks would change or see gradients: stages have none."""
    hooks = "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"
    for what, owners in (("module", model.named_modules()), ("parameter", model.named_parameters())):
        for name, owner in owners:
            if any(getattr(owner, attribute, None) for attribute in hooks):
                raise StageError(
                    MODEL,
                    f"its {what} {name or type(owner).__name__} has a backward hook, which no stage would"
                    " call",
                    "remove it, or write what it does as an autograd.Function",
                )


def _input(leaf: LeafForm, device: torch.device) -> Tensor:
    """Make an input without values.

    A floating one has a history, so that what the model does to its gradient is seen.
    """
    fake = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return fake.requires_grad_().clone() if fake.is_floating_point() or fake.is_complex() else fake


def _like(tensor: Tensor, device: torch.device, compute: torch.dtype | None = None) -> Tensor:
    """Make a tensor without values, or a DTensor, of the same form on another device.

    A floating one may get another dtype.
    """
    dtype = compute if compute is not None and tensor.is_floating_point() else tensor.dtype
    layout = layout_of(tensor)
    part = tensor if layout is None else local(tensor.detach())
    fake = torch.empty_strided(part.shape, part.stride(), dtype=dtype, device=device)
    fake = distributed(fake, layout)
    fake = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    return fake.requires_grad_(tensor.requires_grad)

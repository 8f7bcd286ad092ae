"""Trace forward and backward of a stage as one graph of operators, and clean it up: no bit of a result
changes.

A trace whose sizes are symbols is compared with the trace of numbers, in the calls of both without copies.
"""

import inspect
import re
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Interpreter, Node, map_arg

from ..._torch import (
    ASKS_DEVICE,
    OpOverload,
    TorchDispatchMode,
    device_of,
    estimate,
    expression,
    has_kernel,
    history_number,
    reversed_call,
    schema,
    without_autocast,
    without_modes,
    without_transforms,
)
from ...abstract.evaluation import without_values
from ...abstract.outline import DifferentiableStage, contiguous
from ...errors import StageError, first_line, other_engine, refuse_own
from ...operators import tensors_in, written
from ...program import Gradients, Leaves, Numbers
from ...signature import differentiable
from .graph import (
    TRACED,
    GraphRecorder,
    always_equal,
    ancestors,
    arguments,
    base,
    call_node,
    comparable,
    is_call,
    is_check,
    is_dense,
    is_effect,
    is_element,
    is_mutable,
    is_of_forward,
    is_random,
    is_tensor,
    layout,
    module_of,
    operator_of,
    root,
)

aten = torch.ops.aten
Nodes = tuple[Node, ...]
Maybe = tuple[Node | None, ...]
Results = tuple[Leaves, Gradients, Gradients]  # outputs, gradients of the parameters and of x

_ENTRY = inspect.getfile(DifferentiableStage)  # which calls the stage
_ORIGIN = "place", "module", "reverses", "again"
_HIDDEN = {aten.miopen_batch_norm.default}  # writes into its arguments in secret, and has no other form
# name of the backward of operators that no derivative is registered for
_WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"


class Joint(NamedTuple):
    """Hold forward and backward of a stage in one graph without side effects."""

    graph: Graph  # the operators in the order in which they were called, and an output: `results`
    params: Nodes
    x: Nodes
    extras: Nodes
    gy: Nodes

    @property
    def results(self) -> tuple[Nodes, Maybe, Maybe]:
        """Return the nodes of the outputs and gradients of the trace.

        Returns:
            The leaves of ``y`` and of the auxiliary output; the gradients of the differentiable parameters,
            None without dependence; and those of the leaves of ``x`` that want one.
        """
        results: Any = self.graph.output_node().args[0]
        return results

    @property
    def effects(self) -> list[Node]:
        """List the operators of the forward that draw random numbers or communicate, used or not."""
        return [n for n in self.graph.nodes if is_effect(n) and is_of_forward(n)]

    @property
    def checks(self) -> list[Node]:
        """List the operators of the backward that raise where values are wrong."""
        return [n for n in self.graph.nodes if is_check(n) and not is_of_forward(n)]


def trace(stage: DifferentiableStage) -> Joint:
    """Trace a stage and its gradient by ``torch.autograd.grad`` under fake tensors.

    Raises:
        StageError: it cannot be traced.
    """
    example, name = stage.example, stage.name
    # Looking for anomalies asks for values.
    with without_values(example.symbols), torch.autograd.set_detect_anomaly(False):
        params, x, extras = example.make()
        leaves = (stage.outline.y.leaves[i] for i in stage.y_at)
        gy = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=example.device) for leaf in leaves)
        groups = (params, x, extras, gy)
        joint = recorded(partial(_forward_and_backward, stage), groups, name)
        if any(map(is_mutable, joint.graph.nodes)):
            with without_autocast():  # whose casts have been recorded
                joint = recorded(partial(_without_effects, joint), groups, name)
    _require_pure(joint, stage.outline.draws, name)
    return joint


def recorded(fn: Callable[..., Any], groups: tuple[Leaves, ...], name: str) -> Joint:
    """Record ``fn(record, *groups)`` as a joint trace."""
    record = Record(name)
    params, x, extras, gy = (
        tuple(record.place(t, f"{letter}{i}") for i, t in enumerate(group))
        for letter, group in zip("pxeg", groups, strict=True)
    )
    try:
        with record:
            results = fn(record, *groups)
    except StageError:
        raise
    except Exception as error:
        refuse_own(error, name)
        reason = (
            f"it runs, but its gradient cannot be traced ({first_line(error)}{record.place_of(str(error))})"
        )
        instead = "register one" if "register_autograd" in reason else other_engine("eager")
        raise StageError(name, reason, instead) from error
    record.graph.output(record.with_nodes(results))
    return Joint(record.graph, params, x, extras, gy)


def _forward_and_backward(
    stage: DifferentiableStage, record: "Record", params: Leaves, x: Leaves, extras: Leaves, gy: Leaves
) -> Results:
    """Compute outputs, gradients of the parameters and of ``x``."""
    with torch.enable_grad():
        primals = stage.primals(params, x)
        for tensor in chain(*primals):
            tensor.requires_grad_()
        y, outputs = stage.with_others(params, x, extras)(*primals)
        record.end_of_forward()
        inputs = primals[0] + primals[1]
        gradients: Any = (None,) * len(inputs)
        if y and inputs:
            with without_autocast():  # as a backward outside of it, whose operators have their dtypes
                gradients = torch.autograd.grad(y, inputs, gy, allow_unused=True)
    cut = len(primals[0])
    return outputs, stage.dense(gradients[:cut]), contiguous(gradients[cut:])


def _without_effects(joint: Joint, record: "Record", *groups: Leaves) -> Results:
    """Compute the same results by operators that write into nothing."""
    rerun = _Rerun(record, joint)
    constants = {n: n.meta["constant"] for n in joint.graph.nodes if n.op == "get_attr"}

    def run(values: list[torch.Tensor], *tensors: torch.Tensor) -> Any:
        # What is made of constants alone may be written into as well.
        return rerun.run(*tensors, initial_env=dict(zip(constants, values, strict=True)))

    with torch.no_grad():
        return torch.func.functionalize(run)(list(constants.values()), *chain(*groups))


class _Rerun(Interpreter):
    """Calls the operators of a trace once more, and tells a record where its forward ends."""

    def __init__(self, record: "Record", joint: Joint) -> None:
        super().__init__(module_of(joint.graph))
        self.record = record

    def run_node(self, n: Node) -> Any:
        if is_call(n) and not is_element(n):  # an element has the place of its list
            self.record.repeats = n
            if not is_of_forward(n):
                self.record.end_of_forward()
        return super().run_node(n)


def _require_pure(joint: Joint, draws: int, name: str) -> None:
    for node in joint.graph.nodes:
        if is_mutable(node):
            raise StageError(
                name,
                f"the effect of {node.target} cannot be removed from its trace",
                other_engine("functional"),
            )
    if sum(map(is_random, joint.graph.nodes)) > draws:
        raise StageError(
            name,
            "its backward draws random numbers, which would not repeat those of its forward",
            other_engine("eager"),
        )


class Record(GraphRecorder, TorchDispatchMode):
    """Records below autograd and the transforms of torch.func, so that a backward is recorded as well.

    ``meta["val"]`` of a node is its result without values. An operator of the forward has the ``meta`` of
    `origin`. ``meta["reverses"]`` of one of the backward is that of the operator whose gradient it computes;
    ``meta["again"]`` tells whether it may be one of the forward, called again.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(stage, _ENTRY, other_engine("functional"))
        # Calls of operators that may cut the gradient without saying so, with their results and the histories
        # before the call.
        self._doubtful: list[tuple[Node, list[tuple[Any, Any]]]] = []
        self._in_forward = True
        self._origins: dict[int | None, dict[str, Any]] = {}  # of operators, by autograd's number
        self.repeats: Node | None = None  # of an earlier trace, which is called once more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not TRACED.issuperset(types):
            return NotImplemented  # a subclass comes down to operators on plain tensors by itself
        self.require_operator(func)
        if func.namespace == "prim":
            # Autograd asks for the device of each gradient, more often than it calls operators.
            asks_device = func is ASKS_DEVICE and types
            return device_of(args[0]) if asks_device else func(*args, **kwargs)
        if func.namespace == "c10d":
            raise StageError(
                self.owner,
                f"it uses the collective {func}{self.called_at()}, which writes in place and is not traced",
                "use ppfunc.collectives.psum or one of its siblings, or"
                " torch.distributed._functional_collectives where no gradient is wanted",
            )
        if func in _HIDDEN:
            raise StageError(
                self.owner,
                f"its operator {func}{self.called_at()} writes into its arguments in secret",
                self.mend,
            )
        with self:
            if func in _DECOMPOSITIONS:
                return _DECOMPOSITIONS[func](*args, **kwargs)
            # A kernel of the device has other bits than its decomposition.
            first = next(tensors_in(args), None)
            if first is None or not has_kernel(func, first.device):
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return self._call(
            aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func, args, kwargs
        )

    def _call(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Call the operator and make its node."""
        nodes, named = self.with_nodes(args), self.with_nodes(kwargs)
        histories = self._histories(func, args, kwargs)
        result = func(*args, **kwargs)
        node = self.add(func, nodes, named, result, _name(func))
        node.meta["val"] = result
        if (earlier := self.repeats) is not None:
            node.meta |= {k: earlier.meta[k] for k in _ORIGIN if k in earlier.meta}
        elif self._in_forward:
            node.meta |= (origin := self.origin())
            self._origins.setdefault(history_number(), origin)
        else:
            number, of_forward = reversed_call()
            node.meta |= {"reverses": self._origins.get(number, {}), "again": of_forward}
        if histories is not None:
            histories += [(t, None) for t in tensors_in(result) if differentiable(t.dtype)]
            self._doubtful.append((node, histories))
        return result

    def _histories(self, func: OpOverload, args: Any, kwargs: Any) -> list[tuple[Any, Any]] | None:
        """List the tensors that an operator writes into, with their histories.

        Returns:
            None for an operator that needs no derivative, or has one for certain.
        """
        if (
            func.namespace == "aten"
            or not (self._in_forward and torch.is_grad_enabled())
            or not any(t.requires_grad for t in tensors_in((args, kwargs)))
        ):
            return None
        return [(t, t.grad_fn) for t in written(func, args, kwargs)]

    def end_of_forward(self) -> None:
        """Record the backward from here on.

        Raises:
            StageError: the gradient would end at an operator without derivative.
        """
        self._in_forward = False
        for node, results in self._doubtful:
            if results and all(
                t.grad_fn is before or t.grad_fn.name() == _WITHOUT_DERIVATIVE for t, before in results
            ):
                raise StageError(
                    self.owner,
                    f"its operator {node.target}{node.meta['place']}, has no derivative, so that its gradient"
                    " would be lost",
                    "register one (torch.library.register_autograd), or detach what it is given",
                )

    def place_of(self, text: str) -> str:
        """Return the last line that called an operator named in a text."""
        words = set(re.findall(r"\w+", text))
        calls = [n for n in self.graph.nodes if n.meta.get("place")]
        places = [
            n.meta["place"]
            for n in calls
            if words & {_name(n.target), _name(n.target).removeprefix("special_")}
        ]
        return places[-1] if places else ""

    def _know(self, node: Node, tensor: torch.Tensor) -> Node:
        node.meta["val"] = tensor
        return super()._know(node, tensor)


def _batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    """Compute ``native_batch_norm`` by operators whose schemas say that they update ``mean`` and ``var``."""
    if mean is None or var is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, training, *rest)
    if training:
        return aten._native_batch_norm_legit.default(x, w, b, mean, var, training, *rest)
    return aten._native_batch_norm_legit_no_training.default(x, w, b, mean, var, *rest)


def _cudnn_batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    """Compute ``cudnn_batch_norm`` by the kernels of torch: equal within rounding."""
    y, *saved = _batch_norm(x, w, b, mean, var, training, *rest)
    return (y, *(saved if training else (w.new_empty(0), w.new_empty(0))), x.new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_backward(
    x: Any, gy: Any, w: Any, mean: Any, var: Any, m: Any, invstd: Any, eps: float, _: Any
) -> Any:
    """Compute the gradient of ``cudnn_batch_norm``. Autograd asks for it in training only."""
    return aten.native_batch_norm_backward(gy, x, w, mean, var, m, invstd, True, eps, [True, True, True])


_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


def _name(operator: OpOverload) -> str:
    return schema(operator).name.split("::")[1]


# -- what is cleaned up

_COPIES = {aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def clean(joint: Joint) -> None:
    """Remove copies that nobody needs, views of views, duplicates and dead operators.

    Duplicates are merged within the forward and within the backward. Between them only what tangents of a
    gradient take from the forward: what a stage chose to compute again in its backward (checkpointing) stays
    computed again.
    """
    skip_copies(joint)
    _shorten_views(joint)
    for late in (False, True):
        _merge_duplicates(joint, late)
    for node in filter(is_call, list(joint.graph.nodes)):
        for fuse in (_fuse_linear, _fuse_stack, _fuse_sum, _fuse_draw):
            fuse(node)
    _drop_dead(joint)


def skip_copies(joint: Joint) -> None:
    """Use earlier nodes in the place of nodes with the same value: copies, and views that change nothing."""
    for node in filter(is_call, joint.graph.nodes):
        if _is_copy(node) and _is_spare(node, node.args[0]):
            node.replace_all_uses_with(node.args[0], propagate_meta=False)
            continue
        if node.target is aten.slice_backward.default and _is_copy(node):
            node.target, node.args = aten.clone.default, node.args[:1]
            node.kwargs = {"memory_format": torch.contiguous_format}
        below = base(node) if is_tensor(node) else None
        while below is not None and not (is_tensor(below) and layout(below) == layout(node)):
            below = base(below)
        if below is not None:
            node.replace_all_uses_with(below, propagate_meta=False)


def _is_copy(node: Node) -> bool:
    """Tell copies, as are the power of 1 in the derivative of a square, and the gradient of a whole slice."""
    if node.target is aten.slice_backward.default:
        part, sizes, *_ = arguments(node)
        return always_equal(tuple(part.meta["val"].shape)) == always_equal(tuple(sizes))
    return node.target in _COPIES or (node.target is aten.pow.Tensor_Scalar and node.args[1] in (1,))


def _is_spare(copy: Node, source: Node) -> bool:
    """Tell whether a source can take the place of its copy.

    If the copy has views, both must have the same layout. A constant without views may have any strides.
    """
    if layout(copy) == layout(source):
        return True
    if any(base(user) is copy for user in copy.users):
        return False
    a, b = copy.meta["val"], source.meta["val"]
    flags = a.dtype == b.dtype and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
    return source.op == "get_attr" or (flags and always_equal(a.stride()) == always_equal(b.stride()))


def _shorten_views(joint: Joint) -> None:
    """Make a reshape of a reshape of something contiguous one reshape.

    It may copy: some kernels return other strides than they do without values (batch norm of a transposed
    tensor on the CPU).
    """
    for node in joint.graph.nodes:
        if is_call(node) and node.target in _RESHAPES:
            below = node.args[0]
            while is_call(below) and below.target in _RESHAPES and below.args[0].meta["val"].is_contiguous():
                below = below.args[0]
            node.target, node.args = aten.reshape.default, (below, *node.args[1:])


def _merge_duplicates(joint: Joint, late: bool) -> None:
    """Merge nodes of the same half that compute the same."""
    forward = ancestors(joint.results[0])
    seen: dict[Hashable, Node] = {}
    for node in filter(is_call, joint.graph.nodes):
        early = node in forward or (not late and operator_of(node).meta.get("again"))
        if early == late or is_effect(node):
            continue
        key = _key(node)
        if key is not None and (first := seen.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first, propagate_meta=False)


def _key(node: Node) -> Hashable:
    """Return a key that is equal for nodes that compute the same, if it is known."""
    if "empty" in str(node.target):
        return None
    if is_tensor(node) and base(node) is not None:
        return ("view of", root(node), layout(node))
    return (node.target, comparable(node.args), comparable(node.kwargs))


def _fuse_linear(node: Node) -> None:
    """Replace ``addmm(b, x, w.t())`` and ``mm(x, w.t())`` by ``linear``: one call instead of two."""
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, transposed = arguments(node)
        fits = bias.meta["val"].dim() == 1
    elif node.target is aten.mm.default:
        (x, transposed), bias, fits = arguments(node), None, True
    else:
        return
    if not (
        fits
        and is_call(transposed)
        and transposed.target is aten.t.default
        and is_dense(transposed)
        and is_dense(x)
    ):
        return
    weight = arguments(transposed)[0]
    if weight.meta["val"].dim() == 2:
        node.target, node.args = aten.linear.default, (x, weight) if bias is None else (x, weight, bias)


def _fuse_stack(node: Node) -> None:
    """Replace a contiguous copy of ``permute(stack(tensors))`` by a ``stack`` of permuted tensors.

    It is the gradient of what queries, keys and values are views of.
    """
    if node.target is not aten.clone.default or node.kwargs != {"memory_format": torch.contiguous_format}:
        return
    if not is_call(turned := arguments(node)[0]) or turned.target is not aten.permute.default:
        return
    stack, order = arguments(turned)
    if stack.target is not aten.stack.default or len(stack.users) + len(turned.users) > 2:
        return
    tensors, axis = (*arguments(stack), 0)[:2]
    rank = stack.meta["val"].dim()
    axis, order = axis % rank, [d % rank for d in order]
    dims, place = [d - (d > axis) for d in order if d != axis], order.index(axis)
    with without_modes(), without_transforms():
        values = [tensor.meta["val"].permute(dims) for tensor in tensors]
        stacked = torch.stack(values, place)  # it keeps the format of channels last
    if always_equal(stacked.stride()) != always_equal(node.meta["val"].stride()):
        return
    parts = []
    for tensor, value in zip(tensors, values, strict=True):
        with node.graph.inserting_before(node):
            parts.append(part := call_node(node.graph, aten.permute.default, (tensor, dims), {}, None))
        part.meta = turned.meta | {"val": value}
    node.target, node.args, node.kwargs = aten.stack.default, (parts, place), {}


def _fuse_sum(node: Node) -> None:
    """Replace ``sum(x, dims, keepdim=True)``, viewed without these dimensions, by ``sum(x, dims)``."""
    if node.target not in _RESHAPES or not is_call(total := arguments(node)[0]):
        return
    if (
        total.target is not aten.sum.dim_IntList
        or len(total.args) != 3
        or total.kwargs
        or len(total.users) > 1
    ):
        return
    x, dims, keep = arguments(total)
    rank = x.meta["val"].dim()
    left = tuple(n for i, n in enumerate(x.meta["val"].shape) if i not in {d % rank for d in dims})
    if keep and dims and always_equal(tuple(node.meta["val"].shape)) == always_equal(left):
        node.target, node.args = aten.sum.dim_IntList, (x, dims)


def _fuse_draw(node: Node) -> None:
    """Replace ``bernoulli(empty_like(x), p)``, which reads shape and dtype alone, by ``bernoulli(x, p)``."""
    if (
        node.target is aten.bernoulli.p
        and is_call(empty := arguments(node)[0])
        and empty.target is aten.empty_like.default
    ):
        shape_of = arguments(empty)[0]
        a, b = shape_of.meta["val"], node.meta["val"]
        if a.dtype == b.dtype and always_equal(a.stride()) == always_equal(b.stride()):
            node.args = (shape_of, *node.args[1:])


def _drop_dead(joint: Joint) -> None:
    alive = ancestors([joint.graph.output_node(), *joint.effects, *joint.checks])
    for node in reversed(list(joint.graph.nodes)):
        if node not in alive and node.op != "placeholder":
            joint.graph.erase_node(node)


def require_same(symbolic: Joint, stage: DifferentiableStage) -> None:
    """Raise StageError where a trace with numbers in place of its symbols is not the trace of these sizes.

    A stage may look at a size as at something else than a number: at its text, or at its type.
    """
    numbers = Numbers({expression(size): estimate(size) for size in stage.example.symbols})
    example, outline = numbers((stage.example, stage.outline))
    joint = trace(DifferentiableStage(stage.fn, example, outline, stage.has_aux, stage.name))
    skip_copies(symbolic)  # where a size is a symbol, torch also takes a slice of all
    skip_copies(joint)
    for one, two in zip_longest(_written(symbolic, numbers), _written(joint, numbers)):
        if one != two:
            (with_symbols, _), (call, place) = one or ("nothing", ""), two or ("nothing", "")
            raise StageError(
                stage.name,
                f"it calls {call}{place}, and {with_symbols} where its sizes are symbols",
                "use sizes as numbers alone",
            )


def _written(joint: Joint, numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Write each call that is no view, and yield the user's line. Of a view, what it comes to is written."""
    names: dict[Node, int] = {}

    def argument(node: Node) -> str:
        value, text = node.meta["val"], f"%{names[root(node)]}"
        if not (is_tensor(node) and is_dense(node)):
            return text
        axes = zip(*numbers((tuple(value.shape), value.stride())), strict=True)
        return f"{text}{[axis for axis in axes if axis[0] != 1]} + {numbers(value.storage_offset())}"

    for node in joint.graph.nodes:
        if base(node) is None and (node.users or node.op != "call_function"):
            names[node] = len(names)
            text = f"{node.target} {map_arg(numbers((node.args, node.kwargs)), argument)}"
            yield f"{text} {node.meta.get('constant', '')}", node.meta.get("place", "")

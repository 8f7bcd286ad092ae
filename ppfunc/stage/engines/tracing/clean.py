"""Clean up a joint trace without changing a bit of any result.

One whose sizes are symbols is compared with the one of numbers, in what is left of both without copies.
"""

from collections.abc import Hashable, Iterator
from itertools import zip_longest

import torch
from torch.fx import Node, map_arg

from ..._torch import estimate, expression, without_modes, without_transforms
from ...abstract.differentiable import DifferentiableStage
from ...errors import StageError
from ...program import Numbers
from .graph import (
    always_equal,
    ancestors,
    arguments,
    base,
    call_node,
    comparable,
    is_call,
    is_dense,
    is_effect,
    is_tensor,
    layout,
    operator_of,
    root,
)
from .joint import Joint, trace

aten = torch.ops.aten
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
    _fuse(joint)
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


def _fuse(joint: Joint) -> None:
    """Put ``linear`` together again, let sums drop their dimensions themselves, and copy once, not twice."""
    for node in list(joint.graph.nodes):
        if is_call(node):
            _fuse_linear(node)
            _fuse_stack(node)
            _fuse_sum(node)
            _fuse_draw(node)


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

"""Trace forward and backward of a stage as one graph of operators."""

from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..._torch import without_autocast
from ...abstract.evaluation import without_values
from ...errors import StageError, first_line
from ...program import Gradients, Leaves
from ..differentiable import DifferentiableStage, contiguous
from .operators import is_call, is_effect, is_element, is_mutable, is_of_forward, is_random
from .record import Record

Nodes = tuple[Node, ...]
Maybe = tuple[Node | None, ...]
Results = tuple[Leaves, Gradients, Gradients]  # outputs, gradients of the parameters and of x


class Joint(NamedTuple):
    """Hold forward and backward of a stage in one graph without side effects."""

    graph: Graph  # the operators in the order in which they were called
    constants: dict[str, torch.Tensor]  # that ``get_attr`` nodes name
    params: Nodes
    x: Nodes
    extras: Nodes
    gy: Nodes
    outputs: Nodes  # the leaves of ``y``, then those of the auxiliary output
    gparams: Maybe  # one per differentiable parameter, None without dependence
    gx: Maybe  # one per leaf of ``x`` that wants a gradient

    @property
    def results(self) -> list[Node]:
        """List the wanted nodes, and those with effects: every engine draws and communicates the same."""
        wanted = [n for n in (*self.outputs, *self.gparams, *self.gx) if n is not None]
        return wanted + self.effects

    @property
    def effects(self) -> list[Node]:
        """List the operators of the forward that draw random numbers or communicate, used or not."""
        return [n for n in self.graph.nodes if is_effect(n) and is_of_forward(n)]


def trace(stage: DifferentiableStage) -> Joint:
    """Trace a stage and its gradient by ``torch.autograd.grad`` under fake tensors.

    Raises:
        StageError: it cannot be traced.
    """
    example, name = stage.example, stage.name
    # Looking for anomalies asks for values.
    with without_values(), torch.autograd.set_detect_anomaly(False):
        params, x, extras = example.make()
        leaves = (stage.outline.y.leaves[i] for i in stage.y_at)
        gy = tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device=example.device) for leaf in leaves)
        groups = (params, x, extras, gy)
        joint = _record(partial(_joint, stage), groups, name)
        if any(map(is_mutable, joint.graph.nodes)):
            with without_autocast():  # whose casts have been recorded
                joint = _record(partial(_without_effects, joint), groups, name)
    _require_pure(joint, stage.outline.draws, name)
    return joint


def _record(fn: Callable[..., Results], groups: tuple[Leaves, ...], name: str) -> Joint:
    """Record ``fn(record, *groups)`` as a joint trace."""
    named = [
        (t, f"{letter}{i}") for letter, group in zip("pxeg", groups, strict=True) for i, t in enumerate(group)
    ]
    record = Record(name, named)
    try:
        with record:
            results = fn(record, *groups)
    except StageError:
        raise
    except Exception as error:
        reason = (
            f"it runs, but its gradient cannot be traced ({first_line(error)}{record.place_of(str(error))})"
        )
        instead = "register one" if "register_autograd" in reason else "use the eager engine"
        raise StageError(name, reason, instead) from error
    params, x, extras, gy, y = (tuple(map(record.node, leaves)) for leaves in (*groups, results[0]))
    gparams, gx = (
        tuple(None if t is None else record.node(t) for t in gradients) for gradients in results[1:]
    )
    return Joint(record.graph, record.constants, params, x, extras, gy, y, gparams, gx)


def _joint(
    stage: DifferentiableStage, record: Record, params: Leaves, x: Leaves, extras: Leaves, gy: Leaves
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


def _without_effects(joint: Joint, record: Record, *groups: Leaves) -> Results:
    """Compute the same results by operators that write into nothing."""
    sizes = [len(nodes) for nodes in (joint.outputs, joint.gparams, joint.gx)]
    joint.graph.output([*joint.outputs, *joint.gparams, *joint.gx])
    with torch.no_grad():
        results = iter(torch.func.functionalize(_Again(record, joint).run)(*chain(*groups)))
    outputs, gparams, gx = (tuple(islice(results, size)) for size in sizes)
    return outputs, gparams, gx


class _Again(Interpreter):
    """Calls the operators of a trace once more, and tells a record where its forward ends."""

    def __init__(self, record: Record, joint: Joint) -> None:
        super().__init__(GraphModule(joint.constants, joint.graph))
        self.record = record

    def run_node(self, n: Node) -> Any:
        if is_call(n) and not is_element(n) and not is_of_forward(n):  # an element has the place of its list
            self.record.end_of_forward()
        return super().run_node(n)


def _require_pure(joint: Joint, draws: int, name: str) -> None:
    for node in joint.graph.nodes:
        if is_mutable(node):
            raise StageError(
                name,
                f"the effect of {node.target} cannot be removed from its trace",
                "use the functional engine",
            )
    if sum(map(is_random, joint.graph.nodes)) > draws:
        raise StageError(
            name,
            "its backward draws random numbers, which would not repeat those of its forward",
            "use the eager engine",
        )

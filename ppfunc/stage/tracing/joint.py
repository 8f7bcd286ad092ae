"""The joint trace: forward and backward of a stage as one graph of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch import OpOverload, make_fx, rename
from ..abstract import Outline, without_values
from ..contiguous import contiguous
from ..differentiable import DifferentiableStage
from ..errors import StageError
from ..example import Example, Leaves
from .honest import HIDDEN, HONEST
from .operators import is_call, is_element, is_mutable, is_random

Nodes = tuple[Node, ...]
Maybe = tuple[Node | None, ...]


class Joint(NamedTuple):
    """Forward and backward in one graph without side effects.

    Args:
        graph: the operators in the order in which they were called.
        constants: the tensors that ``get_attr`` nodes name.
        params, x, consts, gy: the nodes of the arguments.
        outputs: the leaves of ``y``, then those of the auxiliary output.
        gparams: one entry per differentiable parameter, ``None`` without dependence.
        gx: one entry per leaf of ``x`` that wants a gradient.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    params: Nodes
    x: Nodes
    consts: Nodes
    gy: Nodes
    outputs: Nodes
    gparams: Maybe
    gx: Maybe

    @property
    def results(self) -> list[Node]:
        """All nodes that are wanted, and the random ones, so that every engine draws the same."""
        wanted = [n for n in (*self.outputs, *self.gparams, *self.gx) if n is not None]
        return wanted + [n for n in self.graph.nodes if is_random(n)]


def trace(stage: DifferentiableStage, example: Example, known: Outline, name: str) -> Joint:
    """Trace ``stage`` and its gradient by ``torch.autograd.grad`` under fake tensors.

    Raises:
        StageError: what the stage does cannot be traced, or its backward draws random numbers.
    """
    # Looking for anomalies asks for values.
    with without_values(), torch.autograd.set_detect_anomaly(False):
        params, x, consts = example.make()
        gy = tuple(torch.empty(s.shape, dtype=s.dtype, device=example.device) for s in known.y.leaves if s.grad)
        groups = (params, x, consts, gy)
        flat = [t for group in groups for t in group]
        traced = _make_fx(_joint(stage, groups), flat, name)
        if any(map(is_mutable, traced.graph.nodes)):
            traced = _make_fx(torch.func.functionalize(traced), flat, name)
    joint = _read(traced, groups, (len(known.y.leaves) + len(known.aux.leaves), len(stage.param_at), len(stage.x_at)))
    _require_served(joint, known, name)
    return joint


def _joint(stage: DifferentiableStage, groups: tuple[Leaves, ...]) -> Callable[..., list[torch.Tensor | None]]:
    """The function ``(*params, *x, *consts, *gy) -> [*outputs, *gparams, *gx]``."""

    def joint(*flat: torch.Tensor) -> list[torch.Tensor | None]:
        params, x, consts, gy = _regroup(flat, groups)
        with torch.enable_grad():
            primals = tuple(tuple(t.detach().requires_grad_() for t in group) for group in stage.primals(params, x))
            y, outputs = stage.with_others(params, x, consts)(*primals)
            inputs = primals[0] + primals[1]
            if not (y and inputs):
                return [*outputs, *(None for _ in inputs)]
            gradients = torch.autograd.grad(y, inputs, gy, allow_unused=True)
        cut = len(primals[0])
        return [*outputs, *gradients[:cut], *contiguous(gradients[cut:])]

    return joint


def _regroup(flat: Any, groups: Any) -> Iterator[tuple[Any, ...]]:
    rest = iter(flat)
    return (tuple(islice(rest, len(group))) for group in groups)


def _make_fx(fn: Callable[..., Any], flat: list[torch.Tensor], name: str) -> GraphModule:
    try:
        return make_fx(fn, tracing_mode="real", decomposition_table=HONEST, _allow_non_fake_inputs=True)(*flat)
    except StageError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        reason = f"it runs, but its gradient cannot be traced ({type(error).__name__}: {first})"
        raise StageError(name, reason, "use the eager engine") from error


def _read(traced: GraphModule, groups: tuple[Leaves, ...], counts: tuple[int, int, int]) -> Joint:
    graph = traced.graph
    arguments = list(_regroup((n for n in graph.nodes if n.op == "placeholder"), groups))
    for letter, nodes in zip("pxcg", arguments, strict=True):
        for index, node in enumerate(nodes):
            rename(node, f"{letter}{index}")
    (results,) = graph.output_node().args
    names = {n.target for n in graph.nodes if n.op == "get_attr"}
    constants = {target: getattr(traced, target) for target in names}
    return Joint(graph, constants, *arguments, *_regroup(results, [range(n) for n in counts]))


def _require_served(joint: Joint, known: Outline, name: str) -> None:
    for node in joint.graph.nodes:
        if is_call(node) and not (is_element(node) or isinstance(node.target, OpOverload)):
            raise StageError(name, f"it uses {node.target}, an operator on functions", "use the functional engine")
        if is_mutable(node) or node.target in HIDDEN:
            raise StageError(
                name, f"the effect of {node.target} cannot be removed from its trace", "use the functional engine"
            )
    if sum(map(is_random, joint.graph.nodes)) > known.draws:
        raise StageError(
            name,
            "its backward draws random numbers, which would not repeat those of its forward",
            "use the eager engine",
        )

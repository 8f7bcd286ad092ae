"""Record the operators that a function calls, as one graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import FakeTensor, OpOverload, TorchDispatchMode, device_of, has_kernel, schema
from ..errors import StageError, place_of_call
from ..purity import NoValuesError, interrupt_at, tensors_in
from ..signature import differentiable
from .operators import ELEMENT

aten = torch.ops.aten
_TRACED = {torch.Tensor, torch.nn.Parameter, FakeTensor}
_ENTRY = str(Path(__file__).with_name("joint.py"))
_HIDDEN = {aten.miopen_batch_norm.default}  # writes into its arguments in secret, and has no other form
_WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"  # name of the backward of operators that no derivative is registered for


class Record(TorchDispatchMode):
    """A graph of the operators that are called within it, below autograd and the transforms of torch.func.

    ``graph`` has them in the order in which they are called: ``meta["val"]`` of a node is its result without values,
    ``meta["place"]`` the line that called it, of an operator of the forward. ``constants`` are the tensors that ``get_attr``
    nodes name: all that is neither one of ``inputs``, which have the names of their nodes, nor made within.
    """

    supports_higher_order_operators = True

    def __init__(self, stage: str, inputs: Iterable[tuple[torch.Tensor, str]]) -> None:
        super().__init__()
        self.stage, self.graph = stage, Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._nodes: dict[int, tuple[Node, torch.Tensor]] = {}  # by identity, which the tensor keeps while it is here
        # Calls of operators that may cut the gradient without saying so, with their results and the histories before the call.
        self._doubtful: list[tuple[Node, list[tuple[Any, Any]]]] = []
        self._in_forward = True
        for tensor, name in inputs:
            self._know(tensor, self.graph.placeholder(name))

    def node(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor; a new constant for one that is not known."""
        if id(tensor) not in self._nodes:
            if isinstance(tensor, FakeTensor):
                raise NoValuesError(tensor).told(self.stage)
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor
            self._know(tensor, self.graph.create_node("get_attr", name))
        return self._nodes[id(tensor)][0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _TRACED.issuperset(types):
            return NotImplemented  # a subclass comes down to operators on plain tensors by itself
        if not isinstance(func, OpOverload):
            raise StageError(self.stage, f"it uses {func}, an operator on functions{place_of_call(_ENTRY)}", "use the functional engine")
        if func.namespace == "prim":
            # Autograd asks for the device of each gradient, more often than it calls operators.
            return device_of(args[0]) if func is torch.ops.prim.device.default and types else func(*args, **kwargs)
        if func.namespace == "c10d":
            reason = f"it uses the collective {func}{place_of_call(_ENTRY)}, which writes in place and is not traced"
            mend = "use ppfunc.psum or one of its siblings, or torch.distributed._functional_collectives where no gradient is wanted"
            raise StageError(self.stage, reason, mend)
        interrupt_at(func)
        if func in _HIDDEN:
            reason = f"its operator {func}{place_of_call(_ENTRY)} writes into its arguments in secret"
            raise StageError(self.stage, reason, "use the functional engine")
        with self:
            if func in _DECOMPOSITIONS:
                return _DECOMPOSITIONS[func](*args, **kwargs)
            if not _runs_whole(func, args) and (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                return made
        return self._call(aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func, args, kwargs)

    def _call(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Call the operator and make its node."""
        given, named = self._with_nodes(args), self._with_nodes(kwargs)
        histories = self._histories(func, args, kwargs)
        made = func(*args, **kwargs)
        node = self.graph.create_node("call_function", func, given, named, _name(func))
        if self._in_forward:
            node.meta["place"] = place_of_call(_ENTRY)
        if isinstance(made, torch.Tensor):
            self._know(made, node)
        else:
            node.meta["val"] = made
            for index, part in enumerate(made) if isinstance(made, (list, tuple)) else ():
                if isinstance(part, torch.Tensor):
                    self._know(part, self.graph.create_node("call_function", ELEMENT, (node, index)))
        if histories is not None:
            self._doubtful.append((node, histories + [(t, None) for t in tensors_in(made) if differentiable(t.dtype)]))
        return made

    def _histories(self, func: OpOverload, args: Any, kwargs: Any) -> list[tuple[Any, Any]] | None:
        """The tensors that an operator writes into, with their histories; None where it needs no derivative, or has one for certain."""
        if func.namespace == "aten" or not (self._in_forward and torch.is_grad_enabled()):
            return None
        if not any(t.requires_grad for t in tensors_in((args, kwargs))):
            return None
        given = dict(zip([a.name for a in schema(func).arguments], args, strict=False)) | kwargs
        written = [given.get(a.name) for a in schema(func).arguments if a.alias_info is not None and a.alias_info.is_write]
        return [(t, t.grad_fn) for t in tensors_in(written)]

    def end_of_forward(self) -> None:
        """From here on the backward is recorded. Raise if the gradient would end at an operator that has no derivative."""
        self._in_forward = False
        for node, results in self._doubtful:
            if results and all(t.grad_fn is before or t.grad_fn.name() == _WITHOUT_DERIVATIVE for t, before in results):
                reason = f"its operator {node.target}{node.meta['place']}, has no derivative, so that its gradient would be lost"
                mend = "register one (torch.library.register_autograd), or detach what it is given"
                raise StageError(self.stage, reason, mend)

    def place_of(self, text: str) -> str:
        """The last line that called an operator which this text names."""
        words = set(re.findall(r"\w+", text))
        calls = [n for n in self.graph.nodes if n.meta.get("place")]
        found = [n.meta["place"] for n in calls if words & {_name(n.target), _name(n.target).removeprefix("special_")}]
        return found[-1] if found else ""

    def _know(self, tensor: torch.Tensor, node: Node) -> None:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node, tensor

    def _with_nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._with_nodes, value))
        return {k: self._with_nodes(v) for k, v in value.items()} if isinstance(value, dict) else value


def _batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    """``native_batch_norm``, which updates ``mean`` and ``var`` in training, by operators whose schemas say so."""
    if mean is None or var is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, training, *rest)
    if training:
        return aten._native_batch_norm_legit.default(x, w, b, mean, var, training, *rest)
    return aten._native_batch_norm_legit_no_training.default(x, w, b, mean, var, *rest)


def _cudnn_batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    """``cudnn_batch_norm``, which does the same, by the kernels of torch: equal within rounding."""
    y, *saved = _batch_norm(x, w, b, mean, var, training, *rest)
    return (y, *(saved if training else (w.new_empty(0), w.new_empty(0))), x.new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_backward(x: Any, gy: Any, w: Any, mean: Any, var: Any, m: Any, invstd: Any, eps: float, _: Any) -> Any:
    """Its gradient, which autograd asks for in training only."""
    return aten.native_batch_norm_backward(gy, x, w, mean, var, m, invstd, True, eps, [True, True, True])


def _runs_whole(func: OpOverload, args: Any) -> bool:
    """Whether the device has a kernel of an operator that also could be decomposed, into operators that give other bits."""
    first = next(tensors_in(args), None)
    return first is not None and has_kernel(func, first.device)


_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


def _name(operator: OpOverload) -> str:
    return schema(operator).name.split("::")[1]

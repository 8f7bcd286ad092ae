"""Record the operators that a function calls as one graph, for engines and for splits."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch import FakeTensor, OpOverload, TorchDispatchMode, device_of, has_kernel, schema
from ...abstract.evaluation import NoValuesError
from ...abstract.purity import tensors_in, written
from ...errors import StageError, place_of_call
from ...signature import differentiable
from .operators import ELEMENT

aten = torch.ops.aten
TRACED = {torch.Tensor, torch.nn.Parameter, FakeTensor}
"""The classes of tensors whose operators are recorded."""

_HIDDEN = {aten.miopen_batch_norm.default}  # writes into its arguments in secret, and has no other form
# name of the backward of operators that no derivative is registered for
_WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"


class GraphRecorder:
    """Builds a graph of operators. A subclass is also a dispatch mode, which sees the calls.

    Args:
        owner: names the recorded function in errors.
        entry: the file below which the user's code is called.
        mend: what to do about an operator that cannot be recorded.

    Attributes:
        graph: the operators, in the order of their calls. ``meta["results"]`` of one that returns several
            results is their number.
        constants: the tensors that ``get_attr`` nodes name: neither inputs nor made within.
    """

    supports_higher_order_operators = True

    def __init__(self, owner: str, entry: str, mend: str) -> None:
        super().__init__()
        self.owner, self.entry, self.mend = owner, entry, mend
        self.graph, self.constants = Graph(), dict[str, torch.Tensor]()
        # Held weakly: of a new tensor that somebody else holds, torch returns a copy.
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def place(self, tensor: torch.Tensor, name: str) -> Node:
        """Make a tensor an input of the graph."""
        return self._know(self.graph.placeholder(name), tensor)

    def node(self, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor: a new constant for an unknown one."""
        known = self._nodes.get(tensor)
        if known is not None:
            return known
        self._require_constant(tensor)
        name = f"constant{len(self.constants)}"
        self.constants[name] = tensor
        return self._know(self.graph.create_node("get_attr", name), tensor)

    def with_nodes(self, value: Any) -> Any:
        """Replace the tensors in the arguments of an operator by their nodes."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.with_nodes, value))
        return {k: self.with_nodes(v) for k, v in value.items()} if isinstance(value, dict) else value

    def add(self, target: Any, args: Any, kwargs: Any, result: Any, name: str | None = None) -> Node:
        """Add a call, and a node for each tensor among several results.

        Args:
            target: the operator.
            args, kwargs: its arguments, with nodes for tensors.
            result: what it has returned.
            name: of the node.
        """
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        if isinstance(result, torch.Tensor):
            return self._know(node, result)
        results = result if isinstance(result, list | tuple) else ()
        node.meta["results"] = len(results)
        for index, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                self._know(self.graph.create_node("call_function", ELEMENT, (node, index)), tensor)
        return node

    def called_at(self) -> str:
        """Return the innermost line of the user, as ``", called at file:line"``; empty if unknown."""
        return place_of_call(self.entry)

    def require_operator(self, func: Any) -> None:
        """Raise for an operator that takes functions."""
        if not isinstance(func, OpOverload):
            reason = f"it uses {func}, an operator on functions{self.called_at()}"
            raise StageError(self.owner, reason, self.mend)

    def _require_constant(self, tensor: torch.Tensor) -> None:
        """Raise if an unknown tensor has no values."""
        if isinstance(tensor, FakeTensor):
            raise NoValuesError(tensor).of_stage(self.owner)

    def _know(self, node: Node, tensor: torch.Tensor) -> Node:
        self._nodes[tensor] = node
        return node


class Record(GraphRecorder, TorchDispatchMode):
    """Records below autograd and the transforms of torch.func, so that a backward is recorded as well.

    ``meta["val"]`` of a node is its result without values. ``meta["place"]`` of an operator of the forward is
    the line that called it.
    """

    def __init__(self, stage: str, inputs: Iterable[tuple[torch.Tensor, str]]) -> None:
        super().__init__(stage, str(Path(__file__).with_name("joint.py")), "use the functional engine")
        # Calls of operators that may cut the gradient without saying so, with their results and the histories
        # before the call.
        self._doubtful: list[tuple[Node, list[tuple[Any, Any]]]] = []
        self._in_forward = True
        for tensor, name in inputs:
            self.place(tensor, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not TRACED.issuperset(types):
            return NotImplemented  # a subclass comes down to operators on plain tensors by itself
        self.require_operator(func)
        if func.namespace == "prim":
            # Autograd asks for the device of each gradient, more often than it calls operators.
            asks_device = func is torch.ops.prim.device.default and types
            return device_of(args[0]) if asks_device else func(*args, **kwargs)
        if func.namespace == "c10d":
            reason = (
                f"it uses the collective {func}{self.called_at()}, which writes in place and is not traced"
            )
            mend = (
                "use ppfunc.collectives.psum or one of its siblings, or"
                " torch.distributed._functional_collectives where no gradient is wanted"
            )
            raise StageError(self.owner, reason, mend)
        if func in _HIDDEN:
            reason = f"its operator {func}{self.called_at()} writes into its arguments in secret"
            raise StageError(self.owner, reason, self.mend)
        with self:
            if func in _DECOMPOSITIONS:
                return _DECOMPOSITIONS[func](*args, **kwargs)
            if not _runs_whole(func, args):
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
        if self._in_forward:
            node.meta["place"] = self.called_at()
        if histories is not None:
            histories += [(t, None) for t in tensors_in(result) if differentiable(t.dtype)]
            self._doubtful.append((node, histories))
        return result

    def _histories(self, func: OpOverload, args: Any, kwargs: Any) -> list[tuple[Any, Any]] | None:
        """List the tensors that an operator writes into, with their histories.

        Returns:
            None for an operator that needs no derivative, or has one for certain.
        """
        if func.namespace == "aten" or not (self._in_forward and torch.is_grad_enabled()):
            return None
        if not any(t.requires_grad for t in tensors_in((args, kwargs))):
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
                reason = (
                    f"its operator {node.target}{node.meta['place']}, has no derivative, so that its gradient"
                    " would be lost"
                )
                mend = "register one (torch.library.register_autograd), or detach what it is given"
                raise StageError(self.owner, reason, mend)

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


def _runs_whole(func: OpOverload, args: Any) -> bool:
    """Tell whether the device has a kernel of an operator, whose decomposition would give other bits."""
    first = next(tensors_in(args), None)
    return first is not None and has_kernel(func, first.device)


_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


def _name(operator: OpOverload) -> str:
    return schema(operator).name.split("::")[1]

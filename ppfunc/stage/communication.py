"""Refuse collectives through which a gradient would flow wrongly, and say which to use."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from .errors import place_of_call

NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
"""Those of the operators that communicate."""

_EACH_OTHERS_TRANSPOSE = frozenset({
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced", "wait_tensor", "_wrap_tensor_autograd",
})  # fmt: skip

_INSTEAD = {
    "reducescatter": "ppfunc.psum_scatter(x, mesh['tp'])",
    "reduce": "ppfunc.psum(x, mesh['tp']) for a sum",
    "broadcast": "ppfunc.psum(x, mesh['tp']) of a tensor that is zero on all ranks but one",
    "gather": "ppfunc.all_gather(x, mesh['tp'])",
    "alltoall": "ppfunc.all_to_all(x, mesh['tp'], split_axis, concat_axis)",
}
_OF_ONE = {"scatter_": "ppfunc.psum(x, mesh['tp']) of a tensor that is zero on all ranks but one", "gather_": _INSTEAD["gather"]}
_OTHERWISE = "ppfunc.psum, pvary, all_gather, psum_scatter or all_to_all"
_FUNCTIONS = "torch.distributed.nn.functional"
_REGISTERED = "torch._library.autograd"  # calls the derivatives that are registered for operators


def is_collective(func: Any) -> bool:
    """Whether an operator communicates, or waits for one that does."""
    return getattr(func, "namespace", "") in NAMESPACES


def fault_of(func: Any, tensors: Iterable[torch.Tensor], strict: bool, reduction: str = "sum") -> tuple[str, str] | None:
    """Why the gradient through a collective would be wrong, or ranks wait for each other; and what to use instead.

    None where the gradient is right, or none flows.

    Args:
        func: a collective.
        tensors: those that it is given.
        strict: whether a gradient may flow that the tensors do not tell of.
        reduction: of one that reduces, as torch names it.
    """
    name, place = str(func), place_of_call()
    namespace, operator, *_ = name.split(".")
    if any(module == _FUNCTIONS for module, _ in _callers()):
        return f"it uses {name} by {_FUNCTIONS}{place}, whose gradients are summed over the ranks once too often", _instead(operator)
    transposed = namespace != "c10d" and operator in _EACH_OTHERS_TRANSPOSE
    if transposed and ("reduce" not in operator or reduction.lower() == "sum"):
        return None
    if namespace == "c10d" and operator in _OF_ONE:
        why = "in which one rank has a list of tensors: torch.func refuses it there alone, and the others would wait"
        return f"it uses the collective {name}{place}, {why}", f"use {_OF_ONE[operator]}"
    flows = torch.is_grad_enabled() and (strict or any(t.requires_grad for t in tensors))
    if not flows and (_REGISTERED, func) not in _callers():
        return None
    if transposed:
        mend = {"avg": " divided by the number of ranks"}.get(reduction.lower(), ", or the gathered values, which you reduce by yourself")
        use = f"use ppfunc.psum_scatter(x, mesh['tp']){mend}; or detach what it is given, where no gradient is wanted"
        return f"it uses the collective {name}{place}, which has a derivative for sums alone, and is to reduce by {reduction!r}", use
    if namespace == "c10d":
        why = "which writes in place: its gradient would be that of the identity"
    elif operator == "all_reduce":
        why = "whose gradient is an all-reduce again, and too large by the number of ranks where all go on to compute the same"
    else:
        why = "which has no derivative: its gradient would be lost"
    return f"it uses the collective {name}{place}, {why}", _instead(operator)


def _instead(operator: str) -> str:
    plain = operator.replace("_", "")
    use = next((mend for part, mend in _INSTEAD.items() if part in plain), _OTHERWISE)
    return f"use {use}; or detach what it is given, where no gradient is wanted"


def _callers() -> Iterator[tuple[str, Any]]:
    """The modules of the functions at work, each with the operator that it differentiates, where it is torch's function for that."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_locals.get("op") if frame.f_code.co_name == "forward" else None
        frame = frame.f_back

"""Refuse collectives through which a gradient would flow wrongly."""

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from ..errors import place_of_call

_EACH_OTHERS_TRANSPOSE = frozenset({
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "_wrap_tensor_autograd",
})  # fmt: skip

_INSTEAD = {  # by a part of the name of an operator; the first that fits
    "reducescatter": "psum_scatter(x, mesh['tp'])",
    "reduce": "psum(x, mesh['tp']) for a sum",
    "broadcast": "psum(x, mesh['tp']) of a tensor that is zero on all ranks but one",
    "scatter": "psum(x, mesh['tp']) of a tensor that is zero on all ranks but one",
    "gather": "all_gather(x, mesh['tp'])",
    "alltoall": "all_to_all(x, mesh['tp'], split_axis, concat_axis)",
    "": "psum, pvary, all_gather, psum_scatter or all_to_all",
}
_FUNCTIONS = "torch.distributed.nn.functional"
_REGISTERED = "torch._library.autograd"  # calls the derivatives that are registered for operators


def fault_of(
    func: Any, tensors: Iterable[torch.Tensor], strict: bool, reduction: str = "sum"
) -> tuple[str, str] | None:
    """Say why the gradient through a collective is wrong, or ranks hang, and what to use instead.

    None where the gradient is right, or none flows.

    Args:
        func: a collective.
        tensors: those that it is given.
        strict: whether a gradient may flow though no tensor requires one, as below a transform.
        reduction: torch's name of what it computes, if it reduces.
    """
    name = str(func)
    namespace, operator, *_ = name.split(".")
    transposed = namespace != "c10d" and operator in _EACH_OTHERS_TRANSPOSE
    plain = operator.replace("_", "")
    use = "use ppfunc.collectives." + next(mend for part, mend in _INSTEAD.items() if part in plain)
    detach = "; or detach what it is given, where no gradient is wanted"
    if any(module == _FUNCTIONS for module, _ in _callers()):
        name += f" by {_FUNCTIONS}"
        why = "whose gradients are summed over the ranks once too often"
    elif transposed and ("reduce" not in operator or reduction.lower() == "sum"):
        return None
    elif namespace == "c10d" and operator in ("scatter_", "gather_"):
        why = (
            "in which one rank has a list of tensors: torch.func refuses it there alone, and the others hang"
        )
        detach = ""
    elif not (torch.is_grad_enabled() and (strict or any(t.requires_grad for t in tensors))) and (
        (_REGISTERED, func) not in _callers()
    ):
        return None
    elif transposed:
        why = f"which has a derivative for sums alone, and is to reduce by {reduction!r}"
        averages = reduction.lower() == "avg"
        use += " divided by the number of ranks" if averages else ", or reduce the gathered values yourself"
    elif namespace == "c10d":
        why = "which writes in place: its gradient would be that of the identity"
    elif operator == "all_reduce":
        why = (
            "whose gradient is an all-reduce again, and too large by the number of ranks where all go on to"
            " compute the same"
        )
    else:
        why = "which has no derivative: its gradient would be lost"
    return f"it uses the collective {name}{place_of_call()}, {why}", use + detach


def _callers() -> Iterator[tuple[str, Any]]:
    """Iterate over the frames of this thread: the module, and the variable ``op`` of a ``forward``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield (
            frame.f_globals.get("__name__", ""),
            frame.f_locals.get("op") if frame.f_code.co_name == "forward" else None,
        )
        frame = frame.f_back

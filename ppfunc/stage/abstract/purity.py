"""Refuse effects that no program can repeat, as operators show them: writes, draws from own generators, lost
gradients, and collectives through which a gradient would flow wrongly.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from .._torch import (
    ASKS_DEVICE,
    TorchDispatchMode,
    dtensor_class,
    is_wrapped,
    storage,
    without_modes,
)
from ..errors import StageError, place_of_call
from ..operators import draws, effects_of, flat, is_collective, tensors_in, written

aten = torch.ops.aten

IN_PARAMS = "pass it in params, or what it is computed of, or detach it"
"""The mend of a gradient that would be lost, for a stage: a loss is given no parameters."""


class LogicalDraws(TorchDispatchMode):
    """Draw into tensors in their logical order, not in the order of their memory.

    ``torch.func`` and functionalisation draw into new, contiguous tensors, plain autograd into
    whatever strides an activation has: a dropout mask would depend on the engine.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, effects = kwargs or {}, effects_of(func)
        if effects.seeded and effects.writes and not args[0].is_contiguous():
            drawn = func(
                torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs
            )
            return args[0].copy_(drawn)
        return func(*args, **kwargs)


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class WithoutCudnn(torch.overrides.TorchFunctionMode):
    """Compute recurrent layers, and nothing else, by torch's own kernels.

    The derivatives of cuDNN's cannot be traced. ``torch.func`` does not take those of LSTM and GRU either:
    the functional engine refuses such stages.
    """

    looks_on = True  # at operators other than these, which are not traced otherwise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        recurrent = getattr(func, "__name__", None) in _RECURRENT
        with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
            return func(*args, **(kwargs or {}))


class Purity(LogicalDraws):
    """Watches every operator of a call: counts draws, and raises ``StageError`` before an effect happens.

    Args:
        stage: the name of the stage in errors.
        arguments: the tensors that it is given, by their paths.
        abstract: whether they have no values. Nothing is drawn then, so a changed generator was seeded.
        after: the error of an earlier trial. It is raised again before a collective, which other ranks would
            not enter.
    """

    def __init__(
        self,
        stage: str,
        arguments: Iterable[tuple[str, torch.Tensor]],
        abstract: bool = False,
        after: StageError | None = None,
    ) -> None:
        super().__init__()
        self.after = after
        arguments = list(arguments)
        # Below a transform, tensors do not say what is differentiated.
        self.strict = any(is_wrapped(t) for _, t in arguments)
        self.stage, self.abstract, self.draws, self.seeds = stage, abstract, 0, False
        self.arguments = {storage(t): path for path, t in arguments}
        self.made: set[int | None] = {None}
        self.before = torch.default_generator.get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        effects = effects_of(func)
        if effects.seeded and draws(func, args, kwargs):
            self.draws += 1
            # Without values nothing is drawn, so that only a stage that seeds has changed the generator.
            with without_modes():
                self.seeds |= self.abstract and not torch.equal(
                    self.before, torch.default_generator.get_state()
                )
        for tensor in written(func, args, kwargs):
            self._require_own(tensor)
        for value in flat((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._require_no_gradient_lost(func, value)
            elif isinstance(value, torch.Generator):
                raise StageError(
                    self.stage,
                    f"it passes its own torch.Generator to an operator{place_of_call()}; its numbers would"
                    " depend on the order in which microbatches run",
                    "leave the generator out, and pass seed=(seed, step)",
                )
        if self.after is not None and (
            is_collective(func) or any(issubclass(kind, dtensor_class()) for kind in types)
        ):
            raise self.after
        if is_collective(func):
            # The reduction comes first, in operators that have one.
            texts = (value for value in flat((args, kwargs)) if isinstance(value, str))
            if fault := collective_fault(func, tensors_in((args, kwargs)), self.strict, next(texts, "sum")):
                raise StageError(self.stage, *fault)
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if not effects.view:
            self.made.update(map(storage, tensors_in(results)))
        return results

    def _require_own(self, tensor: torch.Tensor) -> None:
        if (at := storage(tensor)) not in self.made:
            if at in self.arguments:
                place, mend = f"its argument {self.arguments[at]}", "return the new value, or work on a clone"
            else:
                place, mend = (
                    f"{_shape(tensor)} that is not among its arguments",
                    "pass it as state and return the new value",
                )
            raise StageError(self.stage, f"it is not pure: it writes into {place}", mend)

    def _require_no_gradient_lost(self, func: Any, value: torch.Tensor) -> None:
        captured = (
            value.requires_grad
            and type(value) in (torch.Tensor, torch.nn.Parameter)
            and not is_wrapped(value)
        )
        if not captured or func is aten.detach.default or not torch.is_grad_enabled():
            return
        if (at := storage(value)) not in self.made and at not in self.arguments:
            raise StageError(
                self.stage,
                f"it reads {_shape(value)} that is not among its arguments and requires a gradient, which"
                " would be lost",
                IN_PARAMS,
            )


def _shape(tensor: torch.Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"a tensor of shape {tuple(tensor.shape)}"


# -- collectives through which a gradient would flow wrongly

_EACH_OTHERS_TRANSPOSE = frozenset({
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor", "wait_tensors",
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


def collective_fault(
    func: Any, tensors: Iterable[torch.Tensor], strict: bool, reduction: str = "sum"
) -> tuple[str, str] | None:
    """Say why the gradient through a collective is wrong, or ranks hang, and name the mend.

    None where the gradient is right, or none flows.

    Args:
        func: a collective.
        tensors: the tensors that it is given.
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
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        yield (
            frame.f_globals.get("__name__", ""),
            frame.f_locals.get("op") if frame.f_code.co_name == "forward" else None,
        )

"""Trace forward and backward of a stage once, and cut the trace by dependency: the default engine."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, overload

from ..errors import StageError
from ..example import Example
from ..program import Engine, FlatProgram, StageProgram
from ..signature import differentiable
from .captured import captured
from .differentiable import DifferentiableStage, engine
from .tracing.clean import clean
from .tracing.compiled import without_onednn
from .tracing.cut import Block, ProgramBlocks, residual_bytes
from .tracing.emit import Recipe, emit
from .tracing.joint import Joint, trace
from .tracing.operators import ancestors
from .tracing.remat import Remat, cut_for


@overload
def graph(fn: Callable[..., Any], example: tuple[Any, ...], **request: Any) -> StageProgram: ...


@overload
def graph(*, remat: Remat = "none", compile: bool = False, cuda_graphs: bool = False) -> Engine: ...


def graph(
    *stage: Any, remat: Remat = "none", compile: bool = False, cuda_graphs: bool = False, **request: Any
) -> StageProgram | Engine:
    """Differentiate a stage by tracing forward and backward once, and cutting the trace: the default engine.

    Numbers and tensors that the function reads from elsewhere are those of the time of the trace. A program
    serves the shapes and dtypes of its example; for others the stage is traced again. Programs are
    straight-line Python on flat tuples. Their source is the docstring of the functions in ``program.flat``.

    The backward gives the same bits whole, or as I and W. No operator is in two programs. Parameters are not
    copied into the residuals. A warning names parameters on which nothing depends, when a backward first
    runs; other engines do not see them.

    Tracing takes a few milliseconds per operator, and a loop is unrolled: a recurrent layer over a thousand
    steps takes minutes, where the functional and the eager engine start at once.

    Args:
        stage, request: the arguments of an :class:`~ppfunc.stage.program.Engine`. Without them, the engine
            with these options is returned: ``graph(remat="full")``.
        remat: what the backward computes again instead of keeping it: ``"none"``; ``"full"``, all
            but the inputs; a predicate ``(operator) -> bool`` on ``torch._ops.OpOverload``, true for what is
            computed again; or the most bytes to be kept of one microbatch, its inputs included.
        compile: whether each program is compiled by inductor (``torch.compile``) when it first
            runs. Results then agree within rounding, no longer bitwise.
        cuda_graphs: whether each program is captured as a CUDA graph for every microbatch in flight. The
            bits stay the same. Graphs hold their memory as long as the program lives, with a copy of the
            parameters of each stage. The copy misses writes through ``.data`` or ``numpy()``. Residuals
            cannot be offloaded.

    Raises:
        StageError: control flow or shapes depend on values, the gradient cannot be traced, the
            backward draws random numbers or needs a sparse tensor that the forward makes, an operator
            is given a generator, tensors of a subclass are involved, or CUDA graphs are wanted where
            the stage does not compute on CUDA.

    >>> import torch
    >>> program = graph(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> print(program.flat.backward_weight.__doc__)
    def backward_weight(rest):
        x0, mul_1, = rest
        del rest
        mul_3 = mul_1.mul(x0)
        del mul_1, x0
        return (mul_3, )
    <BLANKLINE>
    """
    if len(stage) == 1:
        got = f"{stage[0]!r} and no example"
        raise TypeError(f"graph got {got}; its options have names, as in graph(remat='full')")
    made = partial(_traced, remat=remat, compile=compile, cuda_graphs=cuda_graphs)
    return made(*stage, **request) if stage or request else made


@engine
def _traced(
    stage: DifferentiableStage, _: tuple[Any, ...], *, remat: Remat, compile: bool, cuda_graphs: bool
) -> tuple[FlatProgram, int]:
    """Trace a stage, and cut its trace in programs."""
    name, known, example = stage.name, stage.known, stage.example
    if cuda_graphs and example.device.type != "cuda":
        reason = f"it computes on the device {example.device}, and CUDA graphs are for CUDA alone"
        raise StageError(name, reason, "put its parameters on a CUDA device, or leave out cuda_graphs=True")
    if known.refusal:
        raise StageError(name, *known.refusal)
    if known.untraced:
        reason, mend = known.untraced
        raise StageError(name, f"{reason}, which is not traced", mend)
    with without_onednn() if compile else nullcontext():
        joint = clean(trace(stage))
    blocks = cut_for(joint, remat, name)
    size = residual_bytes(joint, blocks.residuals, name)
    flat = _emit(blocks, joint, name, compile, _warning_of(_unread(joint, example), name))
    return captured(flat, example, known.y) if cuda_graphs else flat, size


def _emit(blocks: ProgramBlocks, joint: Joint, name: str, compile: bool, warning: str) -> FlatProgram:
    def make(
        block: Block, function: str, names: tuple[str, ...], settle: tuple[str, ...] = (), warning: str = ""
    ) -> Callable[..., Any]:
        return emit(Recipe(block, names, joint.constants, f"{name} {function}", settle, compile, warning))

    return FlatProgram(
        make(blocks.forward, "forward", ("params", "x", "extras"), ("x", "extras")),
        make(blocks.backward, "backward", ("residuals", "gy"), ("gy",), warning),
        make(blocks.backward_input, "backward_input", ("residuals", "gy"), ("gy",)),
        make(blocks.backward_weight, "backward_weight", ("rest",), (), warning),
    )


def _unread(joint: Joint, example: Example) -> list[str]:
    """List the differentiable parameters on which no output depends.

    A frozen one is used, and gets zeros on purpose.
    """
    used, leaves = (
        ancestors(joint.outputs),
        zip(joint.params, example.params.leaves, example.params.paths, strict=True),
    )
    return [f"params{path}" for node, leaf, path in leaves if differentiable(leaf.dtype) and node not in used]


def _warning_of(unread: list[str], name: str) -> str:
    """Word the warning of a backward that computes nothing for these parameters.

    For another form of inputs there is another program.
    """
    if not unread:
        return ""
    more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
    return (
        f"{name}: nothing depends on {', '.join(unread[:3])}{more} for such inputs, so the gradient is zero;"
        " use it, or leave it out"
    )

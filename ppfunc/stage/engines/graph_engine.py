"""Trace forward and backward of a stage once, and cut the trace by dependency: the default engine."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, overload

import torch

from ..abstract import Outline, outline as outline_of
from ..errors import StageError
from ..example import Example
from ..program import Engine, FlatProgram, StageProgram, stage_program
from ..signature import differentiable
from .captured import captured
from .differentiable import DifferentiableStage
from .tracing.clean import clean
from .tracing.compiled import without_onednn
from .tracing.cut import Block, ProgramBlocks, residual_bytes
from .tracing.emit import Recipe, emit
from .tracing.joint import Joint, trace
from .tracing.operators import ancestors
from .tracing.remat import Remat, cut_for


@overload
def graph(
    fn: Callable[..., Any],
    example: tuple[Any, ...],
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
    outline: Outline | None = None,
    remat: Remat = "none",
    compile: bool = False,
    cuda_graphs: bool = False,
) -> StageProgram: ...


@overload
def graph(*, remat: Remat = "none", compile: bool = False, cuda_graphs: bool = False) -> Engine: ...


def graph(
    fn: Callable[..., Any] | None = None,
    example: tuple[Any, ...] | None = None,
    *,
    has_aux: bool = False,
    name: str = "the stage",
    device: torch.device | str | None = None,
    outline: Outline | None = None,
    remat: Remat = "none",
    compile: bool = False,
    cuda_graphs: bool = False,
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
        fn, example, has_aux, name, device, outline: as :class:`~ppfunc.stage.program.Engine`. Without
            ``fn``, the engine with these options is returned: ``graph(remat="full")``.
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
    if fn is None or example is None:
        if fn is not None or example is not None:
            got = f"{fn!r} and no example" if example is None else "an example and no function"
            raise TypeError(
                f"graph got {got}; its options have names, as in graph(remat='full') or graph(compile=True)"
            )
        if has_aux or name != "the stage" or device is not None or outline is not None:
            raise TypeError(
                "graph got has_aux, name, device or outline and no function; an engine gets these with the"
                " function"
            )
        return partial(graph, remat=remat, compile=compile, cuda_graphs=cuda_graphs)
    seen = Example.of(example, device)
    if cuda_graphs and seen.device.type != "cuda":
        reason = f"it computes on the device {seen.device}, and CUDA graphs are for CUDA alone"
        raise StageError(name, reason, "put its parameters on a CUDA device, or leave out cuda_graphs=True")
    known = outline or outline_of(fn, example, has_aux=has_aux, name=name, device=device)
    if known.refusal:
        raise StageError(name, *known.refusal)
    if known.untraced:
        reason, mend = known.untraced
        raise StageError(name, f"{reason}, which is not traced", mend)
    with without_onednn() if compile else nullcontext():
        joint = clean(trace(DifferentiableStage(fn, seen, known, has_aux, name), seen, known, name))
    blocks = cut_for(joint, remat, name)
    size = residual_bytes(joint, blocks.residuals, name)
    flat = _emit(blocks, joint, name, compile, _warning_of(_unread(joint, seen), name))
    if cuda_graphs:
        flat = captured(flat, seen, known.y)
    return stage_program(flat, seen, known, has_aux=has_aux, residual_bytes=size)


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

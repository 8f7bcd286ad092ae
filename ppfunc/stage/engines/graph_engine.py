"""Trace forward and backward of a stage once, and cut the trace by dependency: the default engine."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, overload

from ppfunc._checks import with_arguments

from .._torch import any_autocast, without_autocast
from ..abstract.differentiable import DifferentiableStage, engine
from ..errors import StageError
from ..program import Engine, Example, FlatProgram, StageProgram
from ..signature import differentiable, leaf_names

if TYPE_CHECKING:
    from .tracing.again import Remat
    from .tracing.joint import Joint


@overload
def graph(fn: Callable[..., Any], example: tuple[Any, ...], **request: Any) -> StageProgram:
    """Differentiate a stage."""


@overload
def graph(*, remat: "Remat" = "cheap", compile: bool = False, dynamic: bool = False) -> Engine:
    """Return the engine with these options."""


def graph(
    *stage: Any,
    remat: "Remat" = "cheap",
    compile: bool = False,
    dynamic: bool = False,
    **request: Any,
) -> StageProgram | Engine:
    """Differentiate a stage by tracing forward and backward once, and cutting the trace: the default engine.

    Numbers that the function reads from elsewhere keep the values of the trace: step functions trace
    it anew where they change. A program
    serves the shapes and dtypes of its example; for others the stage is traced again. Programs are
    straight-line Python on flat tuples. Their source is the docstring of the functions in ``program.flat``.

    The backward gives the same bits whole, or as I and W. No operator is in two programs but those that
    ``remat`` lets run again. Parameters are not copied into the residuals. A warning names parameters on
    which nothing depends, when a backward first runs; other engines do not see them.

    A program runs in C++ where it can, with the same bits, see :mod:`ppfunc.stage.engines.tracing.native`.

    Tracing takes a few milliseconds per operator, and a loop is unrolled: a recurrent layer over a thousand
    steps takes minutes, where the functional and the eager engine start at once.

    Args:
        stage, request: the arguments of an :class:`~ppfunc.stage.program.Engine`. Without them, the engine
            with these options is returned: ``graph(remat="full")``.
        remat: results that the backward computes again and the forward does not keep. The bits stay the same.
            ``"cheap"``: what elementwise operators and norms make of what is kept anyway, for an estimated 1%
            of a step: GELU and layer norm in a transformer 256 wide or more.
            ``"none"``. ``"full"``: all but what enters blocks of the stage, which are cut where little
            crosses and computed again one at a time. W apart from I then computes again what it would get
            from I: in a transformer both take 1.4 times as long as the whole backward. A predicate
            ``(operator, number) -> bool``: whether results of this ``torch._ops.OpOverload``, the
            ``number``-th of its calls from 0, are computed again. Or one of these choices for each of some
            modules:
            ``{"layers.*.mlp": "full", "layers.*": lambda operator, number: operator not in SAVED}``. The
            first pattern of ``fnmatch`` that matches counts; ``|`` stands between alternatives. ``"full"``
            keeps what enters each such module and what leaves it, a predicate counts within it. Elsewhere
            it is as with ``"cheap"``. Names are those within the model that is split, or the outermost
            module that the stage calls. A stage without modules has those of its parameters: a call belongs
            to the one that was read last.
        compile: compile each program by inductor (``torch.compile``) when it first runs. Results then agree
            within rounding, no longer bitwise. What inductor has compiled it keeps in its folder on disk.
        dynamic: in step functions, trace once for all sizes of inputs and extras for which a stage takes the
            same path: at the second form of the arguments, with symbols for the sizes that differ from the
            first. A program gets the numbers of each further form in milliseconds, and is what a trace for
            this form would be. Where what the stage or an operator decided by a size, or a number that is no
            integer, would differ, it is traced again. Which residuals are kept is decided at the traced
            sizes. Sizes of 0 and 1, and of DTensors, do not vary. A stage that uses a size as anything but a
            number, or changes an attribute of a module, is traced for every form, with one warning. It reads
            only arguments and constants: a change elsewhere is not seen. The stages of a model that was split
            are refused, since their code has the sizes of one trace of the model as numbers; and calls of the
            engine by anything but a step function.

    Raises:
        StageError: control flow or shapes depend on values, the gradient cannot be traced, the
            backward draws random numbers or needs a sparse tensor that the forward makes, tensors of a
            subclass are involved, or ``remat`` has a pattern that matches no name.
        ValueError: ``remat`` is none of these.

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
        raise TypeError(
            f"graph got {stage[0]!r} and no example; its options have names, as in graph(remat='full')"
        )
    of_a_call = signature(_graph, follow_wrapped=False).parameters
    if unknown := [name for name in request if name not in of_a_call]:
        raise TypeError(with_arguments(f"graph() got an unexpected keyword argument {unknown[0]!r}", graph))
    for name, flag in {"compile": compile, "dynamic": dynamic}.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")
    if isinstance(remat, Mapping):
        for pattern, choice in remat.items():
            _require_choice(choice, f"remat[{pattern!r}]")
    else:
        _require_choice(remat, "remat", ', or {"layers.*.mlp": one of these}')
    if dynamic and compile:
        raise ValueError("graph got dynamic=True with compile, whose programs have one size; leave one out")
    made: Any = partial(_graph, remat=remat, compile=compile, dynamic=dynamic)
    made.dynamic = dynamic
    return made(*stage, **request) if stage or request else made


def _require_choice(choice: Any, what: str, more: str = "") -> None:
    if not callable(choice) and choice not in ("cheap", "none", "full"):
        raise ValueError(
            f'{what}: got {choice!r}, expected "cheap", "none", "full", a predicate (operator, number) ->'
            f" bool{more}"
        )
    if callable(choice):
        try:
            signature(choice).bind(None, 0)
        except TypeError:
            raise ValueError(
                f"{what}: got a predicate {choice!r} that does not take two arguments, expected (operator,"
                " number) -> bool, such as lambda operator, number: operator not in SAVED"
            ) from None


@engine
def _graph(
    stage: DifferentiableStage,
    _: tuple[Any, ...],
    *,
    remat: "Remat",
    compile: bool,
    dynamic: bool,
) -> tuple[FlatProgram, int]:
    """Trace a stage, and cut its trace in programs. Whoever varies sizes asks for ``dynamic=False``."""
    # A tenth of this package, for stages that are traced.
    from .tracing.again import cut_for
    from .tracing.clean import clean, require_same
    from .tracing.cut import residual_bytes
    from .tracing.dispatch import without_onednn
    from .tracing.emit import programs
    from .tracing.joint import trace

    if dynamic:
        raise ValueError(
            "graph(dynamic=True) was called for one example, whose program has one size; leave it out, or"
            " give engine=graph(dynamic=True) itself, not a function that calls it, to a step function"
        )
    name, outline, example = stage.name, stage.outline, stage.example
    if outline.untraced:
        raise StageError(name, *outline.untraced)
    with without_onednn() if compile else nullcontext():
        joint = trace(stage)
        if example.symbols:
            require_same(joint, stage)
    clean(joint)
    if any_autocast():
        for node in joint.graph.nodes:  # its casts are operators of the trace
            node.meta["within"] = without_autocast
    blocks = cut_for(joint, remat, name, leaf_names(example.params))
    flat = programs(blocks, name, compile, _unread(joint, example))
    return flat, residual_bytes(joint, blocks.residuals, name)


def _unread(joint: "Joint", example: Example) -> tuple[str, ...]:
    """List the paths of the differentiable parameters on which no output depends.

    A frozen one is used, and gets zeros on purpose. For another form of inputs there is another program.
    """
    from .tracing.graph import ancestors

    used = ancestors(joint.results[0])
    leaves = zip(joint.params, example.params.leaves, example.params.paths, strict=True)
    return tuple(
        f"params{path}" for node, leaf, path in leaves if differentiable(leaf.dtype) and node not in used
    )

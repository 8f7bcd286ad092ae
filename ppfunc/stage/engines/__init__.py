"""Differentiate a stage: the engines ``graph``, ``functional`` and ``eager``.

An engine is a function ``engine(fn, example) -> StageProgram``. All reduce the stage to a function of its
differentiable leaves (`ppfunc.stage.abstract.outline`), and give the same gradients::

    graph        trace forward and backward, and clean the trace (`tracing.joint`), choose what is computed
                 again and cut it in F, I and W (`tracing.cut`), write each as Python (`tracing.emit`)
    functional   torch.func.vjp at every forward
    eager        the tape of autograd, one per forward
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, overload

import torch

from ppfunc._checks import with_arguments

from .._torch import any_autocast, without_autocast
from ..abstract.evaluation import DATA_DEPENDENT, stand_ins, without_values
from ..abstract.outline import DifferentiableStage, contiguous, engine
from ..errors import StageError, by_dtensor, first_line, line_of, other_engine, refuse_own
from ..program import Engine, Example, FlatProgram, Gradients, Leaves, StageProgram
from ..signature import differentiable, leaf_names

if TYPE_CHECKING:
    from .tracing.cut import Remat
    from .tracing.joint import Joint

__all__ = ["eager", "functional", "graph"]


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
            module that the stage calls. A stage without modules has the names of its parameters: a call
            belongs to the parameter that was read last.
        compile: compile each program by inductor (``torch.compile``) when it first runs. Results then agree
            within rounding, no longer bitwise. What inductor has compiled it keeps in its folder on disk.
        dynamic: whether step functions trace once for all sizes of inputs and extras for which a stage takes
            the same path: at the second form of the arguments, with symbols for the sizes that differ from
            the first. A program gets the numbers of each further form in milliseconds, and equals a trace of
            this form. Where a decision of the stage or an operator by a size, or a number that is no integer,
            would differ, it is traced again. Which residuals are kept is decided at the traced
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
        mul_3 = aten_mul_Tensor(mul_1, x0)
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
) -> FlatProgram:
    """Trace a stage, and cut its trace in programs. Whoever varies sizes asks for ``dynamic=False``."""
    # A tenth of this package, for stages that are traced.
    from .tracing.cut import cut_for, require_known_sizes
    from .tracing.emit import programs, without_onednn
    from .tracing.joint import clean, require_same, trace

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
    require_known_sizes(joint, blocks.residuals, name)
    return programs(blocks, name, compile, _unread(joint, example))


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


# -- at run time: by ``torch.func.vjp``, or by the tape of autograd

Forward = Callable[[Leaves, Leaves, Leaves], tuple[Leaves, tuple[Any, ...]]]
Backward = Callable[[tuple[Any, ...], Leaves], tuple[Gradients, Gradients]]


@engine
def functional(stage: DifferentiableStage, example: tuple[Any, ...]) -> FlatProgram:
    """Differentiate a stage by ``torch.func.vjp`` at every forward.

    Control flow may depend on values, and the programs nest under ``vmap``, ``jvp`` and ``grad``.
    ``residuals`` is one opaque function, to be used once. The whole backward runs in ``backward_input``,
    which hands the gradients of the parameters over to ``backward_weight``. A stage whose abstract evaluation
    needs values is run once on zeros, to learn its outputs.

    Not detected: writes into an argument through ``.data``, ``numpy()`` or a pointer after the evaluation.
    They do not count as writes.

    Args, Returns: as :class:`~ppfunc.stage.program.Engine`; ``device`` as :meth:`Example.of`.

    Raises:
        StageError: the stage changes its arguments, or has operators that ``torch.func`` cannot transform.

    >>> program = functional(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> y, residuals = program.forward(torch.ones(2), torch.zeros(2))
    >>> gw, gx = program.backward(residuals, torch.ones(2))
    >>> gx
    tensor([1., 1.])
    """
    return _checked_program(_by_vjp, "torch.func", other_engine("eager"), stage, example)


@engine
def eager(stage: DifferentiableStage, example: tuple[Any, ...]) -> FlatProgram:
    """Differentiate a stage by the tape of autograd, a new tape per forward.

    For ``torch.utils.checkpoint`` (``use_reentrant=False``), modules under ``torch.compile``,
    ``autograd.Function`` of the old style, and DTensor. ``residuals`` holds the tape: it can be used once.
    Otherwise as :func:`functional`, also in what is not detected. It does not nest under transforms.

    Args, Returns: as :class:`~ppfunc.stage.program.Engine`; ``device`` as :meth:`Example.of`.

    Raises:
        StageError: the stage changes its arguments, or autograd refuses it.

    >>> program = eager(lambda w, x: (w * x).sin(), (torch.ones(2), torch.zeros(2)))
    >>> y, residuals = program.forward(torch.ones(2), torch.zeros(2))
    >>> program.backward(residuals, torch.ones(2))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    instead = "rewrite what it refuses; a checkpoint, for instance, needs use_reentrant=False"
    return _checked_program(_by_tape, "torch.autograd.grad", instead, stage, example)


def _checked_program(
    differentiate: Callable[[DifferentiableStage], tuple[Forward, Backward]],
    by: str,
    instead: str,
    stage: DifferentiableStage,
    example: tuple[Any, ...],
) -> FlatProgram:
    """Make the program of a stage, and run it once, to find out whether the stage can be differentiated.

    ``by`` names the way, and ``instead`` is the advice if it refuses.
    """
    forward, backward = differentiate(stage)

    def backward_input(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, tuple[Any, ...]]:
        gparams, gx = backward(residuals, gy)
        return gx, gparams

    @torch.no_grad()
    def run(arguments: tuple[Leaves, Leaves, Leaves]) -> None:
        outputs, residuals = forward(*arguments)
        backward(residuals, tuple(torch.ones_like(outputs[i]) for i in stage.y_at))

    try:
        if stage.outline.known:
            try:
                with without_values():
                    run(stage.example.make())
            except DATA_DEPENDENT:
                # Libraries that look for fake tensors, to ask them for no values, do not see them within a
                # transform. They may take another path than the one seen.
                stage.outline = stage.outline._replace(known=False)
        if not stage.outline.known:
            run(stand_ins(example, stage.example.device))
    except StageError:
        raise
    except Exception as error:
        refuse_own(error, stage.name)
        reason = f"it runs, but {by} cannot differentiate it ({first_line(error)})"
        if by_dtensor(error):
            reason = f"it uses DTensors, whose own functions {by} cannot differentiate"
            instead = "use the graph engine"
        elif "setup_context" in reason:
            reason = (
                f"it calls an autograd.Function without setup_context, or an operator with register_autograd"
                f"{line_of(error)}, which {by} does not take"
            )
            instead = f"{other_engine('eager')}, or graph"
        raise StageError(stage.name, reason, instead) from error
    return FlatProgram(forward, backward, backward_input, lambda gparams: gparams)


def _by_vjp(stage: DifferentiableStage) -> tuple[Forward, Backward]:
    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        x, extras = contiguous(x), contiguous(extras)
        if not torch.is_grad_enabled():  # nothing is recorded of them outside of a transform
            params, x, extras = (
                tuple(t.detach() if t.requires_grad else t for t in leaves) for leaves in (params, x, extras)
            )
        primals = stage.primals(params, x)
        run = stage.with_others(params, x, extras)
        with stage.unchanged(params, x, extras):
            if not (stage.y_at and any(primals)):
                return run(*primals)[1], (stage.no_gradients,)
            # Some operators keep what their backward needs only where it is on below the transform, too.
            with torch.enable_grad():
                pulled: tuple[Any, ...] = torch.func.vjp(run, *primals, has_aux=True)
            return pulled[2], (pulled[1],)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        again = torch.is_grad_enabled()
        gparams, gx = residuals[0](contiguous(gy), retain_graph=again, create_graph=again)
        return stage.dense(gparams), contiguous(gx)

    return forward, backward


def _by_tape(stage: DifferentiableStage) -> tuple[Forward, Backward]:
    def forward(params: Leaves, x: Leaves, extras: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        # Autograd saves no inference tensors: copies take their place.
        groups = (params, contiguous(x), contiguous(extras))
        params, x, extras = (tuple(t.clone() if t.is_inference() else t for t in leaves) for leaves in groups)
        with stage.unchanged(params, x, extras), torch.enable_grad():
            primals = tuple(
                tuple(t.detach().requires_grad_() for t in group) for group in stage.primals(params, x)
            )
            y, outputs = stage.with_others(params, x, extras)(*primals)
        return tuple(t.detach() for t in outputs), (y, *primals)

    def backward(residuals: tuple[Any, ...], gy: Leaves) -> tuple[Gradients, Gradients]:
        y, params, x = residuals
        del residuals
        reached = [(t, g) for t, g in zip(y, contiguous(gy), strict=True) if t.requires_grad]
        if not (reached and (params or x)):
            return stage.no_gradients(gy)
        outputs, cotangents = zip(*reached, strict=True)
        with without_autocast():
            gradients = torch.autograd.grad(outputs, params + x, cotangents, allow_unused=True)
        return stage.dense(gradients[: len(params)]), contiguous(gradients[len(params) :])

    return forward, backward

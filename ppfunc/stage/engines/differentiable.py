"""Reduce a stage to a function of its differentiable leaves, and differentiate that at run time: by
``torch.func.vjp``, or by the tape of autograd.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from .._torch import awaited, version, without_autocast
from ..abstract.evaluation import (
    DATA_DEPENDENT,
    NoValuesError,
    in_python,
    require_values,
    stand_ins,
    without_values,
)
from ..abstract.outline import outline as outline_of, split_aux
from ..abstract.purity import LogicalDraws, Purity
from ..errors import StageError, by_dtensor, first_line, line_of, other_engine, refuse_own
from ..layout import local
from ..process import hold_interrupts
from ..program import Example, FlatProgram, Gradients, Leaves, Outline, StageProgram, stage_program
from ..signature import differentiable
from ..tree import filled

Forward = Callable[[Leaves, Leaves, Leaves], tuple[Leaves, tuple[Any, ...]]]
Backward = Callable[[tuple[Any, ...], Leaves], tuple[Gradients, Gradients]]

_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def contiguous(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return the tensors as they would arrive over a wire: contiguous, without lazy conjugation.

    In process and between processes this gives the same bits. None, the absence of a gradient, stays.

    Results of functional collectives are waited for.

    >>> contiguous([torch.zeros(2, 3).T])[0].stride()
    (2, 1)
    """
    return tuple(None if t is None else awaited(t).resolve_conj().resolve_neg().contiguous() for t in tensors)


def engine(build: Callable[..., tuple[FlatProgram, int | None]]) -> Callable[..., StageProgram]:
    """Make an engine of ``build(stage, example, **options) -> (program, bytes of its residuals)``."""

    @wraps(build)
    def program_of(
        fn: Callable[..., Any] | None = None,
        example: tuple[Any, ...] | None = None,
        *,
        has_aux: bool = False,
        name: str = "the stage",
        device: torch.device | str | None = None,
        outline: Outline | None = None,
        **options: Any,
    ) -> StageProgram:
        if fn is None or example is None:
            raise TypeError(
                f"{build.__name__}: got {', '.join(options) or 'no arguments'}, expected a stage and its"
                f" example; it has no options: give engine=ppfunc.engines.{build.__name__} itself, or"
                " ppfunc.engines.graph(remat=..., compile=...)"
            )
        described = Example.of(example, device, targeted=getattr(fn, "targeted", False))
        outline = outline or outline_of(fn, example, has_aux=has_aux, name=name, device=device)
        stage = DifferentiableStage(fn, described, outline, has_aux, name)
        with hold_interrupts():
            flat, size = build(stage, example, **options)
        return stage_program(flat, described, stage.outline, has_aux=has_aux, residual_bytes=size)

    return program_of


class DifferentiableStage:
    """Reduces a stage to a function of its differentiable leaves; the others are bound beforehand."""

    def __init__(
        self, fn: Callable[..., Any], example: Example, outline: Outline, has_aux: bool, name: str
    ) -> None:
        self.fn, self.example, self.outline, self.has_aux, self.name = fn, example, outline, has_aux, name
        self.param_at = [i for i, leaf in enumerate(example.params.leaves) if differentiable(leaf.dtype)]
        self.x_at = [i for i, leaf in enumerate(example.x.leaves) if leaf.grad]
        self.y_at = [i for i, leaf in enumerate(outline.y.leaves) if leaf.grad]

    def primals(self, params: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        return tuple(params[i] for i in self.param_at), tuple(x[i] for i in self.x_at)

    def with_others(
        self, params: Leaves, x: Leaves, extras: Leaves
    ) -> Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]:
        """Bind the other leaves: ``(primal params, primal x) -> (y leaves with gradient, all outputs)``."""

        def run(primal_params: Leaves, primal_x: Leaves) -> tuple[Leaves, Leaves]:
            p, a = filled(params, self.param_at, primal_params), list(x)
            for i, value in zip(self.x_at, primal_x, strict=True):
                # Autocast casts a leaf once: gradients of its uses would be summed in half precision.
                a[i] = value.view_as(value) if value.dtype == torch.float32 else value
            with self._mode(params + x + extras):
                out = self._call(self.example.unflatten((*p, *a, *extras)))
            (y, y_def), (aux, _) = split_aux(out, self.has_aux, self.name)
            y, aux = tuple(map(local, y)), tuple(map(local, aux))
            self.require_same(y, aux, y_def)
            y = contiguous(y)
            return tuple(y[i] for i in self.y_at), y + contiguous(aux)

        return run

    def _call(self, trees: tuple[Any, ...]) -> Any:
        """Call the stage. An exception gets a note with the stage, the line and the arguments."""
        recurrent = any(isinstance(module, torch.nn.RNNBase) for module in self.outline.modules)
        by_cudnn = recurrent and self.example.device.type == "cuda"
        try:
            with WithoutCudnn() if by_cudnn else nullcontext(), in_python():
                return self.fn(*trees)
        except NoValuesError as error:
            raise error.of_stage(self.name) from None
        except StageError:
            raise
        except Exception as error:
            error.add_note(f"raised in {self.name}{line_of(error)}, which was given {self.example}")
            raise

    def _mode(self, arguments: Leaves) -> AbstractContextManager[Any]:
        """Draw in logical order.

        Where the stage may take another path than the one seen, refuse its effects before they happen.
        """
        if not self.outline.known:
            return Purity(self.name, zip(self.example.paths, arguments, strict=True))
        return LogicalDraws() if self.outline.draws else nullcontext()

    @contextmanager
    def unchanged(self, params: Leaves, x: Leaves, extras: Leaves) -> Iterator[None]:
        """Raise if a call in this context writes into its arguments. Their version counters tell."""
        arguments = params + x + extras
        before = [version(t) for t in arguments]
        yield
        written = [
            n for n, (t, count) in enumerate(zip(arguments, before, strict=True)) if version(t) != count
        ]
        if written:
            raise StageError(
                self.name,
                f"it is not pure: it has written into its argument {self.example.paths[written[0]]}, whose"
                " values are others now",
                "return the new value, or work on a clone",
            )

    def dense(self, gradients: Gradients) -> Gradients:
        """Wait for gradients of the parameters that are results of collectives. Raise if one is sparse."""
        for at, gradient in zip(self.param_at, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise StageError(
                    self.name,
                    f"the gradient of params{self.example.params.paths[at]} is a {str(gradient.layout)[6:]}"
                    " tensor, expected a dense one",
                    "leave out sparse=True",
                )
        return tuple(None if t is None else awaited(t) for t in gradients)

    def no_gradients(self, gy: Leaves, **_: Any) -> tuple[Gradients, Gradients]:
        """Run the backward of a stage through which no gradient flows."""
        return (None,) * len(self.param_at), (None,) * len(self.x_at)

    def require_same(self, y: Leaves, aux: Leaves, treedef: Any) -> None:
        """Raise unless ``y`` is what the outline promised its neighbours, and all outputs have values."""
        require_values(y + aux, self.name)
        want = self.outline.y
        same = treedef == want.treedef and all(
            tuple(t.shape) == s.shape and t.dtype == s.dtype for t, s in zip(y, want.leaves, strict=True)
        )
        if not same:
            got = [f"{t.dtype}{list(t.shape)}" for t in y]
            raise StageError(
                self.name,
                f"its output depends on values in structure or shape: got {got}, expected {want}",
                "return the same shapes for every microbatch, by padding for instance",
            )


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


# -- the engines that differentiate at run time


@engine
def functional(stage: DifferentiableStage, example: tuple[Any, ...]) -> tuple[FlatProgram, None]:
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
def eager(stage: DifferentiableStage, example: tuple[Any, ...]) -> tuple[FlatProgram, None]:
    """Differentiate a stage by the tape of autograd, one per forward.

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
) -> tuple[FlatProgram, None]:
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
    return FlatProgram(forward, backward, backward_input, lambda gparams: gparams), None


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

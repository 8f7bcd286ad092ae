"""Reduce a stage to a function of its differentiable leaves, for every engine."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from .._torch import awaited, version
from ..errors import StageError, line_of
from ..layout import local
from ..process import hold_interrupts
from ..program import Example, FlatProgram, Gradients, Leaves, Outline, StageProgram, stage_program
from ..signature import differentiable
from ..tree import filled
from .evaluation import (
    NoValuesError,
    in_python,
    require_values,
)
from .outline import outline as outline_of, split_aux
from .purity import LogicalDraws, Purity

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
            missing = " and ".join(n for n, value in (("'fn'", fn), ("'example'", example)) if value is None)
            engine, text = (
                build.__name__.lstrip("_"),
                f"missing the argument {missing}, a stage and its example",
            )
            if engine != "graph":
                text = (
                    f"got {', '.join(options) or 'no arguments'}, and it has no options: give"
                    f" engine=ppfunc.engines.{engine} itself, or ppfunc.engines.graph(remat=..., compile=...)"
                )
            raise TypeError(f"{engine}: {text}")
        described = Example.of(example, device, targeted=getattr(fn, "targeted", False))
        outline = outline or outline_of(fn, example, has_aux=has_aux, name=name, device=device)
        stage = DifferentiableStage(fn, described, outline, has_aux, name)
        with hold_interrupts():
            flat, size = build(stage, example, **options)
        return stage_program(flat, described, stage.outline, has_aux=has_aux, residual_bytes=size)

    return program_of


class DifferentiableStage:
    """Reduces a stage to a function of its differentiable leaves; all other leaves are bound beforehand."""

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
        """Bind all other leaves: ``(primal params, primal x) -> (y leaves with gradient, all outputs)``."""

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
        """Raise unless ``y`` has the form of the outline, and all outputs have values."""
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

"""Evaluate functions on tensors without values.

``torch.cond``, ``while_loop``, ``scan`` and ``flex_attention`` compile themselves when they are called.
Neither such an evaluation nor a transform of ``torch.func`` goes with that, so they are called as the Python
that they equal::

    cond(p, f, g, x)        f(*x) if p else g(*x)
    while_loop(p, f, x)     while p(*x): x = f(*x)
    scan(f, c, xs)          for x in xs: c, y = f(c, x), and the stack of y
    flex_attention          its scores as a matrix
"""

import logging
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from .._torch import (
    ASKS_DEVICE,
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    UnsupportedOperatorException,
    assert_async,
    device_of,
    flex_attention,
    flex_scores,
    is_wrapped,
)
from ..errors import StageError, line_of
from ..layout import local
from ..operators import tensors_in
from ..process import hold_interrupts
from ..program import Leaves
from ..signature import LeafSignature, Signature
from ..tree import tree_flatten, tree_leaves, tree_map

aten = torch.ops.aten

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


_REMEMBERED = 2**13
"""Most calls of operators of which torch remembers the form of the results; each takes 2 KB."""


@contextmanager
def without_values(symbols: Sequence[torch.SymInt] = ()) -> Iterator[None]:
    """Evaluate with fake tensors, and delay signals. Fake tensors that escape are detected and rejected.

    Args:
        symbols: sizes of some of the tensors.

    Functions of TorchScript run operator by operator: on a GPU it fuses them into kernels, which need memory.
    """
    unfused = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    with hold_interrupts(), unfused, MaskedWrites(), Evaluation(symbols) as evaluation:
        try:
            yield
        finally:
            evaluation.over = True


class Evaluation(FakeTensorMode):
    """Makes tensors without values, which raise :class:`NoValuesError` outside of it.

    They mix neither with those of another evaluation, nor with values after its end.
    """

    supports_higher_order_operators = True

    def __init__(self, symbols: Sequence[torch.SymInt] = ()) -> None:
        env = symbols[0].node.shape_env if symbols else None
        super().__init__(allow_non_fake_inputs=True, shape_env=env)
        self.over = False
        if len(FakeTensorMode.cache) > _REMEMBERED:
            FakeTensorMode.cache_clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is ASKS_DEVICE
            and getattr(args[0], "fake_mode", None) is self
            and not self.in_kernel_invocation
        ):
            return device_of(args[0])
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        mixed = self.over and len(fakes) < len(tensors)
        for fake in fakes:
            if mixed or fake.fake_mode is not self:
                raise NoValuesError(fake)
        if not isinstance(func, OpOverload):
            rule = func.python_key_table.get(FakeTensorMode)
            if rule is None:
                raise UnsupportedOperatorException(func)
            return rule(self, *args, **kwargs)
        if func is aten._grouped_mm.default and args[0].dtype in _GROUPED:
            with self:
                return _grouped_mm(*args, **kwargs)
        drawn = random.getstate() if func.namespace == "c10d" else None
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            if drawn is not None:  # torch draws a number for the work of a collective
                random.setstate(drawn)

    def _prep_args_for_hash(self, result: Any, args: Any, state: Any, id_hashed_objects: Any) -> None:
        """Add arguments to the key by which torch remembers the form of results.

        The key of common arguments tells apart what torch's own does, and is made in a fraction of its time.
        """
        if self.shape_env is None and (form := self._form(args)) is not None:
            return result.append(form)
        super()._prep_args_for_hash(result, args, state, id_hashed_objects)

    def _form(self, arg: Any) -> tuple[Any, ...] | None:
        """Describe all of a common argument that the form of a result may depend on."""
        if type(arg) in _PLAIN:
            return type(arg), arg
        if type(arg) in (tuple, list):
            forms = tuple(map(self._form, arg))
            return None if None in forms else (type(arg), forms)
        if (
            type(arg) is not FakeTensor
            or arg.fake_mode is not self
            or arg.constant is not None
            or arg.layout is not torch.strided
        ):
            return None
        return (
            device_of(arg),
            arg.dtype,
            arg.shape,
            arg.stride(),
            arg.storage_offset(),
            arg.untyped_storage().nbytes(),
            arg.requires_grad,
            arg.is_quantized,
            arg.is_conj(),
            arg.is_neg(),
            arg.is_inference(),
        )


_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}

# The dtypes of the real kernel. The abstract one of torch refuses all but bfloat16, and does not pad rows.
_GROUPED = torch.bfloat16, torch.float16, torch.float32


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Make the result of a product of groups, whose rows begin at multiples of 16 bytes."""
    dtype = out_dtype or a.dtype
    groups = ([len(a)] if offs is None else [len(offs)]) if a.ndim == b.ndim else []
    rows, columns = a.shape[-2], b.shape[-1]
    width = columns + -columns % (16 // dtype.itemsize)
    strides = [rows * width, width, 1][-2 - len(groups) :]
    return torch.empty_strided([*groups, rows, columns], strides, dtype=dtype, device=a.device)


def _is_of_a_mesh(frame: FrameType | None) -> bool:
    """Tell whether a frame, below modes, is of torch's meshes, which read the numbers of their ranks."""
    while frame and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"].startswith("torch.distributed.")


class MaskedWrites(torch.overrides.TorchFunctionMode):
    """Write values that have a gradient where a mask is true, by numbers of elements: values tell how many.

    Equivalent to, for ``x[mask] = values``::

        x[mask.nonzero_static(size=len(values)).unbind(1)] = values

    What is recorded raises where the mask has another number of true elements. One value for all of them is
    chosen by ``torch.where``. Numbers of a tensor with values, which are read past all operators, raise as an
    operator does that reads them.
    """

    looks_on = True  # it is on in every trace, so that none differs by it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func in _READS and (func is torch.Tensor.__dlpack__ or not isinstance(args[0], FakeTensor))
        if given and not _is_of_a_mesh(sys._getframe(1)):
            raise DataDependentOutputException(f"Tensor.{func.__name__}")  # type: ignore[arg-type]
        if func not in _WRITES or kwargs or not getattr(args[2], "requires_grad", False):
            return func(*args, **(kwargs or {}))
        x, key, values, *accumulate = args
        keys = tuple(key) if isinstance(key, tuple | list) else (key,)
        masks = [n for n, k in enumerate(keys) if isinstance(k, torch.Tensor) and k.dtype is torch.bool]
        rest = {type(k) for n, k in enumerate(keys) if n not in masks} - {slice, type(...)}
        if len(masks) != 1 or rest:
            return func(*args)
        (n,), mask = masks, keys[masks[0]]
        after = len(keys) - n - 1 if ... in keys[:n] else x.ndim - mask.ndim - n
        rows = values.shape[-after - 1] if values.ndim > after else 1
        if rows != 1:
            at = mask.nonzero_static(size=rows).unbind(1)
            wrong = f"a mask has not the {rows} true elements that it writes values to"
            assert_async(mask.sum() == rows, wrong)
            return func(x, (*keys[:n], *at, *keys[n + 1 :]), values, *accumulate)
        if any(isinstance(k, slice) and k != slice(None) for k in keys):
            return func(*args)
        values = values.unflatten(-after - 1, (1,) * mask.ndim) if values.ndim > after else values
        after_it = (..., *[None] * after)
        new = torch.where(mask[after_it], x + values if any(accumulate) else values, x)
        return new if func in _NEW else x.copy_(new)


_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
_NEW = {torch.Tensor.index_put, torch.index_put}
_WRITES = {*_NEW, torch.Tensor.__setitem__, torch.Tensor.index_put_, torch.index_put_}


class NoValuesError(RuntimeError):
    """A tensor of an abstract evaluation was read outside of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(str(LeafSignature.of(tensor)).removesuffix(" no grad"))

    def of_stage(self, stage: str) -> StageError:
        """Return the error of the stage that read it."""
        reason = f"it reads a tensor without values ({self}), left by an earlier abstract evaluation"
        mend = (
            "recompute it in each call; if it is a cache, clear it, and warm it up by calling the stage on"
            " real tensors of these shapes"
        )
        attribute = "where it is an attribute of a module, make the stage by stage_from_module"
        return StageError(stage, reason, f"{mend}; {attribute}")


def require_values(tensors: Iterable[Any], stage: str) -> None:
    """Raise for a fake tensor of an evaluation that is over."""
    for t in tensors:
        if isinstance(t, FakeTensor) and getattr(t.fake_mode, "over", False):
            raise NoValuesError(t).of_stage(stage)


_tried: ContextVar[Sequence[Leaves]] = ContextVar("tried", default=())


@contextmanager
def trying(batches: Iterable[Leaves]) -> Iterator[None]:
    """Run stages that need values on the leaves of a batch, where they are given leaves of the same form."""
    token = _tried.set([t for t in batches if not any(leaf.is_meta or is_wrapped(leaf) for leaf in t)])
    try:
        yield
    finally:
        _tried.reset(token)


def stand_ins(example: tuple[Any, ...], device: torch.device) -> tuple[Leaves, Leaves, Leaves]:
    """Make tensors for the parameters, for ``x`` and for the extras, of the same types of tensor.

    Inputs and extras are those of a batch that is :func:`trying`; else all are zeros.
    """

    def made(tree: Any) -> Leaves:
        if not isinstance(tree, Signature):
            return tuple(
                torch.zeros_like(t.detach(), device=device if t.is_meta else None)
                for t in map(local, tree_leaves(tree))
            )
        form = [(torch.Size(leaf.shape), leaf.dtype, device) for leaf in tree.leaves]
        for batch in _tried.get():
            if form == [(t.shape, t.dtype, t.device) for t in batch]:
                return tuple(t.detach().clone() for t in batch)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, _ in form)

    params, x, *extras = map(made, example)
    return params, x, sum(extras, ())


def data_dependence(error: Exception) -> str:
    """Say why a stage could not be evaluated without values."""
    operator, line = getattr(error, "func", None) or (error.args[0] if error.args else error), line_of(error)
    if isinstance(error, UnsupportedOperatorException):
        what = (
            f"what its operator {operator}{line and f', called{line},'} returns is not known without values"
        )
        return f"{what} (torch.library.register_fake tells torch)"
    what = (
        "its control flow or its shapes depend on the values of tensors (operator"
        f" {operator}{line and f', called{line}'}), or it reads one, as .item() does"
    )
    mend = "torch.where chooses without values"
    if any(frame.f_code.co_filename.endswith("batchnorm.py") for frame, _ in walk_tb(error.__traceback__)):
        mend = "a batch norm with momentum=None reads how many batches there were: give it a momentum"
    return f"{what}, so that it cannot be evaluated abstractly; {mend}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging, with its whole traceback, an error that is raised again in our words."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# -- operators that take functions


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, more: Any) -> Any:
    """Call a function as long as another one says so."""
    while cond_fn(*carried, *more):
        carried = body_fn(*carried, *more)
    return carried


def _scan(combine_fn: Callable[..., Any], init: Any, xs: Any) -> tuple[Any, Any]:
    """Call a function along the first axis of ``xs``, with the carry that it has returned before."""
    carry, rows = init, []
    for slices in zip(*(x.unbind() for x in xs), strict=True):
        carry, row = combine_fn(*tree_flatten(carry)[0], *slices)
        rows.append(row)
    columns = zip(*map(tree_leaves, rows), strict=True)
    stacked = iter([torch.stack(column) for column in columns])
    return carry, tree_map(lambda _: next(stacked), rows[0])


def _refuse_map(*_: Any) -> Any:
    raise NotImplementedError(
        "the higher-order operator map is a prototype of torch, which no engine runs; write"
        " torch.func.vmap(f)(x), or torch.stack([f(row) for row in x])"
    )


_PYTHON = {  # by the name of the function that torch would compile
    "_cond_op_wrapper": lambda pred, one, other, operands: (one if pred else other)(*operands),
    "_while_loop_op_wrapper": _while_loop,
    "run_flattened_scan": _scan,
    "run_flattened_map": _refuse_map,
    "_flex_attention_hop_wrapper": flex_scores,
}


_called: ContextVar[bool] = ContextVar("called", default=False)  # as Python
_replaced: list[Any] = []  # what `_compile`, `_validate` replace, as each user found it; the first is torch's
_lock = threading.Lock()


def _compile(model: Any = None, *args: Any, **options: Any) -> Any:
    """Stand for ``torch.compile`` while some thread calls a stage, for that thread alone."""
    name = getattr(model, "__name__", "") if getattr(model, "__module__", "").startswith("torch.") else ""
    handler = _PYTHON.get(name) if _called.get() else None
    own = _replaced[0][0] if _replaced else torch.compile
    return own(model, *args, **options) if handler is None else handler


def _validate(*args: Any) -> None:
    """Stand for torch's check that flex attention needs no gradient on the CPU, where its kernel lacks it.

    Its scores as a matrix have one.
    """
    if not _called.get():
        flex_attention()[1](*args)


@contextmanager
def in_python() -> Iterator[None]:
    """Call operators that take functions as the Python that they equal."""
    token = _called.set(True)
    with _lock:
        flex, _ = flex_attention()
        _replaced.append((torch.compile, flex._validate_device))
        torch.compile, flex._validate_device = _compile, _validate
    try:
        yield
    finally:
        with _lock:
            torch.compile, flex._validate_device = _replaced.pop()
        _called.reset(token)

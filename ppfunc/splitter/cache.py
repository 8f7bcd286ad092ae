"""Take the cache of a causal model apart between the slices of a sequence: its tensors are carries of stages.

Nothing is known of the class of a cache. It is pickled, and its tensors are left out.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppfunc.stage import StageError
from ppfunc.stage._torch import without_modes
from ppfunc.stage.constants import with_tensors, without_constants
from ppfunc.stage.device import autocast
from ppfunc.stage.errors import line_of
from ppfunc.stage.layout import layout_of
from ppfunc.stage.modules import unmodified
from ppfunc.stage.process import process_lock
from ppfunc.stage.signature import differentiable
from ppfunc.stage.tree import register, tree_flatten

from .call import MODEL, CallForm, LeafForm

CACHES = "past_key_values", "cache_params"
"""The arguments in which models get their caches. Their results have attributes of these names."""

WITHOUT_CACHE = "leave slices out, or write stages fn(params, x, carry) by hand"
"""The mend of a cache that cannot be a carry."""


class CacheForm(NamedTuple):
    """Describe a cache.

    Args:
        rest: the pickled cache without its tensors.
        classes: the classes of its objects, which need not be those of a module.
        leaves: the forms of its tensors.
        homes: the stage that holds each tensor.
    """

    rest: bytes
    classes: tuple[type, ...]
    leaves: tuple[LeafForm, ...]
    homes: tuple[int, ...] = ()


class Carry:
    """Hold the tensors of a cache that one stage hands from a slice to the next.

    Args:
        tensors: the tensors.
        form: the form of the whole cache, of all stages.
    """

    def __init__(self, tensors: Iterable[Any], form: CacheForm) -> None:
        self.tensors, self.form = tuple(tensors), form

    def __repr__(self) -> str:
        return f"<carry of {len(self.tensors)} tensors>"


register(Carry, lambda carry: (carry.tensors, carry.form), lambda form, tensors: Carry(tensors, form))


class CacheOfSlices:
    """Stands for the cache in a result."""


def cache_name(model: nn.Module, forms: Sequence[CallForm]) -> str:
    """Find the argument in which a model gets its cache.

    Raises:
        TypeError: it has none.
        ValueError: calls have other tensors than tokens, or decide on the cache themselves.
    """
    parameters = signature(model.forward).parameters
    if not (names := [name for name in CACHES if name in parameters]):
        raise TypeError(
            f"slices: got a {type(model).__name__}, whose forward takes none of {', '.join(CACHES)}; write"
            " stages fn(params, x, carry) by hand, or leave slices out"
        )
    for form in forms:
        if len(given := form.names(model)) > 1:
            raise ValueError(
                f"args: got the tensors {', '.join(given)}, expected the tokens alone with slices: a model"
                " keeps no others for the next slice. Give shifted targets to the step, whose loss_fn reads"
                " output.logits; padding at the end needs no mask, but targets that the loss ignores, and"
                " loss_weights by the number of targets of each slice that count"
            )
        if taken := [name for name in (names[0], "use_cache") if name in form.arguments()[1]]:
            raise ValueError(f"args: got {taken[0]}, which slices need to set; leave it out")
    return names[0]


def with_cache(model: nn.Module, name: str, cache: Any) -> dict[str, Any]:
    """Make the arguments by which a model gets a cache and returns the next."""
    asks = {"use_cache": True} if "use_cache" in signature(model.forward).parameters else {}
    return {name: cache, **asks}


def require_same_values(
    model: nn.Module, form: CallForm, slices: Sequence[Tensor], name: str, device: torch.device
) -> None:
    """Raise where a model computes other values with its cache than without.

    The model is called on the first row of the example, in evaluation: in one piece, and slice by slice. It
    is not called where tensors of it, or the example, are on ``meta``, or parameters are DTensors.

    Args:
        model: the model, which is left unmodified.
        form: the form of the call.
        slices: the slices of the tokens.
        name: the argument in which the model gets its cache.
        device: the device of the model.

    Raises:
        StageError: the values differ, or the model cannot be called.
    """
    held = [*model.parameters(), *model.buffers()]
    if any(t.is_meta or layout_of(t) is not None for t in (*held, *slices)):
        return
    rows = [part[:1].to(device) for part in slices]
    modes = {module: module.training for module in model.modules()}

    def called(row: Tensor, buffers: dict[str, Tensor], more: dict[str, Any]) -> tuple[list[Tensor], Any]:
        args, kwargs = with_tensors(without_constants(form.arguments([row])), device)
        result = torch.func.functional_call(model, buffers, args, kwargs | more)
        leaves = tree_flatten(result, "the result of the model")[0]
        tensors = [t for t in leaves if isinstance(t, Tensor) and differentiable(t.dtype)]
        return [t for t in tensors if t.shape[:2] == row.shape], _cache_of(result, name)

    try:
        for module in modes:
            module.training = False
        with process_lock, without_modes(), unmodified(model), torch.no_grad():
            one, several = ({n: b.clone() for n, b in model.named_buffers()} for _ in range(2))
            whole, cache = called(torch.cat(rows, 1), one, {})[0], None
            parts = []
            for row in rows:
                values, cache = called(row, several, with_cache(model, name, cache))
                parts.append(values)
    except Exception as error:
        raise StageError(
            MODEL,
            f"it raised {type(error).__name__}{line_of(error)} when it was called on a row of the example,"
            f" slice by slice: {str(error).rstrip('.')}",
            "give tokens that the model takes; with tokens on meta it is not called",
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    dtypes = [torch.float32, *(t.dtype for t in held if differentiable(t.dtype)), *dict(autocast()).values()]
    most = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    for wanted, *made in zip(whole, *parts, strict=False):
        finite = wanted.isfinite()
        off, size = (torch.where(finite, t, 0).float().norm() for t in (torch.cat(made, 1) - wanted, wanted))
        if not off <= most * size:
            raise StageError(
                MODEL,
                f"with its {name} it computes other values than without it: slice by slice the first row of"
                f" the example differs by {float(off / size):.2g} of its norm",
                WITHOUT_CACHE,
            )


def opened(form: CacheForm | None, tensors: Sequence[Tensor]) -> Any:
    """Put a cache together from its form and its tensors.

    Returns:
        The cache; None in the first slice of a sequence, where the form is None.
    """
    if form is None:
        return None
    classes = form.classes

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, kept: Any) -> Any:
            match kept:
                case int():
                    return tensors[kept]
                case (number,):
                    return classes[number]
                case numbers, dtype, device, shape:
                    return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)

    return Unpickler(io.BytesIO(form.rest)).load()


def closed(result: Any, name: str, known: Callable[[Tensor], Any]) -> tuple[CacheForm, list[Tensor]]:
    """Take the cache in the result of a model apart.

    Args:
        result: the result of the model. A dictionary loses the cache.
        name: the attribute of the result.
        known: returns the integers of a tensor that the model has made of numbers in its code.

    Returns:
        The form of the cache, and its tensors.

    Raises:
        StageError: the model returns no cache, or one that cannot be pickled.
    """
    if (cache := _cache_of(result, name)) is None:
        raise StageError(
            MODEL,
            f"it returned no {name}, which slices need",
            "switch off what forbids a cache, such as gradient checkpointing (engine=graph(remat=...) is the"
            " same), or leave slices out",
        )
    if isinstance(result, MutableMapping):
        result[name] = CacheOfSlices()  # its tensors are no results, which would travel to the last stage
    tensors: dict[int, tuple[int, Tensor]] = {}
    classes: dict[type, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, type):
                return (classes.setdefault(value, len(classes)),)
            if not isinstance(value, Tensor):
                return None
            if (values := known(value)) is not None:
                return values, value.dtype, value.device, tuple(value.shape)
            return tensors.setdefault(id(value), (len(tensors), value))[0]

    rest = io.BytesIO()
    try:
        Pickler(rest).dump(cache)
    except Exception as error:
        raise StageError(
            MODEL,
            f"its {name}, a {type(cache).__name__}, could not be taken apart: {error}",
            "take a cache of tensors and plain values",
        ) from error
    kept = [tensor for _, tensor in tensors.values()]
    leaves = tuple(LeafForm(tuple(t.shape), t.dtype) for t in kept)
    return CacheForm(rest.getvalue(), tuple(classes), leaves), kept


def _cache_of(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)

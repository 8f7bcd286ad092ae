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
from ppfunc.stage.tree import register

from .call import MODEL, CallForm, LeafForm

CACHES = "past_key_values", "cache_params"
"""The arguments in which models get their caches. Their results have attributes of these names."""


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
                " output.logits; padding at the end needs no mask, but targets that the loss ignores"
            )
        if taken := [name for name in (names[0], "use_cache") if name in form.arguments()[1]]:
            raise ValueError(f"args: got {taken[0]}, which slices need to set; leave it out")
    return names[0]


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
                case numbers, dtype, shape:
                    return torch.tensor(numbers, dtype=dtype).reshape(shape)

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
    cache = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    if cache is None:
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
                return values, value.dtype, tuple(value.shape)
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

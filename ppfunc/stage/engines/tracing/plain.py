"""Run pure functions of tensors as programs, where nothing is differentiated: traced once, then in C++."""

from collections.abc import Callable, Hashable
from functools import cache, lru_cache, partial
from typing import Any

import torch

from ..._torch import without_modes, without_transforms
from ...abstract.evaluation import without_values
from ...process import process_lock
from ...program import Leaves
from .cut import Block
from .emit import Recipe, TracedFunction
from .graph import is_call
from .joint import recorded


def run_traced(fn: Callable[..., Leaves], options: tuple[Hashable, ...], tensors: Leaves) -> Leaves:
    """Call ``fn(*options, *tensors)``; from the second call on, by the program of its operators.

    Args:
        fn: a function at the top of a module, which reads no values and returns a tuple of tensors.
        options: compared, with the dtypes, shapes and devices of the tensors, to find the program.
    """
    forms = tuple([(t.dtype, t.shape, t.device) for t in tensors])
    programs = _programs(fn, options, forms)
    if not programs:  # a first step does not wait for it
        programs.append(cache(partial(_traced, fn, options, forms)))
        return fn(*options, *tensors)
    return programs[0]()(tensors)


# By a call, what makes its program, which the caller adds.
_programs: Callable[..., list[Callable[[], TracedFunction]]] = lru_cache(maxsize=256)(lambda *_: [])


def _traced(fn: Callable[..., Leaves], options: tuple[Any, ...], forms: tuple[Any, ...]) -> TracedFunction:
    with without_modes(), without_transforms(), process_lock:
        with without_values(), torch.no_grad():
            tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for dtype, shape, device in forms)
            trees = tensors, (), (), ()
            joint = recorded(lambda _, tensors, *__: fn(*options, *tensors), trees, fn.__name__)
        results: Any = joint.graph.output_node().args[0]
        block = Block((joint.params,), tuple(filter(is_call, joint.graph.nodes)), (results,))
        return TracedFunction(Recipe(block, ("tensors",), f"{fn.__name__} program", ("tensors",)))

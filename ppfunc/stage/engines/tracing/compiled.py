"""Compile parts of a trace by inductor, for the shapes and strides of the trace alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._torch import FakeTensorMode, inductor, vector_options
from .cut import Block
from .graph import is_tensor, module_of

# Random operators stay those of torch, so that compiled and plain programs draw the same numbers. What calls
# the kernels in C++ is compiled apart from them, with less optimization: g++ takes two thirds of the time.
_OPTIONS = {"fallback_random": True, "cpp_wrapper_build_separate": True}
_NAMESPACES = ("aten", "prims")  # of the operators that inductor's C++ can call, whatever their arguments


@contextmanager
def without_onednn() -> Iterator[None]:
    """Trace recurrent layers as plain operators.

    Inductor does not know how much those of oneDNN keep for their backward.
    """
    onednn: Any = torch.backends.mkldnn  # declared with the type of a descriptor, not with that of its value
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before


def compiled(
    block: Block,
) -> tuple[Callable[..., Any], tuple[torch.fx.Node, ...], tuple[torch.fx.Node, ...]]:
    """Compile the body of a part as one function.

    Returns:
        The function, the nodes of its arguments, and those of its results.

    The shapes and strides of a trace are fixed. A call does not look for a program by them; inductor asserts
    them. C++ calls torch's operators on the CPU. Equal programs are compiled once per machine, by what
    inductor keeps on disk. Those with random operators that it would decompose are compiled once per process.
    """
    body = set(block.body)
    inputs = tuple(
        dict.fromkeys(
            a for n in block.body for a in n.all_input_nodes if a not in body and a.op != "get_attr"
        )
    )
    outputs = tuple(dict.fromkeys(n for results in block.results for n in results if n in body))
    assert all(map(is_tensor, outputs))
    compile_fx, decompositions, lowerings, make_fallback, ShapeEnv = inductor()
    # Random operators stay whole, too.
    whole = {n.target for n in block.body if _is_random(n.target)} & decompositions.keys()
    for op in whole - lowerings.keys():
        # Left to itself, inductor refuses to where CI is set.
        make_fallback(op, warn=False, override_decomp=True)
    ours = {op: f for op, f in decompositions.items() if not _is_random(op)} if whole else None
    # Without an environment for symbolic shapes, which stays empty, inductor keeps nothing on disk. It finds
    # what it keeps by a key that leaves decompositions out, so it may only where they are its own.
    with FakeTensorMode(shape_env=None if whole else ShapeEnv(), static_shapes=True):
        examples = [  # in one mode for all: the arguments may come from two traces
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            for v in (n.meta["val"] for n in inputs)
        ]
    graph = torch.fx.Graph()
    graph.output(Block((inputs,), block.body, (outputs,)).copied(graph).results[0])
    module = module_of(graph)
    for node in graph.nodes:
        node.meta.clear()  # it is of the mode of its trace
    plain = all(getattr(n.target, "namespace", "aten") in _NAMESPACES for n in block.body)
    here = plain and all(v.device.type == "cpu" for v in examples)
    options = _OPTIONS | vector_options() | {"cpp_wrapper": here}
    return compile_fx(module, examples, config_patches=options, decompositions=ours), inputs, outputs


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())

"""Compile parts of a trace by inductor, to be called without guards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node

from ..._torch import FakeTensorMode, inductor
from .cut import Block
from .graph import is_tensor, module_of

# Random operators stay those of torch, and whole, so that compiled and plain programs draw the same numbers.
_OPTIONS = {"fallback_random": True}


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
) -> tuple[Callable[..., Any], tuple[Node, ...], tuple[Node, ...]]:
    """Compile the body of a part as one function.

    Returns:
        The function, the nodes of its arguments, and those of its results.

    The shapes of a trace are fixed, so nothing is checked at a call: no guards, no dispatch.
    """
    body = set(block.body)
    inputs = tuple(
        dict.fromkeys(
            a for n in block.body for a in n.all_input_nodes if a not in body and a.op != "get_attr"
        )
    )
    outputs = tuple(dict.fromkeys(n for results in block.results for n in results if n in body))
    assert all(map(is_tensor, outputs))
    with FakeTensorMode():  # one for all: the arguments may come from two traces
        examples = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            for v in (n.meta["val"] for n in inputs)
        ]
    compile_fx, decompositions, lowerings, make_fallback = inductor()
    deterministic = {
        op: f
        for op, f in decompositions.items()
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
    }
    for op in {
        node.target for node in block.body
    } & decompositions.keys() - deterministic.keys() - lowerings.keys():
        # Left to itself, inductor refuses to where CI is set.
        make_fallback(op, warn=False, override_decomp=True)
    graph = Graph()
    graph.output(Block((inputs,), block.body, (outputs,)).copied(graph).results[0])
    module = module_of(graph)
    for node in graph.nodes:
        node.meta.clear()  # it is of the mode of its trace
    function = compile_fx(module, examples, config_patches=_OPTIONS, decompositions=deterministic)
    return function, inputs, outputs

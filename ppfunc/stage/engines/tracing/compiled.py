"""Compile parts of a trace by inductor, to be called without guards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..._torch import FakeTensorMode, inductor
from .cut import Block
from .operators import constant_name, is_tensor

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
    block: Block, constants: dict[str, torch.Tensor]
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
        make_fallback(
            op, warn=False, override_decomp=True
        )  # left to itself, inductor refuses to where CI is set
    module = _module(block, inputs, outputs, constants)
    return (
        compile_fx(module, examples, config_patches=_OPTIONS, decompositions=deterministic),
        inputs,
        outputs,
    )


def _module(
    block: Block, inputs: tuple[Node, ...], outputs: tuple[Node, ...], constants: dict[str, torch.Tensor]
) -> GraphModule:
    graph = Graph()
    copies = {n: graph.placeholder(n.name) for n in inputs}
    used = {a for n in block.body for a in n.all_input_nodes if a.op == "get_attr"}
    copies |= {n: graph.get_attr(constant_name(n)) for n in used}
    for node in block.body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}  # of the mode of its trace
    graph.output(tuple(copies[n] for n in outputs))
    return GraphModule({name: constants[name] for name in map(constant_name, used)}, graph)

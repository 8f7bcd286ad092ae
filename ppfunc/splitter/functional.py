"""Make a trace functional, where a stage writes into memory that another stage has made."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ppfunc.stage import StageError
from ppfunc.stage.abstract.evaluation import without_values
from ppfunc.stage.tree import tree_map

from ._torch import (
    FunctionalMode,
    enable_python_dispatcher,
    from_functional,
    to_functional,
    without_functionalize,
)
from .known import call_again
from .record import BY_HAND, MODEL, Recording, within
from .trace import Trace, undisturbed

aten = torch.ops.aten


MAPPABLE: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: (
        lambda *args, **kwargs: aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    )
}
"""Operators that choose a kernel by looks that a ``vmap`` hides, such as whether the mask has a gradient;
with others in their place.
"""


def without_writes(trace: Trace, device: torch.device) -> Trace:
    """Replay a trace by operators that write into nothing.

    A value that the model leaves in a buffer replaces the buffer.

    Args:
        trace: of the model.
        device: where it computes.

    Raises:
        StageError: it reads memory by strides, which are others for values that nobody writes into.
    """
    for node in trace.nodes:
        if node.target is aten.as_strided.default:
            raise StageError(
                MODEL,
                f"it uses as_strided{node.meta['place']}, and has to be traced without operators that write"
                " into tensors",
                f"take unfold or another view, or {BY_HAND}",
            )
    with undisturbed(), without_values():
        recording = Recording()
        fakes = {node: fake(node, device, name not in trace.frozen) for name, node in trace.params.items()}
        fakes |= {node: fake(node, device, False) for node in (*trace.buffers.values(), *trace.inputs)}
        places = {node: recording.place(fake, node.name) for node, fake in fakes.items()}
        with enable_python_dispatcher(), recording, without_functionalize(), FunctionalMode():
            values = {node: to_functional(fake) for node, fake in fakes.items()}
            for node in trace.nodes:
                recording.stage = node.meta["stage"]
                with within(node.meta["region"]):
                    values[node] = _called_again(node, values, recording)
            results = tuple(
                recording.node(from_functional(values[r])) if isinstance(r, Node) else r
                for r in trace.results
            )
            ends = {
                name: recording.node(from_functional(values[trace.replaced.get(name, node)]))
                for name, node in trace.buffers.items()
            }
    for node in recording.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # whatever the strides
    return trace._replace(
        nodes=tuple(n for n in recording.graph.nodes if n.op != "placeholder"),
        params={name: places[node] for name, node in trace.params.items()},
        buffers={name: places[node] for name, node in trace.buffers.items()},
        inputs=tuple(places[node] for node in trace.inputs),
        results=results,
        replaced={name: node for name, node in ends.items() if node is not places[trace.buffers[name]]},
    )


def _called_again(node: Node, values: dict[Node, Any], recording: Recording) -> Any:
    """Call an operator of a trace once more. One with a backward of its own gets plain tensors."""
    if "opaque" not in node.meta:
        return call_again(node, values)
    assert callable(node.target)
    args = tuple(from_functional(values[n]) for n in node.args)  # type: ignore[index]
    return tree_map(to_functional, recording.call_whole(node.target, args))


def fake(node: Node, device: torch.device, grad: bool) -> Tensor:
    """Make the tensor of a node without values."""
    value = node.meta["value"]
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    return made.requires_grad_(grad and value.dtype.is_floating_point)

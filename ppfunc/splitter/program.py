"""Run the part of one stage of a trace: arrange what it receives, what it sends and what it returns."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ppfunc.stage.engines.tracing.cut import Block
from ppfunc.stage.engines.tracing.emit import OperatorCall, Recipe, write
from ppfunc.stage.transforms import refuse_as_strided
from ppfunc.stage.tree import PLAIN, register_leafless

from .cut import StagePart, storages_of
from .record import Region, within
from .trace import Trace

aten = torch.ops.aten
Leaves = tuple[Tensor, ...]


class StageCode(NamedTuple):
    """Hold the code of one stage for one form of its inputs.

    Args:
        params, constants, state: names of the tensors of the model that it reads.
        frozen: those of its parameters that get no gradient.
        received: the stages from which it takes values.
        dtypes: those of the values that it takes.
        run: ``(params, constants, state, inputs, received) -> (sent, new state, result)``; the result is that
            of the model in the last stage, and None in others.
    """

    params: tuple[str, ...]
    constants: tuple[str, ...]
    state: tuple[str, ...]
    frozen: frozenset[str]
    received: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    run: Callable[..., tuple[dict[int, Leaves], dict[str, Tensor], Any]]


class NotKept:
    """Stands for a part of a model's result that a split does not keep, such as a cache of keys.

    Args:
        kind: the class of what it stands for.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        kind = self._kind if "_kind" in vars(self) else None
        raise AttributeError(
            f"the model returned a {getattr(kind, '__name__', kind)}, which a split does not keep; got a"
            f" request for its {name!r}; have the model return tensors, register its class (as"
            " torch.export.register_dataclass does), or switch it off (use_cache=False)"
        )

    def __repr__(self) -> str:
        return f"<{self._kind.__name__}, not kept by the split>"


# In the outputs of a step it is a node without tensors.
register_leafless(NotKept, lambda node: node._kind, NotKept)


def stage_codes(
    trace: Trace, parts: Sequence[StagePart], ambient: Region, mapped: bool
) -> tuple[StageCode, ...]:
    """Write the code of every stage.

    Args:
        trace, parts: of the model.
        ambient: the region in which stages are called; operators of others are called in theirs.
        mapped: whether a ``vmap`` is active. It hides by what attention chooses its kernel, such as the
            gradient of the mask.
    """
    contexts: dict[Region, Callable[[], Any]] = {}
    for node in trace.nodes:
        if mapped and node.target is aten.scaled_dot_product_attention.default:
            node.target = partial(_attention, _memory_order(node))
        if mapped and node.target is aten.as_strided.default:
            refuse_as_strided()
        target: Any = node.target  # that of a constant is its name
        node.meta["call"] = OperatorCall(target)
        region = node.meta["region"]
        if region != ambient:
            node.meta["within"] = contexts.setdefault(region, partial(within, region, ambient))
    return tuple(_code(trace, part, stage, stage == len(parts) - 1) for stage, part in enumerate(parts))


def _attention(order: tuple[int, ...] | None, *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention by its scores as a matrix, in the order of memory of the kernel that was traced."""
    y = aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    return y if order is None else y.permute(order).contiguous().permute(*map(order.index, range(y.ndim)))


def _code(trace: Trace, part: StagePart, stage: int, last: bool) -> StageCode:
    inputs = trace.inputs if stage == 0 else ()
    taken = tuple(node for nodes in part.received.values() for node in nodes)
    results = tuple(dict.fromkeys(r for r in trace.results if isinstance(r, Node))) if last else ()
    sent = tuple(node for nodes in part.sent.values() for node in nodes)
    arguments = (
        *(trace.params[name] for name in part.params),
        *(trace.buffers[name] for name in (*part.constants, *part.state)),
        *inputs,
        *taken,
    )
    code = Block((arguments,), part.body, (sent, tuple(part.state.values()), results))
    run = write(Recipe(code, ("values",), f"stage {stage} of a split run"))
    writes = frozenset(at for node in part.body for at in node.meta["writes"])
    copied = [i for i, node in enumerate(arguments) if not writes.isdisjoint(storages_of(node))]
    rebuild = _rebuilder(trace, results)
    arriving, leaving = ([_memory_order(node) for node in nodes] for nodes in (taken, sent))
    # From the order of a message back to that of its axes.
    arriving = [order and tuple(map(order.index, range(len(order)))) for order in arriving]

    def call(params: Leaves, constants: Leaves, state: Leaves, inputs: Leaves, received: Leaves) -> Any:
        values = [*params, *constants, *state, *inputs, *map(_permuted, received, arriving)]
        for i in copied:
            values[i] = values[i].clone()
        sent_values, new_state, tensors = run(values)
        messages = map(_permuted, sent_values, leaving)
        out = {to: tuple(islice(messages, len(nodes))) for to, nodes in part.sent.items()}
        states = {name: t.detach() for name, t in zip(part.state, new_state, strict=True)}
        return out, states, rebuild(tensors) if last else None

    return StageCode(
        part.params,
        part.constants,
        tuple(part.state),
        frozenset(part.params) & trace.frozen,
        tuple(part.received),
        tuple(node.meta["value"].dtype for node in taken),
        call,
    )


def _rebuilder(trace: Trace, tensors: Sequence[Node]) -> Callable[[Leaves], Any]:
    """Make a function that builds the result of the model from its tensors, each of which is there once."""
    places = {node: i for i, node in enumerate(tensors)}
    leaves = [places.get(r) if isinstance(r, Node) else None for r in trace.results]
    others = [None if isinstance(r, Node) else _plain(r) for r in trace.results]

    def rebuild(results: Leaves) -> Any:
        pairs = zip(leaves, others, strict=True)
        return trace.treedef.unflatten([o if place is None else results[place] for place, o in pairs])

    return rebuild


def _plain(value: Any) -> Any:
    return value if type(value) in PLAIN else NotKept(type(value))


def _memory_order(node: Node) -> tuple[int, ...] | None:
    """Sort the axes of a value from the outermost in memory to the innermost.

    Returns:
        None if that is their own order.

    A message is contiguous. An operator behind it may look at the strides that the value had.
    """
    stride = node.meta["value"].stride
    order = tuple(sorted(range(len(stride)), key=lambda axis: -stride[axis]))
    return None if order == tuple(range(len(stride))) else order


def _permuted(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    return tensor if order is None else tensor.permute(order)

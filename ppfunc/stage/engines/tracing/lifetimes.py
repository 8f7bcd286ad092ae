"""Find how long the storages of a block live, and where its gradients are added up."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..._torch import estimate, storage
from .cut import Block
from .graph import arguments, base, is_call, is_element, root
from .joint import Nodes

aten = torch.ops.aten

_TOGETHER = 2**20  # bytes of gradients that are added up at once: one by one, small ones take longer


# Operators whose several results lie apart: others may return one twice, as the gradient of both biases of
# an LSTM.
_APART = {
    aten.convolution_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
}


@dataclass(slots=True)
class Life:
    """Describe the life of a storage.

    Args:
        birth: the number of the call that makes it, -1 of an argument.
        end: the number of the call that uses it last, the number of calls of a result.
        size: bytes; 0 of an argument that no forward has made.
        members: the tensors in it.
    """

    birth: int
    end: int
    size: int
    members: list[Node]


class Addition(NamedTuple):
    """Describe gradients that are added up together.

    Args:
        after: the number of calls that run before.
        numbers: the leaves, ascending.
        fresh: whether nothing else lies in their memory.
    """

    after: int
    numbers: tuple[int, ...]
    fresh: bool


def calls_of(block: Block) -> Nodes:
    """List the calls, without the nodes that take one result of several."""
    return tuple([n for n in block.body if not is_element(n)])


def lives_of(block: Block, made: Mapping[Node, int] | None = None) -> dict[Hashable, Life]:
    """Find the storages of the arguments, and of all that is made, until their last use.

    Args:
        made: the numbers of the calls whose results the block drops after their last use.
    """
    body, last = calls_of(block), dict(made or {})
    last |= {a: i for i, node in enumerate(body) for a in node.all_input_nodes}
    last |= {n: len(body) for row in block.results for n in row if n is not None}
    owner: dict[Node | None, Hashable] = {}
    lives: dict[Hashable, Life] = {}
    for node in (n for row in block.arguments for n in row if n in last):
        value = node.meta.get("val")
        owner[node] = memory = _memory(value) or node
        life = lives.setdefault(memory, Life(-1, -1, _bytes(value) if is_call(root(node)) else 0, []))
        life.members.append(node)
        life.end = max(life.end, last[node])
    for i, node in enumerate(body):
        for key, tensor, result in results_of(node):
            within = source(node, tensor)
            key = owner.get(within, key)
            # What views a constant takes no memory.
            life = lives.setdefault(key, Life(i, i, 0 if within else _bytes(tensor), []))
            if result is not None and result in last:
                owner[result] = key
                life.members.append(result)
                life.end = max(life.end, last[result])
    return lives


def results_of(node: Node) -> Iterator[tuple[Hashable, torch.Tensor, Node | None]]:
    """Yield the tensors that a call returns: a key, the tensor, and its node, if it has one."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield node, value, node
    elements = {n.args[1]: n for n in node.users if is_element(n)}
    for n, tensor in enumerate(value if isinstance(value, list | tuple) else ()):
        if isinstance(tensor, torch.Tensor):
            element = elements.get(n)
            yield element or (node, n), tensor, element


def source(node: Node, result: Any = None) -> Node | None:
    """Return the argument in whose memory the result of a call lies, unless that is new."""
    if (viewed := base(node)) is not None:
        return viewed
    memory = _memory(node.meta.get("val") if result is None else result)
    others = arguments(node)[0].all_input_nodes if is_element(node) else node.all_input_nodes
    return next((n for n in others if memory and _memory(n.meta.get("val")) == memory), None)


def _memory(value: Any) -> int | None:
    return storage(value) if isinstance(value, torch.Tensor) else None


def _bytes(value: Any) -> int:
    return int(estimate(value.untyped_storage().nbytes())) if _memory(value) else 0


def additions(block: Block) -> Iterator[Addition]:
    """Group the gradients that are the first results of a block, in the order in which they are added up.

    They wait for each other up to some bytes, and while no more lives at once than if none waited.
    """
    body, (gradients, *others) = calls_of(block), block.results
    leaves = {n: g for n, g in enumerate(gradients) if g is not None}
    made = dict.fromkeys(leaves.values(), -1)
    made |= {n: i for i, node in enumerate(body) for _, _, n in results_of(node) if n and n in made}
    lives = [*lives_of(block._replace(results=((), *others)), made).values()]
    life_of, uses = {n: life for life in lives for n in life.members}, Counter(chain(*block.results))
    changes = [0] * (len(body) + 2)  # of the bytes that live while each call runs, if no gradient waits
    for life in lives:
        changes[max(life.birth, 0)] += life.size
        changes[life.end + 1] -= life.size
    live, waiting = [*accumulate(changes)], list[int]()
    most = max(live)
    order = sorted(((made[g], n) for n, g in leaves.items()), reverse=True)
    for i in range(len(body) + 1):
        while order and order[-1][0] < i:
            waiting.append(order.pop()[1])
        held = sum(life.size for n in waiting if (life := life_of[leaves[n]]).end < i)
        if waiting and (i == len(body) or held >= _TOGETHER or held + live[i] > most):
            for fresh in (True, False):
                alike = sorted(n for n in waiting if _is_fresh(leaves[n], life_of, uses, body) is fresh)
                if alike:
                    yield Addition(i, tuple(alike), fresh)
            waiting = []


def _is_fresh(node: Node, life_of: Mapping[Node, Life], uses: Mapping[Node | None, int], body: Nodes) -> bool:
    """Tell whether a gradient is all that lies in memory that an operator of torch has made for it."""
    life, t = life_of[node], node.meta["val"]
    if life.birth < 0 or life.size != t.nbytes or sum(uses[n] for n in life.members) > 1:
        return False
    maker = body[life.birth]
    known = "results" not in maker.meta or maker.target in _APART
    axes = sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1)
    # Each element has a place of its own.
    dense = [stride for stride, _ in axes] == [1, *accumulate((size for _, size in axes), mul)][:-1]
    return (
        known
        and getattr(maker.target, "namespace", "") == "aten"
        and dense
        and not (t.is_conj() or t.is_neg())
    )

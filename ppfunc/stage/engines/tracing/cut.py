"""Cut a joint trace into the operators of F, of I and of W, put each in order, choose results that the
backward computes again instead of keeping them, and find how long the storages of a block live.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from math import inf
from operator import mul
from typing import Any, Literal, NamedTuple, cast

import optree
import torch
from torch.fx import Graph, Node, map_arg

from ppfunc._checks import limited

from ..._torch import OpOverload, estimate, schema, storage
from ...errors import StageError, other_engine
from ...operators import flops_of, is_collective
from ...program import Numbers
from ...signature import first_match
from .graph import (
    ancestors,
    arguments,
    base,
    is_call,
    is_dense,
    is_effect,
    is_element,
    is_of_forward,
    is_post,
    is_random,
    is_tensor,
    is_wait,
    operator_of,
    root,
)
from .joint import Joint, Maybe, Nodes


class Block(NamedTuple):
    """Describe a stretch of straight-line code."""

    arguments: tuple[Nodes, ...]
    body: Nodes  # the calls, in order
    results: tuple[Maybe, ...]  # None for no gradient

    def copied(self, graph: Graph, numbers: Numbers | None = None) -> "Block":
        """Copy the code into another graph under names of its own, with numbers in the place of symbols."""
        copies: dict[Node, Node] = {}
        for node in chain(*self.arguments):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

        def copy(node: Node) -> Node:
            if node not in copies:
                args, kwargs = map_arg((node.args, node.kwargs), copy)
                # Its arguments may be symbols: torch warns of those in a new node.
                copies[node] = made = graph.create_node(node.op, node.target, name=node.name)
                made.args, made.kwargs, made.meta = args, kwargs, dict(node.meta)
            return copies[node]

        block = Block(
            tuple(tuple(map(copy, nodes)) for nodes in self.arguments),
            tuple(map(copy, self.body)),
            tuple(tuple(n and copy(n) for n in nodes) for nodes in self.results),
        )
        if numbers is not None:
            for node in copies.values():
                node.args, node.kwargs = numbers(node.args), numbers(node.kwargs)
                node.meta["val"] = numbers(node.meta.get("val"))
        return block


class ProgramBlocks(NamedTuple):
    """Hold the parts of a joint trace, a block per field of :class:`~ppfunc.stage.program.FlatProgram`."""

    forward: Block
    backward: Block
    backward_input: Block
    backward_weight: Block

    @property
    def residuals(self) -> Nodes:
        return self.backward.arguments[0]


def cut(
    joint: Joint, again: Iterable[Node] = (), twice: Iterable[Node] = (), ahead: Iterable[Node] = ()
) -> ProgramBlocks:
    """Cut by dependency: every operator in one part, save for views of parameters, which are free.

    * F: what the outputs depend on, and whatever draws random numbers or communicates in the forward.
    * I: of the rest, what the gradient of ``x`` depends on.
    * W: the remainder, which only gradients of parameters depend on.

    A check of the backward is in I where that has what it looks at, else in W.

    ``backward`` is I and W as one, in the order of the trace: hence bitwise the same. Of ``again``, operators
    of F, no result is kept: where the backward needs them they are computed once more, right before they are
    used, by I if it needs them or they are ``ahead``, else by W. Of ``twice``, operators of I, no result is
    handed to W, which computes them itself.
    """
    calls, early = set(filter(is_call, joint.graph.nodes)), early_nodes(joint)
    params = set(joint.params)
    free = {n for n in calls if base(n) is not None and root(n) in params}  # cheaper to repeat than to keep
    late = (calls - early) | set(again) | free
    outputs, gparams, gx = joint.results
    gradients, checks = [*gparams, *gx], joint.checks
    whole, inputs = _closure([*gradients, *checks], late), _closure([*gx, *ahead], late)
    inputs |= {n for n in checks if _closure(n.all_input_nodes, late) <= inputs}
    weights = _closure([*gparams, *checks], late - (inputs - free - set(twice)))
    residuals = tuple(n for n in _needed(whole, gradients) if n not in joint.gy)
    rest = _needed(weights, gparams)

    def block(arguments: tuple[Nodes, ...], body: set[Node], results: tuple[Maybe, ...]) -> Block:
        return Block(arguments, tuple(_in_order(body, results)), results)

    forward = tuple(n for n in joint.graph.nodes if n in early & calls)
    return ProgramBlocks(
        Block((joint.params, joint.x, joint.extras), forward, (outputs, residuals)),
        block((residuals, joint.gy), whole, (gparams, gx)),
        block((residuals, joint.gy), inputs, (gx, rest)),
        block((rest,), weights, (gparams,)),
    )


def early_nodes(joint: Joint) -> set[Node]:
    """Find the nodes that must be there before a cotangent: arguments, F and its operators with effects."""
    arguments = {n for n in joint.graph.nodes if n.op in ("placeholder", "get_attr")}
    return arguments | _with_elements(ancestors([*joint.results[0], *joint.effects]))


def _closure(results: Iterable[Node | None], inside: set[Node]) -> set[Node]:
    """Find the nodes in ``inside`` that ``results`` depend on, with all outputs of each operator."""
    return _with_elements(ancestors([n for n in results if n in inside], inside))


def _with_elements(nodes: set[Node]) -> set[Node]:
    return nodes | {user for n in nodes for user in n.users if is_element(user)}


def _needed(body: set[Node], results: Iterable[Node | None]) -> Nodes:
    """List the nodes outside ``body`` that it or the results read, in order, without constants."""
    used = [a for n in body for a in n.all_input_nodes] + [n for n in results if n is not None]
    return tuple(sorted({n for n in used if n not in body and n.op != "get_attr"}))


def _in_order(body: set[Node], results: tuple[Maybe, ...]) -> Iterator[Node]:
    """Yield calls of the backward in the order of the trace, calls of the forward right before their use."""
    late = sorted(n for n in body if not is_of_forward(operator_of(n)))
    todo, done = [*late, *(n for nodes in results for n in nodes if n is not None)][::-1], set[Node]()
    while todo:
        node = todo[-1]
        missing = [a for a in node.all_input_nodes if a in body and a not in done]
        if missing and node not in done:
            todo += sorted(missing, reverse=True)
            continue
        todo.pop()
        if node in body and node not in done:
            done.add(node)
            yield node


def posted_early(body: Nodes) -> Nodes:
    """Order the calls of a program: each collective as soon as its input is computed, its wait at the use.

    Behind a collective come first the calls that run beside it: those that do not need it, and that the next
    one does not need, such as gradients of parameters. Collectives and random operators keep their orders,
    which ranks share. A call moves past one collective at most, so that memory lives little longer.
    """
    inside, drawn, posts = set(body), list[Node](), 0
    needs, before = dict[Node, list[Node]](), dict.fromkeys(body, inf)
    behind: dict[Node, int] = {}  # how many collectives stand before a call
    after: dict[Node, int] = {}  # the last collective that a call needs, counted from 1; 0 for none
    for node in body:
        needs[node] = [a for a in node.all_input_nodes if a in inside]
        if is_random(node):
            needs[node] += drawn
            drawn = [node]
        behind[node] = posts
        posts += is_post(node)
        after[node] = posts if is_post(node) else max((after[a] for a in needs[node]), default=0)
    for node in reversed(body):  # the first collective that needs a call
        first = after[node] if is_post(node) else before[node]
        before.update({argument: min(before[argument], first) for argument in needs[node]})

    def place(node: Node) -> tuple[int, int]:
        last = behind[node]
        if is_post(node):
            return last, 2
        needs_last = after[node] == last
        return (last, 1) if needs_last and before[node] == last + 1 else (last + needs_last, 0)

    return tuple(waited_late(sorted(body, key=place)))


def waited_late(body: Iterable[Node]) -> Iterator[Node]:
    """Yield the calls in their order, each wait right before the first use of its result, or at the end."""
    waits: dict[Node, bool] = {}
    for node in body:
        for argument in node.all_input_nodes:
            if waits.pop(argument, False):
                yield argument
        if is_wait(node):
            waits[node] = True
        else:
            yield node
    yield from waits


def require_known_sizes(joint: Joint, residuals: Nodes, name: str) -> None:
    """Raise StageError for residuals whose memory cannot be counted before a step runs: sparse tensors."""
    if not all(map(is_dense, set(map(root, residuals)) - set(joint.params))):
        raise StageError(
            name,
            "its backward needs a sparse tensor that its forward makes, whose size is not known without"
            " values",
            f'use graph(remat="full"), which makes it again, or {other_engine("functional")}',
        )


# -- what the backward computes again

Predicate = Callable[[OpOverload, int], bool]
"""From an operator, and how many calls of it came before, to: compute its results again?"""

Choice = Literal["cheap", "none", "full"] | Predicate
Remat = Choice | Mapping[str, Choice]
"""``"cheap"`` computes again what saves most, for 1% of the work of a step; ``"none"`` nothing; ``"full"``
keeps what enters blocks alone; a predicate chooses operators; a mapping chooses by the names of modules."""

aten = torch.ops.aten
_NORMS = {"native_layer_norm", "_fused_rms_norm", "_to_copy"}
_FORWARDS = 2.0  # that W computes at most to hold nothing
_SHARE = 0.01  # of the work of a step, that is computed again by default
_IN_FLIGHT = 4  # microbatches that a stage keeps at once, supposed where blocks are chosen
# Units of work per number that a kernel writes: multiplications in the same time, on the CPU and elsewhere.
_ON_CPU, _ELSEWHERE, _COMMUNICATED = 50.0, 500.0, 1000.0


def cut_for(joint: Joint, remat: Remat, name: str, params: Iterable[str] = ()) -> ProgramBlocks:
    """Cut the trace so that the backward computes again as ``remat`` says.

    Results of random operators are always kept. No operator runs more than twice; with ``"full"``, where W
    computes again what it would get from I, no more than three times.

    Args:
        joint: the trace.
        remat: see :func:`~ppfunc.stage.graph`.
        name: the name of the stage in errors.
        params: the names of the parameters.

    Raises:
        StageError: a pattern names nothing.

    References:
        Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    if isinstance(remat, Mapping):
        return _by_place(joint, remat, name, dict(zip(joint.params, params, strict=True)))
    if remat == "cheap":
        return _cheap(joint, set(), repeatable(joint))
    again = set[Node]()
    if remat == "full":
        again = repeatable(joint) - _boundaries(joint)
        return cut(joint, again, _twice(joint, again))
    return cut(joint, _asked(joint, filter(is_call, early_nodes(joint)), remat) if callable(remat) else ())


def _source(node: Node) -> Node:
    """Return the call that makes the result of a node: for a wait, the collective."""
    while is_element(node) or is_wait(node):
        node = node.all_input_nodes[0]
    return node


def _operator(node: Node) -> OpOverload:
    """Return the operator that makes the result of a node."""
    operator = _source(node).target
    assert isinstance(operator, OpOverload)
    return operator


def _asked(joint: Joint, calls: Iterable[Node], predicate: Predicate) -> set[Node]:
    """Choose the calls, and the views of their results, for which a predicate is true."""
    calls, counts, chosen = sorted(calls), Counter[OpOverload](), set[Node]()
    for node in calls:
        if _source(node) is node:
            operator = _operator(node)
            if predicate(operator, counts[operator]):
                chosen.add(node)
            counts[operator] += 1
    return {n for n in calls if _source(root(n)) in chosen} & repeatable(joint)


def _by_place(joint: Joint, remat: Mapping[str, Any], name: str, params: Mapping[Node, str]) -> ProgramBlocks:
    """Compute again the choice for each module or parameter; elsewhere cheap results."""
    early = early_nodes(joint)
    again, full, cheap = set[Node](), set[Node](), repeatable(joint)
    for pattern, calls in _stretches(sorted(filter(is_call, early)), remat, params, name):
        choice = remat[pattern]
        if choice != "cheap":
            cheap -= calls
        if choice == "full":
            leaving = {operator_of(n) for n in calls if not calls.issuperset(early.intersection(n.users))}
            full |= {n for n in calls if operator_of(n) not in leaving}
        elif callable(choice):
            again |= _asked(joint, calls, choice)
    again |= full & repeatable(joint)
    return _cheap(joint, again, cheap, _twice(joint, again) if full else set())


def _stretches(
    calls: Sequence[Node], patterns: Collection[str], params: Mapping[Node, str], stage: str
) -> Iterator[tuple[str, set[Node]]]:
    """Group the calls of a forward by the modules that patterns name; calls of submodules count.

    In a stage without modules, calls are grouped by the parameters: a call belongs to the parameter that it
    reads, or else to the parameter that was read last.

    Args:
        calls: the calls, in order.
        patterns: patterns, the first that matches counts.
        params: the names of the parameters, such as ``h.3.w``.
        stage: the name of the stage in errors.

    Yields:
        A pattern, and calls of one place that follow one another.

    Raises:
        StageError: a pattern matches no name.
    """
    modules = [operator_of(n).meta.get("module") for n in calls]
    known = {name for module in modules if module is not None for name in module.names.values() if name}
    if of_modules := bool(known):
        paths = ["" if module is None else module.name for module in modules]
    else:
        known = {prefix for name in params.values() for prefix in _prefixes(name)}
        paths = list[str]()
        for call in calls:
            last = paths[-1] if paths else ""
            paths.append(next((params[n] for n in call.all_input_nodes if n in params), last))
    for one in (one for pattern in patterns for one in pattern.split("|")):
        if not any(first_match(name, [one]) for name in known):
            names = limited(", ".join(sorted(known)), 300)
            raise StageError(
                stage,
                f"remat: got {one!r}, expected names of {'modules' if of_modules else 'parameters'}: {names}",
                "correct the pattern, or give the stages that have such names an engine of their own",
            )

    def named(path: str) -> tuple[str, str]:
        inside = [prefix for prefix in _prefixes(path) if prefix in known]
        return next(((p, name) for p in patterns for name in inside if first_match(name, [p])), ("", ""))

    for (pattern, _), group in groupby(zip(map(named, paths), calls, strict=True), key=lambda pair: pair[0]):
        if pattern:
            yield pattern, {call for _, call in group}


def _prefixes(path: str) -> Iterator[str]:
    """Yield the names on the way to a place.

    >>> list(_prefixes("h.0.mlp"))
    ['h', 'h.0', 'h.0.mlp']
    """
    return accumulate(path.split("."), "{}.{}".format)


def repeatable(joint: Joint) -> set[Node]:
    """Find the calls of F that may run again: all but random ones and their results."""
    calls = filter(is_call, early_nodes(joint))
    return {n for n in calls if not is_random(operator_of(n))}


def _boundaries(joint: Joint) -> set[Node]:
    """Choose the results of the forward that are kept, so that the backward computes again a block at a time.

    The forward is cut where little crosses: what is kept of `_IN_FLIGHT` microbatches, and what the largest
    block keeps for its backward, are least together.
    """
    calls, may_repeat = sorted(filter(is_call, early_nodes(joint))), repeatable(joint)
    if not calls:
        return set()
    places = {node: n for n, node in enumerate(calls)}
    last = {a: n for n, node in enumerate(calls) for a in node.all_input_nodes}
    inner = [n for n in calls if is_tensor(n) and {n, root(n)} <= may_repeat]
    needed = set(map(root, cut(joint).residuals))
    sizes, crossing = [0.0] * len(calls), [dict[int, float]() for _ in calls]  # by the place of the owner
    for node in inner:
        owner = places[root(node)]
        size = _size(node)
        sizes[owner] = size if root(node) in needed and size < math.inf else 0
        for n in range(places[node], last.get(node, 0)):
            crossing[n][owner] = size
    held = [0.0, *accumulate(sizes)]
    total = [sum(each.values()) for each in crossing]
    ends = [n for n, after in enumerate(calls[1:]) if not is_element(after)]
    ends = [a for a, b in pairwise([*ends, len(calls) - 1]) if total[a] < total[b]] + [len(calls) - 1]

    def cheapest(most: float) -> tuple[float, tuple[int, ...]]:
        """Choose the ends of blocks that need at most ``most`` bytes; return kept bytes and ends."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {-1: (0, ())}
        for end in ends:
            starts = [b for b in best if held[end + 1] - held[b + 1] <= most]
            each = ((best[b][0] + sum(size for n, size in crossing[end].items() if n > b), b) for b in starts)
            size, start = min(each, default=(math.inf, -1))
            best[end] = size, (*best[start][1], end)
        return best[ends[-1]]

    choices, most = [], held[-1]
    while (choice := cheapest(most))[0] < math.inf:
        most = max(held[b + 1] - held[a + 1] for a, b in pairwise((-1, *choice[1])))
        choices.append((_IN_FLIGHT * choice[0] + most, choice[1]))
        most = 0.9 * most - 1
    kept = {operator_of(n) for n in inner for end in min(choices)[1] if places[n] <= end < last.get(n, 0)}
    return {n for n in calls if operator_of(n) in kept}


def _twice(joint: Joint, again: set[Node]) -> set[Node]:
    """Choose the operators of I that W computes itself, so that little is held between the two.

    They are those of the forward, and those that make gradients whose bytes are worth it: at a price of
    `_FORWARDS` forwards for all bytes that W would get from I.
    """
    pure = {n for n in cut(joint, again).backward_input.body if not (is_effect(n) or is_wait(n))}
    twice = pure & again
    blocks = cut(joint, again, twice)
    held, body = blocks.backward_weight.arguments[0], set(blocks.backward_weight.body)
    price = _FORWARDS * sum(map(work_of, blocks.forward.body)) / max(_total(joint, held), 1)
    return twice | _chosen(joint, held, pure, body, price=price)


def _cheap(joint: Joint, again: set[Node], inside: set[Node], twice: Iterable[Node] = ()) -> ProgramBlocks:
    """Compute again results of elementwise operators and norms on values that are kept anyway.

    That is at most `_SHARE` of the work of a step, and of what saves most for its work.

    Args:
        again, twice: calls that run again beside that, see :func:`cut`.
        inside: calls of which some may run again.
    """
    blocks = cut(joint, again, twice)
    cheap = {
        n
        for n in inside
        if base(n) is not None
        or torch.Tag.pointwise in (target := _operator(n)).tags
        or schema(target).name.removeprefix("aten::") in _NORMS
    }
    most = _SHARE * sum(map(work_of, filter(is_call, joint.graph.nodes)))
    more = _chosen(joint, blocks.residuals, cheap, again, most=most)
    if not more:
        return blocks
    late = cut(joint, again | more, twice)
    held, handed = (_total(joint, each.backward_weight.arguments[0]) for each in (blocks, late))
    # W may need more to compute something again than that has bytes: I then does.
    return late if handed <= held else cut(joint, again | more, twice, ahead=more)


def _chosen(
    joint: Joint,
    held: Nodes,
    inside: set[Node],
    body: set[Node],
    price: float = math.inf,
    most: float = math.inf,
) -> set[Node]:
    """Choose results to compute instead of holding them: the most saved bytes for their work first.

    Args:
        held: the results that are held.
        inside: the calls that may run.
        body: the calls that run anyway.
        price: the most work per byte saved.
        most: the most work.
    """
    there, free = {*map(root, held), *joint.params}, inside - body - set(held)
    owners, chosen = dict[Node, set[Node]](), set[Node]()
    for node in held:
        owners.setdefault(root(node), set()).add(node)

    def anew(owner: Node) -> tuple[float, float, set[Node]]:
        """Find the work to compute a storage, the bytes saved, and the calls."""
        cone = ancestors(owners[owner], free | owners[owner])
        reads = {root(a) for n in cone for a in n.all_input_nodes if a.op != "get_attr"}
        more = sum(map(_size, reads - cone - body - chosen - there))
        return sum(map(work_of, cone)), _size(owner) - more if owner in cone else 0, cone

    dear = {n: work / max(saved, 1) for n in owners if n in inside for work, saved, _ in [anew(n)]}
    for owner in sorted(dear, key=dear.__getitem__):
        work, saved, cone = anew(owner)
        if saved > 0 and work <= min(price * saved, most):
            most -= work
            chosen |= cone
            free -= cone
    return chosen


def _total(joint: Joint, held: Nodes) -> float:
    """Count the bytes of storages, each once, without the storages of parameters."""
    return sum(map(_size, set(map(root, held)) - set(joint.params)))


def _size(node: Node) -> float:
    """Return the bytes of the storage of a node, infinite for a sparse tensor."""
    owner = root(node)
    return _bytes(owner.meta["val"]) if is_dense(owner) else math.inf


def work_of(node: Node) -> float:
    """Estimate the work of a call: its multiplications and additions, or a few units per number written.

    A collective counts many per number.
    """
    if is_element(node) or base(node) is not None:
        return 0.0
    value, read = node.meta["val"], torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = cast("tuple[Any, dict[str, Any]]", read)
    made = [t for t in optree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    written = estimate(sum(t.numel() for t in made))
    each = _ON_CPU if all(t.device.type == "cpu" for t in made) else _ELSEWHERE
    work = (_COMMUNICATED if is_collective(_operator(node)) else each) * written
    return work + float(estimate(flops_of(_operator(node).overloadpacket, args, kwargs, value)))


# -- how long storages live, and where gradients are added up

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

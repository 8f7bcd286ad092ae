"""Cut a trace into stages, find the values that cross, and write the code of each stage. Keep the code for
every form of the inputs.
"""

import fnmatch
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from hashlib import sha256
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Node

from ppfunc.stage import StageError
from ppfunc.stage._torch import OpOverload, transforms, without_modes
from ppfunc.stage.abstract.captures import Watch, ambient
from ppfunc.stage.device import autocast
from ppfunc.stage.engines.tracing.cut import Block
from ppfunc.stage.engines.tracing.emit import OperatorCall, Recipe, write
from ppfunc.stage.engines.tracing.graph import is_check, is_view, named_arguments
from ppfunc.stage.operators import draws
from ppfunc.stage.process import process_lock
from ppfunc.stage.signature import differentiable
from ppfunc.stage.transforms import refuse_as_strided
from ppfunc.stage.tree import PLAIN, register_leafless

from .cache import CacheForm
from .call import MODEL, CallForm, Constants, LeafForm
from .record import BY_HAND, Region, within
from .trace import Trace, trace

aten = torch.ops.aten
_MOST = 32  # forms of inputs whose code is kept, for each call at the split
Leaves = tuple[Tensor, ...]
_CASTS = {
    aten.contiguous.default,
    aten._to_copy.default,
    *(getattr(aten.to, name) for name in aten.to.overloads()),
}


class StagePart(NamedTuple):
    """Describe one stage of a trace.

    Args:
        body: the operators of the stage in order, with operators of earlier stages that it computes again.
        params: the parameters that it reads.
        constants: the buffers that it reads, and no stage writes.
        state: the buffers of its state; of each the node that is its new value.
        received: the values that it takes from each earlier stage.
        sent: the values that each later stage takes from it.
        carried: the tensors of the cache of the slice before that it holds.
        kept: the tensors of the new cache that it makes.
    """

    body: tuple[Node, ...]
    params: tuple[str, ...]
    constants: tuple[str, ...]
    state: Mapping[str, Node]
    received: Mapping[int, tuple[Node, ...]]
    sent: Mapping[int, tuple[Node, ...]]
    carried: tuple[Node, ...]
    kept: tuple[Node, ...]


def cut(trace: Trace, stages: int, state: Mapping[str, int], encoder: int = -1) -> tuple[StagePart, ...]:
    """Cut a trace.

    Args:
        trace: the trace of the model.
        stages: the number of stages.
        state: the stages of buffers that are state whether this trace writes into them or not.
        encoder: the last stage, where it takes inputs alone and earlier stages take its values; else -1.

    Raises:
        StageError: the model writes into a parameter, into one buffer in several stages, or in one stage into
            memory that another has made; or the encoder reads a buffer that another stage writes into.
    """
    homes = {**state, **state_buffers(trace)}
    cutter = _Cutter(trace, homes, encoder)
    _require_homes(cutter, state)
    chained = range(stages - (encoder > 0))
    order = [*reversed(chained), *range(len(chained), stages)]  # readers before what they read
    parts = {stage: cutter.part(stage, stage == chained[-1]) for stage in order}
    if encoder > 0 and parts[encoder].received:
        raise StageError(
            MODEL, "its encoder reads a buffer that another stage writes into", "split it without encoder="
        )
    return tuple(parts[stage] for stage in range(stages))


def state_buffers(trace: Trace) -> dict[str, int]:
    """Find the buffers that the trace writes into or replaces, each with its stage."""
    homes: dict[str, set[int]] = {name: {node.meta["stage"]} for name, node in trace.replaced.items()}
    at = {memory: name for name, node in trace.buffers.items() for memory in storages_of(node)}
    for node in trace.nodes:
        for name in sorted({at[memory] for memory in node.meta["writes"] if memory in at}):
            homes.setdefault(name, set()).add(node.meta["stage"])
    for name, stages in homes.items():
        if len(stages) > 1:
            raise StageError(
                MODEL,
                f"its buffer {name} is written in the stages {', '.join(map(str, sorted(stages)))}, and is"
                " the state of one",
                "cut elsewhere, or give each stage a module of its own",
            )
    return {name: stage for name, (stage,) in homes.items()}


def readers(trace: Trace, places: Mapping[str, Node]) -> dict[str, int]:
    """Find the first stage that reads each of some tensors of the model.

    Args:
        trace: the trace of the model.
        places: the nodes of the tensors, by name; others than these are left out.
    """
    names, first = {node: name for name, node in places.items()}, dict[str, int]()
    for node in trace.nodes:
        for name in (names[n] for n in node.all_input_nodes if n in names):
            first.setdefault(name, int(node.meta["stage"]))
    return first


def _require_homes(cutter: "_Cutter", state: Mapping[str, int]) -> None:
    """Raise unless every memory that is written into is written by the stage that makes it."""
    for name, stage in state.items():
        if (home := cutter.homes[name]) != stage:
            raise StageError(
                MODEL,
                f"its buffer {name} is the state of stage {stage}, and is written in stage {home}",
                "split again",
            )
    for at, writers in cutter.writers_of.items():
        maker, (writer, *_) = cutter.maker[at], writers
        if maker in cutter.param_of:
            raise StageError(
                MODEL,
                f"it writes into its parameter {cutter.param_of[maker]}{writer.meta['place']}",
                f"return a new value, or {BY_HAND}",
            )
        if maker.op == "get_attr":
            raise StageError(
                MODEL,
                f"it writes into a tensor that is neither a parameter nor a buffer{writer.meta['place']}",
                "register it as a buffer",
            )
        if maker in cutter.buffer_of or writer in cutter.cheap:
            continue
        home = maker.meta["stage"]
        for writer in (w for w in writers if w.meta["stage"] != home):
            raise StageError(
                MODEL,
                f"its stage {writer.meta['stage']} writes into memory that stage {home} has"
                f" made{writer.meta['place']}",
                "cut elsewhere, ppfunc.split(model, args, at=names), or make a new tensor there",
            )


class _Cutter:
    """Follows dependencies back from the results of each stage, the last stage first.

    Args:
        trace: the trace of the model.
        homes: the buffers that belong to the state of a stage, each with its stage.
        encoder: the stage that takes inputs beside the first.

    Attributes:
        param_of, buffer_of: the names of the nodes of tensors of the model.
        cheap: the nodes that may run again anywhere: nothing random, no parameter, no state, no input that is
            floating, or that the model writes into.
        maker: the node that makes a memory first.
        writers_of: the nodes that write into each memory.
        wanted: the values that a stage has, by the stage that takes them.
    """

    def __init__(self, trace: Trace, homes: Mapping[str, int], encoder: int) -> None:
        places = (*trace.params.values(), *trace.buffers.values(), *trace.inputs, *trace.carried)
        nodes = (*places, *trace.nodes)
        self.trace, self.homes, self.encoder = trace, homes, encoder
        self.wanted: dict[int, dict[int, set[Node]]] = {}
        self.param_of = {node: name for name, node in trace.params.items()}
        self.buffer_of = {node: name for name, node in trace.buffers.items()}
        self.maker: dict[int, Node] = {}
        self.writers_of: dict[int, list[Node]] = {}
        for node in nodes:
            for at in storages_of(node):
                self.maker.setdefault(at, node)
            for at in node.meta["writes"]:
                self.writers_of.setdefault(at, []).append(node)
        dear = {*trace.params.values(), *trace.carried, *(trace.buffers[name] for name in homes)}
        dear |= {
            n
            for n in trace.inputs
            if differentiable(n.meta["value"].dtype) or not self.writers_of.keys().isdisjoint(storages_of(n))
        }
        self.cheap = self._cheap(nodes, dear)

    def writers(self, node: Node) -> list[Node]:
        """List the nodes that write into memory before this node reads the memory."""
        return [w for at in node.meta["reads"] for w in self.writers_of.get(at, ()) if w < node]

    def all_writers(self, node: Node) -> list[Node]:
        """List the nodes that write into the memory of this node, at any time."""
        return [w for at in storages_of(node) for w in self.writers_of.get(at, ())]

    def _cheap(self, nodes: Sequence[Node], dear: set[Node]) -> set[Node]:
        """Find the nodes that depend on no ``dear`` node, and share no memory with any."""
        memories: set[int] = set()
        while True:
            before = len(dear), len(memories)
            for node in nodes:
                touched = storages_of(node) | node.meta["writes"] | node.meta["reads"]
                if node not in dear and (
                    is_random(node)
                    or not dear.isdisjoint(node.all_input_nodes)
                    or not memories.isdisjoint(touched)
                ):
                    dear.add(node)
                if node in dear:
                    memories |= storages_of(node) | node.meta["writes"]
            if before == (len(dear), len(memories)):
                return set(nodes) - dear

    def part(self, stage: int, last: bool) -> StagePart:
        """Cut out the part of a stage. Those of all later stages have been cut."""
        state = {
            name: self.trace.replaced.get(name, self.trace.buffers[name])
            for name, home in self.homes.items()
            if home == stage
        }
        sent = self.wanted.pop(stage, {})
        kept = tuple(node for node in self.trace.kept if node.meta["stage"] == stage)
        roots = [node for nodes in sent.values() for node in nodes] + [*state.values(), *kept]
        roots += [r for r in self.trace.results if isinstance(r, Node)] if last else []
        roots += [w for node in roots for w in self.all_writers(node) if w.meta["stage"] == stage]
        roots += [n for n in self.trace.nodes if n.meta["stage"] == stage and (is_random(n) or is_check(n))]
        here, taken = self._follow(roots, stage)
        for source, nodes in taken.items():
            self.wanted.setdefault(source, {})[stage] = nodes
        return StagePart(
            tuple(sorted(n for n in here if n.op == "call_function")),
            tuple(self.param_of[n] for n in sorted(here & self.param_of.keys())),
            tuple(
                self.buffer_of[n]
                for n in sorted(here & self.buffer_of.keys())
                if self.buffer_of[n] not in self.homes
            ),
            state,
            {source: tuple(sorted(nodes)) for source, nodes in sorted(taken.items())},
            {destination: tuple(sorted(nodes)) for destination, nodes in sorted(sent.items())},
            tuple(node for node in self.trace.carried if node.meta["stage"] == stage),
            kept,
        )

    def _follow(self, roots: Iterable[Node], stage: int) -> tuple[set[Node], dict[int, set[Node]]]:
        """Find the nodes that a stage computes itself, and the nodes that it takes from earlier stages."""
        here: set[Node] = set()
        taken: dict[int, set[Node]] = {}
        todo = list(roots)
        while todo:
            node = todo.pop()
            if node in here:
                continue
            source = self._source(node, stage)
            if source != stage:
                taken.setdefault(source, set()).add(node)
                continue
            here.add(node)
            todo += node.all_input_nodes
            todo += [w for w in self.writers(node) if w in self.cheap or w.meta["stage"] == stage]
        return here, taken

    def _source(self, node: Node, stage: int) -> int:
        """Find the stage that a stage gets a node from: itself, or an earlier one."""
        name = self.buffer_of.get(node, "")
        home = node.meta["stage"] if node in self.trace.carried else self.homes.get(name)
        if home is not None:
            if home > stage:
                what = f"buffer {name}, the state" if name else "cache, a tensor"
                raise StageError(
                    MODEL,
                    f"its {what} of stage {home}, is read in the earlier stage {stage}",
                    "cut elsewhere",
                )
            return int(home)
        if node in self.param_of or node in self.buffer_of or node.op == "get_attr":
            return stage
        if node.op == "placeholder":
            return stage if stage == self.encoder else 0
        if node in self.cheap:
            return stage
        if node.target is aten.as_strided.default:
            # It depends on how its memory was made, which a message does not tell.
            return self._source(self.maker[node.meta["value"].storage], stage)
        # A view or a cast is done after its argument has crossed.
        after = is_view_or_cast(node) and not self.all_writers(node) and not self._of_parameter(node)
        return stage if after else int(node.meta["stage"])

    def _of_parameter(self, node: Node) -> bool:
        (source,) = node.all_input_nodes
        return source in self.param_of or (is_view_or_cast(source) and self._of_parameter(source))


def is_random(node: Node) -> bool:
    """Tell whether the node may draw random numbers.

    Dropout and recurrent layers do so in training, with a rate above zero. Of an operator that is not torch's
    own, the schema does not say what else it does.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return "opaque" in node.meta
    if node.target.namespace not in ("aten", "prims"):
        return True
    arguments = named_arguments(node.target, node.args, node.kwargs)
    switches = ("train", "training", *(["p", "dropout"] if "train" in arguments else []))
    return draws(node.target, node.args, node.kwargs) and all(arguments.get(name, True) for name in switches)


def storages_of(node: Node) -> frozenset[int]:
    """List the memories of the results of a node."""
    value: Any = node.meta.get("value")
    return frozenset() if value is None or value.storage is None else frozenset([value.storage])


def is_view_or_cast(node: Node) -> bool:
    """Tell whether the node is a view or a cast of one tensor, and no smaller than it."""
    if (
        node.op != "call_function"
        or not isinstance(node.target, OpOverload)
        or len(node.all_input_nodes) != 1
    ):
        return False
    (source,) = node.all_input_nodes
    if (
        "value" not in source.meta
        or "value" not in node.meta
        or not node.meta["region"].grad
        or node.meta["writes"]
    ):
        return False
    smaller = source.meta["value"].nbytes > node.meta["value"].nbytes
    return not smaller and (is_view(node.target) or node.target in _CASTS)


# -- the code of a stage: what it receives, sends and returns


class StageCode(NamedTuple):
    """Hold the code of one stage for one form of its inputs.

    Args:
        part: the stage.
        frozen: the names of its parameters that get no gradient.
        dtypes: the dtypes of the values that it takes.
        cache: the form of the new cache; None without slices.
        run: ``(params, constants, state, inputs, carried, received) -> (sent, new state, kept, result)``; the
            result is that of the model in the last stage, and None in others.
    """

    part: StagePart
    frozen: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    cache: CacheForm | None
    run: Callable[..., tuple[dict[int, Leaves], dict[str, Tensor], Leaves, Any]]


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
    trace: Trace, parts: Sequence[StagePart], around: Region, mapped: bool, encoder: int = -1
) -> tuple[StageCode, ...]:
    """Write the code of every stage.

    Args:
        trace: the trace of the model.
        parts: the stages that it is cut into.
        around: the region in which stages are called; operators of others are called in theirs.
        mapped: whether a ``vmap`` is active. It hides by what attention chooses its kernel, such as the
            gradient of the mask.
        encoder: see :func:`cut`.
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
        if region != around:
            node.meta["within"] = contexts.setdefault(region, partial(within, region, around))
    last = len(parts) - 1 - (encoder > 0)
    return tuple(
        _code(trace, part, stage, stage in (0, encoder), stage == last) for stage, part in enumerate(parts)
    )


def _attention(order: tuple[int, ...] | None, *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention by its scores as a matrix, in the order of memory of the kernel that was traced."""
    y = aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    return y if order is None else y.permute(order).contiguous().permute(*map(order.index, range(y.ndim)))


def _code(trace: Trace, part: StagePart, stage: int, first: bool, last: bool) -> StageCode:
    inputs = trace.inputs if first else ()
    taken = tuple(node for nodes in part.received.values() for node in nodes)
    results = tuple(dict.fromkeys(r for r in trace.results if isinstance(r, Node))) if last else ()
    sent = tuple(node for nodes in part.sent.values() for node in nodes)
    arguments = (
        *(trace.params[name] for name in part.params),
        *(trace.buffers[name] for name in (*part.constants, *part.state)),
        *inputs,
        *part.carried,
        *taken,
    )
    code = Block((arguments,), part.body, (sent, tuple(part.state.values()), part.kept, results))
    run = write(Recipe(code, ("values",), f"stage {stage} of a split run"))
    writes = frozenset(at for node in part.body for at in node.meta["writes"])
    copied = [i for i, node in enumerate(arguments) if not writes.isdisjoint(storages_of(node))]
    # Of a tensor its node.
    leaves = [
        r if isinstance(r, Node | NotKept) or type(r) in PLAIN else NotKept(type(r)) for r in trace.results
    ]
    arriving, leaving = ([_memory_order(node) for node in nodes] for nodes in (taken, sent))
    # From the order of a message back to that of its axes.
    arriving = [order and tuple(map(order.index, range(len(order)))) for order in arriving]

    def call(*given: Leaves) -> Any:
        *held, received = given
        values = [*chain.from_iterable(held), *map(_permuted, received, arriving)]
        for i in copied:
            values[i] = values[i].clone()
        sent_values, new_state, kept, tensors = run(values)
        messages = map(_permuted, sent_values, leaving)
        out = {to: tuple(islice(messages, len(nodes))) for to, nodes in part.sent.items()}
        states = {name: t.detach() for name, t in zip(part.state, new_state, strict=True)}
        made: dict[Any, Any] = dict(zip(results, tensors, strict=True))
        result = trace.treedef.unflatten([made.get(r, r) for r in leaves]) if last else None
        return out, states, tuple(t.contiguous() for t in kept), result

    return StageCode(
        part,
        frozenset(part.params) & trace.frozen,
        tuple(node.meta["value"].dtype for node in taken),
        trace.cache and trace.cache._replace(homes=tuple(node.meta["stage"] for node in trace.kept)),
        call,
    )


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


# -- the code of all stages, for every form of the inputs


class Source:
    """Keeps the code of a model's stages, from the model, the forms of its calls and its cuts.

    Args:
        model: any module.
        names: the modules that begin the stages after the first.
        known: the arguments whose values belong to the form of a call.
        calls: the calls at the split: the form of each, the forms of its tensors, and its trace.
        device: the device of the stages.
        state: patterns of names of buffers that are state, though the model only reads them.
        cache: the argument in which the model gets its cache; the calls are then slices of one sequence.
        tower: the module that is the encoder; empty without.
        output: the last of the names, if its stage makes the only results that are kept; empty without.

    Raises:
        StageError, ValueError: the model cannot be cut there, or a pattern names no buffer that is read.

    Attributes:
        forms: the forms of the calls at the split.
        held: the parameters, buffers and sources of each stage in any of these calls, which all other code
            has to fit.
        encoder: the number of the stage of the tower, behind all others; -1 without.
        last: the number of the stage that returns the results.
        loaded: the buffers to be read in the place of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        known: Constants,
        calls: Sequence[tuple[CallForm, Sequence[LeafForm], Trace]],
        device: torch.device,
        state: Sequence[str],
        cache: str,
        tower: str = "",
        output: str = "",
    ) -> None:
        self.model, self.names, self.known, self.cache = model, tuple(names), known, cache
        self.tower, self.output = tower, output
        self.forms = tuple(form for form, _, _ in calls)
        self.stages = len(names) + 1 + bool(tower)
        self.encoder = self.stages - 1 if tower else -1
        self.last = len(names)
        self.loaded: dict[str, Tensor] = {}
        self._inputs = tuple(inputs for _, inputs, _ in calls)
        self._readers: dict[str, int] = {}  # the first stage that reads each parameter
        self._homes: dict[str, int] = {}  # the stages of buffers that are state
        self._codes: OrderedDict[Hashable, tuple[StageCode, ...]] = OrderedDict()
        self._watch = Watch(model)
        self._moved: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        traces = [traced for _, _, traced in calls]
        for name in filter(None, (*names, tower)):
            if all(name not in traced.starts for traced in traces):
                raise ValueError(
                    f"{'encoder' if name == tower else 'at'}: the module {name} is not called, or calls no"
                    " operator; name another one, or the modules within it"
                )
        read: dict[str, int] = {}
        for traced in sorted(traces, key=lambda t: len(t.starts.keys() & {*names}), reverse=True):
            self._label(traced)
            self._readers = readers(traced, traced.params) | self._readers
            read = readers(traced, traced.buffers) | read
            self._homes = state_buffers(traced) | self._homes
        for pattern in state:
            if not (named := fnmatch.filter(read, pattern)):
                raise ValueError(
                    f"state: {pattern!r} is no name of a buffer that the model reads, which are"
                    f" {', '.join(read) or 'none'}"
                )
            self._homes = {name: read[name] for name in named} | self._homes
        self.held: tuple[Footprint, ...] = ()
        codes: list[tuple[StageCode, ...]] = []
        for form, inputs, traced in calls:
            before = codes[-1][0].cache if cache and codes else None
            codes.append(self.codes(form, inputs, device, traced, before=before))
        self.held = tuple(map(Footprint.of, zip(*codes, strict=True)))

    def _label(self, traced: Trace) -> None:
        """Give each operator its stage: of the tower, and of all that it depends on, the encoder."""
        _label_stages(self.names, traced, {n: s for n, s in self._readers.items() if s != self.encoder})
        found, read = set[Node](), frozenset[int]()
        for node in reversed(traced.nodes if self.tower else ()):
            module = node.meta.get("module")
            inside = module is not None and is_within(module.name, self.tower)
            if inside or node in found or not read.isdisjoint(node.meta["writes"]):
                node.meta["stage"] = self.encoder
                found.update(node.all_input_nodes)
                read |= node.meta["reads"]

    def with_buffers(self, loaded: Mapping[str, Tensor]) -> "Source":
        """Return the source of the same code with other buffers."""
        other = copy(self)
        other.loaded = {**self.loaded, **loaded}
        return other

    def require_output_layer(self) -> None:
        """Raise StageError unless the last stage is a linear layer, and functions of each of its results."""
        mend = 'name the output layer, ppfunc.split(model, args, at=..., output="lm_head"), without labels'
        for codes in self._codes.values():
            found = _beside_output_layer(codes[self.last].part, self.last - 1)
            if found:
                raise StageError(f"the last stage, at {self.names[-1]}" if self.names else MODEL, found, mend)

    @property
    def cut(self) -> str:
        """Name the model, its cuts, and a digest of the names that its stages hold: the same on all ranks."""
        held = sha256(repr([(code.params, code.state) for code in self.held]).encode()).hexdigest()[:16]
        return f"{type(self.model).__name__} cut at {', '.join(self.names) or 'no module'} ({held})"

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """List the pairs of stages between which values travel that are not neighbours."""
        pairs = ((a, b) for b, held in enumerate(self.held) for a in held.received)
        return tuple(sorted((a, b) for a, b in pairs if a != b - 1))

    def codes(
        self,
        form: CallForm,
        inputs: Sequence[LeafForm],
        device: torch.device,
        traced: Trace | None = None,
        compute: torch.dtype | None = None,
        before: CacheForm | None = None,
    ) -> tuple[StageCode, ...]:
        """Return the code of every stage for a call with inputs of these forms.

        Args:
            form: the form of the call.
            inputs: the forms of its tensors.
            device: the device of the stages.
            traced: the trace of the model for them, by default made here.
            compute: the dtype of all floating parameters, by default that of each in the model.
            before: the form of the cache that the slice before has left, None in the first slice.

        Raises:
            StageError: the model cannot be traced, or the stages would not be those of the split.
        """
        mapped = "Vmap" in transforms()  # an unmapped tensor cannot be written into by a mapped one
        key = (
            *inputs,
            device,
            compute,
            mapped,
            form.key,
            before,
            self._watch.state(),
            tuple((p.requires_grad, p.dtype) for p in self.model.parameters()),
            ambient(),
        )
        with process_lock:
            if key not in self._codes:
                if traced is None:
                    traced = self._trace(form, inputs, device, compute, mapped, before)
                self._label(traced)
                if self.output:
                    results = tuple(
                        NotKept(Tensor) if isinstance(r, Node) and r.meta.get("stage") != self.last else r
                        for r in traced.results
                    )
                    traced = traced._replace(results=results)
                for node, home in zip(traced.carried, before.homes if before else (), strict=True):
                    node.meta["stage"] = home
                parts = cut(traced, self.stages, self._homes, self.encoder)
                _require_fit(self.held, parts)
                around = Region(True, autocast())
                self._codes[key] = stage_codes(traced, parts, around, mapped, self.encoder)
                while len(self._codes) > _MOST * len(self.forms):
                    self._codes.popitem(last=False)
            self._codes.move_to_end(key)
            return self._codes[key]

    def compute_dtype(
        self, params: Mapping[str, Tensor], before: torch.dtype | None, stage: int
    ) -> torch.dtype | None:
        """Find the dtype to which a step casts all floating parameters.

        Args:
            params: the parameters of a stage.
            before: the dtype that was found in the stage before.

        Returns:
            The dtype; None where each parameter has the dtype of the model.

        Raises:
            StageError: only some have another dtype than in the model.
        """
        dtypes = {name: self.model.get_parameter(name).dtype for name in params}
        floating = {name: params[name].dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
        differ = any(got != dtypes[name] for name, got in floating.items())
        cast = next(iter(floating.values())) if differ else before
        for name, got in floating.items():
            if cast is not None and (got != cast or before not in (None, cast)):
                raise StageError(
                    f"stage {stage}",
                    f"its parameter {name} has the dtype {got}, and others have been cast to"
                    f" {before or cast}",
                    "cast all floating parameters to one dtype, or none of them",
                )
        return cast

    def buffer(self, name: str, device: torch.device, stage: int) -> Tensor:
        """Return the values of a read-only buffer on a device.

        Raises:
            StageError: the buffer is on the device meta.
        """
        buffer = self.loaded[name] if name in self.loaded else self.model.get_buffer(name)
        if buffer.device == device:
            return buffer.detach()
        if buffer.is_meta:
            raise StageError(
                f"stage {stage}",
                f"the buffer {name} of the model is on the device meta, it has no values",
                "load them by split.load, or assign the values to the buffer of the model",
            )
        with process_lock, without_modes():
            before, moved = self._moved.get((name, device), (None, None))
            if moved is None or before is not buffer:
                moved = buffer.detach().to(device)
                self._moved[name, device] = buffer, moved
            return moved

    def _trace(
        self,
        form: CallForm,
        inputs: Sequence[LeafForm],
        device: torch.device,
        compute: torch.dtype | None,
        mapped: bool,
        before: CacheForm | None,
    ) -> Trace:
        try:
            return trace(self.model, form, inputs, device, compute, mapped, self.cache, before)
        except StageError as error:
            calls = [*zip(self.forms, self._inputs, strict=True)]
            got, known = _without_rows(form, inputs), [_without_rows(*call) for call in calls]
            if got in known:
                raise
            expected = " or ".join(call.described(leaves) for call, leaves in calls)
            raise StageError(
                error.stage,
                f"called with {form.described(inputs)}, where the split had {expected}, {error.reason}",
                "give inputs of the form at the split, several microbatches as ppfunc.Microbatches([...]); or"
                " split with one example of each form, ppfunc.split(model, ppfunc.Microbatches([...]))",
            ) from error


def _beside_output_layer(part: StagePart, before: int) -> str:
    """Describe the first operator of a stage beside a linear layer and functions of each logit."""
    given = [node for nodes in part.received.values() for node in nodes]
    weights = {n for node in part.body for n in node.all_input_nodes} - {*part.body, *given}
    if not part.params or part.constants or part.state or part.kept or part.received.keys() != {before}:
        return "it is no linear layer of a value of the stage before: it takes other values, or keeps a state"
    logits: set[Node] = set()
    for node in part.body:
        taken = {*node.all_input_nodes}
        of_weights, of_logits = not taken.isdisjoint(weights), not taken.isdisjoint(logits)
        alone = node.target in _CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())
        layer = node.target is aten.linear.default and node.args[0] not in weights | logits and not logits
        if is_random(node) or (of_weights and not layer) or (of_logits and not (alone and taken <= logits)):
            return f"it calls {node.target}{node.meta['place']}"
        if of_weights or of_logits:
            logits.add(node)
    return "" if logits else "it calls no linear layer"


class Footprint(NamedTuple):
    """Describe the tensors that a stage reads and writes in any of several calls of the model.

    Args:
        params, constants, state: names of the tensors of the model.
        received: the stages from which it takes values.
    """

    params: tuple[str, ...]
    constants: tuple[str, ...]
    state: tuple[str, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, codes: Sequence[StageCode]) -> Self:
        """Put together the tensors that the code of one stage holds, for all calls."""
        parts = [code.part for code in codes]
        each = zip(*((p.params, p.constants, p.state, p.received) for p in parts), strict=True)
        return cls(*(tuple(dict.fromkeys(chain.from_iterable(names))) for names in each))


def is_within(name: str, module: str) -> bool:
    """Tell whether ``name`` names a module, or anything inside the module."""
    return f"{name}.".startswith(f"{module}.")


def _without_rows(form: CallForm, inputs: Sequence[LeafForm]) -> str:
    """Describe a call by the forms of the rows of its inputs, however many they are."""
    return form.described([leaf._replace(shape=leaf.shape[1:]) for leaf in inputs])


def _label_stages(names: Sequence[str], traced: Trace, home: Mapping[str, int]) -> None:
    """Give each operator its stage; see `_begins` for the arguments."""
    operators = [node for node in traced.nodes if node.op == "call_function"]
    bounds = [0, *_begins(names, traced, home), len(operators)]
    for stage, (start, end) in enumerate(pairwise(bounds)):
        for node in operators[start:end]:
            node.meta["stage"] = stage


def _begins(names: Sequence[str], traced: Trace, home: Mapping[str, int]) -> list[int]:
    """Find the operators with which stages begin.

    A stage whose module is not called begins where a parameter of it, or of a later one, is read.

    Args:
        names: the names of the modules at which the stages after the first begin.
        traced: a trace of the model.
        home: the first stage that reads each parameter in other calls.

    Raises:
        ValueError: the named modules are not called in this order, or a stage would have no operator.
    """
    called = [name for name in names if name in traced.starts]
    begins = [traced.starts[name] for name in called]
    if begins != sorted(begins):
        real = sorted(called, key=traced.starts.__getitem__)
        raise ValueError(f"at: got {called}, expected the order in which they are called, {real}")
    operators = [node for node in traced.nodes if node.op == "call_function"]
    if len(called) < len(names):
        stages = {node: home.get(name, 0) for name, node in traced.params.items()}
        reads = [max((stages.get(n, 0) for n in node.all_input_nodes), default=0) for node in operators]
        ends = [len(operators)]
        for stage, name in reversed([*enumerate(names, 1)]):
            own = (at for at, read in enumerate(reads[: ends[0]]) if read >= stage)
            ends.insert(0, traced.starts.get(name, next(own, ends[0])))
        return [*accumulate(ends[:-1], max)]
    for (before, start), (name, end) in pairwise([("", 0), *zip(names, begins, strict=True)]):
        if start == end:
            where = f"at the same operator as {before}" if before else "at the first operator of the model"
            raise ValueError(
                f"at: the module {name} begins {where}, which leaves a stage without any; leave one out"
            )
    return begins


def _require_fit(held: Sequence[Footprint], parts: Sequence[StagePart]) -> None:
    """Raise where stages take a DTensor, or parameters, state or values that the split does not have."""
    when = "for the inputs, the mode or the modules that it has now, and did not at the split"
    mend = "split with inputs of this form, in this mode (training or evaluation)"
    for stage, part in enumerate(parts):
        for source, nodes in part.received.items():
            if laid := [node for node in nodes if node.meta["laid"]]:
                raise StageError(
                    f"stage {stage}",
                    f"it takes the value {_described(laid[0])}, a DTensor, from stage {source}",
                    "cut where activations are plain tensors, as use_local_output=True makes them",
                )
        if not held:  # at the split
            continue
        reads = [name for name in part.params if name not in held[stage].params]
        writes = [name for name in part.state if name not in held[stage].state]
        takes = [a for a in part.received if a != stage - 1 and a not in held[stage].received]
        if reads or writes or takes:
            what = (
                f"reads the parameter {reads[0]}"
                if reads
                else f"writes into the buffer {writes[0]}"
                if writes
                else f"takes the value {_described(part.received[takes[0]][0])}, from stage {takes[0]}"
            )
            raise StageError(f"stage {stage}", f"it {what} {when}", mend)


def _described(node: Node) -> str:
    """Name a value, its shape, and the line that makes it."""
    shape = list(node.meta["value"].shape)
    return f"{node.name.removeprefix('v_')} of shape {shape}{node.meta.get('place', '')}"

"""Cut a trace into stages: what each computes, or computes again, and the values that cross."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch.fx import Node

from ppfunc.stage import StageError

from .effects import Effects, is_random, is_view_or_cast, storages_of
from .record import BY_HAND, MODEL
from .trace import Trace

aten = torch.ops.aten


class StagePart(NamedTuple):
    """Describe one stage of a trace.

    Args:
        body: its operators in order, with those that it computes again.
        params: the parameters that it reads.
        constants: the buffers that it reads, and no stage writes.
        state: the buffers of its state; of each the node that is its new value.
        received: the values that it takes from each earlier stage.
        sent: the values that each later stage takes from it.
    """

    body: tuple[Node, ...]
    params: tuple[str, ...]
    constants: tuple[str, ...]
    state: Mapping[str, Node]
    received: Mapping[int, tuple[Node, ...]]
    sent: Mapping[int, tuple[Node, ...]]


class WrittenElsewhereError(Exception):
    """Raised where a stage writes into memory that another has made: the trace must be made functional."""


def cut(trace: Trace, stages: int, state: Mapping[str, int]) -> tuple[StagePart, ...]:
    """Cut a trace.

    Args:
        trace: of the model.
        stages: their number.
        state: the stages of buffers that are state whether this trace writes into them or not.

    Raises:
        StageError: the model writes into a parameter or an input, or into one buffer in several stages.
        WrittenElsewhereError: the trace has to be made functional first.
    """
    homes = {**state, **_states(trace)}
    effects = Effects(trace, homes)
    _require_homes(trace, effects, homes, state)
    cutter = _Cutter(trace, effects, homes)
    return tuple(reversed([cutter.part(stage, stage == stages - 1) for stage in reversed(range(stages))]))


def _states(trace: Trace) -> dict[str, int]:
    """Find the buffers that the trace writes into or replaces, each with its stage."""
    homes: dict[str, set[int]] = {name: {node.meta["stage"]} for name, node in trace.replaced.items()}
    at = {memory: name for name, node in trace.buffers.items() for memory in storages_of(node)}
    for node in trace.nodes:
        for name in {at[memory] for memory in node.meta["writes"] if memory in at}:
            homes.setdefault(name, set()).add(node.meta["stage"])
    for name, stages in homes.items():
        if len(stages) > 1:
            reason = (
                f"its buffer {name} is written in the stages {', '.join(map(str, sorted(stages)))}, and is"
                " the state of one"
            )
            raise StageError(MODEL, reason, "cut elsewhere, or give each stage a module of its own")
    return {name: stage for name, (stage,) in homes.items()}


def _require_homes(
    trace: Trace, effects: Effects, homes: Mapping[str, int], state: Mapping[str, int]
) -> None:
    """Raise unless every memory that is written into is written by the stage that makes it."""
    names = {node: name for name, node in trace.params.items()}
    buffers = {node: name for name, node in trace.buffers.items()}
    for name, stage in state.items():
        if homes[name] != stage:
            raise StageError(
                MODEL,
                f"its buffer {name} is the state of stage {stage}, and is written in stage {homes[name]}",
                "split again",
            )
    for at, writers in effects.writers_of.items():
        maker, (writer, *_) = effects.maker[at], writers
        if maker in names:
            raise StageError(
                MODEL,
                f"it writes into its parameter {names[maker]}{writer.meta['place']}",
                f"return a new value, or {BY_HAND}",
            )
        if maker.op == "get_attr":
            reason = f"it writes into a tensor that is neither a parameter nor a buffer{writer.meta['place']}"
            raise StageError(MODEL, reason, "register it as a buffer")
        if maker in buffers or writer in effects.cheap:
            continue
        if {w.meta["stage"] for w in writers} != {maker.meta["stage"]}:
            raise WrittenElsewhereError(writer.meta["place"])


class _Cutter:
    """Follows dependencies back from the results of each stage, the last stage first."""

    def __init__(self, trace: Trace, effects: Effects, homes: Mapping[str, int]) -> None:
        self.trace, self.effects, self.homes = trace, effects, homes
        self.param_of = {node: name for name, node in trace.params.items()}
        self.buffer_of = {node: name for name, node in trace.buffers.items()}
        self.wanted: dict[
            int, dict[int, set[Node]]
        ] = {}  # by the stage that has them, by the stage that takes them

    def part(self, stage: int, last: bool) -> StagePart:
        """Cut out the part of a stage. Those of all later stages have been cut."""
        state = {
            name: self.trace.replaced.get(name, self.trace.buffers[name])
            for name, home in self.homes.items()
            if home == stage
        }
        sent = self.wanted.pop(stage, {})
        roots = [node for nodes in sent.values() for node in nodes] + list(state.values())
        roots += [r for r in self.trace.results if isinstance(r, Node)] if last else []
        roots += [w for node in roots for w in self.effects.all_writers(node) if w.meta["stage"] == stage]
        roots += [n for n in self.trace.nodes if n.meta["stage"] == stage and is_random(n)]
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
        )

    def _follow(self, roots: Iterable[Node], stage: int) -> tuple[set[Node], dict[int, set[Node]]]:
        """Find the nodes that a stage computes itself, and those that it takes from earlier stages."""
        here: set[Node] = set()
        taken: dict[int, set[Node]] = {}
        ahead = list(roots)
        while ahead:
            node = ahead.pop()
            if node in here:
                continue
            source = self._source(node, stage)
            if source != stage:
                taken.setdefault(source, set()).add(node)
                continue
            here.add(node)
            ahead += node.all_input_nodes
            ahead += [
                w for w in self.effects.writers(node) if w in self.effects.cheap or w.meta["stage"] == stage
            ]
        return here, taken

    def _source(self, node: Node, stage: int) -> int:
        """Find the stage that a stage gets a node from: itself, or an earlier one."""
        if node in self.buffer_of and self.buffer_of[node] in self.homes:
            home = self.homes[self.buffer_of[node]]
            if home > stage:
                reason = (
                    f"its buffer {self.buffer_of[node]} is read in stage {stage}, and is the state of the"
                    f" later stage {home}"
                )
                raise StageError(MODEL, reason, "cut elsewhere")
            return home
        if node in self.param_of or node in self.buffer_of or node.op == "get_attr":
            return stage
        if node.op == "placeholder":
            return 0
        if node in self.effects.cheap:
            return stage
        if (
            node.target is aten.as_strided.default
        ):  # depends on how its memory was made, which a message does not tell
            return self._source(self.effects.maker[node.meta["value"].storage], stage)
        return stage if self._moves(node) else int(node.meta["stage"])

    def _moves(self, node: Node) -> bool:
        """Tell whether a view or a cast is done after its argument has crossed."""
        return is_view_or_cast(node) and not self.effects.all_writers(node) and not self._of_parameter(node)

    def _of_parameter(self, node: Node) -> bool:
        (source,) = node.all_input_nodes
        return source in self.param_of or (is_view_or_cast(source) and self._of_parameter(source))

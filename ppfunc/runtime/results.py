"""What a step that has run returns: its loss, gradients, outputs, metrics and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Signature

from .arguments import Arguments
from .batch import Batch
from .calls import BATCH, Leaves
from .memory import Memory
from .plan import Served, Table
from .transport import Tag, Thunk, Transfer, Transport


class Aux(NamedTuple):
    """What stages return beside the activation, of the stages of this process.

    Args:
        metrics: ``{stage: tree}`` with a leading axis of microbatches (a list where shapes differ).
        state: ``{stage: tree}``, after the last microbatch.
    """

    metrics: dict[int, Any]
    state: dict[int, Any]


class Step(NamedTuple):
    """A step that has run, before its memory is emptied."""

    schedule: Schedule
    transport: Transport
    memory: Memory
    table: Table
    arguments: Arguments

    def loss(self) -> torch.Tensor:
        """The weighted sum of all losses, of the shape of a loss, on every rank.

        One vector of all losses is added up, those of a stage beside each other, so that the bits
        do not depend on the schedule or on the ranks.
        """
        device = next(iter(self.arguments.homes.values())).device
        parts = []
        for stage, loss in self.table.losses.items():
            microbatches = self._microbatches(stage)
            weighted = self._weighted_losses(stage, microbatches) if stage in self.arguments.homes else ()
            leaf = LeafSignature((len(microbatches), *loss.shape), loss.dtype, False)
            (part,) = self.transport.spread(self.schedule.placement[stage], weighted, (leaf,), device)
            parts.append(part.to(device))
        if not parts:
            raise ValueError("no stage has returned a loss")
        return torch.cat(parts).sum(0)

    def _microbatches(self, stage: int) -> range:
        return next(c.microbatches for c in self.schedule.chains if stage in c.stages)

    def _weighted_losses(self, stage: int, microbatches: range) -> Leaves:
        losses = torch.stack([self.memory.kept[stage, m][0] for m in microbatches])
        weights = self.arguments.weights[microbatches.start : microbatches.stop]
        return (losses * weights.to(losses.device, losses.dtype).view(-1, *(1,) * (losses.ndim - 1)),)

    def gradients(self) -> dict[int, Any]:
        """The gradients of every stage of this process, with the structure of its parameters."""
        seen: set[int] = set()
        return {stage: self._gradients_of(stage, seen) for stage in self.arguments.homes}

    def _gradients_of(self, stage: int, seen: set[int]) -> Any:
        leaves, home = self.arguments.leaves[stage], self.arguments.homes[stage]
        gradients = self.memory.gradients[stage]
        made = iter(gradients.take(home.differentiated(leaves), seen))
        shapes = [gradients.signature(leaf).shape for leaf in home.params]
        filled = [
            next(made) if leaf.grad else t.new_zeros(shape) for t, leaf, shape in zip(leaves, home.params, shapes, strict=True)
        ]
        return self.arguments.signatures[stage].unflatten(filled)

    def input_gradients(self) -> Any:
        """The gradients of the batch, in its form; None where this process holds no first stage."""
        batch = self.arguments.inputs
        firsts = {chain.stages[0]: chain.microbatches for chain in self.schedule.chains}
        here = [first for first in firsts if first in self.arguments.homes]
        if not here:
            return None
        rows = {m: self.memory.values.pop(Tag("B", first, BATCH, m), ()) for first in here for m in firsts[first]}
        if len(here) < len(firsts):
            rows |= self._rows_of_other_chains(rows, firsts, here)
        made = [_like(batch, m, iter(rows.get(m, ()))) for m in range(self.schedule.microbatches)]
        return made if batch.listed else _stacked(made)

    def _rows_of_other_chains(self, rows: dict[int, Leaves], firsts: dict[int, range], here: list[int]) -> dict[int, Leaves]:
        """Exchange gradients of the inputs with the processes where the other chains begin."""
        homes, values = self.schedule.placement, self.memory.values
        ends = []
        for own in here:
            device = self.arguments.homes[own].device
            for other in firsts.keys() - set(here):
                for m in (*firsts[own], *firsts[other]):
                    outgoing = m in firsts[own]
                    tag = Tag("R", own, other, m) if outgoing else Tag("R", other, own, m)
                    leaves = tuple(leaf for leaf in self.arguments.inputs.signatures[m].leaves if leaf.grad)
                    if leaves:
                        ends.append((homes[own], Transfer(outgoing, tag, homes[other], leaves, device)))
                    if leaves and outgoing:
                        values[tag] = rows[m]
        ends.sort(key=lambda end: end[1].tag)
        for rank in sorted({rank for rank, _ in ends}):
            _do(self.transport.post(rank, [t for r, t in ends if r == rank], values))
        for rank, transfer in ends:
            _do(self.transport.release(rank, transfer, values) if transfer.outgoing else self.transport.arrive(rank, transfer, values))
        return {t.tag.microbatch: values.pop(t.tag) for _, t in ends if not t.outgoing}

    def outputs(self) -> Any:
        """What the last stages of this process returned; None where it holds none."""
        lasts = [c.stages[-1] for c in self.schedule.chains if c.stages[-1] in self.arguments.homes]
        if not lasts:
            return None
        return _stacked([row for stage in lasts for row in self._kept(stage, lambda s: s.outputs)])

    def aux(self) -> Aux:
        """Metrics and state of the stages of this process, where they have any."""
        metrics = {
            stage: _stacked(list(self._kept(stage, lambda s: s.metrics)))
            for stage in self.arguments.homes
            if self._served(stage).metrics.leaves
        }
        state = {stage: self.arguments.states[stage].unflatten(leaves) for stage, leaves in self.memory.state.items()}
        return Aux(metrics, state)

    def _served(self, stage: int) -> Served:
        return self.table.served[stage, self._microbatches(stage)[0]]

    def _kept(self, stage: int, which: Callable[[Served], Signature]) -> Iterator[Any]:
        """One of the kept trees of a stage, of every microbatch."""
        for m in self._microbatches(stage):
            served, leaves = self.table.served[stage, m], self.memory.kept[stage, m]
            start = int(served.loss is not None)
            for signature in (served.outputs, served.metrics):
                stop = start + len(signature.leaves)
                if signature is which(served):
                    yield signature.unflatten(leaves[start:stop])
                start = stop


def _do(thunk: Thunk | None) -> None:
    if thunk is not None:
        thunk()


def _like(batch: Batch, microbatch: int, gradients: Iterator[torch.Tensor]) -> Any:
    """The gradients of one microbatch of the batch: zeros for what cannot have any."""
    signature = batch.signatures[microbatch]
    pairs = zip(signature.leaves, batch.leaves[microbatch], strict=True)
    return signature.unflatten([next(gradients) if leaf.grad else torch.zeros_like(t) for leaf, t in pairs])


def _stacked(rows: Sequence[Any]) -> Any:
    """One tree with a leading axis; the list of trees where they differ in structure, shape or dtype."""
    first, *others = ((optree.tree_structure(row), [(t.shape, t.dtype) for t in optree.tree_leaves(row)]) for row in rows)
    if any(other != first for other in others):
        return list(rows)
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *rows)

"""Describe a step function, and its step as it is lowered: every stage and edge for arguments of one form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Instruction, Op, Schedule, parts_of
from ppfunc.stage import LeafSignature, Loss, Outline, Signature, Stage
from ppfunc.stage.errors import line_of
from ppfunc.stage.frozen import FrozenLeaves

from ..ports.protocols import LossPart, Route, Transport
from ..values.arguments import StepForm
from ..values.buffers import Key
from ..values.errors import Failure
from .stage_programs import StageCall, StagePrograms
from .ties import SharedLeaf, Tied, shared_leaves

Program = Callable[..., Any]

Overlapped = Callable[[Program, tuple[Any, ...], Program, tuple[Any, ...]], tuple[Any, Any]]
"""``(forward, its arguments, backward, its arguments) -> (result of one, result of the other)``."""


class StepSpec(NamedTuple):
    """Name the results that the caller wants of a step, and how they are formed.

    Args:
        name: of the function that made it.
        wants: fields of :class:`~ppfunc.runtime.StepResult`, of ``"loss"``, ``"grads"``, ``"input_grads"``,
            ``"outputs"``, ``"aux"``, ``"losses"``.
        per_microbatch: keep the gradients of microbatches apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; by default one after the other.
        tied: the places of tied parameters.
        sum_dtype: of the sums of gradients, where that of a parameter is narrower.
        updates: whether parameters are updated, by REDUCE_GRAD and STEP, which are refused without it.
        sharded: whether updated parameters are whole only between UNSHARD and RESHARD.
        finite: fail a step whose loss or gradients are not finite.
        frozen: the parameters that get zeros as gradients.
        options: of a trainer, terms separated by ``"; "`` that ranks compare.
        primal: the key of the parameters proper where a transform has added tangents to them, such as
            ``"0."``.
    """

    name: str
    wants: tuple[str, ...]
    per_microbatch: bool = False
    loss_shape: tuple[int, ...] = ()
    overlapped: Overlapped | None = None
    tied: Tied = ()
    sum_dtype: torch.dtype | None = None
    primal: str = ""
    options: str = ""
    updates: bool = False
    sharded: bool = False
    finite: bool = False
    frozen: FrozenLeaves | None = None

    def shares(self, schedule: Schedule) -> bool:
        """Tell whether several stages of a schedule hold one parameter."""
        return bool(schedule.replicas or self.tied)

    @property
    def terms(self) -> str:
        """Name the function, its results and its options: ranks have to agree on them."""
        results = sorted({*self.wants} - {"aux"})  # without which the programs are the same
        options = {
            "per_microbatch": self.per_microbatch, "loss_shape": self.loss_shape,
            "sum_dtype": self.sum_dtype, "finite": self.finite,
        }  # fmt: skip
        chosen = [f"{name}={option}" for name, option in options.items() if option]
        return ", ".join([f"{self.name} of {' and '.join(results) or 'aux'}", *chosen])

    def frozen_in(self, model_stage: int, params: Signature) -> frozenset[int]:
        """Return the numbers of the frozen leaves of a stage: their gradients are zeros."""
        return frozenset() if self.frozen is None else self.frozen.numbers(model_stage, params)


class Pipeline(NamedTuple):
    """Hold the parts of a step function.

    Args:
        stages, loss_fn: of the model; None for stages of other processes.
        schedule: proved, with communication placed.
        transport: carries messages between processes.
        spec: the results that the caller wants.
        programs: of the stages; step functions with the same stages may share them.
        ranks: those of this process.
        order: the steps of this process as they run, each its rank and its position.
        number: of the step function; ranks make theirs in the same order.
        loss_weights: of a call that gives none of its own; None for ``1/m`` each.
    """

    stages: Sequence[Stage | None]
    loss_fn: Loss | None
    schedule: Schedule
    transport: Transport
    spec: StepSpec
    programs: StagePrograms
    ranks: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    number: int
    loss_weights: torch.Tensor | None

    @property
    def model_stages(self) -> tuple[int, ...]:
        """List the stages of the model that this process runs, ascending."""
        return tuple(sorted({stage for rank in self.ranks for stage in self.schedule.model_stages_of(rank)}))


def routes_of(schedule: Schedule) -> Iterator[Route]:
    """List where messages travel between ranks: along edges and back."""
    home = schedule.placement
    for a, b in schedule.crossing_edges:
        yield Route("F", home[a], home[b])
        if not schedule.forward_only:
            yield Route("B", home[b], home[a])


BATCH = -1
"""Number of the "stage" that the batch comes from."""


class Edge(NamedTuple):
    """Describe a part of a stage's input, or of its output, for one microbatch.

    Args:
        stage: the stage of the schedule at the other end, ``BATCH`` for the batch.
        signature: of the value that travels.
    """

    stage: int
    signature: Signature

    @property
    def leaves(self) -> tuple[LeafSignature, ...]:
        """Return the signatures of the tensors that travel forward."""
        return self.signature.leaves

    @property
    def carrying(self) -> tuple[LeafSignature, ...]:
        """Return the signatures of the tensors whose gradients travel back."""
        return tuple(leaf for leaf in self.leaves if leaf.grad)

    def travelling(self, forward: bool) -> tuple[LeafSignature, ...]:
        """Return the signatures of the leaves of a message, of activations or of their gradients."""
        return self.leaves if forward else self.carrying


def slices(edges: tuple[Edge, ...], carrying: bool = False) -> Iterator[tuple[Edge, slice]]:
    """Yield each edge with the place of its leaves in the tuple of all of them."""
    start = 0
    for edge in edges:
        stop = start + len(edge.carrying if carrying else edge.leaves)
        yield edge, slice(start, stop)
        start = stop


class LoweredStage(NamedTuple):
    """Describe a stage for one form of its arguments.

    Args:
        model_stage: its number in the model.
        call: the stage with its loss and its arguments.
        params: signature of its parameters; the leaves with ``grad`` get gradients.
        outline: the evaluation of the call.
        sources: where the parts of its input come from: the stage before or the batch, then skip connections.
        sinks: where its output goes: the stage after it, if any, then skip connections.
        loss: signature of the loss, None where the stage has none.
        outputs, metrics, aux, state: signatures of the results that are not differentiated, in their order;
            ``aux`` is that of the loss function.
    """

    model_stage: int
    call: StageCall
    params: Signature
    outline: Outline
    sources: tuple[Edge, ...]
    sinks: tuple[Edge, ...]
    loss: Signature | None
    outputs: Signature
    metrics: Signature
    aux: Signature
    state: Signature

    @property
    def device(self) -> torch.device:
        """Return the device on which the stage computes."""
        return self.call.device

    @property
    def kept(self) -> int:
        """Count the output leaves that the caller may want: loss, outputs, metrics, aux."""
        wanted = self.outputs, self.metrics, self.aux
        return (self.loss is not None) + sum(len(signature.leaves) for signature in wanted)


class LoweredStep(NamedTuple):
    """Hold a lowered step: every stage and every edge for one form of the arguments, as values only.

    Args:
        schedule: proved, with communication placed.
        spec: the results that the caller wants.
        form: of the arguments.
        ranks: those of this process.
        order: its steps as they run, each its rank and its position.
        stages: the stages of this process, by (stage of the schedule, microbatch).
        losses: form of the losses of the stages of this process, by stage of the schedule.
        drawing: the stages of the model, of this process, that are known to draw random numbers.
    """

    schedule: Schedule
    spec: StepSpec
    form: StepForm
    ranks: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    stages: Mapping[Key, LoweredStage]
    losses: Mapping[int, LossPart]
    drawing: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<lowered {self.spec.name}, {self.schedule!r}>"

    def differentiated(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the leaves of a stage that have gradients."""
        leaves = self.form.params[self.schedule.model_stages[stage]].leaves
        return () if self.schedule.forward_only else tuple(n for n, leaf in enumerate(leaves) if leaf.grad)

    def shared_leaves(self) -> list[SharedLeaf]:
        """List the parameters of this process that have several places."""
        return shared_leaves(self.schedule, self.ranks, self.form.params, self.spec.tied)

    def edge_of(self, message: Instruction) -> Edge:
        """Return the edge along which a SEND or RECV of this process moves its tensors."""
        assert message.microbatch is not None
        low = self.stages[message.stage, message.microbatch]
        edges = low.sinks if message.op in (Op.SEND_F, Op.RECV_B) else low.sources
        # Without a peer it goes to a neighbour, the first of them.
        return next(edge for edge in edges if message.peer in (None, edge.stage))

    def context_of(self, failure: Failure) -> str:
        """Describe the line of the user's code that failed, and the arguments of a failed forward."""
        if failure.instruction is None or not isinstance(failure.cause, Exception):
            return ""
        line = line_of(failure.cause)
        for part in parts_of(failure.instruction):
            if part.op is Op.F and part.microbatch is not None:
                low = self.stages[part.stage, part.microbatch]
                received = ", ".join(str(edge.signature) for edge in low.sources)
                return f"{line}; its input was {received}, its parameters {low.params}"
        return line

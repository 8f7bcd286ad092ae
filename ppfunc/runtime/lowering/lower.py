"""Lower stages, a loss and a schedule to the meaning of every instruction for given shapes; values only.

Stages are visited in the order of the data. Each is evaluated abstractly, once for every distinct input,
which gives the signature of every edge. Nothing is traced, nothing runs, and no message is sent but the
signatures that cross from process to process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Flow, Instruction, Op, Schedule, parts_of
from ppfunc.schedule.dataflow import Dataflow, Targets
from ppfunc.schedule.instruction import SENDS
from ppfunc.stage import LeafSignature, Loss, Outline, Signature, Stage
from ppfunc.stage.abstract.output import StageFunction, children, received_signature
from ppfunc.stage.errors import line_of, warn
from ppfunc.stage.frozen import FrozenLeaves
from ppfunc.stage.layout import Boundary, same_placement
from ppfunc.stage.program import TARGETED, WITHOUT_CARRY
from ppfunc.stage.signature import leaf_names

from ..ports.protocols import LossPart, Route, Transport
from ..values.arguments import StepForm
from ..values.buffers import Key, Tag
from ..values.errors import Failure
from .stage_programs import StageCall, StagePrograms
from .ties import SharedLeaf, Tied, shared_leaves

Program = Callable[..., Any]

Overlapped = Callable[[Program, tuple[Any, ...], Program, tuple[Any, ...]], tuple[Any, Any]]
"""``(forward, its arguments, backward, its arguments) -> (result of one, result of the other)``."""


class Aux(NamedTuple):
    """Hold the results of stages and loss function of this process beside activations and losses.

    Their tensors carry no gradient. Those of microbatches have a leading axis of the microbatches that this
    process ran, ascending, step after step. Where they differ in form they are Microbatches, with None for
    those without.

    Args:
        metrics: metrics of the stages, trees by stage of the model.
        state: states of the stages, trees by stage of the model, after the last microbatch.
        loss: the tree ``aux`` of a loss function that returns ``(loss, aux)``; None on ranks that run no last
            stage.
    """

    metrics: dict[int, Any]
    state: dict[int, Any]
    loss: Any = None


class StepResult(NamedTuple):
    """Name the results of one step. Results that were not asked for are None.

    Args:
        loss: the weighted sum of all losses, a tensor of the shape of a loss, on every rank.
        grads: the gradients of the parameters of this process, ``{stage of the model: tree}``.
        input_grads: the gradients of the inputs of the first stages of this process, in the form of the
            inputs; None if it runs no first stage.
        outputs: results of the last stages of this process, in the form of the inputs; None if it runs no
            last stage.
        aux: metrics, state and what comes with the loss, :class:`Aux`.
        losses: the losses of all microbatches in their order, ``[m, *shape of a loss]``, on every rank.
            They are not weighted, and include auxiliary losses of stages: their weighted sum is ``loss``.
        carry: the last carries of the stages of this process, ``{stage of the model: Microbatches}`` of a
            tree for each sequence.
        carry_grads: the gradients of the first carries, where the step was given some, in the same form.
        slope: the derivative of the loss along the tangents, of :func:`ppfunc.jvp` and :func:`ppfunc.hvp`.
        output_tangents: the derivative of the outputs along the tangents, of :func:`ppfunc.jvp`.
        products: the Hessian times the vector, like ``grads``, of :func:`ppfunc.hvp`.
    """

    loss: Any = None
    grads: Any = None
    input_grads: Any = None
    outputs: Any = None
    aux: Any = None
    losses: Any = None
    carry: Any = None
    carry_grads: Any = None
    slope: Any = None
    output_tangents: Any = None
    products: Any = None

    def asked_for(self, wants: Sequence[str]) -> Any:
        """Return the results that a caller asked for: one itself, a loss with gradients as a pair, else all.

        Args:
            wants: names of fields.
        """
        if len(wants) == 1:
            return getattr(self, wants[0])
        if len(wants) == 2 and wants[1] in ("grads", "input_grads"):
            return self.loss, getattr(self, wants[1])
        return self


class StepSpec(NamedTuple):
    """Name the results that the caller wants of a step, and how they are formed.

    Args:
        name: name of the function that made it.
        wants: fields of :class:`~ppfunc.runtime.StepResult`, of ``"loss"``, ``"grads"``, ``"input_grads"``,
            ``"outputs"``, ``"aux"``, ``"losses"``, ``"carry"``, ``"carry_grads"``.
        per_microbatch: keep the gradients of microbatches apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; by default one after the other.
        tied: the places of tied parameters.
        sum_dtype: dtype of the sums of gradients, where the dtype of a parameter is narrower.
        updates: whether parameters are updated, by REDUCE_GRAD and STEP, which are refused without it.
        sharded: whether updated parameters are whole only between UNSHARD and RESHARD.
        finite: fail a step whose loss or gradients are not finite.
        frozen: the parameters that get zeros as gradients.
        options: options of a trainer, terms separated by ``"; "`` that ranks compare.
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
        """Name the function, its results and its options, on which ranks have to agree."""
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
        stages, loss_fn: functions of the model; None for stages of other processes.
        schedule: proved, with communication placed.
        transport: carries messages between processes.
        spec: the results that the caller wants.
        programs: programs of the stages; step functions with the same stages may share them.
        ranks: ranks of this process.
        order: the steps of this process as they run, each its rank and its position.
        number: number of the step function; ranks make theirs in the same order.
        loss_weights: weights in a call that gives no weights, [m]; None for ``1/m`` each.
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

    @property
    def targeted(self) -> frozenset[int] | None:
        """Return the numbers of model stages that take targets. Without a loss function: None."""
        if self.loss_fn is None:
            return None
        ends = {self.schedule.model_stages[stage] for stage in self.schedule.ends}
        return frozenset(k for k, fn in enumerate(self.stages) if k in ends or getattr(fn, TARGETED, False))


def routes_of(schedule: Schedule) -> Iterator[Route]:
    """List where messages travel between ranks: along edges and back."""
    home = schedule.placement
    for a, b in schedule.crossing_edges:
        yield Route("F", home[a], home[b])
        if not schedule.forward_only:
            yield Route("B", home[b], home[a])


EdgeKey = tuple[int, int, int]
"""Source and destination of an edge, and the first microbatch of its source of those lowered together."""

BATCH, CALLER, NOWHERE = -1, -2, -3
"""Numbers of "stages": that the batch comes from; that the first carry of a sequence comes from, and its last
carry goes to; that a value goes to which nothing reads.
"""


class Edge(NamedTuple):
    """Describe a part of a stage's input, or of its output, for one microbatch.

    Args:
        stage: the stage of the schedule at the other end, or ``BATCH``, ``CALLER``, ``NOWHERE``.
        signature: signature of the value that travels.
        shift: 1 where the value is of the slice before, or is for the slice after, else 0. A tag has the
            number of the microbatch that made the value.
    """

    stage: int
    signature: Signature
    shift: int = 0

    @property
    def leaves(self) -> tuple[LeafSignature, ...]:
        """Return the signatures of the tensors that travel forward."""
        return self.signature.leaves

    @property
    def carrying(self) -> tuple[LeafSignature, ...]:
        """Return the signatures of the tensors whose gradients travel back."""
        return tuple(leaf for leaf in self.leaves if leaf.grad)


def places_of(edges: tuple[Edge, ...], carrying: bool = False) -> Iterator[tuple[Edge, slice]]:
    """Yield each edge with the place of its leaves in the tuple of all of them."""
    start = 0
    for edge in edges:
        stop = start + len(edge.carrying if carrying else edge.leaves)
        yield edge, slice(start, stop)
        start = stop


class MessagePart(NamedTuple):
    """Describe the tensors of a message that are one value.

    Args:
        tags: names of the value, for each stage that takes it.
        leaves: signatures of the tensors.
    """

    tags: list[Tag]
    leaves: tuple[LeafSignature, ...]


class LoweredStage(NamedTuple):
    """Describe a stage for one form of its arguments.

    Args:
        model_stage: number of the stage in the model.
        call: the stage with its loss and its arguments.
        params: signature of its parameters; the leaves with ``grad`` get gradients.
        outline: the evaluation of the call.
        sources: edges of its input: from the stages before or the batch, then skip connections, then the
            carry of the slice before.
        sinks: edges of its output: to the stages after it, if any, then skip connections, then the carry.
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
        form: form of the arguments.
        ranks: ranks of this process.
        order: steps of this process as they run, each its rank and its position.
        stages: the stages of this process, by (stage of the schedule, microbatch).
        losses: form of the losses of the stages of this process, by stage of the schedule.
        drawing: the stages of the model, of this process, that are known to draw random numbers.
        targeted: the stages of the model that take the target of their microbatch.
    """

    schedule: Schedule
    spec: StepSpec
    form: StepForm
    ranks: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    stages: Mapping[Key, LoweredStage]
    losses: Mapping[int, LossPart]
    drawing: tuple[int, ...]
    targeted: frozenset[int]

    def __repr__(self) -> str:
        return f"<lowered {self.spec.name}, {self.schedule!r}>"

    def differentiated(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the leaves of a stage that have gradients."""
        leaves = self.form.params[self.schedule.model_stages[stage]].leaves
        return () if self.schedule.forward_only else tuple(n for n, leaf in enumerate(leaves) if leaf.grad)

    def shared_leaves(self) -> list[SharedLeaf]:
        """List the parameters of this process that have several places."""
        return shared_leaves(self.schedule, self.ranks, self.form.params, self.spec.tied)

    def message_parts(self, message: Instruction, flow: Dataflow) -> list[MessagePart]:
        """List the parts of the message of a SEND or RECV of this process.

        Gradients and skip connections are a part for each edge. An output for several stages is one.

        Args:
            flow: dataflow of the schedule.
        """
        op, stage, m, peer, _, _ = message
        assert m is not None
        link = next(link for link in flow.routes[op, stage, peer].links if m in link.microbatches)
        direction, parts = "F" if op in (Op.SEND_F, Op.RECV_F) else "B", dict[int | None, MessagePart]()
        for target, shift in link.targets:
            if not flow.takes(m, target, shift):
                continue
            # A message has the number of the microbatch that made its value, which the next slice may read.
            key, other = ((stage, m), target) if op in SENDS else ((target, m + shift), link.source)
            low = self.stages[key]
            edges = low.sinks if op in (Op.SEND_F, Op.RECV_B) else low.sources
            edge = next(edge for edge in edges if edge.stage == other)
            leaves = edge.leaves if direction == "F" else edge.carrying
            output = direction == "F" and (link.source, target) not in self.schedule.skips
            part = parts.setdefault(None if output else target, MessagePart([], leaves))
            part.tags.append(Tag(direction, link.source, target, m))
        return [*parts.values()]

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


def lower(
    pipeline: Pipeline,
    form: StepForm,
    example: Callable[[int], Any],
    send: Callable[[EdgeKey, Sequence[Signature]], None] | None = None,
    recv: Callable[[EdgeKey], Sequence[Signature]] | None = None,
) -> LoweredStep:
    """Find the meaning of every instruction of the schedule for arguments of this form.

    Args:
        pipeline: the stages, the schedule, and the results that the caller wants.
        form: signatures of the arguments.
        example: the parameters of a stage of the model as tensors, for what signatures do not tell.
        send, recv: functions that pass the signatures of an edge to and from another process; None where this
            process runs all ranks.

    Raises:
        ValueError: an output of a stage that nothing will honour.
        StageError: a stage cannot be evaluated.
    """
    schedule, spec, local = pipeline.schedule, pipeline.spec, set(pipeline.ranks)
    _require_same_rows(form, schedule.microbatches)
    require_carry(schedule, spec)
    home, model_stages = schedule.placement, schedule.model_stages
    # By source, sink, and the microbatch of the source.
    edges: dict[tuple[int, int, int], Signature] = {}
    lowered: dict[Key, LoweredStage] = {}
    functions: dict[tuple[int, Targets], Callable[..., LoweredStage]] = {}
    targeted = pipeline.targeted or frozenset()
    for way, stage, microbatches in stages_in_order(schedule):
        if home[stage] not in local:
            continue
        sources, sinks = ends_of(schedule, way, stage)
        for source, shift in sources:
            numbers = [m - shift for m in microbatches if not shift or schedule.joins(m, -1)]
            if source not in (BATCH, *way.stages):
                signatures: Sequence[Signature] = [Signature.of(None)] * len(numbers)
            elif source == BATCH:
                signatures = _inputs(pipeline, form, numbers)
            elif numbers and home[source] not in local:
                assert recv is not None
                signatures = recv((source, stage, numbers[0]))
            else:
                continue
            edges.update(zip([(source, stage, m) for m in numbers], signatures, strict=True))
        model_stage = model_stages[stage]
        if (stage, sinks) not in functions:
            function, params = _stage_function(pipeline, form, way, stage, sinks), example(model_stage)
            # Microbatches of one form share what is lowered.
            functions[stage, sinks] = cache(
                partial(_lower_stage, pipeline, form, sources, stage, sinks, function, params)
            )
        for m in microbatches:
            received = tuple(
                Edge(source, edges[source, stage, m - shift], shift)
                if not shift or schedule.joins(m, -1)
                else _first(pipeline, form, stage, source, m)
                for source, shift in sources
            )
            # Beside its input it gets a target, extras, a state.
            target = (form.targets[m],) if model_stage in targeted and form.targets is not None else ()
            extras = (form.extras[model_stage][m],) if model_stage in form.extras else ()
            state = (form.state[model_stage],) if model_stage in form.state else ()
            kind = schedule.joins(m, 1), m in form.weightless
            low = functions[stage, sinks](received, (*target, *extras, *state), *kind)
            lowered[stage, m] = low
            edges.update(((stage, edge.stage, m), edge.signature) for edge in low.sinks)
        for sink, shift in sinks:
            numbers = [m for m in microbatches if not shift or schedule.joins(m, 1)]
            if numbers and home[sink] not in local:
                assert send is not None
                send((stage, sink, numbers[0]), [edges[stage, sink, m] for m in numbers])
    if not schedule.forward_only and (spec.updates or "grads" in spec.wants):
        for stage in {stage: None for stage, _ in lowered}:
            _warn_of_detached([low for (number, _), low in lowered.items() if number == stage])
        if spec.frozen is not None and not spec.updates:  # a trainer warns when a state begins
            spec.frozen.warn_of_all(form.params)
    drawing = tuple(sorted({low.model_stage for low in lowered.values() if low.outline.random}))
    losses = _losses(schedule, spec, lowered)
    return LoweredStep(
        schedule, spec, form, pipeline.ranks, pipeline.order, lowered, losses, drawing, targeted
    )


def stages_in_order(schedule: Schedule) -> Iterator[tuple[Flow, int, Sequence[int]]]:
    """Yield every stage of every flow with the microbatches, each after the stages that send to it.

    Where a skip connection leads back, slices are yielded in turn. The order is the same on every rank.
    """
    turns = schedule.slices if any(schedule.shift(*skip) for skip in schedule.skips) else 1
    for turn in range(turns):
        for flow in schedule.flows:
            for stage in flow.stages:
                yield flow, stage, flow.microbatches[turn::turns]


def _first(pipeline: Pipeline, form: StepForm, stage: int, source: int, microbatch: int) -> Edge:
    """Return the edge of the first slice of a sequence in the place of an edge from the slice before.

    A carry comes from the caller. It is None where the caller gives none, and so is what leads back.
    """
    schedule = pipeline.schedule
    given = form.carry.get(schedule.model_stages[stage]) if source == stage else None
    if given is None:
        return Edge(CALLER, Signature.of(None))
    first = given[microbatch // schedule.slices]
    return Edge(CALLER, first.with_grad() if "carry_grads" in pipeline.spec.wants else first)


def ends_of(schedule: Schedule, flow: Flow, stage: int) -> tuple[Targets, Targets]:
    """List where the input of a stage comes from, and where its output goes, in a flow: stages and shifts.

    The stages with edges come first, or the batch; then skip connections, by stage of the model, of which a
    source may be outside of the flow: its value is None. The last is the stage itself where it hands a carry
    to the next slice.
    """
    place = {each: n for n, each in enumerate(flow.stages)}
    before = sorted((a for a, b in flow.pairs if b == stage), key=place.__getitem__)
    after = sorted((b for a, b in flow.pairs if a == stage), key=place.__getitem__)
    sources, sinks = dict[int, int](), dict[int, int]()  # by stage of the model
    for a, b in schedule.skips:
        for end, other, found in ((b, a, sources), (a, b, sinks)):
            model = schedule.model_stages[other]
            if end == stage and (other in place or model not in found):
                found[model] = other
    carry = [(stage, 1)] if schedule.slices else []
    given = [(a, schedule.shift(a, stage)) for _, a in sorted(sources.items())]
    taken = [(b, schedule.shift(stage, b)) for _, b in sorted(sinks.items())]
    return (*((a, 0) for a in before or [BATCH]), *given, *carry), (*((b, 0) for b in after), *taken, *carry)


def _stage_function(
    pipeline: Pipeline, form: StepForm, flow: Flow, stage: int, sinks: Targets
) -> StageFunction:
    """Put together a stage at its place in a flow: with loss, outputs, skips and frozen leaves."""
    schedule, spec = pipeline.schedule, pipeline.spec
    last, k = stage == flow.stages[-1], schedule.model_stages[stage]
    receivers = sum(a == stage for a, _ in flow.pairs)
    fn = pipeline.stages[k]
    if fn is None:
        raise ValueError(f"stages[{k}]: got None, but this process runs that stage; give its function")
    if schedule.slices and (by := getattr(fn, WITHOUT_CARRY, "")):
        raise ValueError(
            f"stages[{k}]: got a function of {by}, which knows no carry, and the schedule {schedule.name!r}"
            " has slices; take a schedule without"
        )
    return StageFunction(
        fn,
        pipeline.loss_fn if last else None,
        last,
        receivers,
        last and "outputs" in spec.wants,
        tuple(schedule.model_stages[sink] for sink, _ in sinks[receivers:] if sink != stage),
        spec.frozen_in(k, form.params[k]),
        bool(schedule.slices),
    )


def _lower_stage(
    pipeline: Pipeline,
    form: StepForm,
    sources: Targets,
    stage: int,
    sinks: Targets,
    function: StageFunction,
    params: Any,
    received: tuple[Edge, ...],
    extras: tuple[Signature, ...],
    joined: bool,
    weightless: bool,
) -> LoweredStage:
    schedule, spec = pipeline.schedule, pipeline.spec
    ends = function.carries and not joined and not schedule.forward_only
    function = replace(function, ends=ends, weightless=weightless) if ends or weightless else function
    model_stage = schedule.model_stages[stage]
    boundary = Boundary.of(function.fn)
    senders = [source if source == BATCH else schedule.model_stages[source] for source, _ in sources]
    signatures = [edge.signature for edge in received]
    along = sum((source, stage) not in schedule.skips for source, _ in sources) - function.carries
    _require_layouts(model_stage, boundary, form.params[model_stage], senders, signatures, along)
    example = (params, received_signature(senders, signatures, along, function.carries), *extras)
    device = form.devices[model_stage]
    call = StageCall(function, example, f"stage {model_stage}", device, model_stage)
    outline = pipeline.programs.outline(call)
    activation, skips, loss = children(outline.y)
    outputs, metrics, aux, state = children(outline.aux)
    activations = children(activation) if function.receivers > 1 else [activation] * function.receivers
    *activations, outputs = (
        tree.laid_out(boundary.mesh, boundary.outputs, f"the output of stage {model_stage}")
        for tree in (*activations, outputs)
    )
    sent = (*activations, *children(skips))
    kept = CALLER if "carry" in spec.wants else NOWHERE
    edges = tuple(
        Edge(sink if joined or not shift else kept if sink == stage else NOWHERE, value, shift)
        for (sink, shift), value in zip(sinks, sent, strict=True)
    )
    low = LoweredStage(
        model_stage, call, form.params[model_stage], outline, received, edges,
        loss if loss.leaves else None, outputs, metrics, aux, state,
    )  # fmt: skip
    updates = spec.updates and not schedule.forward_only  # an evaluation changes no weights
    if spec.frozen is not None and updates and outline.undeclared:
        names = ", ".join(map(repr, outline.undeclared[:5]))
        raise ValueError(
            f"stages[{model_stage}]: it calls the function of a module that has frozen {names}, which the"
            f" trainer does not know of, so that weight decay would change it; say trainable={{{model_stage}:"
            " mask}, False for what is frozen, or make the function with functools.wraps(that function)"
        )
    _require_loss(low, loss, spec)
    _require_wanted(low, form, spec, bool(schedule.replicas))
    return low


def _inputs(pipeline: Pipeline, form: StepForm, microbatches: Sequence[int]) -> Sequence[Signature]:
    assert form.inputs is not None  # of a process that runs the first stage
    signatures = [form.inputs[m] for m in microbatches]
    if "input_grads" not in pipeline.spec.wants:
        return signatures
    schedule = pipeline.schedule
    if any(len(schedule.heads & {*flow.stages}) > 1 for flow in schedule.flows):
        raise ValueError(
            f"inputs: got argnums=1, and several stages of the schedule {schedule.name!r} take the batch;"
            " take gradients of the parameters, or make a first stage whose output they take"
        )
    begin = {schedule.placement[stage] for stage in schedule.heads}
    whole = form.trees["inputs"].whole if "inputs" in form.trees else None  # of Microbatches it is none
    if whole is not None and not begin <= set(pipeline.ranks):
        raise ValueError(
            "inputs: got ppfunc.replicated(x) and argnums=1, and several chains, which begin in different"
            " processes, so that none has the whole gradient of x; take a schedule with one chain, such as"
            " dualpipev, or give x as a parameter"
        )
    wanted = [s.with_grad() for s in signatures]
    if not any(leaf.grad for s in wanted for leaf in s.leaves):
        raise ValueError(
            f"inputs: got {signatures[0]} and argnums=1, expected a floating leaf: integers have no gradient;"
            " differentiate in the parameters, argnums=0, or give embeddings as inputs"
        )
    return wanted


def _losses(schedule: Schedule, spec: StepSpec, lowered: Mapping[Key, LoweredStage]) -> dict[int, LossPart]:
    """Describe the losses of every stage that has some: those of its microbatches beside each other."""
    parts: dict[int, LossPart] = {}
    # float16 and bfloat16 are too narrow for a sum; that of a trainer is float64.
    least = torch.float64 if spec.updates else torch.float32
    for stage, microbatches in enumerate(schedule.numbers):
        by_microbatch = {
            m: low.loss.leaves[0]
            for m in microbatches
            if (low := lowered.get((stage, m))) and low.loss is not None
        }
        losses = list(by_microbatch.values())
        if len({replace(loss, grad=True) for loss in losses}) > 1:
            raise ValueError(
                f"stage {schedule.model_stages[stage]} gives losses of different forms for different"
                f" microbatches, {' and '.join(map(str, dict.fromkeys(losses)))}; expected one dtype: cast"
                " the loss"
            )
        if losses:
            wide = torch.promote_types(losses[0].dtype, least)
            shape, each = (len(losses), *losses[0].shape), "losses" in spec.wants
            leaf = LeafSignature((2, *shape) if each else shape, wide, False)
            parts[stage] = LossPart(schedule.placement[stage], leaf, tuple(by_microbatch) if each else ())
    return parts


# -- what a step would not carry out, and stages that do not train


def require_carry(schedule: Schedule, spec: StepSpec) -> None:
    """Raise ValueError for last carries of a schedule without slices, or with replicas."""
    if "carry" in spec.wants and not schedule.slices:
        raise ValueError(
            f"return_carry: got True, and the schedule {schedule.name!r} has no slices; leave it out"
        )
    if "carry" in spec.wants and schedule.replicas:
        raise ValueError(
            f"return_carry: got True, and stages of the schedule {schedule.name!r} have replicas, in several"
            " places; leave it out"
        )


def _require_same_rows(form: StepForm, microbatches: int) -> None:
    """Raise ValueError for targets or extras with other rows than the inputs: a loss might broadcast."""
    for name, tree in form.trees.items():
        if form.rows and tree.rows and tree.rows != form.rows:  # 0 of a batch without leaves
            raise ValueError(
                f"{name}: got {tree.rows * microbatches} rows in axis 0, the inputs have"
                f" {form.rows * microbatches}; expected the same rows, or ppfunc.microbatch({name},"
                f" {microbatches}) where this is meant"
            )


def _require_layouts(
    model: int, boundary: Boundary, params: Signature, senders: Sequence[int], received: Sequence[Signature],
    along: int,
) -> None:  # fmt: skip
    for name, leaf in zip(leaf_names(params), params.leaves, strict=True):
        if name in boundary.params and leaf.layout != boundary.params[name]:
            raise ValueError(
                f"params[{model}] {name!r}: got {leaf}, the stage was made for a DTensor"
                f" {boundary.params[name]}; give the parameters that pp.parallelize returned, or new values"
                " of their placements"
            )
    for n, (source, signature) in enumerate(zip(senders, received, strict=True)):
        if source == BATCH and boundary.inputs is None:
            continue  # a plain function takes the parts as they are
        wanted = signature.local.laid_out(
            boundary.mesh, boundary.inputs if n < along else None, f"the input of stage {model}"
        )
        for path, got, want in zip(signature.paths, signature.leaves, wanted.leaves, strict=True):
            if not same_placement(got.layout, want.layout):
                sender = "the batch" if source == BATCH else f"stage {source}"
                raise ValueError(
                    f"x{path}: {sender} gives {got}, and stage {model} declares"
                    f" {want.layout or 'none that is cut'}; declare the same at both ends:"
                    " pp.parallelize(..., inputs=, outputs=), or pp.with_layouts"
                )


def _require_loss(low: LoweredStage, loss: Signature, spec: StepSpec) -> None:
    if low.call.function.loss_fn is None and not loss.leaves:
        return
    got, shape = ", ".join(map(str, loss.leaves)) or "nothing", spec.loss_shape
    if len(loss.leaves) != 1 or loss.leaves[0].shape != shape or not loss.leaves[0].dtype.is_floating_point:
        wanted = f"floating tensor of shape {list(shape)}, the loss_shape" if shape else "floating scalar"
        raise ValueError(
            f"the loss of stage {low.model_stage} must be a {wanted}, got {got}; take its mean or sum,"
            " in real numbers, or, for the losses of an ensemble, pass loss_shape=(number of models,)"
        )
    if "loss" not in spec.wants:
        raise ValueError(
            f"stage {low.model_stage} returns an auxiliary loss, and evaluate without a loss function returns"
            " none; give it a loss function"
        )


def _require_wanted(low: LoweredStage, form: StepForm, spec: StepSpec, replicated: bool) -> None:
    stage, metrics, state = low.model_stage, low.metrics, low.state
    if low.aux.leaves and "aux" not in spec.wants:
        raise ValueError(
            f"loss_fn: it returns a loss and {low.aux}; pass has_aux=True to get both, or return the loss"
            " alone"
        )
    if (metrics.leaves or state.leaves) and "aux" not in spec.wants:
        raise ValueError(
            f"stage {stage} returns {'metrics' if metrics.leaves else 'a state'}; pass has_aux=True to get"
            " them; where a module only reads its buffers, stage_from_module(module, constants=True) has no"
            " state"
        )
    before = form.state.get(stage)
    if (state.leaves or (before is not None and before.leaves)) and (
        before is None or not _same_state(before, state)
    ):
        got, given = (str(state), "none") if before is None else state.beside(before)
        raise ValueError(
            f"stage {stage} returns the state {got}, it was given {given}; pass state={{{stage}: ...}} of"
            " that form"
        )
    if state.leaves and replicated:
        raise ValueError(
            f"stage {stage} returns a state, and this schedule runs replicas of it side by side, which would"
            " each have another; use a schedule with one chain, such as dualpipev, or"
            " stage_from_module(module, constants=True) where buffers are only read"
        )
    for path, leaf in zip(low.outputs.paths, low.outputs.leaves, strict=True):
        if form.rows is not None and (not leaf.shape or leaf.shape[0] != form.rows):
            raise ValueError(
                f"the output{path} of stage {stage} is {leaf}, which has no axis of {form.rows} rows to join"
                " to those of the whole batch; give the inputs as ppfunc.microbatch(inputs, m), to get the"
                " outputs of each microbatch"
            )


def _same_state(before: Signature, state: Signature) -> bool:
    """Tell whether a state has the form of the state before; a plain tensor may stand for a local tensor."""
    laid = all(
        new.layout in (None, old.layout) for old, new in zip(before.leaves, state.leaves, strict=False)
    )
    return laid and before.without_grad().local == state.without_grad().local


def _warn_of_detached(microbatches: Sequence[LoweredStage]) -> None:
    """Warn of a stage whose loss or output passes no gradient on, in any microbatch: it does not train."""
    low = microbatches[0]
    trained = any(leaf.grad and n not in low.call.function.frozen for n, leaf in enumerate(low.params.leaves))
    reached = trained or any(edge.carrying for each in microbatches for edge in each.sources)
    losses = [each.loss.leaves[0] for each in microbatches if each.loss is not None]
    sinks = [edge for each in microbatches for edge in each.sinks if not edge.shift]
    passes = [*losses, *(leaf for edge in sinks for leaf in edge.leaves)]
    if reached and not any(leaf.grad for leaf in passes):
        warn(
            f"stage {low.model_stage}: its {'output' if sinks else 'loss'} passes no gradient on, so that"
            " neither its parameters nor the stages before it train; it was made by detach(), under no_grad()"
            " or of integers: remove that; where it is meant, call requires_grad_(False) on the module"
        )

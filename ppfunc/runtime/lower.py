"""Lower stages, a loss and a schedule to what every instruction means for given shapes; values only.

Stages are visited in the order of the data. Each is evaluated abstractly, once for every distinct input,
which gives the signature of every edge. Nothing is traced, nothing runs, and no message is sent but the
signatures that cross from process to process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ppfunc.schedule import Instruction, Op, Schedule
from ppfunc.stage import LeafSignature, Loss, Outline, Signature, Stage
from ppfunc.stage.layout import Boundary, same_placement
from ppfunc.stage.output import children, received_signature

from .arguments import StepForm
from .buffers import Buffers, Key
from .gradients import Gradients
from .overlap import Overlapped
from .stage_programs import StageFunction, outline_of
from .ties import Tied, leaf_names
from .transport import LossPart

BATCH = -1
"""The "stage" that the batch comes from."""


class ParameterUpdate(NamedTuple):
    """Carry out REDUCE_GRAD and STEP. All functions read and write ``buffers.carry``, the caller's own.

    Args:
        sums: ``sums(buffers, stage of the model, {number of the leaf: signature of the sum of its gradients})`` is what gradients
            are added up in; None for memory that is made in every step.
        reduce: at REDUCE_GRAD, ``reduce(buffers, stage of the model, what its gradients were added up in, numbers of the leaves)``.
        join: once in a program, ``join(buffers, weighted losses by stage of the schedule)``: between its last REDUCE_GRAD and its
            first STEP, or in the end.
        step: at STEP, ``step(buffers, stage of the model)``; puts new parameters into ``buffers.params`` for a further pass.
        finish: after the last pass, before the step ends on all ranks, ``finish(buffers)``.
        unshard: at UNSHARD, ``unshard(buffers, stage of the model)`` puts whole parameters into ``buffers.params``, and this rank's
            shards of them into ``buffers.shards``; None where parameters are whole.
        together: whether every STEP comes after ``join``; else each comes where the schedule has it, and ``join`` in the end.
    """

    sums: Callable[[Buffers, int, dict[int, LeafSignature]], Gradients] | None
    reduce: Callable[[Buffers, int, Gradients, Sequence[int]], None]
    join: Callable[[Buffers, dict[int, torch.Tensor]], None]
    step: Callable[[Buffers, int], None]
    finish: Callable[[Buffers], None]
    together: bool
    unshard: Callable[[Buffers, int], None] | None = None


class StepSpec(NamedTuple):
    """The results that the caller wants of a step, and how they are formed.

    Args:
        name: of the function that made it, with what changes the program; compared between ranks.
        wants: of ``"loss"``, ``"grads"``, ``"input_grads"``, ``"outputs"``, ``"aux"``.
        per_microbatch: whether the gradients of microbatches are kept apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; in turn where there is none.
        tied: the places of tied parameters.
        sum_dtype: of the sums of gradients, where that of a parameter is narrower.
        update: what REDUCE_GRAD and STEP do; they are refused where there is none.
        primal: the key of the parameters proper where a transform has added tangents to them, such as ``"0."``.
    """

    name: str
    wants: frozenset[str]
    per_microbatch: bool = False
    loss_shape: tuple[int, ...] = ()
    overlapped: Overlapped | None = None
    tied: Tied = ()
    sum_dtype: torch.dtype | None = None
    primal: str = ""
    update: ParameterUpdate | None = None


class Edge(NamedTuple):
    """One part of a stage's input, or of its output, for one microbatch.

    Args:
        stage: the stage of the schedule at the other end, ``BATCH`` for the batch.
        signature: of what travels.
    """

    stage: int
    signature: Signature

    @property
    def leaves(self) -> tuple[LeafSignature, ...]:
        """Signatures of the tensors that travel forward."""
        return self.signature.leaves

    @property
    def carrying(self) -> tuple[LeafSignature, ...]:
        """Those whose gradients travel back."""
        return tuple(leaf for leaf in self.leaves if leaf.grad)


class LoweredStage(NamedTuple):
    """One stage for one form of its arguments.

    Args:
        model: its number in the model.
        function: the stage with its loss, in the form that engines take.
        example: ``(params, x, *extras)``: signatures, or trees of tensors.
        params: signature of its parameters; the leaves with ``grad`` get gradients.
        device: where it computes.
        outline: of the function.
        sources: where the parts of its input come from: the stage before or the batch, then skip connections.
        sinks: where its output goes: the stage after it, if any, then skip connections.
        loss: signature of the loss, None where the stage has none.
        outputs, metrics, state: signatures of what is not differentiated, in the order of the output.
    """

    model: int
    function: StageFunction
    example: tuple[Any, ...]
    params: Signature
    device: torch.device
    outline: Outline
    sources: tuple[Edge, ...]
    sinks: tuple[Edge, ...]
    loss: Signature | None
    outputs: Signature
    metrics: Signature
    state: Signature

    @property
    def kept(self) -> int:
        """The number of output leaves that the caller may want: loss, outputs, metrics."""
        return (self.loss is not None) + len(self.outputs.leaves) + len(self.metrics.leaves)


class Exchange(Protocol):
    """Passes the signatures of edges between processes."""

    def send(self, edge: tuple[int, int], signatures: Sequence[Signature]) -> None:
        """Tell the process of stage ``edge[1]`` the signature of every microbatch on this edge."""
        ...

    def recv(self, edge: tuple[int, int]) -> Sequence[Signature]:
        """The signatures on an edge from another process."""
        ...


class LoweredStep(NamedTuple):
    """A step, lowered: values only.

    Args:
        schedule: proved, with communication placed.
        spec: what is wanted.
        form: of the arguments.
        ranks: those of this process.
        stages: the stages of this process, by (stage of the schedule, microbatch).
        losses: form of the losses of the stages of this process, by stage of the schedule.
        drawing: the stages of the model, of this process, that are known to draw random numbers.
    """

    schedule: Schedule
    spec: StepSpec
    form: StepForm
    ranks: tuple[int, ...]
    stages: Mapping[Key, LoweredStage]
    losses: Mapping[int, LossPart]
    drawing: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<lowered {self.spec.name}, {self.schedule!r}>"

    def edge_of(self, message: Instruction) -> Edge:
        """The edge that a SEND or RECV of this process is about."""
        assert message.microbatch is not None
        low, other = self.stages[message.stage, message.microbatch], self.schedule.other_end(message)
        return next(edge for edge in (low.sinks if message.op in (Op.SEND_F, Op.RECV_B) else low.sources) if edge.stage == other)


def lower(
    stages: Sequence[Stage | None],
    loss_fn: Loss | None,
    schedule: Schedule,
    form: StepForm,
    spec: StepSpec,
    *,
    ranks: Sequence[int] | None = None,
    exchange: Exchange | None = None,
    example: Callable[[int], Any] | None = None,
) -> LoweredStep:
    """Work out what every instruction of the schedule means for arguments of this form.

    Args:
        stages: one function per stage of the model, None for those that no rank of this process runs.
        loss_fn: ``loss(y, target) -> scalar``, None where no loss is wanted.
        schedule: proved, with communication placed.
        form: signatures of the arguments.
        spec: what the caller wants.
        ranks: the ranks of this process; by default all.
        exchange: passes signatures to and from other processes; needed where ``ranks`` are not all.
        example: the parameters of a stage of the model as tensors, for what signatures do not tell.

    Raises:
        ValueError: an instruction, or an output of a stage, that nothing will honour.
        StageError: a stage cannot be evaluated.
    """
    require_honoured(schedule, spec)
    _require_same_rows(form, schedule.microbatches)
    local = set(range(schedule.ranks) if ranks is None else ranks)
    home, model = schedule.placement, schedule.model_stages
    edges: dict[tuple[int, int], Sequence[Signature]] = {}
    lowered: dict[Key, LoweredStage] = {}
    for stage, microbatches in stages_in_order(schedule):
        if home[stage] not in local:
            continue
        sources, sinks = sources_of(schedule, stage), sinks_of(schedule, stage)
        for source in sources:
            if source == BATCH:
                edges[source, stage] = _inputs(form, spec, microbatches)
            elif home[source] not in local:
                edges[source, stage] = _required(exchange).recv((source, stage))
        function = _function(stages[model[stage]], loss_fn, schedule, spec, stage)
        params = form.params[model[stage]] if example is None else example(model[stage])
        known: dict[tuple[Any, ...], LoweredStage] = {}  # microbatches of one form share it
        for n, m in enumerate(microbatches):
            received = tuple(Edge(source, edges[source, stage][n]) for source in sources)
            extras = _extras(form, model[stage], m, function)
            if (received, extras) not in known:
                known[received, extras] = _lower_stage(schedule, form, spec, stage, function, params, received, extras)
            lowered[stage, m] = known[received, extras]
        for n, sink in enumerate(sinks):
            edges[stage, sink] = [lowered[stage, m].sinks[n].signature for m in microbatches]
            if home[sink] not in local:
                _required(exchange).send((stage, sink), edges[stage, sink])
    drawing = tuple(sorted({low.model for low in lowered.values() if low.outline.random}))
    return LoweredStep(schedule, spec, form, tuple(sorted(local)), lowered, _losses(schedule, lowered), drawing)


def require_honoured(schedule: Schedule, spec: StepSpec) -> None:
    """Raise ValueError for an instruction that a step would not carry out."""
    mend = "take ppfunc.schedule.remove_tail(schedule), and do it in your own code"
    refused = {
        Op.STEP: f"a step returns gradients and runs no optimizer; {mend}",
        Op.REDUCE_GRAD: f"there are no data parallel ranks to sum over; {mend}",
        Op.UNSHARD: "parameters are given whole; leave it out of the schedule",
        Op.RESHARD: "parameters are given whole; leave it out of the schedule",
    }
    if spec.update is not None:
        del refused[Op.STEP], refused[Op.REDUCE_GRAD]
        if spec.update.unshard is not None:
            del refused[Op.UNSHARD], refused[Op.RESHARD]
    if not schedule.replicas and not spec.tied:
        refused[Op.REDUCE_TIED] = f"no stage of this schedule has replicas, and no tied parameters are declared; {mend}"
    for op in (op for op in refused if op in schedule.ops):
        rank, position, instruction = next(
            (r, n, i) for r, program in enumerate(schedule.programs) for n, step in enumerate(program) for i in step if i.op is op
        )
        raise ValueError(
            f"the schedule {schedule.name!r} has {instruction} (rank {rank}, step {position}), which nothing would honour: {refused[op]}"
        )


def _require_same_rows(form: StepForm, microbatches: int) -> None:
    """Raise ValueError where targets or extras have other rows than the inputs: a loss might broadcast over them."""
    for name, rows in form.other_rows.items():
        if form.rows and rows and rows != form.rows:  # 0 of a batch without leaves
            raise ValueError(
                f"{name}: got {rows * microbatches} rows in axis 0, the inputs have {form.rows * microbatches}; expected the same rows, "
                f"or ppfunc.microbatch({name}, {microbatches}) where it is meant"
            )


def stages_in_order(schedule: Schedule) -> Iterator[tuple[int, range]]:
    """Every stage after all that it gets data from, with its microbatches; the same on every rank."""
    for chain in schedule.chains:
        for stage in chain.stages:
            yield stage, chain.microbatches


def sources_of(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Where the input of a stage comes from: the stage before it or the batch, then skip connections."""
    before = schedule.predecessor(stage)
    skips = sorted((a for a, b in schedule.skips if b == stage), key=schedule.model_stages.__getitem__)
    return (BATCH if before is None else before, *skips)


def sinks_of(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Where the output of a stage goes: the stage after it, if any, then skip connections."""
    after = schedule.successor(stage)
    skips = sorted((b for a, b in schedule.skips if a == stage), key=schedule.model_stages.__getitem__)
    return (*(() if after is None else (after,)), *skips)


def _function(fn: Stage | None, loss_fn: Loss | None, schedule: Schedule, spec: StepSpec, stage: int) -> StageFunction:
    """A stage as it stands in its chain."""
    model, last = schedule.model_stages, schedule.successor(stage) is None
    if fn is None:
        raise ValueError(f"stages[{model[stage]}]: got None, but this process runs that stage; give its function")
    skips = tuple(model[sink] for sink in sinks_of(schedule, stage)[int(not last) :])
    loss_fn = loss_fn if last else None
    return StageFunction.of(fn, last=last, loss_fn=loss_fn, return_outputs="outputs" in spec.wants, skips=skips)


def _extras(form: StepForm, model: int, m: int, function: StageFunction) -> tuple[Signature, ...]:
    """Signatures of what follows the input: the target, the extras, the state."""
    target = (form.targets[m],) if function.loss_fn is not None and form.targets is not None else ()
    extras = (form.extras[model][m],) if model in form.extras else ()
    state = (form.state[model],) if model in form.state else ()
    return (*target, *extras, *state)


def _lower_stage(
    schedule: Schedule,
    form: StepForm,
    spec: StepSpec,
    stage: int,
    function: StageFunction,
    params: Any,
    received: tuple[Edge, ...],
    extras: tuple[Signature, ...],
) -> LoweredStage:
    """Lower a stage for these parts of its input."""
    model = schedule.model_stages[stage]
    boundary = Boundary.of(function.fn)
    givers = [BATCH if edge.stage == BATCH else schedule.model_stages[edge.stage] for edge in received]
    signatures = [edge.signature for edge in received]
    _require_layouts(model, boundary, form.params[model], zip(givers, signatures, strict=True))
    example = (params, received_signature(givers, signatures), *extras)
    outline = outline_of(function, example, f"stage {model}", form.devices[model])
    carry, skips, loss = children(outline.y)
    outputs, metrics, state = children(outline.aux)
    carry, outputs = (tree.laid_out(boundary.mesh, boundary.outputs, f"the output of stage {model}") for tree in (carry, outputs))
    sent = (*(() if schedule.successor(stage) is None else (carry,)), *children(skips))
    sinks = tuple(map(Edge, sinks_of(schedule, stage), sent))
    low = LoweredStage(
        model, function, example, form.params[model], form.devices[model], outline, received, sinks,
        loss if loss.leaves else None, outputs, metrics, state,
    )  # fmt: skip
    _require_loss(low, loss, spec)
    _require_wanted(low, form, spec, bool(schedule.replicas))
    return low


def _require_layouts(model: int, boundary: Boundary, params: Signature, received: Iterable[tuple[int, Signature]]) -> None:
    """Raise where a stage is given parts of tensors that lie otherwise than it declares."""
    for name, leaf in zip(leaf_names(params), params.leaves, strict=True):
        if name in boundary.params and leaf.layout != boundary.params[name]:
            raise ValueError(
                f"params[{model}] {name!r}: got {leaf}, the stage was made for a DTensor {boundary.params[name]}; "
                "give the parameters that pp.parallelize returned, or new values of their placements"
            )
    for n, (source, signature) in enumerate(received):
        if source == BATCH and boundary.inputs is None:
            continue  # a plain function takes the parts as they are
        wanted = signature.parts.laid_out(boundary.mesh, boundary.inputs if n == 0 else None, f"the input of stage {model}")
        for path, got, want in zip(signature.paths, signature.leaves, wanted.leaves, strict=True):
            if not same_placement(got.layout, want.layout):
                giver = "the batch" if source == BATCH else f"stage {source}"
                raise ValueError(
                    f"x{path}: {giver} gives {got}, and stage {model} declares {want.layout or 'none that is cut'}; "
                    "declare the same at both ends: pp.parallelize(..., inputs=, outputs=), or pp.with_layouts"
                )


def _require_loss(low: LoweredStage, loss: Signature, spec: StepSpec) -> None:
    """Raise where a loss has another form than wanted, or is one that the caller cannot get."""
    if low.function.loss_fn is None and not loss.leaves:
        return
    got, shape = ", ".join(map(str, loss.leaves)) or "nothing", spec.loss_shape
    if len(loss.leaves) != 1 or loss.leaves[0].shape != shape or not loss.leaves[0].dtype.is_floating_point:
        wanted = f"floating tensor of shape {list(shape)}, the loss_shape" if shape else "floating scalar"
        mend = "return one of that shape, or pass another loss_shape" if shape else "take its mean or sum"
        raise ValueError(f"the loss of stage {low.model} must be a {wanted}, got {got}; {mend}")
    if "loss" not in spec.wants:
        raise ValueError(
            f"stage {low.model} returns an auxiliary loss, and evaluate without a loss function returns none; give it a loss function"
        )


def _require_wanted(low: LoweredStage, form: StepForm, spec: StepSpec, replicated: bool) -> None:
    """Raise where a stage returns metrics, a state or outputs that the caller did not ask for or cannot get."""
    stage, metrics, state = low.model, low.metrics, low.state
    if (metrics.leaves or state.leaves) and "aux" not in spec.wants:
        got, mend = "metrics", ""
        if not metrics.leaves:
            got, mend = "a state", "; where a module only reads its buffers, stage_from_module(module, constants=True) has no state"
        raise ValueError(f"stage {stage} returns {got}; pass has_aux=True to get them{mend}")
    given = form.state.get(stage)
    if (state.leaves or (given is not None and given.leaves)) and (given is None or not _same_state(given, state)):
        raise ValueError(
            f"stage {stage} returns the state {state}, it was given {given or 'none'}; pass state={{{stage}: ...}} of that form"
        )
    if state.leaves and replicated:
        raise ValueError(
            f"stage {stage} returns a state, and this schedule runs replicas of it side by side, which would each have another; "
            "use a schedule with one chain, such as dualpipev, or stage_from_module(module, constants=True) "
            "where buffers are only read"
        )
    for path, leaf in zip(low.outputs.paths, low.outputs.leaves, strict=True):
        if form.rows is not None and (not leaf.shape or leaf.shape[0] != form.rows):
            raise ValueError(
                f"the output{path} of stage {stage} is {leaf}, which has no axis of {form.rows} rows to join to "
                f"those of the whole batch; give the inputs as ppfunc.microbatch(inputs, m), to get the outputs of each microbatch"
            )


def _same_state(given: Signature, state: Signature) -> bool:
    """Whether a state has the form of the one before; plain tensors stand for parts that lie as those before."""
    laid = all(new.layout in (None, old.layout) for old, new in zip(given.leaves, state.leaves, strict=False))
    return laid and given.without_grad().parts == state.without_grad().parts


def _inputs(form: StepForm, spec: StepSpec, microbatches: range) -> list[Signature]:
    """Signatures of the batch for the microbatches of a chain."""
    if form.inputs is None:
        raise ValueError("inputs: got None, but this process runs the first stage, which needs them")
    given = form.inputs[microbatches.start : microbatches.stop]
    changed = {s: s.with_grad() if "input_grads" in spec.wants else s for s in set(given)}
    return [changed[s] for s in given]


def _required(exchange: Exchange | None) -> Exchange:
    if exchange is None:
        raise ValueError("got ranks of this process that are not all, and no exchange to pass signatures to the others")
    return exchange


def _losses(schedule: Schedule, lowered: Mapping[Key, LoweredStage]) -> dict[int, LossPart]:
    """The form of the losses of every stage that has some: those microbatches that have one, beside each other."""
    found: dict[int, LossPart] = {}
    for stage, microbatches in stages_in_order(schedule):
        losses = [low.loss.leaves[0] for m in microbatches if (low := lowered.get((stage, m))) and low.loss is not None]
        if len(set(losses)) > 1:
            raise ValueError(
                f"stage {schedule.model_stages[stage]} gives losses of different forms for different microbatches, "
                f"{' and '.join(map(str, dict.fromkeys(losses)))}; expected one dtype: cast the loss"
            )
        if losses:
            leaf = LeafSignature((len(losses), *losses[0].shape), losses[0].dtype, False)
            found[stage] = LossPart(schedule.placement[stage], leaf)
    return found

"""Lower stages, a loss and a schedule to what every instruction means for given shapes; values only.

Stages are visited in the order of the data. Each is evaluated abstractly, once for every distinct input,
which gives the signature of every edge. Nothing is traced, nothing runs, and no message is sent but the
signatures that cross from process to process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ppfunc.schedule import Op, Schedule
from ppfunc.stage import LeafSignature, Loss, Outline, Signature, Stage
from ppfunc.stage.output import children, received_signature

from .arguments import StepForm
from .overlap import Overlapped
from .stage_programs import StageFunction, outline_of
from .transport import LossPart

BATCH = -1
"""The "stage" that the batch comes from."""

Key = tuple[int, int]  # (stage of the schedule, microbatch)


class StepSpec(NamedTuple):
    """The results that the caller wants of a step, and how they are formed.

    Args:
        name: of the function that made it, with what changes the program; compared between ranks.
        wants: of ``"loss"``, ``"grads"``, ``"input_grads"``, ``"outputs"``, ``"aux"``.
        per_microbatch: whether the gradients of microbatches are kept apart.
        loss_shape: shape of the loss of one microbatch.
        overlapped: runs the two parts of an ``OVERLAP_F_B``; in turn where there is none.
    """

    name: str
    wants: frozenset[str]
    per_microbatch: bool = False
    loss_shape: tuple[int, ...] = ()
    overlapped: Overlapped | None = None


class LoweredStage(NamedTuple):
    """One stage for one form of its arguments.

    Args:
        function: the stage with its loss, in the form that engines take.
        example: ``(params, x, *extras)``: signatures, or trees of tensors.
        device: where it computes.
        outline: of the function.
        sources: where the parts of its input come from: the stage before or the batch, then skip connections.
        received: signature of each part.
        sinks: where its output goes: the stage after it, if any, then skip connections.
        sent: signature of what goes to each.
        loss: signature of the loss, None where the stage has none.
        outputs, metrics, state: signatures of what is not differentiated, in the order of the output.
    """

    function: StageFunction
    example: tuple[Any, ...]
    device: torch.device
    outline: Outline
    sources: tuple[int, ...]
    received: tuple[Signature, ...]
    sinks: tuple[int, ...]
    sent: tuple[Signature, ...]
    loss: Signature | None
    outputs: Signature
    metrics: Signature
    state: Signature


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
    require_honoured(schedule)
    _require_same_rows(form, schedule.microbatches)
    local = set(range(schedule.ranks) if ranks is None else ranks)
    home, model = schedule.placement, schedule.model_stages
    edges: dict[tuple[int, int], Sequence[Signature]] = {}
    lowered: dict[Key, LoweredStage] = {}
    for stage, microbatches in stages_in_order(schedule):
        if home[stage] not in local:
            continue
        for source in sources_of(schedule, stage):
            if source == BATCH:
                edges[source, stage] = _inputs(form, spec, microbatches)
            elif home[source] not in local:
                edges[source, stage] = _required(exchange).recv((source, stage))
        params = form.params[model[stage]] if example is None else example(model[stage])
        lower_one = _StageLowering(stages[model[stage]], loss_fn, schedule, spec, stage, params, form)
        for n, m in enumerate(microbatches):
            received = tuple(edges[source, stage][n] for source in sources_of(schedule, stage))
            lowered[stage, m] = lower_one(received, m)
        for n, sink in enumerate(sinks_of(schedule, stage)):
            edges[stage, sink] = [lowered[stage, m].sent[n] for m in microbatches]
            if home[sink] not in local:
                _required(exchange).send((stage, sink), edges[stage, sink])
    drawing = tuple(sorted({model[stage] for (stage, _), low in lowered.items() if low.outline.random}))
    return LoweredStep(schedule, spec, form, tuple(sorted(local)), lowered, _losses(schedule, lowered), drawing)


def require_honoured(schedule: Schedule) -> None:
    """Raise ValueError for an instruction that a step would not carry out."""
    mend = "take ppfunc.schedule.remove_tail(schedule), and do it in your own code"
    refused = {
        Op.STEP: f"a step returns gradients and runs no optimizer; {mend}",
        Op.REDUCE_GRAD: f"there are no data parallel ranks to sum over; {mend}",
        Op.UNSHARD: "parameters are given whole; leave it out of the schedule",
        Op.RESHARD: "parameters are given whole; leave it out of the schedule",
    }
    if not schedule.replicas:
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


class _StageLowering:
    """Lowers one stage of the schedule, once per form of its arguments."""

    def __init__(
        self,
        fn: Stage | None,
        loss_fn: Loss | None,
        schedule: Schedule,
        spec: StepSpec,
        stage: int,
        params: Any,
        form: StepForm,
    ) -> None:
        model = schedule.model_stages
        if fn is None:
            raise ValueError(f"stages[{model[stage]}]: got None, but this process runs that stage; give its function")
        self.form, self.params, self.model = form, params, model[stage]
        self.sources, self.sinks = sources_of(schedule, stage), sinks_of(schedule, stage)
        self.skip_sources = tuple(model[s] for s in self.sources[1:])
        self.last = schedule.successor(stage) is None
        self.targeted = self.last and loss_fn is not None
        self.spec, self.replicated = spec, bool(schedule.replicas)
        self.function = StageFunction.of(
            fn,
            last=self.last,
            loss_fn=loss_fn if self.last else None,
            return_outputs="outputs" in spec.wants,
            skips=tuple(model[s] for s in self.sinks[int(not self.last) :]),
        )
        self.known: dict[tuple[Signature, ...], LoweredStage] = {}

    def __call__(self, received: tuple[Signature, ...], microbatch: int) -> LoweredStage:
        """The stage for these parts of its input."""
        extras = self._extras(microbatch)
        key = (*received, *extras)
        if key not in self.known:
            self.known[key] = self._lower(received, extras)
        return self.known[key]

    def _extras(self, m: int) -> tuple[Signature, ...]:
        """Signatures of what follows the input: the target, the extras, the state."""
        form, stage = self.form, self.model
        target = (form.targets[m],) if self.targeted and form.targets is not None else ()
        extras = (form.extras[stage][m],) if stage in form.extras else ()
        state = (form.state[stage],) if stage in form.state else ()
        return (*target, *extras, *state)

    def _lower(self, received: tuple[Signature, ...], extras: tuple[Signature, ...]) -> LoweredStage:
        name, device = f"stage {self.model}", self.form.devices[self.model]
        example = (self.params, received_signature((BATCH, *self.skip_sources), received), *extras)
        outline = outline_of(self.function, example, name, device)
        carry, skips, loss = children(outline.y)
        outputs, metrics, state = children(outline.aux)
        sent = (*(() if self.last else (carry,)), *children(skips))
        self._require_wanted(loss, metrics, state)
        if outputs.leaves and self.form.rows is not None:
            self._require_rows(outputs)
        return LoweredStage(
            self.function, example, device, outline, self.sources, received, self.sinks, sent,
            loss if loss.leaves else None, outputs, metrics, state,
        )  # fmt: skip

    def _require_rows(self, outputs: Signature) -> None:
        """Raise where outputs cannot be joined to those of a whole batch."""
        for path, leaf in zip(outputs.paths, outputs.leaves, strict=True):
            if not leaf.shape or leaf.shape[0] != self.form.rows:
                raise ValueError(
                    f"the output{path} of stage {self.model} is {leaf}, which has no axis of {self.form.rows} rows to join to "
                    f"those of the whole batch; give the inputs as ppfunc.microbatch(inputs, m), to get the outputs of each microbatch"
                )

    def _require_wanted(self, loss: Signature, metrics: Signature, state: Signature) -> None:
        """Raise where the stage returns something that nobody asked for or that the caller cannot get."""
        stage, shape = self.model, self.spec.loss_shape
        if self.targeted or loss.leaves:
            got = ", ".join(map(str, loss.leaves)) or "nothing"
            if len(loss.leaves) != 1 or loss.leaves[0].shape != shape or not loss.leaves[0].dtype.is_floating_point:
                wanted = f"floating tensor of shape {list(shape)}, the loss_shape" if shape else "floating scalar"
                mend = "return one of that shape, or pass another loss_shape" if shape else "take its mean or sum"
                raise ValueError(f"the loss of stage {stage} must be a {wanted}, got {got}; {mend}")
            if "loss" not in self.spec.wants:
                raise ValueError(
                    f"stage {stage} returns an auxiliary loss, and evaluate without a loss function returns none; give it a loss function"
                )
        if (metrics.leaves or state.leaves) and "aux" not in self.spec.wants:
            constant = (
                "" if metrics.leaves else "; where a module only reads its buffers, stage_from_module(module, constants=True) has no state"
            )
            raise ValueError(f"stage {stage} returns {'metrics' if metrics.leaves else 'a state'}; pass has_aux=True to get them{constant}")
        given = self.form.state.get(stage)
        if (state.leaves or (given is not None and given.leaves)) and (
            given is None or (given.treedef, given.without_grad().leaves) != (state.treedef, state.without_grad().leaves)
        ):
            raise ValueError(
                f"stage {stage} returns the state {state}, it was given {given or 'none'}; pass state={{{stage}: ...}} of that form"
            )
        if state.leaves and self.replicated:
            raise ValueError(
                f"stage {stage} returns a state, and this schedule runs replicas of it side by side, which would each have another; "
                "use a schedule with one chain, such as dualpipev, or stage_from_module(module, constants=True) "
                "where buffers are only read"
            )


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

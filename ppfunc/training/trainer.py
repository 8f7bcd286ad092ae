"""Train pipelines step by step: gradients, their sums and the update in one schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from ppfunc._checks import naming_arguments, naming_attributes, not_copied
from ppfunc.runtime import (
    InProcess,
    LoweredFunction,
    Microbatches,
    StepFunction,
    StepResult,
    StepSpec,
    Transport,
)
from ppfunc.runtime.lowering.lower import LoweredStep, Overlapped
from ppfunc.runtime.lowering.stage_programs import StagePrograms
from ppfunc.runtime.lowering.ties import TiedPlaces, require_declared_trees
from ppfunc.runtime.paper.analysis import Completed, Shown
from ppfunc.runtime.values.arguments import (
    LossWeights,
    RawArguments,
    Seed,
    StepArguments,
    require_trees,
    require_values,
)
from ppfunc.schedule import (
    Schedule,
    Timeline,
    append_tail,
    forward_only,
    insert_unshards,
    reduce_early,
    remove_tail,
    remove_unshards,
    with_skips,
)
from ppfunc.schedule.errors import require_schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, Signature, graph
from ppfunc.stage.frozen import FrozenLeaves, Trainable
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map
from ppfunc.steps import Stages, make_step, reporting_mistakes, unpacked

from .optim.optimizer import Optimizer, Tree
from .update.buckets import Reducer
from .update.parameter_update import TrainingUpdate
from .update.precision import Precision
from .update.ranks import TrainingRanks
from .update.state import (
    LastState,
    Metrics as Metrics,
    StageTrees,
    TrainState as TrainState,
    initial_state,
    stages_of,
)
from .update.update_rule import OnNonfinite, ReduceState, StateRule, UpdateRule, UpdateState


class LoweredTraining(Shown):
    """Shows a training step that was lowered and has not run; :meth:`Trainer.lower` returns it.

    Bytes are those of ``value_and_grad(...).lower(...)`` with the state and its update; operations are
    counted without those of sums and updates.

    Args:
        step: the gradients.
        state: before the step, on the device meta.
        rule: the rule by which gradients become new parameters.
        ranks: the ranks that train together.
        inputs: the inputs of the caller, on the device meta.
    """

    def __init__(
        self, step: LoweredFunction, state: TrainState, rule: UpdateRule, ranks: TrainingRanks, inputs: Any
    ) -> None:
        super().__init__(step.step, step.programs)
        self.state, self._rule, self._ranks, self._inputs = state, rule, ranks, inputs

    def _completed(self, step: LoweredStep, arguments: StepArguments) -> Completed:
        """Complete the arguments of a rank by an update, whose collectives move nothing."""
        stages, devices = step.schedule.model_stages_of(step.ranks[0]), step.form.devices

        def empty(trees: Mapping[int, Tree]) -> dict[int, Tree]:
            return {s: tree_map(partial(_empty_on, devices[s]), trees[s]) for s in stages if s in trees}

        here, of = partial(_empty_on, devices[stages[0]]), self.state
        state = TrainState(
            here(of.step),
            empty(of.params),
            empty(of.optimizer),
            tree_map(here, of.scale),
            empty(of.stage_state),
        )
        ranks = self._ranks.on_paper(step.ranks)
        update = TrainingUpdate(self._rule, ranks, {}, {}, known=True)
        update.begin_from(state)
        (weights,) = update.begin([None])
        params = {s: ranks.for_step(tree, self._rule.precision) for s, tree in state.params.items()}
        arguments = replace(
            arguments, params=_local_leaves(params), state=_local_leaves(state.stage_state),
            scale=state.scale.get("scale"), update=update,
        )  # fmt: skip
        kept = "shards" if ranks.shards_params else "masters"
        inputs = self._inputs if isinstance(self._inputs, Microbatches) else [self._inputs]
        homes = step.schedule.placement
        heads = any(homes[stage] in step.ranks for stage in step.schedule.heads)
        given = [leaf for tree in inputs for leaf in tree_leaves(tree) if heads]
        cast = [here(leaf) for leaf in given if self._rule.precision.to_compute(leaf) is not leaf]
        read = [*cast, state.step, state.scale, () if weights is None else weights]
        return arguments, {kept: state.params, "optimizer": state.optimizer, "batch": read}


def _along(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the edges between stages of the model, without skip connections."""
    stages = schedule.model_stages
    return {(stages[a], stages[b]) for flow in schedule.flows for a, b in flow.pairs}


@naming_arguments
@naming_attributes
class Trainer:
    """Trains a pipeline by pure functions of a state.

    ``init(params) -> state``, ``step(state, inputs, targets) -> (state, metrics)``, ``evaluate -> loss``.
    The loss function may return ``(loss, aux)``: ``aux``, a tree of tensors, comes back in the metrics.

    Equivalent to, for one step over all data ranks::

        loss, grads = value_and_grad(stages, loss_fn, schedule)(params, inputs, targets)
        params, optimizer_state = optimizer.update(grads, optimizer_state, params)

    A context manager that closes its transport. An error that ends its block on one rank fails the next step
    of the others, with its text.

    Args:
        stages, loss_fn, engine, tied, trainable: the arguments of :func:`value_and_grad`.
        schedule: the program of every rank of a pipeline. ``REDUCE_TIED``, ``REDUCE_GRAD`` and ``STEP`` are
            placed anew.
        optimizer: updates one stage at a time. ``chain(clip_by_global_norm(1.0), adamw(1e-3))`` clips by the
            norm of all stages and ranks.
        transport: ``P2P(mesh=mesh, axes=axes, shard=...)`` for the ranks of a mesh that train together;
            ``InProcess()`` by default. :class:`P2P` says what ``shard`` cuts over the data ranks.
        precision: dtypes of computing, reducing and keeping parameters, and the scale of the loss.
        on_nonfinite: the effect of a loss or gradients that are not finite. ``"skip"`` leaves parameters,
            optimizer and states of stages as they were. ``"raise"`` raises on every rank and names the rank,
            stage, microbatch and instruction that was first; it reads a number from the device in every step,
            and runs a step that fails a second time. ``"ignore"`` updates all the same.
        checksum_every: compare the states of data ranks, and the batches of ranks that run the same, after
            every so many steps, as in the first; the batches of other steps are not compared.
        reduce_state: the reduction of the states of stages, such as running statistics, over the data ranks:
            ``{"*counts": "sum", "*": "mean"}``, by patterns of names: the mean of the states of all data
            ranks, of integers rounded down, or the state before a step and the sum of all changes. Both are
            computed in float64 or int64. Without it, stages with a state are refused if there are several
            data ranks.
        update_state: ``(stage, state) -> state``, called with the state of each stage at the end of a step,
            once it is the same on all data ranks: to change a bias by counts, say. A skipped update leaves
            the state as it was.
        overlapped: the argument of :func:`value_and_grad`, for schedules such as ``dualpipev``.

    Parameters, inputs and the leaves of the state are tensors or DTensors; a stage gets the local tensors.
    In every step, ranks compare their options, the hyperparameters of optimizer and scale, and the seed. For
    a state that is not that of the last step, as the first one or one that was loaded, after a failure, and
    every ``checksum_every`` steps, they also compare updates of constants by the optimizer, checksums of the
    states of data ranks, and of the batch that the ranks of a pipeline, and along the axis ``model``, are
    given. A state that was written into on one rank is found then. Frozen parameters stay as they are,
    without gradients, optimizer state or master copies. Ranks that hold one parameter have to agree that it
    is frozen.

    Raises:
        ScheduleError, ValueError, TypeError: as :func:`value_and_grad`; arguments that do not fit together.
    """

    def __init__(
        self,
        stages: Stages,
        loss_fn: Loss,
        schedule: Schedule,
        optimizer: Optimizer,
        transport: Transport | None = None,
        *,
        engine: Engine | Sequence[Engine] = graph,
        tied: TiedPlaces = None,
        trainable: Trainable = None,
        precision: Precision | None = None,
        on_nonfinite: OnNonfinite = "skip",
        checksum_every: int | None = None,
        reduce_state: ReduceState | None = None,
        update_state: UpdateState | None = None,
        overlapped: Overlapped | None = None,
    ) -> None:
        self.transport: Transport = InProcess() if transport is None else transport
        with reporting_mistakes(self.transport):
            split = stages if isinstance(stages, Split) else None
            stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied)
            frozen = FrozenLeaves(stages, trainable)
            states = StateRule.of(reduce_state, update_state)
            precision = Precision() if precision is None else precision
            rule = UpdateRule.of(optimizer, precision, on_nonfinite, frozen, states)
            shard, reduce = self.transport.shard, rule.precision.reduce
            axes = "" if self.transport.mesh is None else f"; {self.transport.axes}"
            spec = StepSpec(
                "trainer",
                ("loss", "aux"),
                options=f"{rule.options_text}; checksum_every {checksum_every}; shard {shard}{axes}",
                tied=ties,
                sum_dtype=reduce if reduce in (torch.float32, torch.float64) else None,
                updates=True,
                sharded=shard == "params",
                finite=on_nonfinite == "raise",
                frozen=frozen,
                overlapped=overlapped,
            )
            self._make_step = partial(
                make_step, stages, loss_fn, transport=self.transport, engine=engine, read=TrainingUpdate.read
            )
            self._rule, self._spec, self._split, self._last = rule, spec, split, LastState(checksum_every)
            self._run_by(schedule)

    def _run_by(self, schedule: Schedule, programs: StagePrograms | None = None) -> None:
        """Make the step functions of a schedule, completed by the sums, the updates and the gathers."""
        spec = self._spec
        trained, forwards = completed(schedule, spec.sharded, bool(spec.tied))
        self._ranks = TrainingRanks.of(trained, spec.tied, self.transport)
        self._step: StepFunction[..., Any] = self._make_step(schedule=trained, spec=spec, programs=programs)
        evaluating = spec._replace(name=f"evaluation of {spec.name}", finite=False, overlapped=None)
        self._forward: StepFunction[..., Any] = self._make_step(
            schedule=forwards, spec=evaluating, training=False, programs=self._step.pipeline.programs
        )
        self._idle: dict[int, list[Reducer]] = {}
        self._trees: dict[int, StageTrees] = {}  # of the state that was read last

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that trains, with its sums and updates."""
        return self._ranks.schedule

    __reduce__ = not_copied(
        "a trainer", "save its state by ppfunc.checkpoint.save, and make a trainer in each process"
    )

    def __repr__(self) -> str:
        return f"<trainer of {self._step!r}>"

    def with_schedule(self, schedule: Schedule) -> Self:
        """Return the trainer that goes on with the same state by another schedule, and keeps the programs.

        All ranks call it at the same point. As a stage becomes slower, say, a step by the new plan is shorter
        where ``after.value`` is below the makespan of ``simulate(trainer.schedule, costs)``::

            (state, metrics), timeline = trainer.record(state, inputs, targets)
            costs, now = timeline.costs(), trainer.schedule
            after = pp.plan(now.ranks, now.microbatches, costs, placement=now.placement, cap=now.ranks)
            trainer = trainer.with_schedule(after.schedule)

        Raises:
            ValueError: it places stages on other ranks, which would move the state; or has other edges.
            ScheduleError: it is none, or a wrong one.
        """
        trainer = object.__new__(type(self))
        trainer.__dict__ |= self.__dict__
        with reporting_mistakes(self.transport):
            before = self.schedule
            require_schedule(schedule)
            if (schedule.placement, schedule.model_stages) != (before.placement, before.model_stages):
                raise ValueError(
                    f"schedule: got {schedule.name!r} with stages on ranks {list(schedule.placement)}; the"
                    f" state lies on {list(before.placement)}: plan with"
                    " placement=trainer.schedule.placement, or save, and load into a trainer of this schedule"
                )
            if _along(schedule) != _along(before):
                raise ValueError(
                    f"schedule: got {schedule.name!r} with the edges {sorted(_along(schedule))}, expected"
                    f" those of the trainer, {sorted(_along(before))}; plans are chains, and ppfunc.arrange"
                    " puts a graph in order: arrange(now.placement, now.flows, skips=now.skips)"
                )
            edges = {(before.model_stages[a], before.model_stages[b]) for a, b in before.skips}
            schedule = with_skips(schedule, edges) if edges else schedule
            trainer._run_by(schedule, self._step.pipeline.programs)
        return trainer

    @naming_arguments
    def init(
        self,
        params: Mapping[int, Any],
        state: Mapping[int, Any] | None = None,
        optimizer: Mapping[int, Any] | None = None,
    ) -> TrainState:
        """Make the state before the first step.

        Args:
            params: ``{stage: tree}`` of the stages of this process, tensors or DTensors, whole over the data
                ranks, or ``params`` of an earlier state, cut as this trainer keeps them. They are the state's
                afterwards.
            state: likewise of the stages that have a state, such as running statistics. A skipped update
                leaves it as it is.
            optimizer: ``optimizer`` of the state of a trainer with the same optimizer, by stage, in which
                other parameters were frozen. Moments of parameters that go on training are kept, those of
                parameters that train from now on begin as at first.

        Raises:
            TypeError, ValueError: other stages than those of this process; other names than those of a split,
                or none of a state that it has; leaves that are no tensors, or of a dtype that no checkpoint
                holds; stages that share memory and are not tied, which updates would drive apart; a state
                with several data ranks, each of which would get another; a state of another optimizer.
        """
        return self._init(params, {} if state is None else state, {} if optimizer is None else optimizer)

    def _init(
        self, params: Mapping[int, Any], state: Mapping[int, Any], optimizer: Mapping[int, Any],
        *, valued: bool = True,
    ) -> TrainState:  # fmt: skip
        """Make the state before the first step; its tensors have values unless ``valued`` is False."""
        self._require_open()
        stages = self._ranks.stages
        require_trees("params", params, stages)
        require_trees("state", state, stages, some=True)
        require_trees("optimizer", optimizer, stages, some=True)
        if self._split is not None:
            self._split.require_form(params, state)
        initial = initial_state(self._rule, self._ranks, self.transport.device, params, state, optimizer)
        stages_of(self._rule, self._ranks, initial, self._trees)  # raises for an optimizer of other states
        for name, trees in (("params", initial.params), ("state", initial.stage_state)) if valued else ():
            for s, (leaves, treedef) in ((s, tree_flatten(tree)) for s, tree in trees.items()):
                require_values(f"{name}[{s}]", treedef, [leaf.device for leaf in leaves])
        return initial

    @naming_arguments
    def step(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None, carry: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
        return_carry: bool = False,
    ) -> tuple[TrainState, Metrics]:  # fmt: skip
        """Run one step on the batch of this data rank.

        Args:
            inputs, targets, seed, extras: the arguments of :func:`ppfunc.value_and_grad`. Random numbers
                depend on the place of a microbatch among those of all data ranks.
            carry: first carries of the sequences of this data rank, as in :func:`ppfunc.value_and_grad`, in
                their dtypes. ``metrics.carry`` of the step before truncates backpropagation between the
                steps: it has no history, and needs no ``detach``. A skipped update leaves it as the stages
                made it.
            loss_weights: weight of every microbatch, such as its number of tokens; divided by their sum over
                all data ranks. Equal by default. All ranks pass weights, or none does. A microbatch of
                weight 0 contributes nothing, as in :func:`ppfunc.value_and_grad`; over an axis of experts or
                context it runs, since peers take part in it, and its loss has to be finite.
            return_losses, return_outputs, return_norms, return_carry: whether the metrics have the losses of
                all microbatches, the outputs of last stages in the form of the inputs, the norms of the
                gradients by stage and by name, or the last carries. Every rank asks for the same.

        Returns:
            The new state, and :class:`Metrics`. ``state`` stays as it is, unless the optimizer has
            ``donate=True``: then it is gone, also after a step that failed once some of it was updated, and
            so are other states of its tensors, as of another trainer. A second use of ``state`` raises.

        Raises:
            PipelineError, AgreementError, StageError, ValueError, TypeError: as
                :func:`ppfunc.value_and_grad`. Nothing is updated.
        """
        run = self._step.returning(*_wanted(return_losses, return_outputs, return_carry))
        batch = [(inputs, targets)], [loss_weights], seed, [extras], carry
        update, result = self._run(run, self._rule, state, batch, return_norms)
        after, (metrics,) = _state_and_metrics(update, result)
        return after, metrics

    @naming_arguments
    def steps(
        self, state: TrainState, batches: Sequence[tuple[Any, Any]], *,
        loss_weights: Sequence[LossWeights] | None = None, seed: Seed = None,
        extras: Sequence[Mapping[int, Any]] | None = None, carry: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
        return_carry: bool = False,
    ) -> tuple[TrainState, list[Metrics]]:  # fmt: skip
        """Run several steps, which end, or fail, together.

        Equivalent, to the bit, to::

            for n, batch in enumerate(batches):
                state, metrics = step(
                    state, *batch, loss_weights=loss_weights[n], seed=(seed[0], seed[1] + n), extras=extras[n]
                )

        The ranks agree once, before the first step.

        Args:
            batches: inputs and targets of every step, all of one form.
            loss_weights, extras: the weights and extras of every step.
            carry: first carries of the first step, of all stages of this process. Each further step begins
                with the last carries of the step before, which have to have the form of the first. Without
                any, every step begins anew.
            return_losses, return_outputs, return_norms: the arguments of :meth:`step`.
            return_carry: whether the metrics of the last step have its last carries.

        Raises:
            As :meth:`step`.
        """
        kept = return_carry or bool(carry)
        run = self._step.returning(*_wanted(return_losses, return_outputs, kept))
        given = batches, loss_weights, seed, extras, carry
        after, metrics = _state_and_metrics(*self._run(run, self._rule, state, given, return_norms))
        return after, metrics if return_carry else [each._replace(carry=None) for each in metrics]

    @naming_arguments
    def record(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None, carry: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
        return_carry: bool = False,
    ) -> tuple[tuple[TrainState, Metrics], Timeline]:  # fmt: skip
        """Run one step and measure it. Arguments as of :meth:`step`.

        Returns:
            The result of :meth:`step`, and the timeline of all ranks of this pipeline, in seconds.
        """
        run = self._step.returning(*_wanted(return_losses, return_outputs, return_carry)).record
        batch = [(inputs, targets)], [loss_weights], seed, [extras], carry
        update, (result, timeline) = self._run(run, self._rule, state, batch, return_norms)
        after, (metrics,) = _state_and_metrics(update, result)
        return (after, metrics), timeline

    @naming_arguments
    def evaluate(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None, carry: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, has_aux: bool = False,
        return_carry: bool = False,
    ) -> torch.Tensor | StepResult:  # fmt: skip
        """Compute the loss of the batch of all data ranks, on every rank: float64[].

        Args:
            has_aux: whether to return what stages and loss function return beside, as in
                :func:`ppfunc.evaluate`.

        The other arguments are those of :meth:`step`.

        Returns:
            The loss; a :class:`ppfunc.StepResult` if more is asked for. Its ``losses`` are those of all data
            ranks, ``outputs`` and ``aux`` those of this process.

        Raises:
            As :meth:`step`.
        """
        wanted = _wanted(return_losses, return_outputs, return_carry)
        rule = self._rule._replace(on_nonfinite="ignore", optimizer=self._rule.optimizer._replace(rate=None))
        batch = [(inputs, targets)], [loss_weights], seed, [extras], carry
        update, result = self._run(self._forward.returning(*wanted), rule, state, batch)
        (metrics,) = update.metrics
        if not wanted and not has_aux:
            return metrics.loss
        aux = result.aux if has_aux else None
        return StepResult(
            metrics.loss, outputs=result.outputs, aux=aux, losses=metrics.losses, carry=result.carry
        )

    def _run(
        self, run: Callable[..., Any], rule: UpdateRule, state: TrainState, batches: tuple[Any, ...],
        by_leaf: bool = False,
    ) -> tuple[TrainingUpdate, Any]:  # fmt: skip
        """Run a call on a state and the batches of its steps; return the update and the result."""
        self._require_open()
        last, generation, trains = self._last, self.transport.generation, rule is self._rule
        known = last.goes_on(state, generation)
        if trains:  # an evaluation leaves the state as it is; an interrupt may take the result of a step
            last.forget()
        update = TrainingUpdate(rule, self._ranks, self._trees, self._idle, known, by_leaf)
        result = run(update, state, *batches)
        if trains:
            last.note(update.state, generation, len(update.metrics))
        return update, result

    @naming_arguments
    def lower(
        self, params: Mapping[int, Any], inputs: Any, targets: Any = None, *,
        state: Mapping[int, Any] | None = None, extras: Mapping[int, Any] | None = None,
        carry: Mapping[int, Any] | None = None,
    ) -> LoweredTraining:  # fmt: skip
        """Lower a step for arguments of these shapes, and run nothing: its text, memory and cost.

        A trainer with the transport :class:`ppfunc.OnPaper` needs no other process; with :class:`P2P` every
        rank calls it.

        Args:
            params, state: the arguments of :meth:`init`; tensors, also on the device meta, or signatures.
            inputs, targets, extras, carry: the arguments of :meth:`step`, likewise.

        Raises:
            As :meth:`init` and :meth:`step`.
        """
        initial, batch = list[TrainState](), on_meta(inputs)
        update = TrainingUpdate(self._rule, self._ranks, self._trees, {}, known=True)

        def read() -> list[RawArguments]:  # what it raises fails the call on all ranks
            initial.append(
                self._init(on_meta(params), {} if state is None else on_meta(state), {}, valued=False)
            )
            # Only tensors with values can be seen to share memory.
            valued = {s: tree for s, tree in params.items() if not isinstance(tree, Signature)}
            require_declared_trees(valued, self._ranks.tied)
            tensors = ((s, leaf) for s, tree in params.items() for leaf in tree_leaves(tree))
            devices = {
                s: leaf.device for s, leaf in tensors if isinstance(leaf, torch.Tensor) and not leaf.is_meta
            }
            steps = update.read(initial[0], [(batch, on_meta(targets))], None, None, [extras], on_meta(carry))
            return [replace(each, devices=devices) for each in steps]

        lowered = StepFunction(self._step.pipeline, read, lambda result: result).lower()
        return LoweredTraining(lowered, initial[0], self._rule, self._ranks, batch)

    def _require_open(self) -> None:
        if self._last.closed:
            raise RuntimeError(
                "the trainer is closed; take its steps before close(), within its `with` block, or make"
                " another one"
            )

    def close(self) -> None:
        """Close the transport. The trainer takes no steps afterwards."""
        self._last.closed = True
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._last.closed = True
        self.transport.__exit__(kind, error, trace)


def completed(schedule: Schedule, sharded: bool, tied: bool) -> tuple[Schedule, Schedule]:
    """Complete a schedule by sums, updates and gathers; also return the schedule of evaluations."""
    plain = remove_unshards(remove_tail(schedule))
    complete = insert_unshards if sharded else lambda schedule: schedule
    trained = append_tail(complete(plain), tied=tied or bool(schedule.replicas))
    return reduce_early(trained), complete(forward_only(plain))


def _rows_of(tree: Any, n: int, steps: int) -> Any:
    """Take the rows of step ``n`` out of a tree, or Microbatches, of the rows of all steps."""
    if isinstance(tree, Microbatches):
        rows = list(tree)
        size = len(rows) // steps
        return Microbatches(rows[n * size : (n + 1) * size])
    return tree if steps == 1 else tree_map(lambda t: t.tensor_split(steps)[n], tree)


def _wanted(losses: bool, outputs: bool, carry: bool) -> tuple[str, ...]:
    """Return the fields of a StepResult that are asked for."""
    asked = {"losses": losses, "outputs": outputs, "carry": carry}
    return tuple(name for name, wanted in asked.items() if wanted)


def _state_and_metrics(update: TrainingUpdate, result: StepResult) -> tuple[TrainState, list[Metrics]]:
    """Return the new state, and the metrics of every step, completed by the results of stages and loss."""
    count, aux = len(update.metrics), result.aux
    metrics = [  # carries are those of the last step
        each._replace(
            stages={s: _rows_of(tree, n, count) for s, tree in aux.metrics.items()},
            aux=_rows_of(aux.loss, n, count),
            outputs=_rows_of(result.outputs, n, count),
            carry=result.carry if n == count - 1 else None,
        )
        for n, each in enumerate(update.metrics)
    ]
    return update.state._replace(stage_state=aux.state), metrics


def _empty_on(device: torch.device, leaf: torch.Tensor) -> torch.Tensor:
    return distributed(torch.empty_like(local(leaf), device=device), layout_of(leaf))


def _local_leaves(trees: Mapping[int, Tree]) -> dict[int, tuple[torch.Tensor, ...]]:
    return {s: tuple(map(local, tree_leaves(tree))) for s, tree in trees.items()}


def on_meta(tree: Any) -> Any:
    """Replace the tensors of a tree, and signatures of trees in it, by tensors without values."""
    return tree_map(_leaf_on_meta, tree)


def _leaf_on_meta(leaf: Any) -> Any:
    """Take the values of a leaf; a number, a text or a flag stays."""
    if isinstance(leaf, Signature):
        empty = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in leaf.leaves)
        return leaf.unflatten(map(distributed, empty, (each.layout for each in leaf.leaves)))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return distributed(local(leaf).detach().to("meta"), layout_of(leaf))

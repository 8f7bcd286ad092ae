"""Train pipelines step by step: gradients, their sums and the update in one schedule."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import call
from types import TracebackType
from typing import Any, Self

import torch

from ppfunc._step_factory import Stages, make_step, reporting_mistakes, unpacked
from ppfunc._text import answering, naming_arguments
from ppfunc.runtime import InProcess, StepSpec, Transport
from ppfunc.runtime.agreement.ties import TiedPlaces
from ppfunc.runtime.call.arguments import LossWeights, RawArguments, Seed
from ppfunc.runtime.call.forms import require_declared_trees
from ppfunc.runtime.call.results import StepResult
from ppfunc.runtime.lowering.lowered import Updates
from ppfunc.runtime.lowering.overlap import Overlapped
from ppfunc.runtime.lowering.stage_programs import StagePrograms
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
from ppfunc.schedule.proof.structure import require_schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, Signature, graph
from ppfunc.stage.modules.frozen import FrozenLeaves, Trainable

from .batches import Batches, with_results
from .lowered import LoweredTraining, on_meta
from .optim.protocols import Optimizer, text_of
from .update.comparison import KnownState
from .update.initial_state import initial_state
from .update.parameter_update import TrainingUpdate
from .update.precision import Precision
from .update.ranks import TrainingRanks
from .update.reducer import Reducer
from .update.stage_trees import StageTrees, require_trees, trees_of
from .update.states import ReduceState, StateRule, UpdateState
from .update.train_state import Metrics as Metrics, TrainState as TrainState
from .update.update_rule import OnNonfinite, UpdateRule


@answering
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
        stages, loss_fn, engine, loss_engine, tied, trainable: as in :func:`value_and_grad`.
        schedule: the program of every rank of a pipeline. ``REDUCE_TIED``, ``REDUCE_GRAD`` and ``STEP`` are
            placed anew.
        optimizer: updates one stage at a time. ``chain(clip_by_global_norm(1.0), adamw(1e-3))`` clips by the
            norm of all stages and ranks.
        transport: ``P2P(mesh=mesh, axes=axes, shard=...)`` for the ranks of a mesh that train together;
            ``InProcess()`` by default. :class:`P2P` says what ``shard`` cuts over the data ranks.
        precision: dtypes of computing, reducing and keeping parameters, and the scale of the loss.
        on_nonfinite: what a step does if loss or gradients are not finite. ``"skip"`` leaves parameters,
            optimizer and states of stages as they were. ``"raise"`` raises on every rank and names the rank,
            stage, microbatch and instruction that was first; it reads a number from the device in every step,
            and runs a step that fails a second time. ``"ignore"`` updates all the same.
        checksum_every: compare the states of data ranks after every so many steps, as before the first.
        reduce_state: how the states of stages, such as running statistics, go together over the data ranks:
            ``{"*counts": "sum", "*": "mean"}``, by patterns of names. To the state before a step is added the
            sum of the changes of all data ranks, or their mean, of integers rounded down. Without it, stages
            with a state are refused if there are several data ranks.
        update_state: ``(stage, state) -> state``, called with the state of each stage at the end of a step,
            once it is the same on all data ranks: to change a bias by counts, say. A skipped update leaves
            the state as it was.
        overlapped: as in :func:`value_and_grad`, for schedules such as ``dualpipev``.

    Parameters, inputs and the leaves of the state are tensors or DTensors; a stage gets the local tensors.
    In every step, ranks compare their options, the hyperparameters of optimizer and scale, and the seed;
    before the first step and after a failure also updates of constants by the optimizer, and checksums of the
    states of data ranks. A state that no step of this trainer has returned, or that was written into since,
    is compared like the first. Frozen parameters stay as they are, without gradients, optimizer state or
    master copies. Ranks that hold one parameter have to agree that it is frozen.

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
        engine: Engine = graph,
        loss_engine: Engine | None = None,
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
            self._stateful = tuple(stages.state) if isinstance(stages, Split) else ()
            stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied)
            frozen = FrozenLeaves(stages, trainable)
            states = StateRule.of(reduce_state, update_state)
            rule = UpdateRule.of(optimizer, precision or Precision(), on_nonfinite, frozen, states)
            self._rule, shard, reduce = rule, self.transport.shard, rule.precision.reduce
            axes = "" if self.transport.mesh is None else f", {self.transport.axes}"
            self._spec = StepSpec(
                f"trainer {rule.options_text}, shard {shard}{axes}",
                ("loss", "aux"),
                tied=ties,
                sum_dtype=reduce if reduce in (torch.float32, torch.float64) else None,
                updates=Updates(rule.needs_all, shard == "params"),
                finite=on_nonfinite == "raise",
                frozen=frozen,
                overlapped=overlapped,
            )
            self._make_step = partial(
                make_step, stages, loss_fn, transport=self.transport, engine=engine, loss_engine=loss_engine,
                read=call,  # of a partial of _arguments, so that its errors fail the step on all ranks
            )  # fmt: skip
            self._use_schedule(schedule)
        self._closed, self._known_state = False, KnownState(checksum_every)
        self._observed = ""  # the metrics since the last step, which the next one compares
        self._last: torch.Tensor | None = None  # `step` of the state that the last step has returned
        self._begun: int | None = None  # the generation in which a call began that has not returned

    def _use_schedule(self, schedule: Schedule, programs: StagePrograms | None = None) -> None:
        """Make the step functions of a schedule, with the programs of an earlier one."""
        spec, updates = self._spec, self._spec.updates
        assert updates is not None
        self.schedule, forwards = _completed(schedule, updates.sharded, bool(spec.tied))
        self._ranks = TrainingRanks.of(self.schedule, spec.tied, self.transport)
        self._step = self._make_step(schedule=self.schedule, spec=spec, programs=programs)
        programs = self._step.pipeline.programs
        evaluating = spec._replace(name=f"evaluation of {spec.name}", finite=False, overlapped=None)
        self._evaluate = self._make_step(
            schedule=forwards, spec=evaluating, training=False, programs=programs
        )
        self._idle: dict[int, list[Reducer]] = {}
        self._trees: dict[int, StageTrees] = {}  # of the last state

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
            ValueError: it places stages on other ranks, which would move the state.
            ScheduleError: it is none, or a wrong one.
        """
        before, trainer = self.schedule, copy(self)
        with reporting_mistakes(self.transport):
            require_schedule(schedule)
            if (schedule.placement, schedule.model_stages) != (before.placement, before.model_stages):
                raise ValueError(
                    f"schedule: got {schedule.name!r} with stages on ranks {list(schedule.placement)}; the"
                    f" state lies on {list(before.placement)}: plan with"
                    " placement=trainer.schedule.placement, or save, and load into a trainer of this schedule"
                )
            edges = {(before.model_stages[a], before.model_stages[b]) for a, b in before.skips}
            trainer._use_schedule(
                with_skips(schedule, edges) if edges else schedule, self._step.pipeline.programs
            )
        return trainer

    def init(self, params: Mapping[int, Any], state: Mapping[int, Any] | None = None) -> TrainState:
        """Make the state before the first step.

        Args:
            params: ``{stage: tree}`` of the stages of this process, tensors or DTensors. They are the state's
                afterwards.
            state: likewise of the stages that have a state, such as running statistics. A skipped update
                leaves it as it is.

        Raises:
            TypeError, ValueError: other stages than those of this process; leaves that are no tensors, or of
                a dtype that no checkpoint holds; stages that share memory and are not tied, which updates
                would drive apart; a state with several data ranks, each of which would get another.
        """
        self._require_open()
        stages, state = self._ranks.stages, {} if state is None else state
        require_trees("params", params, stages)
        require_trees("state", state, stages, some=True)
        if missing := [s for s in self._stateful if s in stages and s not in state]:
            raise ValueError(
                f"state: got none of the stages {missing}, whose buffers the model writes into; expected"
                " trainer.init(params, split.state)"
            )
        initial = initial_state(self._rule, self._ranks, self.transport.device, params, state)
        trees_of(self._rule, self._ranks, initial, self._trees)
        return initial

    @naming_arguments
    def step(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
    ) -> tuple[TrainState, Metrics]:  # fmt: skip
        """Run one step on the batch of this data rank.

        Args:
            inputs, targets, seed, extras: as in :func:`ppfunc.value_and_grad`. Random numbers depend on the
                place of a microbatch among those of all data ranks.
            loss_weights: weight of every microbatch, such as its number of tokens; divided by their sum over
                all data ranks. Equal by default. All ranks pass weights, or none does. A microbatch of
                weight 0 contributes nothing, as in :func:`ppfunc.value_and_grad`; over an axis of experts or
                context it runs, since peers take part in it, and its loss has to be finite.
            return_losses, return_outputs, return_norms: whether the metrics have the losses of all
                microbatches, the outputs of last stages in the form of the inputs, or the norms of the
                gradients by stage and by name. Every rank asks for the same.

        Returns:
            The new state, and :class:`Metrics`. ``state`` stays as it is, unless the optimizer has
            ``donate=True``: then it cannot be used again, not even after a step that failed once some of it
            was updated.

        Raises:
            PipelineError, AgreementError, StageError, ValueError, TypeError: as
                :func:`ppfunc.value_and_grad`. Nothing is updated.
        """
        batches = Batches([(inputs, targets)], [loss_weights], seed, [extras], return_norms)
        run = self._step.returning(*_chosen(return_losses, return_outputs))
        after, metrics = _state_and_metrics(*self._run(run, self._rule, state, batches))
        return after, metrics[0]

    def steps(
        self, state: TrainState, batches: Sequence[tuple[Any, Any]], *,
        loss_weights: Sequence[LossWeights] | None = None, seed: Seed = None,
        extras: Sequence[Mapping[int, Any]] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
    ) -> tuple[TrainState, list[Metrics]]:  # fmt: skip
        """Run several steps, which end, or fail, together.

        Equivalent, to the bit, to::

            for n, batch in enumerate(batches):
                state, metrics = step(
                    state, *batch, loss_weights=loss_weights[n], seed=(seed[0], seed[1] + n), extras=extras[n]
                )

        The ranks agree once. If updates do not depend on other stages (no clipping, no scale, and
        ``on_nonfinite="ignore"``), each stage is updated as soon as its gradients are complete, and the next
        step begins on ranks that have ended this one.

        Args:
            batches: inputs and targets of every step, all of one form.
            loss_weights, extras: those of every step.
            return_losses, return_outputs, return_norms: as in :meth:`step`.

        Raises:
            As :meth:`step`.
        """
        run = self._step.returning(*_chosen(return_losses, return_outputs))
        return _state_and_metrics(
            *self._run(run, self._rule, state, Batches(batches, loss_weights, seed, extras, return_norms))
        )

    def record(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
    ) -> tuple[tuple[TrainState, Metrics], Timeline]:  # fmt: skip
        """Run one step and measure it. Arguments as of :meth:`step`.

        Returns:
            The result of :meth:`step`, and the timeline of all ranks of this pipeline, in seconds.
        """
        batches = Batches([(inputs, targets)], [loss_weights], seed, [extras], return_norms)
        run = self._step.returning(*_chosen(return_losses, return_outputs)).record
        update, (result, timeline) = self._run(run, self._rule, state, batches)
        after, metrics = _state_and_metrics(update, result)
        return (after, metrics[0]), timeline

    @naming_arguments
    def evaluate(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, has_aux: bool = False,
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
        more, optimizer = _chosen(return_losses, return_outputs), self._rule.optimizer._replace(rate=None)
        evaluating = self._rule._replace(on_nonfinite="ignore", optimizer=optimizer)
        batches = Batches([(inputs, targets)], [loss_weights], seed, [extras])
        update, result = self._run(self._evaluate.returning(*more), evaluating, state, batches)
        metrics = update.metrics[0]
        if not more and not has_aux:
            return metrics.loss
        aux = result.aux if has_aux else None
        return StepResult(metrics.loss, outputs=result.outputs, aux=aux, losses=metrics.losses)

    def observe(self, state: TrainState, metric: float | torch.Tensor) -> TrainState:
        """Give a metric to the rates that depend on one, such as :func:`ppfunc.optim.plateau`.

        All ranks call it with the same number, such as the loss of an evaluation, which the host reads. The
        next call of the trainer compares it.

        Returns:
            The state with these rates; ``state`` stays as it is.

        Raises:
            ValueError: no rate of the optimizer depends on a metric.
        """
        observe, value = self._rule.optimizer.observe, float(metric)
        if observe is None:
            raise ValueError(
                f"metric: no rate of {text_of(self._rule.optimizer)} depends on one; expected such as"
                " adamw(plateau(1e-3))"
            )
        self._observed += f", {value}"
        number = torch.tensor(value, dtype=torch.float64)
        return state._replace(optimizer={s: observe(tree, number) for s, tree in state.optimizer.items()})

    def lower(
        self, params: Mapping[int, Any], inputs: Any, targets: Any = None, *,
        state: Mapping[int, Any] | None = None, extras: Mapping[int, Any] | None = None,
    ) -> LoweredTraining:  # fmt: skip
        """Lower a step for arguments of these shapes, and run nothing: its text, memory and cost.

        A trainer with the transport :class:`ppfunc.OnPaper` needs no other process; with :class:`P2P` every
        rank calls it.

        Args:
            params, state: as of :meth:`init`; tensors, also on the device meta, or their signatures.
            inputs, targets, extras: as of :meth:`step`, likewise.

        Raises:
            As :meth:`init` and :meth:`step`.
        """
        initial = self.init(on_meta(params), on_meta(state))
        # Only tensors with values can be seen to share memory.
        valued = {s: tree for s, tree in params.items() if not isinstance(tree, Signature)}
        require_declared_trees(valued, self._ranks.tied)
        update = TrainingUpdate(self._rule, self._ranks, {}, initial, known=True)
        inputs = on_meta(inputs)
        batches = Batches([(inputs, on_meta(targets))], extras=[extras])
        step = self._step.lower(partial(self._arguments, update, batches))
        return LoweredTraining(step, initial, self._rule, self._ranks, inputs)

    def close(self) -> None:
        """Close the transport. The trainer takes no steps afterwards."""
        self._closed = True
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self.transport.__exit__(kind, error, trace)

    # -- one call --------------------------------------------------------------------------

    def _run(
        self, run: Callable[..., Any], rule: UpdateRule, state: TrainState, batches: Batches
    ) -> tuple[TrainingUpdate, Any]:
        """Run the steps of a call. Return their update, and the result of ``run``."""
        self._require_open()
        generation, trains = self.transport.generation, rule is self._rule
        compared = self._ranks.data.size > 1 or self._ranks.tied or self.schedule.replicas
        known = not compared or self._known_state.goes_on(state, generation)
        if self._begun == generation:  # it has neither failed nor returned: an interrupt took its result
            self._last = None
        update = TrainingUpdate(rule, self._ranks, self._idle, state, known, batches.norms)
        self._begun = generation if trains else None
        result = run(partial(self._arguments, update, batches))
        self._observed, self._begun = "", None
        if trains:  # an evaluation leaves the state as it is
            self._last = update.state.step
        if compared and trains:
            self._known_state.note(update.state, generation, len(update.metrics))
        return update, result

    def _arguments(self, update: TrainingUpdate, batches: Batches) -> list[RawArguments]:
        """Prepare the arguments of the steps of a call: parameters are cast once."""
        state, precision, text = update.state, self._rule.precision, ""
        update.trees = trees_of(self._rule, self._ranks, state, self._trees)
        if self._ranks.world.size > 1:
            goes_on = update.known and self._last is state.step  # it is what the last step has returned
            text = f"; {'a state that goes on' if goes_on else 'another state'}"
            text += f"{self._observed and '; observed' + self._observed[1:]}"
            text += f"; optimizer {text_of(self._rule.optimizer)}"
        m = self.schedule.microbatches
        common = RawArguments(
            {s: self._ranks.for_step(tree, precision) for s, tree in state.params.items()},
            inputs=None,
            state=state.stage_state,
            microbatch_offset=self._ranks.data.index * m,
            scale=state.scale.get("scale"),
            update=update,
            common=text,
        )
        return batches.arguments(common, m, precision.to_compute)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "the trainer is closed; take its steps before close(), within its `with` block, or make"
                " another one"
            )


def _completed(schedule: Schedule, sharded: bool, tied: bool) -> tuple[Schedule, Schedule]:
    """Complete a schedule by the sums, the updates and the gathers; return the one of evaluations as well."""
    plain = remove_unshards(remove_tail(schedule))
    complete = insert_unshards if sharded else lambda schedule: schedule
    trained = append_tail(complete(plain), tied=tied or bool(schedule.replicas))
    return reduce_early(trained), complete(forward_only(plain))


def _state_and_metrics(update: TrainingUpdate, result: StepResult) -> tuple[TrainState, list[Metrics]]:
    """Return the new state, and the metrics of every step."""
    return update.state._replace(stage_state=result.aux.state), with_results(update.metrics, result)


def _chosen(losses: bool, outputs: bool) -> tuple[str, ...]:
    return (*(["losses"] if losses else []), *(["outputs"] if outputs else []))

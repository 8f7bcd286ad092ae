"""Run the calls of a trainer under one schedule, and remember from call to call which state is known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from ppfunc.runtime import StepFunction, StepResult, StepSpec, Transport
from ppfunc.runtime.agreement.ties import require_declared_trees
from ppfunc.runtime.call.arguments import RawArguments
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
from ppfunc.schedule.errors import require_schedule
from ppfunc.splitter import Split
from ppfunc.stage import Signature
from ppfunc.stage.tree import tree_leaves

from .batches import Batches, with_results
from .lowered import LoweredTraining, on_meta
from .optim.protocols import text_of
from .update.comparison import KnownState
from .update.initial_state import initial_state
from .update.parameter_update import TrainingUpdate
from .update.ranks import TrainingRanks
from .update.reducer import Reducer
from .update.stage_trees import StageTrees, require_trees, stages_of
from .update.train_state import Metrics, TrainState
from .update.update_rule import UpdateRule


@dataclass
class History:
    """Remembers what has been, of a trainer and of those that go on with its state by other schedules.

    Args:
        known: recognises the state that ranks need not compare.
        split: the model whose names and states `init` has to be given; None for other stages.
        observed: the metrics since the last step, which the next one compares.
        last: ``step`` of the state that the last step has returned.
        begun: the generation in which a call began that has not returned.
        closed: the transport is.
    """

    known: KnownState
    split: Split | None = None
    observed: str = ""
    last: Callable[[], Tensor | None] = lambda: None
    begun: int | None = None
    closed: bool = False


class Calls:
    """Runs the calls of a trainer under one schedule.

    Args:
        schedule: of a pipeline; completed here by the sums, the updates and the gathers.
        spec: of a training step.
        rule: how gradients become new parameters.
        make_step: makes a step function, of ``schedule, spec, programs, training``.
        programs: those of an earlier schedule.
    """

    def __init__(
        self, schedule: Schedule, spec: StepSpec, rule: UpdateRule, transport: Transport,
        make_step: Callable[..., StepFunction[..., Any]], history: History,
        programs: StagePrograms | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.transport, self.history = rule, transport, history
        self._spec, self._make_step, updates = spec, make_step, spec.updates
        assert updates is not None
        self.schedule, forwards = completed(schedule, updates.sharded, bool(spec.tied))
        self.ranks = TrainingRanks.of(self.schedule, spec.tied, transport)
        self.step = make_step(schedule=self.schedule, spec=spec, programs=programs)
        evaluating = spec._replace(name=f"evaluation of {spec.name}", finite=False, overlapped=None)
        self._forward = make_step(
            schedule=forwards, spec=evaluating, training=False, programs=self.step.pipeline.programs
        )
        self.idle: dict[int, list[Reducer]] = {}
        self._trees: dict[int, StageTrees] = {}  # of the last state

    def under(self, schedule: Schedule) -> "Calls":
        """Return the calls under another schedule, with the same programs.

        Raises:
            ValueError: it places stages on other ranks, which would move the state.
            ScheduleError: it is none, or a wrong one.
        """
        before = self.schedule
        require_schedule(schedule)
        if (schedule.placement, schedule.model_stages) != (before.placement, before.model_stages):
            raise ValueError(
                f"schedule: got {schedule.name!r} with stages on ranks {list(schedule.placement)}; the"
                f" state lies on {list(before.placement)}: plan with"
                " placement=trainer.schedule.placement, or save, and load into a trainer of this schedule"
            )
        edges = {(before.model_stages[a], before.model_stages[b]) for a, b in before.skips}
        schedule = with_skips(schedule, edges) if edges else schedule
        programs = self.step.pipeline.programs
        return Calls(schedule, self._spec, self.rule, self.transport, self._make_step, self.history, programs)

    def init(self, params: Mapping[int, Any], state: Mapping[int, Any]) -> TrainState:
        """Make the state before the first step."""
        self._require_open()
        stages = self.ranks.stages
        require_trees("params", params, stages)
        require_trees("state", state, stages, some=True)
        if self.history.split is not None:
            self.history.split.require_form(params, state)
        initial = initial_state(self.rule, self.ranks, self.transport.device, params, state)
        stages_of(self.rule, self.ranks, initial, self._trees)  # raises for an optimizer of other states
        return initial

    def train(self, state: TrainState, batches: Batches) -> tuple[TrainState, list[Metrics]]:
        """Run training steps; return the new state, and the metrics of every step."""
        return _state_and_metrics(*self._run(self.step.returning(*batches.wanted), self.rule, state, batches))

    def record(
        self, state: TrainState, batches: Batches
    ) -> tuple[tuple[TrainState, list[Metrics]], Timeline]:
        """Run training steps and measure them; return the timeline too."""
        run = self.step.returning(*batches.wanted).record
        update, (result, timeline) = self._run(run, self.rule, state, batches)
        return _state_and_metrics(update, result), timeline

    def evaluate(self, state: TrainState, batches: Batches) -> tuple[Metrics, StepResult]:
        """Compute losses; return the metrics of the first step, and the results of all."""
        rule = self.rule._replace(on_nonfinite="ignore", optimizer=self.rule.optimizer._replace(rate=None))
        update, result = self._run(self._forward.returning(*batches.wanted), rule, state, batches)
        return update.metrics[0], result

    def _run(
        self, run: Callable[..., Any], rule: UpdateRule, state: TrainState, batches: Batches
    ) -> tuple[TrainingUpdate, Any]:
        """Run the steps of a call. Return their update, and the result of ``run``."""
        self._require_open()
        history, generation, trains = self.history, self.transport.generation, rule is self.rule
        if history.begun == generation:  # it has neither failed nor returned: an interrupt took its result
            history.last = History.last
        update = TrainingUpdate(rule, self.ranks, self.idle, state, not self._compares, batches.norms)
        history.begun = generation if trains else None
        result = run(partial(self._arguments, update, batches))
        history.observed, history.begun = "", None
        if trains:  # an evaluation leaves the state as it is
            history.last = ref(update.state.step)
        if self._compares and trains:
            history.known.note(update.state, update.stages, generation, len(update.metrics))
        return update, result

    def lower(
        self, params: Mapping[int, Any], inputs: Any, targets: Any,
        state: Mapping[int, Any] | None, extras: Mapping[int, Any] | None,
    ) -> LoweredTraining:  # fmt: skip
        """Lower a training step for arguments of these shapes."""
        initial, inputs = list[TrainState](), on_meta(inputs)

        def read() -> list[RawArguments]:  # what it raises fails the call on all ranks
            initial.append(self.init(on_meta(params), {} if state is None else on_meta(state)))
            # Only tensors with values can be seen to share memory.
            valued = {s: tree for s, tree in params.items() if not isinstance(tree, Signature)}
            require_declared_trees(valued, self.ranks.tied)
            update = TrainingUpdate(self.rule, self.ranks, {}, initial[0], known=True)
            batches = Batches([(inputs, on_meta(targets))], extras=[extras])
            tensors = ((s, leaf) for s, tree in params.items() for leaf in tree_leaves(tree))
            devices = {s: leaf.device for s, leaf in tensors if isinstance(leaf, Tensor) and not leaf.is_meta}
            return [replace(each, devices=devices) for each in self._arguments(update, batches)]

        step = self.step.lower(read)
        return LoweredTraining(step, initial[0], self.rule, self.ranks, inputs)

    def _arguments(self, update: TrainingUpdate, batches: Batches) -> list[RawArguments]:
        """Prepare the arguments of the steps of a call: parameters are cast once."""
        state, precision, history, text = update.state, self.rule.precision, self.history, ""
        update.stages, as_made = stages_of(self.rule, self.ranks, state, self._trees)
        if as_made and not update.known:
            update.known = history.known.goes_on(state, update.stages, self.transport.generation)
        if self.ranks.world.size > 1:
            goes_on = update.known and history.last() is state.step  # it is what the last step has returned
            text = f"; {'a state that goes on' if goes_on else 'another state'}"
            text += f"{history.observed and '; observed' + history.observed[1:]}"
            text += f"; optimizer {text_of(self.rule.optimizer)}"
        m = self.schedule.microbatches
        common = RawArguments(
            {s: self.ranks.for_step(tree, precision) for s, tree in state.params.items()},
            inputs=None,
            state=state.stage_state,
            microbatch_offset=self.ranks.data.index * m,
            scale=state.scale.get("scale"),
            update=update,
            common=text,
        )
        return batches.arguments(common, m, precision.to_compute)

    @property
    def _compares(self) -> bool:
        """Tell whether ranks, or places of a parameter, have copies of one state."""
        return bool(self.ranks.data.size > 1 or self.ranks.tied or self.schedule.replicas)

    def _require_open(self) -> None:
        if self.history.closed:
            raise RuntimeError(
                "the trainer is closed; take its steps before close(), within its `with` block, or make"
                " another one"
            )


def completed(schedule: Schedule, sharded: bool, tied: bool) -> tuple[Schedule, Schedule]:
    """Complete a schedule by the sums, the updates and the gathers; return the one of evaluations as well."""
    plain = remove_unshards(remove_tail(schedule))
    complete = insert_unshards if sharded else lambda schedule: schedule
    trained = append_tail(complete(plain), tied=tied or bool(schedule.replicas))
    return reduce_early(trained), complete(forward_only(plain))


def _state_and_metrics(update: TrainingUpdate, result: StepResult) -> tuple[TrainState, list[Metrics]]:
    """Return the new state, and the metrics of every step."""
    return update.state._replace(stage_state=result.aux.state), with_results(update.metrics, result)

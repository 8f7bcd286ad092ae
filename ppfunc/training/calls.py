"""Run the calls of a trainer under one schedule, and remember from call to call which state is known.

A step can also be shown from shapes alone: its text, its memory with parameters and optimizer, its cost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch

from ppfunc.runtime import (
    LoweredFunction,
    Microbatches,
    StepFunction,
    StepResult,
    StepSpec,
    Transport,
)
from ppfunc.runtime.lowering.lower import LoweredStep
from ppfunc.runtime.lowering.stage_programs import StagePrograms
from ppfunc.runtime.lowering.ties import require_declared_trees
from ppfunc.runtime.paper.analysis import Shown
from ppfunc.runtime.paper.memory import Completed
from ppfunc.runtime.values.arguments import RawArguments, StepArguments, require_trees, require_values
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
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map

from .batches import Batches, with_results
from .optim.protocols import Tree, text_of
from .update.comparison import KnownState
from .update.initial_state import initial_state
from .update.parameter_update import TrainingUpdate
from .update.ranks import TrainingRanks
from .update.reducer import Reducer
from .update.stage_trees import StageTrees, stages_of
from .update.train_state import Metrics, TrainState
from .update.update_rule import UpdateRule


@dataclass
class History:
    """Remembers what has been, of a trainer and of those that go on with its state by other schedules.

    Args:
        known: recognises the state that ranks need not compare.
        split: the model whose names and states `init` has to be given; None for other stages.
        last: ``step`` of the state that the last step has returned.
        closed: the transport is.
    """

    known: KnownState
    split: Split | None = None
    last: Callable[[], torch.Tensor | None] = lambda: None
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
        self._spec, self._make_step = spec, make_step
        self.schedule, forwards = completed(schedule, spec.sharded, bool(spec.tied))
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

    def init(
        self,
        params: Mapping[int, Any],
        state: Mapping[int, Any],
        optimizer: Mapping[int, Any],
        *,
        valued: bool = True,
    ) -> TrainState:
        """Make the state before the first step; its tensors have values unless ``valued`` is False."""
        self._require_open()
        stages = self.ranks.stages
        require_trees("params", params, stages)
        require_trees("state", state, stages, some=True)
        require_trees("optimizer", optimizer, stages, some=True)
        if self.history.split is not None:
            self.history.split.require_form(params, state)
        initial = initial_state(self.rule, self.ranks, self.transport.device, params, state, optimizer)
        stages_of(self.rule, self.ranks, initial, self._trees)  # raises for an optimizer of other states
        for name, trees in (("params", initial.params), ("state", initial.stage_state)) if valued else ():
            for s, (leaves, treedef) in ((s, tree_flatten(tree)) for s, tree in trees.items()):
                require_values(f"{name}[{s}]", treedef, [leaf.device for leaf in leaves])
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
        self._require_open()
        history, generation, trains = self.history, self.transport.generation, rule is self.rule
        last = history.last()
        if trains:  # until it returns: an interrupt may take its result
            history.last = History.last
        known = not (self._compares or history.known.due)
        update = TrainingUpdate(rule, self.ranks, self.idle, state, known, batches.norms)
        result = run(partial(self._arguments, update, batches, last))
        if trains:  # an evaluation leaves the state as it is
            history.last = ref(update.state.step)
        if trains and (self._compares or history.known.every):
            history.known.note(update.state, update.stages, generation, len(update.metrics))
        return update, result

    def lower(
        self, params: Mapping[int, Any], inputs: Any, targets: Any,
        state: Mapping[int, Any] | None, extras: Mapping[int, Any] | None,
    ) -> "LoweredTraining":  # fmt: skip
        """Lower a training step for arguments of these shapes."""
        initial, inputs = list[TrainState](), on_meta(inputs)

        def read() -> list[RawArguments]:  # what it raises fails the call on all ranks
            initial.append(
                self.init(on_meta(params), {} if state is None else on_meta(state), {}, valued=False)
            )
            # Only tensors with values can be seen to share memory.
            valued = {s: tree for s, tree in params.items() if not isinstance(tree, Signature)}
            require_declared_trees(valued, self.ranks.tied)
            update = TrainingUpdate(self.rule, self.ranks, {}, initial[0], known=True)
            batches = Batches([(inputs, on_meta(targets))], extras=[extras])
            tensors = ((s, leaf) for s, tree in params.items() for leaf in tree_leaves(tree))
            devices = {
                s: leaf.device for s, leaf in tensors if isinstance(leaf, torch.Tensor) and not leaf.is_meta
            }
            return [replace(each, devices=devices) for each in self._arguments(update, batches)]

        step = self.step.lower(read)
        return LoweredTraining(step, initial[0], self.rule, self.ranks, inputs)

    def _arguments(
        self, update: TrainingUpdate, batches: Batches, last: torch.Tensor | None = None
    ) -> list[RawArguments]:
        """Prepare the arguments of the steps of a call: parameters are cast once.

        Args:
            last: ``step`` of the state that the last call has returned.
        """
        state, precision, history, text = update.state, self.rule.precision, self.history, ""
        update.stages, as_made = stages_of(self.rule, self.ranks, state, self._trees)
        if as_made and not update.known:
            update.known = history.known.goes_on(state, update.stages, self.transport.generation)
        if self.ranks.world.size > 1:
            goes_on = update.known and last is state.step
            text = f"; {'a state that goes on' if goes_on else 'another state'}"
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
    return update.state._replace(stage_state=result.aux.state), with_results(update.metrics, result)


# -- a step from shapes alone


class LoweredTraining(Shown):
    """Shows a training step that was lowered and has not run; :meth:`Trainer.lower` returns it.

    Bytes are those of ``value_and_grad(...).lower(...)`` with the state and its update; operations are
    counted without those of sums and updates.

    Args:
        step: the gradients.
        state: before the step, on the device meta.
        rule: how gradients become new parameters.
        ranks: those that train together.
        inputs: as the caller gives them, on the device meta.
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
        update = TrainingUpdate(self._rule, ranks, {}, state, known=True)
        update.stages, _ = stages_of(self._rule, ranks, state, {})
        (weights,) = update.begin([None])
        params = {s: ranks.for_step(tree, self._rule.precision) for s, tree in state.params.items()}
        arguments = replace(
            arguments, params=_local_leaves(params), state=_local_leaves(state.stage_state),
            scale=state.scale.get("scale"), update=update,
        )  # fmt: skip
        kept = "shards" if ranks.shards_params else "masters"
        first = step.schedule.model_stages[step.schedule.chains[0].stages[0]]
        inputs = self._inputs if isinstance(self._inputs, Microbatches) else [self._inputs]
        given = [leaf for tree in inputs for leaf in tree_leaves(tree) if first in stages]
        cast = [here(leaf) for leaf in given if self._rule.precision.to_compute(leaf) is not leaf]
        read = [*cast, state.step, state.scale, () if weights is None else weights]
        return arguments, {kept: state.params, "optimizer": state.optimizer, "batch": read}


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

"""Train a pipeline, or several over a mesh, step by step: gradients, their sums, and the update, all in one schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import torch

from ppfunc._text import shown
from ppfunc.making import make_step
from ppfunc.runtime import P2P, AgreementError, Microbatches, PipelineError, StepSpec, Transport
from ppfunc.runtime.arguments import LossWeights, RawArguments, Seed, read_loss_weights, read_seed
from ppfunc.runtime.errors import Failure
from ppfunc.runtime.results import StepResult
from ppfunc.runtime.ties import Tied, require_declared_trees
from ppfunc.schedule import Schedule, Timeline, forward_only, insert_unshards, remove_tail, remove_unshards
from ppfunc.stage import Engine, Loss, Stage
from ppfunc.stage.layout import local
from ppfunc.stage.signature import flatten
from ppfunc.stage.tree import tree_leaves, tree_map

from .training.parameter_update import parameter_update
from .training.progress import Progress
from .training.ranks import TrainingRanks
from .training.state_checks import require_state, require_trees
from .training.train_state import Metrics as Metrics, TrainState as TrainState, give_up, is_known, mark_known, require_not_given_up
from .training.update_rule import UpdateRule, require_frozen_alike, require_frozen_told, require_state_of


class Trainer:
    """Trains a pipeline, or several over a mesh: made by :func:`train_step`. A context manager that closes its transport; an error
    that ends its block on one rank fails the next step of the others, with its text.

    Args:
        stages, loss_fn: of the model.
        schedule: with the instructions that end a step of training.
        transport: carries messages, and sums over the mesh.
        engine: how a stage is differentiated.
        tied: places of tied parameters.
        rule: how parameters are updated.
        accumulate: passes of the schedule in a step.
        owned: whether to close the transport.
        stateful: the stages of a split that have a state.
    """

    def __init__(
        self, stages: Sequence[Stage | None], loss_fn: Loss, schedule: Schedule, transport: Transport, engine: Engine, tied: Tied,
        rule: UpdateRule, accumulate: int, owned: bool, stateful: Sequence[int],
    ) -> None:  # fmt: skip
        self.schedule, self.transport, self._owned, self._stateful = schedule, transport, owned, stateful
        self._ranks, self._rule, self._accumulate = TrainingRanks.of(rule.shard, schedule, tied, transport), rule, accumulate
        self._require_frozen_alike = partial(require_frozen_alike, stages, tied)
        self._require_frozen_told = partial(require_frozen_told, stages)
        self._closed, self._name = False, uuid4().hex
        self._scale_keys = set() if rule.scale is None else set(rule.scale.init("cpu"))
        reduce = rule.precision.reduce
        sum_dtype = reduce if reduce in (torch.float32, torch.float64) else None
        name = f"train_step {rule.options_text}, {accumulate} passes"
        wants, update = frozenset({"loss", "aux"}), parameter_update(rule, self._ranks, stages)
        spec = StepSpec(name, wants, tied=tied, sum_dtype=sum_dtype, update=update, finite=rule.on_nonfinite == "raise")
        self._step = make_step(stages, loss_fn, schedule, transport, engine, spec, self._steps, self._updated)
        looking = parameter_update(rule._replace(scale=None, clip=math.inf, on_nonfinite="skip"), self._ranks, stages)
        spec = StepSpec(f"evaluation of {name}", wants, tied=tied, update=looking)
        ahead = forward_only(remove_unshards(remove_tail(schedule)))
        ahead = insert_unshards(ahead) if rule.shard == "params" else ahead
        self._evaluate = make_step(stages, loss_fn, ahead, transport, engine, spec, self._evaluation, self._loss, training=False)

    def __repr__(self) -> str:
        return f"<trainer of {self._step!r}>"

    def init(self, params: Mapping[int, Any], state: Mapping[int, Any] | None = None) -> TrainState:
        """The state before the first step.

        Args:
            params: ``{stage: tree}`` of the stages of this process, tensors or DTensors. They are the state's afterwards.
            state: likewise of the stages that have a state, such as running statistics. A skipped update leaves it as it is.

        Raises:
            TypeError, ValueError: something else than the stages of this process, or than trees of tensors; stages that share
                memory and are not tied, which updates would drive apart; a state where other ranks run other batches, and would
                each have another.
        """
        self._require_connected()
        stages, state = self._ranks.stages, {} if state is None else state
        require_trees("params", params, stages)
        require_trees("state", state, stages, some=True)
        if missing := [s for s in self._stateful if s in stages and s not in state]:
            raise ValueError(
                f"state: got none of the stages {missing}, whose buffers the model writes into; expected trainer.init(params, split.state)"
            )
        for name, trees in (("params", params), ("state", state)):
            for s, tree in trees.items():
                flatten(tree, f"{name}[{s}]")  # raises for leaves that are no tensors
        require_declared_trees(params, self._ranks.tied)
        self._require_frozen_told(params)
        rule, taken = self._rule, set[int]()
        masters = {s: rule.precision.to_master(tree_map(partial(_own, taken), tree)) for s, tree in params.items()}
        device = self.transport.device if isinstance(self.transport, P2P) else torch.device("cpu")  # of a rank without parameters
        device = next((local(t).device for tree in masters.values() for t in tree_leaves(tree)), device)
        kept = {s: self._ranks.init(tree, rule.optimizer, f"params[{s}]") for s, tree in masters.items()}
        masters, optimizer = ({s: pair[n] for s, pair in kept.items()} for n in (0, 1))
        step = torch.zeros((), dtype=torch.int64, device=device)
        made = TrainState(step, masters, optimizer, {} if rule.scale is None else rule.scale.init(device), dict(state))
        mark_known(made, self._name)
        self._require_fit(made)
        self._require_frozen_alike()
        return made

    def step(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None, seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> tuple[TrainState, Metrics]:  # fmt: skip
        """Run one step on the batch of this data rank.

        Args:
            inputs, targets, seed, extras: as of :func:`ppfunc.value_and_grad`, of ``accumulate`` times as many microbatches.
                Random numbers depend on the place of a microbatch among those of all data ranks.
            loss_weights: how much each microbatch counts, such as its number of tokens; divided by their sum over all data
                ranks. All count the same where none are given. Every rank gives some or none does. A microbatch of weight 0
                contributes nothing, as of :func:`ppfunc.value_and_grad`.

        Returns:
            The new state, and :class:`Metrics`. ``state`` stays as it is, unless the optimizer was given ``donate``: then it cannot
            be used again, nor after a step that failed when some of it was updated.

        Raises:
            PipelineError, AgreementError, StageError, ValueError, TypeError: as :func:`ppfunc.value_and_grad`. Nothing is updated.
        """
        after, metrics = self._run(self._step, state, [(inputs, targets)], [loss_weights], seed, extras)
        return after, metrics[0]

    def steps(self, state: TrainState, batches: Sequence[tuple[Any, Any]], *, seed: Seed = None) -> tuple[TrainState, list[Metrics]]:
        """Run several steps, which end, or fail, together.

        Equivalent to: ``for n, batch in enumerate(batches): state, metrics = step(state, *batch, seed=(seed[0], seed[1] + n))``,
        to the bit. The ranks agree once. Where an update needs nothing of other stages (neither ``clip`` nor ``scale``, and
        ``on_nonfinite="ignore"``), each stage is updated as soon as its gradients are there, and the next step begins on ranks that
        are done with this one.

        Args:
            batches: inputs and targets of every step, all of one form.

        Raises:
            As :meth:`step`.
        """
        return self._run(self._step, state, batches, None, seed, None)

    def record(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None, seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> tuple[tuple[TrainState, Metrics], Timeline]:  # fmt: skip
        """Run one step and measure it. Arguments as of :meth:`step`.

        Returns:
            What :meth:`step` returns, and the timeline of the last pass of the schedule, of all ranks of this pipeline, in seconds.
        """
        (after, metrics), timeline = self._run(self._step.record, state, [(inputs, targets)], [loss_weights], seed, extras)
        return (after, metrics[0]), timeline

    def evaluate(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None, seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of a batch, of which this data rank has a part, on every rank; float64[]. Arguments as of :meth:`step`."""
        self._require_connected()
        return self._evaluate(state, inputs, targets, loss_weights, seed, extras)

    def close(self) -> None:
        """Close the transport, if it was made for the trainer. The trainer takes no steps afterwards."""
        self._closed = True
        if self._owned:
            self.transport.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the trainer is closed; take its steps before close(), within its `with` block, or make another one")

    def _require_connected(self) -> None:
        """Raise where the transport is closed with the trainer; over another one, peers are to hear that it is closed."""
        if self._owned:
            self._require_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            # Peers have heard of what a step has raised.
            if isinstance(error, Exception) and not isinstance(error, PipelineError | AgreementError) and self._owned and not self._closed:
                self.transport.fail(Failure(self._ranks.ranks[0], None, None, error))
        finally:
            self.close()

    # -- one call --------------------------------------------------------------------------

    def _run(self, run: Callable[..., Any], state: TrainState, *call: Any) -> Any:
        """Run several steps, by the step function or its ``record``; give up a state that was updated in place."""
        self._require_connected()
        written: list[torch.Tensor] = []
        reason = "it was updated in place by a step that has failed since"
        try:
            made = run(state, *call, written)
            reason = "it was given up to a step by donate=True"
            return made
        finally:
            if written:
                give_up(state, written, reason)

    def _steps(
        self, state: TrainState, batches: Sequence[tuple[Any, Any]], weights: Sequence[LossWeights] | None, seed: Seed, extras: Any,
        written: list[torch.Tensor],
    ) -> list[RawArguments]:  # fmt: skip
        """The passes of several steps."""
        if not isinstance(batches, list | tuple) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in batches):
            raise TypeError(f"batches: got {shown(batches)}, expected a list of (inputs, targets), one for every step")
        if not batches:
            raise ValueError("batches: got none, expected inputs and targets of at least one step")
        if written:  # by this step, which all ranks run again since something was frozen on one
            raise RuntimeError(
                "state: it was updated in place by a step that has to run again, since parameters were frozen or set free on some rank; "
                "go on from a checkpoint, or use donate=False where that may happen between steps"
            )
        seed = read_seed(seed)
        given: Sequence[LossWeights] = [None] * len(batches) if weights is None else weights
        common = self._common(state, given[0] is not None, written, seed)
        self._require_frozen_alike()
        made: list[RawArguments] = []
        for n, (inputs, targets) in enumerate(batches):
            later = None if seed is None else (seed[0], seed[1] + n)
            made += self._passes(common, inputs, targets, given[n], later, extras)
        made[0] = made[0]._replace(common=f"{len(batches)} steps, {made[0].common}")
        return made

    def _evaluation(
        self, state: TrainState, inputs: Any, targets: Any, loss_weights: LossWeights, seed: Seed, extras: Mapping[int, Any] | None
    ) -> list[RawArguments]:
        """The passes of an evaluation."""
        common = self._common(state, loss_weights is not None, [], read_seed(seed))
        return self._passes(common, inputs, targets, loss_weights, seed, extras)

    def _common(self, state: TrainState, weighted: bool, written: list[torch.Tensor], seed: Seed) -> RawArguments:
        """The arguments that all passes share: parameters are cast once."""
        self._require_fit(state)
        params = {s: self._ranks.given(tree, self._rule.precision) for s, tree in state.params.items()}
        begun = state._replace(params=dict(state.params), optimizer=dict(state.optimizer))
        return RawArguments(
            params, None, state=state.stage_state, scale=state.scale.get("scale"), update_state=Progress(begun, weighted, written=written),
            common=f"{'own' if weighted else 'equal'} weights, seed {seed}",
        )  # fmt: skip

    def _passes(
        self, common: RawArguments, inputs: Any, targets: Any, loss_weights: LossWeights, seed: Seed, extras: Mapping[int, Any] | None
    ) -> list[RawArguments]:
        """The passes of one step."""
        data, cast = self._ranks.data, self._rule.precision.to_compute
        microbatches = self._accumulate * self.schedule.microbatches
        equal = [1 / (data.size * microbatches)] * microbatches
        weights = read_loss_weights(equal if loss_weights is None else loss_weights, microbatches)
        raw = common._replace(
            inputs=inputs.map(cast) if isinstance(inputs, Microbatches) else cast(inputs), targets=targets, extras=extras,
            loss_weights=weights, seed=seed, first=data.index * microbatches,
        )  # fmt: skip
        return raw.passes(self._accumulate, self.schedule.microbatches)

    def _require_fit(self, state: TrainState) -> None:
        """Raise for something else than a state of this trainer."""
        self._require_open()
        require_state(state, self._ranks.stages, self._scale_keys, self._ranks.data.size)
        require_not_given_up(state)
        if not is_known(state, self._name):
            for s in self._ranks.stages:
                require_state_of(self._rule, state.params[s], state.optimizer[s], f"state.optimizer[{s}]")
            mark_known(state, self._name)

    def _updated(self, result: StepResult, raw: list[RawArguments]) -> tuple[TrainState, list[Metrics]]:
        progress: Progress = result.update_state
        steps = len(progress.metrics)
        of_stages = [{s: _part(tree, n, steps) for s, tree in result.aux.metrics.items()} for n in range(steps)]
        metrics = [found._replace(stages=own) for found, own in zip(progress.metrics, of_stages, strict=True)]
        mark_known(progress.state, self._name)
        return progress.state._replace(stage_state=result.aux.state), metrics

    def _loss(self, result: StepResult, raw: list[RawArguments]) -> torch.Tensor:
        return result.update_state.metrics[0].loss


def _part(tree: Any, n: int, parts: int) -> Any:
    """One of several equal parts of the rows of a tree."""
    if isinstance(tree, Microbatches):
        rows = list(tree)
        size = len(rows) // parts
        return Microbatches(rows[n * size : (n + 1) * size])
    return tree if parts == 1 else tree_map(lambda t: t.tensor_split(parts)[n], tree)


def _own(taken: set[int], leaf: torch.Tensor) -> torch.Tensor:
    """A leaf without history, in memory that no leaf before it has: each is updated by itself, perhaps in place."""
    leaf = leaf.detach()
    storage = local(leaf).untyped_storage().data_ptr()
    if storage in taken:
        leaf = leaf.clone()
    taken.add(storage)
    return leaf

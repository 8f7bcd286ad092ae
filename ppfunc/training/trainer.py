"""Train pipelines step by step: gradients, their sums and the update in one schedule."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import call
from types import TracebackType
from typing import Any, Self

import torch

from ppfunc._checks import naming_arguments, not_copied
from ppfunc.runtime import InProcess, StepResult, StepSpec, Transport
from ppfunc.runtime.lowering.lower import Overlapped
from ppfunc.runtime.lowering.ties import TiedPlaces
from ppfunc.runtime.values.arguments import LossWeights, Seed
from ppfunc.schedule import Schedule, Timeline
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, graph
from ppfunc.stage.frozen import FrozenLeaves, Trainable
from ppfunc.steps import Stages, make_step, reporting_mistakes, unpacked

from .batches import Batches
from .calls import Calls, History, LoweredTraining
from .optim.protocols import Optimizer
from .update.comparison import KnownState
from .update.precision import Precision
from .update.states import ReduceState, StateRule, UpdateState
from .update.train_state import Metrics as Metrics, TrainState as TrainState
from .update.update_rule import OnNonfinite, UpdateRule


@naming_arguments
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
        stages, loss_fn, engine, tied, trainable: as in :func:`value_and_grad`.
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
        checksum_every: compare the states of data ranks, and the batches of ranks that run the same, after
            every so many steps, as in the first; the batches of other steps are not compared.
        reduce_state: how the states of stages, such as running statistics, go together over the data ranks:
            ``{"*counts": "sum", "*": "mean"}``, by patterns of names: the mean of the states of all data
            ranks, of integers rounded down, or the state before a step and the sum of all changes. Both are
            computed in float64 or int64. Without it, stages with a state are refused if there are several
            data ranks.
        update_state: ``(stage, state) -> state``, called with the state of each stage at the end of a step,
            once it is the same on all data ranks: to change a bias by counts, say. A skipped update leaves
            the state as it was.
        overlapped: as in :func:`value_and_grad`, for schedules such as ``dualpipev``.

    Parameters, inputs and the leaves of the state are tensors or DTensors; a stage gets the local tensors.
    In every step, ranks compare their options, the hyperparameters of optimizer and scale, and the seed;
    before the first step and after a failure also updates of constants by the optimizer, and checksums of the
    states of data ranks, and of what the ranks of a pipeline, and along the axis ``model``, are given of one
    batch. A state that no step of this trainer has returned, or that was written into since,
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
            rule = UpdateRule.of(optimizer, precision or Precision(), on_nonfinite, frozen, states)
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
            make = partial(
                make_step, stages, loss_fn, transport=self.transport, engine=engine,
                read=call,  # of a function that makes the arguments: its errors fail the step on all ranks
            )  # fmt: skip
            history = History(KnownState(checksum_every), split)
            self._calls = Calls(schedule, spec, rule, self.transport, make, history)

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that trains, with its sums and updates."""
        return self._calls.schedule

    __reduce__ = not_copied(
        "a trainer", "save its state by ppfunc.checkpoint.save, and make a trainer in each process"
    )

    def __repr__(self) -> str:
        return f"<trainer of {self._calls.step!r}>"

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
        trainer = object.__new__(type(self))
        trainer.__dict__ |= self.__dict__
        with reporting_mistakes(self.transport):
            trainer._calls = self._calls.under(schedule)
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
        return self._calls.init(
            params, {} if state is None else state, {} if optimizer is None else optimizer
        )

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
        wanted = return_losses, return_outputs, return_norms
        batches = Batches([(inputs, targets)], [loss_weights], seed, [extras], *wanted)
        after, metrics = self._calls.train(state, batches)
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

        The ranks agree once, before the first step.

        Args:
            batches: inputs and targets of every step, all of one form.
            loss_weights, extras: those of every step.
            return_losses, return_outputs, return_norms: as in :meth:`step`.

        Raises:
            As :meth:`step`.
        """
        wanted = return_losses, return_outputs, return_norms
        return self._calls.train(state, Batches(batches, loss_weights, seed, extras, *wanted))

    def record(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None,
        seed: Seed = None, extras: Mapping[int, Any] | None = None,
        return_losses: bool = False, return_outputs: bool = False, return_norms: bool = False,
    ) -> tuple[tuple[TrainState, Metrics], Timeline]:  # fmt: skip
        """Run one step and measure it. Arguments as of :meth:`step`.

        Returns:
            The result of :meth:`step`, and the timeline of all ranks of this pipeline, in seconds.
        """
        wanted = return_losses, return_outputs, return_norms
        batches = Batches([(inputs, targets)], [loss_weights], seed, [extras], *wanted)
        (after, metrics), timeline = self._calls.record(state, batches)
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
        batches = Batches([(inputs, targets)], [loss_weights], seed, [extras], return_losses, return_outputs)
        metrics, result = self._calls.evaluate(state, batches)
        if not batches.wanted and not has_aux:
            return metrics.loss
        aux = result.aux if has_aux else None
        return StepResult(metrics.loss, outputs=result.outputs, aux=aux, losses=metrics.losses)

    @naming_arguments
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
        return self._calls.lower(params, inputs, targets, state, extras)

    def close(self) -> None:
        """Close the transport. The trainer takes no steps afterwards."""
        self._calls.history.closed = True
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.history.closed = True
        self.transport.__exit__(kind, error, trace)

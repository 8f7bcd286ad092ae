"""Make the training step of a pipeline, or of several over a mesh: gradients, their sums, and the update, all in one schedule."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.pipeline import Stages, make_step, unpacked
from ppfunc.runtime import P2P, Axes, InProcess, Microbatches, StepSpec, Transport
from ppfunc.runtime.arguments import LossWeights, RawArguments, Seed
from ppfunc.runtime.lower import ParameterUpdate
from ppfunc.runtime.results import StepResult
from ppfunc.runtime.ties import TiedPlaces, read_tied
from ppfunc.schedule import Schedule, append_tail, forward_only, reduce_early, remove_tail
from ppfunc.stage import Engine, Loss, Stage, graph
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves, tree_map

from .training import LossScale, Optimizer, Precision, accepting_scale
from .training.update import Metrics as Metrics, OnNonfinite, Running, TrainState as TrainState, UpdateRule, update_of


class Trainer:
    """Trains a pipeline, or several over a mesh: made by :func:`train_step`. A context manager that closes its transport.

    Args:
        stages, loss_fn: of the model.
        schedule: with the instructions that end a step of training.
        transport: carries messages, and sums over the mesh.
        engine: how a stage is differentiated.
        tied: places of tied parameters.
        rule: how gradients become new parameters.
        accumulate: passes of the schedule in a step.
    """

    def __init__(
        self, stages: Sequence[Stage | None], loss_fn: Loss, schedule: Schedule, transport: Transport, engine: Engine, tied: TiedPlaces,
        rule: UpdateRule, accumulate: int,
    ) -> None:  # fmt: skip
        self.schedule, self.transport = schedule, transport
        self._recipe, self._accumulate = rule, accumulate
        self._data = transport.collective("data")
        places, reduce = read_tied(tied, schedule), rule.precision.reduce
        update = update_of(rule, schedule, transport, places)
        sum_dtype = reduce if reduce in (torch.float32, torch.float64) else None
        spec = StepSpec("train_step", frozenset({"loss"}), tied=places, sum_dtype=sum_dtype, update=update)
        self._step = make_step(stages, loss_fn, schedule, transport, engine, spec, self._arguments, self._updated)
        spec = StepSpec(
            "train_step, evaluation", frozenset({"loss"}), tied=places, update=ParameterUpdate(update.reduce, update.join, update.step)
        )
        ahead = forward_only(remove_tail(schedule))
        self._evaluate = make_step(stages, loss_fn, ahead, transport, engine, spec, self._arguments, self._loss, training=False)

    def __repr__(self) -> str:
        return f"<trainer of {self._step!r}>"

    def init(self, params: Mapping[int, Any]) -> TrainState:
        """The state before the first step.

        Args:
            params: ``{stage: tree}`` of the stages of this process, tensors or DTensors. They are the state's afterwards.
        """
        rule = self._recipe
        masters = {s: rule.precision.to_master(tree_map(torch.Tensor.detach, tree)) for s, tree in params.items()}
        device = next((local(t).device for tree in masters.values() for t in tree_leaves(tree)), torch.device("cpu"))
        optimizer = {s: self._recipe.optimizer.init(tree_map(local, tree)) for s, tree in masters.items()}
        scale = {} if rule.scale is None else rule.scale.init(device)
        return TrainState(torch.zeros((), dtype=torch.int64, device=device), masters, optimizer, scale)

    def step(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None, seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> tuple[TrainState, Metrics]:  # fmt: skip
        """Run one step on the batch of this data rank.

        Args:
            inputs, targets, seed, extras: as of :func:`ppfunc.value_and_grad`, of ``accumulate`` times as many microbatches.
                Random numbers depend on the place of a microbatch among those of all data ranks.
            loss_weights: how much each microbatch counts, such as its number of tokens; divided by their sum over all data
                ranks. All count the same where none are given. Every rank gives some or none does.

        Returns:
            The new state, and :class:`Metrics`. ``state`` stays as it is, unless the optimizer was given ``donate``.
        """
        after, metrics = self._step(state, inputs, targets, loss_weights, seed, extras)
        return after, metrics[0]

    def evaluate(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None, seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of a batch, of which this data rank has a part, on every rank; float64[]."""
        return self._evaluate(state, inputs, targets, loss_weights, seed, extras)

    def close(self) -> None:
        """Close the transport."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- one step --------------------------------------------------------------------------

    def _arguments(
        self, state: TrainState, inputs: Any, targets: Any, loss_weights: LossWeights, seed: Seed, extras: Mapping[int, Any] | None
    ) -> RawArguments:
        """The arguments of the pipeline."""
        if not isinstance(state, TrainState):
            raise TypeError(f"state: got {reprlib.repr(state)}, expected what init or step of this trainer has returned")
        microbatches, precision = self._accumulate * self.schedule.microbatches, self._recipe.precision
        weights = [1 / (self._data.size * microbatches)] * microbatches if loss_weights is None else loss_weights
        weight = None if loss_weights is None else float(torch.as_tensor(loss_weights, dtype=torch.float64).sum())
        running = Running(state._replace(params=dict(state.params), optimizer=dict(state.optimizer)), weight)
        params = {s: precision.to_compute(tree) for s, tree in state.params.items()}
        cast = inputs.map(precision.to_compute) if isinstance(inputs, Microbatches) else precision.to_compute(inputs)
        return RawArguments(
            params, inputs if inputs is None else cast, targets, extras, None, weights, seed, self._accumulate,
            first=self._data.place * microbatches, scale=state.scale.get("scale"), carry=running,
        )  # fmt: skip

    def _updated(self, result: StepResult, raw: RawArguments) -> tuple[TrainState, list[Metrics]]:
        run: Running = result.carry
        state, found = run.state, run.found
        assert found is not None
        scale = state.scale if self._recipe.scale is None else self._recipe.scale.update(state.scale, found)
        counted = torch.ones_like(state.step) if self._recipe.on_nonfinite != "skip" else (1 - found).to(state.step)
        return state._replace(step=state.step + counted, scale=scale), run.metrics

    def _loss(self, result: StepResult, raw: RawArguments) -> torch.Tensor:
        return result.carry.metrics[0].loss


def train_step(
    stages: Stages,
    loss_fn: Loss,
    schedule: Schedule,
    optimizer: Optimizer,
    mesh: DeviceMesh | None = None,
    *,
    axes: Axes | None = None,
    transport: Transport | None = None,
    engine: Engine = graph,
    tied: TiedPlaces = None,
    clip: float | None = None,
    norm_type: float = 2.0,
    scale: LossScale | None = None,
    accumulate: int = 1,
    precision: Precision | None = None,
    on_nonfinite: OnNonfinite = "skip",
) -> Trainer:
    """Make a trainer: ``init(params) -> state``, ``step(state, inputs, targets) -> (state, metrics)``, ``evaluate``.

    Equivalent to, for one step::

        loss, grads = value_and_grad(stages, loss_fn, schedule)(params, inputs, targets)    # over all data ranks
        grads = clip_by_global_norm(clip)(grads)
        params, optimizer_state = optimizer.update(grads, optimizer_state, params)

    Args:
        stages, loss_fn, engine, tied: as in :func:`value_and_grad`.
        schedule: what every rank of a pipeline does; ``REDUCE_TIED``, ``REDUCE_GRAD`` and ``STEP`` are placed anew.
        optimizer: of every stage. A chain that begins with :func:`clip_by_global_norm` clips by the norm of all stages.
        mesh: the ranks that train together; one pipeline where there is none.
        axes: the names of its axes.
        transport: in the place of a mesh, carries the messages of one pipeline; ``InProcess()`` where neither is given.
        clip: largest norm of all gradients together, which are made shorter where it is more.
        norm_type: p of the norm, ``math.inf`` for the largest element.
        scale: of the loss: :func:`dynamic_scale` or :func:`static_scale`.
        accumulate: how many times the schedule runs in a step, each with a part of the batch; the gradients are those of
            one schedule with as many times the microbatches, bit by bit.
        precision: dtypes of computing, reducing and keeping parameters.
        on_nonfinite: where loss or gradients are not finite: ``"skip"`` the update, ``"raise"`` on every rank (reads a number of
            the device in every step), or ``"ignore"`` it.

    Raises:
        ScheduleError, ValueError, TypeError: as :func:`value_and_grad`; arguments that do not fit together.
    """
    stages, schedule, tied = unpacked(stages, loss_fn, schedule, tied)
    if mesh is not None and transport is not None:
        raise ValueError("got a mesh and a transport, expected one of the two; ppfunc.P2P(mesh=mesh, axes=axes) is a transport over a mesh")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: got {accumulate!r}, expected a number of passes, at least 1")
    if on_nonfinite not in ("skip", "raise", "ignore"):
        raise ValueError(f"on_nonfinite: got {on_nonfinite!r}, expected 'skip', 'raise' or 'ignore'")
    if clip is not None and optimizer.clipped is not None:
        raise ValueError("clip: got one, and the optimizer clips, too; leave one of them out")
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip: got {clip}, expected a norm, at least 0")
    if optimizer.clipped is not None:
        first, optimizer = optimizer.clipped
        clip, norm_type = first.max_norm, first.norm_type
    rule = UpdateRule(
        accepting_scale(optimizer), math.inf if clip is None else clip, norm_type, scale, precision or Precision(), on_nonfinite
    )
    if transport is None:
        transport = InProcess() if mesh is None else P2P(mesh=mesh, axes=axes)
    schedule = remove_tail(schedule)
    tailed = reduce_early(append_tail(schedule, tied=bool(tied) or bool(schedule.replicas)))
    return Trainer(stages, loss_fn, tailed, transport, engine, tied, rule, accumulate)

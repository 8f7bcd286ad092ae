"""Make the training step of a pipeline, or of several over a mesh: gradients, their sums, and the update, all in one schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.pipeline import Stages, make_step, unpacked
from ppfunc.runtime import P2P, InProcess, StepSpec, Transport
from ppfunc.runtime.arguments import LossWeights, RawArguments, Seed
from ppfunc.runtime.buffers import Buffers
from ppfunc.runtime.collective import Wait
from ppfunc.runtime.grid import Axes
from ppfunc.runtime.lower import ParameterUpdate
from ppfunc.runtime.ties import TiedPlaces, leaf_number, read_tied
from ppfunc.schedule import Schedule, append_tail, reduce_early, remove_tail
from ppfunc.stage import Engine, Loss, Signature, graph
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map

from .training import Optimizer

OnNonfinite = Literal["skip", "raise", "ignore"]


class TrainState(NamedTuple):
    """Everything that training goes on from; every leaf is a tensor or a DTensor.

    Args:
        step: updates so far, without those that were skipped, int64[].
        params: by stage of the model, of this process.
        optimizer: likewise.
        scale: of the loss, as :class:`LossScale` keeps it; None where there is none.
    """

    step: Tensor
    params: dict[int, Any]
    optimizer: dict[int, Any]
    scale: Any = None


class Metrics(NamedTuple):
    """What is known of a step, the same on all ranks; tensors on the device, which nothing has read.

    Args:
        loss: the weighted sum over the microbatches of all data ranks, [].
        grad_norm: of all gradients, before they were clipped, [].
        scale: of the loss in this step, [].
        skipped: whether the update was left out since a gradient was not finite, bool[].
    """

    loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor


@dataclass
class _Running:
    """What one step has found so far.

    Args:
        state: from which it began; the new one at the end.
        weight: the sum of the weights of this data rank's microbatches, None where that of all data ranks is 1.
        pending: by stage, the sums over data ranks under way: flat buffers, the leaves in each, and what waits for it.
        gradients: by stage and number of the leaf, summed over the data ranks.
        factor: what gradients are multiplied by, None for 1.
        found: whether something was not finite.
        params, optimizer: new ones, by stage.
        metrics: of every update so far.
    """

    state: TrainState
    weight: float | None
    pending: dict[int, list[tuple[Tensor, list[int], Wait]]] = field(default_factory=dict)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    factor: Tensor | None = None
    found: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    params: dict[int, Any] = field(default_factory=dict)
    optimizer: dict[int, Any] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)


class Trainer:
    """Trains a pipeline, or several over a mesh: made by :func:`train_step`, a context manager that closes its transport."""

    def __init__(
        self, stages: Sequence[Any], loss_fn: Loss, schedule: Schedule, optimizer: Optimizer, transport: Transport, engine: Engine,
        tied: Any, clip: float | None, norm_type: float, scale: Any, accumulate: int, on_nonfinite: OnNonfinite,
    ) -> None:  # fmt: skip
        self.schedule, self.transport = schedule, transport
        self._optimizer, self._clip, self._norm_type, self._scale = optimizer, clip, norm_type, scale
        self._accumulate, self._on_nonfinite = accumulate, on_nonfinite
        self._data, self._model, self._world = (transport.collective(among) for among in ("data", "model", "world"))
        self._tied = read_tied(tied, schedule)
        update = ParameterUpdate(self._reduce, self._join, self._update)
        spec = StepSpec("train_step", frozenset({"loss"}), tied=self._tied, update=update)
        tailed = reduce_early(append_tail(remove_tail(schedule), tied=bool(self._tied) or bool(schedule.replicas)))
        self._step = make_step(stages, loss_fn, tailed, transport, engine, spec, self._arguments, self._finish)

    def init(self, params: Mapping[int, Any]) -> TrainState:
        """The state before the first step.

        Args:
            params: ``{stage: tree}`` of the stages of this process. They belong to the state afterwards.
        """
        params = {s: tree_map(lambda t: t.detach(), tree) for s, tree in params.items()}
        device = next((t.device for tree in params.values() for t in tree_leaves(tree)), torch.device("cpu"))
        scale = None if self._scale is None else self._scale.init(device)
        step = torch.zeros((), dtype=torch.int64, device=device)
        return TrainState(step, params, {s: self._optimizer.init(tree) for s, tree in params.items()}, scale)

    def step(
        self, state: TrainState, inputs: Any, targets: Any = None, *, loss_weights: LossWeights = None, seed: Seed = None,
        extras: Mapping[int, Any] | None = None,
    ) -> tuple[TrainState, Metrics]:  # fmt: skip
        """Run one step on the batch of this data rank.

        Args:
            inputs, targets, seed, extras: as of :func:`ppfunc.value_and_grad`, of ``accumulate`` times as many microbatches.
                Random numbers depend on the place of a microbatch among those of all data ranks.
            loss_weights: how much each microbatch counts, such as its number of tokens; divided by their sum over all data
                ranks. All count the same where none are given.

        Returns:
            The new state and :class:`Metrics`.
        """
        state, metrics = self._step(state, inputs, targets, loss_weights, seed, extras)
        return state, metrics[0]

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
        microbatches = self._accumulate * self.schedule.microbatches
        weights = [1 / (self._data.size * microbatches)] * microbatches if loss_weights is None else loss_weights
        scale = None if state.scale is None else state.scale["scale"]
        weight = None if loss_weights is None else float(torch.as_tensor(loss_weights, dtype=torch.float64).sum())
        return RawArguments(
            state.params, inputs, targets, extras, None, weights, seed, self._accumulate, first=self._data.place * microbatches,
            scale=scale, carry=_Running(state, weight),
        )  # fmt: skip

    def _reduce(self, buffers: Buffers, stage: int, gradients: dict[int, Tensor]) -> None:
        """Begin to sum the gradients of a stage over the data ranks."""
        run: _Running = buffers.carry
        run.gradients[stage] = gradients
        by_dtype: dict[torch.dtype, list[int]] = {}
        for n, gradient in gradients.items() if self._data.size > 1 else ():
            by_dtype.setdefault(gradient.dtype, []).append(n)
        for numbers in by_dtype.values():
            flat = torch.cat([gradients[n].reshape(-1) for n in numbers])
            run.pending.setdefault(stage, []).append((flat, numbers, self._data.all_reduce(flat)))

    def _join(self, buffers: Buffers, losses: dict[int, Tensor]) -> None:
        """Wait for the sums, and agree on the norm, the loss and whether all is finite."""
        run: _Running = buffers.carry
        for stage, parts in run.pending.items():
            gradients = run.gradients[stage]
            for flat, numbers, wait in parts:
                wait()
                sizes = [gradients[n].numel() for n in numbers]
                gradients |= {n: piece.view(gradients[n].shape) for n, piece in zip(numbers, flat.split(sizes), strict=True)}
        run.pending.clear()
        power, device = self._norm_type, run.state.step.device
        norms = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *map(self._norm_of, self._counted(run))])
        first = self._model.place == 0
        loss = torch.stack([norms[0], *(part.sum().to(norms) for part in losses.values() if first)]).sum()
        weight = norms.new_tensor(run.weight or 0.0 if first and 0 in self.transport.local_ranks(self.schedule.ranks) else 0.0)
        largest = math.isinf(power)
        sums = torch.stack([norms[0] if largest else norms.pow(power).sum(), loss, weight])
        self._world.all_reduce(sums)()
        norm, loss, weight = sums.unbind()
        if largest:
            norm = norms.amax()
            self._world.all_reduce(norm, "max")()
        else:
            norm = norm.pow(1 / power)
        divisor = norm.new_ones(())
        if run.weight is not None:
            loss, divisor = loss / weight, weight
        scale = norm.new_ones(()) if buffers.scale is None else buffers.scale.to(norm.dtype)
        divisor = divisor * scale
        norm = norm / divisor
        found = ~(norm.isfinite() & loss.isfinite())
        if self._on_nonfinite == "raise" and bool(found):
            raise FloatingPointError(f"loss {loss.item():g}, norm of the gradients {norm.item():g}; not finite")
        factor = divisor.reciprocal() if (run.weight is not None) or buffers.scale is not None else None
        if self._clip is not None:
            clipped = (self._clip / (norm + 1e-6)).clamp(max=1.0)
            factor = clipped if factor is None else factor * clipped
        run.factor, run.found = factor, found if self._on_nonfinite == "skip" else torch.zeros_like(found)
        run.metrics.append(Metrics(loss, norm, scale, run.found))

    def _norm_of(self, gradient: Tensor) -> Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return torch.linalg.vector_norm(gradient.to(wide), self._norm_type).to(torch.float64)

    def _counted(self, run: _Running) -> list[Tensor]:
        """The gradients that this rank adds to the norm: each parameter is counted on one rank."""
        if self._data.place or self._model.place:
            return []
        places = ((stage, n) for stage in sorted(run.gradients) for n in sorted(run.gradients[stage]) if self._is_first(run, stage, n))
        return [run.gradients[stage][n] for stage, n in places if run.gradients[stage][n].numel()]

    def _is_first(self, run: _Running, stage: int, leaf: int) -> bool:
        """Whether this is the first of the places of a parameter."""
        signature = None
        for _, places in self._tied:
            for place, name in places[1:]:
                if place == stage:
                    signature = signature or Signature.of(run.state.params[stage])
                    if leaf_number(signature, name, "params") == leaf:
                        return False
        group = next((g for g in self.schedule.replicas if self.schedule.model_stages[g[0]] == stage), None)
        return group is None or self.schedule.placement[group[0]] in self.transport.local_ranks(self.schedule.ranks)

    def _update(self, buffers: Buffers, stage: int) -> None:
        """Make the new parameters and optimizer state of a stage."""
        run: _Running = buffers.carry
        params, gradients, factor = run.state.params[stage], run.gradients[stage], run.factor
        leaves, treedef = tree_flatten(params)
        if factor is not None:
            gradients = {n: g * factor.to(g.device, g.dtype) for n, g in gradients.items()}
        tree = treedef.unflatten([gradients[n].to(p.dtype) if n in gradients else torch.zeros_like(p) for n, p in enumerate(leaves)])
        new, optimizer = self._optimizer.update(tree, run.state.optimizer[stage], params)
        if self._on_nonfinite == "skip":
            found = run.found
            new = tree_map(lambda a, b: torch.where(found.to(a.device), b, a), new, params)
            optimizer = tree_map(lambda a, b: torch.where(found.to(a.device), b, a), optimizer, run.state.optimizer[stage])
        run.params[stage], run.optimizer[stage] = new, optimizer

    def _finish(self, result: Any, raw: RawArguments) -> tuple[TrainState, list[Metrics]]:
        run: _Running = result.carry
        state, found = run.state, run.found
        scale = None if state.scale is None else self._scale.update(state.scale, found)
        step = state.step + (~found).to(torch.int64)
        return TrainState(step, run.params, run.optimizer, scale), run.metrics


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
    scale: Any = None,
    accumulate: int = 1,
    on_nonfinite: OnNonfinite = "skip",
) -> Trainer:
    """Make a trainer."""
    stages, schedule, tied = unpacked(stages, loss_fn, schedule, tied)
    if transport is None:
        transport = InProcess() if mesh is None else P2P(mesh=mesh, axes=axes)
    return Trainer(stages, loss_fn, schedule, optimizer, transport, engine, tied, clip, norm_type, scale, accumulate, on_nonfinite)

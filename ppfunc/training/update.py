"""Update parameters within a step: sums of gradients over data ranks, their norm, clipping, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isinf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..runtime import Transport
from ..runtime.buffers import Buffers
from ..runtime.collective import Wait
from ..runtime.lower import ParameterUpdate
from ..runtime.ties import Tied, leaf_number
from ..schedule import Schedule
from ..stage import Signature
from ..stage.layout import distributed, layout_of, local
from ..stage.tree import tree_flatten, tree_leaves, tree_map
from ._torch import multiply_each
from .norms import clip_coefficient, leaf_sums, norm_of
from .precision import LossScale, Precision, overflow
from .protocols import Optimizer, Tree

OnNonfinite = Literal["skip", "raise", "ignore"]


class TrainState(NamedTuple):
    """Everything that training goes on from; every leaf is a tensor or a DTensor.

    Args:
        step: updates so far, without those that were skipped, int64[].
        params: by stage of the model, of this process, in the dtype of ``precision.master``.
        optimizer: its state, by stage.
        scale: of the loss, as :class:`LossScale` keeps it; empty where there is none.
    """

    step: Tensor
    params: dict[int, Tree]
    optimizer: dict[int, Tree]
    scale: dict[str, Tensor]


class Metrics(NamedTuple):
    """Describe a step, the same on all ranks; tensors on the device, which nothing has read.

    Args:
        loss: the weighted sum over the microbatches of all data ranks, float64[].
        grad_norm: of all gradients, before they were clipped, float64[].
        scale: of the loss in this step, float64[].
        skipped: 1 where the update was left out since loss or gradients were not finite, else 0, float32[].
    """

    loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor


class UpdateRule(NamedTuple):
    """How gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: largest norm of all gradients together.
        norm_type: p of the norm.
        scale: of the loss.
        precision: the dtypes.
        on_nonfinite: what to do where loss or norm are not finite.
    """

    optimizer: Optimizer
    clip: float
    norm_type: float
    scale: LossScale | None
    precision: Precision
    on_nonfinite: OnNonfinite


@dataclass
class Running:
    """Hold the findings of one step so far.

    Args:
        state: from which it began; after each update, the new one.
        weight: the sum of the weights of this data rank's microbatches, None where that of all data ranks is 1.
        pending: sums over data ranks under way: stage, numbers of the leaves, flat buffer, and what waits for it.
        gradients: by stage and number of the leaf.
        divisor: of the gradients, None for 1.
        found: 1 where loss or gradients are not finite, float32[].
        metrics: of every update.
    """

    state: TrainState
    weight: float | None
    pending: list[tuple[int, list[int], Tensor, Wait]] = field(default_factory=list)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    divisor: Tensor | None = None
    found: Tensor | None = None
    metrics: list[Metrics] = field(default_factory=list)


def update_of(rule: UpdateRule, schedule: Schedule, transport: Transport, tied: Tied) -> ParameterUpdate:
    """The update of a step whose ``carry`` is :class:`Running`."""
    data, model, world = (transport.collective(among) for among in ("data", "model", "world"))
    ranks = transport.local_ranks(schedule.ranks)

    def reduce(buffers: Buffers, stage: int, gradients: dict[int, Tensor]) -> None:
        """Begin to sum the gradients of a stage over the data ranks."""
        run: Running = buffers.carry
        run.gradients[stage] = gradients
        by_dtype: dict[torch.dtype, list[int]] = {}
        for n, gradient in gradients.items() if data.size > 1 else ():
            by_dtype.setdefault(gradient.dtype, []).append(n)
        for dtype, numbers in by_dtype.items():
            flat = torch.cat([gradients[n].reshape(-1) for n in numbers]).to(rule.precision.reduced(dtype))
            run.pending.append((stage, numbers, flat, data.all_reduce(flat)))

    def join(buffers: Buffers, losses: dict[int, Tensor]) -> None:
        """Wait for the sums; agree on norm, loss and total weight, and on whether all is finite."""
        run: Running = buffers.carry
        _receive(run)
        shares = _shares(run, rule.norm_type)
        loss = torch.stack([shares.new_zeros(()), *(part.sum().to(shares) for part in losses.values())]).sum()
        weighs = run.weight is not None and model.place == 0 and 0 in ranks
        total = torch.stack(
            [shares.sum(), loss if model.place == 0 else torch.zeros_like(loss), shares.new_tensor(run.weight if weighs else 0.0)]
        )
        if isinf(rule.norm_type):
            total[0] = 0.0
        world.all_reduce(total)()
        if isinf(rule.norm_type):
            total[0] = shares.amax()
            largest = total[:1].clone()
            world.all_reduce(largest, "max")()
            total[0] = largest[0]
        _conclude(run, total, buffers.scale)

    def _shares(run: Running, p: float) -> Tensor:
        """The part of this rank in the norm, every parameter being counted once, float64[n]."""
        leaves = [(stage, n) for stage in sorted(run.gradients) for n in sorted(run.gradients[stage])]
        counted = [run.gradients[stage][n] for stage, n in leaves if counts(run, stage, n)]
        sums = leaf_sums(counted, p).to(run.state.step.device)
        return torch.cat([torch.zeros(1, dtype=torch.float64, device=sums.device), sums])

    def counts(run: Running, stage: int, leaf: int) -> bool:
        """Whether this rank adds a leaf to the norm: the first of those that hold the same."""
        parameter = tree_leaves(run.state.params[stage])[leaf]
        layout = layout_of(parameter)
        if data.place or (model.place and not (layout is not None and layout.sharded)):
            return False
        for _, places in tied:
            for place, name in places[1:]:
                if place == stage and leaf_number(Signature.of(run.state.params[stage]), name, "params") == leaf:
                    return False
        group = next((g for g in schedule.replicas if schedule.model_stages[g[0]] == stage), None)
        return group is None or schedule.placement[group[0]] in ranks

    def _conclude(run: Running, total: Tensor, loss_scale: Tensor | None) -> None:
        norm, loss, weight = norm_of(total[0], rule.norm_type), total[1], total[2]
        scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
        divisor = scale
        if run.weight is not None:
            loss, divisor = loss / weight, divisor * weight
        norm = norm / divisor
        found = overflow(loss, norm)
        if rule.on_nonfinite == "raise" and bool(found):
            raise FloatingPointError(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}; nothing was updated")
        clipped = clip_coefficient(norm, rule.clip)
        divisor = divisor if clipped is None else divisor / clipped
        run.divisor = None if loss_scale is None and run.weight is None and clipped is None else divisor
        run.found = found
        run.metrics.append(Metrics(loss, norm, scale, found if rule.on_nonfinite == "skip" else torch.zeros_like(found)))

    def step(buffers: Buffers, stage: int) -> None:
        """Make the new parameters and optimizer state of a stage."""
        run: Running = buffers.carry
        leaves, treedef = tree_flatten(run.state.params[stage])
        gradients, layouts = run.gradients.pop(stage), [layout_of(leaf) for leaf in leaves]
        own = [local(leaf) for leaf in leaves]
        if run.divisor is not None:  # not by the fused kernels, which divide by a float32
            scaled = multiply_each(list(gradients.values()), run.divisor.reciprocal())  # tied stages may share some
            gradients = dict(zip(gradients, scaled, strict=True))
        filled = [gradients[n].to(p.dtype) if n in gradients else torch.zeros_like(p) for n, p in enumerate(own)]
        found = run.found if rule.on_nonfinite == "skip" else None
        optimizer = run.state.optimizer[stage]
        new, after = rule.optimizer.update(treedef.unflatten(filled), tree_map(local, optimizer), treedef.unflatten(own), found_inf=found)
        parts = tree_leaves(new)
        run.state.params[stage] = treedef.unflatten(distributed(t, layout) for t, layout in zip(parts, layouts, strict=True))
        run.state.optimizer[stage] = tree_map(lambda old, part: distributed(part, layout_of(old)), optimizer, after)
        buffers.params[stage] = tuple(tree_leaves(rule.precision.to_compute(new)))

    return ParameterUpdate(reduce, join, step)


def _receive(run: Running) -> None:
    """Wait for the sums over data ranks."""
    for stage, numbers, flat, wait in run.pending:
        wait()
        gradients = run.gradients[stage]
        pieces = flat.split([gradients[n].numel() for n in numbers])
        gradients |= {n: piece.view(gradients[n].shape) for n, piece in zip(numbers, pieces, strict=True)}
    run.pending.clear()

"""Sum the norm of the gradients and the loss over all ranks, and conclude how to update."""

from __future__ import annotations

from math import isinf, nan

import torch
from torch import Tensor

from ..runtime.buffers import Buffers
from ..runtime.nonfinite import NotFinite
from ..runtime.ties import leaf_number
from ..stage import Signature
from .norms import clip_coefficient, leaf_sums, norm_of
from .precision import overflow
from .progress import Progress, cuts_of
from .protocols import selected
from .ranks import Cut, TrainingRanks
from .train_state import Metrics
from .update_rule import UpdateRule


def receive(rule: UpdateRule, ranks: TrainingRanks, progress: Progress, stage: int) -> None:
    """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
    if stage in progress.reducers:
        reducer, numbers = progress.reducers[stage]
        progress.gradients[stage] = dict(zip(numbers, reducer.wait(), strict=True))
    cuts, again = cuts_of(ranks, progress, stage), _further_places(ranks, progress, stage)
    counted = [(n, g) for n, g in sorted(progress.gradients[stage].items()) if n not in again and _counts(ranks, cuts[n])]
    dims = tuple(cuts[n].part if cuts[n].dim is None else None for n, _ in counted)
    parts = [
        g if dim is None else g.tensor_split(ranks.data.size, dim)[ranks.data.index].contiguous()
        for (_, g), dim in zip(counted, dims, strict=True)
    ]
    progress.shares.append(leaf_sums(parts, rule.norm_type).to(progress.state.step.device))


def _counts(ranks: TrainingRanks, cut: Cut) -> bool:
    """Whether this rank adds a leaf to the norm: the first of those that hold the same."""
    whole = cut.layout is None or not cut.layout.sharded
    return not (ranks.data.index and cut.part is None) and not (ranks.model.index and whole)


def _further_places(ranks: TrainingRanks, progress: Progress, stage: int) -> set[int]:
    """The leaves of a stage that are counted elsewhere: at the first place of a tied parameter, in the first replica."""
    signature = Signature.of(progress.state.params[stage]) if ranks.tied else None
    group = next((g for g in ranks.schedule.replicas if ranks.schedule.model_stages[g[0]] == stage), None)
    if group is not None and ranks.schedule.placement[group[0]] not in ranks.ranks:
        return set(progress.gradients[stage])
    names = (name for _, places in ranks.tied for place, name in places[1:] if place == stage)
    return {leaf_number(signature, name, "params") for name in names if signature is not None}


def join(rule: UpdateRule, ranks: TrainingRanks, buffers: Buffers, losses: dict[int, Tensor]) -> None:
    """Sum the norm and the loss over all ranks; conclude from them where the updates are to come."""
    progress, p = buffers.update_state, rule.norm_type
    for stage in sorted({*progress.gradients, *progress.reducers}) if rule.needs_all else ():
        receive(rule, ranks, progress, stage)
    shares = torch.cat([torch.zeros(1, dtype=torch.float64, device=progress.state.step.device), *progress.shares])
    progress.shares.clear()
    own = [part.to(shares).sum() for part in losses.values()] if ranks.model.index == 0 else []
    loss = torch.stack([shares[0], *own]).sum()
    bad = shares.isnan().any().to(shares)  # the largest of several numbers need not be NaN where one is
    total = torch.stack([shares[0] if isinf(p) else shares.sum(), loss, bad])
    largest = shares.amax() if isinf(p) else None
    waits = [ranks.world.all_reduce(total), *([] if largest is None else [ranks.world.all_reduce(largest, "max")])]

    def conclude() -> None:
        for wait in waits:
            wait()
        _conclude(rule, progress, total if largest is None else torch.stack([largest, *total[1:]]), scale)

    scale = buffers.scale
    if not rule.needs_all:
        progress.totals.append(conclude)
        return
    conclude()
    if rule.on_nonfinite == "skip":
        buffers.state.update(selected(progress.found, progress.stage_state, buffers.state))
    progress.stage_state = dict(buffers.state)
    if rule.scale is not None:
        progress.state = progress.state._replace(scale=rule.scale.update(progress.state.scale, progress.found))
        buffers.scale = progress.state.scale["scale"]


def _conclude(rule: UpdateRule, progress: Progress, total: Tensor, loss_scale: Tensor | None) -> None:
    """Conclude from the sums over all ranks whether the update is made, and by what gradients are divided."""
    norm, loss = norm_of(total[0], rule.norm_type), total[1]
    norm = torch.where(total[2] > 0, torch.full_like(norm, nan), norm)
    scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
    norm = norm / scale
    progress.found = overflow(loss, norm)
    if rule.on_nonfinite == "raise" and bool(progress.found):
        raise NotFinite(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}")
    clipped = clip_coefficient(norm, rule.clip)
    progress.divisor = None if loss_scale is None and clipped is None else scale if clipped is None else scale / clipped
    skipped = progress.found if rule.on_nonfinite == "skip" else torch.zeros_like(progress.found)
    progress.metrics.append(Metrics(loss, norm, scale, skipped, {}))
    progress.state = progress.state._replace(step=progress.state.step + (1 - skipped).to(progress.state.step))

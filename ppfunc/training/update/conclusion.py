"""Sum the norm of the gradients and the loss over all ranks, and conclude how to update."""

from math import isinf, nan

import torch
from torch import Tensor

from ppfunc.runtime.agreement.ties import leaf_number
from ppfunc.runtime.execution.buffers import Buffers
from ppfunc.runtime.execution.nonfinite import NotFinite
from ppfunc.stage import Signature

from ..optim.norms import clip_coefficient, leaf_sums, norm_of
from ..optim.protocols import selected
from .precision import overflow
from .progress import Progress
from .ranks import Cut, TrainingRanks
from .train_state import Metrics
from .update_rule import UpdateRule


def receive(rule: UpdateRule, ranks: TrainingRanks, progress: Progress, stage: int) -> None:
    """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
    if stage in progress.reducers:
        reducer, numbers = progress.reducers[stage]
        progress.gradients[stage] = dict(zip(numbers, reducer.wait(), strict=True))
    cuts, again = progress.cuts[stage], _further_places(ranks, progress, stage)
    counted = [
        (n, g)
        for n, g in sorted(progress.gradients[stage].items())
        if n not in again and _counts(ranks, cuts[n])
    ]
    dims = tuple(cuts[n].part if cuts[n].dim is None else None for n, _ in counted)
    gradients = [
        g if dim is None else g.tensor_split(ranks.data.size, dim)[ranks.data.index].contiguous()
        for (_, g), dim in zip(counted, dims, strict=True)
    ]
    progress.norms[stage] = leaf_sums(gradients, rule.norm_type).to(progress.state.step.device)


def _counts(ranks: TrainingRanks, cut: Cut) -> bool:
    """Tell if this rank adds a leaf to the norm: the first of the ranks that hold the same."""
    whole = cut.layout is None or not cut.layout.sharded
    return not (ranks.data.index and cut.part is None) and not (ranks.model.index and whole)


def _further_places(ranks: TrainingRanks, progress: Progress, stage: int) -> set[int]:
    """Find the leaves of a stage that count at another place: the first of a tied or replicated parameter."""
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
    norms = _norms_by_stage(ranks, progress, p)
    local_losses = [part.to(norms).sum() for part in losses.values()] if ranks.model.index == 0 else []
    loss = torch.stack([norms.new_zeros(()), *local_losses]).sum()
    bad = norms.isnan().any().to(norms)  # the largest of several numbers need not be NaN where one is
    sums = torch.cat([torch.stack([loss, bad]), *([] if isinf(p) else [norms])])
    waits = [ranks.world.all_reduce(sums), *([ranks.world.all_reduce(norms, "max")] if isinf(p) else [])]

    def conclude() -> None:
        for wait in waits:
            wait()
        total = norms.amax() if isinf(p) else sums[2:].sum()
        _conclude(rule, progress, torch.stack([total, *sums[:2]]), scale)

    scale = buffers.scale
    if not rule.needs_all:
        progress.totals.append(conclude)
        return
    conclude()
    if rule.on_nonfinite == "skip":
        buffers.state.update(selected(progress.found_inf, progress.stage_state, buffers.state))
    progress.stage_state = dict(buffers.state)
    if rule.precision.scale is not None:
        progress.state = progress.state._replace(
            scale=rule.precision.scale.update(progress.state.scale, progress.found_inf)
        )
        buffers.scale = progress.state.scale["scale"]


def _norms_by_stage(ranks: TrainingRanks, progress: Progress, norm_type: float) -> Tensor:
    """Take this rank's shares in the norm, by stage of the model: float64[stages], 0 for those of others.

    Summed over the ranks, and then over the stages in order, they give the same bits in any number of
    processes.
    """
    stages = max(ranks.schedule.model_stages) + 1
    norms = [torch.zeros((), dtype=torch.float64, device=progress.state.step.device)] * stages
    for stage, leaves in progress.norms.items():
        if leaves.numel():
            norms[stage] = leaves.amax() if isinf(norm_type) else leaves.sum()
    progress.norms.clear()
    return torch.stack(norms)


def _conclude(rule: UpdateRule, progress: Progress, total: Tensor, loss_scale: Tensor | None) -> None:
    """Conclude from the sums over all ranks if the update is made, and the divisor of the gradients."""
    norm, loss = norm_of(total[0], rule.norm_type), total[1]
    norm = torch.where(total[2] > 0, torch.full_like(norm, nan), norm)
    scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
    norm = norm / scale
    progress.found_inf = overflow(loss, norm)
    if rule.on_nonfinite == "raise" and bool(progress.found_inf):
        raise NotFinite(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}")
    clipped = clip_coefficient(norm, rule.max_norm)
    progress.divisor = (
        None if loss_scale is None and clipped is None else scale if clipped is None else scale / clipped
    )
    skipped = progress.found_inf if rule.on_nonfinite == "skip" else torch.zeros_like(progress.found_inf)
    progress.metrics.append(Metrics(loss, norm, scale, skipped, {}))
    progress.state = progress.state._replace(step=progress.state.step + (1 - skipped).to(progress.state.step))

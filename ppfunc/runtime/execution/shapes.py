"""Make the results of a step on the device meta, from shapes alone."""

from collections.abc import Mapping
from functools import reduce

import torch

from ppfunc.stage import LeafSignature
from ppfunc.stage.tree import tree_map

from ..call.arguments import StepArguments
from ..call.results import StepResult, collect
from ..lowering.lowered import BATCH, LoweredStep
from ..transport.protocols import LossPart, shape_of_sum
from .buffers import Leaves, Tag
from .fill import fill


def shapes_of(lowered: LoweredStep, arguments: StepArguments, parts: Mapping[int, LossPart]) -> StepResult:
    """Return the results of a step, all of whose tensors are on the device meta.

    Args:
        parts: the form of the losses of all ranks.
    """
    arguments = arguments._replace(
        params=tree_map(_bare, arguments.params), state=tree_map(_bare, arguments.state),
        inputs=tree_map(_bare, arguments.inputs), seed=(0, 0),
    )  # fmt: skip
    buffers, schedule = fill(lowered, arguments), lowered.schedule
    for key, low in lowered.stages.items():
        loss = () if low.loss is None else low.loss.leaves
        buffers.kept[key] = _tensors((*loss, *low.outputs.leaves, *low.metrics.leaves, *low.aux.leaves))
        if low.sources[0].stage == BATCH:
            buffers.values[Tag("B", key[0], BATCH, key[1])] = _tensors(low.sources[0].carrying)
    for stage, sums in buffers.gradients.items():
        numbers, leaves = lowered.differentiated(stage), arguments.params[schedule.model_stages[stage]]
        for m in range(schedule.microbatches):
            sums.add(tuple(leaves[n] for n in numbers), numbers, m)
    result = collect(lowered, [arguments], buffers)
    if not parts:
        return result
    dtype = reduce(torch.promote_types, (part.leaf.dtype for part in parts.values()))
    total = torch.empty(shape_of_sum(parts), dtype=dtype, device="meta")
    if "losses" in lowered.spec.wants:
        return result._replace(loss=total[0], losses=total[1:])
    return result._replace(loss=total)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _tensors(leaves: tuple[LeafSignature, ...]) -> Leaves:
    return tuple(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves)

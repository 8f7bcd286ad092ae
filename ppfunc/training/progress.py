"""Hold the findings of a step while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..runtime.buffers import Leaves
from ..runtime.collective import Wait
from ..stage.tree import tree_leaves
from .ranks import Cut, TrainingRanks
from .reducer import Reducer
from .sharding import Dims
from .train_state import Metrics, TrainState


@dataclass
class Progress:
    """Hold the findings of a step so far.

    Args:
        state: from which it began; after each update, the new one.
        weighted: whether the caller gave weights of the losses, whose sum over the data ranks is not 1 yet.
        stage_state: leaves of the states of stages before this update.
        reducers: by stage, where gradients are added up over microbatches and data ranks, and the numbers of the leaves.
        cuts: by stage, how its parameters lie.
        gradients: by stage and number of the leaf.
        divisor: of the gradients, None for 1.
        found: 1 where loss or gradients are not finite, float32[].
        shares: parts of this rank in the norm.
        totals: of every update whose sums over all ranks are under way, what waits for them.
        metrics: of every update.
        written: leaves of the state that were updated in place.
        left: by stage, how many updates are to come.
    """

    state: TrainState
    weighted: bool
    stage_state: dict[int, Leaves] = field(default_factory=dict)
    reducers: dict[int, tuple[Reducer, Sequence[int]]] = field(default_factory=dict)
    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    divisor: Tensor | None = None
    found: Tensor | None = None
    shares: list[Tensor] = field(default_factory=list)
    totals: list[Wait] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)


def cuts_of(ranks: TrainingRanks, progress: Progress, stage: int) -> list[Cut]:
    """How the parameters of a stage lie, worked out once in a step."""
    if stage not in progress.cuts:
        progress.cuts[stage] = ranks.cuts(tree_leaves(progress.state.params[stage]))
    return progress.cuts[stage]


def dims_of(ranks: TrainingRanks, progress: Progress, stage: int) -> Dims:
    """The dimension of every parameter of a stage that is cut over the data ranks."""
    return tuple(cut.dim for cut in cuts_of(ranks, progress, stage))

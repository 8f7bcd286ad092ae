"""Keep the intermediate values of a training step while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from ppfunc.runtime.execution.buffers import Leaves
from ppfunc.runtime.transport.collective import Wait
from ppfunc.stage.tree import tree_leaves

from .ranks import Cut, TrainingRanks
from .reducer import Reducer
from .sharding import Dims
from .train_state import Metrics, TrainState


@dataclass
class Progress:
    """Keep the intermediate values of a step.

    Args:
        begun: the ``step`` of the state that the caller gave.
        state: from which the step began; after each update, the new one.
        weighted: the caller gave weights of the losses, whose sum over the data ranks is not 1 yet.
        cuts: by stage, how its parameters are cut.
        stage_state: leaves of the states of stages before this update.
        reducers: by stage, where gradients are added up over microbatches and data ranks, and the numbers of
            the leaves.
        gradients: by stage and number of the leaf.
        divisor: of the gradients, None for 1.
        found_inf: 1 where loss or gradients are not finite, float32[].
        norms: by stage, the share of this rank in the norm of its gradients, float64[leaves].
        totals: of every update whose sums over all ranks are under way, what waits for them.
        metrics: of every update.
        left: by stage, how many updates are to come.
    """

    begun: Tensor
    state: TrainState
    weighted: bool
    cuts: dict[int, list[Cut]]
    stage_state: dict[int, Leaves] = field(default_factory=dict)
    reducers: dict[int, tuple[Reducer, Sequence[int]]] = field(default_factory=dict)
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    divisor: Tensor | None = None
    found_inf: Tensor | None = None
    norms: dict[int, Tensor] = field(default_factory=dict)
    totals: list[Wait] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: TrainState, ranks: TrainingRanks, weighted: bool) -> Self:
        """Begin a step from a state, which stays as it is."""
        copy = state._replace(params=dict(state.params), optimizer=dict(state.optimizer))
        cuts = {stage: ranks.cuts(tree_leaves(tree)) for stage, tree in state.params.items()}
        return cls(state.step, copy, weighted, cuts)

    def dims(self, stage: int) -> Dims:
        """Return the dimension of every parameter of a stage that is cut over the data ranks."""
        return tuple(cut.dim for cut in self.cuts[stage])

"""Refuse states that do not fit a trainer."""

import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from ppfunc._text import shown
from ppfunc.stage.tree import tree_leaves

from .ranks import TrainingRanks
from .stage_trees import StageTrees
from .train_state import TrainState, require_not_donated
from .update_rule import UpdateRule, require_state_of


class StateChecks:
    """Refuses states that are none of a trainer, and remembers the trees of one that was.

    Args:
        rule, ranks: of the trainer.
    """

    def __init__(self, rule: UpdateRule, ranks: TrainingRanks) -> None:
        self._rule, self._ranks = rule, ranks
        self._known: dict[int, StageTrees] = {}  # by stage, as they were checked last

    def require_fit(self, state: TrainState) -> dict[int, StageTrees]:
        """Return the trees of the stages of a state.

        Raises:
            TypeError, ValueError: it is none of this trainer, or was donated.
        """
        scale = self._rule.precision.scale
        keys = set() if scale is None else set(scale.init("cpu"))
        apart = 1 if self._rule.states.reduce is not None else self._ranks.data.size
        _require_parts(state, self._ranks.stages, keys, apart)
        require_not_donated(state)
        trees = dict(self._known)
        for s in self._ranks.stages:
            if s not in trees or not trees[s].describes(s, state):
                trained = self._rule.frozen.trained(s, state.params[s])
                require_state_of(self._rule, trained, state.optimizer[s], f"state.optimizer[{s}]")
                trees[s] = self._known[s] = StageTrees.of(self._rule, self._ranks, s, state)
        return trees


def _require_parts(state: TrainState, stages: Sequence[int], scale: Set[str], data_ranks: int) -> None:
    """Raise TypeError or ValueError unless this is a state of these stages of the model.

    Args:
        scale: the keys of the state of the loss scale.
        data_ranks: how many ranks run other batches, and do not bring their states together.
    """
    if not isinstance(state, TrainState):
        pair = isinstance(state, tuple) and bool(state) and isinstance(state[0], TrainState)
        mend = "; a step returns a pair: state, metrics = trainer.step(state, ...)" if pair else ""
        raise TypeError(
            f"state: got an object of type {type(state).__name__}, expected a TrainState, as init or step"
            f" returns it{mend}"
        )
    require_trees("state.params", state.params, stages)
    require_trees("state.optimizer", state.optimizer, stages)
    if not isinstance(state.scale, Mapping) or state.scale.keys() != scale:
        got, expected = (", ".join(map(repr, keys)) or "none" for keys in (state.scale, sorted(scale)))
        raise ValueError(
            f"state.scale: got {got}, the scale of this trainer has {expected}; go on with the same scale=,"
            " or init anew"
        )
    if not isinstance(state.step, torch.Tensor) or state.step.shape or state.step.dtype != torch.int64:
        raise TypeError(f"state.step: got {reprlib.repr(state.step)}, expected an int64 tensor of one number")
    if data_ranks > 1 and tree_leaves(state.stage_state):
        raise ValueError(
            f"state: got that of the stages {sorted(state.stage_state)}, of which each of the {data_ranks}"
            " data ranks would have another; say how they go together, Trainer(..., reduce_state={'*':"
            " 'mean'}), or put batch norms into evaluation mode before they are split or made stages by"
            " stage_from_module(module, constants=True), which have no state then"
        )


def require_trees(name: str, trees: Any, stages: Sequence[int], *, some: bool = False) -> None:
    """Raise TypeError or ValueError unless these are trees of these stages, or of some of them."""
    if not isinstance(trees, Mapping):
        raise TypeError(
            f"{name}: got {shown(trees)}, expected {{stage: tree}} of the stages {list(stages)}, which this"
            " process runs"
        )
    if not set(trees) <= set(stages) or (len(trees) < len(stages) and not some):
        raise ValueError(
            f"{name}: got the stages {list(trees)}, this process runs {list(stages)}; give those, as {{stage:"
            " tree}"
        )

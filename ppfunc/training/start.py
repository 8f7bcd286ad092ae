"""Describe what ranks that train together must have the same before they begin: options, and the values of their states."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from ..stage import Stage
from ..stage.layout import local
from ..stage.module import frozen_in
from ..stage.tree import tree_leaves
from .checksums import checksum
from .protocols import Optimizer
from .ranks import TrainingRanks
from .train_state import TrainState
from .update_rule import UpdateRule, updated_ones


def start_facts(rule: UpdateRule, ranks: TrainingRanks, state: TrainState, stages: Sequence[Stage | None]) -> tuple[str, str]:
    """Terms that all ranks have to agree on, and those that the ranks of other batches have to, which hold the same parameters.

    Of an optimizer that the user wrote only a name is known: ranks also compare what it makes of ones. Reads numbers of the device:
    ranks compare them once.
    """
    if ranks.world.size == 1:
        return "", ""
    scale = ", ".join(f"{name} {value.item():g}" for name, value in sorted(state.scale.items()))
    common = [*rule.numbers_text, f"state of step {int(state.step)}{f' with the scale {scale}' if scale else ''}"]
    trees = (
        [(f"{name} of stage {s}", tree) for s in ranks.stages for name, tree in _trees(rule.optimizer, state, s)]
        if ranks.data.size > 1
        else []
    )
    held = [f"the {name} with the checksum {_checksum([t for t in tree_leaves(tree) if ranks.is_whole(t)])}" for name, tree in trees]
    frozen = {s: frozen_in(fn) for s in ranks.stages if ranks.data.size > 1 and (fn := stages[s]) is not None}
    held += [f"{', '.join(names)} of stage {s} frozen" for s, names in frozen.items() if names]
    return "; ".join(common), "; ".join(held)


def _trees(optimizer: Optimizer, state: TrainState, stage: int) -> list[tuple[str, object]]:
    params = state.params[stage]
    made = updated_ones(optimizer, params, (1.0, -0.5, 0.25))
    return [("parameters", params), ("optimizer state", state.optimizer[stage]), ("ones updated by the optimizer", made)]


def _checksum(leaves: Sequence[Tensor]) -> str:
    """A number of all bits, as a text."""
    sums = [checksum(local(leaf)) for leaf in leaves]
    if not sums:
        return "none"
    numbers = torch.stack([s.to(sums[0].device) for s in sums]).tolist()
    return sha256(repr(numbers).encode()).hexdigest()[:16]

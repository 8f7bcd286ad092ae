"""Make the state before the first step: master copies, cut over data ranks, and the optimizer's state."""

from collections.abc import Mapping
from functools import partial

import torch

from ppfunc.runtime.agreement.ties import require_declared_trees
from ppfunc.stage.layout import local
from ppfunc.stage.signature import Signature, flatten
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from ..checkpoint.tensor_file import DTYPES_BY_NAME
from ..optim.protocols import Tree
from .ranks import TrainingRanks
from .start import note_whole
from .train_state import TrainState
from .update_rule import UpdateRule


def initial_state(
    rule: UpdateRule,
    ranks: TrainingRanks,
    device: torch.device,
    params: Mapping[int, Tree],
    stage_state: Mapping[int, Tree],
) -> TrainState:
    """Make the state of these parameters, which are the state's afterwards.

    Args:
        device: of the count of steps, where no parameter has one.
        stage_state: of the stages that have a state.

    Raises:
        TypeError, ValueError: as :meth:`ppfunc.Trainer.init`.
    """
    for name, trees in (("params", params), ("state", stage_state)):
        for s, tree in trees.items():
            flatten(tree, f"{name}[{s}]")  # raises for leaves that are no tensors
    require_declared_trees(params, ranks.tied)
    storages, scale = set[int](), rule.precision.scale
    fixed = {s: rule.frozen.numbers(s, Signature.of(tree)) for s, tree in params.items()}
    masters = {
        s: rule.precision.to_kept(tree_map(partial(_own, storages), tree), fixed[s])
        for s, tree in params.items()
    }
    device = next((local(t).device for tree in masters.values() for t in tree_leaves(tree)), device)
    pairs = {s: ranks.init(tree, fixed[s], rule.optimizer, f"params[{s}]") for s, tree in masters.items()}
    state = TrainState(
        step=torch.zeros((), dtype=torch.int64, device=device),
        params={s: pair[0] for s, pair in pairs.items()},
        optimizer={s: pair[1] for s, pair in pairs.items()},
        scale={} if scale is None else scale.init(device),
        stage_state=dict(stage_state),
    )
    for s, tree in stage_state.items() if ranks.data.size > 1 and rule.states.reduce else ():
        rule.states.reductions(s, tree)  # raises where nothing says how states go together
    for name in ("params", "optimizer", "stage_state"):
        _require_storable(getattr(state, name), name)
    if ranks.shards_params:
        note_whole(ranks, state.step, masters)
    return state


def _require_storable(trees: Mapping[int, Tree], name: str) -> None:
    """Raise TypeError for a leaf of a dtype that no checkpoint holds."""
    for s, tree in trees.items():
        leaves, treedef = tree_flatten(tree)
        for leaf, path in zip(leaves, tree_paths(treedef, f"{name}[{s}]"), strict=True):
            if leaf.dtype not in DTYPES_BY_NAME.values():
                raise TypeError(
                    f"{path} has the dtype {leaf.dtype}, which no checkpoint holds; expected one of"
                    f" {', '.join(DTYPES_BY_NAME)}"
                )


def _own(storages: set[int], leaf: torch.Tensor) -> torch.Tensor:
    """Detach a leaf, and clone it if an earlier leaf has its memory: each may be updated in place."""
    leaf = leaf.detach()
    storage = local(leaf).untyped_storage().data_ptr()
    if storage in storages:
        leaf = leaf.clone()
    storages.add(storage)
    return leaf

"""Make the state before the first step: master copies, cut over data ranks, and the optimizer's state."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import inf

import optree
import torch

from ppfunc.runtime.lowering.ties import require_declared_trees
from ppfunc.stage._torch import transforming
from ppfunc.stage.errors import warn
from ppfunc.stage.layout import MeshLayout, distributed, layout_of, local
from ppfunc.stage.process import hold_interrupts
from ppfunc.stage.signature import Signature, differentiable, flatten
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure

from ..optim.optimizer import Optimizer, Tree, text_of
from ..optim.rates import rates_of
from .buckets import shard
from .ranks import TrainingRanks
from .state import CODES, TrainState, note_whole, owners_of
from .update_rule import UpdateRule, updated_ones


def initial_state(
    rule: UpdateRule,
    ranks: TrainingRanks,
    device: torch.device,
    params: Mapping[int, Tree],
    stage_state: Mapping[int, Tree],
    optimizer: Mapping[int, Tree],
) -> TrainState:
    """Make the state of these parameters, which are the state's afterwards.

    Args:
        device: the device of the count of steps, where there is no parameter.
        stage_state: the states of the stages that have a state.
        optimizer: an earlier state of the optimizer, by stage, to go on from.

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
    pairs = {s: _cut(rule, ranks, tree, fixed[s], f"params[{s}]") for s, tree in masters.items()}
    for s, before in optimizer.items():
        cut, made = pairs[s]
        pairs[s] = cut, _carried_on(made, before, tree_structure(cut), fixed[s], f"optimizer[{s}]")
    state = TrainState(
        step=torch.zeros((), dtype=torch.int64, device=device),
        params={s: pair[0] for s, pair in pairs.items()},
        optimizer={s: pair[1] for s, pair in pairs.items()},
        scale={} if scale is None else scale.init(device),
        stage_state=dict(stage_state),
    )
    for s, tree in stage_state.items() if ranks.data.size > 1 and rule.states.reduce else ():
        rule.states.require_summable(s, tree)  # or where nothing says how states go together
    for name in ("params", "optimizer", "stage_state"):
        leaves, treedef = tree_flatten(getattr(state, name))
        for leaf, path in zip(leaves, tree_paths(treedef, name), strict=True):
            if leaf.dtype not in CODES:
                raise TypeError(
                    f"{path} has the dtype {leaf.dtype}, which no checkpoint holds; expected one of"
                    f" {', '.join(map(str, CODES))}"
                )
    if ranks.shards_params:
        note_whole(ranks, state.step, masters)
    rule.frozen.warn_of_all({s: Signature.of(tree) for s, tree in params.items()})
    _warn_of_small_rates(rule, state)
    return state


def _own(storages: set[int], leaf: torch.Tensor) -> torch.Tensor:
    """Detach a leaf, and clone it if an earlier leaf has its memory, or if its elements do not lie together:
    each may be updated in place, or by a tensor like it.
    """
    if transforming():  # no update writes into what a transform sees
        return leaf
    leaf = leaf.detach()
    part, storage = local(leaf), local(leaf).untyped_storage().data_ptr()
    if storage in storages or torch.empty_like(part, device="meta").stride() != part.stride():
        leaf = leaf.clone()
    storages.add(storage)
    return leaf


def _cut(
    rule: UpdateRule, ranks: TrainingRanks, params: Tree, fixed: Collection[int], name: str
) -> tuple[Tree, Tree]:
    """Cut the parameters of a stage; return them, and the optimizer state of the trained parameters.

    Args:
        fixed: the numbers of frozen parameters.
        name: the name of the parameters, for errors.
    """
    leaves, treedef = flatten(params, name)
    cuts = [ranks.cut(leaf) for leaf in leaves]
    own = [  # which are of an earlier state
        ranks.shards_params and layout_of(leaf) == cut.kept for leaf, cut in zip(leaves, cuts, strict=True)
    ]
    ranks.require_whole([leaf for leaf, is_own in zip(leaves, own, strict=True) if not is_own], name)
    trained = treedef.unflatten(None if n in fixed else leaf for n, leaf in enumerate(leaves))
    _require_elementwise(
        rule.optimizer, treedef, [None if n in fixed else cut.split for n, cut in enumerate(cuts)], name
    )
    _require_parameters_back(rule.optimizer, trained, name)
    dims = tuple(None if is_own else cut.dim for cut, is_own in zip(cuts, own, strict=True))
    shards = shard(tuple(map(local, leaves)), dims, ranks.parts.size, ranks.parts.index)
    state = rule.optimizer.init(
        treedef.unflatten(None if n in fixed else leaf for n, leaf in enumerate(shards))
    )
    flatten(state, f"optimizer.init({name})")  # raises for leaves that are no tensors
    layouts = [cut.kept for cut in cuts]
    kept = treedef.unflatten(map(distributed, shards, layouts)) if ranks.shards_params else params
    return kept, _laid_out(state, treedef, shards, layouts)


def _require_elementwise(
    optimizer: Optimizer, params: optree.PyTreeSpec, splits: Sequence[int | None], name: str
) -> None:
    """Raise ValueError for an optimizer that may work on whole parameters, of which ranks hold parts.

    Args:
        splits: a dimension of every parameter along which ranks keep parts; None where each has the whole.
        name: the name of the parameters, for errors.
    """
    parts = [path for path, dim in zip(tree_paths(params, name), splits, strict=True) if dim is not None]
    if parts and not optimizer.elementwise:
        raise ValueError(
            f"{parts[0]}: got the optimizer {text_of(optimizer)}, which may work on whole parameters; ranks"
            " hold parts of this one; if it works element by element, say so, Optimizer(...,"
            " elementwise=True), else keep parameters whole: shard='none', and no tensor parallel ones"
        )


def _require_parameters_back(optimizer: Optimizer, params: Tree, name: str) -> None:
    """Raise ValueError for a user's optimizer whose update returns differences, as optax does.

    To find out, update ones by gradients of 0: differences are near 0, parameters near 1.
    """
    if optimizer.text or any(local(leaf).is_meta for leaf in tree_leaves(params)):
        return
    with hold_interrupts():  # what a handler raises is no error of the optimizer
        try:
            ones = updated_ones(optimizer, params, gradients=(0.0,))
        except Exception:
            return  # it does not take leaves of one element
    for leaf in tree_leaves(ones):
        if isinstance(leaf, torch.Tensor) and differentiable(leaf.dtype) and (leaf.abs() < 0.5).any():
            raise ValueError(
                f"{name}: the optimizer {text_of(optimizer)} has made {leaf.flatten()[0].item():g} of a"
                " parameter of 1 and a gradient of 0; expected new parameters; one that returns differences"
                " becomes one by ppfunc.optim.from_updates"
            )


def _laid_out(
    state: Tree,
    treedef: optree.PyTreeSpec,
    shards: Sequence[torch.Tensor],
    layouts: Sequence[MeshLayout | None],
) -> Tree:
    """Make DTensors of the leaves of an optimizer state that belong to parameters which are DTensors.

    A leaf belongs to the parameter with whose path its own ends, if it has the shape of that.
    """
    leaves, structure = tree_flatten(state)
    owners = owners_of(structure, treedef)
    return structure.unflatten(
        distributed(leaf, layouts[n]) if n is not None and leaf.shape == shards[n].shape else leaf
        for leaf, n in zip(leaves, owners, strict=True)
    )


def _carried_on(
    made: Tree, before: Tree, params: optree.PyTreeSpec, fixed: Collection[int], name: str
) -> Tree:
    """Return an optimizer state with the leaves of an earlier state, of other frozen parameters.

    Args:
        made: the state of the parameters that train now; leaves that the earlier one lacks stay.
        params: the structure of all parameters.
        fixed: the numbers of those that are frozen now.
        name: the name of ``before``, for errors.
    """

    def by_path(tree: Tree) -> dict[str, tuple[torch.Tensor | None, int | None]]:
        leaves, structure = flatten(tree, name)
        rows = zip(tree_paths(structure, name), leaves, owners_of(structure, params), strict=True)
        return {path: (leaf, owner) for path, leaf, owner in rows}

    new, old = by_path(made), by_path(before)
    for path in {**new, **old}:
        (leaf, owner), (was, former) = (each.get(path, (None, None)) for each in (new, old))
        thawed, frozen = was is None and owner is not None, leaf is None and former in fixed
        got, expected = (
            "nothing" if t is None else f"{t.dtype}{list(t.shape)} {layout_of(t) or 'whole'}"
            for t in (was, leaf)
        )
        if got != expected and not thawed and not frozen:
            raise ValueError(
                f"{path}: got {got}, expected {expected}; pass the state of the same optimizer for parameters"
                " that are cut in the same way, or load a checkpoint of it"
            )
    return tree_structure(made).unflatten(old.get(path, pair)[0] for path, pair in new.items())


def _warn_of_small_rates(rule: UpdateRule, state: TrainState) -> None:
    """Warn of parameters whose dtype holds no update of the size of the rate."""
    trained = tree_leaves([rule.frozen.trained(s, tree) for s, tree in state.params.items()])
    dtypes = {leaf.dtype for leaf in trained if differentiable(leaf.dtype)}
    rate, of_stage = rule.optimizer.rate, next(iter(state.optimizer.values()), None)
    largest = max([] if rate is None or transforming() else rates_of(rate, of_stage), default=inf)
    for dtype in dtypes:
        if dtype.itemsize == 2 and largest < torch.finfo(dtype).eps / 4:
            warn(
                f"params: they are kept in {dtype}, where a learning rate of {largest:g} leaves a parameter"
                f" of 1 as it is; keep them in float32: precision=ppfunc.Precision(compute={dtype},"
                " master=torch.float32)"
            )

"""Define the state of training, read its trees, recognise it, and compare it between ranks."""

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from hashlib import sha256
from itertools import combinations
from math import inf
from typing import Any, NamedTuple, Self
from weakref import ref

import optree
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ppfunc._checks import require_counts
from ppfunc.runtime.lowering.comparison import checksum
from ppfunc.runtime.lowering.ties import OTHER_VALUES, require_declared_trees
from ppfunc.runtime.values.arguments import Form, by_stage, form_of, has_form, leaves_like, require_trees
from ppfunc.stage._torch import transforming
from ppfunc.stage.device import preserve_rng
from ppfunc.stage.errors import warn
from ppfunc.stage.layout import MeshLayout, distributed, layout_of, local
from ppfunc.stage.process import hold_interrupts
from ppfunc.stage.signature import Signature, differentiable, flatten, leaf_number
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure

from ..optim.optimizer import Optimizer, Tree, text_of
from ..optim.rates import rates_of
from .buckets import Dims, shard
from .ranks import Cut, TrainingRanks
from .update_rule import StageUpdate, UpdateRule, require_state_of, updated_ones

# By the step of a state: checksums of the whole parameters from which a state in shards was cut.
_CUT_FROM: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The steps of the states into which an update has written.
_DONATED: WeakIdKeyDictionary = WeakIdKeyDictionary()

# By their names in safetensors: a state holds tensors of these, as checkpoints do.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class TrainState(NamedTuple):
    """Hold the state of training; every leaf is a tensor or a DTensor.

    Args:
        step: number of updates so far, without those that were skipped, int64[].
        params: parameters of this process, by stage of the model, in the dtype of ``precision.master``.
        optimizer: state of the optimizer, by stage.
        scale: state of the :class:`LossScale`; empty without one.
        stage_state: states of the stages that have one, such as running statistics, by stage.
    """

    step: Tensor
    params: dict[int, Tree]
    optimizer: dict[int, Tree]
    scale: dict[str, Tensor]
    stage_state: dict[int, Tree]


class Metrics(NamedTuple):
    """Hold the results of a training step beside the new state, as tensors on the device.

    ``stages``, ``aux`` and ``outputs`` are those of this process, all others are the same on all ranks.

    Args:
        loss: the weighted sum over the microbatches of all data ranks, float64[].
        grad_norm: the norm of all gradients, before they were clipped, float64[].
        scale: the scale of the loss in this step, float64[].
        skipped: 1 if the update was left out since loss or gradients were not finite, else 0, float32[].
        stages: metrics of the stages of this process, by stage: trees with a leading axis of the microbatches
            that it ran; Microbatches if they differ in form.
        aux: the tree that the loss function has returned beside the loss, likewise; None on ranks that run no
            last stage, and if it returns the loss alone.
        losses: losses of the microbatches of all data ranks, in the order of ranks, float64[ranks * m]: not
            weighted, with auxiliary losses of stages; None unless asked for.
        outputs: outputs of the last stages of this process; None unless asked for.
        lr: the learning rate of this update, float64[]; of an optimizer of groups a dictionary, by group.
            None if the optimizer does not tell its rate.
        stage_norms: norms of the gradients of every stage of the model, float64[stages]; None unless asked
            for.
        leaf_norms: norms of the gradient of every parameter of this process that trains, whole over all
            ranks: float64[] by stage and name, 0 where a tied parameter has its first place elsewhere, or the
            first replica of a stage is on another rank; None unless asked for.
        carry: the last carries of the stages of this process, ``{stage of the model: Microbatches}`` of a
            tree for each sequence; None unless asked for.
    """

    loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor
    stages: dict[int, Any]
    aux: Any = None
    losses: Tensor | None = None
    outputs: Any = None
    lr: Any = None
    stage_norms: Tensor | None = None
    leaf_norms: dict[int, dict[str, Tensor]] | None = None
    carry: dict[int, Any] | None = None


def note_donated(state: TrainState) -> None:
    """Note that an update has written into the leaves of a state."""
    _DONATED[state.step] = True


def require_not_donated(state: TrainState) -> None:
    """Raise ValueError for a state that an update has written into: it has values of a later step."""
    if state.step in _DONATED:
        raise ValueError(
            "state: a step was given it, and has updated it in place, as donate=True says; go on from the"
            " state that the last step returned, a copy from before it, or a checkpoint"
        )


class StageTrees(NamedTuple):
    """Describe the parameters and the optimizer state of a stage.

    Args:
        params, optimizer: the forms of the trees.
        bare: the form of the parameters without frozen ones.
        fixed, trained: the numbers of frozen parameters, and of the others.
        cuts: the cut of every parameter.
        dims: the dimension of every parameter that is cut over the data ranks; frozen parameters are cut
            where they are kept so.
        counted: the numbers of the parameters whose gradients this rank counts in the norm. Of the ranks that
            hold the same, and of tied or replicated places, the first counts it.
        parted: the numbers of those of which each data rank counts its part, although it has the whole.
        patterns: whether each pattern of the optimizer takes a parameter.
        update: runs the optimizer on the parameters that train.
    """

    params: Form
    optimizer: Form
    bare: Form
    fixed: frozenset[int]
    trained: tuple[int, ...]
    cuts: list[Cut]
    dims: Dims
    counted: tuple[int, ...]
    parted: frozenset[int]
    patterns: Mapping[str, bool]
    update: StageUpdate

    @classmethod
    def of(cls, rule: UpdateRule, ranks: TrainingRanks, stage: int, state: TrainState) -> Self:
        """Describe the trees of a stage; raise ValueError for parts, or an optimizer state of others."""
        leaves, treedef = tree_flatten(state.params[stage])
        if not ranks.shards_params:
            ranks.require_whole(leaves, f"state.params[{stage}]")
        signature = Signature.of(state.params[stage], f"state.params[{stage}]")
        cuts = [ranks.cut(leaf) for leaf in leaves]
        fixed, again = rule.frozen.numbers(stage, signature), _further_places(ranks, stage, signature)
        trained = tuple(n for n in range(len(leaves)) if n not in fixed)
        bare = treedef.unflatten(None if n in fixed else leaf for n, leaf in enumerate(leaves))
        whole = frozenset[int]() if ranks.shards_params else fixed
        dims = tuple(None if n in whole else cut.dim for n, cut in enumerate(cuts))
        optimizer = state.optimizer[stage]
        of_state = require_state_of(rule, bare, optimizer, f"state.optimizer[{stage}]")
        moments: list[Any] = of_state.flatten_up_to(optimizer)
        forms = form_of(leaves, treedef), form_of(moments, of_state)
        others = {  # which another rank counts
            n
            for n, cut in enumerate(cuts)
            if cut.over.copies.index
            or (cut.over.parts.index and cut.part is None)
            or (ranks.model.index and cut.repeated)
        }
        counted = tuple(n for n in trained if n not in again | others)
        parted = frozenset(n for n, cut in enumerate(cuts) if cut.dim is None and cut.part is not None)
        kept = [cut.kept for cut in cuts]
        if ranks.shards_params:
            _require_kept(f"state.params[{stage}]", treedef, leaves, kept)
        of_moments = [
            kept[n] if n is not None and leaf.shape == leaves[n].shape else layout_of(leaf)
            for leaf, n in zip(moments, owners_of(of_state, treedef), strict=True)
        ]
        _require_kept(f"state.optimizer[{stage}]", of_state, moments, of_moments)
        of_bare = form_of(*tree_flatten(bare))
        axes = ranks.cut_matrices([cuts[n] for n in trained])
        update = StageUpdate(rule, stage, of_bare, forms[1], axes)
        patterns = rule.optimizer.patterns(bare)
        return cls(*forms, of_bare, fixed, trained, cuts, dims, counted, parted, patterns, update)

    def leaves_of(self, stage: int, state: TrainState) -> "StageLeaves | None":
        """Return the leaves of the stage of a state, if its trees have these structures."""
        params = leaves_like(state.params[stage], self.params)
        try:  # in half the time, in any order of keys
            optimizer: list[Any] = self.optimizer.treedef.flatten_up_to(state.optimizer[stage])
        except ValueError:
            return None
        return None if params is None else StageLeaves(self, params, optimizer)


class StageLeaves(NamedTuple):
    """Hold the leaves of a stage of a state.

    Args:
        trees: describe them.
        params, optimizer: leaves of the state, tensors or DTensors.
    """

    trees: StageTrees
    params: list[torch.Tensor]
    optimizer: list[torch.Tensor]

    def has_form(self) -> bool:
        """Tell whether they have the forms of the trees."""
        return has_form(self.params, self.trees.params) and has_form(self.optimizer, self.trees.optimizer)

    def own(self) -> list[torch.Tensor]:
        """Return the local leaves that an update may write into: the state, then what trains."""
        params = read(self.params, self.trees.params)
        return [*read(self.optimizer, self.trees.optimizer), *[params[n] for n in self.trees.trained]]

    def paths(self, stage: int) -> list[str]:
        """Name the leaves of :meth:`own`."""
        params = tree_paths(self.trees.params.treedef, f"state.params[{stage}]")
        of_state = tree_paths(self.trees.optimizer.treedef, f"state.optimizer[{stage}]")
        return [*of_state, *(params[n] for n in self.trees.trained)]


def read(leaves: list[torch.Tensor], form: Form) -> list[torch.Tensor]:
    """Return the local leaves of a tree of this form."""
    return leaves if form.layouts is None else list(map(local, leaves))


def laid_out(leaves: Sequence[torch.Tensor], form: Form) -> list[torch.Tensor]:
    """Make the leaves of a tree of this form of its local leaves."""
    return list(leaves if form.layouts is None else map(distributed, leaves, form.layouts))


def owners_of(state: optree.PyTreeSpec, params: optree.PyTreeSpec) -> list[int | None]:
    """Find the parameter to which each leaf of a state of the optimizer belongs, by its path."""
    numbers = {path: n for n, path in enumerate(params.paths())}
    ends = ((path[k:] for k in range(len(path) + 1)) for path in state.paths())
    return [next((numbers[end] for end in each if end in numbers), None) for each in ends]


def _require_kept(
    name: str, treedef: optree.PyTreeSpec, leaves: Sequence[torch.Tensor], kept: Sequence[MeshLayout | None]
) -> None:
    """Raise ValueError for leaves of a state that do not lie over the ranks as a trainer keeps them."""
    for path, leaf, layout in zip(tree_paths(treedef, name), leaves, kept, strict=True):
        if layout_of(leaf) != layout:
            raise ValueError(
                f"{path}: got a tensor {layout_of(leaf) or 'that is whole'}, expected a DTensor {layout}, as"
                " this trainer keeps it; give whole parameters to trainer.init, and load a state of other"
                " ranks by ppfunc.checkpoint.load(folder, like=state)"
            )


def _further_places(ranks: TrainingRanks, stage: int, signature: Signature) -> set[int]:
    """Find the leaves of a stage that count at another place: the first of a tied or replicated parameter."""
    group = next((g for g in ranks.schedule.replicas if ranks.schedule.model_stages[g[0]] == stage), None)
    if group is not None and ranks.schedule.placement[group[0]] not in ranks.ranks:
        return set(range(len(signature.leaves)))
    names = (name for _, places in ranks.tied for place, name in places[1:] if place == stage)
    return {leaf_number(signature, name, "params") for name in names}


def stages_of(
    rule: UpdateRule, ranks: TrainingRanks, state: TrainState, known: dict[int, StageTrees]
) -> dict[int, StageLeaves]:
    """Read the leaves of a state, by stage.

    Args:
        known: the trees of the state that was read last, by stage; updated in place.

    Raises:
        TypeError, ValueError: it is not a state of this trainer, or an update has written into it.
    """
    scale, here = rule.precision.scale, ranks.stages
    keys = set() if scale is None else set(scale.init("cpu"))
    _require_parts(state, here, keys, 1 if rule.states.reduce is not None else ranks.data.size)
    require_not_donated(state)
    stages = dict[int, StageLeaves]()
    for s in here:
        leaves = known[s].leaves_of(s, state) if s in known else None
        if leaves is None or not leaves.has_form():
            known[s] = StageTrees.of(rule, ranks, s, state)
            leaves = known[s].leaves_of(s, state)
        assert leaves is not None
        stages[s] = leaves
    return stages


def _require_parts(state: TrainState, stages: Sequence[int], scale: Set[str], data_ranks: int) -> None:
    """Raise TypeError or ValueError unless this is a state of these stages of the model.

    Args:
        scale: the keys of the state of the loss scale.
        data_ranks: the number of ranks that run other batches, and do not bring their states together.
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
    by_stage(state.stage_state, "state.stage_state")
    given = state.scale if isinstance(state.scale, Mapping) else [state.scale]
    if set(given) != scale:
        got, expected = (", ".join(map(repr, keys)) or "none" for keys in (given, sorted(scale)))
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


ByAxes = dict[tuple[str, ...], list[str]]
"""Terms that the ranks along some data axes share, by these axes."""


def note_whole(ranks: TrainingRanks, step: torch.Tensor, params: Mapping[int, object]) -> None:
    """Note checksums of the parameters that a state of this ``step`` is cut from, for its first step."""
    if step.is_meta:  # of a state that no step begins from
        return
    _CUT_FROM[step] = _checksums(ranks, ((f"parameters of stage {s}", t) for s, t in sorted(params.items())))


def start_facts(
    rule: UpdateRule, ranks: TrainingRanks, state: TrainState
) -> tuple[str, dict[tuple[str, ...], str]]:
    """Write the terms that must be equal: on all ranks, and, by data axes, on the ranks along these that hold
    the same stages.

    A user's own optimizer is known only by name, so that ranks also compare how it updates ones. Reads
    numbers of the device. A state without values, of a step that is lowered, has none to compare.
    """
    if ranks.world.size == 1 or state.step.is_meta:
        return "", {}
    scale = ", ".join(f"{name} {value.item():g}" for name, value in sorted(state.scale.items()))
    common = f"state of step {int(state.step)}{f' with the scale {scale}' if scale else ''}"
    if ranks.data.size == 1:
        return common, {}
    trees = list[tuple[str, object]]()
    for s, params in sorted(state.params.items()):
        trees += [
            (f"parameters of stage {s}", params),
            (f"optimizer state of stage {s}", state.optimizer[s]),
            (f"state of stage {s}", state.stage_state.get(s, {})),
            (
                f"ones updated by the optimizer of stage {s}",
                updated_ones(rule.optimizer, rule.frozen.trained(s, params)),
            ),
        ]
    facts = _checksums(ranks, trees)
    for axes, terms in _CUT_FROM.get(state.step, {}).items():
        facts[axes] += terms
    for s in ranks.stages:
        names = rule.frozen.names(s, Signature.of(state.params[s]))
        facts[ranks.axes.data_axes].append(f"{', '.join(names) or 'nothing'} of stage {s} frozen")
    return common, {axes: "; ".join(terms) for axes, terms in facts.items()}


def alike_in_places(
    rule: UpdateRule, ranks: TrainingRanks, params: Mapping[int, Tree]
) -> Iterator[tuple[str, dict[int, list[torch.Tensor | None]]]]:
    """Yield the parameters of every stage, then updates of constants by the optimizer, each with words.

    The updates find an optimizer that treats places of one parameter differently: its groups and masks go
    by names, which differ.
    """
    trees = {s: tree_flatten(tree) for s, tree in params.items()}
    yield OTHER_VALUES, {s: leaves for s, (leaves, _) in trees.items()}
    changed: dict[int, Any] = {}
    for s, (_, treedef) in trees.items():
        trained = rule.frozen.trained(s, params[s])
        devices = {local(leaf).device for leaf in tree_leaves(trained)}
        with preserve_rng(devices):
            for device in devices:  # an optimizer that draws gives each place other numbers
                torch.rand(1 + s + ranks.schedule.stages * ranks.ranks[0], device=device)
            changed[s] = treedef.flatten_up_to(updated_ones(rule.optimizer, trained))
    yield "is updated by the optimizer in another way", changed


def _checksums(ranks: TrainingRanks, trees: Iterable[tuple[str, object]]) -> ByAxes:
    """Write checksums of named trees, by the data axes along which ranks keep the same leaves.

    All ranks get the same axes, every combination of data axes, so that they compare one after the other.
    """
    every = ranks.axes.data_axes
    facts: ByAxes = {axes: [] for n in range(len(every), 0, -1) for axes in combinations(every, n)}
    for name, tree in trees:
        sums: dict[tuple[str, ...], list[torch.Tensor]] = {every: []}
        for leaf in tree_leaves(tree):
            sums.setdefault(ranks.copied_over(leaf), []).append(checksum(local(leaf)))
        for axes in facts.keys() & sums.keys():  # nobody has a copy of what is cut over all of them
            own = sums[axes]
            numbers = torch.stack([s.to(own[0].device) for s in own]).tolist() if own else "none"
            digest = sha256(repr(numbers).encode()).hexdigest()[:16]
            facts[axes].append(f"the {name} with the checksum {digest}")
    return facts


class LastState:
    """Recognises the state that the last step of a trainer returned, which ranks need not compare.

    A step ends on all ranks or on none, so that all count alike. Trainers that go on with one state by other
    schedules share it.

    Args:
        every: the number of steps after which ranks compare the state all the same; None for never.

    Attributes:
        closed: whether the transport is.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None:
            require_counts(checksum_every=every)
        self._every, self._steps, self.closed = every, 0, False
        self.forget()

    def forget(self) -> None:
        """Know no state: that of the next step is compared."""
        self._step: Callable[[], torch.Tensor | None] = lambda: None
        self._generation = -1

    def goes_on(self, state: object, generation: int) -> bool:
        """Tell whether this is the state, with no failure since and no comparison due.

        Args:
            generation: the number of failures so far.
        """
        return generation == self._generation and self._step() is getattr(state, "step", state)

    def note(self, state: TrainState, generation: int, steps: int) -> None:
        """Note the state after further ``steps``."""
        before, self._steps = self._steps, self._steps + steps
        due = self._every is not None and before // self._every != self._steps // self._every
        self._step, self._generation = ref(state.step), -1 if due else generation


# -- the state before the first step: master copies, cut over data ranks, and the optimizer's state


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
    return kept, _moments_laid_out(state, treedef, shards, layouts)


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


def _moments_laid_out(
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

"""Update parameters within a step: sum gradients over data ranks, and run the optimizer on them."""

import reprlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ppfunc.runtime.call.arguments import StepArguments
from ppfunc.runtime.execution.buffers import Buffers
from ppfunc.runtime.execution.gradients import Gradients
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage._torch import versions
from ppfunc.stage.frozen import FrozenLeaves
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths

from .._torch import multiply_each, multiply_into_each
from ..optim.protocols import Tree
from .conclusion import join, receive
from .progress import Progress
from .ranks import TrainingRanks
from .reducer import Reducer
from .sharding import gather
from .start import start_facts
from .train_state import mark_donated
from .update_rule import UpdateRule


class TrainingUpdate:
    """Updates parameters in a step whose ``update_state`` is :class:`Progress`.

    Args:
        rule: how gradients become new parameters.
        ranks: those that train together.
        frozen: the parameters that stay as they are.
    """

    def __init__(self, rule: UpdateRule, ranks: TrainingRanks, frozen: FrozenLeaves) -> None:
        self._rule, self._ranks, self._frozen = rule, ranks, frozen
        self._idle: dict[int, list[Reducer]] = {}  # by stage, those that no step uses
        self.together, self.sharded = rule.needs_all, ranks.shard == "params"

    def begin(self, steps: Sequence[StepArguments]) -> Sequence[StepArguments]:
        """Divide the weights of the losses by their sum over all data ranks.

        Gradients of weights that are not divided yet could overflow in half precision.
        """
        progress: Progress = steps[0].update_state
        progress.stage_state = dict(steps[0].state)
        progress.left = dict.fromkeys(progress.state.params, len(steps))
        if not progress.weighted:
            return steps
        weights = [batch.loss_weights for batch in steps if batch.loss_weights is not None]
        mine = torch.cat(weights).to(progress.state.step.device)
        total = mine.sum(0, keepdim=True)
        self._ranks.data.all_reduce(total)()
        # On another device it is not read, and the loss is no number.
        if total.device.type == "cpu" and total.tolist() == [0]:
            raise ValueError(
                "loss_weights: their sum over all data ranks is 0, expected one that losses can be divided by"
            )
        shares = (mine / total).chunk(len(steps))
        return [batch._replace(loss_weights=share) for batch, share in zip(steps, shares, strict=True)]

    def sums(self, buffers: Buffers, stage: int, leaves: dict[int, LeafSignature]) -> Reducer | None:
        """Find buckets for the gradients of a stage: idle ones of an earlier step, else new ones.

        A step takes them out of the idle ones, and returns them once it has used their sums. A step that
        fails does not: a sum may still be written there.
        """
        ranks, progress = self._ranks, buffers.update_state
        if ranks.data.size == 1:
            return None
        dims, idle = progress.dims(stage), self._idle.setdefault(stage, [])
        form = tuple(leaves.values()), tuple(dims[n] for n in leaves)
        while idle:
            reducer = idle.pop()
            if reducer.form == form and reducer.idle:
                return reducer
        device = next((local(leaf).device for leaf in tree_leaves(progress.state.params[stage])), None)
        return Reducer(
            *form,
            ranks.data,
            dtype=self._rule.precision.reduce,
            device=device,
        )

    def reduce(self, buffers: Buffers, stage: int, sums: Gradients, numbers: Sequence[int]) -> None:
        """Begin to sum the gradients of a stage over the data ranks."""
        progress: Progress = buffers.update_state
        if isinstance(sums, Reducer):
            sums.launch()
            progress.reducers[stage] = sums, numbers
        else:
            like = tuple(buffers.params[stage][n] for n in numbers)
            progress.gradients[stage] = dict(zip(numbers, sums.take(like, torch.clone), strict=True))

    def join(self, buffers: Buffers, losses: dict[int, Tensor]) -> None:
        """Sum the norm and the loss over all ranks; conclude how to update."""
        join(self._rule, self._ranks, buffers, losses)

    def step(self, buffers: Buffers, stage: int) -> None:
        """Make the new parameters and optimizer state of a stage; frozen parameters stay."""
        rule, ranks, progress = self._rule, self._ranks, buffers.update_state
        progress.left[stage] -= 1
        if not rule.needs_all:
            receive(rule, ranks, progress, stage)
        leaves, treedef = tree_flatten(progress.state.params[stage])
        dims, state = progress.dims(stage), progress.state.optimizer[stage]
        mine = ranks.shards(leaves, dims)
        # Cast before they are divided, which would lose small ones.
        gradients = {n: g.to(mine[n].dtype) for n, g in progress.gradients.pop(stage).items()}
        if progress.divisor is not None:  # not by the fused kernels, which divide by a float32
            gradients = _divided(gradients, progress.divisor, into=stage in progress.reducers)
        grads = treedef.unflatten(
            [gradients[n] if n in gradients else torch.zeros_like(p) for n, p in enumerate(mine)]
        )
        fixed = sorted(self._frozen.numbers(stage, Signature.of(progress.state.params[stage])))
        values, untouched = [mine[n].clone() for n in fixed], versions([mine[n] for n in fixed])
        new, after = _optimized(
            rule, progress, stage, (grads, tree_map(local, state), treedef.unflatten(mine))
        )
        updated = list(tree_leaves(new))
        in_place = versions([mine[n] for n in fixed]) != untouched
        for n, value in zip(fixed, values, strict=True):
            updated[n] = mine[n].copy_(value) if in_place else mine[n]
        progress.state.optimizer[stage] = tree_map(
            lambda old, leaf: distributed(leaf, layout_of(old)), state, after
        )
        if not ranks.shards_params:
            updated = list(gather(updated, dims, ranks.data))
            if progress.left[stage]:  # after the last update nobody computes with them
                computed = rule.precision.to_compute(treedef.unflatten(updated))
                buffers.params[stage] = tuple(tree_leaves(computed))
        progress.state.params[stage] = treedef.unflatten(map(distributed, updated, map(layout_of, leaves)))
        if stage in progress.reducers:
            self._idle[stage].append(progress.reducers.pop(stage)[0])

    def unshard(self, buffers: Buffers, stage: int) -> None:
        """Gather the parameters of a stage."""
        progress: Progress = buffers.update_state
        leaves = list(map(local, tree_leaves(progress.state.params[stage])))
        shards = tuple(self._rule.precision.to_compute(leaves))
        buffers.shards[stage] = shards
        buffers.params[stage] = gather(shards, progress.dims(stage), self._ranks.data)

    def finish(self, buffers: Buffers) -> None:
        """Wait for the sums that are still under way."""
        progress: Progress = buffers.update_state
        while progress.totals:
            progress.totals.pop(0)()

    def facts(self, update_state: Progress) -> tuple[str, str]:
        """Describe what ranks compare where they meet: see :func:`start_facts`."""
        return start_facts(self._rule, self._ranks, update_state.state, self._frozen)

    def params(self, update_state: Progress) -> dict[int, Tree]:
        """Return the parameters by stage, whole or the shards of this rank."""
        return update_state.state.params


def _optimized(
    rule: UpdateRule, progress: Progress, stage: int, trees: tuple[Tree, Tree, Tree]
) -> tuple[Tree, Tree]:
    """Run the optimizer on gradients, its state and parameters; note which of them it has written into."""
    _, state, params = trees
    leaves = tree_leaves((state, params))
    before = versions(leaves)
    try:
        results = rule.optimizer.update(
            *trees, found_inf=progress.found_inf if rule.on_nonfinite == "skip" else None
        )
    finally:
        if (after := versions(leaves)) != before:
            changed = zip(leaves, before, after, strict=True)
            mark_donated(progress.begun, (leaf for leaf, one, other in changed if one != other))
    if not isinstance(results, tuple) or len(results) != 2:
        raise TypeError(
            f"the optimizer has returned {reprlib.repr(results)} for stage {stage}, expected (parameters,"
            " state)"
        )
    for name, old, new in (("parameter", params, results[0]), ("state", state, results[1])):
        _require_alike(stage, name, old, new)
    return results


def _require_alike(stage: int, name: str, old: Tree, new: Tree) -> None:
    """Raise ValueError where the optimizer has made a tree of another form."""
    (before, structure), (after, other_structure) = tree_flatten(old), tree_flatten(new)
    if other_structure != structure:
        raise ValueError(
            f"the optimizer has made the structure {other_structure} of the {name}s of stage {stage},"
            f" expected {structure} as before"
        )
    for n, (one, other) in enumerate(zip(before, after, strict=True)):
        if one is other:
            continue
        if not isinstance(other, Tensor) or (one.dtype, one.shape, one.device) != (
            other.dtype,
            other.shape,
            other.device,
        ):
            got, known = (
                f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else reprlib.repr(t)
                for t in (other, one)
            )
            where = f"the {name} {known} of stage {stage}, {tree_paths(structure, name)[n]}"
            raise ValueError(
                f"the optimizer has made {got} of {where}; expected the same shape, dtype and device"
            )


def _divided(gradients: dict[int, Tensor], divisor: Tensor, *, into: bool) -> dict[int, Tensor]:
    """Divide gradients; in place only in the buckets of a reducer, which tied stages do not share."""
    divided = dict(gradients)
    for device in {g.device for g in gradients.values()}:
        numbers = [n for n, g in gradients.items() if g.device == device]
        leaves, factor = [gradients[n] for n in numbers], divisor.reciprocal().to(device)
        if into:
            multiply_into_each(leaves, factor)
            continue
        for n, product in zip(numbers, multiply_each(leaves, factor), strict=True):
            divided[n] = product.to(gradients[n].dtype)  # a product of two scalars has the wider dtype
    return divided

"""Update parameters within a call of a trainer: sum over ranks, conclude, and run the optimizer."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isinf, nan

import torch
from torch import Tensor

from ppfunc.runtime.execution.buffers import Buffers, Leaves
from ppfunc.runtime.execution.gradients import Gradients
from ppfunc.runtime.execution.nonfinite import NotFinite
from ppfunc.runtime.transport.collective import Wait
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.signature import leaf_number
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map

from ..optim.norms import clip_coefficient, leaf_sums, norm_of, norm_sum
from ..optim.protocols import Tree, selected
from .precision import overflow
from .ranks import Cut, TrainingRanks
from .reducer import Reducer
from .sharding import Dims, gather
from .start import start_facts
from .train_state import Metrics, TrainState
from .update_rule import UpdateRule, divided, updated


class TrainingUpdate:
    """Updates the parameters in one call of a trainer: of one step, or of several.

    Args:
        rule: how gradients become new parameters.
        ranks: those that train together.
        idle: by stage, the reducers that no call uses; shared by the calls of a trainer.
        state: from which the call begins, and which stays as it is.
        known: as what the ranks know that their states go together; "" where they compare them.

    Attributes:
        state: after each update the new one.
        metrics: of every update.
    """

    def __init__(
        self,
        rule: UpdateRule,
        ranks: TrainingRanks,
        idle: dict[int, list[Reducer]],
        state: TrainState,
        known: str,
    ) -> None:
        self._rule, self._ranks, self._idle, self.known = rule, ranks, idle, known
        self.state = self._given = state
        self.metrics: list[Metrics] = []
        self._cuts: dict[int, list[Cut]] = {}  # of the parameters, by stage
        self._fixed: dict[int, frozenset[int]] = {}  # the numbers of frozen parameters, by stage
        # By stage, where gradients are added up, and the numbers of the leaves.
        self._reducers: dict[int, tuple[Reducer, Sequence[int]]] = {}
        self._gradients: dict[int, dict[int, Tensor]] = {}  # by stage and number of the leaf
        self._norms: dict[int, Tensor] = {}  # by stage, this rank's share in the norm, float64[leaves]
        self._divisor: Tensor | None = None  # of the gradients, None for 1
        self._found_inf: Tensor | None = None  # 1 where loss or gradients are not finite, float32[]
        self._gathers: dict[int, Callable[[], Leaves]] = {}  # of new parameters, by stage, in order
        self._totals: list[Wait] = []  # of every update whose sums over all ranks are under way
        self._left: dict[int, int] = {}  # by stage, how many updates are to come
        # Of the states of stages before this update, by stage; and those that are on their way.
        self._stage_state: dict[int, Leaves] = {}
        self._new_states: dict[int, Callable[[], Leaves]] = {}

    def facts(self) -> tuple[str, dict[tuple[str, ...], str]]:
        """Describe what ranks compare where they meet: see :func:`start_facts`."""
        return start_facts(self._rule, self._ranks, self.state)

    def params(self) -> dict[int, Tree]:
        """Return the parameters by stage, whole or the shards of this rank."""
        return self.state.params

    def begin(self, weights: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Divide the weights of the losses by their sum over all data ranks.

        Gradients of weights that are not divided yet could overflow in half precision.
        """
        state, ranks = self.state, self._ranks
        self.state = state._replace(params=dict(state.params), optimizer=dict(state.optimizer))
        self._cuts = {stage: ranks.cuts(tree_leaves(tree)) for stage, tree in state.params.items()}
        frozen = self._rule.frozen
        self._fixed = {s: frozen.numbers(s, Signature.of(tree)) for s, tree in state.params.items()}
        self._left = dict.fromkeys(state.params, len(weights))
        self._stage_state = {s: tuple(map(local, tree_leaves(tree))) for s, tree in state.stage_state.items()}
        explicit = [each for each in weights if each is not None]
        if not explicit:
            m = ranks.schedule.microbatches
            equal = torch.full((m,), 1 / (ranks.data.size * m), dtype=torch.float64, device="cpu")
            return [equal] * len(weights)
        joined = torch.stack(explicit).to(state.step.device)
        total = joined.sum(1, keepdim=True)
        ranks.data.all_reduce(total)()
        # On another device neither they nor their sum are read, and the loss is no number.
        joined = torch.where(joined < 0, torch.nan, joined)
        if total.device.type == "cpu" and [0] in total.tolist():
            raise ValueError(
                "loss_weights: their sum over all data ranks is 0, expected one that losses can be divided by"
            )
        return (joined / total).unbind()

    def sums(self, stage: int, leaves: dict[int, LeafSignature]) -> Reducer | None:
        """Find buckets for the gradients of a stage: idle ones of an earlier step, else new ones.

        A step takes them out of the idle ones, and returns them once it has used their sums. A step that
        fails does not: a sum may still be written there.
        """
        ranks = self._ranks
        if ranks.data.size == 1:
            return None
        dims, idle = self._dims(stage), self._idle.setdefault(stage, [])
        fixed = frozenset(position for position, n in enumerate(leaves) if n in self._fixed[stage])
        over = tuple(self._cuts[stage][n].over for n in leaves)
        form = tuple(leaves.values()), tuple(dims[n] for n in leaves), over, fixed
        while idle:
            reducer = idle.pop()
            if reducer.form == form and reducer.idle:
                return reducer
        device = next((local(leaf).device for leaf in tree_leaves(self.state.params[stage])), None)
        return Reducer(*form, dtype=self._rule.precision.reduce, device=device)

    def reduce(self, buffers: Buffers, stage: int, sums: Gradients, numbers: Sequence[int]) -> None:
        """Begin to sum the gradients of a stage, and the changes of its state, over the data ranks."""
        if stage in buffers.state:
            tree = self._given.stage_state[stage]
            pair = self._stage_state[stage], buffers.state[stage]
            self._new_states[stage] = self._rule.states.begin(self._ranks, stage, tree, *pair)
        if isinstance(sums, Reducer):
            sums.launch()
            self._reducers[stage] = sums, numbers
        else:
            fixed, leaves = self._fixed[stage], buffers.params[stage]
            like = tuple(leaves[n].new_empty(0) if n in fixed else leaves[n] for n in numbers)
            taken = zip(numbers, sums.take(like, torch.clone), strict=True)
            self._gradients[stage] = {n: gradient for n, gradient in taken if n not in fixed}

    def join(self, buffers: Buffers, losses: Sequence[Tensor], each: Mapping[int, Tensor] | None) -> None:
        """Sum the norm and the loss over all ranks; conclude from them where the updates are to come."""
        rule, world, infinite = self._rule, self._ranks.world, isinf(self._rule.norm_type)
        for stage in sorted({*self._gradients, *self._reducers}) if rule.needs_all else ():
            self._receive(stage)
        norms = self._norms_by_stage()
        terms = [value.to(norms).sum() for value in losses] if self._ranks.model.index == 0 else []
        loss = torch.stack([norms.new_zeros(()), *terms]).sum()
        bad = norms.isnan().any().to(norms)  # the largest of several numbers need not be NaN where one is
        sums = torch.cat([torch.stack([loss, bad]), *([] if infinite else [norms])])
        waits = [world.all_reduce(sums), *([world.all_reduce(norms, "max")] if infinite else [])]
        rows = None if each is None else self._rows(each)
        waits += [] if rows is None else [world.all_reduce(rows)]
        scale = buffers.scale

        def conclude() -> None:
            for wait in waits:
                wait()
            self._conclude(norms.amax() if infinite else sums[2:].sum(), sums[0], sums[1] > 0, scale, rows)

        if not rule.needs_all:
            self._totals.append(conclude)
            return
        conclude()
        buffers.state.update({stage: wait() for stage, wait in self._new_states.items()})
        self._new_states.clear()
        if rule.on_nonfinite == "skip":
            buffers.state.update(selected(self._found_inf, self._stage_state, buffers.state))
        self._stage_state = dict(buffers.state)
        buffers.scale = self.state.scale.get("scale")

    def step(self, buffers: Buffers, stage: int) -> None:
        """Make the new parameters and optimizer state of a stage; frozen parameters stay."""
        ranks, current = self._ranks, self.state
        self._left[stage] -= 1
        self._gathers.pop(stage, None)  # which this step has waited for
        if not self._rule.needs_all:
            self._receive(stage)
            if stage in self._new_states:
                self._stage_state[stage] = buffers.state[stage] = self._new_states.pop(stage)()
        leaves, treedef = tree_flatten(current.params[stage])
        dims, state = self._dims(stage), current.optimizer[stage]
        shards = ranks.shards(leaves, dims)
        # Cast before they are divided, which would lose small ones.
        gradients = {n: g.to(shards[n].dtype) for n, g in self._gradients.pop(stage).items()}
        if self._divisor is not None:  # not by the fused kernels, which divide by a float32
            gradients = divided(gradients, self._divisor, into=stage in self._reducers)
        fixed = self._fixed[stage]
        trained = {n: p for n, p in enumerate(shards) if n not in fixed}
        grads = {n: gradients[n] if n in gradients else torch.zeros_like(p) for n, p in trained.items()}
        trees = (
            treedef.unflatten(map(grads.get, range(len(shards)))),
            tree_map(local, state),
            treedef.unflatten(map(trained.get, range(len(shards)))),
        )
        changed, after = updated(self._rule, stage, trees, self._found_inf, self._given)
        every = iter(changed)
        new = [p if n in fixed else next(every) for n, p in enumerate(shards)]
        current.optimizer[stage] = tree_map(lambda old, leaf: distributed(leaf, layout_of(old)), state, after)
        if ranks.shards_params:
            current.params[stage] = treedef.unflatten(map(distributed, new, map(layout_of, leaves)))
        else:
            self._gather(buffers, stage, new)
        if stage in self._reducers:
            self._idle[stage].append(self._reducers.pop(stage)[0])

    def unshard(self, buffers: Buffers, stage: int) -> None:
        """Begin to gather the parameters of a stage."""
        leaves = list(map(local, tree_leaves(self.state.params[stage])))
        shards = buffers.shards[stage] = tuple(self._rule.precision.to_compute(leaves))
        buffers.gathering[stage] = gather(shards, self._dims(stage), self._ranks.parts)

    def finish(self) -> None:
        """Wait for the sums and gathers that are still under way."""
        for wait in (*self._totals, *self._gathers.values()):
            wait()
        self._totals.clear()
        self._gathers.clear()

    def _gather(self, buffers: Buffers, stage: int, shards: Sequence[Tensor]) -> None:
        """Begin to gather the new parameters of a stage; the memory is that of two stages at a time."""
        leaves, treedef = tree_flatten(self.state.params[stage])
        params, layouts, left = self.state.params, list(map(layout_of, leaves)), self._left[stage]
        precision, wait = self._rule.precision, gather(shards, self._dims(stage), self._ranks.parts)

        @cache
        def gathered() -> Leaves:
            whole = wait()
            params[stage] = treedef.unflatten(map(distributed, whole, layouts))
            # After the last update nobody computes with them.
            return tuple(tree_leaves(precision.to_compute(treedef.unflatten(whole)))) if left else ()

        del buffers.params[stage]
        buffers.gathering[stage] = self._gathers[stage] = gathered
        for earlier in [*self._gathers.values()][:-2]:
            earlier()

    def _dims(self, stage: int) -> Dims:
        """Return the dimension of every parameter of a stage that is cut over the data ranks.

        Frozen ones are cut where they are kept so.
        """
        fixed = () if self._ranks.shards_params else self._fixed[stage]
        return tuple(None if n in fixed else cut.dim for n, cut in enumerate(self._cuts[stage]))

    def _receive(self, stage: int) -> None:
        """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
        ranks = self._ranks
        if stage in self._reducers:
            reducer, numbers = self._reducers[stage]
            pairs = zip(numbers, reducer.wait(), strict=True)
            self._gradients[stage] = {n: total for n, total in pairs if n not in self._fixed[stage]}
        counted, again = [], self._further_places(stage)
        for n, g in sorted(self._gradients[stage].items()):
            cut = self._cuts[stage][n]
            parts = cut.over.parts
            # Of the ranks that hold the same, the first counts it.
            other = cut.over.copies.index or (parts.index and cut.part is None)
            if n in again or other or (ranks.model.index and cut.repeated):
                continue
            if cut.dim is None and cut.part is not None:
                g = g.tensor_split(parts.size, cut.part)[parts.index].contiguous()
            counted.append(g)
        self._norms[stage] = leaf_sums(counted, self._rule.norm_type).to(self.state.step.device)

    def _further_places(self, stage: int) -> set[int]:
        """Find the leaves of a stage that count at another place: the first of a tied or replicated
        parameter.
        """
        ranks = self._ranks
        signature = Signature.of(self.state.params[stage]) if ranks.tied else None
        group = next((g for g in ranks.schedule.replicas if ranks.schedule.model_stages[g[0]] == stage), None)
        if group is not None and ranks.schedule.placement[group[0]] not in ranks.ranks:
            return set(self._gradients[stage])
        names = (name for _, places in ranks.tied for place, name in places[1:] if place == stage)
        return {leaf_number(signature, name, "params") for name in names if signature is not None}

    def _norms_by_stage(self) -> Tensor:
        """Take this rank's shares in the norm, by stage of the model: float64[stages], 0 for those of others.

        Summed over the ranks, and then over the stages in order, they give the same bits in any number of
        processes.
        """
        stages = max(self._ranks.schedule.model_stages) + 1
        norms = [torch.zeros((), dtype=torch.float64, device=self.state.step.device)] * stages
        for stage, leaves in self._norms.items():
            norms[stage] = norm_sum(leaves, self._rule.norm_type)
        self._norms.clear()
        return torch.stack(norms)

    def _rows(self, each: Mapping[int, Tensor]) -> Tensor:
        """Put the losses of this process in their places among all data ranks: float64[ranks * m]."""
        ranks, m = self._ranks, self._ranks.schedule.microbatches
        rows = torch.zeros(ranks.data.size * m, dtype=torch.float64, device=self.state.step.device)
        for n, loss in each.items() if ranks.model.index == 0 else ():
            rows[ranks.data.index * m + n] = loss
        return rows

    def _rate(self, like: Tensor) -> Tensor | None:
        """Compute the learning rate of this update: those before it are counted from the call's first."""
        rate, begun = self._rule.optimizer.rate, self._given
        if rate is None:
            return None
        before = next(iter(begun.optimizer.values()))["updates"]
        value = rate(before + (self.state.step - begun.step).to(before))
        return value.to(like) if isinstance(value, Tensor) else torch.full_like(like, value)

    def _conclude(
        self, total: Tensor, loss: Tensor, bad: Tensor, loss_scale: Tensor | None, losses: Tensor | None
    ) -> None:
        """Conclude from the sums over all ranks if the update is made, and the divisor of the gradients."""
        rule = self._rule
        norm = norm_of(total, rule.norm_type)
        norm = torch.where(bad, torch.full_like(norm, nan), norm)
        scale = norm.new_ones(()) if loss_scale is None else loss_scale.to(norm)
        norm = norm / scale
        found_inf = self._found_inf = overflow(loss, norm)
        if rule.on_nonfinite == "raise" and bool(found_inf):
            raise NotFinite(f"the loss is {loss.item():g}, the norm of the gradients {norm.item():g}")
        clipped = clip_coefficient(norm, rule.max_norm)
        if loss_scale is not None or clipped is not None:
            self._divisor = scale if clipped is None else scale / clipped
        skipped = found_inf if rule.on_nonfinite == "skip" else torch.zeros_like(found_inf)
        self.metrics.append(Metrics(loss, norm, scale, skipped, {}, losses=losses, lr=self._rate(norm)))
        step, scaling = self.state.step, rule.precision.scale
        scales = self.state.scale if scaling is None else scaling.update(self.state.scale, found_inf)
        self.state = self.state._replace(step=step + (1 - skipped).to(step), scale=scales)

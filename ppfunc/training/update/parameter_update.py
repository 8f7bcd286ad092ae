"""Update parameters within a call of a trainer: sum over ranks, conclude, and run the optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import compress
from math import inf, isinf
from operator import ne
from typing import Any

import torch

from ppfunc._checks import shown
from ppfunc.runtime import Microbatches
from ppfunc.runtime.ports.protocols import Collective, Wait
from ppfunc.runtime.running.execute import NotFinite
from ppfunc.runtime.values.arguments import LossWeights, RawArguments, Seed, read_loss_weights, read_seed
from ppfunc.runtime.values.buffers import Buffers, Gradients, Leaves, ParameterUpdate
from ppfunc.stage._torch import versions
from ppfunc.stage.layout import local
from ppfunc.stage.signature import LeafSignature, Signature, leaf_names, note_patterns
from ppfunc.stage.tree import filled, tree_leaves, tree_map

from ..optim._torch import looked_through, multiply_into_each
from ..optim.norms import Clip, clip_coefficient, leaf_norms, norm_of, norm_sum, powers
from ..optim.optimizer import selected, text_of
from .buckets import Reducer, gather
from .precision import overflow
from .ranks import TrainingRanks
from .state import (
    Metrics,
    StageLeaves,
    StageTrees,
    TrainState,
    alike_in_places,
    laid_out,
    note_donated,
    read,
    stages_of,
    start_facts,
)
from .update_rule import UpdateRule


def shares(
    norms: Mapping[int, torch.Tensor],
    losses: Sequence[torch.Tensor],
    norm_type: float,
    stages: int,
    device: torch.device,
) -> torch.Tensor:
    """Stack this rank's shares in the loss and in the norm of every stage: float64[1 + stages].

    Summed over the ranks, and then over the stages in order, they give the same bits in any number of
    processes.

    Args:
        norms: the results of :func:`leaf_norms`, by stage of the model.
        losses: weighted, of last stages.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = [zero] * stages
    for stage, leaves in norms.items():
        sums[stage] = norm_sum(powers(leaves, norm_type), norm_type)
    return torch.stack([reduce(torch.add, (value.sum().to(zero) for value in losses), zero), *sums])


def conclude(
    sums: torch.Tensor, step: torch.Tensor, loss_scale: torch.Tensor | None, clip: Clip, skips: bool
) -> tuple[Metrics, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Conclude from the sum of the shares of all ranks whether the update is made.

    Args:
        step: the number of updates so far.
        loss_scale: the scale of the loss; None for 1.
        skips: whether an update is left out where a number is not finite.

    Returns:
        The metrics; a flag, 1 where loss or gradients are not finite, float32[]; the number of updates with
        this one; the factor of the gradients, None for 1.
    """
    loss = sums[0]
    one = torch.ones((), dtype=loss.dtype, device=loss.device)
    scale = one if loss_scale is None else loss_scale.to(one)
    norm = unscaled_norm(norm_sum(sums[1:], clip.norm_type), clip, None if loss_scale is None else scale)
    found_inf = overflow(loss, norm)
    skipped = found_inf if skips else torch.zeros_like(found_inf)
    factor = clip_coefficient(norm, clip.max_norm)
    if loss_scale is not None:
        factor = (1 if factor is None else factor) / scale
    return Metrics(loss, norm, scale, skipped, {}), found_inf, step + (skipped <= 0), factor


def unscaled_norm(sums: torch.Tensor, clip: Clip, scale: torch.Tensor | None) -> torch.Tensor:
    """Compute norms of gradients from the sums of gradients that the loss scale has multiplied."""
    norm = norm_of(sums, clip.norm_type)
    return norm if scale is None else norm / scale


def start_largest(ranks: Collective, norms: torch.Tensor) -> Wait:
    """Begin to replace norms by the largest of all ranks, or NaN if any norm is NaN.

    The maximum of a backend may leave NaN out; a sum does not.
    """
    total = norms.clone()
    waits = ranks.all_reduce(norms, "max"), ranks.all_reduce(total)

    def wait() -> None:
        for each in waits:
            each()
        norms.copy_(torch.where(total.isnan(), total, norms))

    return wait


class TrainingUpdate(ParameterUpdate):
    """Reads the arguments of one call of a trainer, of one step or of several, and updates the parameters.

    Args:
        rule: the rule by which gradients become new parameters.
        ranks: the ranks that train together.
        trees: the trees of the state that was read last, by stage; shared by the calls of a trainer.
        idle: the reducers that no call uses, by stage; shared by the calls of a trainer.
        known: whether the state goes on from the last step, on all ranks; else they compare it.
        by_leaf: whether the metrics get norms by stage and by leaf.

    Attributes:
        state: the state from which the call begins, and which stays as it is; after each update the new one.
        stages: the leaves of the state, by stage.
        metrics: the metrics of every update.
    """

    state: TrainState
    stages: dict[int, StageLeaves]

    def __init__(
        self,
        rule: UpdateRule,
        ranks: TrainingRanks,
        trees: dict[int, StageTrees],
        idle: dict[int, list[Reducer]],
        known: bool,
        by_leaf: bool = False,
    ) -> None:
        self._rule, self._ranks, self._trees, self._idle = rule, ranks, trees, idle
        self.known, self._by_leaf = known, by_leaf
        self.metrics: list[Metrics] = []
        # By stage, the leaves that the call may write into, and their versions before it does.
        self._begun: dict[int, tuple[list[torch.Tensor], list[int | None]]] = {}
        # By stage, where gradients are added up, and the numbers of the leaves.
        self._reducers: dict[int, tuple[Reducer, Sequence[int]]] = {}
        self._gradients: dict[int, dict[int, torch.Tensor]] = {}  # by stage and number of the leaf
        self._norms: dict[int, torch.Tensor] = {}  # by stage, of the leaves that this rank counts
        # By stage and name, of all ranks, where asked for.
        self._leaf_sums: dict[int, dict[str, torch.Tensor]] = {}
        self._factor: torch.Tensor | None = None  # of the gradients, None for 1
        self._found_inf: torch.Tensor | None = None  # 1 where loss or gradients are not finite, float32[]
        self._gathers: dict[int, Callable[[], Leaves]] = {}  # of new parameters, by stage, in order
        self._updates_left: dict[int, int] = {}  # by stage, how many updates are to come
        # Of the states of stages before this update, by stage; and those that are on their way.
        self._stage_state: dict[int, Leaves] = {}
        self._new_states: dict[int, Callable[[], Leaves]] = {}

    def begin_from(self, state: TrainState) -> None:
        """Read the leaves of the state from which the call begins.

        Raises:
            TypeError, ValueError: as :func:`stages_of`.
        """
        self.stages = stages_of(self._rule, self._ranks, state, self._trees)
        self.state = self._initial = state

    def read(
        self, state: TrainState, pairs: Sequence[tuple[Any, Any]], loss_weights: Sequence[LossWeights] | None,
        seed: Seed, extras: Sequence[Mapping[int, Any] | None] | None,
        carry: Mapping[int, Any] | None,
    ) -> list[RawArguments]:  # fmt: skip
        """Read the arguments of the steps of the call. Parameters are cast once.

        Args:
            pairs: inputs and targets of every step.
            loss_weights, extras: entries, a single entry per step, or None; an entry may be None too.
            seed: the seed of the first step.
            carry: the first carries of the first step; those of the others have their form.

        Raises:
            TypeError, ValueError: not a state of this trainer, not a list of pairs, no pairs, a negative
                weight, or weights or extras for another number of steps.
        """
        self.begin_from(state)
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise TypeError(
                f"batches: got {shown(pairs)}, expected a list of (inputs, targets), one for every step;"
                " of an iterator, take list(itertools.islice(iterator, steps))"
            )
        if not pairs:
            raise ValueError("batches: got an empty list, expected (inputs, targets) of at least one step")
        ranks, precision, m = self._ranks, self._rule.precision, self._ranks.schedule.microbatches
        weights = _of_every_step("loss_weights", loss_weights, len(pairs))
        extras = _of_every_step("extras", extras, len(pairs))
        seed, text = read_seed(seed), ""
        if ranks.world.size > 1:
            text = (
                f"{len(pairs)} steps, {'equal' if weights[0] is None else 'own'} weights, seed {seed}"
                f"{', norms by name' if self._by_leaf else ''}; "
                f"{'a state that goes on' if self.known else 'another state'}; optimizer"
                f" {text_of(self._rule.optimizer)}"
            )
        params = {s: ranks.for_step(tree, precision) for s, tree in state.params.items()}
        return [
            RawArguments(
                params,
                inputs.map(precision.to_compute)
                if isinstance(inputs, Microbatches)
                else precision.to_compute(inputs),
                targets,
                extras[n],
                state.stage_state,
                _nonnegative(read_loss_weights(weights[n], m)),
                seed and (seed[0], seed[1] + n),
                microbatch_offset=ranks.data.index * m,
                scale=state.scale.get("scale"),
                update=self,
                common=text,
                carry=carry,
            )
            for n, (inputs, targets) in enumerate(pairs)
        ]

    def facts(self) -> tuple[str, dict[tuple[str, ...], str]]:
        return start_facts(self._rule, self._ranks, self.state)

    def alike(self) -> Iterator[tuple[str, dict[int, list[torch.Tensor | None]]]]:
        return alike_in_places(self._rule, self._ranks, self.state.params)

    def patterns(self) -> dict[str, bool]:
        used = dict[str, bool]()
        for trees, *_ in self.stages.values():
            used |= {text: takes or used.get(text, False) for text, takes in trees.patterns.items()}
        names = [n for tree in self.state.stage_state.values() for n in leaf_names(Signature.of(tree))]
        note_patterns(used, "reduce_state", self._rule.states.reduce or (), names)
        return used

    def begin(self, weights: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Divide the weights of the losses by their sum over all data ranks.

        Gradients of weights that are not divided yet could overflow in half precision.

        Raises:
            ValueError: the sum is not a finite number above 0, as far as the host knows it.
        """
        state, ranks = self.state, self._ranks
        self.state = state._replace(params=dict(state.params), optimizer=dict(state.optimizer))
        self._updates_left = dict.fromkeys(state.params, len(weights))
        own = {stage: leaves.own() for stage, leaves in self.stages.items()}
        self._begun = {stage: (each, versions(each)) for stage, each in own.items()}
        self._stage_state = {s: tuple(map(local, tree_leaves(tree))) for s, tree in state.stage_state.items()}
        explicit = [each for each in weights if each is not None]
        if not explicit:
            m = ranks.schedule.microbatches
            if ranks.data.size == 1:
                return weights
            equal = torch.full((m,), 1 / (ranks.data.size * m), dtype=torch.float64, device="cpu")
            return [equal] * len(weights)
        by_step = torch.stack(explicit).to(state.step.device)
        total = by_step.sum(1, keepdim=True)
        ranks.data.all_reduce(total)()
        # On another device neither they nor their sum are read, and the loss is no number.
        by_step = torch.where(by_step < 0, torch.nan, by_step)
        sums = total.flatten().tolist() if total.device.type == "cpu" else []
        if wrong := [each for each in sums if not 0 < each < inf]:
            raise ValueError(
                f"loss_weights: their sum over all data ranks is {wrong[0]:g}, expected one that losses can"
                " be divided by"
            )
        return (by_step / total).unbind()

    def accumulator(self, stage: int, leaves: Iterable[tuple[int, LeafSignature]]) -> Reducer | None:
        """Find buckets for the gradients of a stage: idle ones of an earlier step, else new ones.

        A step takes them out of the idle ones, and returns them once it has used their sums. A step that
        fails does not: a sum may still be written there.
        """
        ranks = self._ranks
        if ranks.data.size == 1:
            return None
        trees, idle = self.stages[stage].trees, self._idle.setdefault(stage, [])
        signatures = dict(leaves)
        fixed = frozenset(position for position, n in enumerate(signatures) if n in trees.fixed)
        over = tuple(trees.cuts[n].over for n in signatures)
        form = tuple(signatures.values()), tuple(trees.dims[n] for n in signatures), over, fixed
        while idle:
            reducer = idle.pop()
            if reducer.form == form and reducer.idle:
                return reducer
        device = next((local(leaf).device for leaf in tree_leaves(self.state.params[stage])), None)
        return Reducer(*form, dtype=self._rule.precision.reduce, device=device)

    def reduce(self, buffers: Buffers, stage: int, gradients: Gradients, numbers: Sequence[int]) -> None:
        """Begin to sum the gradients of a stage, and the changes of its state, over the data ranks."""
        if stage in buffers.state:
            tree = self._initial.stage_state[stage]
            pair = self._stage_state[stage], buffers.state[stage]
            self._new_states[stage] = self._rule.states.begin(self._ranks, stage, tree, *pair)
        if isinstance(gradients, Reducer):
            gradients.launch()
            self._reducers[stage] = gradients, numbers
        else:
            fixed, leaves = self.stages[stage].trees.fixed, buffers.params[stage]
            like = tuple([leaves[n].new_empty(0) if n in fixed else leaves[n] for n in numbers])
            self._gradients[stage] = dict(zip(numbers, gradients.take(like, torch.clone), strict=True))

    def join(
        self, buffers: Buffers, losses: Sequence[torch.Tensor], each: Mapping[int, torch.Tensor] | None
    ) -> None:
        """Sum the norm and the loss over all ranks, and conclude from them the effect of updates."""
        rule, world = self._rule, self._ranks.world
        for stage in sorted({*self._gradients, *self._reducers}):
            self._await_sums(stage)
        stages, device = max(self._ranks.schedule.model_stages) + 1, self.state.step.device
        counted = losses if self._ranks.model.index == 0 else ()
        sums = shares(self._norms, counted, rule.clip.norm_type, stages, device)
        self._norms = {}
        if isinf(rule.clip.norm_type):
            waits = [world.all_reduce(sums[:1]), start_largest(world, sums[1:])]
        else:
            waits = [world.all_reduce(sums)]
        rows = None
        if each is not None:  # in their places among the losses of all data ranks, which the sum completes
            data, m = self._ranks.data, self._ranks.schedule.microbatches
            rows = torch.zeros(data.size * m, dtype=torch.float64, device=device)
            for n, loss in each.items() if self._ranks.model.index == 0 else ():
                rows[data.index * m + n] = loss
            waits.append(world.all_reduce(rows))
        for wait in waits:
            wait()
        self._conclude(sums, buffers.scale, rows)
        buffers.state.update({stage: wait() for stage, wait in self._new_states.items()})
        self._new_states.clear()
        if self._stage_state and rule.on_nonfinite == "skip":
            buffers.state.update(selected(self._found_inf, self._stage_state, buffers.state))
        self._stage_state = dict(buffers.state)
        buffers.scale = self.state.scale.get("scale")

    def step(self, buffers: Buffers, stage: int) -> None:
        """Make the new parameters and optimizer state of a stage; frozen parameters stay."""
        rule, ranks, stages, current = self._rule, self._ranks, self.stages, self.state
        trees, params, optimizer = leaves = stages[stage]
        self._updates_left[stage] -= 1
        self._gathers.pop(stage, None)  # which this step has waited for
        new = list(ranks.shards(read(params, trees.params), trees.dims))
        trained = [new[n] for n in trees.trained]
        by_number = self._gradients.pop(stage)
        for n in trees.fixed & by_number.keys():
            del by_number[n]
        # Before they are multiplied, which would lose small ones.
        if rule.precision.compute or rule.precision.reduce:
            by_number = {n: g.to(new[n].dtype) for n, g in by_number.items()}
        gradients = list(by_number.values())
        if self._factor is not None and gradients:  # the fused kernels would divide by a float32
            factor = self._factor.to(gradients[0].device)
            if looked_through(gradients):
                by_number = {n: g * factor for n, g in by_number.items()}
                gradients = list(by_number.values())
            else:
                multiply_into_each(gradients, factor)
        if len(gradients) < len(trained):
            zeros = zip(trees.trained, trained, strict=True)
            gradients = [by_number[n] if n in by_number else torch.zeros_like(leaf) for n, leaf in zeros]
        own, begun = self._begun.pop(stage, None) or (leaves.own(), None)
        before = versions(own)
        if begun is not None and begun != before:
            path = next(compress(leaves.paths(stage), map(ne, begun, before)))
            raise ValueError(
                f"{path} shares its memory with another stage, whose update has written there in place; pass"
                " donate=False or make them separate tensors"
            )
        try:
            changed, after = trees.update(gradients, own[: len(optimizer)], trained, self._found_inf)
        finally:
            if versions(own) != before:
                note_donated(self._initial)
        new = filled(new, trees.trained, changed)
        moments = laid_out(after, trees.optimizer)
        current.optimizer[stage] = trees.optimizer.treedef.unflatten(moments)
        stages[stage] = StageLeaves(trees, params, moments)
        if ranks.shards_params:
            self._renew(stage, new)
        else:
            self._gather(buffers, stage, new)
        if stage in self._reducers:
            self._idle[stage].append(self._reducers.pop(stage)[0])

    def unshard(self, buffers: Buffers, stage: int) -> None:
        trees, leaves, _ = self.stages[stage]
        shards = tuple(self._rule.precision.to_compute(read(leaves, trees.params)))
        buffers.shards[stage] = shards
        buffers.gathering[stage] = gather(shards, trees.dims, self._ranks.parts)

    def finish(self) -> None:
        for wait in self._gathers.values():
            wait()
        self._gathers.clear()

    def _renew(self, stage: int, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the parameters of a stage in the state by these parts of new parameters.

        Return them with the strides of those before, for which programs were traced.
        """
        form = self.stages[stage].trees.params
        params = [
            new if new.stride() == p.stride() else torch.empty_like(p).copy_(new)
            for new, p in zip(params, read(self.stages[stage].params, form), strict=True)
        ]
        leaves = laid_out(params, form)
        self.state.params[stage] = form.treedef.unflatten(leaves)
        self.stages[stage] = self.stages[stage]._replace(params=leaves)
        return params

    def _gather(self, buffers: Buffers, stage: int, shards: Sequence[torch.Tensor]) -> None:
        """Begin to gather the new parameters of a stage; at most two stages take memory at a time."""
        left, precision = self._updates_left[stage], self._rule.precision
        del buffers.params[stage]

        def renewed(whole: Sequence[torch.Tensor]) -> Leaves:
            new = self._renew(stage, whole)
            # After the last update nobody computes with them.
            return tuple(precision.to_compute(new)) if left else ()

        if self._ranks.parts.size == 1:
            buffers.params[stage] = renewed(shards)
            return
        wait = gather(shards, self.stages[stage].trees.dims, self._ranks.parts)
        gathered = cache(lambda: renewed(wait()))
        buffers.gathering[stage] = self._gathers[stage] = gathered
        for earlier in [*self._gathers.values()][:-2]:
            earlier()

    def _await_sums(self, stage: int) -> None:
        """Wait for the sums of a stage over data ranks, and note this rank's part in the norm."""
        trees = self.stages[stage].trees
        if stage in self._reducers:
            reducer, numbers = self._reducers[stage]
            self._gradients[stage] = dict(zip(numbers, reducer.wait(), strict=True))
        gradients = self._gradients[stage]
        counted = {n: gradients[n] for n in trees.counted if n in gradients}
        for n in trees.parted & counted.keys():
            parts, dim = trees.cuts[n].over.parts, trees.cuts[n].part
            assert dim is not None
            counted[n] = counted[n].tensor_split(parts.size, dim)[parts.index].contiguous()
        norm_type = self._rule.clip.norm_type
        norms = leaf_norms(list(counted.values()), norm_type).to(self.state.step.device)
        self._norms[stage] = norms
        if self._by_leaf:
            sums = powers(norms, norm_type)
            self._leaf_sums[stage] = self._over_ranks(stage, dict(zip(counted, sums.unbind(), strict=True)))

    def _over_ranks(self, stage: int, mine: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add up the sums of the leaves of a stage over the ranks that hold parts of it, by name."""
        every = enumerate(leaf_names(Signature.of(self.state.params[stage])))
        names = {n: name for n, name in every if n not in self.stages[stage].trees.fixed}
        none = torch.zeros((), dtype=torch.float64, device=self.state.step.device)
        sums = torch.stack([none, *(mine.get(n, none) for n in names)])[1:]
        for ranks in (self._ranks.data, self._ranks.model):
            (start_largest(ranks, sums) if isinf(self._rule.clip.norm_type) else ranks.all_reduce(sums))()
        return dict(zip(names.values(), sums.unbind(), strict=True))

    def _conclude(
        self, sums: torch.Tensor, loss_scale: torch.Tensor | None, losses: torch.Tensor | None
    ) -> None:
        """Conclude from the sums over all ranks if the update is made, and the factor of the gradients."""
        rule, state = self._rule, self.state
        skips = rule.on_nonfinite == "skip"
        metrics, found_inf, step, factor = conclude(sums, state.step, loss_scale, rule.clip, skips)
        self._found_inf, self._factor = found_inf, factor
        norm, optimizer = metrics.grad_norm, rule.optimizer
        if rule.on_nonfinite == "raise" and bool(found_inf):
            raise NotFinite(f"the loss is {metrics.loss.item():g}, the norm of the gradients {norm.item():g}")
        rate = None
        if optimizer.rate is not None:  # from the state before the call and the updates since
            of_stage = next(iter(self._initial.optimizer.values()))
            rate = tree_map(
                lambda v: v.to(norm) if isinstance(v, torch.Tensor) else torch.full_like(norm, v),
                optimizer.rate(of_stage, state.step - self._initial.step),
            )
        if self._by_leaf:
            scale = None if loss_scale is None else metrics.scale
            unscaled = partial(unscaled_norm, clip=rule.clip, scale=scale)
            metrics = metrics._replace(
                stage_norms=unscaled(sums[1:]), leaf_norms=tree_map(unscaled, self._leaf_sums)
            )
            self._leaf_sums = {}
        self.metrics.append(metrics._replace(losses=losses, lr=rate))
        scaling = rule.precision.scale
        scales = state.scale if scaling is None else scaling.update(state.scale, found_inf)
        self.state = state._replace(step=step, scale=scales)


def _of_every_step(name: str, values: Any, steps: int) -> Sequence[Any]:
    """Return a value for each step; raise ValueError for another number of values."""
    if values is None:
        return [None] * steps
    if not isinstance(values, list | tuple) or len(values) != steps or len({v is None for v in values}) > 1:
        raise ValueError(f"{name}: got {shown(values)}, expected a list of {steps}, one for every step")
    return values


def _nonnegative(weights: torch.Tensor | None) -> torch.Tensor | None:
    """Raise ValueError for a negative weight: divided by their sum, all of them could change their sign."""
    if weights is not None and weights.device.type == "cpu" and min(weights.tolist()) < 0:
        raise ValueError(
            f"loss_weights: got {weights.tolist()}, expected numbers of at least 0, which are divided by"
            " their sum; where a loss is to rise, give it another sign in the loss function"
        )
    return weights

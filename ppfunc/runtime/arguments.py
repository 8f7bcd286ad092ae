"""The arguments of one call of a step function, read and checked."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import optree
import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import Signature

from .batch import Batch, read_batch
from .calls import Home, Leaves
from .outside import transformed


class Arguments(NamedTuple):
    """The arguments of one call.

    Args:
        leaves: leaves of the parameters of every local stage, without history.
        signatures: signatures of those.
        strides: of each of those, in elements.
        homes: where those live.
        inputs: the batch; None where this process holds no first stage and was given none.
        targets: the targets, likewise for the last stage.
        side: side inputs, by stage.
        state: leaves of the state, by stage.
        states: signatures of those.
        weights: weight of every microbatch, float64[m].
        seed: ``(seed, step)``, or None.
    """

    leaves: Mapping[int, Leaves]
    signatures: Mapping[int, Signature]
    strides: Mapping[int, tuple[tuple[int, ...], ...]]
    homes: Mapping[int, Home]
    inputs: Batch | None
    targets: Batch | None
    side: Mapping[int, Batch]
    state: Mapping[int, Leaves]
    states: Mapping[int, Signature]
    weights: torch.Tensor
    seed: tuple[int, int] | None

    def example(self, stage: int) -> Any:
        """The parameters of a stage, as an engine wants them for its example; without values under a transform."""
        leaves, signature = self.leaves[stage], self.signatures[stage]
        return signature if any(map(transformed, leaves)) else signature.unflatten(leaves)

    def constants(self, stage: int, microbatch: int, targeted: bool) -> tuple[Signature, ...]:
        """Signatures of what a stage gets after its input: the target, the side input, the state."""
        target = (self.targets.signatures[microbatch],) if targeted else ()
        side = (self.side[stage].signatures[microbatch],) if stage in self.side else ()
        state = (self.states[stage],) if stage in self.states else ()
        return (*target, *side, *state)


class Given(NamedTuple):
    """The arguments of one call, as the caller gave them."""

    params: Mapping[int, Any]
    inputs: Any
    targets: Any
    side: Mapping[int, Any] | None
    state: Mapping[int, Any] | None
    weights: Sequence[float] | torch.Tensor | None
    seed: tuple[int, int] | None


def read_arguments(given: Given, schedule: Schedule, stages: Sequence[int], with_targets: bool) -> Arguments:
    """Read the arguments of a call in a process that holds ``stages``.

    Raises:
        ValueError, TypeError: they do not fit the schedule; says what was got and what was expected.
    """
    params = given.params
    if not isinstance(params, Mapping) or set(params) != set(stages):
        got = _keys(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(
            f"params: got {got}, expected a dictionary with the stages of this process, {list(stages)}: "
            f"{{stage: tree of parameters}}"
        )
    m = schedule.microbatches
    inputs = _batch(given.inputs, "inputs", [c.stages[0] for c in schedule.chains], stages, m)
    targets = _batch(given.targets, "targets", [c.stages[-1] for c in schedule.chains] if with_targets else [], stages, m)
    side = {s: read_batch(tree, m, f"side[{s}]") for s, tree in _of_stages(given.side, "side", stages).items()}
    state = _of_stages(given.state, "state", stages)
    signatures = {s: Signature.of(params[s], f"params[{s}]") for s in stages}
    leaves = {s: tuple(map(_own, optree.tree_leaves(params[s]))) for s in stages}
    homes = {s: Home(_device(leaves, s, inputs), signatures[s].leaves) for s in stages}
    return Arguments(
        leaves,
        signatures,
        {s: tuple(t.stride() for t in own) for s, own in leaves.items()},
        homes,
        inputs,
        targets,
        side,
        {s: tuple(map(_own, optree.tree_leaves(tree))) for s, tree in state.items()},
        {s: Signature.of(tree, f"state[{s}]").without_grad() for s, tree in state.items()},
        read_weights(given.weights, m),
        _seed(given.seed),
    )


def read_weights(weights: Sequence[float] | torch.Tensor | None, microbatches: int) -> torch.Tensor:
    """Weights as float64[m], ``1/m`` each where none are given.

    Raises:
        ValueError: another number of weights.
        TypeError: something else than numbers.
    """
    if weights is None:
        return torch.full((microbatches,), 1 / microbatches, dtype=torch.float64)
    try:
        read = torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"weights: got {reprlib.repr(weights)}, expected one number for each of the {microbatches} microbatches") from error
    if read.shape != (microbatches,):
        raise ValueError(f"weights: got shape {tuple(read.shape)}, expected one weight for each of the {microbatches} microbatches")
    return read


def _seed(seed: Any) -> tuple[int, int] | None:
    if seed is None:
        return None
    if isinstance(seed, tuple | list) and len(seed) == 2 and all(isinstance(n, Integral) for n in seed):
        return int(seed[0]), int(seed[1])
    raise TypeError(f"seed: got {reprlib.repr(seed)}, expected (seed, step), two integers")


def _batch(batch: Any, name: str, needed_by: Sequence[int], stages: Sequence[int], microbatches: int) -> Batch | None:
    if batch is not None:
        return read_batch(batch, microbatches, name)
    here = [stage for stage in needed_by if stage in stages]
    if here:
        raise ValueError(f"{name}: got None, but this process holds stage {here[0]}, which needs them")
    return None


def _of_stages(trees: Mapping[int, Any] | None, name: str, stages: Sequence[int]) -> Mapping[int, Any]:
    trees = {} if trees is None else trees
    if not isinstance(trees, Mapping):
        raise TypeError(f"{name}: got {type(trees).__name__}, expected a dictionary {{stage: tree}}")
    if not set(trees) <= set(stages):
        raise ValueError(f"{name}: got the stages {_keys(trees)}, this process holds {list(stages)}")
    return {stage: trees[stage] for stage in stages if stage in trees}


def _keys(trees: Mapping[Any, Any]) -> list[Any]:
    """The keys in order, even where they are not all numbers."""
    return sorted(trees, key=lambda key: (str(type(key)), key) if isinstance(key, int | str) else (str(type(key)), str(key)))


def _device(leaves: Mapping[int, Leaves], stage: int, inputs: Batch | None) -> torch.device:
    """Where a stage computes: with its parameters; without any, with those nearest to it or with the batch."""
    near = sorted(leaves, key=lambda s: abs(s - stage))
    found = next((leaves[s][0].device for s in near if leaves[s]), None)
    if found is None and inputs is not None:
        found = next((t.device for row in inputs.leaves for t in row), None)
    return found or torch.get_default_device()


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor without its history, so that nothing outside grows with the steps."""
    if leaf.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        return leaf.detach()
    return leaf

"""The arguments of one call of a step function: read, checked, and compared with those of the last call."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import Signature

from .batch import Leaves, Microbatches, cut, cut_passes
from .form import StepForm, TreeForm, read_tree, require_values, step_form
from .functorch import suspended, transformed

LossWeights = Sequence[float] | torch.Tensor | None
Seed = tuple[int, int] | None


class RawArguments(NamedTuple):
    """The arguments of one call, as the caller gave them; dictionaries are keyed by stage of the model.

    Args:
        params, inputs, targets, extras, state, loss_weights, seed: of :func:`ppfunc.value_and_grad`.
        ends: whether the gradients are complete after this pass, so that what ends a program runs.
        first: the number of the first microbatch, of which random numbers depend.
        scale: what the cotangents of the loss are multiplied by, a tensor of one element.
        update_state: belongs to the update of a step that has one.
        common: what all ranks that train together have to agree on, beside the call.
    """

    params: Mapping[int, Any]
    inputs: Any
    targets: Any = None
    extras: Mapping[int, Any] | None = None
    state: Mapping[int, Any] | None = None
    loss_weights: LossWeights = None
    seed: Seed = None
    ends: bool = True
    first: int = 0
    scale: torch.Tensor | None = None
    update_state: Any = None
    common: str = ""

    def passes(self, count: int, microbatches: int) -> list[RawArguments]:
        """The arguments of several passes of the schedule, each with a part of the batch, which add up their gradients."""
        if count == 1:
            return [self]
        batches = ((self.inputs, "inputs"), (self.targets, "targets"))
        inputs, targets = (cut_passes(batch, count, microbatches, name) for batch, name in batches)
        extras = {s: cut_passes(batch, count, microbatches, f"extras[{s}]") for s, batch in (self.extras or {}).items()}
        weights = read_loss_weights(self.loss_weights, count * microbatches)
        return [
            self._replace(
                inputs=inputs[n],
                targets=targets[n],
                extras={s: batches[n] for s, batches in extras.items()},
                loss_weights=None if weights is None else weights[n * microbatches : (n + 1) * microbatches],
                first=self.first + n * microbatches,
                ends=n == count - 1,
            )
            for n in range(count)
        ]


class StepArguments(NamedTuple):
    """The arguments of one call, read.

    Args:
        params, state: leaves of the trees, by stage of the model in the caller's order, without history.
        inputs, targets: leaves of every microbatch; empty where this process was given none.
        extras: likewise, by stage of the model.
        loss_weights: weight of every microbatch, float64[m]; None for ``1/m`` each.
        seed: ``(seed, step)``, or None.
        ends, first, scale, update_state, common: as given.
        form: of all of them.
        trees: the form of every tree, by its name.
        left_out: the microbatches whose weight is 0, where the host knows it.
    """

    params: Mapping[int, Leaves]
    state: Mapping[int, Leaves]
    inputs: Sequence[Leaves]
    targets: Sequence[Leaves]
    extras: Mapping[int, Sequence[Leaves]]
    loss_weights: torch.Tensor | None
    seed: Seed
    form: StepForm
    trees: Mapping[str, TreeForm]
    left_out: frozenset[int]
    ends: bool = True
    first: int = 0
    scale: torch.Tensor | None = None
    update_state: Any = None
    common: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable, equal for arguments that run the same program."""
        return tuple((name, form.key) for name, form in sorted(self.trees.items()))

    def form_of(self, rows: int | None) -> StepForm:
        """The form of the arguments; a process that was not given the batch is told its rows, None where it is not a whole one."""
        return self.form._replace(rows=rows) if self.form.inputs is None else self.form

    def without_tensors(self) -> StepArguments:
        """The same, which keeps no tensor of a call alive."""
        return self._replace(params={}, state={}, inputs=(), targets=(), extras={}, loss_weights=None, scale=None, update_state=None)

    def example(self, stage: int) -> Any:
        """The parameters of a stage of the model, to evaluate it abstractly; their signature under a transform."""
        leaves, signature = self.params[stage], self.form.params[stage]
        return signature if any(map(transformed, leaves)) else signature.unflatten(leaves)


def read_arguments(
    raw: RawArguments,
    schedule: Schedule,
    stages: Sequence[int],
    with_targets: bool,
    last: StepArguments | None = None,
    *,
    abstract: bool = False,
) -> StepArguments:
    """Read the arguments of a call in a process that runs ``stages`` of the model.

    Args:
        last: arguments of an earlier call; where these have the same form, ``form`` is that object.
        abstract: whether trees may be signatures, and tensors without values.

    Raises:
        ValueError, TypeError: they do not fit the schedule; says what was got and what was expected.
    """
    m = schedule.microbatches
    for name in ("targets", "loss_weights"):
        if getattr(raw, name) is not None and not with_targets:
            raise ValueError(f"{name}: got some, but there is no loss function that would read them; give the loss function, or no {name}")
    _require_stages(raw.params, "params", stages)
    extras, state = ({} if given is None else given for given in (raw.extras, raw.state))
    _require_some(extras, "extras", stages)
    _require_some(state, "state", stages)
    reader = _Reader({} if last is None else last.trees, m, abstract)
    params = {s: reader.read_detached(tree, f"params[{s}]") for s, tree in raw.params.items()}
    states = {s: reader.read_detached(tree, f"state[{s}]") for s, tree in state.items()}
    inputs = () if raw.inputs is None else reader.read_batch(raw.inputs, "inputs")
    targets = () if raw.targets is None or not with_targets else reader.read_batch(raw.targets, "targets")
    further = {s: reader.read_batch(extras[s], f"extras[{s}]") for s in stages if s in extras}
    trees = reader.trees
    if last is not None and reader.as_known:
        form = last.form
    else:
        _require_batches(raw, schedule, stages, with_targets)
        if not abstract:
            require_values(trees)
        form = step_form(trees, stages, m, params, inputs)
    weights = read_loss_weights(raw.loss_weights, m)
    seed = read_seed(raw.seed)
    zeros = frozenset[int]() if abstract else _zeros(weights)
    return StepArguments(
        params, states, inputs, targets, further, weights, seed, form, trees, zeros, raw.ends, raw.first, raw.scale, raw.update_state,
        raw.common,
    )  # fmt: skip


class _Reader:
    """Reads trees, and notes the form of each by its name.

    Args:
        known: forms of an earlier call; a tree of the same form gets that object.
        microbatches: of a whole batch.
        abstract: whether trees may be signatures.
    """

    def __init__(self, known: Mapping[str, TreeForm], microbatches: int, abstract: bool) -> None:
        self.trees: dict[str, TreeForm] = {}
        self._known, self._microbatches, self._abstract = known, microbatches, abstract

    @property
    def as_known(self) -> bool:
        """Whether the same trees have come as in the earlier call, of the same forms."""
        return self.trees.keys() == self._known.keys() and all(form is self._known[name] for name, form in self.trees.items())

    def read(self, tree: Any, name: str, microbatches: int = 0) -> Leaves:
        if self._abstract and isinstance(tree, Signature):
            tree = tree.wrap(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in tree.leaves)
        leaves, self.trees[name] = read_tree(tree, self._known.get(name), name, microbatches)
        return leaves

    def read_detached(self, tree: Any, name: str) -> Leaves:
        """Tensors without their history, so that nothing outside grows with the steps."""
        leaves = self.read(tree, name)
        if self.trees[name].tracked:
            leaves = tuple([t.detach() if t.requires_grad and not transformed(t) else t for t in leaves])
        return leaves

    def read_batch(self, batch: Any, name: str) -> Sequence[Leaves]:
        """The microbatches of a batch."""
        m = self._microbatches
        if not isinstance(batch, Microbatches):
            try:
                return cut(self.read(batch, name, m), m)
            except ValueError as error:
                if isinstance(batch, list) and len(batch) == m:
                    raise ValueError(f"{error}. A list is a tree like any other; microbatches are ppfunc.Microbatches(...)") from error
                raise
        if len(batch) != m:
            raise ValueError(f"{name}: got {len(batch)} microbatches, the schedule has {m}; cut the batch into that many")
        return [self.read(tree, f"{name}[{i}]") for i, tree in enumerate(batch)]


def read_loss_weights(weights: LossWeights, microbatches: int) -> torch.Tensor | None:
    """Weights of the microbatches as float64[m]; None for ``1/m`` each.

    Raises:
        ValueError: another number of weights, or some that are not finite, as far as they can be read.
        TypeError: something else than numbers.
    """
    if weights is None:
        return None
    try:
        if torch.is_tensor(weights) and weights.is_complex():
            raise TypeError("complex weights")
        device = weights.device if isinstance(weights, torch.Tensor) else "cpu"
        with nullcontext() if torch.is_tensor(weights) else suspended():  # which would wrap what it makes of a list
            read = torch.as_tensor(weights, dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loss_weights: got {reprlib.repr(weights)}, expected one number for each of the {microbatches} microbatches"
        ) from error
    if read.shape != (microbatches,):
        raise ValueError(f"loss_weights: got shape {tuple(read.shape)}, expected one weight for each of the {microbatches} microbatches")
    if read.device.type == "cpu" and not transformed(read) and not all(map(math.isfinite, read.tolist())):
        raise ValueError(f"loss_weights: got {reprlib.repr(read.tolist())}, expected finite numbers")
    return read


def _zeros(weights: torch.Tensor | None) -> frozenset[int]:
    """The microbatches of weight 0; none where the device knows them alone, or a transform may see other weights."""
    if weights is None or weights.device.type != "cpu" or transformed(weights):
        return frozenset()
    return frozenset(m for m, weight in enumerate(weights.tolist()) if weight == 0)


def _require_stages(trees: Any, name: str, stages: Sequence[int]) -> None:
    if not isinstance(trees, Mapping) or set(trees) != set(stages):
        got = _keys(trees) if isinstance(trees, Mapping) else type(trees).__name__
        fewer = isinstance(trees, Mapping) and set(trees) < set(stages)
        mend = "; where processes run a pipeline together, each gives its transport, such as ppfunc.P2P(group)" if fewer else ""
        raise ValueError(
            f"{name}: got {got}, expected a dictionary with the stages of the model that this process runs, {list(stages)}: "
            f"{{stage: tree}}{mend}"
        )


def _require_some(trees: Any, name: str, stages: Sequence[int]) -> None:
    if not isinstance(trees, Mapping):
        raise TypeError(f"{name}: got {type(trees).__name__}, expected a dictionary {{stage: tree}}")
    if not set(trees) <= set(stages):
        raise ValueError(f"{name}: got the stages {_keys(trees)}, this process runs {list(stages)}")


def _require_batches(raw: RawArguments, schedule: Schedule, stages: Sequence[int], with_targets: bool) -> None:
    model = schedule.model_stages
    ends = {"inputs": (raw.inputs, model[schedule.chains[0].stages[0]]), "targets": (raw.targets, model[schedule.chains[0].stages[-1]])}
    for name, (batch, stage) in ends.items():
        if batch is None and stage in stages and (with_targets or name == "inputs"):
            raise ValueError(f"{name}: got None, but this process runs stage {stage}, which needs them")


def _keys(trees: Mapping[Any, Any]) -> list[Any]:
    """The keys in order, even where they are not all numbers."""
    return sorted(trees, key=lambda key: (str(type(key)), key) if isinstance(key, int | str) else (str(type(key)), str(key)))


def read_seed(seed: Any) -> Seed:
    """A seed as integers, None where there is none.

    Raises:
        TypeError: something else than two integers.
    """
    if seed is None:
        return None
    if isinstance(seed, tuple | list) and len(seed) == 2 and all(isinstance(n, Integral) and not isinstance(n, bool) for n in seed):
        return int(seed[0]), int(seed[1])
    raise TypeError(f"seed: got {reprlib.repr(seed)}, expected (seed, step), two integers")

"""Read and check the arguments of one call of a step function, and compare their form with the last one."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ParamSpec

import torch

from ppfunc._checks import shown
from ppfunc.schedule import Schedule
from ppfunc.stage import Signature, constants
from ppfunc.stage._torch import is_wrapped, without_transforms
from ppfunc.stage.constants import with_constants
from ppfunc.stage.tree import tree_structure

from .batch import Leaves, Microbatches, Replicated
from .buffers import ParameterUpdate
from .forms import StepForm, TreeForm, microbatch, read_tree, require_values, same_form, step_form

P = ParamSpec("P")

LossWeights = Sequence[float] | torch.Tensor | None
Seed = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class RawArguments:
    """Hold the arguments of one call as the caller gave them; dictionaries are keyed by stage of the model.

    Args:
        params, inputs, targets, extras, state, loss_weights, seed: of :func:`ppfunc.value_and_grad`.
        microbatch_offset: the number of the first microbatch, on which random numbers depend.
        scale: factor of the cotangents of the loss, a tensor of one element.
        update: updates the parameters, in a step that has updates.
        common: facts beside the call on which all ranks that train together have to agree.
        devices: where stages compute, by stage, of parameters that are on the device meta.
    """

    params: Mapping[int, Any]
    inputs: Any
    targets: Any = None
    extras: Mapping[int, Any] | None = None
    state: Mapping[int, Any] | None = None
    loss_weights: LossWeights = None
    seed: Seed = None
    microbatch_offset: int = 0
    scale: torch.Tensor | None = None
    update: ParameterUpdate | None = None
    common: str = ""
    devices: Mapping[int, torch.device] = field(default_factory=dict)


def named_step(read: Callable[P, RawArguments]) -> Callable[P, RawArguments]:
    """Rename a function to ``step``: Python's errors about its arguments then name what the caller calls."""
    read.__name__ = read.__qualname__ = "step"
    return read


@named_step
def read_call(
    params: Mapping[int, Any],
    inputs: Any,
    targets: Any = None,
    *,
    loss_weights: LossWeights = None,
    seed: Seed = None,
    extras: Mapping[int, Any] | None = None,
    state: Mapping[int, Any] | None = None,
) -> RawArguments:
    """Read the arguments of a step as the caller writes them."""
    return RawArguments(params, inputs, targets, extras, state, loss_weights, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArguments(RawArguments):
    """Hold the arguments of one call, read and checked.

    Params and state are leaves, by stage of the model in the caller's order, without history; inputs, targets
    and extras those of every microbatch, empty if this process was given none; loss weights float64[m], or
    None for ``1/m`` each.

    Args:
        form: of all of them.
        left_out: the microbatches whose weight is 0, where the host knows it.
    """

    extras: Mapping[int, Sequence[Leaves]]
    state: Mapping[int, Leaves]
    loss_weights: torch.Tensor | None
    form: StepForm
    left_out: frozenset[int]

    def example(self, stage: int) -> Any:
        """Return the parameters of a stage of the model, to evaluate it abstractly.

        Under a transform, return their signature.
        """
        leaves, signature = self.params[stage], self.form.params[stage]
        return signature if any(map(is_wrapped, leaves)) else signature.unflatten(leaves)


def read_arguments(
    raw: RawArguments,
    schedule: Schedule,
    stages: Sequence[int],
    with_targets: bool,
    last: StepForm | None = None,
    weights: torch.Tensor | None = None,
    *,
    abstract: bool = False,
) -> StepArguments:
    """Read the arguments of a call in a process that runs ``stages`` of the model.

    Args:
        last: form of an earlier call; if these have the same, ``form`` is that object.
        weights: of the microbatches in the loss, if the call gives none.
        abstract: accept signatures for trees, and tensors without values.

    Raises:
        ValueError, TypeError: they do not fit the schedule.
    """
    m = schedule.microbatches
    for name in ("targets", "loss_weights"):
        if getattr(raw, name) is not None and not with_targets:
            raise ValueError(
                f"{name} needs a loss function, which reads them; give loss_fn, or leave {name} out"
            )
    require_trees("params", raw.params, stages)
    extras = {} if raw.extras is None else raw.extras
    state = {} if raw.state is None else raw.state
    require_trees("extras", extras, stages, some=True)
    require_trees("state", state, stages, some=True)
    reader = _Reader({} if last is None else last.trees, m, abstract)
    params = {s: reader.read_detached(tree, f"params[{s}]") for s, tree in raw.params.items()}
    states = {s: reader.read_detached(tree, f"state[{s}]") for s, tree in state.items()}
    inputs = () if raw.inputs is None else reader.read_batch(raw.inputs, "inputs")
    # None is a target as any other tree, for a model that returns its loss.
    ends = schedule.model_stages[schedule.chains[0].stages[-1]] in stages
    targeted = with_targets and (raw.targets is not None or ends)
    targets = reader.read_batch(raw.targets, "targets") if targeted else ()
    batches = {s: reader.read_batch(extras[s], f"extras[{s}]") for s in stages if s in extras}
    if last is not None and reader.as_known:
        form = last
    else:
        _require_inputs(raw, schedule, stages)
        if not abstract:
            for name, tree in reader.trees.items():
                require_values(name, tree.form.treedef, tree.devices)
        form = step_form(reader.trees, stages, m, params, inputs, raw.devices)
    weights = weights if raw.loss_weights is None else read_loss_weights(raw.loss_weights, m)
    seed = read_seed(raw.seed)
    zeros = frozenset[int]() if abstract else _zeros(weights)
    return StepArguments(
        params, inputs, targets, seed, raw.microbatch_offset, raw.scale, raw.update, raw.common, raw.devices,
        extras=batches, state=states, loss_weights=weights, form=form, left_out=zeros,
    )  # fmt: skip


def by_value(known: Any, batch: Any, microbatches: int) -> Any:
    """Read the values of the inputs that belong to the form of a microbatch.

    Args:
        known: knows them by name, see :func:`ppfunc.split`.
        batch: a tree of inputs, or Microbatches.
        microbatches: in which a tree is cut.

    Raises:
        ValueError: they are others in each microbatch of a tree.
    """

    def shared(value: Any) -> Any:
        parts = [value.tree] if isinstance(value, Replicated) else microbatch(value, microbatches)
        first, *others = map(constants.by_value, parts)
        if any(tree_structure(first) != tree_structure(other) for other in others):
            raise ValueError(
                "inputs: got a constant of the split with other values in each microbatch, expected the same"
                " values; give the inputs as ppfunc.Microbatches([...])"
            )
        return first

    return batch.map(known.read) if isinstance(batch, Microbatches) else known.read(batch, shared)


class _Reader:
    """Reads trees, and records the form of each by its name.

    Args:
        known: forms of an earlier call; a tree of the same form gets that object.
        microbatches: of a whole batch.
        abstract: accept signatures for trees.
    """

    def __init__(self, known: Mapping[str, TreeForm], microbatches: int, abstract: bool) -> None:
        self.trees: dict[str, TreeForm] = {}
        self._known, self._microbatches, self._abstract = known, microbatches, abstract

    @property
    def as_known(self) -> bool:
        """Tell whether the trees have the names and forms of those of the earlier call."""
        return self.trees.keys() == self._known.keys() and all(
            form is self._known[name] for name, form in self.trees.items()
        )

    def read(self, tree: Any, name: str, microbatches: int | None = None) -> Leaves:
        """Read the leaves of a tree.

        ``microbatches`` is the number of parts of a whole batch, 0 for one microbatch, None for trees that
        belong to no batch.
        """
        if self._abstract and isinstance(tree, Signature):
            tree = tree.wrap(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in tree.leaves)
        known = self._known.get(name)
        leaves = None if known is None else same_form(tree, known.form)
        if leaves is None and microbatches is not None:
            tree = with_constants(tree, name)
            leaves = None if known is None else same_form(tree, known.form)
        if known is not None and leaves is not None:
            self.trees[name] = known
        else:
            leaves, self.trees[name] = read_tree(tree, name, microbatches or 0)
        return leaves

    def read_detached(self, tree: Any, name: str) -> Leaves:
        """Read tensors without their autograd history, so that no graph grows with the steps."""
        leaves = self.read(tree, name)
        if self.trees[name].tracked:
            leaves = tuple([t.detach() if t.requires_grad and not is_wrapped(t) else t for t in leaves])
        return leaves

    def read_batch(self, batch: Any, name: str) -> Sequence[Leaves]:
        m = self._microbatches
        if isinstance(batch, Microbatches):
            if len(batch) != m:
                raise ValueError(
                    f"{name}: got {len(batch)} microbatches, the schedule has {m}; cut the batch into that"
                    " many"
                )
            return [self.read(tree, f"{name}[{i}]", 0) for i, tree in enumerate(batch)]
        try:
            leaves = self.read(batch, name, m)
            if isinstance(batch, list) and batch and not leaves:
                raise TypeError(
                    f"{name}: got {shown(batch)}, expected tensors; make the list one, torch.tensor({name})"
                )
            return self.trees[name].cut(leaves, m)
        except ValueError as error:
            if isinstance(batch, list) and len(batch) == m:
                raise ValueError(
                    f"{error}. A list is a tree like any other; microbatches are ppfunc.Microbatches(...)"
                ) from error
            raise


def read_loss_weights(weights: LossWeights, microbatches: int) -> torch.Tensor | None:
    """Read the weights of the microbatches as float64[m]; None for ``1/m`` each.

    Raises:
        ValueError: wrong number of weights, or weights on the host that are not finite.
        TypeError: not numbers.
    """
    if weights is None:
        return None
    try:
        if torch.is_tensor(weights) and weights.is_complex():
            raise TypeError("complex weights")
        device = weights.device if isinstance(weights, torch.Tensor) else "cpu"
        # A transform would wrap the tensor that is made of a list.
        with nullcontext() if torch.is_tensor(weights) else without_transforms():
            read = torch.as_tensor(weights, dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loss_weights: got {reprlib.repr(weights)}, expected one number for each of the {microbatches}"
            " microbatches"
        ) from error
    if read.shape != (microbatches,):
        raise ValueError(
            f"loss_weights: got shape {tuple(read.shape)}, expected one weight for each of the {microbatches}"
            " microbatches"
        )
    if read.device.type == "cpu" and not is_wrapped(read) and not all(map(math.isfinite, read.tolist())):
        raise ValueError(f"loss_weights: got {reprlib.repr(read.tolist())}, expected finite numbers")
    return read


def _zeros(weights: torch.Tensor | None) -> frozenset[int]:
    """Find the microbatches of weight 0, as far as the host knows the weights and no transform hides them."""
    if weights is None or weights.device.type != "cpu" or is_wrapped(weights):
        return frozenset()
    return frozenset(m for m, weight in enumerate(weights.tolist()) if weight == 0)


def by_stage(trees: Any, name: str) -> Mapping[int, Any]:
    """Return the trees, which are given by stage; raise TypeError for anything else."""
    if not isinstance(trees, Mapping):
        raise TypeError(
            f"{name}: got {shown(trees)}, expected a dictionary {{stage: tree}}, such as split.params,"
            " split.state or state.params"
        )
    return trees


def require_trees(name: str, trees: Any, stages: Sequence[int], *, some: bool = False) -> None:
    """Raise TypeError or ValueError unless these are trees of these stages, or of some of them."""
    fewer = set(by_stage(trees, name)) < set(stages)
    if set(trees) != set(stages) and not (fewer and some):
        mend = "; where processes run a pipeline together, each gives a transport, such as ppfunc.P2P(group)"
        raise ValueError(
            f"{name}: got the stages {list(trees)}, this process runs {list(stages)}; give those, as {{s:"
            f" {name}[s] for s in {list(stages)}}}{mend if fewer else ''}"
        )


def _require_inputs(raw: RawArguments, schedule: Schedule, stages: Sequence[int]) -> None:
    stage = schedule.model_stages[schedule.chains[0].stages[0]]
    if raw.inputs is None and stage in stages:
        raise ValueError(f"inputs: got None, but this process runs stage {stage}, which needs them")


def require_no_pair(inputs: Any, schedule: Schedule, stages: Sequence[int]) -> None:
    """Raise ValueError for inputs and targets in one tuple."""
    ends = schedule.model_stages[schedule.chains[0].stages[-1]] in stages
    if ends and isinstance(inputs, tuple) and len(inputs) == 2:
        raise ValueError(
            "targets: got None; pass targets=, in a step as the argument after inputs; inputs is a pair:"
            " *batch. Where loss_fn takes no targets, give two inputs as a list or a dictionary"
        )


def read_seed(seed: Any) -> Seed:
    """Read a seed as two integers, or None.

    Raises:
        TypeError: not two integers.
    """
    if seed is None:
        return None
    if (
        isinstance(seed, tuple | list)
        and len(seed) == 2
        and all(isinstance(n, Integral) and not isinstance(n, bool) for n in seed)
    ):
        return int(seed[0]), int(seed[1])
    raise TypeError(f"seed: got {reprlib.repr(seed)}, expected (seed, step), two integers")

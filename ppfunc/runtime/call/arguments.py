"""Read and check the arguments of one call of a step function, and compare their form with the last one."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ppfunc.schedule import Schedule
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage._torch import is_dtensor, is_wrapped, without_transforms
from ppfunc.stage.layout import local
from ppfunc.stage.signature import Form, flatten, form_of, same_form
from ppfunc.stage.tree import tree_paths

from ..execution.buffers import ParameterUpdate
from ..execution.torch_state import transforming, values
from .batch import Leaves, Microbatches, cut, refuse_microbatches, require_divisible

LossWeights = Sequence[float] | torch.Tensor | None
Seed = tuple[int, int] | None


class RawArguments(NamedTuple):
    """Hold the arguments of one call as the caller gave them; dictionaries are keyed by stage of the model.

    Args:
        params, inputs, targets, extras, state, loss_weights, seed: of :func:`ppfunc.value_and_grad`.
        microbatch_offset: the number of the first microbatch, on which random numbers depend.
        scale: what the cotangents of the loss are multiplied by, a tensor of one element.
        update: updates the parameters, in a step that has updates.
        common: what all ranks that train together have to agree on, beside the call.
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


@dataclass(frozen=True, slots=True, eq=False)
class TreeForm:
    """Describe one tree of tensors: all that a program depends on beside the values.

    Args:
        form: to compare another tree with it.
        types, strides, devices: of its leaves; of DTensors, strides and devices of their local tensors.
        signature: of the tree, or, of a whole batch, of one microbatch.
        tracked: whether a leaf requires a gradient, and so may have a history.
        whole: signature of the tree, of a whole batch too.
    """

    form: Form
    types: tuple[type, ...]
    strides: tuple[tuple[int, ...], ...]
    devices: tuple[torch.device, ...]
    signature: Signature
    tracked: bool
    whole: Signature

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable, equal for equal forms."""
        return self.signature, self.types, self.strides, self.devices


class StepForm(NamedTuple):
    """Describe all arguments of one call, by stage of the model: what a program is lowered for.

    Args:
        params, state: signatures.
        strides: of every leaf of the parameters, in elements.
        extents: of every leaf of the parameters, bytes from its first element to its last.
        devices: where each stage computes.
        inputs, targets: signatures of the microbatches; None if this process was given none.
        rows: of a microbatch of a whole batch; None if the inputs came as Microbatches.
        other_rows: likewise of targets and extras that came as whole batches, by name.
        extras: signatures of the microbatches.
    """

    params: Mapping[int, Signature]
    strides: Mapping[int, tuple[tuple[int, ...], ...]]
    extents: tuple[int, ...]
    devices: Mapping[int, torch.device]
    inputs: tuple[Signature, ...] | None
    targets: tuple[Signature, ...] | None
    rows: int | None
    other_rows: Mapping[str, int]
    extras: Mapping[int, tuple[Signature, ...]]
    state: Mapping[int, Signature]


class StepArguments(NamedTuple):
    """Hold the arguments of one call, read and checked.

    Args:
        params, state: leaves of the trees, by stage of the model in the caller's order, without history.
        inputs, targets: leaves of every microbatch; empty if this process was given none.
        extras: likewise, by stage of the model.
        loss_weights: weight of every microbatch, float64[m]; None for ``1/m`` each.
        seed: ``(seed, step)``, or None.
        microbatch_offset, scale, update, common: as given.
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
    microbatch_offset: int = 0
    scale: torch.Tensor | None = None
    update: ParameterUpdate | None = None
    common: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable, equal for arguments that run the same program."""
        return tuple((name, form.key) for name, form in sorted(self.trees.items()))

    def form_of(self, rows: int | None) -> StepForm:
        """Return the form of the arguments, with the rows of the batch if this process was not given it.

        Args:
            rows: of a microbatch; None if the batch came as Microbatches.
        """
        return self.form._replace(rows=rows) if self.form.inputs is None else self.form

    def without_tensors(self) -> StepArguments:
        """Return a copy that keeps no tensor of the call alive."""
        return self._replace(
            params={},
            state={},
            inputs=(),
            targets=(),
            extras={},
            loss_weights=None,
            scale=None,
            update=None,
        )

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
    last: StepArguments | None = None,
    *,
    abstract: bool = False,
) -> StepArguments:
    """Read the arguments of a call in a process that runs ``stages`` of the model.

    Args:
        last: arguments of an earlier call; if these have the same form, ``form`` is that object.
        abstract: accept signatures for trees, and tensors without values.

    Raises:
        ValueError, TypeError: they do not fit the schedule.
    """
    m = schedule.microbatches
    for name in ("targets", "loss_weights"):
        if getattr(raw, name) is not None and not with_targets:
            raise ValueError(
                f"{name}: got some, but there is no loss function that would read them; give the loss"
                f" function, or no {name}"
            )
    _require_stages(raw.params, "params", stages)
    extras = {} if raw.extras is None else raw.extras
    state = {} if raw.state is None else raw.state
    _require_some(extras, "extras", stages)
    _require_some(state, "state", stages)
    reader = _Reader({} if last is None else last.trees, m, abstract)
    params = {s: reader.read_detached(tree, f"params[{s}]") for s, tree in raw.params.items()}
    states = {s: reader.read_detached(tree, f"state[{s}]") for s, tree in state.items()}
    inputs = () if raw.inputs is None else reader.read_batch(raw.inputs, "inputs")
    targets = () if raw.targets is None or not with_targets else reader.read_batch(raw.targets, "targets")
    batches = {s: reader.read_batch(extras[s], f"extras[{s}]") for s in stages if s in extras}
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
        params, states, inputs, targets, batches, weights, seed, form, trees, zeros,
        raw.microbatch_offset, raw.scale, raw.update, raw.common,
    )  # fmt: skip


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
        """Return whether the trees have the names and forms of those of the earlier call."""
        return self.trees.keys() == self._known.keys() and all(
            form is self._known[name] for name, form in self.trees.items()
        )

    def read(self, tree: Any, name: str, microbatches: int = 0) -> Leaves:
        if self._abstract and isinstance(tree, Signature):
            tree = tree.wrap(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in tree.leaves)
        leaves, self.trees[name] = read_tree(tree, self._known.get(name), name, microbatches)
        return leaves

    def read_detached(self, tree: Any, name: str) -> Leaves:
        """Read tensors without their autograd history, so that no graph grows with the steps."""
        leaves = self.read(tree, name)
        if self.trees[name].tracked:
            leaves = tuple([t.detach() if t.requires_grad and not is_wrapped(t) else t for t in leaves])
        return leaves

    def read_batch(self, batch: Any, name: str) -> Sequence[Leaves]:
        """Read the microbatches of a batch."""
        m = self._microbatches
        if not isinstance(batch, Microbatches):
            try:
                return cut(self.read(batch, name, m), m)
            except ValueError as error:
                if isinstance(batch, list) and len(batch) == m:
                    raise ValueError(
                        f"{error}. A list is a tree like any other; microbatches are ppfunc.Microbatches(...)"
                    ) from error
                raise
        if len(batch) != m:
            raise ValueError(
                f"{name}: got {len(batch)} microbatches, the schedule has {m}; cut the batch into that many"
            )
        return [self.read(tree, f"{name}[{i}]") for i, tree in enumerate(batch)]


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


def _require_stages(trees: Any, name: str, stages: Sequence[int]) -> None:
    if not isinstance(trees, Mapping) or set(trees) != set(stages):
        got = _keys(trees) if isinstance(trees, Mapping) else type(trees).__name__
        fewer = isinstance(trees, Mapping) and set(trees) < set(stages)
        mend = (
            "; where processes run a pipeline together, each gives its transport, such as ppfunc.P2P(group)"
            if fewer
            else ""
        )
        raise ValueError(
            f"{name}: got {got}, expected a dictionary with the stages of the model that this process runs,"
            f" {list(stages)}: {{stage: tree}}{mend}"
        )


def _require_some(trees: Any, name: str, stages: Sequence[int]) -> None:
    if not isinstance(trees, Mapping):
        raise TypeError(f"{name}: got {type(trees).__name__}, expected a dictionary {{stage: tree}}")
    if not set(trees) <= set(stages):
        raise ValueError(f"{name}: got the stages {_keys(trees)}, this process runs {list(stages)}")


def _require_batches(
    raw: RawArguments, schedule: Schedule, stages: Sequence[int], with_targets: bool
) -> None:
    model = schedule.model_stages
    batches = {
        "inputs": (raw.inputs, model[schedule.chains[0].stages[0]]),
        "targets": (raw.targets, model[schedule.chains[0].stages[-1]]),
    }
    for name, (batch, stage) in batches.items():
        if batch is None and stage in stages and (with_targets or name == "inputs"):
            raise ValueError(f"{name}: got None, but this process runs stage {stage}, which needs them")


def _keys(trees: Mapping[Any, Any]) -> list[Any]:
    """Sort the keys, numbers or not."""
    return sorted(
        trees,
        key=lambda key: (str(type(key)), key) if isinstance(key, int | str) else (str(type(key)), str(key)),
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


def read_tree(tree: Any, form: TreeForm | None, name: str, microbatches: int) -> tuple[Leaves, TreeForm]:
    """Read the leaves of a tree and its form, which is ``form`` itself if they are equal."""
    if form is not None and (same := same_form(tree, form.form)) is not None:
        return same, form
    leaves, treedef = flatten(tree, name)
    refuse_microbatches(treedef, name)
    for leaf, path in zip(leaves, tree_paths(treedef, name), strict=True) if transforming() else ():
        if is_dtensor(values(leaf)):
            raise ValueError(
                f"{path}: got a DTensor under a torch.func transform, which knows none; use ppfunc.jvp, hvp"
                " or gnvp"
            )
    local_leaves = tuple(map(local, leaves))
    signature = Signature(treedef, tuple(map(LeafSignature.of, leaves)))
    whole = signature
    if microbatches:
        require_divisible(local_leaves, tree_paths(treedef), microbatches, name)
        signature = signature.cut(microbatches)
    return local_leaves, TreeForm(
        form_of(leaves, treedef),
        tuple(map(type, leaves)),
        tuple(t.stride() for t in local_leaves),
        tuple(t.device for t in local_leaves),
        signature,
        any(t.requires_grad for t in leaves),
        whole,
    )


def step_form(
    trees: Mapping[str, TreeForm],
    stages: Sequence[int],
    microbatches: int,
    params: Mapping[int, Leaves],
    inputs: Sequence[Leaves],
) -> StepForm:
    """Put together the form of all arguments."""

    def batch(name: str) -> tuple[Signature, ...] | None:
        if name in trees:
            return (trees[name].signature.without_grad(),) * microbatches
        forms = [trees[f"{name}[{i}]"] for i in range(microbatches) if f"{name}[{i}]" in trees]
        return tuple(form.signature.without_grad() for form in forms) or None

    extras = {s: batch(f"extras[{s}]") for s in stages}
    return StepForm(
        {s: trees[f"params[{s}]"].signature for s in stages},
        {s: trees[f"params[{s}]"].strides for s in stages},
        tuple(extent(leaf) for s in stages for leaf in params[s]),
        {s: _device(params, s, inputs) for s in stages},
        batch("inputs"),
        batch("targets"),
        _rows(trees["inputs"]) if "inputs" in trees else None,
        {
            name: _rows(trees[name])
            for name in ("targets", *(f"extras[{s}]" for s in stages))
            if name in trees
        },
        {s: signatures for s, signatures in extras.items() if signatures},
        {s: trees[f"state[{s}]"].signature.without_grad() for s in stages if f"state[{s}]" in trees},
    )


def _rows(form: TreeForm) -> int:
    """Count the rows of one microbatch of a whole batch."""
    return next((leaf.shape[0] for leaf in form.signature.leaves), 0)


def require_values(trees: Mapping[str, TreeForm]) -> None:
    """Raise ValueError for a leaf without values, or on another device than the others of its stage."""
    for name, form in trees.items():
        devices = form.devices
        for path, device in zip(tree_paths(form.form.treedef), devices, strict=True):
            if device.type == "meta":
                raise ValueError(
                    f"{name}{path}: got a tensor on the device meta, which has no values; materialise it, or"
                    " call step.lower for shapes alone"
                )
            if device != devices[0] and name.startswith("params"):
                raise ValueError(
                    f"{name}{path}: got a tensor on {device}, others of this stage are on {devices[0]}; move"
                    " all to one device"
                )


def _device(params: Mapping[int, Leaves], stage: int, inputs: Sequence[Leaves]) -> torch.device:
    """Choose where a stage computes: with its parameters, else those nearest to it, else the batch."""
    near = sorted(params, key=lambda s: abs(s - stage))
    device = next((params[s][0].device for s in near if params[s]), None)
    if device is None:
        device = next((t.device for row in inputs for t in row), None)
    return torch.get_default_device() if device is None or device.type == "meta" else device


def extent(tensor: torch.Tensor) -> int:
    """Count the bytes from the beginning of the first element of a tensor to the end of the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * (1 + last) if tensor.numel() else 0

"""Make the results of a step, as trees that belong to the caller, from its buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import torch

from ppfunc.stage import Signature
from ppfunc.stage._torch import address, is_wrapped
from ppfunc.stage.constants import without_constants
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.tree import tree_leaves, tree_map, tree_structure

from ..ports.protocols import LossPart
from ..values.arguments import Microbatches, StepArguments, joined
from ..values.buffers import Buffers, Tag
from .lower import BATCH, LoweredStep

_NOTHING = tree_structure(None)
_KEPT = "outputs", "metrics", "aux"  # of a stage for the caller, in this order after its loss


class Aux(NamedTuple):
    """Hold the results of stages and loss function of this process beside activations and losses.

    Their tensors carry no gradient. Those of microbatches have a leading axis of the microbatches that this
    process ran, ascending, step after step. Where they differ in form they are Microbatches, with None for
    those without.

    Args:
        metrics: metrics of the stages, trees by stage of the model.
        state: states of the stages, trees by stage of the model, after the last microbatch.
        loss: the tree ``aux`` of a loss function that returns ``(loss, aux)``; None on ranks that run no last
            stage.
    """

    metrics: dict[int, Any]
    state: dict[int, Any]
    loss: Any = None


class StepResult(NamedTuple):
    """Name the results of one step. Results that were not asked for are None.

    Args:
        loss: the weighted sum of all losses, a tensor of the shape of a loss, on every rank.
        grads: the gradients of the parameters of this process, ``{stage of the model: tree}``.
        input_grads: the gradients of the inputs of the first stages of this process, in the form of the
            inputs; None if it runs no first stage.
        outputs: results of the last stages of this process, in the form of the inputs; None if it runs no
            last stage.
        aux: metrics, state and what comes with the loss, :class:`Aux`.
        losses: the losses of all microbatches in their order, [m, *shape of a loss], on every rank. They are
            not weighted, and include auxiliary losses of stages: their weighted sum is ``loss``.
        slope: the derivative of the loss along the tangents, of :func:`ppfunc.jvp` and :func:`ppfunc.hvp`.
        output_tangents: the derivative of the outputs along the tangents, of :func:`ppfunc.jvp`.
        products: the Hessian times the vector, like ``grads``, of :func:`ppfunc.hvp`.
    """

    loss: Any = None
    grads: Any = None
    input_grads: Any = None
    outputs: Any = None
    aux: Any = None
    losses: Any = None
    slope: Any = None
    output_tangents: Any = None
    products: Any = None

    def asked_for(self, wants: Sequence[str]) -> Any:
        """Return the results that a caller asked for: one itself, a loss with gradients as a pair, else all.

        Args:
            wants: names of fields.
        """
        if len(wants) == 1:
            return getattr(self, wants[0])
        if len(wants) == 2 and wants[1] in ("grads", "input_grads"):
            return self.loss, getattr(self, wants[1])
        return self


def collect(lowered: LoweredStep, steps: Sequence[StepArguments], buffers: Buffers) -> StepResult:
    """Make the wanted results from the buffers of the last step.

    The loss is not among them: it needs the losses of the other ranks.
    """
    wants, owned, arguments = lowered.spec.wants, Owned(_tensors(steps)), steps[0]
    lasts = [chain.stages[-1] for chain in lowered.schedule.chains]
    outputs = _rows(lowered, buffers, lasts, "outputs") if "outputs" in wants else []
    return StepResult(
        None,
        _gradients(lowered, arguments, buffers, owned) if "grads" in wants else None,
        _input_gradients(lowered, arguments, buffers, owned) if "input_grads" in wants else None,
        without_constants(_in_form_of_inputs(outputs, lowered, owned)) if outputs else None,
        _aux(lowered, arguments, buffers, lasts, owned) if "aux" in wants else None,
    )


def _tensors(steps: Sequence[StepArguments]) -> Iterator[torch.Tensor]:
    yield from chain.from_iterable((*steps[0].params.values(), *steps[0].state.values()))
    for step in steps:
        for batch in (step.inputs, step.targets, *step.extras.values()):
            yield from chain.from_iterable(batch)


def _gradients(
    lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, owned: Owned
) -> dict[int, Any]:
    """Make the gradients of every stage of the model, with the structure of its parameters."""
    trees: dict[int, Any] = {}
    # The first replica has the sum over all.
    sums = {
        lowered.schedule.model_stages[stage]: gradients
        for stage, gradients in reversed(buffers.gradients.items())
    }
    for model, leaves in arguments.params.items():
        signature, gradients = arguments.form.params[model], sums[model]
        if all([leaf.grad and leaf.layout is None for leaf in signature.leaves]):
            trees[model] = signature.treedef.unflatten(gradients.take(leaves, owned))
            continue
        whole = Signature(signature.treedef, tuple(map(gradients.signature, signature.leaves)))
        taken = iter(
            gradients.take(
                tuple(t for t, leaf in zip(leaves, signature.leaves, strict=True) if leaf.grad), owned
            )
        )
        zeros = zip(leaves, whole.leaves, strict=True)
        trees[model] = whole.wrap(
            [next(taken) if leaf.grad else t.new_zeros(leaf.shape, dtype=leaf.dtype) for t, leaf in zeros]
        )
    return trees


def _input_gradients(lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, owned: Owned) -> Any:
    """Make the gradients of the inputs of the chains that begin in this process."""
    schedule, signatures = lowered.schedule, arguments.form.inputs or ()
    here = [chain for chain in schedule.chains if schedule.placement[chain.stages[0]] in lowered.ranks]
    firsts = {m: chain.stages[0] for chain in here for m in chain.microbatches}
    if not firsts:
        return None

    def row(m: int) -> Any:
        wanted = signatures[m].with_grad()
        gradients = iter(buffers.values.pop(Tag("B", firsts[m], BATCH, m), ()))
        pairs = zip(wanted.leaves, arguments.inputs[m], strict=True)
        return wanted.wrap([next(gradients) if leaf.grad else torch.zeros_like(t) for leaf, t in pairs])

    rows = [row(m) for m in sorted(firsts)]
    whole = lowered.form.trees["inputs"].whole if "inputs" in lowered.form.trees else None
    if whole is None:
        return without_constants(_in_form_of_inputs(rows, lowered, owned))
    columns = zip(whole, *map(tree_leaves, rows), strict=True)
    leaves = (reduce(torch.add, column) if of_each else joined(*column) for of_each, *column in columns)
    return without_constants(tree_structure(rows[0]).unflatten(leaves))


def _in_form_of_inputs(rows: list[Any], lowered: LoweredStep, owned: Owned) -> Any:
    """Join rows along axis 0 where the inputs were a whole batch; else return Microbatches."""
    if lowered.form.rows is not None:
        return Microbatches(rows).join()
    return Microbatches(tree_map(owned, row) for row in rows)


def _aux(
    lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, lasts: Sequence[int], owned: Owned
) -> Aux:
    schedule, metrics = lowered.schedule, {}
    for model in sorted(
        {low.model_stage for low in lowered.stages.values() if low.metrics.treedef != _NOTHING}
    ):
        stages = [s for s in range(schedule.stages) if schedule.model_stages[s] == model]
        rows = _rows(lowered, buffers, stages, "metrics")
        if any(row is not None for row in rows):
            metrics[model] = _stacked(rows, owned)
    state = {s: arguments.form.state[s].wrap(map(owned, leaves)) for s, leaves in buffers.state.items()}
    returned = any([low.aux.treedef != _NOTHING for low in lowered.stages.values()])
    rows = _rows(lowered, buffers, lasts, "aux") if returned else []
    return Aux(metrics, state, _stacked(rows, owned) if any(row is not None for row in rows) else None)


def _rows(lowered: LoweredStep, buffers: Buffers, stages: Sequence[int], name: str) -> list[Any]:
    """List a tree that stages keep for the caller, for every microbatch of every step that this process ran.

    Args:
        name: field of :class:`LoweredStage`, an item of ``_KEPT``.
    """
    chains = {stage: chain for chain in lowered.schedule.chains for stage in chain.stages}
    keys = [
        (stage, m) for stage in stages for m in chains[stage].microbatches if (stage, m) in lowered.stages
    ]
    rows, number = list[Any](), _KEPT.index(name)
    for kept in (*buffers.kept_before, buffers.kept):
        for key in keys:
            low = lowered.stages[key]
            trees: list[Signature] = [getattr(low, each) for each in _KEPT]
            start = (low.loss is not None) + sum(len(tree.leaves) for tree in trees[:number])
            leaves = kept.get(key, ())[start : start + len(trees[number].leaves)]
            rows.append(trees[number].wrap(leaves))
    return rows


def _stacked(rows: list[Any], owned: Owned) -> Any:
    """Stack trees along a new axis; return Microbatches if they differ in structure, shape or dtype."""
    first, *others = ((tree_structure(row), [(t.shape, t.dtype) for t in tree_leaves(row)]) for row in rows)
    if any(other != first for other in others):
        return Microbatches(tree_map(owned, row) for row in rows)
    return Microbatches(rows).stack()


def losses_of(lowered: LoweredStep, buffers: Buffers) -> dict[int, torch.Tensor]:
    """Return the losses of a step, each times the weight of its microbatch, by stage of this process.

    A loss of weight 0 counts as 0, also where it is NaN, as the mean over no tokens is. If the loss of each
    microbatch is wanted, those before they were weighted come with them, see :class:`LossPart`.
    """
    weighted: dict[int, torch.Tensor] = {}
    for stage, part in lowered.losses.items():
        chain = next(chain for chain in lowered.schedule.chains if stage in chain.stages)
        numbers = [m for m in chain.microbatches if lowered.stages[stage, m].loss is not None]
        each = [buffers.kept[stage, m][0] for m in numbers]
        rows = [
            torch.zeros_like(loss) if m in buffers.left_out else loss
            for m, loss in zip(numbers, each, strict=True)
        ]
        losses = torch.stack(rows).to(part.leaf.dtype)
        weights = torch.stack([buffers.weights[stage][m] for m in numbers])
        weights = weights.view(-1, *(1,) * (losses.ndim - 1))
        losses = torch.where(weights == 0, torch.zeros_like(losses), losses * weights)
        if part.each:
            losses = torch.stack([losses, torch.stack(each).to(part.leaf.dtype)])
        weighted[stage] = losses
    return weighted


def sum_up(losses: Sequence[torch.Tensor], parts: Mapping[int, LossPart]) -> torch.Tensor:
    """Sum the losses of all stages.

    Args:
        losses: losses of each stage of ``parts``, ascending.

    Returns:
        What :meth:`Transport.end` returns.
    """
    weighted, rows = apart(losses, [part for _, part in sorted(parts.items())])
    total = torch.cat(weighted).sum(0)
    return torch.stack([total, *(rows[m] for m in sorted(rows))]) if rows else total


def apart(
    losses: Iterable[torch.Tensor], parts: Iterable[LossPart]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Take losses apart: weighted ones by stage, and unweighted ones by microbatch, summed over stages.

    The latter are empty unless the loss of each microbatch is wanted.
    """
    weighted, rows = [], dict[int, torch.Tensor]()
    for loss, part in zip(losses, parts, strict=True):
        weighted.append(loss[0] if part.each else loss)
        for m, row in zip(part.each, loss[1] if part.each else (), strict=True):
            rows[m] = rows[m] + row if m in rows else row
    return weighted, rows


def form_of_sum(parts: Mapping[int, LossPart]) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the dtype of the result of :func:`sum_up`."""
    part = next(iter(parts.values()))
    microbatches = {m for each in parts.values() for m in each.each}
    shape = (1 + len(microbatches), *part.leaf.shape[2:]) if part.each else part.leaf.shape[1:]
    return shape, reduce(torch.promote_types, (part.leaf.dtype for part in parts.values()))


def to_text(losses: torch.Tensor) -> str:
    """Write the bytes of losses as hexadecimal digits."""
    losses = losses.detach().cpu().contiguous()
    return ctypes.string_at(losses.data_ptr(), losses.nbytes).hex()


def of_text(text: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Read the text of :func:`to_text`."""
    if not text:  # torch.frombuffer takes no empty buffer
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).view(shape)


def sum_texts(texts: Iterable[Mapping[str, str]], parts: Mapping[int, LossPart]) -> str:
    """Sum the losses of all stages in their order, so that all ranks get the same bits.

    Args:
        texts: the losses of every rank, as :func:`to_text` writes them, by stage.
        parts: the form of the losses.

    Returns:
        The sum, as :func:`to_text` writes it.
    """
    of_stage = dict(chain.from_iterable(text.items() for text in texts))
    leaves = [(of_stage[str(stage)], part.leaf) for stage, part in sorted(parts.items())]
    return to_text(sum_up([of_text(text, leaf.shape, leaf.dtype) for text, leaf in leaves], parts))


class Owned:
    """Copies a tensor unless nothing else uses its memory, so that results belong to the caller.

    Args:
        arguments: tensors of the caller, whose memory results must not share; read at the first call.
    """

    def __init__(self, arguments: Iterable[torch.Tensor]) -> None:
        self._arguments = arguments
        self._taken: set[int] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._taken is None:
            self._taken = {address(t) for t in self._arguments if not is_wrapped(t)}
        if (layout := layout_of(tensor)) is not None:
            return distributed(self(local(tensor)), layout)
        if is_wrapped(tensor):
            return tensor
        here = address(tensor)
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        # A scalar may be the weight of the microbatch itself, which later steps use again.
        if tensor._is_view() or not whole or here in self._taken or tensor.ndim == 0:
            return tensor.clone()
        self._taken.add(here)
        return tensor

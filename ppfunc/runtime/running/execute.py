"""Run a compiled step to its end on all ranks: arguments to buffers, every call, buffers to results.

Buffers are made for one step alone. Results are trees that belong to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from ppfunc.schedule.instruction import TAIL
from ppfunc.schedule.passes.running import linearize
from ppfunc.stage import FlatProgram, LeafSignature, Signature, StageProgram
from ppfunc.stage._torch import address, is_wrapped, values
from ppfunc.stage.constants import without_constants
from ppfunc.stage.device import upload
from ppfunc.stage.layout import distributed, layout_of, local
from ppfunc.stage.process import act_on_interrupts, this_thread
from ppfunc.stage.signature import differentiable, leaf_names
from ppfunc.stage.tree import tree_leaves, tree_map, tree_structure

from ..lowering.lower import BATCH, CALLER, Aux, LoweredStage, LoweredStep, StepResult
from ..ports.protocols import Transport
from ..values.arguments import Microbatches, SequenceCut, StepArguments, joined
from ..values.buffers import (
    Buffers,
    Compared,
    Gradients,
    LeafGradients,
    Leaves,
    Numbers,
    Origin,
    Owner,
    Tag,
)
from ..values.errors import Failure, StepFailed
from .calls import Sum
from .compile import CompiledStep, bind

_NOTHING = tree_structure(None)
_KEPT = "outputs", "metrics", "aux"  # of a stage for the caller, in this order after its loss


def execute_steps(compiled: CompiledStep, steps: Sequence[StepArguments], transport: Transport) -> Buffers:
    """Run the steps of a call, each from the buffers of the one before; return the buffers of the last.

    Raises:
        StepFailed: with the place of the call that raised; where an update finds numbers that are not finite,
            of the first of them.
    """
    buffers: Buffers | None = None
    if len(steps) > 1 and steps[0].carry:
        _require_carried_on(compiled.lowered)
    for n, arguments in enumerate(steps):
        before = buffers
        try:
            buffers = execute(compiled, fill(compiled.lowered, arguments, before))
        except StepFailed as failed:
            which = f"; in step {n} of {len(steps)}, counted from 0" if len(steps) > 1 else ""
            if not isinstance(failed.failure.cause, NotFinite):
                failed.which = which
                raise
            cause = failed.failure.cause
            buffers = fill(compiled.lowered, arguments, before)
            raise locate_nonfinite(compiled, buffers, transport, cause, which) from cause
    assert buffers is not None
    return buffers


def execute(compiled: CompiledStep, buffers: Buffers) -> Buffers:
    """Run every call in turn.

    Args:
        compiled: the step to run.
        buffers: the arguments, see :func:`fill`; hold the results afterwards.

    Raises:
        StepFailed: with the place of the call that raised.
    """
    index, held = 0, this_thread.held
    try:
        for index, call in enumerate(compiled.calls):  # noqa: B007
            if held is not None and held.pending:
                act_on_interrupts()
            call(buffers)
    except BaseException as cause:
        place = compiled.places[index]
        # Without a name for the failure: its cause keeps this frame, and so the buffers.
        raise StepFailed(
            Failure(place.rank, place.position, place.instruction, cause), compiled.lowered.context_of
        ) from cause
    return buffers


def fill(lowered: LoweredStep, arguments: StepArguments, before: Buffers | None = None) -> Buffers:
    """Make buffers with the arguments in their places.

    Args:
        before: the buffers of the step before it in the same call, whose parameters and states go on.

    Raises:
        ValueError: a stage draws random numbers, and there is no seed; a loss in float16 is to be scaled.
    """
    if arguments.seed is None and lowered.drawing:
        raise ValueError(
            f"stage {lowered.drawing[0]} draws random numbers; pass seed=(seed, step) to the step, two"
            " integers, or, to leave out the dropout of a model that was split, call model.eval()"
        )
    buffers = Buffers(
        dict(arguments.params), bare=arguments.params, state=dict(arguments.state), seed=arguments.seed,
        microbatch_offset=arguments.microbatch_offset, left_out=arguments.left_out, scale=arguments.scale,
        update=arguments.update,
    )  # fmt: skip
    if before is not None:
        buffers.params, buffers.state = dict(before.params), dict(before.state)
        buffers.gathering, buffers.scale = dict(before.gathering), before.scale
        buffers.kept_before = [*before.kept_before, before.kept] if "aux" in lowered.spec.wants else []
    for stage, rank in enumerate(lowered.schedule.placement):
        if rank in lowered.ranks:
            _fill_stage(lowered, arguments, buffers, stage, before)
    return buffers


def _fill_stage(
    lowered: LoweredStep, arguments: StepArguments, buffers: Buffers, stage: int, before: Buffers | None
) -> None:
    microbatches, model_stage = lowered.schedule.numbers[stage], lowered.schedule.model_stages[stage]
    if not lowered.schedule.forward_only:
        buffers.gradients[stage] = _gradients_of(lowered, buffers, model_stage)
    batches = [arguments.targets] if model_stage in lowered.targeted and arguments.targets else []
    batches += [arguments.extras[model_stage]] if model_stage in arguments.extras else []
    if batches:
        buffers.extras.update(((stage, m), sum((tuple(b[m]) for b in batches), ())) for m in microbatches)
    if stage in lowered.losses:
        losses = (lowered.stages[stage, m].loss for m in microbatches)
        leaf = next(loss for loss in losses if loss is not None).leaves[0]
        weights = _weights_of(lowered, arguments, stage, leaf.dtype)
        buffers.weights[stage] = weights.unbind()
        if buffers.scale is not None:
            if leaf.dtype == torch.float16:
                raise ValueError(
                    f"the loss of stage {model_stage} is float16, in which a scaled loss overflows; compute"
                    " it in float32, as loss_fn(y.float(), target) does, or leave out the scale"
                )
            weights = weights * buffers.scale.to(weights.device, weights.dtype)
        each = weights.to(leaf.dtype).unbind()
        cotangents = ((each[m].expand(leaf.shape),) for m in microbatches)
        buffers.cotangents.update(zip(((stage, m) for m in microbatches), cotangents, strict=True))
    for n, leaves in enumerate(arguments.carry.get(model_stage, ())):
        first = n * lowered.schedule.slices
        if first in microbatches and leaves:
            if before is not None:
                leaves = before.values[Tag("F", stage, CALLER, first + lowered.schedule.slices - 1)]
            device = lowered.form.devices[model_stage]
            buffers.values[Tag("F", CALLER, stage, first)] = tuple(upload(t, device) for t in leaves)
    if stage in lowered.schedule.heads:
        buffers.values.update((Tag("F", BATCH, stage, m), tuple(arguments.inputs[m])) for m in microbatches)


def _require_carried_on(lowered: LoweredStep) -> None:
    """Raise ValueError for a first carry of another form than the last, with which the next step begins."""
    k, nothing = lowered.schedule.slices, Signature.of(None)
    for (_, m), low in lowered.stages.items():
        if m % k == k - 1:
            of_sequences = lowered.form.carry.get(low.model_stage)
            given = of_sequences[m // k].with_grad() if of_sequences else nothing
            last = low.sinks[-1].signature.with_grad()
            if given != last and (given.leaves or last.leaves):
                got, expected = given.beside(last)
                raise ValueError(
                    f"carry[{low.model_stage}]: got {got} for sequence {m // k}, whose last carry is"
                    f" {expected}; steps of one call begin where the step before ends: give a first carry of"
                    " that form, or call step() for each"
                )


def _gradients_of(lowered: LoweredStep, buffers: Buffers, model_stage: int) -> Gradients:
    """Make the sum of the gradients of a stage of the model, in memory of the update if it has some."""
    spec = lowered.spec
    gradients = Stack(lowered.schedule.microbatches) if spec.per_microbatch else Sum(spec.sum_dtype)
    if buffers.update is None:
        return gradients
    leaves = enumerate(lowered.form.params[model_stage].leaves)
    forms = ((n, gradients.signature(leaf)) for n, leaf in leaves if leaf.grad)
    return buffers.update.accumulator(model_stage, forms) or gradients


def _weights_of(
    lowered: LoweredStep, arguments: StepArguments, stage: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of all microbatches, where a stage computes and in the dtype in which losses are
    added up.

    Args:
        dtype: dtype of the losses that the stage makes.
    """
    weights, form = arguments.loss_weights, lowered.losses[stage].leaf
    device = lowered.form.devices[lowered.schedule.model_stages[stage]]
    if weights is None:
        m = lowered.schedule.microbatches
        return torch.full((m,), 1 / m, dtype=form.dtype, device=device)
    wide = upload(weights.to(form.dtype), device)
    rows = values(weights)  # of all rows, under a transform
    if rows.device.type == "cpu":
        _require_representable(tuple(rows.flatten().tolist()), dtype)
    else:  # where nothing may be read, they make no number
        wide = torch.where((weights.to(device) != 0) & (wide.to(dtype) == 0), torch.nan, wide)
    return wide


@lru_cache(maxsize=64)
def _require_representable(weights: tuple[float, ...], dtype: torch.dtype) -> None:
    wide = torch.tensor(weights, dtype=torch.float64, device="cpu")
    narrow = wide.to(dtype)
    if any((((wide != 0) & (narrow == 0)) | (wide.isfinite() & ~narrow.isfinite())).tolist()):
        raise ValueError(
            f"loss_weights: got {list(weights)}, of which some become 0 or infinite in {dtype}, the dtype of"
            " the loss; compute the loss in float32"
        )


class Stack:
    """Keeps the gradients of all microbatches beside each other, in their order.

    Equivalent to: ``torch.stack([g0, g1, ...])``, zeros for microbatches that never came.

    Args:
        microbatches: length of the new leading axis.
    """

    def __init__(self, microbatches: int) -> None:
        self._rows: list[dict[int, torch.Tensor]] = [{} for _ in range(microbatches)]
        self._sums = Sum()

    def add(self, gradients: Leaves, numbers: Numbers, microbatch: int, fresh: bool = False) -> None:
        self._rows[microbatch].update(zip(numbers, gradients, strict=True))

    def totals(self) -> None:
        return None

    def put_back(self, gradients: Leaves) -> None:
        self._sums.put_back(gradients)

    def signature(self, leaf: LeafSignature) -> LeafSignature:
        return leaf.stacked(len(self._rows))

    def take(self, like: Leaves, owned: Owner) -> Leaves:
        if any(self._rows):
            self.put_back(
                tuple(
                    torch.stack([row[n] if n in row else torch.zeros_like(leaf) for row in self._rows])
                    for n, leaf in enumerate(like)
                )
            )
            self._rows = [{} for _ in self._rows]
        return self._sums.take(tuple(leaf.expand(len(self._rows), *leaf.shape) for leaf in like), owned)


def collect(lowered: LoweredStep, steps: Sequence[StepArguments], buffers: Buffers) -> StepResult:
    """Make the wanted results from the buffers of the last step.

    The loss is not among them: it needs the losses of the other ranks.
    """
    wants, owned, arguments = lowered.spec.wants, Owned(_tensors(steps)), steps[0]
    lasts = sorted(lowered.schedule.ends)
    outputs = _rows(lowered, buffers, lasts, "outputs") if "outputs" in wants else []
    return StepResult(
        None,
        _gradients(lowered, arguments, buffers, owned) if "grads" in wants else None,
        _input_gradients(lowered, arguments, buffers, owned) if "input_grads" in wants else None,
        without_constants(_in_form_of_inputs(outputs, lowered, owned)) if outputs else None,
        _aux(lowered, arguments, buffers, lasts, owned) if "aux" in wants else None,
        carry=_carries(lowered, buffers, "F", owned) if "carry" in wants else None,
        carry_grads=_carries(lowered, buffers, "B", owned) if "carry_grads" in wants else None,
    )


def _carries(lowered: LoweredStep, buffers: Buffers, direction: str, owned: Owned) -> dict[int, Microbatches]:
    """Make trees of the last carries of sequences, or of the gradients of the first carries.

    Args:
        direction: ``"F"`` for carries, ``"B"`` for gradients.
    """
    trees: dict[int, list[Any]] = {}
    for (stage, m), low in sorted(lowered.stages.items(), key=lambda item: item[0][1]):
        edge = (low.sinks if direction == "F" else low.sources)[-1]
        if edge.stage == CALLER and (direction == "F" or low.model_stage in lowered.form.carry):
            leaves = iter(buffers.values.pop(Tag(direction, stage, CALLER, m), ()))
            made = (
                owned(next(leaves))
                if direction == "F" or leaf.grad
                else torch.zeros(leaf.shape, dtype=leaf.dtype, device=low.device)
                for leaf in edge.leaves
            )
            trees.setdefault(low.model_stage, []).append(edge.signature.wrap(made))
    return {model: Microbatches(rows) for model, rows in sorted(trees.items())}


def _tensors(steps: Sequence[StepArguments]) -> Iterator[torch.Tensor]:
    yield from chain.from_iterable((*steps[0].params.values(), *steps[0].state.values()))
    for step in steps:
        for batch in (step.inputs, step.targets, *step.extras.values(), *step.carry.values()):
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
    """Make the gradients of the inputs of the flows that begin in this process."""
    schedule, signatures = lowered.schedule, arguments.form.inputs or ()
    here = [stage for stage in schedule.heads if schedule.placement[stage] in lowered.ranks]
    firsts = {m: stage for stage in here for m in schedule.numbers[stage]}
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
    k = lowered.schedule.slices
    cut = SequenceCut(lengths=(0,) * k) if k else None
    return Microbatches(tree_map(owned, row) for row in rows)._as_cut(cut)


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
    # Copies of a stage may have every other microbatch.
    keys = sorted((key for key in lowered.stages if key[0] in stages), key=itemgetter(1))
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
        # A scalar may be one that the stage holds, for later steps too.
        if tensor._is_view() or not whole or here in self._taken or tensor.ndim == 0:
            return tensor.clone()
        self._taken.add(here)
        return tensor


_NOWHERE = 2**62


class NotFinite(FloatingPointError):
    """Raised on all ranks, before anything is changed, where the loss or a gradient is not finite."""


def count_nonfinite(
    tensors: Sequence[torch.Tensor], compiled: CompiledStep, transport: Transport
) -> Compared:
    """Count the losses and gradients of all ranks that are not finite, for the end of the step to raise."""
    device = next(iter(compiled.lowered.form.devices.values()))
    bad = [~torch.isfinite(local(t)).all() for t in tensors if differentiable(t.dtype)]
    count = torch.stack(
        [torch.zeros((), device=device), *(one.to(device, torch.float32) for one in bad)]
    ).sum()
    transport.collective("world").all_reduce(count)()
    return Compared(count, _require_none)


def _require_none(count: torch.Tensor) -> None:
    if count > 0:
        raise NotFinite("the loss or a gradient is not finite")


def locate_nonfinite(
    compiled: CompiledStep,
    buffers: Buffers,
    transport: Transport,
    cause: NotFinite,
    which: str = "",
) -> BaseException:
    """Run a step again, on all ranks; return the error that this rank is to raise.

    The rank that comes first in the schedule, of those with a number that is not finite, names the place; the
    others wait for its error.

    Args:
        buffers: buffers of the step, as they were before it ran.
        which: words for the step of a call that runs several, see
            :class:`~ppfunc.runtime.values.errors.StepFailed`.
    """
    world = transport.collective("world")
    first = _first(compiled, buffers, transport)
    mine = _NOWHERE if first is None else first[0] * world.size + world.index
    device = next(iter(compiled.lowered.form.devices.values()))
    least = torch.tensor(-mine, dtype=torch.int64, device=device)
    world.all_reduce(least, "max")()
    transport.rest()
    if first is not None and -int(least) == mine:
        _, place, text = first
        error = FloatingPointError(f"{cause}; first not finite: {text}")
        failure = Failure(place.rank, place.position, place.instruction, error)
        return StepFailed(failure, compiled.lowered.context_of, which)
    if -int(least) == _NOWHERE and world.index == 0:
        what = (
            "every microbatch is finite by itself; what is not is their sum, over microbatches or ranks, or"
            " its norm"
        )
        return FloatingPointError(f"{cause}; {what}")
    transport.end({}, {})
    raise AssertionError("a step ended of which another rank was to say where it failed")


def _first(compiled: CompiledStep, buffers: Buffers, transport: Transport) -> tuple[int, Origin, str] | None:
    """Find the first place on this rank: its number in the order of all ranks, and what is bad there."""
    lowered = compiled.lowered._replace(spec=compiled.lowered.spec._replace(overlapped=None))
    notes: list[str] = []
    programs = {
        key: _watched(lowered.stages[key], program, notes.append)
        for key, program in compiled.programs.items()
    }
    bound = bind(lowered, programs, transport)
    order = {place: n for n, place in enumerate(linearize(lowered.schedule))}
    first: tuple[int, Origin, str] | None = None
    for call, place in zip(bound.calls, bound.places, strict=True):
        if place.instruction.op not in TAIL:
            call(buffers)
        if place.instruction.microbatch in buffers.left_out:
            notes.clear()
        if notes and first is None:
            first = order[place.rank, place.position], place, notes[0]
    return first


def _watched(low: LoweredStage, program: StageProgram, note: Callable[[str], None]) -> StageProgram:
    """Watch a program: note what it makes that is not finite."""
    flat, passed = program.flat, sum(len(edge.leaves) for edge in low.sinks)
    names = [name for name, leaf in zip(leaf_names(low.params), low.params.leaves, strict=True) if leaf.grad]

    def forward(params: Leaves, x: Leaves, extras: Leaves) -> Any:
        outputs, saved = flat.forward(params, x, extras)
        losses = outputs[passed : passed + 1] if low.loss is not None else ()
        for what, leaves in {"its output": outputs[:passed], "its loss": losses}.items():
            if _bad(leaves):
                received = {"its input": x, "its parameters": params, "its targets, extras or state": extras}
                before = [name for name, own in received.items() if _bad(own)]
                note(f"{what}{f'; already {before[0]} had such numbers' if before else ''}")
        return outputs, saved

    def watched(
        run: Callable[..., Any], gradients: Callable[[Any], tuple[LeafGradients, LeafGradients]]
    ) -> Any:
        def call(*args: Any) -> Any:
            result = run(*args)
            of_params, of_x = gradients(result)
            if _bad(of_x):
                note("the gradient of its input")
            for name, g in zip(names, of_params, strict=False):
                if _bad((g,)):
                    note(f"the gradient of its parameter {name!r}")
            return result

        return call

    return program._replace(
        flat=FlatProgram(
            forward,
            watched(flat.backward, lambda result: result),
            watched(flat.backward_input, lambda result: ((), result[0])),
            watched(flat.backward_weight, lambda result: (result, ())),
        )
    )


def _bad(leaves: Sequence[torch.Tensor | None]) -> bool:
    return any(t is not None and differentiable(t.dtype) and not bool(t.isfinite().all()) for t in leaves)

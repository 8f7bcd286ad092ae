"""Refuse what a step would not honour: calls, instructions, rows, layouts, losses and outputs of stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from ppfunc.schedule import Op, Schedule
from ppfunc.stage import Signature
from ppfunc.stage.layout import Boundary, same_placement

from .arguments import StepArguments
from .form import StepForm
from .functorch import transforming
from .lowered import BATCH, LoweredStage
from .spec import StepSpec
from .ties import leaf_names, require_declared


def require_servable_under_transforms(schedule: Schedule, spec: StepSpec, ranks: Sequence[int]) -> None:
    """Raise ValueError where a step of these ranks cannot be called under a ``torch.func`` transform, and is."""
    if transforming() and spec.finite:
        raise ValueError(
            "got a step that raises where numbers are not finite, under a torch.func transform, which has none to read; "
            "make one with on_nonfinite='ignore'"
        )
    if transforming() and len(ranks) < schedule.ranks:
        raise ValueError(
            "got a step under a torch.func transform, whose ranks are in several processes, where the transform "
            "would end at each message; run it with InProcess(), or use ppfunc.jvp, hvp, gnvp, ensemble or per_sample_grad"
        )


class PassRefusals:
    """Refuses arguments that a step would not honour; of parameters it remembers where they lay.

    Args:
        spec: of the step.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._memory: tuple[StepForm, list[int]] | None = None  # of the last call in which parameters were looked at

    def require(self, passes: Sequence[StepArguments]) -> None:
        """Raise ValueError where the passes of a step have batches of several forms, or stages share memory that is not tied."""
        first, spec = passes[0], self._spec
        for n, other in enumerate(passes):
            if other.form is not first.form:
                raise ValueError(f"inputs: pass {n} of the schedule has a batch of another form than pass 0; pad them to one form")
        if "grads" in spec.wants or (spec.update is not None and spec.update.unshard is None):
            leaves = chain.from_iterable(first.params[stage] for stage in first.form.params)
            memory = None if transforming() else (first.form, list(map(torch.Tensor.data_ptr, leaves)))
            if memory is None or memory != self._memory:
                require_declared(first.params, first.form.params, first.form.extents, spec.tied, spec.primal)
                self._memory = memory


def require_honoured(schedule: Schedule, spec: StepSpec) -> None:
    """Raise ValueError for an instruction that a step would not carry out."""
    mend = "take ppfunc.schedule.remove_tail(schedule), and do it in your own code"
    refused = {
        Op.STEP: f"a step returns gradients and runs no optimizer; {mend}",
        Op.REDUCE_GRAD: f"there are no data parallel ranks to sum over; {mend}",
        Op.UNSHARD: "parameters are given whole; leave it out of the schedule",
        Op.RESHARD: "parameters are given whole; leave it out of the schedule",
    }
    if spec.update is not None:
        del refused[Op.STEP], refused[Op.REDUCE_GRAD]
        if spec.update.unshard is not None:
            del refused[Op.UNSHARD], refused[Op.RESHARD]
    if not schedule.replicas and not spec.tied:
        refused[Op.REDUCE_TIED] = f"no stage of this schedule has replicas, and no tied parameters are declared; {mend}"
    for op in (op for op in refused if op in schedule.ops):
        rank, position, instruction = next(
            (r, n, i) for r, program in enumerate(schedule.programs) for n, step in enumerate(program) for i in step if i.op is op
        )
        raise ValueError(
            f"the schedule {schedule.name!r} has {instruction} (rank {rank}, step {position}), which nothing would honour: {refused[op]}"
        )


def require_same_rows(form: StepForm, microbatches: int) -> None:
    """Raise ValueError where targets or extras have other rows than the inputs: a loss might broadcast over them."""
    for name, rows in form.other_rows.items():
        if form.rows and rows and rows != form.rows:  # 0 of a batch without leaves
            raise ValueError(
                f"{name}: got {rows * microbatches} rows in axis 0, the inputs have {form.rows * microbatches}; expected the same rows, "
                f"or ppfunc.microbatch({name}, {microbatches}) where this is meant"
            )


def require_layouts(model: int, boundary: Boundary, params: Signature, received: Iterable[tuple[int, Signature]]) -> None:
    """Raise where a stage is given parts of tensors that lie otherwise than it declares."""
    for name, leaf in zip(leaf_names(params), params.leaves, strict=True):
        if name in boundary.params and leaf.layout != boundary.params[name]:
            raise ValueError(
                f"params[{model}] {name!r}: got {leaf}, the stage was made for a DTensor {boundary.params[name]}; "
                "give the parameters that pp.parallelize returned, or new values of their placements"
            )
    for n, (source, signature) in enumerate(received):
        if source == BATCH and boundary.inputs is None:
            continue  # a plain function takes the parts as they are
        wanted = signature.parts.laid_out(boundary.mesh, boundary.inputs if n == 0 else None, f"the input of stage {model}")
        for path, got, want in zip(signature.paths, signature.leaves, wanted.leaves, strict=True):
            if not same_placement(got.layout, want.layout):
                giver = "the batch" if source == BATCH else f"stage {source}"
                raise ValueError(
                    f"x{path}: {giver} gives {got}, and stage {model} declares {want.layout or 'none that is cut'}; "
                    "declare the same at both ends: pp.parallelize(..., inputs=, outputs=), or pp.with_layouts"
                )


def require_loss(low: LoweredStage, loss: Signature, spec: StepSpec) -> None:
    """Raise where a loss has another form than wanted, or is one that the caller cannot get."""
    if low.function.loss_fn is None and not loss.leaves:
        return
    got, shape = ", ".join(map(str, loss.leaves)) or "nothing", spec.loss_shape
    if len(loss.leaves) != 1 or loss.leaves[0].shape != shape or not loss.leaves[0].dtype.is_floating_point:
        wanted = f"floating tensor of shape {list(shape)}, the loss_shape" if shape else "floating scalar"
        mend = "return one of that shape, or pass another loss_shape" if shape else "take its mean or sum"
        if not shape and len(loss.leaves) == 1 and len(loss.leaves[0].shape) == 1:
            mend += f"; where it is that of an ensemble, pass loss_shape={loss.leaves[0].shape}"
        raise ValueError(f"the loss of stage {low.model} must be a {wanted}, got {got}; {mend}")
    if "loss" not in spec.wants:
        raise ValueError(
            f"stage {low.model} returns an auxiliary loss, and evaluate without a loss function returns none; give it a loss function"
        )


def require_wanted(low: LoweredStage, form: StepForm, spec: StepSpec, replicated: bool) -> None:
    """Raise where a stage returns metrics, a state or outputs that the caller did not ask for or cannot get."""
    stage, metrics, state = low.model, low.metrics, low.state
    if (metrics.leaves or state.leaves) and "aux" not in spec.wants:
        got, mend = "metrics", ""
        if not metrics.leaves:
            got, mend = "a state", "; where a module only reads its buffers, stage_from_module(module, constants=True) has no state"
        raise ValueError(f"stage {stage} returns {got}; pass has_aux=True to get them{mend}")
    given = form.state.get(stage)
    if (state.leaves or (given is not None and given.leaves)) and (given is None or not _same_state(given, state)):
        raise ValueError(
            f"stage {stage} returns the state {state}, it was given {given or 'none'}; pass state={{{stage}: ...}} of that form"
        )
    if state.leaves and replicated:
        raise ValueError(
            f"stage {stage} returns a state, and this schedule runs replicas of it side by side, which would each have another; "
            "use a schedule with one chain, such as dualpipev, or stage_from_module(module, constants=True) "
            "where buffers are only read"
        )
    for path, leaf in zip(low.outputs.paths, low.outputs.leaves, strict=True):
        if form.rows is not None and (not leaf.shape or leaf.shape[0] != form.rows):
            raise ValueError(
                f"the output{path} of stage {stage} is {leaf}, which has no axis of {form.rows} rows to join to "
                f"those of the whole batch; give the inputs as ppfunc.microbatch(inputs, m), to get the outputs of each microbatch"
            )


def _same_state(given: Signature, state: Signature) -> bool:
    """Whether a state has the form of the one before; plain tensors stand for parts that lie as those before."""
    laid = all(new.layout in (None, old.layout) for old, new in zip(given.leaves, state.leaves, strict=False))
    return laid and given.without_grad().parts == state.without_grad().parts

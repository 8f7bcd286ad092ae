"""Refuse instructions and options that a step would not carry out; warn of stages that do not train."""

from collections.abc import Iterable

from ppfunc.schedule import Op, Schedule
from ppfunc.stage import Signature
from ppfunc.stage.errors import warn
from ppfunc.stage.layout import Boundary, same_placement
from ppfunc.stage.signature import leaf_names

from ..call.forms import StepForm
from .lowered import BATCH, LoweredStage, StepSpec


def require_honoured(schedule: Schedule, spec: StepSpec) -> None:
    """Raise ValueError for an instruction that a step would not carry out."""
    mend = "take ppfunc.schedule.remove_tail(schedule), and do it in your own code"
    refused = {
        Op.STEP: f"a step returns gradients and runs no optimizer; {mend}",
        Op.REDUCE_GRAD: f"there are no data parallel ranks to sum over; {mend}",
        Op.UNSHARD: "parameters are given whole; leave it out of the schedule",
        Op.RESHARD: "parameters are given whole; leave it out of the schedule",
    }
    if spec.updates is not None:
        del refused[Op.STEP], refused[Op.REDUCE_GRAD]
        if spec.updates.sharded:
            del refused[Op.UNSHARD], refused[Op.RESHARD]
    if not schedule.replicas and not spec.tied:
        refused[Op.REDUCE_TIED] = (
            f"no stage of this schedule has replicas, and no tied parameters are declared; {mend}"
        )
    for op in (op for op in refused if op in schedule.ops):
        rank, position, instruction = next(
            (r, n, i)
            for r, program in enumerate(schedule.programs)
            for n, step in enumerate(program)
            for i in step
            if i.op is op
        )
        raise ValueError(
            f"the schedule {schedule.name!r} has {instruction} (rank {rank}, step {position}), which nothing"
            f" would honour: {refused[op]}"
        )


def require_same_rows(form: StepForm, microbatches: int) -> None:
    """Raise ValueError for targets or extras with other rows than the inputs: a loss might broadcast."""
    for name, tree in form.trees.items():
        if form.rows and tree.rows and tree.rows != form.rows:  # 0 of a batch without leaves
            raise ValueError(
                f"{name}: got {tree.rows * microbatches} rows in axis 0, the inputs have"
                f" {form.rows * microbatches}; expected the same rows, or ppfunc.microbatch({name},"
                f" {microbatches}) where this is meant"
            )


def require_layouts(
    model: int, boundary: Boundary, params: Signature, received: Iterable[tuple[int, Signature]]
) -> None:
    """Raise ValueError for DTensors whose layout differs from the one that the stage declares."""
    for name, leaf in zip(leaf_names(params), params.leaves, strict=True):
        if name in boundary.params and leaf.layout != boundary.params[name]:
            raise ValueError(
                f"params[{model}] {name!r}: got {leaf}, the stage was made for a DTensor"
                f" {boundary.params[name]}; give the parameters that pp.parallelize returned, or new values"
                " of their placements"
            )
    for n, (source, signature) in enumerate(received):
        if source == BATCH and boundary.inputs is None:
            continue  # a plain function takes the parts as they are
        wanted = signature.local.laid_out(
            boundary.mesh, boundary.inputs if n == 0 else None, f"the input of stage {model}"
        )
        for path, got, want in zip(signature.paths, signature.leaves, wanted.leaves, strict=True):
            if not same_placement(got.layout, want.layout):
                giver = "the batch" if source == BATCH else f"stage {source}"
                raise ValueError(
                    f"x{path}: {giver} gives {got}, and stage {model} declares"
                    f" {want.layout or 'none that is cut'}; declare the same at both ends:"
                    " pp.parallelize(..., inputs=, outputs=), or pp.with_layouts"
                )


def require_declared_frozen(low: LoweredStage, spec: StepSpec) -> None:
    """Raise ValueError for an update of parameters that a module within a user's function has frozen."""
    if spec.frozen is not None and spec.updates is not None and low.outline.undeclared:
        names = ", ".join(map(repr, low.outline.undeclared[:5]))
        raise ValueError(
            f"stages[{low.model_stage}]: it calls the function of a module that has frozen {names}, which the"
            " trainer does not know of, so that weight decay would change it; say"
            f" trainable={{{low.model_stage}: mask}}, False for what is frozen, or make the function with"
            " functools.wraps(that function)"
        )


def require_loss(low: LoweredStage, loss: Signature, spec: StepSpec) -> None:
    """Raise ValueError for a loss of another form than wanted, or one that the caller did not ask for."""
    if low.call.function.loss_fn is None and not loss.leaves:
        return
    got, shape = ", ".join(map(str, loss.leaves)) or "nothing", spec.loss_shape
    if len(loss.leaves) != 1 or loss.leaves[0].shape != shape or not loss.leaves[0].dtype.is_floating_point:
        wanted = f"floating tensor of shape {list(shape)}, the loss_shape" if shape else "floating scalar"
        mend = "return one of that shape, or pass another loss_shape" if shape else "take its mean or sum"
        if not shape and len(loss.leaves) == 1 and len(loss.leaves[0].shape) == 1:
            mend += f"; where it is that of an ensemble, pass loss_shape={loss.leaves[0].shape}"
        raise ValueError(f"the loss of stage {low.model_stage} must be a {wanted}, got {got}; {mend}")
    if "loss" not in spec.wants:
        raise ValueError(
            f"stage {low.model_stage} returns an auxiliary loss, and evaluate without a loss function returns"
            " none; give it a loss function"
        )


def require_wanted(low: LoweredStage, form: StepForm, spec: StepSpec, replicated: bool) -> None:
    """Raise ValueError for metrics, a state or outputs that the caller cannot get or did not ask for."""
    stage, metrics, state = low.model_stage, low.metrics, low.state
    if low.aux.leaves and "aux" not in spec.wants:
        raise ValueError(
            f"loss_fn: it returns a loss and {low.aux}; pass has_aux=True to get both, or return the loss"
            " alone"
        )
    if (metrics.leaves or state.leaves) and "aux" not in spec.wants:
        got, mend = "metrics", ""
        if not metrics.leaves:
            got = "a state"
            mend = (
                "; where a module only reads its buffers, stage_from_module(module, constants=True) has no"
                " state"
            )
        raise ValueError(f"stage {stage} returns {got}; pass has_aux=True to get them{mend}")
    before = form.state.get(stage)
    if (state.leaves or (before is not None and before.leaves)) and (
        before is None or not _same_state(before, state)
    ):
        raise ValueError(
            f"stage {stage} returns the state {state}, it was given {before or 'none'}; pass state={{{stage}:"
            " ...} of that form"
        )
    if state.leaves and replicated:
        raise ValueError(
            f"stage {stage} returns a state, and this schedule runs replicas of it side by side, which would"
            " each have another; use a schedule with one chain, such as dualpipev, or"
            " stage_from_module(module, constants=True) where buffers are only read"
        )
    for path, leaf in zip(low.outputs.paths, low.outputs.leaves, strict=True):
        if form.rows is not None and (not leaf.shape or leaf.shape[0] != form.rows):
            raise ValueError(
                f"the output{path} of stage {stage} is {leaf}, which has no axis of {form.rows} rows to join"
                " to those of the whole batch; give the inputs as ppfunc.microbatch(inputs, m), to get the"
                " outputs of each microbatch"
            )


def _same_state(before: Signature, state: Signature) -> bool:
    """Return whether a state has the form of the one before; a plain tensor may stand for a local one."""
    laid = all(
        new.layout in (None, old.layout) for old, new in zip(before.leaves, state.leaves, strict=False)
    )
    return laid and before.without_grad().local == state.without_grad().local


def warn_of_detached(low: LoweredStage) -> None:
    """Warn of a stage whose loss or output passes no gradient on, so that it does not train."""
    trained = any(leaf.grad and n not in low.call.function.frozen for n, leaf in enumerate(low.params.leaves))
    passes = (low.loss is not None and low.loss.leaves[0].grad) or any(edge.carrying for edge in low.sinks)
    if passes or not (trained or any(edge.carrying for edge in low.sources)):
        return
    warn(
        f"stage {low.model_stage}: its {'output' if low.sinks else 'loss'} passes no gradient on, so that"
        " neither its parameters nor the stages before it train; it was made by detach(), under no_grad() or"
        " of integers: remove that; where it is meant, call requires_grad_(False) on the module"
    )

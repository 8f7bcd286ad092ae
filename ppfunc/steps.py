"""Make a pipeline an ordinary function from parameters and a batch to a loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

import torch

from ppfunc import schedule as schedules  # whose passes and proofs load with the first step function
from ppfunc._checks import naming_arguments, require_one_of, require_type, shown
from ppfunc.runtime import InProcess, StepResult, StepSpec, Transport, interleaved, two_streams
from ppfunc.runtime.lowering.lower import Overlapped, Pipeline, require_carry
from ppfunc.runtime.lowering.stage_programs import StagePrograms
from ppfunc.runtime.lowering.ties import Tied, TiedPlaces, read_tied
from ppfunc.runtime.ports.protocols import without_method
from ppfunc.runtime.values.arguments import LossWeights, RawArguments, read_call, read_loss_weights
from ppfunc.schedule import Op, Schedule
from ppfunc.schedule.errors import require_schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, ModuleStage, Stage, graph, outline
from ppfunc.stage.frozen import FrozenLeaves, Trainable
from ppfunc.vocabulary import VocabularyParallel

if TYPE_CHECKING:
    from ppfunc.runtime import StepFunction

P = ParamSpec("P")
R = TypeVar("R")

_OnNonfinite = Literal["raise", "ignore"]

Stages = Sequence[Stage | None] | Split | VocabularyParallel
"""One function per stage of the model, None for those of other processes; or a model that was split, or whose
output layer is in parts, with its skips and ties.
"""


@contextmanager
def reporting_mistakes(transport: Transport | None) -> Iterator[None]:
    """Fail the next step of the peers if the body raises. The transport cannot be used afterwards.

    Raises:
        TypeError: not a transport, or one that lacks a method.
    """
    if transport is not None and (isinstance(transport, type) or not hasattr(transport, "local_ranks")):
        raise TypeError(
            f"transport: got {shown(transport)}, expected one such as ppfunc.InProcess() or ppfunc.P2P(group)"
        )
    if forgotten := [] if isinstance(transport, InProcess | None) else without_method(transport):
        raise TypeError(
            f"transport: got {shown(transport)}, which lacks {', '.join(forgotten)} of a Transport;"
            " define them (the defaults are right for the ranks of one process, ppfunc.InProcess)"
        )
    with nullcontext() if transport is None else transport.making_step():
        yield


def reports_mistakes(make: Callable[P, R]) -> Callable[P, R]:
    """Fail the next step of the peers if a call of ``make``, which takes a transport, raises."""
    n = list(signature(make).parameters).index("transport")  # not bound: that would raise for wrong names
    named = naming_arguments(make)

    @wraps(make)
    def making(*args: P.args, **kwargs: P.kwargs) -> R:
        transport: Any = kwargs.get("transport", args[n] if len(args) > n else None)
        with reporting_mistakes(transport):
            return named(*args, **kwargs)

    return making


@reports_mistakes
def value_and_grad(
    stages: Stages,
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine | Sequence[Engine] = graph,
    loss_weights: LossWeights = None,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    return_losses: bool = False,
    return_outputs: bool = False,
    return_carry: bool = False,
    per_microbatch: bool = False,
    loss_shape: tuple[int, ...] = (),
    overlapped: Overlapped | None = None,
    tied: TiedPlaces = None,
    trainable: Trainable = None,
    sum_dtype: torch.dtype | None = None,
    on_nonfinite: _OnNonfinite = "ignore",
) -> StepFunction[..., Any]:
    """Make a function that runs one training step of a pipeline:
    ``step(params, inputs, targets) -> (loss, grads)``.

    Equivalent to::

        def loss(params):
            total = 0
            for x, target, weight in zip(inputs, targets, loss_weights):    # of every microbatch
                for stage, fn in enumerate(stages):
                    x = fn(params[stage], x)
                total = total + weight * loss_fn(x, target)
            return total
        loss(params), torch.func.grad(loss)(params)

    Args:
        stages: pure functions ``fn(params, x) -> y``, one per stage of the model, of trees of tensors. None
            for stages that this process does not run. Or a :class:`ppfunc.Split`, or a model of
            :func:`ppfunc.vocabulary_parallel`, which bring their skip connections and tied parameters. Under
            a schedule of a graph, ``x`` is the tuple of the outputs of several stages. A stage takes extras
            and a state as further arguments, in this order, if the step is given them. It returns ``y``, or a
            :class:`ppfunc.Output` with a loss, metrics, a new state or skip connections of its own. Under a
            schedule of slices it is ``fn(params, x, carry) -> Output(y, carry=tree)``, with extras and state
            behind the carry: it gets that of the slice before, None in the first slice of a sequence. A carry
            is a tree of tensors; a position is an int64 tensor.
        loss_fn: ``loss(y, target) -> scalar``, of one microbatch; runs as part of the last stage. With
            ``has_aux`` it may return ``(scalar, aux)``, where ``aux`` is a tree of tensors, such as counts of
            right answers.
        schedule: the program of every rank. It is proved before anything runs. Communication is placed if it
            has none. An instruction that a step would not carry out, such as ``STEP``, is refused.
        transport: carries the messages: ``InProcess()`` (the default) or ``P2P(group)``.
        engine: differentiates a stage; or a list of engines, one per stage: the last differentiates
            the loss too. ``[graph, graph, functional]`` serves a loss such as ``ctc_loss``, whose shapes
            depend on values.
        loss_weights: factor of the loss of every microbatch, [m], as it is: their sum need not be 1, and
            divides nothing (a trainer divides by it). ``1/m`` each by default, with a warning where
            microbatches have unlike numbers of rows. A microbatch of weight 0 contributes nothing to loss and
            gradients, even if its numbers are not finite: only its forward runs, for metrics and states; of a
            slice before others with a weight the backward runs, for its carry. Weights on a device are not
            read by the host: such a microbatch runs, its loss is left out, and 0 times its gradients is
            added.
        argnums: arguments to differentiate the loss in: 0 for the parameters, 1 for the inputs, or a tuple of
            both, in either order.
        has_aux: whether to return ``aux`` of the loss function, metrics and state too.
        return_losses: whether to return the loss of every microbatch too.
        return_outputs: whether to return the outputs of the last stage too, as :func:`evaluate` does.
        return_carry: whether to return the last carries of a schedule of slices too, and the gradients of the
            first.
        per_microbatch: whether to keep the gradients of the microbatches apart instead of adding them up:
            every gradient of a parameter gets a leading axis ``m``.
        loss_shape: shape of the loss of a microbatch, if it is not a scalar, such as the losses of an
            ensemble. All of them are returned, and their sum is differentiated.
        overlapped: runs the forward and the backward of an ``OVERLAP_F_B`` as one; by default they run in
            turn. ``interleaved()`` makes them one program. ``two_streams()`` runs them side by side on CUDA.
            A function of your own, ``overlapped(forward, its arguments, backward, its arguments)``, returns
            ``(forward(*its arguments), backward(*its arguments))``. Both are pure functions on flat tuples,
            those of :class:`ppfunc.stage.FlatProgram`.
        tied: ``{name: [(stage, name of a leaf), ...]}``: leaves of several stages that are one parameter,
            such as an embedding and the head: ``{"embedding": [(0, "wte.weight"), (3, "lm_head.weight")]}``.
            A leaf is named by the keys on the way to it, joined by dots. The places have equal values: every
            step checks it. All places get the same gradient, the sum over them.
        trainable: a mask of the parameters to train: ``{stage: tree of booleans}`` in the structure of the
            parameters of each stage, or of whole branches, or functions
            ``mask(params of a stage) -> tree of booleans``; or one such function for all stages. A parameter
            whose mask is False is frozen: its gradient is zeros. So is one that the module of a stage has
            frozen (``requires_grad_(False)``). Both are read once, here: make another step function for
            another set. A step raises ``ValueError`` if a module has changed ``requires_grad`` since. Make a
            function of yours around that of a module with ``functools.wraps``, or mask its parameters.
        sum_dtype: dtype in which the gradients of narrower parameters, such as bfloat16, are added up over
            microbatches and returned: ``torch.float32`` or ``torch.float64``. That of each parameter by
            default.
        on_nonfinite: ``"raise"`` raises on every rank if the loss or a gradient is not finite, and names the
            rank, stage, microbatch and instruction that was first. It reads a number from the device at the
            end of every step, and runs a step that fails a second time, to find that place.

    Returns:
        ``step(params, inputs, targets=None, *, loss_weights=None, seed=None, extras=None, state=None,
        carry=None)``, which returns ``(loss, grads)``; if more is asked for, by ``has_aux``,
        ``return_losses``, ``return_outputs``, ``return_carry`` or a tuple of ``argnums``, a
        :class:`ppfunc.StepResult` with ``loss``, ``grads``, ``input_grads``, ``aux``, ``losses``,
        ``outputs``, ``carry`` and ``carry_grads``.

        * ``params``: ``{stage: tree}``, the stages of the model that this process runs (all of them in
          process); ``schedule.model_stages_of(rank)`` says which. The leaves of this and all other trees are
          tensors or DTensors. Of a DTensor, a stage is given this rank's part.
        * ``inputs``, ``targets``: a tree, every leaf of which is cut along axis 0 into the schedule's
          microbatches, as views; or :class:`ppfunc.Microbatches`, which may differ in shape. A part without
          the batch's rows, which every microbatch takes whole, is marked, :func:`ppfunc.replicated`. A
          ``BlockMask`` is cut as torch cuts it. Numbers, texts and flags may be among them; a program is
          traced for each value. They may stay on the host: each microbatch is copied to the device of its
          stage at its ``LOAD``, or before its forward if the schedule has no ``LOAD``. A process that does
          not run the last stage may pass None for the targets; one that does not run the first, None for the
          inputs. All processes of a pipeline take the same batch. They compare its values in the first step
          and after a failure, and in no other: a trainer does, every ``checksum_every`` steps.
        * ``loss_weights``: those of this step, if they differ from step to step.
        * ``seed``: ``(seed, step)``, two integers, for stages that draw random numbers; the same on every
          rank.
        * ``extras``: ``{stage: batch}``, further inputs of stages of this process, as the inputs are given.
        * ``state``: ``{stage: tree}``; a stage's microbatches pass it on from one to the next, in the order
          of the schedule. Nothing is differentiated with respect to extras and state.
        * ``carry``: ``{stage: Microbatches}``, a tree for each sequence, that its first slice gets. Inputs
          and targets of slices are Microbatches: ``ppfunc.microbatch(batch, sequences, slices=k)`` cuts them.

        The loss, a scalar, is returned on every rank. Losses in float16 or bfloat16 are summed and returned
        in float32. ``grads`` has the structure of ``params``, and zeros for parameters on which no loss
        depends, and for integers and flags. It belongs to the caller. The gradient of a DTensor is a DTensor
        of the same placements. Gradients of the inputs have the form of the inputs, on ranks of first stages,
        and are None elsewhere. If several flows begin in different processes, each has the rows of its own
        flows.
        ``losses``, [m], is on every rank: the loss of each microbatch in their order, not weighted. Outputs
        are on the ranks of last stages. So is ``aux.loss``, the tree ``aux`` of the loss function;
        ``aux.metrics`` is ``{stage: tree}``. Both have a leading axis of the microbatches that this process
        ran. ``aux.state`` is ``{stage: tree}``. None of these tensors carries a gradient. Loss and gradients
        have the same bits, whatever is asked for beside them.

        A program is traced once for every form (structure, shapes, strides, dtypes, devices) of the
        arguments, and kept: ``step.cache_info()``, ``step.cache_clear()``. ``step.lower(...)`` shows
        programs, messages, memory and cost without running.

        What a stage or the loss reads beside its arguments counts as it is when a step begins, under every
        engine: attributes, closures, globals, buffers, hooks, modes and autocast; where one has changed, the
        program is traced anew, and ranks that change one unlike each other raise ``AgreementError``. A tensor
        that requires a gradient is refused there, and so are a stage that keeps tensors or counts elsewhere,
        iterators, and code that looks up globals by texts. What an extension in C keeps is not seen, nor
        attributes of objects of torch that are no modules, events, locals of threads, the environment, files
        and clocks, arrays of more than 64 KiB, nor globals of installed packages that are neither functions
        nor numbers, texts and flags, nor a module of Python whose name the code puts together.

        A step raises ``PipelineError`` if an instruction fails, on this or another rank, ``AgreementError``
        if the ranks were given different programs, ``StageError`` for a stage that the engine cannot serve,
        and ``ValueError`` or ``TypeError`` for arguments that do not fit. A step that fails returns nothing
        and changes nothing, on every rank.

    Raises:
        ScheduleError: the schedule is wrong.
        ValueError: the number of stages, ranks or weights does not fit the schedule, or the schedule has an
            instruction that a step would not carry out.

    >>> from ppfunc import one_f_one_b
    >>> stages, schedule = [lambda w, x: w * x] * 2, one_f_one_b(ranks=2, microbatches=2)
    >>> step = value_and_grad(stages, lambda y, t: ((y - t) ** 2).sum(), schedule)
    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    >>> loss, grads = step(params, torch.tensor([1.0, 2.0]), torch.tensor([5.0, 10.0]))
    >>> loss, grads[0], grads[1]
    (tensor(2.5000), tensor(15.), tensor(10.))
    """
    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied)
    wanted = argnums if isinstance(argnums, tuple) else (argnums,)
    if wanted not in ((0,), (1,), (0, 1), (1, 0)):
        raise ValueError(
            f"argnums: got {argnums!r}, expected 0 (parameters), 1 (inputs), or a tuple of both, each once"
        )
    _require_sums(wanted, per_microbatch, sum_dtype)
    require_one_of("on_nonfinite", on_nonfinite, get_args(_OnNonfinite))
    more = {"aux": has_aux, "losses": return_losses, "outputs": return_outputs}
    more |= {"carry": return_carry, "carry_grads": return_carry}
    wants = ("loss", *("input_grads" if n else "grads" for n in wanted), *_chosen(more))
    spec = StepSpec(
        "value_and_grad", wants, per_microbatch, loss_shape, overlapped, ties, sum_dtype,
        finite=on_nonfinite == "raise", frozen=FrozenLeaves(stages, trainable),
    )  # fmt: skip

    return make_step(
        stages, loss_fn, schedule, transport, engine, spec, read_call, loss_weights=loss_weights,
    )  # fmt: skip


@reports_mistakes
def evaluate(
    stages: Stages,
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    return_outputs: bool = False,
    return_losses: bool = False,
    return_carry: bool = False,
    engine: Engine | Sequence[Engine] = graph,
    loss_weights: LossWeights = None,
    has_aux: bool = False,
    loss_shape: tuple[int, ...] = (),
    tied: TiedPlaces = None,
) -> StepFunction[..., Any]:
    """Make a function that runs the stages forward only: ``step(params, inputs, targets) -> loss``.

    Args:
        stages, transport, loss_weights, has_aux, return_losses, loss_shape, tied: see
            :func:`value_and_grad`.
        loss_fn: see :func:`value_and_grad`; None to compute outputs or metrics only.
        schedule: any schedule; the backwards of one for training are left out.
        return_outputs: return the outputs of the last stage.
        return_carry: return the last carries of a schedule of slices.
        engine: makes the forward of a stage, the last with the loss: the same bits as in a training step with
            this engine.

    Returns:
        ``step(params, inputs, targets=None, *, loss_weights=None, seed=None, extras=None, state=None,
        carry=None)``. It returns the loss, the outputs or ``aux`` if only one of them is asked for, else a
        :class:`ppfunc.StepResult`. The loss is on every rank, the outputs are on the rank of the last stage,
        and None elsewhere. They are one tree, joined along axis 0, or :class:`ppfunc.Microbatches` if the
        inputs are. If two flows end in different processes, each has the rows of its own flow, in their
        order.

    Raises:
        As :func:`value_and_grad`.

    >>> from ppfunc import gpipe
    >>> step = evaluate([lambda w, x: w * x] * 2, None, gpipe(ranks=2, microbatches=2), return_outputs=True)
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(3.0)}, torch.tensor([1.0, 2.0]))
    tensor([ 6., 12.])
    """
    stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied, loss_wanted=False)
    if loss_fn is None and not return_outputs and not has_aux and not return_carry:
        raise ValueError(
            "evaluate got neither a loss function nor return_outputs=True, has_aux or return_carry; it would"
            " return nothing"
        )
    for option, given in (("loss_shape", loss_shape), ("return_losses", return_losses)):
        if loss_fn is None and given:
            raise ValueError(f"{option}: got {given}, and no loss function; leave it out")
    results = {
        "loss": loss_fn is not None,
        "outputs": return_outputs,
        "aux": has_aux,
        "losses": return_losses,
        "carry": return_carry,
    }
    spec = StepSpec("evaluate", _chosen(results), loss_shape=loss_shape, tied=ties)
    return make_step(
        stages, loss_fn, schedule, transport, engine, spec, read_call, loss_weights=loss_weights,
        training=False,
    )  # fmt: skip


def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the results of a step function or a stage as tensors on the device meta, and run nothing.

    Args:
        fn: step function of :func:`value_and_grad` or a sibling, or a stage ``fn(params, x, *extras)``.
        args, kwargs: arguments of a call; tensors may be on the device meta. Where ranks are processes, every
            rank calls it for a step.

    Raises:
        StageError: a stage fails, or needs values.

    >>> from ppfunc import gpipe
    >>> w, x = torch.zeros(3, 5), torch.zeros(4, 3)
    >>> eval_shape(lambda w, x: x @ w, w, x).shape
    torch.Size([4, 5])
    >>> step = value_and_grad([lambda w, x: x @ w], lambda y, t: y.mean(), gpipe(ranks=1, microbatches=2))
    >>> loss, grads = eval_shape(step, {0: w}, x, x)
    >>> grads[0]
    tensor(..., device='meta', size=(3, 5))
    """
    if hasattr(fn, "eval_shape"):
        return fn.eval_shape(*args, **kwargs)
    require_type("fn", fn, Callable, "a step function, such as value_and_grad(stages, ...), or a stage")
    y = outline(fn, args).y
    return y.wrap(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in y.leaves)


def _require_sums(wanted: tuple[int, ...], per_microbatch: bool, sum_dtype: Any) -> None:
    """Raise for options on the gradients of parameters in a step that does not compute them."""
    if per_microbatch and 0 not in wanted:
        raise ValueError(
            "per_microbatch=True keeps gradients of parameters apart, and argnums asks for none; leave it"
            " out, or take argnums=(0, 1)"
        )
    if sum_dtype not in (None, torch.float32, torch.float64):
        raise TypeError(f"sum_dtype: got {shown(sum_dtype)}, expected torch.float32 or torch.float64")
    if sum_dtype is not None and (per_microbatch or 0 not in wanted):
        raise ValueError(
            "sum_dtype applies to sums of parameter gradients, which this call does not compute; leave it out"
        )


def _chosen(results: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(name for name, wanted in results.items() if wanted)


def unpacked(
    stages: Stages,
    loss_fn: Loss | None,
    schedule: Schedule,
    tied: TiedPlaces,
    prefixes: Sequence[str] = ("",),
    *,
    loss_wanted: bool = True,
) -> tuple[Sequence[Stage | None], Schedule, Tied]:
    """Read stages, loss, schedule and ties: return functions, the schedule with skips, and tied places.

    Args:
        prefixes: see :func:`read_tied`.

    Raises:
        TypeError, ValueError: not stages, not a schedule, not a loss function, or not places of ties.
    """
    if isinstance(loss_fn, Schedule):
        raise TypeError(
            f"loss_fn: got {loss_fn!r}, a schedule, and schedule: got {shown(schedule)}; the order is stages,"
            " loss_fn, schedule"
        )
    require_schedule(schedule)
    is_class = isinstance(loss_fn, type)
    if (loss_fn is None and loss_wanted) or (loss_fn is not None and (is_class or not callable(loss_fn))):
        mend = "; the order is stages, loss_fn, schedule"
        if isinstance(loss_fn, type):
            mend = f"; make one: {loss_fn.__name__}()"
        if loss_fn is None or isinstance(loss_fn, str):
            mend = ", such as torch.nn.functional.mse_loss; pp.evaluate does without"
        raise TypeError(f"loss_fn: got {shown(loss_fn)}, expected a function loss(y, target) -> scalar{mend}")
    if isinstance(stages, VocabularyParallel):
        stages.require_place(schedule)
    elif not isinstance(stages, Split):
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise TypeError(
                f"stages: got {shown(stages)}, expected a list of functions, one per stage, or a model that"
                " was split, ppfunc.split(model, args, at=...)"
            )
        _require_count(stages, schedule)
        return stages, schedule, read_tied(tied, schedule, prefixes)
    else:
        heads = {schedule.model_stages[stage] for stage in schedule.heads}
        if bool(stages.encoder) != (len(stages.stages) - 1 in heads - {0}):
            what = f"the encoder {stages.encoder}" if stages.encoder else "no encoder"
            raise ValueError(
                f"stages: got a split with {what} and the schedule {schedule.name!r}; pp.spread(schedule) has"
                " a place for an encoder, which pp.split(model, ..., encoder=name) makes"
            )
        number = schedule.model_stages
        if others := {(number[a], number[b]) for a, b in schedule.skips}.difference(stages.skips):
            raise ValueError(
                f"stages: got a split, and the schedule {schedule.name!r} with the skip connection"
                f" {min(others)}, which its stages do not have; take a schedule without, or write the stages,"
                " as examples/generate.py does"
            )
    _require_count(stages.stages, schedule)
    schedule = schedules.with_skips(schedule, stages.skips) if stages.skips else schedule
    return stages.stages, schedule, read_tied(tied, schedule, prefixes, stages.tied)


def make_step(
    stages: Sequence[Stage | None],
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None,
    engine: Engine | Sequence[Engine],
    spec: StepSpec,
    read: Callable[..., RawArguments | list[RawArguments]],
    returned: Callable[[StepResult], Any] | None = None,
    loss_weights: LossWeights = None,
    *,
    training: bool = True,
    programs: StagePrograms | None = None,
) -> StepFunction[..., Any]:
    """Make the step function of :func:`value_and_grad`, :func:`evaluate`, the transforms and the trainer.

    Args:
        read: ``(*arguments of a call) -> RawArguments``, or a list of those of several steps.
        returned: ``(results) -> return value of a call``; by default the results that the spec wants.
        loss_weights: weights of the microbatches in a call that gives no weights, [m].
        training: the schedule has to have backwards.
        programs: programs of a step function with the same stages, to be shared.

    Raises:
        ScheduleError, TypeError, ValueError: as :func:`value_and_grad`.
    """
    _require(stages, schedule, engine, spec)
    if training and schedule.forward_only:
        raise ValueError(
            f"the schedule {schedule.name!r} has no backward; use ppfunc.evaluate, or a schedule for training"
        )
    if loss_weights is not None and loss_fn is None:
        raise ValueError(
            "loss_weights needs a loss function, whose losses they weigh; give loss_fn, or leave them out"
        )
    if training and spec.frozen is None:
        spec = spec._replace(frozen=FrozenLeaves(stages, None))
    if spec.overlapped is not None and Op.OVERLAP_F_B not in schedule.ops:
        raise ValueError(
            f"overlapped: got a function, and the schedule {schedule.name!r} overlaps nothing; use dualpipe"
            " or dualpipev"
        )
    require_carry(schedule, spec)
    proved = prove(schedule if training or schedule.forward_only else schedules.forward_only(schedule), spec)
    transport = InProcess() if transport is None else transport
    compared = bool(proved.replicas) or transport.has_other_pipelines
    programs = programs or StagePrograms(engine, compared)
    ranks = transport.local_ranks(proved.ranks)
    order: Iterable[tuple[int, int]] = ((ranks[0], n) for n in range(len(proved.programs[ranks[0]])))
    if len(ranks) > 1:
        from ppfunc.schedule.passes.running import linearize

        order = (place for place in linearize(proved) if place[0] in ranks)
    weights = read_loss_weights(loss_weights, proved.microbatches)
    pipeline = Pipeline(
        list(stages), loss_fn, proved, transport, spec, programs, ranks,
        tuple(order), transport.register_step(), weights,
    )  # fmt: skip
    from ppfunc.runtime import StepFunction  # here, because with it comes all that traces and runs

    return StepFunction(pipeline, read, returned or partial(StepResult.asked_for, wants=spec.wants))


def prove(schedule: Schedule, spec: StepSpec) -> Schedule:
    """Complete a schedule as it runs, with communication and the sums over shared parameters, and prove it.

    Raises:
        ScheduleError: it is wrong.
        ValueError: it has an instruction that nothing would honour.
    """
    _require_honoured(schedule, spec)
    if not schedule.has_messages:
        # A receive is posted one compute early: its message crosses while the rank is busy.
        schedule = schedules.place_communication(schedule, lookahead=1)
    if spec.shares(schedule) and not schedule.forward_only and Op.REDUCE_TIED not in schedule.ops:
        schedule = schedules.append_tail(schedule, tied=True, reduce_grad=False, step=False)
    schedules.check(schedule)
    return schedule


def _require_honoured(schedule: Schedule, spec: StepSpec) -> None:
    mend = "take ppfunc.schedule.remove_tail(schedule), and do it in your own code"
    refused = {
        Op.UNSHARD: "parameters are given whole; take ppfunc.schedule.compute_only(schedule)",
        Op.RESHARD: "parameters are given whole; take ppfunc.schedule.compute_only(schedule)",
        Op.STEP: f"a step returns gradients and runs no optimizer; {mend}",
        Op.REDUCE_GRAD: f"there are no data parallel ranks to sum over; {mend}",
    }
    if spec.updates:
        del refused[Op.STEP], refused[Op.REDUCE_GRAD]
    if spec.sharded:
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


def map_stages(stages: Sequence[Stage | None], transform: Callable[[Stage], Stage]) -> list[Stage | None]:
    """Transform the stages; equal stages stay equal, so that they share their programs."""
    transformed = {id(fn): transform(fn) for fn in stages if callable(fn)}
    return [transformed.get(id(fn), fn) for fn in stages]


def _require(stages: Sequence[Any], schedule: Schedule, engine: Any, spec: StepSpec) -> None:
    for stage, fn in enumerate(stages):
        module = isinstance(fn, torch.nn.Module | ModuleStage)
        if module or not (fn is None or callable(fn)):
            mend = "; take ppfunc.stage_from_module(module).fn, and its params" if module else ""
            raise TypeError(
                f"stages[{stage}]: got {shown(fn)}, expected a function fn(params, x) -> y, or None for a"
                f" stage of another process{mend}"
            )
    listed = isinstance(engine, list | tuple)
    if listed and len(engine) != len(stages):
        raise ValueError(f"engine: got {len(engine)} engines, expected one, or {len(stages)}, one per stage")
    for name, one in [(f"engine[{n}]", e) for n, e in enumerate(engine)] if listed else [("engine", engine)]:
        if not callable(one) or one is torch.compile:
            raise TypeError(
                f"{name}: got {shown(one)}, expected ppfunc.engines.graph, functional or eager; write"
                " engine=ppfunc.engines.graph(compile=True) to compile by inductor"
            )
        if getattr(one, "dynamic", False) and not all(getattr(fn, "sizes_vary", True) for fn in stages):
            raise ValueError(
                f"{name}: got graph(dynamic=True) for stages of a model that was split, whose code is made"
                " anew for each size; leave out dynamic=True"
            )
    if not isinstance(spec.loss_shape, tuple) or not all(isinstance(n, int) for n in spec.loss_shape):
        raise TypeError(
            f"loss_shape: got {shown(spec.loss_shape)}, expected a tuple of integers, such as (3,) for an"
            " ensemble of three"
        )
    overlapped: Any = spec.overlapped
    if overlapped in (interleaved, two_streams) or not (overlapped is None or callable(overlapped)):
        raise TypeError(
            f"overlapped: got {shown(overlapped)}, expected a function, such as ppfunc.interleaved() or"
            " ppfunc.two_streams()"
        )


def _require_count(stages: Sequence[Any], schedule: Schedule) -> None:
    expected = len(set(schedule.model_stages))
    if len(stages) != expected:
        parts = f"{expected // schedule.ranks} stages on each of " if expected > schedule.ranks else ""
        raise ValueError(
            f"stages: got {len(stages)}, the schedule {schedule.name!r} has {expected}"
            f" ({parts}{schedule.ranks} ranks); give one function for each (or pp.split(model, ...,"
            f" at={expected})), or build another schedule"
        )

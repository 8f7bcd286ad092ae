"""Make step functions: read what the caller gives, prove the schedule, and tell the peers of a mistake."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch

from ppfunc import schedule as schedules  # whose passes and proofs load with the first step function
from ppfunc._checks import naming_arguments, shown
from ppfunc.runtime import InProcess, StepFunction, StepResult, StepSpec, Transport, interleaved, two_streams
from ppfunc.runtime.lowering.lowered import Pipeline
from ppfunc.runtime.lowering.stage_programs import StagePrograms
from ppfunc.runtime.lowering.ties import Tied, TiedPlaces, read_tied
from ppfunc.runtime.ports.protocols import without_method
from ppfunc.runtime.values.arguments import LossWeights, RawArguments, read_loss_weights
from ppfunc.schedule import Op, Schedule
from ppfunc.schedule.errors import require_schedule
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, ModuleStage, Stage
from ppfunc.stage.frozen import FrozenLeaves

P = ParamSpec("P")
R = TypeVar("R")

Stages = Sequence[Stage | None] | Split
"""One function per stage of the model, None for those of other processes; or a model that was split, with its
skips and ties.
"""


@contextmanager
def reporting_mistakes(transport: Transport | None) -> Iterator[None]:
    """Fail the next step of the other ranks if the body raises. The transport cannot be used afterwards.

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
    """Fail the next step of the other ranks if a call of ``make``, which takes a transport, raises."""
    n = list(signature(make).parameters).index("transport")  # not bound: that would raise for wrong names
    named = naming_arguments(make)

    @wraps(make)
    def making(*args: P.args, **kwargs: P.kwargs) -> R:
        transport: Any = kwargs.get("transport", args[n] if len(args) > n else None)
        with reporting_mistakes(transport):
            return named(*args, **kwargs)

    return making


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
        mend = f"; make one: {loss_fn.__name__}()" if isinstance(loss_fn, type) else ""
        if loss_fn is None or isinstance(loss_fn, str):
            mend = ", such as torch.nn.functional.mse_loss; pp.evaluate does without"
        raise TypeError(f"loss_fn: got {shown(loss_fn)}, expected a function loss(y, target) -> scalar{mend}")
    if not isinstance(stages, Split):
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise TypeError(
                f"stages: got {shown(stages)}, expected a list of functions, one per stage, or a model that"
                " was split, ppfunc.split(model, args, at=...)"
            )
        _require_count(stages, schedule)
        return stages, schedule, read_tied(tied, schedule, prefixes)
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
        loss_weights: of a call that gives none of its own.
        training: the schedule has to have backwards.
        programs: those of a step function with the same stages, to be shared.

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
    """Transform the stages; equal ones stay equal, so that they share their programs."""
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
        if not callable(one):
            raise TypeError(f"{name}: got {shown(one)}, expected ppfunc.engines.graph, functional or eager")
        if one is torch.compile:
            raise TypeError(
                f"{name}: got torch.compile, which makes no gradients apart; write"
                " engine=ppfunc.engines.graph(compile=True), which compiles them by inductor"
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
    if overlapped in (interleaved, two_streams):
        raise TypeError(
            f"overlapped: got ppfunc.{overlapped.__name__} itself, expected what it returns:"
            f" ppfunc.{overlapped.__name__}()"
        )
    if overlapped is not None and not callable(overlapped):
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

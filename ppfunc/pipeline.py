"""The front door: a pipeline as an ordinary function from parameters and a batch to a loss and gradients."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ppfunc.runtime import InProcess, Session, Transport, interleaved, microbatch, two_streams
from ppfunc.runtime.arguments import Given, read_weights
from ppfunc.runtime.gradients import Stack, Sum
from ppfunc.runtime.results import Step
from ppfunc.runtime.serving import Loss, Server, Stage
from ppfunc.runtime.session import Work
from ppfunc.runtime.thunks import Overlapped
from ppfunc.schedule import Op, Schedule, check
from ppfunc.schedule.passes import (
    append_tail,
    forward_only,
    place_communication,
    remove_communication,
)
from ppfunc.stage import Engine, graph
from ppfunc.stage.module import ModuleStage

__all__ = ["evaluate", "microbatch", "value_and_grad", "with_skips"]


def value_and_grad(
    stages: Sequence[Stage],
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    per_microbatch: bool = False,
    loss_shape: tuple[int, ...] = (),
    overlapped: Overlapped | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """A function that runs one training step of a pipeline: ``step(params, inputs, targets) -> (loss, grads)``.

    Equivalent to::

        def loss(params):
            total = 0
            for x, target, weight in zip(inputs, targets, weights):
                for stage, fn in enumerate(stages):
                    x = fn(params[stage], x)
                total = total + weight * loss_fn(x, target)
            return total
        loss(params), torch.func.grad(loss)(params)

    Args:
        stages: one pure function ``fn(params, x) -> y`` per stage of the schedule; trees of tensors in and
            out. Where the schedule holds stages twice, the copies may be left out. A stage may take a side
            input and a state as further arguments, in this order, if the step is given them, and may return
            :class:`ppfunc.Output` to give a loss, metrics, a new state or skip connections of its own.
        loss_fn: ``loss(y, target) -> scalar``, of one microbatch; runs as part of the last stage.
        schedule: what every rank does. It is proved before anything runs; communication is placed
            where it has none.
        transport: carries the messages: ``InProcess()`` (the default) or ``P2P(group)``.
        engine: how a stage is differentiated.
        weights: weight of every microbatch in the loss, [m]; ``1/m`` each where none are given.
        argnums: what to differentiate: 0 the parameters, 1 the inputs, or a tuple of these.
        has_aux: whether to return metrics and state too.
        per_microbatch: whether to keep the gradients of the microbatches apart instead of adding
            them up: every gradient of a parameter gets a leading axis ``m``.
        loss_shape: shape of the loss, where it is not a scalar: several losses, such as those of an ensemble,
            all of which are returned, and the sum of which is differentiated.
        overlapped: runs the forward and the backward of an ``OVERLAP_F_B`` as one; in turn where none is given.
            ``interleaved()`` makes them one program, ``two_streams()`` runs them beside each other on CUDA; a
            function of your own ``overlapped(forward, its arguments, backward, its arguments)`` returns
            ``(forward(*its arguments), backward(*its arguments))``, both of them pure functions on flat
            tuples, those of :class:`ppfunc.stage.FlatProgram`.

    Returns:
        ``step(params, inputs, targets, *, weights=None, seed=None, side=None, state=None)``, which returns
        ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``.

        * ``params``: ``{stage: tree}``, the stages that this process holds (all of them in process).
        * ``inputs``, ``targets``: a tree, every leaf of which has a leading axis ``m``, or a list of
          ``m`` trees, which may differ in shape. A rank that does not hold the last stage may pass None
          for the targets; one that does not hold the first, and is not rank 0, None for the inputs.
        * ``weights``: those of this step, where they differ from step to step; needed where losses are.
        * ``seed``: ``(seed, step)``, two integers, for stages that draw random numbers; the same on every rank.
        * ``side``: ``{stage: batch}``, side inputs of stages of this process, as the inputs are given.
        * ``state``: ``{stage: tree}``; a stage's microbatches pass it on from one to the next, in the
          order of the schedule. Nothing is differentiated with respect to side inputs and state.

        A bidirectional schedule has copies of stages (``schedule.replicas``): they are given the same parameters
        under numbers of their own, and get the same gradients, the sum over both.

        The loss, a scalar, is returned on every rank. ``grads`` has the structure of ``params``, zeros
        where there is no dependence, and belongs to the caller; the gradients of the inputs have the form
        of the inputs, on ranks of first stages, None elsewhere; for a tuple of ``argnums`` there is a
        tuple of both. ``aux.metrics`` is ``{stage: tree}`` with a leading axis ``m``, ``aux.state``
        ``{stage: tree}``.

        It raises ``PipelineError`` where an instruction fails, on this or another rank,
        ``AgreementError`` where the ranks were given different programs, ``StageError`` for a stage
        that the engine cannot serve, and ``ValueError`` or ``TypeError`` for arguments that do not fit.
        A step that fails returns nothing and changes nothing.

    Raises:
        ScheduleError: the schedule is wrong.
        ValueError: the number of stages, ranks or weights does not fit the schedule.

    >>> from ppfunc import one_f_one_b
    >>> step = value_and_grad([lambda w, x: w * x] * 2, lambda y, t: (y - t) ** 2, one_f_one_b(ranks=2, microbatches=2))
    >>> params = {0: torch.tensor(2.0), 1: torch.tensor(3.0)}
    >>> loss, grads = step(params, torch.tensor([1.0, 2.0]), torch.tensor([5.0, 10.0]))
    >>> loss, grads[0], grads[1]
    (tensor(2.5000), tensor(15.), tensor(10.))
    """
    session = training_session(
        stages,
        loss_fn,
        schedule,
        transport,
        engine=engine,
        argnums=argnums,
        has_aux=has_aux,
        per_microbatch=per_microbatch,
        loss_shape=loss_shape,
        overlapped=overlapped,
    )
    return _step(session, weights)


def training_session(
    stages: Sequence[Stage],
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None,
    *,
    engine: Engine,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    per_microbatch: bool = False,
    loss_shape: tuple[int, ...] = (),
    overlapped: Overlapped | None = None,
    call: str = "value_and_grad",
) -> Session:
    """What is behind :func:`value_and_grad`, under another name where ``call`` says so."""
    require(stages, loss_fn, schedule, transport, engine, loss_shape)
    if overlapped is not None and (not callable(overlapped) or overlapped in (interleaved, two_streams)):
        raise TypeError(f"overlapped: got {_short(overlapped)}, expected a function, such as ppfunc.interleaved() or ppfunc.two_streams()")
    if schedule.forward_only:
        raise ValueError(f"the schedule {schedule.name!r} has no backward; use ppfunc.evaluate, or a schedule for training")
    wanted = argnums if isinstance(argnums, tuple) else (argnums,)
    if not wanted or any(n not in (0, 1) for n in wanted):
        raise ValueError(f"argnums: got {argnums!r}, expected 0 (parameters), 1 (inputs), or a tuple of these")

    def finish(ran: Step) -> tuple[Any, Any]:
        made = tuple(ran.input_gradients() if n else ran.gradients() for n in wanted)
        loss = ran.loss()
        return (loss, ran.aux()) if has_aux else loss, made if isinstance(argnums, tuple) else made[0]

    ready = _ready(schedule)
    work = Work(
        f"{call}{' of each microbatch' if per_microbatch else ''}{' and inputs' if 1 in wanted else ''}{_of_shape(loss_shape)}",
        Server(stages, ready, engine, loss_fn, loss_shape, has_aux=has_aux, return_outputs=False),
        with_targets=True,
        wants_inputs=1 in wanted,
        gradients=(lambda: Stack(schedule.microbatches)) if per_microbatch else Sum,
        finish=finish,
        together=overlapped,
    )
    return Session(ready, InProcess() if transport is None else transport, work)


def evaluate(
    stages: Sequence[Stage],
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    return_outputs: bool = False,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
    has_aux: bool = False,
    loss_shape: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """A function that runs the stages forward only: ``step(params, inputs, targets) -> loss``.

    Args:
        stages, transport, weights, has_aux, loss_shape: as in :func:`value_and_grad`.
        loss_fn: ``loss(y, target) -> scalar``; None where only the outputs are wanted.
        schedule: any schedule; of one for training the forwards are kept, in their order.
        return_outputs: whether to return what the last stage returns.
        engine: whose forward is run: the same bits as in a training step.

    Returns:
        ``step(params, inputs, targets=None, *, weights=None, seed=None, side=None, state=None)``. It
        returns the loss, on every rank; the outputs, where there is no loss function; ``aux``: or a
        tuple of those that are asked for, in this order. Outputs are a tree with a leading axis ``m``,
        or a list of ``m`` trees where their shapes differ, on the rank of the last stage and None elsewhere;
        where two chains end in different processes, each has the rows of its own, in their order.

    Raises:
        As :func:`value_and_grad`.

    >>> from ppfunc import gpipe
    >>> step = evaluate([lambda w, x: w * x] * 2, None, gpipe(ranks=2, microbatches=2), return_outputs=True)
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(3.0)}, torch.tensor([1.0, 2.0]))
    tensor([ 6., 12.])
    """
    session = evaluation_session(
        stages,
        loss_fn,
        schedule,
        transport,
        return_outputs=return_outputs,
        engine=engine,
        has_aux=has_aux,
        loss_shape=loss_shape,
    )
    return _step(session, weights)


def evaluation_session(
    stages: Sequence[Stage],
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None,
    *,
    return_outputs: bool,
    engine: Engine,
    has_aux: bool = False,
    loss_shape: tuple[int, ...] = (),
    call: str = "evaluate",
) -> Session:
    """What is behind :func:`evaluate`, under another name where ``call`` says so."""
    require(stages, loss_fn or _nothing, schedule, transport, engine, loss_shape)
    if loss_fn is None and not return_outputs and not has_aux:
        raise ValueError("evaluate got neither a loss function nor return_outputs=True; it would return nothing")

    def finish(ran: Step) -> Any:
        made = [ran.loss()] if loss_fn else []
        made += [ran.outputs()] if return_outputs else []
        made += [ran.aux()] if has_aux else []
        return tuple(made) if len(made) > 1 else made[0]

    ready = _ready(schedule if schedule.forward_only else forward_only(schedule))
    work = Work(
        f"{call}{' without a loss' if loss_fn is None else ''}{' with outputs' if return_outputs else ''}{_of_shape(loss_shape)}",
        Server(stages, ready, engine, loss_fn, loss_shape, has_aux=has_aux, return_outputs=return_outputs),
        with_targets=loss_fn is not None,
        wants_inputs=False,
        gradients=Sum,
        finish=finish,
    )
    return Session(ready, InProcess() if transport is None else transport, work)


def with_skips(schedule: Schedule, skips: Sequence[tuple[int, int]]) -> Schedule:
    """The schedule with skip connections: what ``Output.skips`` carries from one stage to a later one.

    Args:
        schedule: any; its communication is placed anew if it has some.
        skips: ``(source stage, destination stage)`` of each, the source before the destination. The source returns
            ``Output(y, skips={destination: tree})``, the destination gets ``Received(x, {source: tree})`` in
            the place of ``x``. Copies of stages in a second chain have the same ones, and functions that they
            share use the numbers of the first chain.

    Raises:
        ValueError: a stage does not exist, or the destination does not come after the source and its neighbour.

    >>> from ppfunc import gpipe
    >>> with_skips(gpipe(ranks=3, microbatches=2), [(0, 2)]).skips
    ((0, 2),)
    """
    if not all(isinstance(edge, tuple | list) and len(edge) == 2 for edge in skips):
        raise TypeError(f"skips: got {_short(skips)}, expected a list of pairs (source, destination)")
    for source, destination in skips:
        chain = next((c.stages for c in schedule.chains if source in c.stages and destination in c.stages), None)
        if chain is None or chain.index(destination) < chain.index(source) + 2:
            raise ValueError(
                f"got a skip connection from stage {source} to stage {destination}; expected two stages of one chain, "
                f"the destination after the neighbour of the source"
            )
    bare = remove_communication(schedule) if schedule.ops & {Op.SEND_F, Op.RECV_F} else schedule
    return replace(bare, skips=tuple(dict.fromkeys(edge for skip in skips for edge in _in_every_chain(schedule, *skip))))


def _in_every_chain(schedule: Schedule, source: int, destination: int) -> list[tuple[int, int]]:
    """A skip connection and its copies."""
    stages = next(c.stages for c in schedule.chains if source in c.stages)
    start, end = stages.index(source), stages.index(destination)
    return [(c.stages[start], c.stages[end]) for c in schedule.chains]


def _step(session: Session, weights: Sequence[float] | torch.Tensor | None) -> Callable[..., Any]:
    """The function that the caller gets."""
    m = session.schedule.microbatches
    usual = read_weights(weights, m)

    def step(
        params: Mapping[int, Any],
        inputs: Any,
        targets: Any = None,
        *,
        weights: Sequence[float] | torch.Tensor | None = None,
        seed: tuple[int, int] | None = None,
        side: Mapping[int, Any] | None = None,
        state: Mapping[int, Any] | None = None,
    ) -> Any:
        return session(lambda: Given(params, inputs, targets, side, state, usual if weights is None else weights, seed))

    return step


def _of_shape(loss_shape: tuple[int, ...]) -> str:
    return f" with losses of shape {loss_shape}" if loss_shape else ""


def _nothing(y: Any, target: Any) -> None:
    """Stands for a loss function where none is wanted."""


def require(stages: Any, loss_fn: Any, schedule: Any, transport: Any, engine: Any, loss_shape: Any = ()) -> None:
    """Raise where something else than expected was given in the place of an argument."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: got {_short(schedule)}, expected a schedule, such as ppfunc.one_f_one_b(ranks=4, microbatches=8)")
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        raise TypeError(f"stages: got {_short(stages)}, expected a list of functions, one per stage")
    for stage, fn in enumerate(stages):
        if isinstance(fn, torch.nn.Module | ModuleStage):
            raise TypeError(f"stages[{stage}]: got {_short(fn)}, expected a function; take ppfunc.stage_from_module(module).fn, and its params")
        if not callable(fn):
            raise TypeError(f"stages[{stage}]: got {_short(fn)}, expected a function fn(params, x) -> y")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: got {_short(loss_fn)}, expected a function loss(y, target) -> scalar")
    if not callable(engine):
        raise TypeError(f"engine: got {_short(engine)}, expected ppfunc.graph, ppfunc.functional or ppfunc.eager")
    if not isinstance(loss_shape, tuple) or not all(isinstance(n, int) for n in loss_shape):
        raise TypeError(f"loss_shape: got {_short(loss_shape)}, expected a tuple of integers, such as (3,) for an ensemble of three")
    if transport is not None and (isinstance(transport, type) or not hasattr(transport, "local_ranks")):
        raise TypeError(f"transport: got {_short(transport)}, expected one such as ppfunc.InProcess() or ppfunc.P2P(group)")


def _short(thing: Any) -> str:
    return f"{reprlib.repr(thing)} of type {type(thing).__name__}"


def _ready(schedule: Schedule) -> Schedule:
    """The schedule as it runs: with communication, with the sums over copies of a stage, and proved."""
    if not schedule.lowered:
        # A receive is posted one compute early: its message crosses while the rank is busy.
        schedule = place_communication(schedule, lookahead=1)
    if schedule.replicas and not schedule.forward_only and not schedule.ops & {Op.REDUCE_TIED, Op.REDUCE_GRAD}:
        schedule = append_tail(schedule, reduce_grad=False, step=False)
    check(schedule)
    return schedule

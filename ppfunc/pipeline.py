"""The front door: a pipeline as an ordinary function from parameters and a batch to a loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ppfunc.runtime import InProcess, Session, Transport, microbatch
from ppfunc.runtime.plan import Served
from ppfunc.runtime.session import Step
from ppfunc.schedule import Op, Schedule, check
from ppfunc.schedule.passes import append_tail, forward_only, place_communication
from ppfunc.stage import Engine, LeafSignature, Signature, StageProgram, graph

__all__ = ["evaluate", "microbatch", "value_and_grad"]

Stage = Callable[..., Any]
Loss = Callable[[Any, Any], torch.Tensor]


def value_and_grad(
    stages: Sequence[Stage],
    loss_fn: Loss,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
) -> Callable[..., tuple[torch.Tensor, dict[int, Any]]]:
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
            out. Where the schedule holds stages twice, the copies may be left out.
        loss_fn: ``loss(y, target) -> scalar``, of one microbatch; runs as part of the last stage.
        schedule: what every rank does. It is proved before anything runs; communication is placed
            where it has none.
        transport: carries the messages: ``InProcess()`` (the default) or ``P2P(group)``.
        engine: how a stage is differentiated.
        weights: weight of every microbatch in the loss, [m]; ``1/m`` each where none are given.

    Returns:
        ``step(params, inputs, targets, *, weights=None, seed=None)``.

        * ``params``: ``{stage: tree}``, the stages that this process holds (all of them in process).
        * ``inputs``, ``targets``: a tree, every leaf of which has a leading axis ``m``, or a list of
          ``m`` trees, which may differ in shape. A rank that does not hold the first (the last) stage
          may pass None for the inputs (the targets).
        * ``weights``: those of this step, where they differ from step to step; needed where the last stage is.
        * ``seed``: ``(seed, step)``, two integers, for stages that draw random numbers.

        The loss, a scalar, is returned on every rank; ``grads`` has the structure of ``params``, zeros
        where there is no dependence, and belongs to the caller.

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
    if schedule.forward_only:
        raise ValueError(f"the schedule {schedule.name!r} has no backward; use ppfunc.evaluate, or a schedule for training")
    functions = _per_stage(stages, schedule)
    for chain in schedule.chains:
        functions[chain.stages[-1]] = _with_loss(functions[chain.stages[-1]], loss_fn)
    usual = _read_weights(weights, schedule.microbatches)
    serve = _Server(functions, engine, {c.stages[-1] for c in schedule.chains}, weighted=True)
    session = Session(_ready(schedule), InProcess() if transport is None else transport, "value_and_grad", serve, True)

    def step(
        params: Mapping[int, Any],
        inputs: Any,
        targets: Any,
        *,
        weights: Sequence[float] | torch.Tensor | None = None,
        seed: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, dict[int, Any]]:
        own = usual if weights is None else _read_weights(weights, schedule.microbatches)
        return session(params, inputs, targets, own, seed, lambda ran: (ran.loss(), ran.gradients()))

    return step


def evaluate(
    stages: Sequence[Stage],
    loss_fn: Loss | None,
    schedule: Schedule,
    transport: Transport | None = None,
    *,
    return_outputs: bool = False,
    engine: Engine = graph,
    weights: Sequence[float] | torch.Tensor | None = None,
) -> Callable[..., Any]:
    """A function that runs the stages forward only: ``step(params, inputs, targets) -> loss``.

    Args:
        stages, transport, weights: as in :func:`value_and_grad`.
        loss_fn: ``loss(y, target) -> scalar``; None where only the outputs are wanted.
        schedule: any schedule; of one for training the forwards are kept, in their order.
        return_outputs: whether to return what the last stage returns.
        engine: whose forward is run: the same bits as in a training step.

    Returns:
        ``step(params, inputs, targets=None, *, weights=None, seed=None)``. It returns the loss, on
        every rank; or ``(loss, outputs)`` with ``return_outputs``; or the outputs alone where there is no
        loss. Outputs are a tree with a leading axis ``m``, or a list of ``m`` trees where their shapes
        differ, on the rank of the last stage and None elsewhere.

    Raises:
        As :func:`value_and_grad`.

    >>> from ppfunc import gpipe
    >>> step = evaluate([lambda w, x: w * x] * 2, None, gpipe(ranks=2, microbatches=2), return_outputs=True)
    >>> step({0: torch.tensor(2.0), 1: torch.tensor(3.0)}, torch.tensor([1.0, 2.0]))
    tensor([ 6., 12.])
    """
    if loss_fn is None and not return_outputs:
        raise ValueError("evaluate got neither a loss function nor return_outputs=True; it would return nothing")
    functions = _per_stage(stages, schedule)
    for chain in schedule.chains:
        functions[chain.stages[-1]] = _with_outputs(functions[chain.stages[-1]], loss_fn, return_outputs)
    usual = _read_weights(weights, schedule.microbatches)
    serve = _Server(functions, engine, {c.stages[-1] for c in schedule.chains} if loss_fn else set(), weighted=False)
    ready = _ready(schedule if schedule.forward_only else forward_only(schedule))
    name = f"evaluate{' with outputs' if return_outputs else ''}"
    session = Session(ready, InProcess() if transport is None else transport, name, serve, loss_fn is not None)

    def step(
        params: Mapping[int, Any],
        inputs: Any,
        targets: Any = None,
        *,
        weights: Sequence[float] | torch.Tensor | None = None,
        seed: tuple[int, int] | None = None,
    ) -> Any:
        own = usual if weights is None else _read_weights(weights, schedule.microbatches)

        def finish(ran: Step) -> Any:
            wanted = (*([ran.loss()] if loss_fn else []), *([ran.outputs(1 if loss_fn else 0)] if return_outputs else []))
            return wanted if len(wanted) > 1 else wanted[0]

        return session(params, inputs, targets, own, seed, finish)

    return step


def _ready(schedule: Schedule) -> Schedule:
    """The schedule as it runs: with communication, with the sums over copies of a stage, and proved."""
    if not schedule.lowered:
        schedule = place_communication(schedule)
    if schedule.copies and not schedule.forward_only and not schedule.ops & {Op.REDUCE_TIED, Op.REDUCE_GRAD}:
        schedule = append_tail(schedule)
    check(schedule)
    return schedule


def _per_stage(stages: Sequence[Stage], schedule: Schedule) -> list[Stage]:
    """One function per stage; copies of a stage share theirs."""
    own = len(schedule.chains[0].stages)
    if len(stages) == schedule.stages:
        return list(stages)
    if len(stages) == own and schedule.copies:
        return [stages[next(n for n, group in enumerate(schedule.copies) if s in group)] for s in range(schedule.stages)]
    expected = f"{own} or {schedule.stages}" if schedule.copies else str(schedule.stages)
    raise ValueError(f"got {len(stages)} stages, the schedule {schedule.name!r} has {expected}")


def _with_loss(stage: Stage, loss_fn: Loss) -> Stage:
    """The last stage with the loss folded in."""
    return lambda params, x, target: loss_fn(stage(params, x), target)


def _with_outputs(stage: Stage, loss_fn: Loss | None, return_outputs: bool) -> Stage:
    """The last stage for evaluation: its loss, then its outputs, as far as they are wanted."""

    def last(params: Any, x: Any, *targets: Any) -> tuple[Any, ...]:
        y = stage(params, x)
        loss = () if loss_fn is None else (loss_fn(y, *targets),)
        return (*loss, y) if return_outputs else loss

    return last


def _read_weights(weights: Sequence[float] | torch.Tensor | None, microbatches: int) -> torch.Tensor:
    """Weights as a tensor[m] of float64."""
    if weights is None:
        return torch.full((microbatches,), 1 / microbatches, dtype=torch.float64)
    read = torch.as_tensor(weights, dtype=torch.float64)
    if read.shape != (microbatches,):
        raise ValueError(f"weights: got shape {tuple(read.shape)}, expected one weight for each of the {microbatches} microbatches")
    return read


class _Server:
    """Serves stages by an engine; keeps the program of every signature that it has met."""

    def __init__(self, functions: Sequence[Stage], engine: Engine, losses: set[int], weighted: bool) -> None:
        self.functions, self.engine, self.losses, self.weighted = functions, engine, losses, weighted
        self.programs: dict[tuple[Any, ...], StageProgram] = {}

    def __call__(self, stage: int, params: Signature, x: Signature, target: Signature | None, device: torch.device) -> Served:
        """The stage for these signatures.

        Raises:
            StageError: the engine cannot serve it.
            ValueError: a loss is not a scalar.
        """
        key = (stage, params, x, target, device)
        if key not in self.programs:
            example = (params, x) if target is None else (params, x, target)
            self.programs[key] = self.engine(self.functions[stage], example, name=f"stage {stage}", device=device)
        program = self.programs[key]
        if stage in self.losses:
            _require_scalar(program.y.leaves, stage)
        weighted = self.weighted and stage in self.losses and program.y.leaves[0].grad
        return Served(program.flat, program.y, weighted, program.random)


def _require_scalar(leaves: tuple[LeafSignature, ...], stage: int) -> None:
    if not leaves or leaves[0].shape or not leaves[0].dtype.is_floating_point:
        got = leaves[0] if leaves else "nothing"
        raise ValueError(f"the loss function, run in stage {stage}, must return a floating scalar, got {got}; take its mean or sum")

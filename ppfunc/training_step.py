"""Make a trainer: check its arguments, and place what ends a step of training in the schedule."""

from __future__ import annotations

import math
import reprlib
from contextlib import ExitStack
from typing import get_args

from torch.distributed.device_mesh import DeviceMesh

from ppfunc._text import shown
from ppfunc.making import Stages, mistakes_told, require_one_of, unpacked
from ppfunc.runtime import P2P, Axes, InProcess, Transport
from ppfunc.runtime.ties import TiedPlaces
from ppfunc.schedule import Schedule, append_tail, insert_unshards, reduce_early, remove_tail, remove_unshards
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, graph

from .trainer import Trainer
from .training import Clip, LossScale, Optimizer, Precision, Transform, accepting_scale
from .training.checks import require_count
from .training.norms import require_max_norm, require_norm_type
from .training.ranks import ShardWhat
from .training.update_rule import OnNonfinite, UpdateRule


def train_step(
    stages: Stages,
    loss_fn: Loss,
    schedule: Schedule,
    optimizer: Optimizer,
    mesh: DeviceMesh | None = None,
    *,
    axes: Axes | None = None,
    transport: Transport | None = None,
    engine: Engine = graph,
    tied: TiedPlaces = None,
    clip: float | None = None,
    norm_type: float | None = None,
    scale: LossScale | None = None,
    accumulate: int = 1,
    shard: ShardWhat = "none",
    precision: Precision | None = None,
    on_nonfinite: OnNonfinite = "skip",
) -> Trainer:
    """Make a trainer: ``init(params) -> state``, ``step(state, inputs, targets) -> (state, metrics)``, ``evaluate``.

    Equivalent to, for one step::

        loss, grads = value_and_grad(stages, loss_fn, schedule)(params, inputs, targets)    # over all data ranks
        grads, _ = clip_by_global_norm(clip).update(grads, ())
        params, optimizer_state = optimizer.update(grads, optimizer_state, params)

    Args:
        stages, loss_fn, engine, tied: as in :func:`value_and_grad`.
        schedule: what every rank of a pipeline does; ``REDUCE_TIED``, ``REDUCE_GRAD`` and ``STEP`` are placed anew.
        optimizer: of every stage. A chain that begins with :func:`clip_by_global_norm` clips by the norm of all stages.
        mesh: the ranks that train together; one pipeline where there is none.
        axes: the names of its axes.
        transport: in the place of a mesh, carries the messages of one pipeline; ``InProcess()`` where neither is given.
        clip: largest norm of all gradients together, which are made shorter where it is more.
        norm_type: p of the norm, ``math.inf`` for the largest element; by default 2, or that of an optimizer that clips.
        scale: of the loss: :func:`dynamic_scale`, of a step that skips updates, or :func:`static_scale`.
        accumulate: how many times the schedule runs in a step, each with a part of the batch; the gradients are those of
            one schedule with as many times the microbatches, bit by bit.
        shard: ``"optimizer"`` keeps, on each data rank, a part of the state of the optimizer, and updates that part of the
            parameters, which are then gathered. ``"params"`` keeps a part of the parameters, too: each stage is gathered before it
            computes and freed behind, at most two at a time. The same bits as ``"none"`` over two data ranks. What cannot be
            cut evenly is whole on every rank.
        precision: dtypes of computing, reducing and keeping parameters.
        on_nonfinite: where loss or gradients are not finite: ``"skip"`` the update, and what it would have changed in states of
            stages; ``"raise"`` on every rank, with the rank, stage, microbatch and instruction that was first (reads a number of the
            device in every step, and runs the step again where it fails); or ``"ignore"`` it.

    Parameters, inputs and the leaves of the state are tensors or DTensors; a stage is given the part of its rank. Ranks compare their
    options, the numbers of optimizer and scale, what the optimizer makes of a few ones, and checksums of the states of data ranks once,
    before the first step and after a failure; the seed in every step. A parameter that the module of a stage has
    frozen stays as it is (by ``requires_grad_(False)``, also between steps; on every rank that holds it, which ranks compare where they
    update one parameter; where that changes gradients between processes, stages that are cut over a mesh need a new mesh and trainer).
    Its state of the optimizer goes on with gradients of zero. A function of yours around that of a module tells
    what is frozen if it is made with ``functools.wraps``; ``init`` raises where one does not, and is given what its module has frozen.

    Raises:
        ScheduleError, ValueError, TypeError: as :func:`value_and_grad`; arguments that do not fit together.
    """
    if transport is not None and (mesh is not None or axes is not None):
        raise ValueError("got a transport and a mesh or its axes, expected one of the two; ppfunc.P2P(mesh=mesh, axes=axes) is a transport")
    owned = transport is None
    if transport is None:
        transport = InProcess() if mesh is None and axes is None else P2P(mesh=mesh, axes=axes)
    with ExitStack() as opened:
        if owned:  # peers that step without this rank hear of it
            opened.callback(transport.close)
        with mistakes_told(transport):
            stateful = tuple(stages.state) if isinstance(stages, Split) else ()
            stages, schedule, ties = unpacked(stages, loss_fn, schedule, tied)
            rule = _rule(optimizer, clip, norm_type, scale, precision, on_nonfinite, shard)
            require_count("accumulate", accumulate)
            schedule = remove_unshards(remove_tail(schedule))
            schedule = insert_unshards(schedule) if shard == "params" else schedule
            schedule = reduce_early(append_tail(schedule, tied=bool(ties) or bool(schedule.replicas)))
            made = Trainer(stages, loss_fn, schedule, transport, engine, ties, rule, accumulate, owned, stateful)
        opened.pop_all()
    return made


def _rule(
    optimizer: Optimizer, clip: float | None, norm_type: float | None, scale: LossScale | None, precision: Precision | None,
    on_nonfinite: OnNonfinite, shard: ShardWhat,
) -> UpdateRule:  # fmt: skip
    """How parameters are updated, of arguments that fit together."""
    if isinstance(optimizer, Transform | Clip):
        raise TypeError("optimizer: got a transform of gradients, expected an optimizer, such as ppfunc.from_updates(transform)")
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise TypeError(f"optimizer: got {reprlib.repr(optimizer)}, expected init and update, such as ppfunc.adamw(1e-3)")
    for name, value, kind in (("scale", scale, LossScale), ("precision", precision, Precision)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}: got {shown(value)}, expected {kind.__name__}")
    require_one_of("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
    require_one_of("shard", shard, get_args(ShardWhat))
    if scale is not None and scale.changes and on_nonfinite != "skip":
        raise ValueError(
            f"on_nonfinite: got {on_nonfinite!r} with the scale {scale.text}, which changes where an update is skipped; take 'skip', or "
            "a scale that never changes, such as ppfunc.static_scale(1024.0)"
        )
    if (clipped := getattr(optimizer, "clipped", None)) is not None:
        for name, number in (("clip", clip), ("norm_type", norm_type)):
            if number is not None:
                raise ValueError(f"{name}: got one, and the optimizer clips, too; leave one of them out")
        first, optimizer = clipped
        clip, norm_type = first.max_norm, first.norm_type
    clip, norm_type = math.inf if clip is None else clip, 2.0 if norm_type is None else norm_type
    require_max_norm("clip", clip)
    require_norm_type(norm_type)
    return UpdateRule(accepting_scale(optimizer), clip, norm_type, scale, precision or Precision(), on_nonfinite, shard)

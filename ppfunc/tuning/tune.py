"""Tune: rank configurations of a training step by predicted time, under a limit of memory."""

from collections.abc import Callable, Sequence
from inspect import signature
from math import inf
from typing import Any, Literal, get_args

import torch

from ppfunc._checks import (
    naming_arguments,
    require_counts,
    require_number,
    require_one_of,
    require_positive,
    require_type,
    shown,
    with_arguments,
)
from ppfunc.runtime import Transport
from ppfunc.runtime.ports.protocols import ShardWhat
from ppfunc.schedule import BUILDERS, Schedule, find_builder
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss
from ppfunc.stage.device import accelerates
from ppfunc.stage.tree import tree_leaves
from ppfunc.training import Trainer
from ppfunc.training.optim import Optimizer

from .rows import Row, Tuning, choices_of, grids_of
from .search import Configurations
from .stages import Cuts, Lay, Speeds, concurrency_of, parameters_of

_ALIKE = ("data_parallel", "deepspeed_train")  # to several pipelines, and 1f1b
TRAINING = tuple(n for n, build in BUILDERS.items() if n not in _ALIKE and not build(2, 4).forward_only)


@naming_arguments
def tune(
    model: torch.nn.Module | Split,
    args: Any,
    loss_fn: Loss,
    targets: Any = None,
    *,
    ranks: int,
    optimizer: Optimizer,
    batch: int | None = None,
    memory: float = inf,
    grids: Literal["any"] | Sequence[tuple[int, ...]] = "any",
    tensor: Lay | None = None,
    schedules: Sequence[str] = TRAINING,
    microbatch: Sequence[int] | None = None,
    remat: Sequence[Any] = ("cheap", "full"),
    shard: Sequence[ShardWhat] = get_args(ShardWhat),
    latency: float = 0.0,
    bandwidth: float = inf,
    host: float | None = None,
    speeds: Speeds = None,
    cores: float | None = None,
    effort: float = 0.1,
    top: int = 5,
    progress: Callable[[str, Row | None], object] = lambda step, best: None,
    **options: Any,
) -> Tuning:
    """Rank grids, cuts, schedules, microbatches, rematerialisations and shards by the time of a step.

    Stages are timed once per cut, microbatch and rematerialisation that the search needs: here, alone, on one
    rank, beside those timed first. With one thread of torch these are seconds of that thread, unless a step
    waits for others, so other processes may run here. Calls in several threads search in turn. A step is
    simulated with its messages, sums and updates; its peaks are those of
    ``Trainer.lower(...).memory_analysis()``. Sums over tied places take no time. Under a limit of memory,
    plans compute residuals again, or move them to the host, where that is faster than to keep them.

    Args:
        model: any module, which :func:`ppfunc.split` cuts into balanced stages, or a split, whose cuts stay;
            for ``speeds`` also on ``meta``.
        args, targets: arguments of ``pp.split`` and targets of ``loss_fn``, of some rows; they are repeated
            to fill a batch.
        ranks: number of ranks, all pipelines together.
        optimizer, options: arguments of :class:`ppfunc.Trainer`.
        batch: rows of a step, of all pipelines; by default those of ``args``.
        memory: bytes of a rank; by default without limit. Messages count as tensors, though
            ``P2P(mapped=True)`` holds some of them in memory of the host.
        grids: ``(ranks of a pipeline, pipelines)`` to try, or ``(ranks of a pipeline, data ranks, tensor
            ranks)``; ``"any"`` for all that ``ranks`` allows.
        tensor: ``tensor(mesh) -> module``, which lays a copy of the model over one axis of a mesh by torch's
            plan, such as ``lambda mesh: parallelize_module(copy.deepcopy(model), mesh, plan)``. The split is
            cut at the same modules, between which activations are plain tensors. None for no tensor ranks.
        schedules: names of ``ppfunc list``; of one rank, always ``1f1b``.
        microbatch: rows of a microbatch to try; by default the powers of two that leave at least one
            microbatch per rank.
        remat: arguments of :func:`ppfunc.engines.graph`, the least recomputation first.
        shard: arguments of :class:`ppfunc.P2P`, for several pipelines.
        latency, bandwidth: seconds of a message and bytes per second, between ranks of a pipeline, data ranks
            and tensor ranks, whose collectives go around a ring; by default messages take no time.
        host: bytes per second between a device and its host, in each direction; None if nothing is to move.
        speeds: floating point operations and bytes per second of a device, over which those of every
            operator are counted; nothing runs then.
        cores: number of cores that all ranks share, each of which uses as many as torch has threads, also to
            send and to add up. By default all cores that this process may use, where stages run on them, else
            enough.
        effort: effort of :func:`ppfunc.plan` for each placement that can be faster by it; 0 for no plans.
        top: number of rows that fit after which the search ends.
        progress: function called after every step of the search, with its name and the best row so far.

    Returns:
        The ranked table. Ctrl-C, or a ``KeyboardInterrupt`` from ``progress``, ends the search with the rows
        so far, before the first one without any; before the search begins it leaves the call.

    Raises:
        ValueError: numbers out of range, or that do not divide, names that do not exist, or no list of what
            to try; a model with DTensors, whose tensor ranks cannot vary; a host for a model on the CPU or
            meta, whose residuals stay; a process group that is there: during the search one of torch's
            backend ``fake`` stands for the ranks.
        StageError, TypeError: as :func:`ppfunc.split`; arguments of other types.
    """
    require_type("model", model, torch.nn.Module | Split, "a module, or a model that was split")
    _require_options(model, loss_fn, optimizer, options)
    _require_lists(grids, schedules, shard, microbatch, remat)
    builders = {name: find_builder(name) for name in schedules}
    if not (lengths := [len(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.ndim]):
        raise ValueError(f"args: got {shown(args)}, expected at least one tensor with rows, then loss_fn")
    batch = lengths[0] if batch is None else batch
    require_counts(ranks=ranks, batch=batch, top=top)
    _require_numbers(model, memory, effort, latency, speeds, bandwidth=bandwidth, host=host, cores=cores)
    require_type("tensor", tensor, Callable | None, "a function of a mesh that lays the model over it")
    every = grids_of(ranks, grids, tensor)
    if "none" not in shard and all(data == 1 for _, data, _ in every):
        raise ValueError(f"shard: got {shard}, and no grid of several pipelines to cut over; leave it out")
    choices = list(choices_of(ranks, batch, every, microbatch, remat, shard, grids != "any"))

    def trainer(parts: Split, schedule: Schedule, engine: Engine, to: Transport | None = None) -> Trainer:
        return Trainer(parts, loss_fn, schedule, optimizer, to, engine=engine, **options)

    cuts = Cuts(model, args, {choice.microbatch for choice in choices}, tensor)
    link = latency, bandwidth, host
    at_once = concurrency_of(model, cores, speeds)
    search = Configurations(
        cuts, trainer, (args, targets), choices, builders, batch, memory, link, speeds, at_once, effort
    )
    complete = search.run(top, progress)
    rows = sorted(search.rows, key=lambda r: (not r.fits, r.seconds if r.fits else max(r.peaks), r.seconds))
    refused = {what: str(error) for what, error in search.refused.items()}
    return Tuning(tuple(rows), memory, complete, len(search.heap), refused)


def _require_options(model: Any, loss_fn: Any, optimizer: Any, options: dict[str, Any]) -> None:
    """Raise TypeError for an argument that neither the search nor a trainer takes."""
    try:
        signature(Trainer).bind(model, loss_fn, None, optimizer, None, engine=None, **options)
    except TypeError as error:
        named = f"{with_arguments(f'tune() {error}', tune)} of Trainer"
        raise TypeError(with_arguments(named, Trainer)) from None


def _require_lists(grids: Any, schedules: Any, shard: Any, microbatch: Any, remat: Any) -> None:
    """Raise ValueError where a list to try is empty, or no list."""
    for name, tried, items in (
        ("grids", [grids] if grids == "any" else grids, "tuples, or 'any'"),
        ("schedules", schedules, "names"), ("shard", shard, "those of pp.P2P"),
        ("microbatch", [None] if microbatch is None else microbatch, "numbers of rows"),
        ("remat", remat, "those of pp.engines.graph"),
    ):  # fmt: skip
        if (
            not isinstance(tried, Sequence)
            or isinstance(tried, str)
            or not tried
            or (name == "grids" and int in map(type, tried))
        ):
            raise ValueError(f"{name}: got {shown(tried)}, expected a nonempty list of {items}")
    for what in shard:
        require_one_of("shard", what, get_args(ShardWhat))


def _require_numbers(
    model: torch.nn.Module | Split, memory: float, effort: float, latency: float,
    speeds: Speeds, **more: Any,
) -> None:  # fmt: skip
    """Refuse numbers out of range; ``more`` are positive if they are given."""
    require_number("memory", 0 if memory == inf else memory, mend=", of bytes, such as 80e9")
    require_number("effort", effort)
    require_number("latency", latency)
    if speeds is not None:
        require_type("speeds", speeds, Sequence, expected := "two numbers: operations and bytes per second")
        if len(speeds) != 2:
            raise ValueError(f"speeds: got {shown(speeds)}, expected {expected}")
        more |= {f"speeds[{n}]": speed for n, speed in enumerate(speeds)}
    require_positive(**{name: number for name, number in more.items() if number not in (None, inf)})
    if more["host"] is not None and not any(accelerates(leaf.device) for leaf in parameters_of(model)):
        raise ValueError(f"host: got {more['host']}, expected bytes per second of a model on an accelerator")

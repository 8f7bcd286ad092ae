"""Tune: rank configurations of a training step by predicted time, under a limit of memory."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import heappop, heappush
from inspect import signature
from itertools import count
from math import inf, prod
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppfunc._checks import require_counts, require_type
from ppfunc._text import naming_arguments
from ppfunc.runtime import Axes, OnPaper, Transport
from ppfunc.runtime.transport.grid import ShardWhat
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Schedule,
    Timeline,
    find_builder,
    gpipe,
    one_f_one_b,
    plan,
    simulate,
)
from ppfunc.schedule.overview import bound_of_order
from ppfunc.splitter import Split
from ppfunc.stage import Engine, Loss, StageError, graph
from ppfunc.stage.device import accelerates
from ppfunc.stage.tree import tree_leaves
from ppfunc.training import Trainer
from ppfunc.training.calls import completed
from ppfunc.training.lowered import on_meta
from ppfunc.training.optim import Optimizer

from .choices import Choice, axis_sizes, choices_of, grids_of
from .cuts import Cuts, Lay, rows_of
from .rows import Row, Tuning, binding
from .times import (
    MICROBATCHES,
    Pace,
    Speeds,
    concurrency_of,
    parameters_of,
    remembering,
    require_numbers,
    seconds_of,
    times_of,
)

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
    rank. A step is simulated with its messages, sums and updates; its peaks are those of
    ``Trainer.lower(...).memory_analysis()``. Sums over tied places take no time. Under a limit of memory,
    plans compute residuals again, or move them to the host, where that is faster than to keep them.

    Args:
        model: any module, which :func:`ppfunc.split` cuts into balanced stages, or a split, whose cuts stay;
            for ``speeds`` also on ``meta``.
        args, targets: of some rows, as for ``pp.split`` and ``loss_fn``; they are repeated to fill a batch.
        ranks: of all pipelines together.
        optimizer, options: as of :class:`ppfunc.Trainer`.
        batch: rows of a step, of all pipelines; by default those of ``args``.
        memory: bytes of a rank; by default without limit.
        grids: ``(ranks of a pipeline, pipelines)`` to try, or ``(ranks of a pipeline, data ranks, tensor
            ranks)``; ``"any"`` for all that ``ranks`` allows.
        tensor: ``tensor(mesh) -> module``, which lays a copy of the model over one axis of a mesh by torch's
            plan, such as ``lambda mesh: parallelize_module(copy.deepcopy(model), mesh, plan)``. The split is
            cut at the same modules, between which activations are plain tensors. None for no tensor ranks.
        schedules: names of ``ppfunc list``; of one rank, always ``1f1b``.
        microbatch: rows of a microbatch to try; by default the powers of two that leave at least one
            microbatch per rank.
        remat: of :func:`ppfunc.engines.graph`, the one that computes least again first.
        shard: of :class:`ppfunc.P2P`, for several pipelines.
        latency, bandwidth: seconds of a message and bytes per second, between ranks of a pipeline, data ranks
            and tensor ranks, whose collectives go around a ring; by default messages take no time.
        host: bytes per second between a device and its host, in each direction; None if nothing is to move.
        speeds: floating point operations and bytes per second of a device, over which those of every
            operator are counted; nothing runs then.
        cores: shared by all ranks, each of which uses as many as torch has threads, also to send and to add
            up. By default those that this process may use, where stages run on them, else enough.
        effort: of :func:`ppfunc.plan` for each placement that can be faster by it; 0 for none.
        top: rows that fit after which the search ends.
        progress: called after every step of the search, with its name and the best row so far.

    Returns:
        The ranked table. Ctrl-C, or a ``KeyboardInterrupt`` from ``progress``, ends the search with what was
        found so far.

    Raises:
        ValueError: numbers out of range, or that do not divide, or names that do not exist; a model with
            DTensors, whose tensor ranks cannot vary; a host for a model on the CPU or meta, whose residuals
            stay; a process group that is there: during the call one of torch's backend ``fake`` stands for
            the ranks.
        StageError, TypeError: as :func:`ppfunc.split`; arguments of other types.
    """
    if not (sizes := [len(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.ndim]):
        raise ValueError("args: got no tensor with rows, expected the inputs of some rows")
    batch = sizes[0] if batch is None else batch
    require_counts(ranks=ranks, batch=batch, top=top)
    require_numbers(memory, effort, latency, speeds, bandwidth=bandwidth, host=host, cores=cores)
    require_type("tensor", tensor, Callable | None, "a function of a mesh that lays the model over it")
    choices = list(choices_of(ranks, batch, grids_of(ranks, grids, tensor), microbatch, remat, shard))
    builders = {name: find_builder(name) for name in schedules}
    if not choices or not builders:
        raise ValueError("grids, schedules, microbatch, remat or shard: got nothing to try, expected some")
    if host is not None and not any(accelerates(leaf.device) for leaf in parameters_of(model)):
        raise ValueError(f"host: got {host}, expected bytes per second of a model on an accelerator")

    def trainer(parts: Split, schedule: Schedule, engine: Engine, to: Transport | None = None) -> Trainer:
        return Trainer(parts, loss_fn, schedule, optimizer, to, engine=engine, **options)

    search = Candidates(
        Cuts(model, rows_of(args, 1), tensor), trainer, (args, targets), choices, builders, batch, memory,
        (latency, bandwidth, host), speeds, concurrency_of(model, cores, speeds), effort,
    )  # fmt: skip
    complete = search.run(top, progress)
    rows = sorted(search.rows, key=lambda r: (not r.fits, r.seconds if r.fits else max(r.peaks), r.seconds))
    return Tuning(tuple(rows), memory, complete, len(search.heap), search.refused)


class Candidates:
    """Holds the configurations by the least seconds that they can take, and what is known of their parts.

    Args:
        cuts: the model in stages, over tensor ranks.
        trainer: makes a trainer of stages, schedule, engine and transport.
        rows: inputs and targets.
        choices: to try, those with the least remat first.
        link: latency and bandwidth, and that of the host.
        concurrency: ranks of all pipelines that can compute at one time.

    The others are those of :func:`ppfunc.tune`.
    """

    def __init__(
        self, cuts: Cuts, trainer: Callable[..., Trainer], rows: tuple[Any, Any],
        choices: Sequence[Choice], builders: Mapping[str, Callable[..., Schedule]], batch: int, memory: float,
        link: tuple[float, float, float | None], speeds: Speeds, concurrency: float, effort: float,
    ) -> None:  # fmt: skip
        self._trainer, self._inputs, self._choices, self._builders = trainer, rows, choices, builders
        self._batch, self._memory, self._effort = batch, memory, effort
        self._link, self._speeds, self._concurrency = link, speeds, concurrency
        self.heap, self.rows, self.refused = list[Any](), list[Row](), dict[str, str]()
        self._numbers, self._seen, self._pace = count(), set[Any](), Pace()
        self._cuts, self._split = cuts, cache(cuts.split)
        self._costs, self._sizes = cache(self._measure), cache(self._lowered)
        self._engine = cache(lambda remat: remembering(graph(remat=remat)))
        first = dict[Any, Choice]()
        for choice in choices:
            first.setdefault((choice.tensor, choice.microbatch), choice)
        for choice in first.values():
            self._push(0, "times", self._times, choice)

    def run(self, top: int, progress: Callable[[str, Row | None], object]) -> bool:
        """Search in a group that is fake until so many rows fit; return whether nothing interrupted."""
        hook, ranks = sys.excepthook, prod(self._choices[0][:3])
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            for step in self.steps(top):
                fitting = [row for row in self.rows if row.fits]
                progress(step, min(fitting, key=lambda row: row.seconds, default=None))
        except KeyboardInterrupt:
            return False
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook  # else a traceback names the rank in every line
        return True

    def steps(self, top: int) -> Iterator[str]:
        """Take the best candidate a step further until so many rows fit; yield the name of each step.

        Candidates that are too large by an estimate come last, and only for want of rows: the smallest.
        """
        while self.heap and sum(row.fits for row in self.rows) < top and not (self.heap[0][0] and self.rows):
            *_, name, step = heappop(self.heap)
            try:
                self.rows += filter(None, [step()])
            except (ValueError, StageError) as error:
                choice, known = step.args[0], isinstance(error, ValueError) and name not in ("times", "row")
                if not known and choice.tensor == 1:
                    raise
                ranks = f"{choice.tensor} tensor" if name == "times" else choice.grid
                self.refused[f"{name} of {ranks} ranks"] = str(error)
            yield name

    def _push(self, key: float, name: str, step: Callable[..., Any], *args: Any, late: bool = False) -> None:
        heappush(self.heap, (late, key, next(self._numbers), name, partial(step, *args)))

    # -- costs

    def _measure(self, size: int, tensor: int, remat: Any, stages: int | None) -> Costs:
        """Time so many stages in microbatches of a size."""
        batch = (rows_of(tree, MICROBATCHES * size) for tree in self._inputs)
        make, (latency, bandwidth, _) = partial(self._trainer, engine=self._engine(remat)), self._link
        ring = tensor, latency, bandwidth
        return times_of(make, self._split(stages, tensor), tuple(batch), self._speeds, ring, self._pace)

    def _lowered(self, size: int, tensor: int, remat: Any, stages: int) -> Costs:
        """Return the bytes of so many stages, without a time."""
        batch = (rows_of(tree, MICROBATCHES * size) for tree in self._inputs)
        parts, schedule = self._split(stages, tensor), gpipe(stages, MICROBATCHES)
        trainer = self._trainer(parts, schedule, self._engine(remat))
        return trainer.lower(parts.params, *batch, state=parts.state).costs(Costs())

    def _of_stages(self, choice: Choice, stages: int) -> Costs:
        """Return the costs of stages, with messages, sums over data ranks and over replicas, and updates."""
        costs, d = self._costs(choice.microbatch, choice.tensor, choice.remat, stages), choice.data
        names, (latency, bandwidth, host) = ("bytes", "parameters", "step", "activation"), self._link
        sent, sizes, steps, kept = ([costs.of(name, s) for s in range(stages)] for name in names)
        seconds = [size / 2 / bandwidth for size in sizes]  # of all gradients
        passed = [(d - 1) * (s / d + latency) for s in seconds]  # each has its part, or gets all parts
        return replace(
            costs,
            communication=[latency + size / bandwidth for size in sent],
            recompute=costs.forward,
            offload=None if host is None else [size / host for size in kept],
            reduce_grad=passed if choice.shard == "params" else [2 * s for s in passed],
            unshard=passed,
            reduce_tied=[latency + s for s in seconds],
            step=steps if choice.shard == "none" else [s / d for s in steps],
        )

    # -- the steps of a candidate

    def _times(self, like: Choice) -> None:
        """Time as few stages as there may be, which bounds the choices: to compute again takes longer."""
        size, tensor = like.microbatch, like.tensor
        costs = self._costs(size, tensor, self._choices[0].remat, None)
        apart, stages = replace(costs, backward=None), range(len(costs.forward))
        work = sum(costs.forward) + sum(min(costs.backward_of(n), apart.backward_of(n)) for n in stages)
        for choice in (c for c in self._choices if (c.microbatch, c.tensor) == (size, tensor)):
            bound = work * self._batch / size / choice.data / choice.pipe
            for name, build in (self._builders if choice.pipe > 1 else {"1f1b": one_f_one_b}).items():
                self._push(bound, name, self._schedule, choice, build)

    def _schedule(self, choice: Choice, builder: Callable[..., Schedule], late: bool = False) -> None:
        """Build a schedule; time its stages unless they are too large, which is then for want of others."""
        microbatches = self._batch // choice.data // choice.microbatch
        build = partial(builder, choice.pipe, microbatches)
        if (schedule := build()).microbatches != microbatches:
            raise ValueError("each rank has microbatches of its own; expected several pipelines instead")
        stages, ordered = len(set(schedule.model_stages)), "costs" in signature(builder).parameters
        if self._memory < inf and not late:
            sizes = self._sizes(choice.microbatch, choice.tensor, choice.remat, stages).of_stages(
                schedule.model_stages
            )
            order = builder(choice.pipe, 1) if ordered else schedule  # that of several depends on the times
            least = least_bytes(choice, simulate(order, sizes), sizes)
            if least > self._memory:
                self._push(least, schedule.name, self._schedule, choice, builder, True, late=True)
                return
        costs = self._of_stages(choice, stages).of_stages(schedule.model_stages)
        if ordered:
            schedule = build(costs=replace(costs, backward=None))
        self._simulate(choice, schedule, costs)

    def _simulate(self, choice: Choice, schedule: Schedule, costs: Costs) -> None:
        """Find the seconds of a schedule that is new, and whether its activations alone are too many."""
        if (choice, schedule.programs) in self._seen:
            return
        self._seen.add((choice, schedule.programs))
        timeline = simulate(completed(schedule, choice.shard == "params", False)[0], costs)
        least = least_bytes(choice, timeline, costs)
        seconds = seconds_of(timeline, costs, self._concurrency / choice.data / choice.tensor)
        late = least > self._memory
        found = choice, schedule, costs, timeline, seconds
        self._push(least if late else seconds, "row", self._row, *found, late=late)

    def _row(
        self, choice: Choice, schedule: Schedule, costs: Costs, timeline: Timeline, seconds: float
    ) -> Row:
        """Find the peak of every rank; then plan for the same placement, if that can be faster."""
        stages, rows = len(set(schedule.model_stages)), self._batch // choice.data
        parts = self._split(stages, choice.tensor)
        sizes, axes = choice[:3], Axes("pp", data="dp", model=self._cuts.axis)
        mesh = init_device_mesh(self._cuts.device, sizes, mesh_dim_names=("pp", "dp", self._cuts.axis))
        paper = OnPaper(mesh=mesh, axes=axes, shard=choice.shard)
        trainer = self._trainer(parts, schedule, self._engine(choice.remat), paper)
        batch = (rows_of(on_meta(tree), rows) for tree in self._inputs)
        memory = trainer.lower(parts.params, *batch, state=parts.state).memory_analysis()
        peaks = tuple(memory[rank].peak for rank in range(choice.pipe))
        bound = bound_of_order(schedule, costs, None)
        if bound is not None:  # and the least that updates add
            bound += min(sum(costs.of("step", s) for s in schedule.stages_of(r)) for r in memory)
            if self._effort and choice.pipe > 1 and (choice, schedule.placement) not in self._seen:
                self._seen.add((choice, schedule.placement))
                left = [self._memory - p + a for p, a in zip(peaks, timeline.peak_activations, strict=True)]
                self._push(bound, "plan", self._plan, choice, schedule, costs, left)
        fits, make = max(peaks) <= self._memory, partial(self._make, choice, schedule, parts)
        binds = binding(memory, timeline, seconds, self._concurrency / choice.data / choice.tensor, fits)
        return Row(choice, schedule, parts.at, seconds, bound, peaks, fits, binds, make)

    def _plan(self, choice: Choice, like: Schedule, costs: Costs, left: list[float]) -> None:
        """Plan for what ranks have left beside what they hold in a schedule of this placement."""
        bare = replace(costs, backward=None, parameters=0, step=0, unshard=0, reduce_grad=0, reduce_tied=0)
        place, cap = like.placement, None if max(left) == inf else left
        found = plan(like.ranks, like.microbatches, bare, cap=cap, placement=place, effort=self._effort)
        self._simulate(choice, replace(found.schedule, name="plan"), costs)

    def _make(
        self, choice: Choice, schedule: Schedule, parts: Split, transport: Transport | None = None
    ) -> Trainer:
        """Make the trainer of a row; see :class:`Row`."""
        shard = "none" if transport is None else transport.shard
        if (shard, axis_sizes(transport, choice.pipe)) != (choice.shard, choice[:3]):
            model = ", model='tp'" if choice.tensor > 1 else ""
            raise ValueError(
                f"transport: got {transport}, with shard={shard!r}, expected P2P(mesh=mesh, axes=Axes('pp',"
                f" data='dp'{model}), shard={choice.shard!r}) of a mesh of {choice.grid} ranks"
            )
        if choice.tensor > 1:
            axis = transport.mesh[transport.axes.model]  # type: ignore[union-attr,index]
            parts = self._cuts.laid_over(axis, parts.at)
        return self._trainer(parts, schedule, graph(remat=choice.remat), transport)


def least_bytes(choice: Choice, timeline: Timeline, costs: Costs) -> float:
    """Return the bytes of parameters, or gradients, and of residuals of the fullest rank."""
    schedule, share = timeline.schedule, 0 if choice.shard == "params" else 0.5
    of_ranks = (
        sum(share * costs.of("parameters", stage) for stage in schedule.stages_of(rank))
        for rank in range(schedule.ranks)
    )
    return max(map(sum, zip(of_ranks, timeline.peak_activations, strict=True)))

"""Measure the stages of all configurations, simulate all of them, and find the peaks of the fastest."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from heapq import heappop, heappush
from inspect import signature
from math import inf, prod
from operator import ge
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppfunc.runtime import Axes, OnPaper, Transport
from ppfunc.schedule import Costs, Schedule, Timeline, one_f_one_b, plan, simulate
from ppfunc.schedule.planner.overview import bound_of_order
from ppfunc.splitter import Split
from ppfunc.stage import StageError, graph
from ppfunc.training import Trainer
from ppfunc.training.trainer import completed, on_meta

from .rows import Choice, Row, axis_sizes, binding
from .stages import MICROBATCHES, Cuts, Speeds, remembering, rows_of, seconds_of, times_of


class Simulated(NamedTuple):
    """Hold a schedule that was simulated, in the order in which candidates become rows.

    Args:
        late: whether parameters and activations alone are more than the limit, bool.
        key: seconds of a step; bytes of the fullest rank of a late candidate.
        number: number of candidates before it.
        choice, schedule, costs, timeline, seconds: the configuration, and its step on paper.
    """

    late: bool
    key: float
    number: int
    choice: Choice
    schedule: Schedule
    costs: Costs
    timeline: Timeline
    seconds: float


class Configurations:
    """Holds the configurations that were simulated, and the rows that were worked out.

    Args:
        cuts: the model in stages, over tensor ranks.
        trainer: function of stages, schedule, engine and transport that makes a trainer.
        rows: inputs and targets.
        choices: grids, microbatches, rematerialisations and shards to try.
        link: seconds of a message, bytes per second, bytes per second of the host.
        concurrency: number of ranks of all pipelines that can compute at one time.

    The other arguments are those of :func:`ppfunc.tune`.
    """

    def __init__(
        self, cuts: Cuts, trainer: Callable[..., Trainer], rows: tuple[Any, Any],
        choices: Sequence[Choice], builders: Mapping[str, Callable[..., Schedule]], batch: int, memory: float,
        link: tuple[float, float, float | None], speeds: Speeds, concurrency: float, effort: float,
    ) -> None:  # fmt: skip
        self._trainer, self._inputs, self._choices, self._builders = trainer, rows, choices, builders
        self._batch, self._memory, self._effort = batch, memory, effort
        self._link, self._speeds, self._concurrency = link, speeds, concurrency
        self.heap, self.rows, self.refused = list[Simulated](), list[Row](), dict[str, Exception]()
        self._seen = set[Any]()
        self._cuts, self._split, self._costs = cuts, cache(cuts.split), cache(self._measure)
        self._engine = cache(lambda remat: remembering(graph(remat=remat)))

    def run(self, top: int, progress: Callable[[str, Row | None], object]) -> bool:
        """Search until ``top`` rows fit.

        Returns:
            Whether nothing interrupted the search.
        """
        with _fake_group(prod(self._choices[0][:3])):
            try:
                for step in self._steps(top):
                    fitting = [row for row in self.rows if row.fits]
                    progress(step, min(fitting, key=lambda row: row.seconds, default=None))
            except KeyboardInterrupt:
                return False
        if self.refused and not self.rows:
            (_, first), *others = self.refused.items()
            for what, error in others:
                first.add_note(f"{what}: {error}")
            raise first
        return True

    def _steps(self, top: int) -> Iterator[str]:
        """Simulate every schedule of every choice, then work out rows, the fastest first; yield names.

        Candidates that are too large by an estimate come last, and only for want of rows: the smallest.
        """
        for choice in self._choices:
            for name, build in (self._builders if choice.pipe > 1 else {"1f1b": one_f_one_b}).items():
                self._try(f"{name} of {choice.grid} ranks", self._build, choice, build)
                yield name
        while self.heap and not (self.heap[0].late and self.rows):
            fitting = sorted(row.seconds for row in self.rows if row.fits)
            if len(fitting) >= top and fitting[top - 1] <= self.heap[0].seconds:
                return
            found = heappop(self.heap)
            self._try(f"{found.schedule.name}, {found.choice}", self._work_out, found)
            yield found.schedule.name

    def _try(self, what: str, step: Callable[..., Any], *args: Any) -> Any:
        """Take a step, and note its refusal, which raises where nothing is found at all."""
        if what not in self.refused:
            try:
                return step(*args)
            except (ValueError, StageError) as error:
                self.refused[what] = error
        return None

    # -- costs

    def _measure(self, size: int, tensor: int, remat: Any, stages: int) -> Costs:
        batch = tuple(rows_of(tree, MICROBATCHES * size) for tree in self._inputs)
        make, ring = partial(self._trainer, engine=self._engine(remat)), (tensor, *self._link[:2])
        return times_of(make, self._split(stages, tensor), batch, self._speeds, ring)

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

    # -- the way of a candidate

    def _build(self, choice: Choice, builder: Callable[..., Schedule]) -> None:
        """Build a schedule, measure its stages, and simulate it."""
        microbatches = self._batch // choice.data // choice.microbatch
        schedule = builder(choice.pipe, microbatches)
        if schedule.microbatches != microbatches:
            raise ValueError("each rank has microbatches of its own; expected several pipelines instead")
        stages = len(set(schedule.model_stages))
        self._split(stages, 1)
        what = f"microbatches of {choice.microbatch} in {stages} stages"
        what = f"{choice.tensor} tensor ranks" if choice.tensor > 1 else what
        costs = self._try(what, self._of_stages, choice, stages)
        if costs is not None:
            costs = costs.of_stages(schedule.model_stages)
            if "costs" in signature(builder).parameters:
                schedule = builder(choice.pipe, microbatches, costs=replace(costs, backward=None))
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
        order = late, least if late else seconds, len(self._seen)
        heappush(self.heap, Simulated(*order, choice, schedule, costs, timeline, seconds))

    def _work_out(self, found: Simulated) -> None:
        """Find the peak of every rank; then plan for the same placement, if that can be faster."""
        *_, choice, schedule, costs, timeline, seconds = found
        parts = self._split(len(set(schedule.model_stages)), choice.tensor)
        mesh = init_device_mesh(
            self._cuts.device, choice[:3], mesh_dim_names=("pp", "dp", axis := self._cuts.axis)
        )
        paper = OnPaper(mesh=mesh, axes=Axes("pp", data="dp", model=axis), shard=choice.shard)
        trainer = self._trainer(parts, schedule, self._engine(choice.remat), paper)
        batch = (rows_of(on_meta(tree), self._batch // choice.data) for tree in self._inputs)
        memory = trainer.lower(parts.params, *batch, state=parts.state).memory_analysis()
        peaks = tuple(memory[rank].peak for rank in range(choice.pipe))
        bound = bound_of_order(schedule, costs, None)
        if bound is not None:  # and the least that updates add
            bound += min(sum(costs.of("step", s) for s in schedule.stages_of(r)) for r in memory)
        fits, make = max(peaks) <= self._memory, partial(self._make, choice, schedule, parts)
        at_once = f"{self._concurrency:.3g} of {prod(choice[:3])}"
        binds = binding(memory, timeline, seconds, at_once, fits)
        self.rows.append(Row(choice, schedule, parts.at, seconds, bound, peaks, fits, binds, make))
        new = (choice, schedule.placement) not in self._seen
        if self._effort and choice.pipe > 1 and bound is not None and new:
            self._seen.add((choice, schedule.placement))
            self._plan(found, peaks)

    def _plan(self, like: Simulated, peaks: tuple[int, ...]) -> None:
        """Plan for the memory that ranks have left beside their other tensors under this placement."""
        schedule, kept = like.schedule, like.timeline.peak_activations
        left = [self._memory - p + a for p, a in zip(peaks, kept, strict=True)]
        one = [
            sum(like.costs.of("activation", s) for s in schedule.stages_of(r)) for r in range(schedule.ranks)
        ]
        if all(map(ge, left, one)):  # else no order fits
            bare = replace(
                like.costs, backward=None, parameters=0, step=0, unshard=0, reduce_grad=0, reduce_tied=0
            )
            cap, given = None if max(left) == inf else left, (schedule.ranks, schedule.microbatches, bare)
            found = plan(*given, cap=cap, placement=schedule.placement, effort=self._effort)
            self._simulate(like.choice, replace(found.schedule, name="plan"), like.costs)

    def _make(
        self, choice: Choice, schedule: Schedule, parts: Split, transport: Transport | None = None
    ) -> Trainer:
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


@contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    """Make a fake default process group of torch, over which meshes are made."""
    if dist.is_initialized():
        raise ValueError(
            "tune: got a process that has a process group, expected none: a search makes a fake one;"
            " call it before init_process_group, or after destroy_process_group"
        )
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # else a traceback names the rank in every line


def least_bytes(choice: Choice, timeline: Timeline, costs: Costs) -> float:
    """Return the bytes of parameters, or gradients, and of residuals of the fullest rank."""
    schedule, share = timeline.schedule, 0 if choice.shard == "params" else 0.5
    of_ranks = (
        sum(share * costs.of("parameters", stage) for stage in schedule.stages_of(rank))
        for rank in range(schedule.ranks)
    )
    return max(map(sum, zip(of_ranks, timeline.peak_activations, strict=True)))

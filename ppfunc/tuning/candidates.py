"""Search configurations, best first, each only as exactly as needed."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import heappop, heappush
from inspect import signature
from itertools import count
from math import inf, prod
from operator import ge
from threading import RLock
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppfunc.runtime import Axes, OnPaper, Transport
from ppfunc.schedule import (
    Costs,
    Schedule,
    Timeline,
    gpipe,
    one_f_one_b,
    plan,
    simulate,
)
from ppfunc.schedule.planner.overview import bound_of_order
from ppfunc.splitter import Split
from ppfunc.stage import StageError, graph
from ppfunc.training import Trainer
from ppfunc.training.calls import completed, on_meta

from .rows import Choice, Row, axis_sizes, binding
from .stages import (
    MICROBATCHES,
    Cuts,
    Pace,
    Speeds,
    remembering,
    rows_of,
    seconds_of,
    times_of,
)

_IN_TURN = RLock()  # searches of this process, which has one default group


class Candidates:
    """Holds the configurations by the least seconds that they can take, and what is known of their parts.

    Args:
        cuts: the model in stages, over tensor ranks.
        trainer: makes a trainer of stages, schedule, engine and transport.
        rows: inputs and targets.
        choices: to try, those with the least remat first.
        link: latency and bandwidth, that of the host, and the latency among tensor ranks.
        concurrency: ranks of all pipelines that can compute at one time.

    The others are those of :func:`ppfunc.tune`.
    """

    def __init__(
        self, cuts: Cuts, trainer: Callable[..., Trainer], rows: tuple[Any, Any],
        choices: Sequence[Choice], builders: Mapping[str, Callable[..., Schedule]], batch: int, memory: float,
        link: tuple[float, float, float | None, float], speeds: Speeds, concurrency: float, effort: float,
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
        with _IN_TURN:
            if dist.is_initialized():
                raise ValueError(
                    "tune: got a process that has a process group, expected none: a search makes a fake one;"
                    " call it before init_process_group, or after destroy_process_group"
                )
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

        Candidates that are too large by an estimate come last, and only for want of rows: the smallest. What
        fails is refused by name; it raises where nothing is left, unless all that failed has tensor ranks.
        """
        failed: Exception | None = None
        while self.heap and sum(row.fits for row in self.rows) < top and not (self.heap[0][0] and self.rows):
            *_, name, step = heappop(self.heap)
            try:
                self.rows += filter(None, [step()])
            except (ValueError, StageError) as error:
                choice, known = step.args[0], isinstance(error, ValueError) and name not in ("times", "row")
                what = self._refused(name, *step.args)
                self.refused[what] = str(error)
                if failed is not None:
                    failed.add_note(f"{what}: {error}")
                elif not known and choice.tensor == 1:
                    failed = error
            yield name
        if failed and not self.rows:
            raise failed

    @staticmethod
    def _refused(name: str, choice: Choice, *given: Any) -> str:
        """Say what a step has refused: one row, or all of a schedule, of tensor ranks or microbatches."""
        if name == "row":
            return f"{given[0].name}, {choice}"
        if name != "times":
            return f"{name} of {choice.grid} ranks"
        of_tensor = choice.tensor > 1
        return f"{choice.tensor} tensor ranks" if of_tensor else f"microbatches of {choice.microbatch}"

    def _push(self, key: float, name: str, step: Callable[..., Any], *args: Any, late: bool = False) -> None:
        heappush(self.heap, (late, key, next(self._numbers), name, partial(step, *args)))

    # -- costs

    def _measure(self, size: int, tensor: int, remat: Any, stages: int | None) -> Costs:
        batch = (rows_of(tree, MICROBATCHES * size) for tree in self._inputs)
        make, (_, bandwidth, _, hop) = partial(self._trainer, engine=self._engine(remat)), self._link
        ring = tensor, hop, bandwidth
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
        names, (latency, bandwidth, host, _) = ("bytes", "parameters", "step", "activation"), self._link
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
                one = [sum(costs.of("activation", s) for s in schedule.stages_of(rank)) for rank in memory]
                if all(map(ge, left, one)):  # else no order fits
                    self._push(bound, "plan", self._plan, choice, schedule, costs, left)
        fits, make = max(peaks) <= self._memory, partial(self._make, choice, schedule, parts)
        at_once = f"{self._concurrency:.3g} of {choice.pipe * choice.data * choice.tensor}"
        binds = binding(memory, timeline, seconds, at_once, fits)
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

"""Tune: rank configurations of a training step by predicted time, under a limit of memory.

The stages of all configurations are measured, all schedules simulated, and the peaks of the fastest found.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from inspect import signature
from itertools import product
from math import inf, prod
from operator import ge
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppfunc import _logs
from ppfunc._checks import (
    duration,
    naming_arguments,
    require_counts,
    require_number,
    require_one_of,
    require_positive,
    require_type,
    show_table,
    shown,
    table,
    with_arguments,
)
from ppfunc.runtime import Axes, OnPaper, Transport
from ppfunc.runtime.paper.ledger import Memory
from ppfunc.runtime.ports.protocols import ShardWhat
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Schedule,
    Timeline,
    find_builder,
    one_f_one_b,
    plan,
    seq1f1b,
    simulate,
    spread,
    with_parts,
)
from ppfunc.schedule.formats.svg import Axis, Point, amount, draw
from ppfunc.schedule.planner.overview import bound_of_order
from ppfunc.splitter import Split
from ppfunc.splitter.splitting import checked_module
from ppfunc.stage import Engine, Loss, StageError, graph
from ppfunc.stage.device import accelerates
from ppfunc.stage.tree import tree_leaves
from ppfunc.training import Trainer
from ppfunc.training.optim import Optimizer
from ppfunc.training.trainer import completed, on_meta
from ppfunc.vocabulary import VocabularyLoss

from .stages import (
    MICROBATCHES,
    Cuts,
    Lay,
    ModelCut,
    Pieces,
    Speeds,
    batch_of,
    concurrency_of,
    parameters_of,
    remembering,
    seconds_of,
    times_of,
)

_log = _logs.room("planning")

_ALIKE = ("data_parallel", "deepspeed_train")  # to several pipelines, and 1f1b
TRAINING = tuple(
    name for name, build in BUILDERS.items() if name not in _ALIKE and not build(2, 4).forward_only
)


# -- the choices, and the rows of the table

Grid = tuple[int, int, int]
"""Ranks of a pipeline, data ranks, tensor ranks."""


class Choice(NamedTuple):
    """Hold the choices of a row beside its schedule.

    Args:
        pipe, data, tensor: ranks of a pipeline, and of the axes over which it has copies, and parts.
        microbatch: rows of a microbatch.
        remat: argument of the engine, ``engines.graph(remat=...)``.
        shard: argument of the transport, ``P2P(mesh=..., axes=..., shard=...)``.
        slices: number of slices of a sequence, 0 for microbatches without a carry.
        parts: name of the output layer in parts of the vocabulary on all ranks of a pipeline; None for none.
        spread: name of the encoder with copies on all ranks of a pipeline; None for none.
    """

    pipe: int
    data: int
    tensor: int
    microbatch: int
    remat: Any
    shard: ShardWhat
    slices: int
    parts: str | None = None
    spread: str | None = None

    @property
    def grid(self) -> str:
        """Write the ranks of each axis, without trailing axes of size 1."""
        sizes = (self.pipe, self.data, self.tensor)
        return " x ".join(map(str, sizes[: 3 if self.tensor > 1 else 2 if self.data > 1 else 1]))

    def __str__(self) -> str:
        grid = f"{self.grid}, shard {self.shard}" if self.data > 1 else self.grid
        return f"ranks {grid}, {self.of_rows}, remat {self.remat}"

    @property
    def of_rows(self) -> str:
        """Write the rows of a microbatch, and its slices; and the modules on all ranks."""
        slices = f" in {self.slices} slices" if self.slices else ""
        return f"microbatches of {self.microbatch}{slices}{self.modules}"

    @property
    def modules(self) -> str:
        """Write the modules on all ranks of a pipeline."""
        ways = (self.parts, "in parts"), (self.spread, "spread")
        return "".join(f", {name} {way}" for name, way in ways if name)

    def cut(self, stages: int) -> ModelCut:
        """Name the cut of the model into ``stages`` stages, beside the modules."""
        return ModelCut(stages, self.slices, self.parts, self.spread, self.pipe if self.parts else 0)


def grids_of(ranks: int, grids: Any, tensor: object) -> list[Grid]:
    """List the requested grids of ``ranks`` ranks; without ``tensor`` they have no tensor ranks."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    every = [(p, d, ranks // p // d) for p in divisors for d in divisors if ranks % (p * d) == 0]
    if grids == "any":
        return [grid for grid in every if grid[2] == 1 or tensor is not None]
    triples = [(*grid, 1) if len(grid) == 2 else tuple(grid) for grid in grids]
    for grid, triple in zip(grids, triples, strict=True):
        if triple not in every:
            raise ValueError(
                f"grids: got {grid}, expected (ranks of a pipeline, pipelines), or (ranks of a pipeline, data"
                f" ranks, tensor ranks), whose product is {ranks}"
            )
    if (tensor is not None) != any(triple[2] > 1 for triple in triples):
        raise ValueError(
            f"grids: got {grids}, and tensor={tensor}; expected tensor ranks together with a function"
            " tensor(mesh) that lays the model over them"
        )
    return triples


def axis_sizes(transport: Transport | None, pipe: int) -> Grid:
    """Return the ranks of each axis of a transport; without a mesh one pipeline of ``pipe`` ranks."""
    if transport is None or transport.mesh is None:
        return pipe, 1, 1
    mesh, axes = transport.mesh, transport.axes
    roles = (axes.pipe,), axes.data_axes, axes.model_axes
    sizes = [prod(mesh[axis].size() for axis in names) for names in roles]
    return sizes[0], sizes[1], sizes[2]


def choices_of(
    ranks: int, batch: int, grids: Sequence[Grid], sizes: Sequence[int] | None,
    remats: Sequence[Any], shards: Sequence[ShardWhat], slices: Sequence[int],
    modules: Sequence[Sequence[str | None]], named: bool,
) -> Iterator[Choice]:  # fmt: skip
    """List the choices beside the schedule; rows divide in every grid that is ``named``, else in some.

    Args:
        modules: output layers and encoders to try on all ranks of a pipeline of several.
    """
    powers = [2**n for n in range(batch.bit_length()) if batch % (ranks * 2**n) == 0]
    if sizes is None and not powers:
        raise ValueError(f"batch: got {batch} rows, expected a multiple of the {ranks} ranks, or microbatch=")
    for size, remat, grid in product(powers if sizes is None else sizes, remats, grids):
        require_counts(microbatch=size)
        if batch % (grid[1] * size) and (named or all(batch % (each[1] * size) for each in grids)):
            raise ValueError(
                f"microbatch: got {size}, expected a divisor of {batch} rows over {grid[1]} pipelines"
            )
        if batch % (grid[1] * size) == 0:
            some = shards if grid[1] > 1 else get_args(ShardWhat)[:1]
            for each, k, *names in product(some, slices, *(modules if grid[0] > 1 else ())):
                yield Choice(*grid, size, remat, each, k, *names)


_OVER, _SHOWN = 3, 1.5  # rows of a table that do not fit, times the limit up to which rows are drawn


class Row(NamedTuple):
    """A configuration, with its seconds and bytes on paper.

    Args:
        choice: choices beside schedule and cuts.
        schedule: schedule of compute only.
        at: names of the modules that begin the stages after the first.
        seconds: time of a step.
        bound: the least seconds of any order of this placement, without a limit of memory; None if unknown.
        peaks: bytes of every rank of a pipeline.
        fits: whether no rank exceeds the limit.
        binds: scarce resource in words: the bytes, or the time, of a rank.
        make: ``make(transport=None) -> Trainer``, whose parameters are those of ``pp.split(model, args,
            at=row.at, output=row.choice.parts, encoder=row.choice.spread)``; with parts, as
            ``pp.vocabulary_parallel(split, row.choice.pipe, loss_fn).cut(split.params)``. Several pipelines
            take ``P2P(mesh=mesh, axes=Axes("pp", data="dp"), shard=...)``. With tensor ranks it takes
            ``Axes("pp", data="dp", model="tp")``, and the model is ``tensor(mesh["tp"])``. With slices,
            parameters are those of ``pp.split(..., slices=row.choice.slices)``, and batches those of
            ``pp.microbatch(batch, row.schedule.sequences, slices=row.choice.slices)``.
    """

    choice: Choice
    schedule: Schedule
    at: tuple[str, ...]
    seconds: float
    bound: float | None
    peaks: tuple[int, ...]
    fits: bool
    binds: str
    make: Callable[..., Trainer]

    def __str__(self) -> str:
        return f"{self.schedule.name}, {self.choice}"


def binding(
    memory: Mapping[int, Memory], timeline: Timeline, seconds: float, at_once: str, fits: bool
) -> str:
    """Name the rank that has most of the scarce resource, bytes or time; or say that ranks wait for cores."""
    if fits and seconds > timeline.makespan:
        return f"cores for {at_once} ranks; {timeline.makespan:.4g} s with all"
    if fits:
        idle, rank = min((idle, rank) for rank, idle in enumerate(timeline.idle))
        return f"rank {rank} computes {1 - idle / timeline.makespan:.0%}"
    rank = max(memory, key=lambda rank: memory[rank].peak)
    kind, size = max(memory[rank].held._asdict().items(), key=lambda item: item[1])
    return f"needs {memory[rank].peak} bytes on rank {rank}, {amount(size, 'B')} of {kind}"


@dataclass(frozen=True, repr=False)
class Tuning:
    """The rows that were worked out: those that fit, the fastest first, then the others, the smallest first.

    Args:
        rows: rows as ranked.
        memory: limit in bytes of a rank.
        complete: whether nothing interrupted the search.
        waiting: number of candidates left: slower than the rows that fit, or too large by an estimate.
        refused: schedules, grids, tensor ranks and microbatches that fail, with the reasons.
    """

    rows: tuple[Row, ...]
    memory: float
    complete: bool
    waiting: int
    refused: Mapping[str, str]

    @property
    def best(self) -> Row:
        """Return the fastest row that fits.

        Raises:
            ValueError: none fits; it says what the smallest needs of the rows that were worked out.
        """
        if not self.rows or not self.rows[0].fits:
            why: object = self.refused
            if self.rows:
                why = (
                    f"the smallest of {len(self.rows)} rows worked out needs {max(self.rows[0].peaks):,}"
                    f" bytes, and {self.waiting} candidates left may need less"
                )
            raise ValueError(f"memory: got {self.memory:,} bytes a rank, in which nothing fits; {why}")
        return self.rows[0]

    @property
    def frontier(self) -> tuple[Row, ...]:
        """List the rows that no row beats in both time and bytes, the fastest first."""
        rows = sorted(self.rows, key=lambda row: (row.seconds, max(row.peaks)))
        return tuple(r for n, r in enumerate(rows) if all(max(r.peaks) < max(q.peaks) for q in rows[:n]))

    def __repr__(self) -> str:
        fit = sum(row.fits for row in self.rows)
        return f"Tuning(rows={len(self.rows)}, fit={fit}, waiting={self.waiting}, complete={self.complete})"

    def __str__(self) -> str:
        rows = self.rows[: sum(r.fits for r in self.rows) + _OVER]
        cells = [[r.seconds, r.bound, amount(max(r.peaks), "B"), str(r), r.binds] for r in rows]
        more = f"{len(self.rows) - len(rows)} more do not fit; " if len(rows) < len(self.rows) else ""
        end = "" if self.complete else "; interrupted"
        text = table(["seconds", "bound", "peak", "configuration", "what binds"], cells)
        refused = f", {len(self.refused)} refused" if self.refused else ""
        if not self.rows:
            refused += "".join(f"\n{name}: {why}" for name, why in self.refused.items())
        none = "" if not rows or rows[0].fits else f"nothing fits in {amount(self.memory, 'B')} a rank; "
        return f"{text}\n{none}{more}{self.waiting} candidates were left{refused}{end}"

    _repr_pretty_ = show_table

    def to_json(self) -> str:
        """Return one JSON object with the fields of the tuning and of its rows; schedules are names.

        Without a limit, ``memory`` is null.
        """
        rows = [
            r.choice._asdict()
            | {name: value for name, value in r._asdict().items() if name != "make"}
            | {"schedule": r.schedule.name, "choice": str(r)}
            for r in self.rows
        ]
        limit = None if self.memory == inf else self.memory
        return json.dumps(vars(self) | {"rows": rows, "memory": limit}, default=str)

    def to_svg(self, *, width: float | None = None) -> str:
        """Draw the rows as an SVG file, time over memory; rows of the frontier that fit are listed below.

        Rows that need much more than the limit are left out, if others fit.

        Args:
            width: width in pixels, from 720 to 100000; by default 900.
        """
        best = [row for row in self.frontier if row.fits]
        edge = _SHOWN * self.memory if best else inf
        rows = [row for row in self.rows if max(row.peaks) <= edge]
        words = {id(r): (duration(r.seconds), amount(max(r.peaks), "B"), str(r)) for r in rows}
        key = [(str(n), *words[id(row)]) for n, row in enumerate(best, 1)]
        labels = {id(row): label for row, (label, *_) in zip(best, key, strict=True)}
        points = [
            Point(
                max(r.peaks), r.seconds, "point" if r.fits else "point over", labels.get(id(r), ""),
                ", ".join(words[id(r)]),
            )
            for r in rows
        ]  # fmt: skip
        bounded = self.memory <= _SHOWN * max((point.x for point in points), default=0)
        limit = [(self.memory, f"limit {amount(self.memory, 'B')}")] if self.memory < inf else []
        told = f", under the {limit[0][1]}" if limit and not bounded else ""
        more = f"; {len(self.rows) - len(rows)} more are over the limit" if len(rows) < len(self.rows) else ""
        longest = max((point.y for point in points), default=0)
        return draw(
            points, "Configurations on paper", str(self), width,
            Axis(f"peak memory of the fullest rank{told}{more}", lambda size: amount(size, "B")),
            Axis("time of a step", partial(duration, most=longest)),
            {"point": "fits", "over": "over the limit"}, limit=limit if bounded else [],
            key=[("", "step", "peak", "configuration"), *key] if key else (),
        )  # fmt: skip

    _repr_svg_ = to_svg


# -- the search


class Simulated(NamedTuple):
    """Hold a schedule that was simulated, in the order in which candidates become rows.

    Args:
        late: whether parameters and activations alone are more than the limit, bool.
        key: seconds of a step; bytes of the fullest rank of a late candidate.
        number: number of candidates before it.
        cut, choice, schedule, costs, timeline, seconds: the configuration, and its step on paper.
    """

    late: bool
    key: float
    number: int
    cut: ModelCut
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
            alone = {"seq1f1b": seq1f1b} if choice.slices else {"1f1b": one_f_one_b}
            builders = of_slices(self._builders, choice.slices) if choice.pipe > 1 else alone
            for name, build in builders.items():
                cut = f", {choice.slices} slices" if choice.slices else ""
                what = f"{name} of {choice.grid} ranks{cut}{choice.modules}"
                self._try(what, self._build, choice, build)
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

    def _measure(self, size: int, tensor: int, remat: Any, cut: ModelCut) -> Costs:
        batch = [batch_of(tree, MICROBATCHES * size, MICROBATCHES, cut.slices) for tree in self._inputs]
        make, ring = partial(self._trainer, engine=self._engine(remat)), (tensor, *self._link[:2])
        return times_of(make, self._split(cut, tensor), batch, self._speeds, ring, cut.slices)

    def _of_stages(self, choice: Choice, cut: ModelCut) -> Costs:
        """Return the costs of stages, with messages, sums over data ranks and over replicas, and updates."""
        costs = self._costs(choice.microbatch, choice.tensor, choice.remat, cut)
        stages, d = len(costs.forward), choice.data
        latency, bandwidth, host = self._link
        sizes, steps = ([costs.of(name, s) for s in range(stages)] for name in ("parameters", "step"))
        seconds = [size / 2 / bandwidth for size in sizes]  # of all gradients
        passed = [(d - 1) * (s / d + latency) for s in seconds]  # each has its part, or gets all parts

        def moved(costs: Costs) -> Costs:
            sent, kept = ([costs.of(name, s) for s in range(stages)] for name in ("bytes", "activation"))
            return replace(
                costs,
                communication=[latency + size / bandwidth for size in sent],
                recompute=costs.forward,
                offload=None if host is None else [size / host for size in kept],
            )

        return replace(
            moved(costs),
            slices=tuple(map(moved, costs.slices)),
            reduce_grad=passed if choice.shard == "params" else [2 * s for s in passed],
            unshard=passed,
            reduce_tied=[latency + s for s in seconds],
            step=steps if choice.shard == "none" else [s / d for s in steps],
        )

    # -- the way of a candidate

    def _build(self, choice: Choice, builder: Callable[..., Schedule]) -> None:
        """Build a schedule, measure its stages, and simulate it."""
        microbatches = self._batch // choice.data // choice.microbatch
        schedule = builder(choice.pipe, microbatches, *([choice.slices] if choice.slices else []))
        if schedule.microbatches != microbatches * max(choice.slices, 1):
            raise ValueError("each rank has microbatches of its own; expected several pipelines instead")
        stages = len(set(schedule.model_stages))
        cut = choice.cut(stages)
        self._split(cut, 1)
        what = f"{choice.of_rows} in {stages} stages"
        what = f"{choice.tensor} tensor ranks" if choice.tensor > 1 else what
        costs = self._try(what, self._of_stages, choice, cut)
        if costs is not None:
            if "costs" in signature(builder).parameters:
                own = first_of(costs, stages).of_stages(schedule.model_stages)
                schedule = builder(choice.pipe, microbatches, costs=replace(own, backward=None))
            if choice.parts:
                schedule = with_parts(schedule, costs=first_of(costs, stages + choice.pipe + 1))
            if choice.spread:
                schedule = spread(schedule, costs=costs)
            self._simulate(cut, choice, schedule, costs.of_stages(schedule.model_stages))

    def _simulate(self, cut: ModelCut, choice: Choice, schedule: Schedule, costs: Costs) -> None:
        """Find the seconds of a schedule that is new, and whether its activations alone are too many."""
        if (choice, schedule.programs) in self._seen:
            return
        self._seen.add((choice, schedule.programs))
        timeline = simulate(completed(schedule, choice.shard == "params", False)[0], costs)
        least = least_bytes(choice, timeline, costs)
        seconds = seconds_of(timeline, costs, self._concurrency / choice.data / choice.tensor)
        late = least > self._memory
        order = late, least if late else seconds, len(self._seen)
        heappush(self.heap, Simulated(*order, cut, choice, schedule, costs, timeline, seconds))

    def _work_out(self, found: Simulated) -> None:
        """Find the peak of every rank; then plan for the same placement, if that can be faster."""
        *_, choice, schedule, costs, timeline, seconds = found
        pieces = self._split(found.cut, choice.tensor)
        mesh = init_device_mesh(
            self._cuts.device, choice[:3], mesh_dim_names=("pp", "dp", axis := self._cuts.axis)
        )
        paper = OnPaper(mesh=mesh, axes=Axes("pp", data="dp", model=axis), shard=choice.shard)
        trainer = self._trainer(pieces, schedule, self._engine(choice.remat), paper)
        rows = self._batch // choice.data
        batch = [
            batch_of(on_meta(tree), rows, rows // choice.microbatch, choice.slices) for tree in self._inputs
        ]
        params, state = map(pieces.of_step, (pieces.split.params, pieces.split.state))
        memory = trainer.lower(params, *batch, state=state).memory_analysis()
        peaks = tuple(memory[rank].peak for rank in range(choice.pipe))
        bound = bound_of_order(schedule, costs, None)
        if bound is not None:  # and the least that updates add
            bound += min(sum(costs.of("step", s) for s in schedule.stages_of(r)) for r in memory)
        fits, make = max(peaks) <= self._memory, partial(self._make, found, pieces)
        at_once = f"{self._concurrency:.3g} of {prod(choice[:3])}"
        binds = binding(memory, timeline, seconds, at_once, fits)
        self.rows.append(Row(choice, schedule, pieces.at, seconds, bound, peaks, fits, binds, make))
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
                like.costs, backward=None, parameters=0, step=0, unshard=0, reduce_grad=0, reduce_tied=0,
                slices=tuple(replace(costs, backward=None) for costs in like.costs.slices),
            )  # fmt: skip
            cap, given = None if max(left) == inf else left, (schedule.ranks, schedule.microbatches, bare)
            options: dict[str, Any] = {"placement": schedule.placement, "slices": schedule.slices}
            found = plan(*given, cap=cap, effort=self._effort, **options)
            self._simulate(like.cut, like.choice, replace(found.schedule, name="plan"), like.costs)

    def _make(self, found: Simulated, pieces: Pieces, transport: Transport | None = None) -> Trainer:
        choice = found.choice
        shard = "none" if transport is None else transport.shard
        if (shard, axis_sizes(transport, choice.pipe)) != (choice.shard, choice[:3]):
            model = ", model='tp'" if choice.tensor > 1 else ""
            raise ValueError(
                f"transport: got {transport}, with shard={shard!r}, expected P2P(mesh=mesh, axes=Axes('pp',"
                f" data='dp'{model}), shard={choice.shard!r}) of a mesh of {choice.grid} ranks"
            )
        if choice.tensor > 1:
            axis = transport.mesh[transport.axes.model]  # type: ignore[union-attr,index]
            pieces = self._cuts.laid_over(axis, pieces.at, found.cut)
        return self._trainer(pieces, found.schedule, graph(remat=choice.remat), transport)


def of_slices(builders: Mapping[str, Callable[..., Schedule]], slices: int) -> dict[str, Any]:
    """Choose the builders of schedules with slices, or without where ``slices`` is 0."""
    return {n: b for n, b in builders.items() if ("slices" in signature(b).parameters) == bool(slices)}


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


def first_of(costs: Costs, stages: int) -> Costs:
    """Return the costs of the first stages of a model."""
    first: dict[str, Any] = {n: [costs.of(n, s) for s in range(stages)] for n in costs.per_stage}
    return replace(costs, **first)


def least_bytes(choice: Choice, timeline: Timeline, costs: Costs) -> float:
    """Return the bytes of parameters, or gradients, and of residuals of the fullest rank."""
    schedule, share = timeline.schedule, 0 if choice.shard == "params" else 0.5
    of_ranks = (
        sum(share * costs.of("parameters", stage) for stage in schedule.stages_of(rank))
        for rank in range(schedule.ranks)
    )
    return max(map(sum, zip(of_ranks, timeline.peak_activations, strict=True)))


# -- the front


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
    slices: Sequence[int] = (0,),
    parts: Sequence[str | None] = (None,),
    spread: Sequence[str | None] = (None,),
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
    """Rank grids, cuts, schedules, microbatches, slices, rematerialisations and shards by the time of a step.

    Stages are timed once per cut, microbatch, slices and rematerialisation that the search needs: here,
    alone, on one rank, beside those timed first. With one thread of torch these are seconds of that thread,
    unless a step waits for others, so other processes may run here. Calls in several threads search in turn.
    A step is simulated with its messages, sums and updates; its peaks are those of
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
        schedules: names of ``ppfunc list``; of one rank, always ``1f1b``, or ``seq1f1b`` with slices.
        microbatch: rows of a microbatch to try; by default the powers of two that leave at least one
            microbatch per rank.
        remat: arguments of :func:`ppfunc.engines.graph`, the least recomputation first.
        shard: arguments of :class:`ppfunc.P2P`, for several pipelines.
        slices: numbers of equal slices of a sequence to try, 0 for no carry; others take schedules
            of slices, a model as for ``pp.split(..., slices=)``, and targets with the tokens in axis 1. With
            ``speeds``, the slices of a sequence take equal times.
        parts: names of an output layer to try in parts of the vocabulary on all ranks of a pipeline
            (``"lm_head"``), None for the layer within the last stage. The loss function is one for both, such
            as :func:`ppfunc.vocabulary_cross_entropy`; see :func:`ppfunc.with_parts`.
        spread: names of an encoder to try as copies on all ranks of a pipeline (``"model.vision_tower"``),
            None for the module within the stages; see :func:`ppfunc.spread`. Every microbatch has something
            to encode.
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
    if isinstance(model, Split) and model.encoder:
        raise ValueError(f"model: got a split with the encoder {model.encoder}; split without encoder=")
    _require_options(model, loss_fn, optimizer, options)
    _require_lists(
        grids=grids, schedules=schedules, shard=shard, microbatch=microbatch, remat=remat, slices=slices,
        parts=parts, spread=spread,
    )  # fmt: skip
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
    _require_modules("parts", parts, model, every)
    _require_modules("spread", spread, model, every)
    if any(parts) and not isinstance(loss_fn, VocabularyLoss):
        raise TypeError(
            f"loss_fn: got {shown(loss_fn)} and parts={parts}, expected a loss of logits whole or in parts,"
            " pp.vocabulary_cross_entropy(...) or a pp.vocabulary.VocabularyLoss"
        )
    tried = microbatch, remat, shard, slices, (parts, spread)
    choices = list(choices_of(ranks, batch, every, *tried, grids != "any"))
    for k in slices:
        require_counts(0, slices=k)
        if not of_slices(builders, k):
            raise ValueError(
                f"slices: got {k}, and schedules {list(builders)}, none of which has that many; expected"
                " seq1f1b or seq_zb among them for slices, others for 0"
            )

    def trainer(pieces: Pieces, schedule: Schedule, engine: Engine, to: Transport | None = None) -> Trainer:
        loss = pieces.whole.loss_fn if pieces.whole else loss_fn
        stages = pieces.whole or pieces.split
        return Trainer(stages, loss, schedule, optimizer, to, engine=engine, **options)

    cuts = Cuts(model, args, {choice.microbatch for choice in choices}, tensor, loss_fn)
    link = latency, bandwidth, host
    at_once = concurrency_of(model, cores, speeds)
    search = Configurations(
        cuts, trainer, (args, targets), choices, builders, batch, memory, link, speeds, at_once, effort
    )
    complete = search.run(top, progress)
    rows = sorted(search.rows, key=lambda r: (not r.fits, r.seconds if r.fits else max(r.peaks), r.seconds))
    refused = {what: str(error) for what, error in search.refused.items()}
    tuning = Tuning(tuple(rows), memory, complete, len(search.heap), refused)
    _log.info("%r", tuning)
    return tuning


def _require_options(model: Any, loss_fn: Any, optimizer: Any, options: dict[str, Any]) -> None:
    """Raise TypeError for an argument that neither the search nor a trainer takes."""
    try:
        signature(Trainer).bind(model, loss_fn, None, optimizer, None, engine=None, **options)
    except TypeError as error:
        named = f"{with_arguments(f'tune() {error}', tune)} of Trainer"
        raise TypeError(with_arguments(named, Trainer)) from None


_ITEMS = {
    "grids": "tuples, or 'any'", "schedules": "names", "shard": "'none', 'optimizer' and 'params'",
    "microbatch": "numbers of rows", "remat": "those of pp.engines.graph", "slices": "numbers of slices",
    "parts": "names of modules, or None", "spread": "names of modules, or None",
}  # fmt: skip


def _require_lists(**lists: Any) -> None:
    """Raise ValueError where a list to try is empty, or no list."""
    for name, tried in lists.items():
        if (name, tried) in (("grids", "any"), ("microbatch", None)):
            continue
        if (
            not isinstance(tried, Sequence)
            or isinstance(tried, str)
            or not tried
            or (name == "grids" and int in map(type, tried))
        ):
            raise ValueError(f"{name}: got {shown(tried)}, expected a nonempty list of {_ITEMS[name]}")
    for what in lists["shard"]:
        require_one_of("shard", what, get_args(ShardWhat))


def _require_modules(
    argument: str, names: Sequence[str | None], model: torch.nn.Module | Split, grids: Sequence[Grid]
) -> None:
    """Refuse modules to put on all ranks that no candidate can have there."""
    for name in (name for name in names if name is not None):
        if isinstance(model, Split):
            raise ValueError(f"model: got a split and {argument}={names}, expected a module: cuts stay")
        checked_module(model, argument, name)
    if None not in names and all(pipe == 1 for pipe, *_ in grids):
        raise ValueError(f"{argument}: got {names}, and no grid with several ranks of a pipeline; add None")


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

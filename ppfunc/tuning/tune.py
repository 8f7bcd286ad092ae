"""Tune: rank configurations of a training step by predicted time, under a limit of memory.

The stages of all configurations are measured, in this process, or counted over given speeds. All schedules
are simulated, and the peaks of the fastest found.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heappop, heappush
from inspect import signature
from itertools import pairwise, product
from math import inf, prod
from operator import add, ge
from typing import Any, Literal, NamedTuple, get_args
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Module
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
from ppfunc.runtime import Axes, OnPaper, Transport, microbatch
from ppfunc.runtime.lowering.stage_programs import StageCall
from ppfunc.runtime.paper.ledger import Memory
from ppfunc.runtime.ports.protocols import ShardWhat
from ppfunc.schedule import (
    BUILDERS,
    Costs,
    Flow,
    Op,
    Schedule,
    Timeline,
    arrange,
    find_builder,
    one_f_one_b,
    place_communication,
    plan,
    seq1f1b,
    simulate,
    split_backward,
    spread,
    with_parts,
)
from ppfunc.schedule.formats.svg import Axis, Point, amount, draw
from ppfunc.schedule.instruction import COMPUTE, SENDS, TAIL
from ppfunc.schedule.planner.overview import bound_of_order
from ppfunc.splitter import Split, split
from ppfunc.splitter.splitting import checked_module
from ppfunc.stage import Engine, Loss, StageError, StageProgram, graph
from ppfunc.stage._torch import TorchDispatchMode
from ppfunc.stage.device import accelerates
from ppfunc.stage.layout import layout_of, local
from ppfunc.stage.operators import flops_of
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training import Trainer
from ppfunc.training.optim import Optimizer
from ppfunc.training.trainer import completed, on_meta
from ppfunc.vocabulary import VocabularyLoss, VocabularyParallel, vocabulary_parallel

# -- a model in stages, whole or over tensor ranks, their seconds and bytes

Lay = Callable[[DeviceMesh], Module]
"""``(mesh) -> module``: a copy of the model, laid over one axis of a mesh."""


class ModelCut(NamedTuple):
    """Name a way to cut a model into stages.

    Args:
        stages: number of stages beside the encoder and the parts of the output layer.
        slices: number of slices of a sequence, 0 for no carry.
        output, encoder: names of the modules that are stages of their own; None without.
        parts: number of parts of the output layer.
    """

    stages: int
    slices: int = 0
    output: str | None = None
    encoder: str | None = None
    parts: int = 0


class Pieces(NamedTuple):
    """Hold a model in stages: as it was split, and with its output layer in parts, if it has some."""

    split: Split
    whole: VocabularyParallel | None = None

    @property
    def at(self) -> tuple[str, ...]:
        return self.split.at[: -1 if self.whole else None]

    def of_step(self, trees: dict[int, Any]) -> dict[int, Any]:
        """Return parameters or states of the split as a step takes them."""
        return self.whole.cut(trees) if self.whole else trees

    def schedule(self, ranks: int) -> Schedule:
        """Return a schedule in which all stages have one rank, or each its own."""
        count = len((self.whole or self.split).stages)
        chain = tuple(range(count - bool(self.split.encoder)))
        encoder = range(chain[-1] + 1, count)
        alone = tuple(pairwise(chain)) if encoder else None
        flow = Flow((*encoder, *chain), range(MICROBATCHES), self.whole.edges if self.whole else alone)
        skips = [(stage, 0) for stage in encoder]
        return arrange([stage % ranks for stage in range(count)], [flow], skips=skips)


class Cuts:
    """Holds a model in stages, which all candidates share.

    Args:
        model: model, or a split of it, whose cuts stay.
        args: inputs of the model, of some rows.
        sizes: rows of the calls that cut the model, of which the largest number that runs counts.
        lay: function that lays the model over tensor ranks, if there are any.
        loss: loss function, which an output layer in parts computes.
    """

    def __init__(
        self, model: Module | Split, args: Any, sizes: Iterable[int], lay: Lay | None, loss: Loss
    ) -> None:
        self._given, self._args, self._lay, self._loss = model, args, lay, loss
        self._sizes = sorted(sizes, reverse=True)
        self._on_paper = cache(self._lay_on_paper)
        devices = (leaf.device.type for leaf in parameters_of(model) if not leaf.is_meta)
        self.device = next(devices, "cpu")  # of a mesh
        # Torch caches what DTensors do by the names of axes, also over groups that are gone.
        self.axis = f"tensor ranks of search {uuid4()}"

    def split(self, cut: ModelCut, tensor: int) -> Pieces:
        """Split the model, whole or over tensor ranks on paper."""
        given = self._given
        pieces = Pieces(given) if isinstance(given, Split) else self._cut(given, cut.stages, cut)
        if isinstance(given, Split) and cut.stages != len(given.stages):
            raise ValueError(f"{cut.stages} stages, and the model was split into {len(given.stages)}")
        return pieces if tensor == 1 else self._cut(self._on_paper(tensor), pieces.at, cut)

    def laid_over(self, axis: DeviceMesh, at: tuple[str, ...], cut: ModelCut) -> Pieces:
        """Split the model over an axis of a mesh, all ranks of which call this."""
        return self._cut(self._laid(axis), at, cut)

    def _cut(self, model: Module, at: int | tuple[str, ...], cut: ModelCut) -> Pieces:
        failed: list[Exception] = []
        for rows in self._sizes:
            try:
                args, slices = rows_of(self._args, rows), cut.slices or None
                parts = split(model, args, at=at, slices=slices, output=cut.output, encoder=cut.encoder)
                loss = self._loss if isinstance(self._loss, VocabularyLoss) else None
                return Pieces(parts, vocabulary_parallel(parts, cut.parts, loss) if cut.parts else None)
            except (ValueError, StageError) as error:
                failed.append(error)
        raise failed[0]

    def _lay_on_paper(self, tensor: int) -> Module:
        sizes = dist.get_world_size() // tensor, tensor
        mesh = init_device_mesh(self.device, sizes, mesh_dim_names=("others", self.axis))
        return self._laid(mesh[self.axis])

    def _laid(self, axis: DeviceMesh) -> Module:
        model = self._given.model if isinstance(self._given, Split) else self._given
        assert self._lay is not None
        laid = self._lay(axis)
        if laid is model or not isinstance(laid, Module) or not any(map(layout_of, laid.parameters())):
            raise TypeError(
                f"tensor: returned {shown(laid)}, expected a copy of the model with DTensors over the mesh,"
                " such as parallelize_module(copy.deepcopy(model), mesh, plan)"
                + "; the model itself is laid out now, and has to be made anew"
                * (laid is model)
            )
        untied = {names for names in _ties(model) if len(names) > 1} - _ties(laid)
        if untied:  # as parallelize_module leaves them
            raise TypeError(
                f"tensor: returned a model in which {' and '.join(min(untied))} are parameters of their own,"
                " expected one parameter, as in the model; tie them again after parallelize_module"
            )
        return laid


def _ties(model: Module) -> set[tuple[str, ...]]:
    """Group the names of parameters: those of one parameter are tied."""
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return set(map(tuple, names.values()))


def rows_of(tree: Any, rows: int) -> Any:
    """Repeat or cut a batch to ``rows`` rows, cyclically; leaves that are no tensors stay."""

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf[torch.arange(rows, device=leaf.device) % len(leaf)]

    return tree_map(taken, tree)


def batch_of(tree: Any, rows: int, sequences: int, slices: int) -> Any:
    """Make a batch of ``rows`` rows, cut into the slices of the sequences unless ``slices`` is 0."""
    batch = rows_of(tree, rows)
    return microbatch(batch, sequences, slices=slices) if slices and tree_leaves(tree) else batch


MICROBATCHES = 3  # of a step that is timed: most of them add to sums of gradients, as in a step of many
_STEPS = 7  # that are measured
_TIMED = ("forward", "backward_input", "backward_weight", "step")
_PROGRAMS = ("forward", "backward", "backward_input", "backward_weight")
_BUSY = COMPUTE | SENDS | {Op.UNSHARD, *TAIL}

Speeds = tuple[float, float] | None
Ring = tuple[int, float, float]
"""Tensor ranks, seconds of a hop from one to the next, and bytes per second."""


def _timed(step: Callable[[], Any]) -> Costs:
    """Return the least seconds of several steps by kind and stage: other processes only add to them."""
    step()  # which compiles
    return _least(*(step()[1].costs() for _ in range(_STEPS)))


def _least(*runs: Costs) -> Costs:
    times = {
        kind: tuple(map(min, zip(*(vars(run)[kind] for run in runs), strict=True)))
        for kind in _TIMED
        if isinstance(vars(runs[0])[kind], tuple)  # an update belongs to no slice
    }
    return Costs(**times, seconds=True, slices=tuple(map(_least, *(run.slices for run in runs))))


def _both(whole: Costs, halves: Costs) -> Costs:
    """Combine times of steps with whole backwards and with I and W apart."""
    inputs: Any = whole.backward_input  # of each stage
    return replace(
        whole,
        backward_input=halves.backward_input,
        backward_weight=halves.backward_weight,
        backward=tuple(2 * seconds for seconds in inputs),
        slices=tuple(map(_both, whole.slices, halves.slices)),
    )


def _sum(times: Costs, sent: Costs) -> Costs:
    """Add the seconds of collectives to the times of programs."""
    sums: dict[str, Any] = {k: tuple(map(add, vars(times)[k], vars(sent)[k])) for k in _PROGRAMS}
    return replace(times, slices=tuple(map(_sum, times.slices, sent.slices)), **sums)


def times_of(
    make: Callable[[Pieces, Schedule], Trainer],
    pieces: Pieces,
    batch: Sequence[Any],
    speeds: Speeds,
    ring: Ring = (1, 0, inf),
    slices: int = 0,
) -> Costs:
    """Return the costs of every stage: of whole backwards, of I and W apart, of updates; bytes as lowered.

    Args:
        make: makes a trainer of the pieces and a schedule.
        pieces: the model in stages.
        batch: inputs and targets of ``MICROBATCHES`` microbatches.
        speeds: operations and bytes per second, over which those of every operator are counted; an update
            reads the gradients, and reads and writes parameters and optimizer. None to run every stage on one
            rank.
        ring: over which the collectives of stages are counted in either case.
        slices: number of slices of each microbatch, whose costs are returned; 0 for no carry.
    """
    count = len((pieces.whole or pieces.split).stages)
    ranks, chunks = (1, count) if speeds is None else (count, 1)
    schedule = seq1f1b(ranks, MICROBATCHES, slices, chunks) if slices else pieces.schedule(ranks)
    both = [make(pieces, each) for each in (schedule, split_backward(schedule))]
    trees = [pieces.of_step(trees) for trees in (pieces.split.params, pieces.split.state)]
    lowered, apart = (each.lower(trees[0], *batch, state=trees[1]) for each in both)
    if speeds is None:
        state = both[0].init(*(tree_map(torch.clone, each) for each in trees))
        whole, halves = (_timed(partial(t.record, state, *batch, seed=(0, 0))) for t in both)
        times = lowered.costs(_both(whole, halves))
        if ring[0] == 1:
            return times
        return _sum(times, times_of(make, pieces, batch, (inf, inf), ring, slices))
    counter = partial(_Roofline, *speeds, ring)
    counts = [list(zip(*each.cost_analysis(counter).values(), strict=True)) for each in (lowered, apart)]
    f, b, i, w = (tuple(x / schedule.microbatches for x in xs) for xs in (*counts[0][:2], *counts[1][2:]))
    state = lowered.state
    moved = (
        [p, p, p, state.optimizer[stage], state.optimizer[stage]] for stage, p in sorted(state.params.items())
    )
    step = tuple(sum(local(leaf).nbytes for leaf in tree_leaves(tree)) / speeds[1] for tree in moved)
    return lowered.costs(Costs(f, i, w, b, step=step, seconds=True))


def concurrency_of(model: torch.nn.Module | Split, cores: float | None, speeds: Speeds) -> float:
    """Return the number of ranks that can compute at one time; ``cores`` as in :func:`ppfunc.tune`."""
    if cores is None:
        here = speeds is None and not any(accelerates(leaf.device) for leaf in parameters_of(model))
        mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores = mine if here else inf
    return max(1, cores / torch.get_num_threads())


def parameters_of(model: torch.nn.Module | Split) -> list[Any]:
    """List the parameters of a model, or of its parts."""
    return tree_leaves(model.params if isinstance(model, Split) else list(model.parameters()))


def seconds_of(timeline: Timeline, costs: Costs, at_once: float) -> float:
    """Return the seconds of a step if ``at_once`` ranks compute at one time, and further ranks in turn.

    While more would be computed, sent, or added up at one time, all of it takes longer in proportion.
    """
    if at_once >= timeline.schedule.ranks:
        return timeline.makespan
    placed = simulate(place_communication(timeline.schedule), costs)
    spans = [(a, b) for row in placed.rows() for i, a, b in row if i.op in _BUSY]
    changes = sorted(change for a, b in spans for change in ((a, 1), (b, -1)))
    busy, now, seconds = 0, 0.0, timeline.makespan
    for at, change in changes:
        seconds += (at - now) * (max(1, busy / at_once) - 1)
        busy, now = busy + change, at
    return seconds


class _Roofline(TorchDispatchMode):
    """Adds up the seconds of operators: operations or bytes, what takes longer. Views take no time.

    Collectives pass parts around a ring of ranks, of which sums take two rounds.
    """

    def __init__(self, flops: float, bytes: float, ring: Ring) -> None:
        super().__init__()
        self._flops, self._bytes, self._ring, self._seconds = flops, bytes, ring, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            ranks, latency, bandwidth = self._ring
            size = max(map(_bytes_of, ((args, kwargs), result)))
            rounds = 0 if "wait" in str(func) else 2 if "all_reduce" in str(func) else 1
            self._seconds += rounds * (ranks - 1) * (latency + size / ranks / bandwidth)
        elif not func.is_view:
            operations = flops_of(func._overloadpacket, args, kwargs or {}, result)
            moved = _bytes_of([args, kwargs, result])
            self._seconds += max(operations / self._flops, moved / self._bytes)
        return result

    def get_total_flops(self) -> float:
        """Return the seconds, where a counter of operations returns these."""
        return self._seconds


def _bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def remembering(engine: Engine) -> Engine:
    """Return an engine that traces a stage once for all trainers."""
    programs: dict[Any, StageProgram] = {}

    def remembered(fn: Any, example: tuple[Any, ...], **request: Any) -> StageProgram:
        key = id(fn.fn), StageCall(fn, example, request["name"], request["device"]).key
        return programs.get(key) or programs.setdefault(key, engine(fn, example, **request))

    return remembered


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
                    f" bytes, and {self.waiting} others, not worked out, may need less: give more memory or"
                    " ranks"
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
        time = partial(duration, most=max((row.seconds for row in rows), default=1))
        cells = [
            [time(r.seconds), r.bound and time(r.bound), amount(max(r.peaks), "B"), str(r), r.binds]
            for r in rows
        ]
        more = f"{len(self.rows) - len(rows)} more do not fit; " if len(rows) < len(self.rows) else ""
        end = "" if self.complete else "; interrupted"
        text = table(["step", "bound", "peak", "configuration", "what binds"], cells)
        refused = f", {len(self.refused)} refused" if self.refused else ""
        if not self.rows:
            refused += "".join(f"\n{name}: {why}" for name, why in self.refused.items())
        none = "" if not rows or rows[0].fits else f"nothing fits in {amount(self.memory, 'B')} a rank; "
        why = ", slower or too large by an estimate," if self.complete else ""
        left = f"{self.waiting} others{why} were not worked out"
        return f"{text}\n{none}{more}{left if self.waiting else 'no others'}{refused}{end}"

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
        longest = max((point.y for point in points), default=1)
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

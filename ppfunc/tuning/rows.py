"""Hold the choices and results of `tune`: rows of configurations with their seconds and bytes, ranked."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple, get_args

from ppfunc._checks import require_counts, show_table, table
from ppfunc.runtime import Transport
from ppfunc.runtime.paper.ledger import Memory
from ppfunc.runtime.ports.protocols import ShardWhat
from ppfunc.schedule import Schedule, Timeline
from ppfunc.schedule.formats.svg import Point, amount, draw, short
from ppfunc.training import Trainer

Grid = tuple[int, int, int]
"""Ranks of a pipeline, data ranks, tensor ranks."""


class Choice(NamedTuple):
    """Hold the choices of a row beside its schedule.

    Args:
        pipe, data, tensor: ranks of a pipeline, and of the axes over which it has copies, and parts.
        microbatch: rows of a microbatch.
        remat: argument of the engine, ``engines.graph(remat=...)``.
        shard: argument of the transport, ``P2P(mesh=..., axes=..., shard=...)``.
    """

    pipe: int
    data: int
    tensor: int
    microbatch: int
    remat: Any
    shard: ShardWhat

    @property
    def grid(self) -> str:
        """Write the ranks of each axis, without trailing axes of size 1."""
        sizes = (self.pipe, self.data, self.tensor)
        return " x ".join(map(str, sizes[: 3 if self.tensor > 1 else 2 if self.data > 1 else 1]))

    def __str__(self) -> str:
        grid = f"{self.grid}, shard {self.shard}" if self.data > 1 else self.grid
        return f"ranks {grid}, microbatches of {self.microbatch}, remat {self.remat}"


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
    remats: Sequence[Any], shards: Sequence[ShardWhat], named: bool,
) -> Iterator[Choice]:  # fmt: skip
    """List the choices beside the schedule; rows divide in every grid that is ``named``, else in some."""
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
            for each in shards if grid[1] > 1 else get_args(ShardWhat)[:1]:
                yield Choice(*grid, size, remat, each)


_OVER = 3  # rows of a table that do not fit


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
            at=row.at)``. Several pipelines take ``P2P(mesh=mesh, axes=Axes("pp", data="dp"), shard=...)``.
            With tensor ranks it takes ``Axes("pp", data="dp", model="tp")``, and parameters are those of
            ``pp.split(tensor(mesh["tp"]), args, at=row.at)``.
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
    return f"needs {memory[rank].peak} bytes on rank {rank}, {amount(size)}B of {kind}"


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
        cells = [[r.seconds, r.bound, f"{amount(max(r.peaks))}B", str(r), r.binds] for r in rows]
        more = f"{len(self.rows) - len(rows)} more do not fit; " if len(rows) < len(self.rows) else ""
        end = "" if self.complete else "; interrupted"
        text = table(["seconds", "bound", "peak", "configuration", "what binds"], cells)
        refused = f", {len(self.refused)} refused" if self.refused else ""
        if not self.rows:
            refused += "".join(f"\n{name}: {why}" for name, why in self.refused.items())
        none = "" if not rows or rows[0].fits else f"nothing fits in {amount(self.memory)}B a rank; "
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
        """Draw the rows as an SVG file, seconds over bytes; rows of the frontier have their names.

        Args:
            width: width in pixels, from 720 to 100000; by default 900.
        """
        points = [
            Point(max(r.peaks), r.seconds, "point" + " over" * (not r.fits), str(r) * (r in self.frontier))
            for r in self.rows
        ]
        across = "peak of the fullest rank; pale: over the limit", lambda size: f"{amount(size)}B"
        return draw(points, "Configurations on paper", str(self), width, across, ("seconds of a step", short))

    _repr_svg_ = to_svg

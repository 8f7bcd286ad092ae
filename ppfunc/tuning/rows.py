"""Hold what `tune` has found: rows of configurations with their seconds and bytes, ranked."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ppfunc.runtime.lowering.ledger import Memory
from ppfunc.schedule import Schedule, Timeline
from ppfunc.schedule.formats.elements import amount, short
from ppfunc.schedule.formats.scatter import Point, draw
from ppfunc.schedule.table import show_table, table
from ppfunc.training import Trainer

from .choices import Choice

_OVER = 3  # rows of a table that do not fit


class Row(NamedTuple):
    """A configuration, and what it takes on paper.

    Args:
        choice: all but schedule and cuts.
        schedule: compute only.
        at: names of the modules that begin the stages after the first.
        seconds: of a step.
        bound: the least seconds of any order of this placement, without a limit of memory; None if unknown.
        peaks: bytes of every rank of a pipeline.
        fits: whether no rank exceeds the limit.
        binds: what is short: the bytes, or the time, of which rank.
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
    memory: Mapping[int, Memory], timeline: Timeline, seconds: float, at_once: float, fits: bool
) -> str:
    """Say which rank has most of what is short: bytes, or time; or that ranks wait for cores."""
    if fits and seconds > timeline.makespan:
        return f"cores for {at_once:.3g} of {len(memory)} ranks; {timeline.makespan:.4g} s with all"
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
        rows: ranked.
        memory: the limit.
        complete: whether nothing interrupted the search.
        waiting: how many candidates were left: slower than the rows that fit, or too large by an estimate.
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
            found = f"the smallest of {len(self.rows)} rows worked out needs {max(self.rows[0].peaks)}, and"
            why = f"{found} {self.waiting} candidates left may need less" if self.rows else self.refused
            raise ValueError(f"memory: got {self.memory} bytes a rank, in which nothing fits; {why}")
        return self.rows[0]

    @property
    def frontier(self) -> tuple[Row, ...]:
        """List the rows than which none is both faster and smaller, the fastest first."""
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
        return f"{text}\n{more}{self.waiting} candidates were left{refused}{end}"

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
        """Draw the rows as an SVG file, seconds over bytes; those of the frontier have their names.

        Args:
            width: in pixels from 720 to 100000; by default 900.
        """
        points = [
            Point(max(r.peaks), r.seconds, "point" + " over" * (not r.fits), str(r) * (r in self.frontier))
            for r in self.rows
        ]
        across = "peak of the fullest rank; pale: over the limit", lambda size: f"{amount(size)}B"
        return draw(points, "Configurations on paper", str(self), width, across, ("seconds of a step", short))

    _repr_svg_ = to_svg

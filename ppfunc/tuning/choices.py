"""List what a configuration chooses beside its schedule and cuts."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, get_args

from ppfunc._checks import require_counts
from ppfunc.runtime import Transport
from ppfunc.runtime.transport.grid import ShardWhat

Grid = tuple[int, int, int]
"""Ranks of a pipeline, data ranks, tensor ranks."""


class Choice(NamedTuple):
    """Hold the choices of a row beside its schedule.

    Args:
        pipe, data, tensor: ranks of a pipeline, and of the axes over which it has copies, and parts.
        microbatch: rows of a microbatch.
        remat: of the engine, ``engines.graph(remat=...)``.
        shard: of the transport, ``P2P(mesh=..., axes=..., shard=...)``.
    """

    pipe: int
    data: int
    tensor: int
    microbatch: int
    remat: Any
    shard: ShardWhat

    @property
    def grid(self) -> str:
        """Write the ranks of each axis, without trailing ones."""
        sizes = (self.pipe, self.data, self.tensor)
        return " x ".join(map(str, sizes[: 3 if self.tensor > 1 else 2 if self.data > 1 else 1]))

    def __str__(self) -> str:
        grid = f"{self.grid}, shard {self.shard}" if self.data > 1 else self.grid
        return f"ranks {grid}, microbatches of {self.microbatch}, remat {self.remat}"


def grids_of(ranks: int, grids: Any, tensor: object) -> list[Grid]:
    """List the grids of so many ranks, of those that are asked for; without ``tensor`` no tensor ranks."""
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
    """Return the ranks of each axis of a transport; without a mesh, those of one pipeline of ``pipe``."""
    if transport is None or transport.mesh is None:
        return pipe, 1, 1
    mesh, axes = transport.mesh, transport.axes
    roles = (axes.pipe,), axes.data_axes, axes.model_axes
    sizes = [prod(mesh[axis].size() for axis in names) for names in roles]
    return sizes[0], sizes[1], sizes[2]


def choices_of(
    ranks: int, batch: int, grids: Sequence[Grid], sizes: Sequence[int] | None,
    remats: Sequence[Any], shards: Sequence[ShardWhat],
) -> Iterator[Choice]:  # fmt: skip
    """List what is chosen beside the schedule."""
    powers = [2**n for n in range(batch.bit_length()) if batch % (ranks * 2**n) == 0]
    if sizes is None and not powers:
        raise ValueError(f"batch: got {batch} rows, expected a multiple of the {ranks} ranks, or microbatch=")
    for size, remat, grid in product(powers if sizes is None else sizes, remats, grids):
        require_counts(microbatch=size)
        if batch % (grid[1] * size):
            raise ValueError(
                f"microbatch: got {size}, expected a divisor of {batch} rows over {grid[1]} pipelines"
            )
        for each in shards if grid[1] > 1 else get_args(ShardWhat)[:1]:
            yield Choice(*grid, size, remat, each)

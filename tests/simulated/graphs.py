"""Graphs of a simulated accelerator: what is issued in a capture, replayed as one operation.

Memory of a capture comes from a pool, whose freed blocks later allocations of the pool may be handed. So a
replay poisons what it may overwrite: blocks freed before an allocation of its own, and blocks of later
captures that may lie where its own freed ones did. Replaying two graphs of one pool out of order or at once
is then wrong, and reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .clocks import Region
from .device import Device
from .streams import Mark


class Pool:
    """Memory that graphs share."""

    def __init__(self) -> None:
        self.freed: list[Any] = []  # blocks
        self.givers: list[Graph] = []  # graphs that have had a block freed


class Graph:
    """A capture, and its replays.

    Args:
        pool: of another graph; None for one of its own.
        mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``: in which threads waits are refused meanwhile.
    """

    def __init__(self, device: Device, pool: Pool | None = None, mode: str = "global") -> None:
        self.device, self.memory_pool, self.mode = device, pool or Pool(), mode
        self.reads: list[Region] = []
        self.writes: list[Region] = []
        self.overlaid: list[Any] = []  # blocks of later captures
        self._tasks: list[Callable[[], Any]] = []
        self._draws: list[tuple[torch.Generator, list[int]]] = []
        self._stream: Any = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Capture what is issued on the current stream."""
        device = self.device
        stream = device.current()
        if stream.id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        with device.lock:
            self._stream, self._thread, stream.graph = stream, threading.current_thread(), self

    def end(self) -> None:
        with self.device.lock:
            self._stream.graph = None
            self.device.memory.collect()

    def forbids_waits(self) -> bool:
        """Tell whether this thread must not wait while the capture goes on."""
        return self.mode == "global" or (
            self.mode == "thread_local" and self._thread is threading.current_thread()
        )

    def add(self, what: str, run: Callable[[], Any], reads: list[Region], writes: list[Region]) -> Mark:
        """Note an operation instead of running it."""
        self._tasks.append(run)
        self.reads += reads
        self.writes += writes
        return Mark(self._stream, self._stream.issued, {}, self)

    def allocated(self, block: Any) -> None:
        """Note a block of this capture: before it, what was freed in the pool may be handed out."""
        pool = self.memory_pool
        for old in pool.freed:
            self.add("reuse of memory", old.poison, [], [old.whole()])
            if old.graph not in pool.givers:
                pool.givers.append(old.graph)
        pool.freed.clear()
        for giver in pool.givers:
            if giver is not self:
                giver.overlaid.append(block)

    def draw(self, generator: torch.Generator) -> list[int]:
        """Return where each replay puts the seed of a drawing operation."""
        self._draws.append((generator, [0]))
        return self._draws[-1][1]

    def replay(self) -> None:
        """Issue the operations as one, on the current stream of the device of the capture."""
        device = self.device
        with device.lock:
            seeds = [next_seed(generator) for generator, _ in self._draws]
            tasks, overlaid, places = list(self._tasks), list(self.overlaid), [p for _, p in self._draws]

        def run() -> None:
            for block in overlaid:
                block.poison()
            for place, seed in zip(places, seeds, strict=True):
                place[0] = seed
            for task in tasks:
                task()

        writes = self.writes + [block.whole() for block in overlaid]
        device.issue(device.current(self._stream.device), "graph", run, self.reads, writes)


def next_seed(generator: torch.Generator) -> int:
    """Draw a seed for one operation: of the seed of a device's generator and the number of its draw."""
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return hash((generator.initial_seed(), offset)) & (2**63 - 1)

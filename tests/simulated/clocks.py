"""Order of operations on several streams, by vector clocks, and the accesses that have none.

Each stream has a clock: the number of the last operation of every stream that is done before what it runs
next. An operation follows another if the clock of its stream has reached the number of the other. Checked
when an operation is issued, so that a report depends on no interleaving.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

import ppfunc

Clock = dict[Any, int]  # of streams
Frame = tuple[str, int, str]  # file, line, function

_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.join(os.path.dirname(ppfunc.__file__), "")
_DEPTH = 8


def merge(clock: Clock, other: Clock) -> None:
    """Let what follows ``clock`` follow ``other`` too."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Region(NamedTuple):
    """The bytes of a block that a tensor shows."""

    block: Any
    low: int
    high: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    itemsize: int

    @property
    def dense(self) -> bool:
        return self.high - self.low == self.itemsize * torch.Size(self.shape).numel()

    def overlaps(self, other: Region) -> bool:
        """Tell whether both have a byte in common."""
        if not (self.low < other.high and other.low < self.high):
            return False
        return (self.dense and other.dense) or bool((self._mask() & other._mask()).any())

    def _mask(self) -> torch.Tensor:
        mask = torch.zeros(self.block.size, dtype=torch.bool)
        shape, stride = (*self.shape, self.itemsize), (*(s * self.itemsize for s in self.stride), 1)
        mask.as_strided(shape, stride, self.low).fill_(True)
        return mask

    def covers(self, other: Region) -> bool:
        return self.dense and self.low <= other.low and other.high <= self.high


class Access(NamedTuple):
    """What an operation of a stream does to a region."""

    region: Region
    stream: Any
    number: int
    what: str
    stack: tuple[Frame, ...]

    def __str__(self) -> str:
        lines = [f"    {file}:{line} in {name}" for file, line, name in self.stack]
        return "\n".join((f"  {self.what}, number {self.number} of {self.stream}", *lines))


class Accesses:
    """The accesses to a block of memory that a later one may have to follow."""

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def add(self, access: Access, writing: bool) -> list[Access]:
        """Note an access; returns earlier ones that it must follow and does not."""
        region, stream = access.region, access.stream
        before = self.writes + self.reads if writing else self.writes
        races = [old for old in before if not _follows(stream, old) and region.overlaps(old.region)]
        # Every later access to these bytes has to follow the new one, which follows the old ones.
        self.reads = [
            old for old in self.reads if not (region.covers(old.region) and (writing or old.stream is stream))
        ]
        if writing:
            self.writes = [old for old in self.writes if not region.covers(old.region)]
        (self.writes if writing else self.reads).append(access)
        return races

    def unordered(self, stream: Any, but: Sequence[Any] = ()) -> list[Access]:
        """Return the accesses that what ``stream`` runs next does not follow, except those of streams."""
        return [a for a in self.writes + self.reads if a.stream not in but and not _follows(stream, a)]


def _follows(stream: Any, old: Access) -> bool:
    return old.stream is stream or stream.clock.get(old.stream, 0) >= old.number


def caller_stack() -> tuple[Frame, ...]:
    """Return the innermost frames of this thread that are neither of torch nor of the simulation."""
    frames, frame = [], sys._getframe(1)
    while frame is not None and len(frames) < _DEPTH:
        file = frame.f_code.co_filename
        if _is_told(file):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


@cache
def _is_told(file: str) -> bool:
    ours = file.startswith(_HERE) and not os.path.basename(file).startswith("test_")
    return not ours and not file.startswith((_TORCH, "<"))


def caller_place(depth: int = 1) -> str:
    """Return the innermost lines of ppfunc that this thread runs, or nothing."""
    places, frame = [], sys._getframe(1)
    while frame is not None and len(places) < depth:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            places.append(f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)

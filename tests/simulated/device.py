"""A simulated accelerator: streams that run late and in any order, host waits, marks, races.

``Device`` stands for all devices of this process; ``names.simulated()`` makes one, and ``names.device()``
returns it. What others build on it, such as communicators, needs these methods, each of which may be called
by any thread:

* ``stream(device, id)``, ``new_stream(device)``, ``current(device)``: a ``Stream``; stream 0 is the default
  one.
* ``issue(stream, what, run, reads, writes, ready=None) -> Mark``: queue an operation. ``run()`` is called in
  the worker thread, once the operations before it are done and ``ready()`` (called again and again with the
  lock held, quick and without waiting) says True. ``reads`` and ``writes`` are tensors of the device, pinned
  ones or regions; the order of the accesses is checked now. ``run`` works on what ``host_view(tensor)``
  returned when it was issued.
* ``mark(stream) -> Mark``: what was issued on a stream until now. ``order(mark, stream)``: what is issued on
  ``stream`` from now on follows ``mark``. ``done(mark)``: look, without counting.
* ``wait(kind, *marks)``: hold up the host, counted. ``poll(kind, mark) -> bool``: let the host look,
  counted.
* ``drain(index) -> bool``: what freeing memory does, uncounted: the host is held up by all streams.
* ``record_stream(tensor, stream)``; ``host_view(tensor)``: the memory as a tensor of the CPU.
* ``omits(kind) -> bool``: to be asked by what a program calls to order things, such as a wait or
  ``record_stream``: whether this call is to be left out, as if the program had forgotten it.
* ``fail(text)``: break the device for good: every later wait and look raises.
* ``races``: reports; ``waits``: a ``Counter`` of (kind, place in ppfunc); ``polls``: the same of looks.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from .clocks import Access, Clock, Region, caller_place, caller_stack, merge
from .memory import Memory
from .streams import Mark, Stream, Streams, Task

_POLL = 0.001  # seconds between looks at an operation that waits for another process


class Device(Streams):
    """All simulated devices of a process.

    Args:
        seed: of the interleaving, the same again for one host thread that is never idle.
        lag: operators by which the device stays behind the host, on average.
        hang: seconds without progress after which a waiting host raises.
        idle: seconds without a new operation, after which the device goes on by itself.
    """

    def __init__(
        self, devices: int = 2, seed: int = 0, lag: int = 8, hang: float = 30.0, idle: float = 0.01
    ) -> None:
        super().__init__(devices, seed)
        self.lag, self.hang, self.idle = lag, hang, idle
        self.changed = threading.Condition(self.lock)
        self.races: list[str] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.polls: Counter[tuple[str, str]] = Counter()
        self.issued: Counter[str] = Counter()  # operations by name
        self.orders: Counter[tuple[str, str]] = Counter()  # what ``omits`` was asked, by kind and place
        self.omitted: set[tuple[str, str]] = set()  # what it leaves out
        self.memory = Memory(self)
        self._host: Clock = {}  # what the host knows to be done
        self._failure: str | None = None
        self._awaited: list[Mark] = []
        self._looked_at: set[tuple[Stream, int]] = set()
        self._turns = 0
        self._latest = time.monotonic()
        self._stopped = False
        self._worker = threading.Thread(target=self._work, name="simulated device", daemon=True)
        self._worker.start()

    # Operations

    def issue(
        self,
        stream: Stream,
        what: str,
        run: Callable[[], Any],
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        ready: Callable[[], bool] | None = None,
    ) -> Mark:
        """Queue an operation on a stream, and check the order of what it reads and writes."""
        self._breathe()
        with self.lock:
            read, written = self._regions(reads), self._regions(writes)
            self.issued[what] += 1
            self.inform(stream)
            number = stream.issued + 1
            self._check(stream, number, what, read, written)
            stream.issued = stream.clock[stream] = number
            stream.tasks.append(Task(number, what, run, ready))
            self._latest = time.monotonic()
            if self._awaited:  # else the worker would wake for nothing
                self.changed.notify_all()
            return self.mark(stream)

    def _regions(self, shown: Iterable[Any]) -> list[Region]:
        regions = (x if isinstance(x, Region) else self.memory.region(x) for x in shown)
        return [region for region in regions if region is not None]

    def _check(
        self, stream: Stream, number: int, what: str, reads: Sequence[Region], writes: Sequence[Region]
    ) -> None:
        stack = caller_stack()
        for writing, regions in (False, reads), (True, writes):
            for region in regions:
                access = Access(region, stream, number, what, stack)
                for old in region.block.accesses.add(access, writing):
                    shown = f"{'writes' if writing else 'reads'} [{'x'.join(map(str, region.shape))}]"
                    self.report(f"an operation {shown} of {region.block} without waiting:", access, old)

    def report(self, text: str, *accesses: Access) -> None:
        self.races.append("\n".join((text, *map(str, accesses))))

    def mark(self, stream: Stream) -> Mark:
        with self.lock:
            return Mark(stream, stream.issued, dict(stream.clock))

    def order(self, mark: Mark, stream: Stream) -> None:
        """Let what is issued on a stream from now on follow a mark."""
        with self.lock:
            if mark.stream is stream:
                return
            merge(stream.clock, mark.clock)
            self.issue(stream, f"wait for {mark.stream}", lambda: None, ready=lambda: self.done(mark))

    def omits(self, kind: str) -> bool:
        """Note a call of the program that orders operations; tells whether to leave it out."""
        call = kind, caller_place(2)
        self.orders[call] += 1
        return call in self.omitted

    def done(self, mark: Mark) -> bool:
        return mark.stream.done >= mark.number

    def knows(self, mark: Mark | None) -> bool:
        """Tell whether the host knows that what is marked is done: it has waited for it, or looked."""
        with self.lock:
            return mark is not None and self._host.get(mark.stream, 0) >= mark.number

    # The host

    def wait(self, kind: str, *marks: Mark) -> None:
        """Hold up the host until what is marked is done."""
        with self.lock:
            self.waits[kind, caller_place()] += 1
            self._awaited += marks
            self.changed.notify_all()
            try:
                before, end = self._progress(), time.monotonic() + self.hang
                while not all(map(self.done, marks)) and not self._failure:
                    self.changed.wait(0.05)
                    if before != (before := self._progress()):
                        end = time.monotonic() + self.hang
                    elif time.monotonic() > end:
                        raise TimeoutError(f"the simulated device hangs; {self._heads()}")
            finally:
                for mark in marks:
                    self._awaited.remove(mark)
            self._learn(*marks)

    def poll(self, kind: str, mark: Mark) -> bool:
        """Let the host look whether what is marked is done. A first look is too early, but after a wait."""
        self._breathe()
        with self.lock:
            self.polls[kind, caller_place()] += 1
            place = mark.stream, mark.number
            done = self.knows(mark) or (self.done(mark) and place in self._looked_at)
            self._looked_at.add(place)
            if done or self._failure:
                self._learn(mark)
            return done

    def drain(self, index: int) -> bool:
        """Hold up the host until all streams of a device have done what they were given; tells whether."""
        end = time.monotonic() + self.hang
        for mark in [self.mark(stream) for stream in self.streams(index)]:
            while not self.done(mark):
                if self._stopped or time.monotonic() > end:
                    return self._stopped
                time.sleep(_POLL)
            with self.lock, suppress(RuntimeError):  # the device has failed
                self._learn(mark)
        return True

    def _learn(self, *marks: Mark) -> None:
        if self._failure:
            raise RuntimeError(self._failure)
        for mark in marks:
            merge(self._host, mark.clock)

    def fail(self, text: str) -> None:
        with self.lock:
            self._failure = self._failure or text
            self.changed.notify_all()

    def _progress(self) -> int:
        return sum(s.done for s in self._streams.values())

    def _heads(self) -> str:
        heads = [f"{s}: {s.tasks[0].what}" for s in self._streams.values() if s.tasks]
        return f"at the heads of its streams stand {'; '.join(heads) or 'no operations'}"

    # The worker

    def _breathe(self) -> None:
        """Let the device take some turns, chosen by the seed."""
        if threading.current_thread() is self._worker:
            return
        with self.lock:
            queued = sum(len(s.tasks) for s in self._streams.values())
            if queued and (queued > 4 * self.lag or self.random.random() * self.lag < 1):
                self._turns = self.random.randrange(1 + 2 * max(self.lag, queued - 2 * self.lag))
                self.changed.notify_all()
                while self._turns and not self._failure:
                    self.changed.wait(0.05)

    def _work(self) -> None:
        while not self._stopped:
            with self.lock:
                awaited = not all(map(self.done, self._awaited))
                free = awaited or self._turns or time.monotonic() - self._latest > self.idle
                heads = [(s, s.tasks[0]) for s in self._streams.values() if s.tasks]
                able = [h for h in heads if self._able(h[1])]
                if not (able and free):
                    if self._turns:
                        self._turns = 0
                        self.changed.notify_all()
                    self.changed.wait(_POLL if heads and not able else min(self.idle, 0.1))
                    continue
                weights = [s.weight for s, _ in able]
                stream, task = self.random.choices(able, weights)[0]
            self._run(stream, task)
            able = heads = task = None  # what they hold may be freed

    def _able(self, task: Task) -> bool:
        try:
            return task.ready is None or self._failure is not None or task.ready()
        except BaseException as error:
            self.fail(f"CUDA error: {task.what} failed: {type(error).__name__}: {error}")
            return True

    def _run(self, stream: Stream, task: Task) -> None:
        try:
            if not self._failure:
                with torch.no_grad():
                    task.run()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(f"CUDA error: {task.what} on {stream} failed: {type(error).__name__}: {error}")
        with self.lock:
            stream.tasks.popleft()
            stream.done = task.number
            self._turns = max(0, self._turns - 1)
            if self._awaited or not self._turns:
                self.changed.notify_all()

    def close(self) -> None:
        """Stop: what is queued never runs."""
        with self.lock:
            self._stopped = True
            self.changed.notify_all()
        self._worker.join()

    # Memory, for those who issue operations

    def inform(self, stream: Stream) -> None:
        """Let what a stream is given next follow what the host knows to be done."""
        merge(stream.clock, self._host)

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.memory.host_view(tensor)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.memory.record(tensor, stream)

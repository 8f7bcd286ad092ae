"""Small facts between processes, over gloo on the host: which step begins, that it has ended, and texts."""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist

from .errors import AgreementError
from .meeting import Meeting, give_way

_LINE = 1024  # bytes of a short message
# Tags: a text; the line that begins a step; a rank has come to the end of it; every rank has.
_TEXT, _FIRST, _DONE, _CLOSED = range(4)


class Control:
    """The control messages of one transport, until a failure; then another one takes over."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._group: dist.ProcessGroup | None = None
        self._calls = self._shared = 0
        self._ahead: tuple[dist.Work, torch.Tensor] | None = None
        self._told: tuple[dist.Work, torch.Tensor] | None = None
        self._texts: list[tuple[int, dist.Work, torch.Tensor]] = []
        self._ends: list[tuple[int, dist.Work]] = []
        self._marks: list[torch.Tensor] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The communicator of all ranks, opened once every rank is there."""
        if self._group is None:
            meeting = self._meeting
            meeting.write(f"here/{meeting.rank}", "")
            for peer in range(meeting.size):
                meeting.read(f"here/{peer}", f"rank {peer} to begin")
            self._marks = [torch.zeros(1, dtype=torch.uint8) for _ in range(meeting.size)]
            self._group = meeting.open("control", meeting.rank, meeting.size, "gloo")
        return self._group

    def share(self, text: str) -> list[str]:
        """The text of every rank, once every rank has heard what was told before."""
        self._shared += 1
        place, meeting = f"shared/{self._shared}", self._meeting
        meeting.write(f"{place}/{meeting.rank}", text)
        shared = [meeting.read(f"{place}/{peer}", f"rank {peer} to share what it knows") for peer in range(meeting.size)]
        for peer, work, _ in self._texts:
            meeting.wait(work, peer)
        self._texts.clear()
        return shared

    def begin(self, call: str, key: str | None) -> str:
        """Begin a step, as :meth:`~ppfunc.runtime.transport.Transport.begin`: a line passed on from rank to rank."""
        rank, size = self._meeting.rank, self._meeting.size
        if size == 1:
            assert key is not None
            return key
        self._calls += 1
        mine = f"call {self._calls}; {call}"
        theirs = key
        if rank > 0:
            told, _, theirs = self._first_line(rank - 1).rpartition("\n")
            if told != mine or (key is not None and key != theirs):
                here, there = _differences(f"{mine}; {theirs if key is None else key}", f"{told}; {theirs}")
                raise AgreementError(
                    f"the ranks disagree on the step that begins: rank {rank} has {here}, rank {rank - 1} has {there}; every "
                    f"rank must make the same calls of the same step functions, with the same schedule and with batches of the same shapes"
                )
        if theirs is None:
            raise ValueError("inputs: got None on rank 0, which tells the others their shapes; give it the inputs, whoever holds the first stage")
        if rank + 1 < size:
            line = _written(f"{mine}\n{theirs}")
            self._told = self.group.send([line], rank + 1, _FIRST), line  # kept until the next; nobody waits for it
        tag, peers = (_CLOSED, [0]) if rank else (_DONE, range(1, size))
        self._ends = [(peer, self.group.recv([self._marks[peer]], peer, tag)) for peer in peers]
        return theirs

    def end(self) -> None:
        """End the step: every rank is at its end, and none can fail in it any more. Does nothing where none has begun.

        Ranks tell the first one, which tells all. What they wait for has been received ahead.
        """
        ends, self._ends = self._ends, []
        if not ends:
            return
        meeting = self._meeting
        if meeting.rank > 0:
            done = self._send_mark(0, _DONE)
        for peer, work in ends:
            meeting.wait(work, peer)
        if meeting.rank > 0:
            meeting.wait(done, 0)
        else:  # not before they are under way: what this process does next, its end too, must not hold them up
            for peer, work in [(peer, self._send_mark(peer, _CLOSED)) for peer, _ in ends]:
                meeting.wait(work, peer)

    def _send_mark(self, peer: int, tag: int) -> dist.Work:
        give_way()
        work = self.group.send([self._marks[self._meeting.rank]], peer, tag)
        give_way()
        return work

    def close(self) -> None:
        """Let go of the connections, which ends them."""
        self._group = self._ahead = self._told = None
        self._texts.clear()
        self._ends.clear()

    def _first_line(self, peer: int) -> str:
        """What the rank before says at the beginning of a step.

        The next one is received ahead of its time: a send whose receive is posted is one message, any other is three.
        """
        work, line = self._ahead or self._receive_first(peer)
        self._meeting.wait(work, peer)
        self._ahead = self._receive_first(peer)
        return _read(line)

    def _receive_first(self, peer: int) -> tuple[dist.Work, torch.Tensor]:
        line = torch.empty(_LINE, dtype=torch.uint8)
        return self.group.recv([line], peer, _FIRST), line

    def tell(self, peer: int, text: str) -> None:
        """Send a text of any length, without waiting until it is heard: two ranks may tell each other at once."""
        data = text.encode()
        for part in (_written(str(len(data))), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            self._texts.append((peer, self.group.send([part], peer, _TEXT), part))

    def hear(self, peer: int) -> str:
        """Receive the next text that ``peer`` tells."""
        line = torch.empty(_LINE, dtype=torch.uint8)
        self._meeting.wait(self.group.recv([line], peer, _TEXT), peer)
        data = torch.empty(int(_read(line)), dtype=torch.uint8)
        self._meeting.wait(self.group.recv([data], peer, _TEXT), peer)
        return bytes(data.tolist()).decode()


def _differences(one: str, other: str) -> tuple[str, str]:
    """Of two lines, the terms that differ.

    >>> _differences("call 2; f; seed None", "call 3; f; seed (0, 1)")
    ('call 2; seed None', 'call 3; seed (0, 1)')
    """
    pairs = [(a, b) for a, b in zip_longest(one.split("; "), other.split("; "), fillvalue="nothing") if a != b]
    return "; ".join(a for a, _ in pairs), "; ".join(b for _, b in pairs)


def _written(line: str) -> torch.Tensor:
    data = line.encode().ljust(_LINE)
    assert len(data) == _LINE, line
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(line: torch.Tensor) -> str:
    return bytes(line.tolist()).decode().rstrip()

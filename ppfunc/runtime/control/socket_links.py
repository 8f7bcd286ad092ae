"""Links between processes: connections along a tree and between pairs, and how the processes meet."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from ..errors import CLOSED, GONE, FailureRecord, LinkError
from .connections import WATCH, Connections
from .failure_tree import FailureTree, Verdict
from .rendezvous import Rendezvous
from .sockets import Address, Stream
from .suspects import Answer, find_culprit
from .tree import RankTree

_PATIENCE = 1.0  # seconds to wait until others have read a failure
_ALONE = 2.0  # seconds to wait for the ranks above to decide, more than a busy machine takes
_ANSWERS = 1.5  # seconds to wait for the ranks that live to say whom they wait for
_FRESH = 0.5  # seconds for which an answer holds
_SPINS = 200  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message
_PROBE = 0.5  # seconds between looks after ranks that have not come; more where these take long

# Yield this core to waiting processes. The receiver of a message may be one of them.
give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class SocketLinks:
    """The :class:`~ppfunc.runtime.control.tree.Links` of a process.

    A thread watches a connection to each neighbour in the tree. When one ends, or a failure is published,
    :class:`~.failure_tree.FailureTree` decides which failure is the first. The store need not live for that.
    Another thread finds the other ranks. It asks the store for the address of the rank above. The other
    addresses travel along the tree.

    Args:
        rendezvous: where ranks find each other.

    Attributes:
        waiting_on: the rank that this one waits for.
        status: describes the rest of this rank to those that wait for it.
        on_failure: called with the number of steps that were committed before a failure.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.waiting_on: int | None = None
        self.status: Callable[[], Answer] = Answer
        self.on_failure: Callable[[int], None] = lambda committed: None
        self._rendezvous, self._timeout = rendezvous, rendezvous.timeout
        self._tree = RankTree.over(range(self.size), self.rank)
        self._connections = Connections(self.rank, self._tree.neighbours, self._timeout)
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._failures = FailureTree(self._tree, self._tell, self._heed)
        self._addresses = {self.rank: self._connections.address}  # of the ranks that have come
        self._answers: dict[int, tuple[float, Answer]] = {}  # by rank, and when
        self._said: tuple[float, Answer | None] = 0.0, None
        self._left: set[int] = set()  # neighbours that need no rank any more
        self._cut_off = False  # whether the rank above has not answered
        self._abandoned: str | None = None  # the failure that has ended the meeting
        self._probe = time.monotonic() + _PROBE
        rendezvous.publish(self._connections.address)
        self._end = weakref.finalize(
            self, _end, self._connections, rendezvous, self._addresses, self._failures.verdicts
        )
        self._connections.start(self)
        if self.size > 1:
            name, me = "ppfunc meeting", weakref.ref(self)
            threading.Thread(target=_meet, args=(me,), name=name, daemon=True).start()

    @property
    def generation(self) -> int:
        return self._failures.generation

    @property
    def closed(self) -> bool:
        return self._connections.closed

    # -- messages --------------------------------------------------------------------------

    def send(self, peer: int, channel: str, data: bytes) -> None:
        self._connections.send(self._stream(peer), self.generation, channel.encode(), data)
        give_way()

    def recv(self, peer: int, channel: str) -> bytes:
        stream, name = self._stream(peer), channel.encode()
        end, spins = time.monotonic() + self._timeout, _SPINS
        self.waiting_on = peer
        while True:
            problem = self._problem(stream)  # looked for before the message, which may have come before it
            if (message := stream.next(self.generation, name)) is not None:
                self.waiting_on = None
                return message
            if problem is not None:
                raise problem
            if spins:
                spins -= 1
                give_way()
                continue
            left = end - time.monotonic()
            if left <= 0:
                waited = f"rank {self.rank} waited for rank {peer}, which has not answered"
                raise LinkError(peer, "late", f"{waited} in {self._timeout:g} s")
            if not stream.ended:  # since it was looked at
                self._connections.wait(left, stream)

    def _problem(self, stream: Stream) -> Exception | None:
        if self.closed:
            return RuntimeError(CLOSED)
        if self._failed:
            return LinkError(stream.peer, "failed", "a rank has failed")
        if stream.ended or self._failures.lost(stream.peer):
            return LinkError(stream.peer, "gone", self._why(stream))
        return None

    @property
    def _failed(self) -> bool:
        return self._failures.stopped or self._abandoned is not None

    def _stream(self, peer: int) -> Stream:
        """Return the stream to a peer, which the higher rank of the two opens."""
        stream = self._connections.stream(peer)
        if stream.socket is None:
            self._dial_known()
        return stream

    def _dial_known(self) -> None:
        """Connect to ranks that have come; to the rank above on the watched connection also."""
        with self._changed:
            for stream in self._connections.streams():
                address = self._addresses.get(stream.peer)
                if stream.peer < self.rank and stream.peer != self._tree.parent and address is not None:
                    self._connections.dial(address, stream)

    # -- steps and failures ----------------------------------------------------------------

    def check(self) -> None:
        if self.closed:
            raise RuntimeError(CLOSED)
        if self._failed:
            raise LinkError(-1, "failed", "a rank has failed")
        for neighbour in self._failures.gone:
            raise LinkError(neighbour, "gone", self._why(self._connections.stream(neighbour, True)))

    def vote(self, step: int) -> None:
        with self._changed:
            self.check()
            self._failures.vote(step)

    def commit(self, step: int) -> None:
        with self._changed:
            if self.rank == 0:
                self.check()
            self._failures.commit(step)

    def publish(self, failure: str) -> str:
        with self._changed:
            mine = self.generation
            self._failures.publish(failure if self._abandoned is None else self._abandoned)
            patience = 0.0 if self._cut_off or self._abandoned is not None else _ALONE
            if self.closed or not self._changed.wait_for(lambda: mine in self._failures.verdicts, patience):
                self._failures.decide(mine, self._abandoned or failure)  # the ranks above are frozen
            self.waiting_on, self._cut_off = None, False
            return self._failures.notice()

    def await_failure(self, peer: int) -> None:
        """Wait a while for a failure to be published, or for this peer to be gone."""
        failures = self._failures
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or self.generation in failures.verdicts or peer in failures.gone,
                _PATIENCE,
            )

    def _heed(self, generation: int, verdict: Verdict) -> None:
        self._alert()
        if generation == self.generation:
            self.on_failure(verdict.committed)

    def suspect(self, peer: int) -> tuple[int, str]:
        with self._changed:
            parent, since = self._tree.parent, time.monotonic() - _FRESH
            self._tell_all("whom")
            self._changed.wait_for(
                lambda: (
                    len(self._since(since)) == self.size - 1 or self.generation in self._failures.verdicts
                ),
                _ANSWERS,
            )
            answers = self._since(since)
            self._cut_off = parent is not None and parent not in answers
            culprit, state = find_culprit(self.rank, answers | {self.rank: self._answer(peer)})
            if culprit not in answers and culprit not in self._addresses:
                state = f"rank {culprit} has not come"
            return culprit, state

    def _since(self, time: float) -> dict[int, Answer]:
        return {rank: answer for rank, (at, answer) in self._answers.items() if at >= time}

    def _say(self) -> None:
        """Send the state of this rank to all, unless it was just sent: all may ask at once."""
        (at, before), now, answer = self._said, time.monotonic(), self._answer(self.waiting_on)
        if answer != before or now > at + _FRESH / 2:
            self._said = now, answer
            self._tell_all("is", self.rank, answer)

    def _answer(self, awaits: int | None) -> Answer:
        """Describe this rank to one that waits. Whatever ``status`` raises, the watch goes on."""
        neighbours = self._tree.neighbours
        cut = [peer for peer in neighbours if self._connections.stream(peer, True).cut]
        try:
            return self.status()._replace(awaits=awaits, cut=cut)
        except Exception:
            return Answer(awaits, cut=cut)

    # -- what the watching threads notice --------------------------------------------------

    def greet(self, peer: int) -> None:
        """Send a new neighbour the known addresses and the past failures."""
        with self._changed:
            self._tell(peer, "at", self._addresses)
            self._failures.greet(peer)
            self._alert()

    def hear(self, peer: int, message: bytes) -> None:
        kind, *facts = json.loads(message)
        with self._changed:
            if kind == "at":
                self._learn(peer, {int(rank): Address(*address) for rank, address in facts[0].items()})
            elif kind == "whom":
                self._tell_all(kind, but=peer)
                self._say()
            elif kind == "leaves":
                self._left.add(peer)
            elif kind == "is":
                self._answers[facts[0]] = time.monotonic(), Answer(*facts[1])
                self._tell_all(kind, *facts, but=peer)
            else:
                self._failures.hear(peer, kind, *facts)
            self._alert()

    def lose(self, stream: Stream) -> None:
        """Notice that the connection to a peer has ended."""
        with self._changed:
            if stream.peer in self._tree.neighbours and stream.peer not in self._left:
                self._lose(stream.peer)
            self._alert()

    def _lose(self, peer: int) -> None:
        self._failures.lose(peer, self._gone(peer, self._why(self._connections.stream(peer, True))))
        self._alert()

    def _gone(self, peer: int, reason: str = GONE) -> str:
        return FailureRecord(peer, None, None, reason, self.rank, False).write()

    def _why(self, stream: Stream) -> str:
        if stream.link_error is None:
            return GONE
        return f"the link between it and rank {self.rank} has failed ({stream.link_error.strerror})"

    def _learn(self, peer: int, addresses: dict[int, Address]) -> None:
        """Store new addresses, and pass them on."""
        new = {rank: address for rank, address in addresses.items() if rank not in self._addresses}
        if new:
            self._addresses |= new
            self._tell_all("at", new, but=peer)
            self._dial_known()

    def _tell_all(self, kind: str, *facts: object, but: int | None = None) -> None:
        for neighbour in self._tree.neighbours:
            if neighbour != but:
                self._tell(neighbour, kind, *facts)

    def _tell(self, neighbour: int, kind: str, *facts: object) -> None:
        stream = self._connections.stream(neighbour, True)
        self._connections.send(stream, 0, WATCH, json.dumps([kind, *facts]).encode())

    def _alert(self) -> None:
        """Wake all that wait here: something has changed."""
        self._changed.notify_all()
        self._connections.wake()

    # -- and the one that meets the others ----------------------------------------------------

    def meet(self) -> bool:
        """Look for the others once. Return whether to look again.

        A frozen store blocks this thread only.
        """
        parent, connections = self._tree.parent, self._connections
        try:
            if parent is not None and not connections.stream(parent).dialled:
                address = self._rendezvous.address(parent)
                if address is not None:
                    both = (connections.stream(parent, watched) for watched in (False, True))
                    connections.dial(address, *both)
            if time.monotonic() > self._probe:
                self._look_after()
        except LinkError as error:
            self._lose_store(error.peer)
            return False
        if len(self._addresses) < self.size:
            return self._abandoned is None
        self._rendezvous.forget()
        return False

    def _look_after(self) -> None:
        """Check that ranks not connected yet are alive. Rank 0 checks all, others their neighbours."""
        began = time.monotonic()
        abandoned = self._rendezvous.abandoned()
        if abandoned is not None:
            with self._changed:
                self._abandoned = abandoned.failure
                if self.generation not in self._failures.verdicts:
                    self._failures.decide(self.generation, abandoned.failure)
                self._alert()
        watched = self._tree.neighbours if self._tree.parent is not None else self._tree.members[1:]
        for peer in watched:
            unmet = peer not in self._addresses and peer not in self._failures.gone
            if unmet and not self._rendezvous.alive(peer):
                with self._changed:
                    if peer not in self._addresses:
                        self._lose(peer)
        now = time.monotonic()
        self._probe = now + max(_PROBE, 10 * (now - began))

    def _lose_store(self, server: int) -> None:
        """Handle the loss of the store: ranks that have not connected can no longer be found."""
        parent, failures = self._tree.parent, self._failures
        with self._changed:
            if server != self.rank:
                failures.report(failures.undecided, self._gone(server))
            if parent is not None and self._connections.stream(parent, True).socket is None:
                failures.decide(failures.undecided, self._gone(server))
                failures.gone.add(parent)
            self._alert()

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections, so that peers that wait raise at once. Idempotent.

        After a failure, wait until the ranks below have read it: a rank that has not would only see that
        this one is gone.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or self._failures.read_by_all == self._failures.last, _PATIENCE
            )
            self._connections.closed = True
            self._changed.notify_all()
        self._end()

    def leave(self) -> None:
        """End all connections when this rank needs no other one. Sent messages still arrive."""
        if self._failures.verdicts:
            return self.close()
        with self._changed:
            self._tell_all("leaves")
        if self._end.detach() is not None:
            self._rendezvous.forget()
            self._connections.close()


def _meet(reference: Callable[[], SocketLinks | None]) -> None:
    """Connect links to the other ranks, as long as the links are used."""
    pause = 0.001
    while (links := reference()) is not None and not links.closed and links.meet():
        del links
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _end(
    connections: Connections,
    rendezvous: Rendezvous,
    addresses: dict[int, Address],
    verdicts: dict[int, Verdict],
) -> None:
    """Close connections. Leave the failure in the store for ranks that have not connected yet."""
    if len(addresses) < rendezvous.size:
        missing = [rank for rank in range(rendezvous.size) if rank not in addresses]
        if verdicts:
            failure = verdicts[max(verdicts)].failure
        else:
            failure = FailureRecord(rendezvous.rank, None, None, GONE, rendezvous.rank, False).write()
        rendezvous.abandon(failure, missing if FailureRecord.read(failure).rank in missing else [])
    connections.close()

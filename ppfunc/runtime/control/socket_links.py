"""Link processes along a tree and in pairs, and publish failures over these links."""

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ppfunc.stage.process import act_on_interrupts

from ..values.errors import CLOSED, Failure, FailureRecord, LinkError
from .connections import Address, Stream, in_thread
from .failures import MEETING, Answer, FailureTree, Verdict, find_culprit
from .rendezvous import Rendezvous
from .streams import PeerStreams
from .tree import RankTree, TreeMessages

T = TypeVar("T")
_WATCH = b"watch"  # the channel of streams that are watched
_PATIENCE = 1.0  # seconds for a failure to arrive
_ALONE = 2.0  # seconds to wait for the ranks above to decide, more than a busy machine takes
_ANSWERS = 1.5  # seconds to wait for the ranks that live to say whom they wait for
_FRESH = 0.5  # seconds for which an answer holds
_SPINS = 20  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message
_POLL = 0.05  # seconds between looks into the store for an address
_LOOK = 0.02  # seconds between looks whether a signal has come, or a rank has failed

give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # as to a receiver


class SocketLinks:
    """Implements :class:`~ppfunc.runtime.control.tree.Links` of a process by sockets.

    A thread watches each neighbour in the tree. When its connection ends, or a failure is published,
    :class:`~.failures.FailureTree` decides which failure is the first. The thread that waits for any
    other message reads it.

    All ranks make theirs at the same time, and each is returned when all have met.

    Args:
        rendezvous: where ranks find each other.

    Raises:
        PipelineError, AgreementError: the first failure while they meet.

    Attributes:
        waiting_on: the rank that this one waits for.
        status: describes the rest of this rank to those that wait for it.
        on_failure: called with the number of steps that were committed before a failure.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.timeout = rendezvous.rank, rendezvous.size, rendezvous.timeout
        self._met, self._rendezvous = False, rendezvous
        self.waiting_on: int | None = None
        self.status: Callable[[], Answer] = Answer
        self.on_failure: Callable[[int], None] = lambda committed: None
        self.receivers: tuple[Any, ...] = ()  # weak: of mapped memory, where who waits for it also looks
        self.changed = threading.Condition(threading.RLock())  # guards what threads share
        self._tree = RankTree.over(range(self.size), self.rank)
        self._failures = FailureTree(self._tree, self._send, self._heed)
        self._addresses: dict[int, Address] = {}
        self._answers: dict[int, tuple[float, Answer]] = {}  # by rank, and when
        self._left: set[int] = set()  # neighbours that need no rank any more
        self._asked, self._cut_off = 0.0, False  # when all were last; whether the rank above did not answer
        with self.changed:  # for which the first that connects waits
            self._streams = PeerStreams(rendezvous, self._tree.neighbours, self._begin_watch, self.changed)
        try:
            self._meet()
        except BaseException as cause:
            record = FailureRecord.of(Failure(self.rank, None, None, cause), self.rank, self.suspect)
            first = FailureRecord.read(rendezvous.abandon(self.publish(record.write())))
            self.close()
            if first == record and not isinstance(cause, LinkError):
                raise
            raise first.error(self.rank) from cause

    def _meet(self) -> None:
        """Connect to the rank above, wait for those below, and exchange the addresses of all ranks."""
        mine = self._addresses[self.rank] = self._streams.listener.address
        self._rendezvous.publish(mine)
        if (parent := self._tree.parent) is not None:
            self._open(parent, "tree")
            self._open(parent, "watched")
        for child in self._tree.children:
            self.wait_for(child, partial(self._streams.watched.get, child))
        tree = TreeMessages(self, range(self.size))
        collected = tree.collect(json.dumps(mine))
        (self.vote if self.rank else self.commit)(MEETING)  # a rank that has met may fail its first step
        texts = tree.share(collected)
        if self.rank:
            self.commit(MEETING)
        self._addresses = {rank: Address(*json.loads(text)) for rank, text in texts.items()}
        self._met = True
        self._rendezvous.forget()

    @property
    def closed(self) -> bool:
        """Tell whether all connections have ended, or are about to."""
        return self._streams.closed

    @property
    def generation(self) -> int:
        return self._failures.generation

    # -- messages --------------------------------------------------------------------------

    def send(self, peer: int, channel: str, data: bytes) -> None:
        if (stream := self._streams.outgoing.get(peer)) is None:
            self._open(peer)
            stream = self._streams.outgoing[peer]
        stream.send(self.generation, channel.encode(), data)
        give_way()

    def recv(self, peer: int, channel: str) -> bytes:
        name, incoming = channel.encode(), self._streams.incoming

        def arrived() -> bytes | None:
            return incoming[peer].next(self.generation, name) if peer in incoming else None

        def pause() -> None:
            incoming[peer].wait(_LOOK) if peer in incoming else self._pause()

        return self.wait_for(peer, arrived, pause=pause, spins=_SPINS)

    def _open(self, peer: int, kind: str = "one way") -> None:
        address = self._addresses.get(peer) or self.wait_for(
            peer, lambda: self._rendezvous.address(peer), pause=partial(time.sleep, _POLL)
        )
        settle = partial(self.settle, peer, late=f"rank {peer}, which cannot be reached,")
        try:
            self._streams.open(peer, kind, address, settle)
        except (ConnectionRefusedError, TimeoutError) as error:
            raise self._lost(peer, error) from error

    def settle(self, peer: int, future: Future[T], late: str = "") -> T:
        """Wait for the result of a thread that waits for a peer. Raises as :meth:`wait_for`."""
        future.add_done_callback(self._notify)
        self.wait_for(peer, lambda: future.done() or None, late)
        return future.result()

    def _notify(self, future: object) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait_for(
        self,
        peer: int,
        ready: Callable[[], T | None],
        late: str = "",
        pause: Callable[[], None] | None = None,
        spins: int = 0,
    ) -> T:
        """Wait for something that a peer has to do, until ``ready()`` is not None.

        Args:
            late: what is waited for, if it is not the peer itself.
            pause: waits a little; by default until something changes.
            spins: looks before the first pause, and before what may have failed is looked for.

        Raises:
            LinkError: a rank has failed, or the peer is gone or late.
        """
        self.waiting_on = None  # an interrupt may have ended the wait before
        for _ in range(spins):
            if (result := ready()) is not None:
                return result
            give_way()
        end, self.waiting_on = time.monotonic() + self.timeout, peer
        while True:
            if not self._met:
                self._look_after_missing()
            problem = self._problem(peer)  # looked for before the message, which may have come before it
            if (result := ready()) is not None:
                self.waiting_on = None
                return result
            if problem is not None:
                del ready, pause  # this frame holds the exception that holds it
                raise problem
            act_on_interrupts()
            if time.monotonic() > end:
                what = late or f"rank {peer}, which has not answered"
                raise LinkError(peer, "late", f"rank {self.rank} waited for {what} in {self.timeout:g} s")
            (pause or self._pause)()

    def _pause(self) -> None:
        with self.changed:
            self.changed.wait(_LOOK)

    def _problem(self, peer: int) -> Exception | None:
        if self.closed:
            return RuntimeError(CLOSED)
        if self._failures.stopped:
            return LinkError(peer, "failed", "a rank has failed")
        incoming = self._streams.incoming.get(peer)
        if incoming is not None and incoming.ended:
            return self._lost(peer, incoming.link_error)
        return LinkError(peer, "gone") if self._failures.lost(peer) else None

    def _look_after_missing(self) -> None:
        """Take the failure of a rank that is not connected yet from the store."""
        awaited = [peer for peer in self._tree.neighbours if peer not in self._streams.watched]
        if (failure := self._rendezvous.failure(awaited)) is not None:
            with self.changed:
                self._failures.report(self.generation, failure)
                self._failures.decide(self.generation, failure)

    # -- steps and failures ----------------------------------------------------------------

    def check(self) -> None:
        if (problem := self._problem(-1)) is not None:
            raise problem
        for peer in self._failures.gone:
            raise self._lost(peer, self._streams.watched[peer].link_error)

    def _lost(self, peer: int, error: BaseException | None) -> LinkError:
        link = f"the link between it and rank {self.rank} has failed ({error})"
        return LinkError(peer, "cut", link) if isinstance(error, TimeoutError) else LinkError(peer, "gone")

    def vote(self, step: int) -> None:
        with self.changed:
            self.check()
            self._failures.vote(step)

    def commit(self, step: int) -> None:
        with self.changed:
            if self.rank == 0:
                self.check()
            self._failures.commit(step)

    def publish(self, failure: str) -> str:
        with self.changed:
            mine, failures = self.generation, self._failures
            failures.publish(failure)
            patience = 0.0 if self.closed or self._cut_off else _ALONE
            if not self.changed.wait_for(lambda: mine in failures.verdicts, patience):
                failures.decide(mine, failure)  # the ranks above are frozen
            self.waiting_on, self._cut_off = None, False
            return failures.notice()

    def await_failure(self, peer: int) -> None:
        """Wait a while for a failure to be published, or for this peer to be gone."""
        failures = self._failures
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or self.generation in failures.verdicts or peer in failures.gone,
                _PATIENCE,
            )

    def _heed(self, generation: int, verdict: Verdict) -> None:
        self.changed.notify_all()
        if generation == self.generation:
            self.on_failure(verdict.committed)

    def suspect(self, peer: int) -> tuple[int, str]:
        if not self._met and (missing := self._rendezvous.missing()):
            return missing[0], f"rank {missing[0]} has not come"
        with self.changed:
            since, parent = time.monotonic() - _FRESH, self._tree.parent

            def fresh() -> dict[int, Answer]:
                return {rank: answer for rank, (at, answer) in self._answers.items() if at >= since}

            self._ask_all()
            self.changed.wait_for(
                lambda: len(fresh()) == self.size - 1 or self.generation in self._failures.verdicts, _ANSWERS
            )
            answers = fresh()
            self._cut_off = parent is not None and parent not in answers
            mine = self._answer(None if peer == self.rank else peer)
            return find_culprit(self.rank, self.size, answers | {self.rank: mine})

    def _ask_all(self, but: int | None = None) -> None:
        """Ask all ranks for their states, and send them that of this one, unless they were just asked."""
        now = time.monotonic()
        if now > self._asked + _FRESH / 2:
            self._asked = now
            self._send_all("whom", but=but)
            self._send_all("is", self.rank, self._answer(self.waiting_on))

    def _answer(self, awaits: int | None) -> Answer:
        """Describe this rank to one that waits. Whatever ``status`` raises, the watch goes on."""
        cut = [peer for peer, stream in list(self._streams.watched.items()) if stream.cut]
        try:
            return self.status()._replace(awaits=awaits, cut=cut)
        except Exception:
            return Answer(awaits, cut=cut)

    # -- messages of neighbours, in threads ------------------------------------------------

    def _begin_watch(self, peer: int, stream: Stream) -> None:
        self._failures.connect(peer)
        in_thread(lambda: self._watch(peer, stream), "watches")

    def _watch(self, peer: int, stream: Stream) -> None:
        try:
            while True:
                while (message := stream.next(0, _WATCH)) is not None:
                    self._receive(peer, *json.loads(message))
                if stream.ended:  # it may have been while it was written
                    return
                stream.wait()
        finally:  # a neighbour must not wait for a thread that has failed
            stream.close()
            with self.changed:
                if peer not in self._left and not self.closed:
                    record = FailureRecord.lost(self._lost(peer, stream.link_error), self.rank)
                    self._failures.note_gone(peer, record.write())
                self.changed.notify_all()

    def _receive(self, peer: int, kind: str, *facts: Any) -> None:
        with self.changed:
            match kind, facts:
                case "whom", _:
                    self._ask_all(but=peer)
                case "is", (rank, answer):
                    self._answers[rank] = time.monotonic(), Answer(*answer)
                    self._send_all(kind, *facts, but=peer)
                case "leaves", _:
                    self._left.add(peer)
                case _:
                    self._failures.receive(kind, *facts)
            self.changed.notify_all()

    def _send_all(self, kind: str, *facts: object, but: int | None = None) -> None:
        for neighbour in self._tree.neighbours:
            if neighbour != but:
                self._send(neighbour, kind, *facts)

    def _send(self, neighbour: int, kind: str, *facts: object) -> None:
        if neighbour in self._streams.watched:
            self._streams.watched[neighbour].send(0, _WATCH, json.dumps([kind, *facts]).encode())

    # -- the end ---------------------------------------------------------------------------

    def leave(self) -> None:
        """End all connections when this rank needs no other one."""
        if not self._failures.verdicts:
            with self.changed:
                self._send_all("leaves")
        self.close()

    def close(self) -> None:
        """End all connections. Idempotent. Takes no lock, so that it may be called in a finalizer."""
        self._streams.close()

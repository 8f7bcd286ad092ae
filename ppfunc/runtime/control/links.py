"""Link processes: they meet in the store of their group, and exchange messages and failures over sockets."""

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ppfunc.stage.process import act_on_interrupts

from ..ports import _torch
from ..values.errors import CLOSED, Failure, FailureRecord, LinkError
from .connections import Address, Listener, Stream, connect, in_thread, own_host
from .tree import GATHER, MEETING, Answer, FailureTree, RankTree, TreeMessages, Verdict, find_culprit

T = TypeVar("T")
_SOON = 1.0  # seconds for the store to take a note
_ASK = 0.5  # seconds between questions to the store whether a rank has failed; more where these take long
_WATCH = b"watch"  # the channel of streams that are watched
_PATIENCE = 1.0  # seconds for a failure to arrive
_ALONE = 2.0  # seconds to wait for the ranks above to decide, more than a busy machine takes
_ANSWERS = 1.5  # seconds to wait for the ranks that live to say whom they wait for
_FRESH = 0.5  # seconds for which an answer holds
_SPINS = 20  # looks at a socket before sleeping: who sleeps is woken some 30 us after the message
_POLL = 0.05  # seconds between looks into the store for an address
_LOOK = 0.02  # seconds between looks whether a signal has come, or a rank has failed

give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # as to a receiver


class Rendezvous:
    """Brings ranks together: each makes one at the same point of its program, and they exchange addresses.

    The n-th call of each rank over the same ranks is of round n. A rank that was missing from an abandoned
    round skips it, so that the next calls of all ranks meet again.

    The store may end with the process that serves it, or be stopped with it. Under gloo it is not used once
    the ranks have met.

    Args:
        name: name of the thing that the ranks make together.
        group: the process group whose store, and connections between processes, are used.
        timeout: seconds to wait for a peer; by default that of the group.
        ranks: ranks of the world that take part, in order; by default the ranks of the group.

    Raises:
        PipelineError: the store does not answer.

    Attributes:
        store: store of this round.
        carried: the kind of device whose tensors the backend of the group carries.
        queued: whether the host only queues the backend's operations on a device, as under NCCL; those of
            other backends, such as gloo, hold up the host.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, timeout: float | None, ranks: Sequence[int] | None = None
    ) -> None:
        self.ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.backend = str(_torch.backend_of(group))
        self.carried = _torch.carried_by(self.backend) or "cpu"
        self.queued = self.carried != "cpu"
        # The group may be destroyed while its store is still asked.
        self._gloo = _torch.gloo_of(group)
        self._places = [dist.get_group_rank(group, rank) for rank in self.ranks]
        self.timeout = _torch.timeout_of(group).total_seconds() if timeout is None else timeout
        self._server = self.ranks.index(0) if 0 in self.ranks else self.rank  # rank 0 of the world serves it
        self._next_look = 0.0
        if ranks is not None:
            name = f"{name}/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        store = _torch.store_of(group)
        self.host = own_host(_torch.host_of(store))
        try:
            while True:
                number = self._ask(lambda: store.add(f"{name}/{self.rank}", 1))
                self.store = PrefixStore(f"{name}/{number}", store)
                self._earlier = PrefixStore(f"{name}/{number - 1}", store)
                abandoned = self._read("abandoned")
                if abandoned is None or self.rank not in abandoned[1]:
                    return
        except LinkError as error:
            raise self._record(error).error(self.rank) from error

    def publish(self, address: Address) -> None:
        """Publish where this rank listens."""
        self._ask(lambda: self.store.set(f"address/{self.rank}", json.dumps(address)))

    def address(self, rank: int) -> Address | None:
        """Look up where a rank listens.

        Returns:
            The address, or None if the rank has not come.
        """
        address = self._read(f"address/{rank}")
        return None if address is None else Address(*address)

    def missing(self) -> list[int]:
        """List the ranks that have not come; the list is empty if the store does not answer."""
        keys = [f"address/{rank}" for rank in range(self.size)]
        with suppress(LinkError):
            present = self._ask(lambda: [self.store.check([key]) for key in keys], _SOON)
            return [rank for rank, here in enumerate(present) if not here]
        return []

    def failure(self, awaited: Sequence[int]) -> str | None:
        """Look for a failure before the ranks have met: an abandoned round, or an ended process.

        It asks the store only now and then.

        Returns:
            The FailureRecord, as text; None if there is no failure, or the store is not asked now.
        """
        began = time.monotonic()
        if began < self._next_look:
            return None
        abandoned = self._read("abandoned")
        if abandoned is not None:
            return str(abandoned[0])
        ended = next((rank for rank in awaited if not self.alive(rank)), None)
        self._next_look = time.monotonic() + max(_ASK, 10 * (time.monotonic() - began))
        return None if ended is None else self._record(LinkError(ended, "gone")).write()

    def abandon(self, failure: str) -> str:
        """Fail this round on all ranks with a FailureRecord; return the first record of the round.

        If it is the absence of a rank whose process may live, the next calls of all absent ones are of
        another round. Where it has ended, they fail as this one.
        """
        record = FailureRecord.read(failure)
        absent = [] if record.rank == self.rank or record.kind == "gone" else self.missing()
        text = json.dumps([failure, absent if record.rank in absent else []])
        with suppress(LinkError):
            return str(json.loads(self._ask(lambda: self.store.compare_set("abandoned", "", text), _SOON))[0])
        return failure

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Fail the round on all ranks if the body raises."""
        try:
            yield
        except BaseException as error:
            self.abandon(self._record(error).write())
            raise

    def _record(self, error: BaseException) -> FailureRecord:
        return FailureRecord.of(Failure(self.rank, None, None, error), self.rank)

    def forget(self) -> None:
        """Delete the address of this rank in the round before, once all have met in this round.

        The address in this round stays: it tells late ranks that this rank has come.
        """
        with suppress(LinkError):
            self._ask(lambda: self._earlier.delete_key(f"address/{self.rank}"), _SOON)

    def alive(self, peer: int) -> bool:
        """Return False where the process of a peer is known to have ended."""
        return _torch.alive(self._gloo, self._places[peer])

    def _read(self, key: str) -> Any:
        return self._ask(lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None)

    def _ask(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Make a call of the store in a thread: a store that is stopped blocks that thread only.

        Raises:
            LinkError: the store, or the process that serves it, does not answer.
        """
        seconds = self.timeout if seconds is None else seconds
        try:
            return in_thread(call, "store").result(seconds)
        except TimeoutError:
            late = f"it serves the store of the process group, which has not answered in {seconds:g} s"
            # Not "late": nobody else is asked, since the other ranks ask the store as well.
            raise LinkError(self._server, "cut", late) from None
        except (dist.DistError, RuntimeError) as error:
            raise LinkError(self._server, "gone") from error


class SocketLinks:
    """Implements :class:`~ppfunc.runtime.control.tree.Links` of a process by sockets.

    A thread watches each neighbour in the tree. When its connection ends, or a failure is published,
    :class:`~.failures.FailureTree` decides which failure is the first. The thread that waits for any
    other message reads it.

    All ranks make theirs at the same time, and each is returned when all have met.

    Args:
        rendezvous: store in which ranks find each other.

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
        # Between neighbours there is a stream for messages both ways, and one that is watched. Between others
        # each sender opens one.
        self._incoming: dict[int, Stream] = {}
        self._outgoing: dict[int, Stream] = {}
        self._watched: dict[int, Stream] = {}
        self._dials: dict[tuple[int, str], Future[None]] = {}  # connections that are being opened
        self.closed = False  # whether all connections have ended, or are about to
        self._listener = Listener(rendezvous.host, self.timeout, self.welcome, 2 * len(self._tree.neighbours))
        _open_links.add(self)
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
        """Connect to the rank above, wait for the ranks below, and exchange the addresses of all ranks."""
        mine = self._addresses[self.rank] = self._listener.address
        self._rendezvous.publish(mine)
        if (parent := self._tree.parent) is not None:
            self._open(parent, "tree")
            self._open(parent, "watched")
        for child in self._tree.children:
            self.wait_for(child, partial(self._watched.get, child))
        tree = TreeMessages(self, range(self.size))
        collected = tree.collect(GATHER, (self.rank, mine))
        # Whoever has met may fail its first step.
        self._addresses = {n: Address(*place) for n, place in tree.share(GATHER, collected, step=MEETING)}
        self._met = True
        self._rendezvous.forget()

    @property
    def generation(self) -> int:
        return self._failures.generation

    # -- messages --------------------------------------------------------------------------

    def send(self, peer: int, channel: str, data: bytes) -> None:
        if (stream := self._outgoing.get(peer)) is None:
            self._open(peer)
            stream = self._outgoing[peer]
        stream.send(self.generation, channel.encode(), data)
        give_way()

    def recv(self, peer: int, channel: str) -> bytes:
        name, incoming = channel.encode(), self._incoming

        def arrived() -> bytes | None:
            return incoming[peer].next(self.generation, name) if peer in incoming else None

        def pause() -> None:
            incoming[peer].wait(_LOOK) if peer in incoming else self._pause()

        return self.wait_for(peer, arrived, pause=pause, spins=_SPINS)

    def _open(self, peer: int, kind: str = "one way") -> None:
        address = self._addresses.get(peer) or self.wait_for(
            peer, lambda: self._rendezvous.address(peer), pause=partial(time.sleep, _POLL)
        )
        if (dial := self._dials.get((peer, kind))) is None:  # which an interrupt has left
            dial = self._dials[peer, kind] = in_thread(partial(self._dial, peer, kind, address), "connects")
        try:
            self.settle(peer, dial, f"rank {peer}, which cannot be reached,")
        except (ConnectionRefusedError, TimeoutError) as error:
            raise self._lost(peer, error) from error
        finally:
            if dial.done():
                del self._dials[peer, kind]

    def _dial(self, peer: int, kind: str, address: Address) -> None:
        connection = connect(address, f"{self.rank} {kind}", self.timeout, lambda: self.closed)
        self._attach(peer, kind, connection, self._outgoing)

    def welcome(self, who: str, connection: socket.socket) -> None:
        """Use a connection that a peer has opened; ``who`` is the rank and the kind that it announced."""
        rank, _, kind = who.partition(" ")
        self._attach(int(rank), kind, connection, self._incoming)

    def _attach(self, peer: int, kind: str, connection: socket.socket, one_way: dict[int, Stream]) -> None:
        stream = Stream(connection, self.timeout)
        tables = {"tree": [self._incoming, self._outgoing], "watched": [self._watched], "one way": [one_way]}
        with self.changed:
            for table in tables[kind]:
                table[peer] = stream
            if self.closed:
                stream.close()
            if kind == "watched":
                self._failures.connect(peer)
                in_thread(partial(self._watch, peer, stream), "watches")
            self.changed.notify_all()

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
        """Wait for a peer, until ``ready()`` returns a result.

        Args:
            late: name of the awaited thing, if it is not the peer itself.
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
        incoming = self._incoming.get(peer)
        if incoming is not None and incoming.ended:
            return self._lost(peer, incoming.link_error)
        return LinkError(peer, "gone") if self._failures.lost(peer) else None

    def _look_after_missing(self) -> None:
        """Take the failure of a rank that is not connected yet from the store."""
        awaited = [peer for peer in self._tree.neighbours if peer not in self._watched]
        if (failure := self._rendezvous.failure(awaited)) is not None:
            with self.changed:
                self._failures.report(self.generation, failure)
                self._failures.decide(self.generation, failure)

    # -- steps and failures ----------------------------------------------------------------

    def check(self) -> None:
        if (problem := self._problem(-1)) is not None:
            raise problem
        for peer in self._failures.gone:
            raise self._lost(peer, self._watched[peer].link_error)

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
        """Ask all ranks for their states, and send the state of this rank, unless they were just asked."""
        now = time.monotonic()
        if now > self._asked + _FRESH / 2:
            self._asked = now
            self._send_all("whom", but=but)
            self._send_all("is", self.rank, self._answer(self.waiting_on))

    def _answer(self, awaits: int | None) -> Answer:
        """Describe this rank to a rank that waits. Whatever ``status`` raises, the watch goes on."""
        cut = [peer for peer, stream in list(self._watched.items()) if stream.cut]
        try:
            return self.status()._replace(awaits=awaits, cut=cut)
        except Exception:
            return Answer(awaits, cut=cut)

    # -- messages of neighbours, in threads ------------------------------------------------

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
                    lost = Failure(self.rank, None, None, self._lost(peer, stream.link_error))
                    self._failures.note_gone(peer, FailureRecord.of(lost, self.rank).write())
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
        if neighbour in self._watched:
            self._watched[neighbour].send(0, _WATCH, json.dumps([kind, *facts]).encode())

    # -- the end ---------------------------------------------------------------------------

    def leave(self) -> None:
        """End all connections when this rank needs no peer."""
        if not self._failures.verdicts:
            with self.changed:
                self._send_all("leaves")
        self.close()

    def close(self) -> None:
        """End all connections. Idempotent. Takes no lock, so that it may be called in a finalizer."""
        self.closed = True
        self._listener.close()
        for stream in self._all_streams():
            stream.close()

    def _all_streams(self) -> list[Stream]:
        return [*self._incoming.values(), *self._outgoing.values(), *self._watched.values()]


_open_links: weakref.WeakSet[SocketLinks] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close connections in a forked child: peers would not notice that its parent has ended.

    Connections of gloo stay open: a peer that waits for data of the parent is released when the child ends.
    """
    for links in _open_links:
        links.closed = True
        for inherited in (links._listener.socket, *(stream.socket for stream in links._all_streams())):
            inherited.close()
    _open_links.clear()


os.register_at_fork(after_in_child=_leave_to_parent)

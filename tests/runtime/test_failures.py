"""Which failure is the first, decided along a tree: without sockets, threads or clocks, in any order of
messages.
"""

from __future__ import annotations

import pickle
from collections import deque
from functools import partial

from hypothesis import given, strategies as st

from ppfunc.runtime.control.links import SocketLinks
from ppfunc.runtime.control.tree import FailureTree, RankTree
from ppfunc.runtime.values.errors import GONE, Failure, FailureRecord, LinkError, PipelineError


class Ranks:
    """Failure trees of all ranks, and the messages between neighbours, each pair of which delivers in
    order.
    """

    def __init__(self, size):
        self.pipes, self.heard = {}, []
        self.trees = [
            FailureTree(RankTree.over(range(size), r), partial(self.send, r), partial(self.note, r))
            for r in range(size)
        ]
        for rank, tree in enumerate(self.trees):
            for neighbour in RankTree.over(range(size), rank).neighbours:
                tree.connect(neighbour)

    def send(self, sender, neighbour, *message):
        self.pipes.setdefault((sender, neighbour), deque()).append(message)

    def note(self, rank, generation, verdict):
        self.heard.append((rank, generation, verdict))

    def deliver(self, choose):
        """Deliver one message of the pipe that is chosen; whether there was one."""
        waiting = sorted(pipe for pipe, messages in self.pipes.items() if messages)
        if waiting:
            sender, receiver = waiting[choose(len(waiting))]
            self.trees[receiver].receive(*self.pipes[sender, receiver].popleft())
        return bool(waiting)


@given(st.integers(1, 9), st.data())
def test_all_ranks_take_the_same_failure_as_the_first(size, data):
    ranks = Ranks(size)

    def choose(n):
        return data.draw(st.integers(0, n - 1))

    for rank in data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)):
        ranks.trees[rank].publish(f"failure of rank {rank}")
        for _ in range(choose(4)):
            ranks.deliver(choose)
    while ranks.deliver(choose):
        pass
    assert len({tree.verdicts[0] for tree in ranks.trees}) == 1
    assert sorted(rank for rank, _, _ in ranks.heard) == list(range(size))  # each is told once
    assert {tree.notice() for tree in ranks.trees} == {ranks.trees[0].verdicts[0].failure}
    assert all(tree.verdicts.keys() == {0} and tree.generation == 1 for tree in ranks.trees)


@given(st.integers(2, 9), st.data())
def test_ranks_above_that_have_gone_are_not_waited_for(size, data):
    ranks, dead = Ranks(size), data.draw(st.integers(0, size - 2))
    for rank in {*ranks.trees[dead]._tree.neighbours}:
        ranks.trees[rank].note_gone(dead, f"rank {dead} is gone")

    def deliver():
        for (_, receiver), messages in ranks.pipes.items():
            if receiver == dead:
                messages.clear()
        return ranks.deliver(lambda n: data.draw(st.integers(0, n - 1)))

    while deliver():
        pass
    reached = {rank: tree.verdicts[0] for rank, tree in enumerate(ranks.trees) if 0 in tree.verdicts}
    assert reached.keys() == set(range(size)) - {dead}
    assert {verdict.failure for verdict in reached.values()} == {f"rank {dead} is gone"}


def test_a_committed_step_is_not_stopped_by_a_later_failure():
    ranks = Ranks(3)
    for tree in ranks.trees[1:]:
        tree.vote(0)
    ranks.trees[0].commit(0)
    ranks.trees[0].publish("late")
    while ranks.deliver(lambda n: 0):
        pass
    assert [tree.stopped for tree in ranks.trees] == [
        True,
        False,
        False,
    ]  # rank 0 in the step after, the others not yet
    for tree in ranks.trees[1:]:
        tree.commit(0)
    assert all(tree.stopped for tree in ranks.trees)


def test_a_failure_before_the_commit_stops_those_that_have_voted():
    ranks = Ranks(3)
    ranks.trees[1].vote(0)
    ranks.trees[2].publish("early")
    while ranks.deliver(lambda n: 0):
        pass
    assert all(tree.stopped for tree in ranks.trees)


def test_at_the_top_of_a_part_that_is_cut_off_a_failure_waits_for_the_outcome_of_the_vote():
    ranks = Ranks(2)
    ranks.trees[1].vote(0)
    ranks.trees[1].note_gone(0, "rank 0 is gone")
    assert not ranks.trees[1].stopped and not ranks.trees[1].verdicts and not ranks.trees[1].lost(0)
    ranks.trees[1].commit(0)
    assert (
        ranks.trees[1].verdicts[0] == (1, "rank 0 is gone")
        and ranks.trees[1].stopped
        and ranks.trees[1].lost(0)
    )


def test_who_comes_late_hears_of_the_last_failures_and_few_are_kept():
    ranks = Ranks(2)
    for n in range(40):
        ranks.trees[0].publish(f"failure {n}")
        ranks.trees[0].notice()
    ranks.pipes.clear()
    ranks.trees[0].connect(1)
    while ranks.deliver(lambda n: 0):
        pass
    kept = ranks.trees[0].verdicts
    assert ranks.trees[1].verdicts == kept and 39 in kept and len(kept) < 20


def test_a_failure_of_a_rank_whose_parent_has_not_connected_is_decided_by_it_and_by_those_below():
    ranks = Ranks(7)
    ranks.trees[1].connected.discard(0)
    ranks.trees[1].publish("alone")
    while ranks.deliver(lambda n: 0):
        pass
    assert [0 in tree.verdicts for tree in ranks.trees] == [False, True, False, True, True, False, False]


def nobody(peer):
    raise AssertionError("a rank that is gone is not asked for")


def test_that_a_rank_is_gone_is_a_fact_beside_the_words():
    """It was read from the words, which any other failure may have."""
    for kind, reason in (("gone", "in other words"), ("cut", GONE)):
        record = FailureRecord.of(Failure(2, None, None, LinkError(1, kind, reason)), 2, nobody)
        error = pickle.loads(pickle.dumps(FailureRecord.read(record.write()).error(0)))
        assert (error.rank, error.reason, error.gone) == (1, reason, kind == "gone")
    assert not PipelineError(1, None, None, GONE).gone


def test_a_rank_is_not_said_to_wait_for_one_that_has_answered():
    """An interrupt ended a wait; the next message came while the rank looked for it, before it slept."""
    links = object.__new__(SocketLinks)
    links.timeout, links.waiting_on = 60.0, 3
    assert links.wait_for(1, lambda: b"message", spins=1) == b"message"
    assert links.waiting_on is None

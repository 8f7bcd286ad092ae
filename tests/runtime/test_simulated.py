"""Steps over a simulated network: with a fault at any operation of any rank they fail on all ranks or on
none, and name it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.runtime.ports.protocols import LossPart, Route, Transfer
from ppfunc.runtime.values.buffers import Buffers, Tag
from ppfunc.runtime.values.errors import Failure
from ppfunc.schedule import Instruction, Op
from ppfunc.stage import LeafSignature
from ppfunc.stage.process import act_on_interrupts
from tests.network.network import KINDS, Fault, InjectedError, RankStopped
from tests.network.simulated import Simulated

LEAF = LeafSignature((3,), torch.float64, True)
CPU = torch.device("cpu")
MICROBATCHES = 2


class Ended(NamedTuple):
    """How one attempt of a step ended on one rank."""

    value: object
    error: BaseException | None


def attempts(make_step, number):
    """The function of a rank that calls its step a number of times, whatever happens."""

    def function(rank, transport):
        step, ended = make_step(rank, transport), []
        for _ in range(number):
            try:
                ended.append(Ended(step(), None))
            except RankStopped:
                raise
            except BaseException as error:
                ended.append(Ended(None, error))
        return ended

    return function


# -- a step written by hand: each rank sends to the next, and sums up what it gets ---------------


def transfer(outgoing, rank, peer, microbatch):
    source, destination = (rank, peer) if outgoing else (peer, rank)
    return Transfer(outgoing, Tag("F", source, destination, microbatch), peer, (LEAF,), CPU)


def ring_calls(rank, size, transport):
    """The program of one rank."""
    for m in range(MICROBATCHES if size > 1 else 0):
        send, recv = transfer(True, rank, (rank + 1) % size, m), transfer(False, rank, (rank - 1) % size, m)

        def load(buffers, send=send, m=m):
            buffers.values[send.tag] = (torch.full(LEAF.shape, float(rank + 10 * m), dtype=LEAF.dtype),)

        def add(buffers, recv=recv):
            buffers.kept[0, 0] = (buffers.kept.get((0, 0), (0,))[0] + buffers.values.pop(recv.tag)[0],)

        yield from (
            load,
            transport.post([send, recv]),
            transport.wait(recv),
            transport.wait(send),
            add,
        )


def ring(rank, transport):
    """A step as a step function makes it: it agrees anew after a failure, and tells of failures."""
    size = transport.size
    parts = {r: LossPart(r, LEAF) for r in range(size)}
    state = {"generation": None, "calls": ()}

    def attempt():
        place = None
        try:
            transport.begin("a step", "shapes" if rank == 0 else None, 0)
            if state["generation"] != transport.generation:
                transport.all_gather("the same everywhere")
                transport.connect([Route("F", r, (r + 1) % size) for r in range(size)], [])
                state.update(generation=transport.generation, calls=tuple(ring_calls(rank, size, transport)))
            buffers = Buffers()
            for place, call in enumerate(state["calls"]):  # noqa: B007
                act_on_interrupts()
                call(buffers)
            place = None
            (mine,) = buffers.kept.get((0, 0), (torch.zeros(LEAF.shape, dtype=LEAF.dtype),))
            return float(transport.end({rank: mine}, parts).sum())
        except BaseException as cause:
            instruction = None if place is None else Instruction(Op.F, rank, 0)
            error = transport.fail(Failure(rank, place, instruction, cause))
            if error is cause or not isinstance(cause, Exception):
                raise cause
            raise error from cause

    def step():
        with transport.hold_interrupts():
            result = attempt()
        transport.ended += 1
        return result

    return step


def is_right_ring(size, value):
    return value == (
        3.0 * sum(r + 10 * m for r in range(size) for m in range(MICROBATCHES)) if size > 1 else 0.0
    )


# -- what must hold ------------------------------------------------------------------------------


def struck_while_settling(network):
    """Whether a fault struck a rank between its vote, or the commitment of rank 0, and the end of the step.

    What an interrupt raises takes the result there. A failure of a rank that has voted, and has waited in
    vain, counts where rank 0 has committed before.
    """
    settling, last, commits, votes = set(), {}, 0, {}
    for line in network.trace:
        _, _, who, what = (*line.split(" ", 3), "", "")[:4]
        rank, dot, _ = who.partition(".")
        commits += line.endswith("is committed")
        if "is published by" in line and commits > votes.get(line.split()[-1], commits):
            return True
        if dot:
            if last.get(rank, "").startswith("vote" if rank != "0" else "commit"):
                settling.add(rank)
                votes[rank] = commits
            if what.startswith(("begin", "publish")):
                settling.discard(rank)
            if what.startswith("begin"):
                votes.pop(rank, None)
            last[rank] = what
        elif what == "interrupt" and last.get(who, "").startswith("vote" if who != "0" else "commit"):
            return True  # it waits already
        elif (what in KINDS and rank in settling) or (what.startswith("loses") and "(tree)" in what):
            return True
    return False


def problems(network, outcomes, is_right):
    """What went wrong beside the faults: wrong values, strange errors, steps that fail on some ranks only."""
    found = [
        f"rank {r}: {o.error!r}"
        for r, o in enumerate(outcomes)
        if o.error is not None and not isinstance(o.error, RankStopped)
    ]
    live, mixed = [outcome.value for outcome in outcomes if outcome.error is None], False
    for attempt, ended in enumerate(zip(*live, strict=True)):
        told = f"attempt {attempt}: {[e.error and repr(e.error) for e in ended]}"
        returned = [e for e in ended if e.error is None]
        found += [f"{told}: got {e.value}" for e in returned if not is_right(e.value)]
        expected = pp.PipelineError, pp.AgreementError, InjectedError, KeyboardInterrupt
        found += [
            f"{told}: unexpected" for e in ended if e.error is not None and not isinstance(e.error, expected)
        ]
        if mixed and returned:
            found.append(f"{told}: some ranks go on")
        elif 0 < len(returned) < len(live):
            mixed = True
            if not struck_while_settling(network):
                found.append(f"{told}: ranks disagree on whether the step failed")
    return found


# -- tests: steps written by hand -------------------------------------------------------------------


def run_ring(size, seed, faults=(), number=4):
    network = Simulated(size, seed, faults)
    return network, network.run(attempts(ring, number))


def check_ring(size, seed, faults):
    network, outcomes = run_ring(size, seed, faults)
    assert problems(network, outcomes, lambda value: is_right_ring(size, value)) == []
    return network, outcomes


@pytest.mark.parametrize("size", range(1, 10))
def test_steps_without_faults(size):
    for seed in range(3):
        _, outcomes = check_ring(size, seed, [])
        assert all(ended.error is None for outcome in outcomes for ended in outcome.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_fault_at_any_operation(size, kind):
    counted, _ = run_ring(size, size, number=2)
    for rank, operations in enumerate(counted.operations):
        for at in range(rank % (size - 1), operations, size - 1):
            fault = Fault(kind, rank, at, 1.0 if kind == "delay" else None)
            network, outcomes = check_ring(size, size, [fault])
            errors = [ended.error for outcome in outcomes if outcome.error is None for ended in outcome.value]
            failures = [error for error in errors if isinstance(error, pp.PipelineError)]
            if kind in ("raise", "kill", "freeze"):
                assert {failure.rank for failure in failures} == {rank}
            if kind == "raise":
                assert any(
                    isinstance(ended.error, InjectedError) or ended.error in failures
                    for ended in outcomes[rank].value
                )
            if kind == "delay":
                assert not any(errors)
            if kind in ("raise", "interrupt"):
                last = [outcome.value[-1].error for outcome in outcomes]
                missed = kind == "interrupt" and struck_while_settling(network)  # it has taken a result
                assert not any(last) or (missed and all(isinstance(e, pp.AgreementError) for e in last))


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", ["raise", "interrupt"])
def test_a_fault_while_a_failure_is_told(first, second):
    counted, _ = run_ring(3, 0, number=1)
    for rank, operations in enumerate(counted.operations):
        for at in range(operations):
            check_ring(
                3,
                at,
                [Fault(first, rank, at), Fault(second, rank, at + 1, 1.0 if second == "delay" else None)],
            )


@pytest.mark.parametrize("seed", range(20))
def test_a_failure_that_rank_0_has_not_heard_of_when_it_commits(seed):
    # Rank 1 gives up waiting for the end at the moment at which rank 2 wakes up and votes.
    network, _ = run_ring(3, seed, number=1)
    at = next(int(line.split()[2][2:]) for line in network.trace if " rank 2." in line and "vote" in line)
    check_ring(3, seed, [Fault("freeze", 2, at, 300.0)])


@given(st.data())
def test_faults_while_others_are_handled(data):
    size, seed = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 2**32))
    first = data.draw(st.integers(0, 30))

    def fault():
        kind, at = data.draw(st.sampled_from(KINDS)), max(0, first + data.draw(st.integers(-3, 8)))
        seconds = data.draw(st.sampled_from([1.0, 200.0, 500.0]))
        return Fault(
            kind, data.draw(st.integers(0, size - 1)), at, seconds if kind in ("delay", "freeze") else None
        )

    check_ring(size, seed, [fault() for _ in range(data.draw(st.integers(1, 4)))])


def test_the_same_seed_gives_the_same_run():
    faults = [Fault("raise", 1, 9), Fault("kill", 2, 25)]
    runs = [run_ring(4, seed, faults) for seed in (5, 5, 6)]
    traces = [network.trace for network, _ in runs]
    told = [
        str([o.value and [(e.value, repr(e.error)) for e in o.value] for o in outcomes])
        for _, outcomes in runs
    ]
    assert (traces[0], told[0]) == (traces[1], told[1])
    assert traces[0] != traces[2]


# -- tests: the network itself -----------------------------------------------------------------------


def data_run(*programs, faults=(), **options):
    """Run programs of connected ranks, each ``program(transport, buffers)``."""
    size = len(programs)

    def function(rank, transport):
        transport.connect([Route("F", a, b) for a in range(size) for b in range(size) if a != b], [])
        buffers = Buffers()
        programs[rank](transport, buffers)
        return buffers

    network = Simulated(size, 0, faults, **options)
    return network, network.run(function)


def put(transport, buffers, peer, microbatch, fill):
    """Post a tensor of one number to a peer; returns the transfer."""
    sent = transfer(True, transport.rank, peer, microbatch)
    buffers.values[sent.tag] = (torch.full(LEAF.shape, fill, dtype=LEAF.dtype),)
    transport.post([sent])(buffers)
    return sent


def get(transport, buffers, peer, microbatch):
    received = transfer(False, transport.rank, peer, microbatch)
    transport.post([received])(buffers)
    transport.wait(received)(buffers)
    return buffers.values[received.tag][0]


def test_messages_of_a_link_arrive_in_order():
    def sender(transport, buffers):
        for m in range(20):
            put(transport, buffers, 1, m, float(m))

    def receiver(transport, buffers):
        assert [get(transport, buffers, 0, m).tolist() for m in range(20)] == [
            [float(m)] * 3 for m in range(20)
        ]

    for outcome in data_run(sender, receiver)[1]:
        assert outcome.error is None


def test_a_posted_receive_is_nan_until_it_is_waited_for():
    received = transfer(False, 1, 0, 0)

    def receiver(transport, buffers):
        transport.post([received])(buffers)
        (tensor,) = buffers.pending[received.tag].tensors
        assert tensor.isnan().all()
        assert received.tag not in buffers.values
        transport.wait(received)(buffers)
        assert buffers.values[received.tag][0] is tensor
        assert tensor.tolist() == [4.0] * 3

    for outcome in data_run(
        lambda transport, buffers: put(transport, buffers, 1, 0, 4.0),
        receiver,
        faults=[Fault("delay", 0, 1, 1.0)],
    )[1]:
        assert outcome.error is None


def test_a_tensor_changed_before_it_is_sent_is_noticed():
    def sender(transport, buffers):
        sent = transfer(True, 0, 1, 0)
        tensor = torch.zeros(LEAF.shape, dtype=LEAF.dtype)
        buffers.values[sent.tag] = (tensor,)
        transport.post([sent])(buffers)
        tensor[1] = 7.0
        transport.wait(sent)(buffers)

    def receiver(transport, buffers):
        assert get(transport, buffers, 0, 0).tolist() == [0.0, 7.0, 0.0]

    outcomes = data_run(sender, receiver, faults=[Fault("delay", 0, 1, 1.0)])[1]
    assert "rank 0 has changed F/0/1/0 before it was sent" in str(outcomes[0].error)
    assert outcomes[1].error is None


def test_ends_that_do_not_match_are_named():
    outcomes = data_run(
        lambda transport, buffers: put(transport, buffers, 1, 0, 1.0),
        lambda transport, buffers: get(transport, buffers, 0, 1),
    )[1]
    assert "rank 0 sends F/0/1/0" in str(outcomes[1].error) and "where rank 1 receives F/0/1/1" in str(
        outcomes[1].error
    )


def test_a_deadlock_is_reported_in_virtual_time():
    network, outcomes = data_run(
        lambda transport, buffers: get(transport, buffers, 1, 0),
        lambda transport, buffers: get(transport, buffers, 0, 0),
        timeout=1e6,
    )
    errors = [str(outcome.error) for outcome in outcomes]
    assert any("has not answered within 1e+06 s; a deadlock; rank" in error for error in errors)
    assert float(network.trace[-1].split()[0]) >= 1e6


def test_the_end_of_a_chain_of_waits_is_the_culprit():
    def function(rank, transport):
        try:
            transport.recv_text(rank + 1) if rank < 3 else transport.recv_text(0)
        except Exception as error:
            raise transport.fail(Failure(rank, None, None, error)) from error

    errors = [outcome.error for outcome in Simulated(4, 1, [Fault("freeze", 3, 0)]).run(function)]
    assert [error.rank for error in errors[:3]] == [3, 3, 3]
    assert isinstance(errors[3], RankStopped)


def test_a_closed_transport_is_noticed_by_those_that_wait():
    def function(rank, transport):
        with transport:
            if rank == 0:
                transport.recv_text(1)
        transport.close()
        transport.send_text(1 - rank, "more")

    network = Simulated(2, 0)
    errors = [str(outcome.error) for outcome in network.run(function)]
    assert "gone" in errors[0] and "has been closed" in errors[1]
    assert float(network.trace[-1].split()[0]) < 1


def test_wrong_uses_are_refused():
    for fault in (
        Fault("burn", 0, 0),
        Fault("raise", 2, 0),
        Fault("kill", 0, -1),
        Fault("delay", 0, 0),
        Fault("drop", 0, 0, 1.0),
    ):
        with pytest.raises(ValueError, match="got"):
            Simulated(2, 0, [fault])
    with pytest.raises(ValueError, match="at least 1"):
        Simulated(0, 0)
    with pytest.raises(ValueError, match="finite"):
        Simulated(1, 0, timeout=float("inf"))
    with pytest.raises(ValueError, match="3 ranks, the transport has 2"):
        Simulated(2, 0).transport(0).local_ranks(3)
    with pytest.raises(RuntimeError, match="outside a run"):
        Simulated(2, 0).transport(0).all_gather("")
    errors = [
        o.error
        for o in Simulated(2, 0).run(
            lambda rank, transport: transport.post([transfer(True, rank, 1 - rank, 0)])
        )
    ]
    assert all("has not connected" in str(error) for error in errors)

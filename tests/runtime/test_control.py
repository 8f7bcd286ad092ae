"""Ranks agree along a tree: over sockets between threads, and between processes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ppfunc.runtime.control.control import Control
from ppfunc.runtime.control.links import SocketLinks
from ppfunc.runtime.control.tree import Answer
from ppfunc.runtime.ports import _torch
from ppfunc.runtime.ports.protocols import Axes, InProcess, LossPart, Route, Transfer
from ppfunc.runtime.transport.p2p import P2P
from ppfunc.runtime.values.buffers import Buffers, Tag
from ppfunc.runtime.values.errors import AgreementError, Failure, PipelineError, StepRunning
from ppfunc.stage import LeafSignature
from tests.clock import busy

SOON = 2.0  # seconds; the timeouts of the transports below are far longer


class Keys:
    """A rendezvous of threads."""

    host = "127.0.0.1"

    def __init__(self, keys, rank, size):
        self.keys, self.rank, self.size, self.timeout = keys, rank, size, 10.0

    def publish(self, address):
        self.keys[self.rank] = address

    def address(self, rank):
        return self.keys.get(rank)

    def missing(self):
        return [rank for rank in range(self.size) if rank not in self.keys]

    def failure(self, awaited):
        return None

    def abandon(self, failure):
        return failure

    def forget(self):
        pass


def over_sockets(size):
    keys = {}
    return lambda rank: SocketLinks(Keys(keys, rank, size))


def in_threads(size, work):
    """What ``work(rank, control)`` returns or raises on each rank; a failure is told, and what is to be
    raised is returned.
    """
    make, answers = over_sockets(size), {}

    def run(rank):
        control = Control(make(rank))
        try:
            answers[rank] = work(rank, control)
        except BaseException as error:
            answers[rank] = control.fail(Failure(rank, None, None, error))
        finally:
            done.wait()
            control.close()

    done = threading.Barrier(size)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [answers[rank] for rank in range(size)]


def leaf(*shape, dtype=torch.float32):
    return LeafSignature(shape, dtype, False)


@pytest.mark.parametrize("stages", [(2, 0, 1), (1,)], ids=["three stages", "one stage"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_step_begins_with_the_key_and_ends_with_the_loss_of_any_rank(size, stages):
    generator = torch.Generator().manual_seed(0)
    values = {stage: torch.randn(50, 3, generator=generator) for stage in stages}
    parts = {stage: LossPart((stage * 5 + 1) % size, leaf(50, 3)) for stage in stages}
    want = InProcess().end(values, parts)

    def work(rank, control):
        own = {stage: values[stage] for stage, part in parts.items() if part.rank == rank}
        told = []
        totals = []
        for source in range(size):
            told.append(control.begin("f; seed 3", f"key {source}" if rank == source else None, source))
            totals.append(control.end(own, parts))
            control.ended += 1
        control.begin("no loss", "k", 0)
        assert control.end({}, {}) is None
        return told, totals

    for told, totals in in_threads(size, work):
        assert told == [f"key {source}" for source in range(size)]
        assert all(torch.equal(total, want) for total in totals)


def test_texts_go_between_any_two_ranks_and_to_all():
    size, long = 7, "é\udcff; \n" * 300_000

    def work(rank, control):
        gathered = control.all_gather(f"{rank} {long if rank == 5 else ''}")
        for peer in range(size):
            if peer != rank:
                control.send_text(peer, f"{rank} to {peer}")
                control.send_text(peer, long if (rank, peer) == (1, 6) else "")
        heard = {
            peer: (control.recv_text(peer), control.recv_text(peer)) for peer in range(size) if peer != rank
        }
        return gathered, heard, control.all_gather("again")

    for rank, (gathered, heard, again) in enumerate(in_threads(size, work)):
        assert gathered == [f"{peer} {long if peer == 5 else ''}" for peer in range(size)]
        assert again == ["again"] * size
        for peer, (short, other) in heard.items():
            assert short == f"{peer} to {rank}"
            assert other == (long if (peer, rank) == (1, 6) else "")


@pytest.mark.parametrize("who", [0, 3, 6])
@pytest.mark.parametrize(
    ("term", "here", "there"),
    [
        ("seed", "seed 4", "seed 3"),
        ("key", "float32[2]", "float32[3]"),
        ("source", "shapes from rank 5", "shapes from rank 0"),
    ],
)
def test_a_disagreement_is_named_on_every_rank_by_the_terms_that_differ(who, term, here, there):
    def work(rank, control):
        own = rank == who
        call = f"step function 1 (f); seed {4 if own and term == 'seed' else 3}; weights 1"
        key = "float32[2]" if own and term == "key" else "float32[3]"
        return control.begin(call, key, 5 if own and term == "source" else 0) and control.end({}, {})

    errors = in_threads(7, work)
    for error in errors:
        assert isinstance(error, AgreementError)
        assert here in str(error) and there in str(error)
        assert "weights" not in str(error) and "step function 1" not in str(error)
        assert "rank 0" in str(error)
        assert who == 0 or f"rank {who}" in str(error)
    assert len({str(error).partition(" [found by")[0] for error in errors}) == 1


def test_other_calls_on_the_same_tree_are_told():
    def work(rank, control):
        return control.all_gather("x") if rank == 2 else control.begin("f", "k", 0) and control.end({}, {})

    for error in in_threads(5, work):
        assert isinstance(error, AgreementError)
        assert "what comes next" in str(error)


@pytest.mark.parametrize("who", [0, 1, 5])
def test_a_failure_is_told_to_every_rank_and_the_next_step_works(who):
    def work(rank, control):
        failures = []
        for armed in (False, True, False):
            try:
                control.begin("f", "k", 0)
                if armed and rank == who:
                    raise ArithmeticError("x" * 20_000_000)
                control.end({}, {})
                control.ended += 1
            except Exception as error:
                failures.append(control.fail(Failure(rank, None, None, error)))
        return failures, control.generation, control.ended

    for rank, (failures, generation, ended) in enumerate(in_threads(7, work)):
        (error,) = failures
        assert isinstance(error, ArithmeticError if rank == who else PipelineError)
        assert rank == who or error.rank == who
        assert rank == who or len(str(error)) < 3000
        assert (generation, ended) == (1, 2)


class WithoutDevice(Control):
    @property
    def device(self):
        raise ArithmeticError("the device is gone")


def test_a_rank_that_cannot_take_the_loss_has_told_those_below_that_the_step_has_ended():
    """They have left it to rank 0 whether the step fails, and waited for the rank between that had failed."""
    parts = {0: LossPart(0, leaf(2))}

    def work(rank, control):
        control.__class__ = WithoutDevice if rank == 1 else Control
        control.begin("f", "k", 0)
        return control.end({0: torch.ones(2)} if rank == 0 else {}, parts)

    answers = in_threads(7, work)
    assert isinstance(answers.pop(1), ArithmeticError)
    assert all(isinstance(total, torch.Tensor) and total == 2 for total in answers), answers


@pytest.mark.parametrize("what", ["modes", "changes"])
def test_ranks_that_end_a_step_unlike_are_told_and_have_not_ended_it(what):
    def work(rank, control):
        mode = "mixed" if rank % 2 else "evaluation" if rank == 4 else "training"
        changed = {f"stage {rank // 2}": "p = 0.5" if rank == 4 else ""} if rank > 3 else {}
        control.begin("f", "k", 0)
        return control.end({}, {}, **({"mode": mode} if what == "modes" else {"changed": changed}))

    told = {
        "modes": "training on rank 0, evaluation on rank 4",
        "changes": "values that stage 2 reads beside its arguments: rank 4 has changed p = 0.5, rank 5 none",
    }
    began = time.perf_counter()
    for error in in_threads(7, work):
        assert isinstance(error, AgreementError) and told[what] in str(error)
    assert time.perf_counter() - began < SOON * busy()  # who takes it for ended waits until the limit


def test_ranks_that_have_not_ended_the_same_steps_are_told():
    def work(rank, control):
        control.ended = int(rank == 2)
        return control.begin("f", "k", 0) and control.end({}, {})

    for error in in_threads(5, work):
        assert isinstance(error, AgreementError)
        assert "steps ended: 0" in str(error) and "steps ended: 1" in str(error)
        assert "load the same checkpoint" in str(error)


def test_a_step_within_a_step_is_refused_and_does_not_disturb_it():
    control = Control(over_sockets(1)(0))
    control.begin("f", "k", 0)
    with pytest.raises(StepRunning, match="another step runs") as caught:
        control.begin("f", "k", 0)
    assert control.fail(Failure(0, None, None, caught.value)) is caught.value
    assert control.generation == 0
    control.end({}, {})
    control.ended += 1
    control.begin("f", "k", 0)
    control.end({}, {})


def test_a_rank_without_the_batch_that_tells_its_shapes_is_refused():
    with pytest.raises(ValueError, match="inputs: got None on rank 0"):
        Control(over_sockets(1)(0)).begin("f", None, 0)


# -- processes ---------------------------------------------------------------------------------


def step(transport, rank, ranks, call="f"):
    """A step that does nothing but end, with a loss on the last rank."""
    parts = {ranks - 1: LossPart(ranks - 1, leaf(8))}
    losses = {ranks - 1: torch.arange(8.0)} if rank == ranks - 1 else {}
    try:
        transport.begin(call, "k" if rank == 0 else None, 0)
        total = transport.end(losses, parts)
    except BaseException as cause:
        raise transport.fail(Failure(rank, None, None, cause)) from None
    transport.ended += 1
    return total


def caught(call, *args):
    start = time.perf_counter()
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), time.perf_counter() - start
    return None, "", None, time.perf_counter() - start


def everything(rank, ranks):
    with P2P(timeout=60) as transport:
        losses = [step(transport, rank, ranks) for _ in range(3)]
        apart = caught(step, transport, rank, ranks, f"f; seed {rank // 2}")
        losses.append(step(transport, rank, ranks))
        if rank == 0:
            transport.send_text(ranks - 1, "hello")
        if rank == ranks - 1:
            assert transport.recv_text(0) == "hello"
        texts = transport.all_gather(str(rank))
        dist.barrier()
    transport.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.begin("f", "k", 0)
    return losses, apart, texts


def test_processes_agree(four):
    for losses, (name, text, _, seconds), texts in four(everything):
        assert losses == [28.0] * 4
        assert name == "AgreementError"
        assert "seed 0" in text and "seed 1" in text
        assert seconds < SOON * busy()
        assert texts == ["0", "1", "2", "3"]


def the_timeout_of_the_group(rank, ranks):
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=7))
    with P2P(group) as transport:
        return transport._rendezvous.timeout


def test_the_timeout_is_that_of_the_group(two):
    assert two(the_timeout_of_the_group) == [7.0, 7.0]


def transfer(outgoing, source, destination, leaves):
    return Transfer(
        outgoing,
        Tag("F", source, destination, 0),
        destination if outgoing else source,
        leaves,
        torch.device("cpu"),
    )


def sent(rank, leaves, values, mapped):
    """Send values from rank 0 to 1: how many messages carry them where none is mapped, and what arrives."""
    with P2P(timeout=60, mapped=mapped) as transport:
        transport.begin("sent", "k" if rank == 0 else None, 0)
        transport.connect([Route("F", 0, 1)], [torch.device("cpu")])
        buffers, end = Buffers(), transfer(rank == 0, 0, 1, leaves)._replace(peer=1 - rank)
        buffers.values = {end.tag: values} if rank == 0 else {}
        transport.post([end])(buffers)
        messages = None if mapped else len(buffers.pending[end.tag][0])
        if wait := transport.wait(end):
            wait(buffers)
        transport.end({}, {})
        transport.ended += 1
        return messages, buffers.values.get(end.tag)


def small_and_large(rank, ranks):
    """How many messages carry four small tensors, an empty one and a large one; and the bytes that arrive."""
    leaves = (
        *(leaf(n, dtype=torch.float64 if n % 2 else torch.bool) for n in range(1, 5)),
        leaf(0),
        leaf(2**13),
    )
    values = tuple(
        torch.arange(each.nbytes).to(torch.uint8).remainder(2).to(each.dtype)[: each.shape[0]]
        for each in leaves
    )
    messages, arrived = sent(rank, leaves, values, mapped=False)
    return messages, not rank or all(map(torch.equal, arrived, values))


def test_small_tensors_travel_in_one_buffer(two):
    assert two(small_and_large) == [(2, True)] * 2


def lazy(rank, ranks, mapped):
    """What arrives of views that are conjugated or negated when they are read, of zeros without memory."""
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    values = z.conj(), z[:1].conj().imag, torch._efficientzerotensor(2)
    assert values[0].is_conj() and values[1].is_neg() and all(t.is_contiguous() for t in values)
    _, arrived = sent(rank, (leaf(3, dtype=z.dtype), leaf(1), leaf(2)), values, mapped)
    return not rank or all(map(torch.equal, arrived, values))


@pytest.mark.parametrize("mapped", [True, False])
def test_what_has_no_memory_of_its_values_arrives_as_these(two, mapped):
    assert all(two(lazy, mapped))


def asked_without_a_group(rank, ranks):
    """Rank 1 is asked whom it waits for when the group that its stages share has ended there."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("pp", "tp"))
    with P2P(timeout=20, mesh=mesh, axes=Axes("pp", model="tp")) as transport:
        transport.require_same("met")
        if rank == 1:
            dist.destroy_process_group()
        transport.require_same("ended")
        suspected, own = transport.links.suspect(1 - rank), transport._status()
        transport.require_same("again")
        return suspected, own


def test_a_rank_whose_group_has_ended_answers(fresh):
    processes = fresh(2)
    processes.start(asked_without_a_group)
    for rank, (suspected, own) in enumerate(processes.answers(60)):
        # It is asked while it asks, or when it has its answer and waits for the next text.
        assert suspected in [(1 - rank, f"rank {1 - rank} {does}") for does in ("is at work", "also waits")]
        assert own[:3] == Answer(None, False, 0)[:3]


def test_a_question_that_a_rank_cannot_answer_leaves_its_connections():
    def work(rank, control):
        control.links.status = raising if rank == 1 else Answer
        control.all_gather("met")
        if rank == 2:
            control.links.suspect(1)
        return control.all_gather("again")

    def raising():
        raise LookupError("no answer")

    assert in_threads(3, work) == [["again"] * 3] * 3


def test_private_names_of_torch_are_there():
    """Each that `_torch` uses, by the name of what uses it."""
    group = dist.ProcessGroup
    used = {
        "ProcessGroupGloo": (dist, "ProcessGroupGloo"),
        "coalesced": (group, "_end_coalescing"),
        "connect_nccl": (group, "_start_coalescing"),
        "store_of": (group, "get_group_store"),
        "timeout_of": (group, "_get_backend"),
        "backend_of": (dist, "get_backend_config"),
        "begun_in": (dist.ProcessGroupGloo, "_get_sequence_number_for_group"),
        "alive": (dist.ProcessGroupGloo, "recv"),
    }
    gone = [
        f"{type(owner).__name__} {name}, for ppfunc.runtime.ports._torch.{user}"
        for user, (owner, name) in used.items()
        if not hasattr(owner, name)
    ]
    assert gone == []
    assert all(hasattr(_torch, user) for user in used)

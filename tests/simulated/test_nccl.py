"""The simulated NCCL: what it does as NCCL does, what it refuses, and what it reports."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.simulated import names
from tests.simulated.cases import take
from tests.simulated.nccl import Options


def meet():
    dist.group.WORLD.barrier().wait()


def nccl():
    return dist.group.WORLD._get_backend(torch.device("cuda"))


def cuda(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device="cuda")


def every_collective(rank, size):
    mine = torch.arange(size, dtype=torch.float64, device="cuda") + 10 * rank
    results = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
        results[op] = mine.clone()
        dist.all_reduce(results[op], getattr(dist.ReduceOp, op))
    results["reduce"] = mine.clone()
    dist.reduce(results["reduce"], 1)
    results["broadcast"] = mine.clone()
    dist.broadcast(results["broadcast"], 1)
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine)
    results["all_gather"] = torch.cat(rows)
    results["gather"] = torch.stack(rows) if rank == 1 else mine
    dist.gather(mine, list(results["gather"]) if rank == 1 else None, 1)
    results["scatter"] = torch.empty(1, dtype=torch.float64, device="cuda")
    dist.scatter(results["scatter"], list(mine.split(1)) if rank == 1 else None, 1)
    results["reduce_scatter"] = torch.empty(1, dtype=torch.float64, device="cuda")
    dist.reduce_scatter(results["reduce_scatter"], list(mine.split(1)))
    results["all_to_all"] = torch.empty_like(mine)
    dist.all_to_all_single(results["all_to_all"], mine)
    texts = [None] * size
    dist.all_gather_object(texts, f"rank {rank}")
    meet()
    assert texts == [f"rank {r}" for r in range(size)]
    return {name: value.tolist() for name, value in results.items()}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_collectives_do_what_their_names_say(ranks, backend):
    found = ranks(every_collective, size=3, backend=backend)
    rows = torch.arange(3, dtype=torch.float64) + 10 * torch.arange(3, dtype=torch.float64)[:, None]
    for rank, result in enumerate(found):
        assert result["SUM"] == rows.sum(0).tolist()
        assert result["MAX"] == rows[2].tolist()
        assert result["MIN"] == rows[0].tolist()
        assert result["PRODUCT"] == rows.prod(0).tolist()
        assert result["AVG"] == rows.mean(0).tolist()
        assert result["broadcast"] == rows[1].tolist()
        assert result["all_gather"] == rows.flatten().tolist()
        assert result["scatter"] == [rows[1, rank].item()]
        assert result["reduce_scatter"] == [rows.sum(0)[rank].item()]
        assert result["all_to_all"] == rows[:, rank].tolist()
    assert found[1]["reduce"] == rows.sum(0).tolist()
    assert found[1]["gather"] == rows.tolist()
    assert not ranks.count.alive()


def message(rank, size, waits):
    other, x = 1 - rank, torch.full((4,), 1.0 + rank, device="cuda")
    received = torch.empty(4, device="cuda")
    group = nccl()
    if rank:
        works = [group.recv([received], other), group.send([x], other)]
    else:
        works = [group.send([x], other), group.recv([received], other)]
    if waits:
        for work in works:
            work.wait()
    doubled = received * 2
    names.device().wait("test", *map(names.device().mark, names.device().streams(rank)))
    return doubled.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_wait_orders_what_reads_a_message(ranks, seed):
    assert ranks(message, True, seed=seed) == [[4.0] * 4, [2.0] * 4]


def test_a_missing_wait_is_reported(ranks):
    ranks(message, False)
    races = take(ranks.gpu.races)
    assert any("reads [4]" in race and "nccl: receive 1 from rank 0" in race for race in races)


def issued_late(rank, size):
    group, x = nccl(), torch.ones(4, device="cuda")
    group.send([x], 1).wait() if rank == 0 else group.recv([x], 0).wait()  # connects
    torch.cuda.synchronize()
    meet()
    if rank == 0:
        work = group.send([x], 1)
        meet()
        time.sleep(0.1)
        early = work.is_completed()
        meet()
        work.wait()
        torch.cuda.synchronize()
        return early, work.is_completed()
    meet()
    meet()
    group.recv([x], 0).wait()
    torch.cuda.synchronize()
    return None


def test_a_send_never_ends_before_its_receive_is_at_the_head(ranks):
    assert ranks(issued_late)[0] == (False, True)


def crossed(rank, size, fused):
    group, mine, theirs = nccl(), cuda(float(rank)), cuda(9.0)
    if fused:
        group._start_coalescing()
    works = [group.send([mine], 1 - rank), group.recv([theirs], 1 - rank)]
    if fused:
        assert works == [None, None]
        works = [group._end_coalescing()]
    for work in works:
        work.wait()
    try:
        return theirs.item()
    finally:
        if not fused:
            group.abort()


def test_the_parts_of_a_coalesced_group_advance_together(ranks):
    assert ranks(crossed, True) == [1.0, 0.0]


def test_sends_that_cross_hang_and_the_heads_are_named(ranks):
    with pytest.raises(TimeoutError, match=r"nccl: send 1 to rank \d"):
        ranks(crossed, False, hang=0.5)


def duplicate(rank, size):
    torch.cuda.set_device(0)
    with pytest.raises(
        dist.DistBackendError, match=f"Duplicate GPU detected : rank {rank} and rank {1 - rank}"
    ):
        dist.all_reduce(cuda(1.0))


def test_two_ranks_on_one_device_are_refused(ranks):
    ranks(duplicate)


def connecting(rank, size):
    group, x, counts = nccl(), cuda(1.0), []
    for begin in (
        lambda: group.allreduce([x], dist.AllreduceOptions()),
        lambda: group.allreduce([x], dist.AllreduceOptions()),
        lambda: group.broadcast([x], dist.BroadcastOptions()),
    ):
        begin().wait()
        meet()
        counts.append(sum(n for (kind, _), n in names.device().waits.items() if kind == "connect"))
        meet()
    return counts


def test_the_first_operation_of_a_kind_holds_up_the_host(ranks):
    assert ranks(connecting) == [[2, 2, 4]] * 2


def alone(rank, size):
    nccl().options._timeout = timedelta(seconds=0.1)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="ncclCommInitRankConfig: timed out"):
            dist.all_reduce(cuda(1.0))
        nccl().abort()


def test_who_has_nobody_to_connect_with_is_told(ranks):
    ranks(alone)


def refusals(rank, size):
    group = nccl()
    for tensor, reason in (
        (torch.ones(2), "no backend for a tensor on cpu"),
        (torch.ones(2, 2, device="cuda").T[:1], "must be contiguous"),
        (torch.ones(2, dtype=torch.complex64, device="cuda"), "Unconvertible NCCL type"),
    ):
        if not tensor.is_contiguous() or tensor.device.type == "cpu" or tensor.is_complex():
            with pytest.raises(ValueError, match=reason):
                group.send([tensor], 1 - rank)
    with pytest.raises(AttributeError):
        Options().timeout = 3


def test_tensors_that_nccl_does_not_take_are_refused(ranks):
    ranks(refusals)


def over_gloo(rank, size):
    dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="gloo, which would read memory that is not written yet"):
        dist.all_reduce(cuda(1.0))


def test_gloo_gets_no_tensors_of_the_device(ranks):
    ranks(over_gloo, backend="gloo")


def differing(rank, size, what):
    if what == "kind":
        begin = dist.all_reduce if rank else (lambda x: dist.broadcast(x, 0))
        begin = begin if rank else (lambda x: dist.all_reduce(x, dist.ReduceOp.MAX))
        begin(cuda(1.0))
    elif what == "size":
        dist.all_reduce(torch.ones(2 + rank, device="cuda"))
    else:
        group, x = nccl(), torch.ones(2 + rank, device="cuda")
        group.recv([x], 0) if rank else group.send([x], 1)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("kind", "rank 0 runs all-reduce MAX of .*, rank 1 runs all-reduce SUM of"),
        ("size", r"rank 0 runs .*float32\[2\], rank 1 runs .*float32\[3\]"),
        ("message", r"message 1: float32\[2\] is sent, and float32\[3\] is received"),
    ],
)
def test_operations_that_differ_break_the_device(ranks, what, said, capfd):
    with pytest.raises(RuntimeError, match=said):
        ranks(differing, what)


def in_a_group(rank, size):
    group, pair, x, y = nccl(), dist.new_group(timeout=timedelta(seconds=30)), cuda(1.0), cuda(1.0)
    dist.all_reduce(x)
    dist.all_reduce(y, group=pair)
    group._start_coalescing()
    dist.all_reduce(y, group=pair)
    within = y.item()
    meet()
    assert group._end_coalescing() is None
    torch.cuda.synchronize()
    return within, y.item()


def test_a_thread_in_a_group_of_another_communicator_issues_nothing(ranks):
    assert ranks(in_a_group) == [(2.0, 4.0)] * 2


def aborted_in_a_group(rank, size, collected):
    group, x = nccl(), cuda(1.0)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    group._start_coalescing()
    if collected:
        group.recv([x], 1 - rank)
    abort = threading.Thread(target=group.abort)
    abort.start()
    abort.join()
    with pytest.raises(dist.DistBackendError, match="was aborted"):
        group._end_coalescing() if collected else group.recv([x], 1 - rank)


@pytest.mark.parametrize("collected", [False, True])
def test_an_abort_in_the_middle_of_a_group_is_told_and_may_free_what_is_collected(ranks, collected):
    ranks(aborted_in_a_group, collected)
    assert ["collected before its abort" in fault for fault in ranks.count.faults] == [True, True] * collected

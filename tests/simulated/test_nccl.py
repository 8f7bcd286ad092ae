"""The simulated NCCL: what it does as NCCL does, what it refuses, and what it reports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.clock import busy
from tests.simulated import names
from tests.simulated.groups import in_threads, simulated_nccl
from tests.simulated.nccl import Options, ProcessGroupNCCL


@pytest.fixture
def ranks(simulate):
    """Run a function on each rank, a thread; ``ranks.gpu`` and ``ranks.count`` say what was simulated."""

    def run(function, *arguments, size=2, seed=0, backend="cpu:gloo,cuda:nccl", hang=30.0, **options):
        run.gpu = simulate(devices=size, seed=seed, hang=hang)
        with simulated_nccl(**options) as run.count:
            return in_threads(size, function, *arguments, backend=backend)

    return run


def take(reports):
    """What was reported until now, which is expected."""
    taken, reports[:] = list(reports), []
    return taken


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


def abort_here(rank, size):
    group, x = nccl(), torch.zeros(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank:
        x.fill_(7.0)
        torch.cuda.synchronize()
        work = group.recv([x], 0)
        meet()
        begun = time.monotonic()
        group.abort()
        took = time.monotonic() - begun
        torch.cuda.synchronize()
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 1"):
            group.recv([x], 0)
        meet()
        return took, work.is_completed(), x.isnan().all().item()
    y = torch.zeros(4, device="cuda")
    work = group.recv([y], 1)
    meet()
    meet()
    waits = not work.is_completed()
    group.abort()
    torch.cuda.synchronize()
    return waits, y.isnan().all().item()


def test_an_abort_is_of_one_rank_takes_its_time_and_leaves_nan(ranks):
    here, (took, ended, poisoned) = ranks(abort_here, abort_takes=0.2)
    assert took >= 0.2
    assert ended
    assert poisoned
    assert here == (True, True)


def freed_under_an_abort(rank, size, waits):
    group, x = nccl(), torch.zeros(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    work = group.recv([x], 1 - rank)
    del x, work
    abort = threading.Thread(target=group.abort)
    abort.start()
    while group._kept or (waits and abort.is_alive()):
        time.sleep(0.01)
    meet()  # an allocation looks at all that was freed, of the other rank too
    torch.empty(4, device="cuda")
    abort.join()


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_freed_under_a_late_abort_is_reported(ranks, waits):
    ranks(freed_under_an_abort, waits, abort_takes=0.2 if waits else busy())
    races = take(ranks.gpu.races)
    assert ["is freed while it is in use" in race for race in races] == [True] * (0 if waits else 2)


def late(rank, size):
    group, x = nccl(), torch.zeros(4, device="cuda")
    dist.all_reduce(x)
    group.options._timeout = timedelta(seconds=0.05)
    work = group.recv([x], 1 - rank)
    while not work.late:
        time.sleep(0.01)
    done = names.device().done(work.mark)
    meet()
    group.abort()
    return work.is_completed(), done


@pytest.mark.parametrize("handling", ["0", "3"])
def test_a_timeout_marks_the_work_and_the_kernel_goes_on(ranks, monkeypatch, handling):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    assert ranks(late) == [(True, False)] * 2
    faults = take(ranks.count.faults)
    assert len(faults) == (2 if handling == "3" else 0)
    assert all("torch ends the process" in fault for fault in faults)


def changes_the_environment(rank, size):
    os.environ["SIMULATED"] = "0"
    dist.all_reduce(cuda(1.0))
    os.environ["SIMULATED"] = "1"
    del os.environ["SIMULATED"]


def test_a_change_of_the_environment_while_one_is_connected_is_a_fault(ranks):
    ranks(changes_the_environment, size=1)
    assert ["SIMULATED is set in the environment" in fault for fault in ranks.count.faults] == [True, True]


def test_communicators_that_live_are_counted(simulate):
    simulate(devices=1)
    with simulated_nccl() as count:
        store = dist.HashStore()
        ended, dropped, alive = (ProcessGroupNCCL(dist.PrefixStore(str(n), store), 0, 1) for n in range(3))
        ProcessGroupNCCL(store, 0, 1)  # has never connected
        for group in (ended, dropped, alive):
            group.allreduce([cuda(1.0)], dist.AllreduceOptions()).wait()
        ended.shutdown()
        torch.cuda.synchronize()
        del group, dropped
        assert len(count.alive()) == 2
        assert ["dropped without an end" in one for one in count.alive()] == [True, False]
        alive.abort()
        assert count.alive() == take(count.dropped)


def test_communicators_alive_at_exit_are_named():
    code = (
        "from tests.simulated import names, nccl; import torch, torch.distributed as dist\n"
        "with names.simulated():\n"
        "    group = nccl.ProcessGroupNCCL(dist.HashStore(), 0, 1)\n"
        "    group.allreduce([torch.ones(1, device='cuda')], dist.AllreduceOptions()).wait()\n"
        "    torch.cuda.synchronize()\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert "communicators alive at exit: communicator of rank 0 of 1" in told.stderr

"""How communicators of the simulated NCCL end: aborts, timeouts, and those that are alive at exit."""

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
from tests.simulated import guard, names
from tests.simulated.groups import simulated_nccl
from tests.simulated.nccl import ProcessGroupNCCL
from tests.simulated.test_nccl import cuda, meet, nccl, take


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
    takes = 0.2 if waits else min(30.0, busy())  # of the 60 s that ranks have
    ranks(freed_under_an_abort, waits, abort_takes=takes)
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


@pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))
def test_communicators_alive_at_exit_are_named():
    code = (
        "from tests.simulated import names, nccl; import torch, torch.distributed as dist\n"
        "with names.simulated():\n"
        "    group = nccl.ProcessGroupNCCL(dist.HashStore(), 0, 1)\n"
        "    group.allreduce([torch.ones(1, device='cuda')], dist.AllreduceOptions()).wait()\n"
        "    torch.cuda.synchronize()\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120 * busy())
    assert told.returncode == 0, told.stderr
    assert "communicators alive at exit: communicator of rank 0 of 1" in told.stderr

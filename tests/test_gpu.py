"""The command for machines with a GPU: its ranks over gloo on the CPU, and what becomes of its stages."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.__main__ import last_result, run_stage
from tests.gpu.ranks import WAYS, agrees, busy_noted, in_processes, leaves, refused, survives
from tests.gpu.stages import STAGES


@pytest.mark.parametrize("name", ["one_f_one_b", "dualpipe"])
def test_two_ranks_agree_with_one(name):
    first, second = in_processes(agrees, "gloo", "cpu", name, seconds=120)
    assert first == second


@pytest.mark.parametrize("how", WAYS)
def test_a_rank_that_fails_is_named(how):
    mine, told = in_processes(survives, "gloo", "cpu", how, seconds=120)
    assert "rank 0" in told and ("on purpose" in told) == how.startswith("raises")
    assert (mine is None) == (how == "killed")


def falls(rank, device):
    with busy_noted(device):
        raise ArithmeticError(f"on purpose, {rank}")


def test_each_rank_that_falls_is_told():
    with pytest.raises(AssertionError) as caught:
        in_processes(falls, "gloo", "cpu", seconds=120)
    for rank in range(2):
        assert f"on purpose, {rank}\nbusy for 0 s on end, CUDA_DEVICE_MAX_CONNECTIONS=" in str(caught.value)


def test_ranks_that_leave_a_transport_open_exit_by_themselves():
    assert in_processes(leaves, "gloo", "cpu", seconds=120, exits=True) == [0, 0]


def test_the_result_of_a_stage_is_found_among_what_libraries_print():
    assert last_result('{"result": "passed"}\nNCCL version 2.28\n{"a": 1}\n[]') == {"result": "passed"}
    assert last_result("NCCL version 2.28") == {}


def test_what_runs_is_not_taken_for_refused():
    with pytest.raises(AssertionError, match="nothing was refused"):
        in_processes(refused, "gloo", "cpu", seconds=120)


def test_a_stage_that_does_not_end_fails():
    row = run_stage("probe", 0.1)
    assert (row["stage"], row["result"], row["why"]) == ("probe", "failed", "did not end in 0 s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_stage_says_why_it_is_skipped():
    row = run_stage("two ranks", 120)
    assert (row["result"], row["why"]) == ("skipped", "no CUDA device")
    assert run_stage("probe", 120)["result"] == "passed" and len(STAGES) == 10

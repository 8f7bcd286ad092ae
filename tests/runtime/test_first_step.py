"""The first step: ranks trace at the same time, and a stage is called as often as in one process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp

D = 4
SLEEP = 0.5  # seconds that the Python of a stage takes per call


def first_step(rank, size, ranks, builder, stages):
    """Seconds of the first step of some ranks and of the second one, and the calls of a stage's function."""
    group = dist.new_group(range(ranks))
    if rank >= ranks:
        return None
    calls = []

    def slow(params, x):
        calls.append(rank)
        time.sleep(SLEEP)
        return torch.tanh(x @ params)

    schedule = getattr(pp, builder)(ranks, 2 * ranks)
    # Stages of this process are functions of their own: nothing is shared between them.
    held = schedule.stages_of(rank)
    own = [(lambda p, x, s=s: slow(p, x) + s) if s in held else None for s in range(stages * ranks)]
    params, x = {s: torch.eye(D) for s in held}, torch.ones(2 * ranks, D)
    seconds = []
    with pp.P2P(group, timeout=60) as transport:
        step = pp.value_and_grad(own, lambda y, t: (y - t).square().mean(), schedule, transport)
        for _ in range(2):
            start = time.perf_counter()
            step(params, x, x)
            seconds.append(time.perf_counter() - start)
    return seconds, len(calls)


@pytest.mark.slow
@pytest.mark.parametrize(("builder", "stages"), [("one_f_one_b", 1), ("zbv", 2)])
def test_four_ranks_take_as_long_as_one_and_one_call_for_each_further_rank(four, soon, builder, stages):
    four(first_step, 4, "one_f_one_b", 1)  # imports, once in each process
    found = {ranks: four(first_step, ranks, builder, stages)[:ranks] for ranks in (1, 2, 4)}
    print(
        {
            ranks: [(round(s[0], 2), round(s[1], 3), calls) for s, calls in answers]
            for ranks, answers in found.items()
        }
    )
    calls = {calls for answers in found.values() for _, calls in answers}
    assert len(calls) == 1
    alone = max(seconds[0] for seconds, _ in found[1])
    for ranks in (2, 4):
        # Signatures go from stage to stage, after one call of each; what comes after that runs side by side.
        further = stages * (ranks - 1)
        assert max(seconds[0] for seconds, _ in found[ranks]) < 1.2 * (alone + further * SLEEP) + soon / 4
        # Within one call of a stage; soon is 2 s where the machine is idle.
        assert max(seconds[1] for seconds, _ in found[ranks]) < SLEEP * soon / 2


IMPORTS = """
import sys, torch, ppfunc as pp

def of_torch():
    return {name for name in sys.modules if name.startswith("torch.")}

x, before = torch.ones(2, 4), of_torch()
step = pp.value_and_grad([lambda p, x: x @ p], torch.nn.functional.mse_loss, pp.gpipe(1, 2))
made = of_torch()
step({0: torch.eye(4)}, x, x)
print("torch._dynamo" in before, "torch._dynamo" in made, len(made - before), len(of_torch() - made))
"""


def test_what_traces_is_imported_before_ranks_wait_for_each_other_in_a_step():
    """In the first step each waited until the slowest had imported some hundred modules."""
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    before, made, imported, in_step = ran.stdout.split()
    assert (before, made) == ("False", "True"), ran.stdout
    assert int(in_step) < 20 < int(imported), ran.stdout

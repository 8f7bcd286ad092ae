"""Microseconds per instruction of the interpreter, with stages that do nothing, beside torch's runtime.

Run by torchrun on one rank (no messages) or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 tests/benchmarks/overhead.py

Both run interleaved 1F1B in turn. On one rank, with four stages, all values are handed over
locally, so what is measured is the interpreter and nothing else.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.distributed as dist
from timing import measure
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import ppfunc as pp

WIDTH = 4


class Nothing(torch.nn.Module):
    """A stage that hands its input on; torch needs a differentiable operation to find a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


def total(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = pp.interleaved_one_f_one_b(ranks, options.microbatches, options.chunks)
    held = schedule.stages_of(rank)
    # Every input requires a gradient in torch's runtime; ours finds that nothing needs one at the first stage.
    inputs = torch.randn(options.microbatches, WIDTH, requires_grad=True)
    targets = torch.zeros(options.microbatches, WIDTH)

    step = pp.value_and_grad([lambda p, x: x] * schedule.stages, total, schedule, pp.P2P())
    params = {s: {} for s in held}
    batch = pp.microbatch(inputs.detach(), options.microbatches), pp.microbatch(targets, options.microbatches)
    stages = [PipelineStage(Nothing(), s, schedule.stages, torch.device("cpu")) for s in held]
    runtime = ScheduleInterleaved1F1B(stages, options.microbatches, loss_fn=total)
    first, last = 0 in held, schedule.stages - 1 in held

    def step_theirs() -> None:
        runtime.step(*[inputs] * first, target=targets if last else None)

    def step_ours() -> None:
        step(params, *batch)

    count = sum(1 for _ in schedule.instructions(rank))
    rounds = [
        (measure(step_ours, options.steps) / count, measure(step_theirs, options.steps) / count)
        for _ in range(options.rounds)
    ]
    if rank == 0:
        mine, other = median(a for a, _ in rounds), median(b for _, b in rounds)
        print(
            f"{ranks} ranks, {schedule.stages} stages, {options.microbatches} microbatches: ppfunc {mine * 1e6:.1f} us per "
            f"instruction, torch {other * 1e6:.1f} us, ratio {median(a / b for a, b in rounds):.3f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

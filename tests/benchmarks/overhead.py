"""Microseconds per instruction of a step, with stages that do next to nothing, beside torch's runtime; and
per parameter leaf.

Run by torchrun on one rank (no messages) or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 tests/benchmarks/overhead.py --leaves 0 1 100 1000

Both run interleaved 1F1B in turn. On one rank, with four stages, all values are handed over locally, so what
is measured is the runtime and nothing else. With leaves, a stage adds all its parameters to its input. The
time per leaf and step, in CPU seconds, is that of the step, without its programs and the sums of their
gradients in the order of the schedule, less the same with one leaf: without any there are no gradients. Each
of the four runs in turn, as often as a round has steps, after one that does not count: a step that follows
another program finds its caches cold.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import add_foremost, foremost, measure
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import ppfunc as pp
from ppfunc.runtime.running.calls import Sum as GradientSum
from ppfunc.runtime.running.compile import CompiledStep
from ppfunc.schedule import Op

WIDTH = 4
Sides = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


class Sum(torch.nn.Module):
    """Adds its parameters to the input; torch needs a differentiable operation to find a gradient."""

    def __init__(self, leaves: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict(leaves)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return stage(dict(self.held.items()), x.view_as(x))


def stage(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + torch.stack(list(params.values())).sum(0) if params else x


def total(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument(
        "--leaves", type=int, nargs="+", default=[0, 1, 100, 1000], help="parameter leaves per stage"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    add_foremost(parser)
    options = parser.parse_args()
    if options.foremost:
        foremost()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = pp.interleaved_1f1b(ranks, options.microbatches, options.chunks)
    held = schedule.stages_of(rank)
    count = sum(1 for _ in schedule.instructions(rank))
    one_leaf = sides(schedule, held, 1, rank)
    for leaves in options.leaves:
        step_ours, step_theirs, programs = many = sides(schedule, held, leaves, rank)
        rounds = [
            [measure(step, options.steps) for step in (step_ours, step_theirs, programs)]
            for _ in range(options.rounds)
        ]
        mine, other, bare = (median(cost.wall for cost in column) for column in zip(*rounds, strict=True))
        ratio, cpu = (median(a[k] / b[k] for a, b, _ in rounds) for k in range(2))
        more = runtime_seconds(many, one_leaf, options)
        per_leaf = f", {more / (leaves - 1) / len(held) * 1e6:.2f} us per leaf and step" if leaves > 1 else ""
        if rank == 0:
            print(
                f"{ranks} ranks, {schedule.stages} stages, {options.microbatches} microbatches, {leaves}"
                f" leaves: ppfunc {mine / count * 1e6:.1f} us per instruction ({bare / count * 1e6:.1f} of"
                f" them programs and sums), torch {other / count * 1e6:.1f} us, ratio {ratio:.3f}, of CPU"
                f" {cpu:.3f}{per_leaf}",
                flush=True,
            )
    dist.destroy_process_group()


def sides(schedule: pp.Schedule, held: Sequence[int], leaves: int, rank: int) -> Sides:
    """A step of ours, one of torch's, and what of ours are programs and sums of gradients."""
    params = {s: {f"p{i}": torch.randn(WIDTH) for i in range(leaves)} for s in held}
    microbatches = schedule.microbatches
    # Every input requires a gradient in torch's runtime; ours finds that nothing needs one at the first
    # stage.
    inputs, targets = torch.randn(microbatches, WIDTH, requires_grad=True), torch.zeros(microbatches, WIDTH)
    step = pp.value_and_grad([stage] * schedule.stages, total, schedule, pp.P2P())
    given = params, inputs.detach(), targets
    step(*given)
    lowered = step.lower(*given)
    stages = [PipelineStage(Sum(params[s]), s, schedule.stages, torch.device("cpu")) for s in held]
    runtime = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=total)
    first, last = 0 in held, schedule.stages - 1 in held

    def step_theirs() -> None:
        for s in stages:
            s.submod.zero_grad(set_to_none=True)
        runtime.step(*[inputs] * first, target=targets if last else None)

    compiled = lowered.compile().step
    return lambda: step(*given), step_theirs, lambda: run_programs(compiled, params, rank)


def runtime_seconds(many: Sides, one_leaf: Sides, options: argparse.Namespace) -> float:
    """CPU seconds of one step of ours without its programs and sums, less those with one leaf."""
    programs = many[0], many[2], one_leaf[0], one_leaf[2]
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(options.rounds):
        for found, program in zip(seconds, programs, strict=True):
            program()
            found += [cpu_seconds(program) for _ in range(options.steps)]
    step, bare, step_of_one, bare_of_one = map(median, seconds)
    return (step - bare) - (step_of_one - bare_of_one)


def cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


@torch.no_grad()
def run_programs(compiled: CompiledStep, params: dict[int, Any], rank: int) -> None:
    """Every forward and backward of this process, in the order of the schedule, and the sums of its
    gradients.
    """
    x, one = torch.zeros(1, WIDTH), torch.ones(())
    sums, residuals = {s: GradientSum() for s in params}, {}
    numbers = {s: range(len(tree)) for s, tree in params.items()}
    for instruction in compiled.lowered.schedule.instructions(rank):
        s, m = key = instruction.stage, instruction.microbatch
        program, targets = compiled.programs[key].flat, (x,) * (compiled.lowered.stages[key].loss is not None)
        if instruction.op is Op.F:
            _, residuals[key] = program.forward(tuple(params[s].values()), (x,), targets)
        elif instruction.op is Op.B:
            gy = (one if targets else x,) if params[s] else ()  # nothing has a gradient without leaves
            gradients, _ = program.backward(residuals.pop(key), gy)
            sums[s].add(gradients, numbers[s], m)


if __name__ == "__main__":
    main()

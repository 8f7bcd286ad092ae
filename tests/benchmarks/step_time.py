"""Step time of the same blocks under the same schedule: ppfunc against torch.distributed.pipelining.

Run by torchrun, two ranks or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/step_time.py --schedule 1f1b --width 64

Both run in turn in one process group, in rounds that alternate, each rank on a core of its own unless
``--unbound`` leaves that to the operating system; freed memory stays with the process. Printed are the
median step times, the median of the ratios round by round (below 1: ppfunc is faster), the same for the CPU
seconds of all ranks, and the measured over the ideal step, which is the simulated makespan with the stages'
own measured times. ``--compile`` compares programs compiled by inductor with the same programs as traced.
``--device cuda`` takes a GPU per rank, or one for all, which then pass for hosts of their own and talk over
sockets; ``--nproc-per-node 1 --schedule interleaved_1f1b`` has no messages.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import add_foremost, foremost, in_turn, keep_freed_memory
from torch.distributed.pipelining import PipelineStage, schedules as theirs

import ppfunc as pp
from ppfunc.schedule import BUILDERS, Costs, Schedule

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gpt

THEIRS = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}
SIZES = {64: (2, 16), 256: (4, 128)}  # width: (sequences, bytes) of a microbatch
Stage = Callable[[list[gpt.Params], torch.Tensor], torch.Tensor]
Gradients = dict[int, list[gpt.Params]]  # of the stages of a rank


class Blocks(torch.nn.Module):
    """The same stage as a module, for torch's runtime."""

    def __init__(self, apply: Stage, params: list[gpt.Params]) -> None:
        super().__init__()
        self.apply_stage = apply
        self.held = torch.nn.ModuleList(
            torch.nn.ParameterDict({k: v.clone() for k, v in p.items()}) for p in params
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_stage([dict(p.items()) for p in self.held], x)


def squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def main() -> None:
    options = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_freed_memory()
    device = torch.device(options.device)
    if device.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):  # ranks on one GPU pass for several hosts
            os.environ |= {"NCCL_HOSTID": f"rank{local}", "NCCL_SOCKET_IFNAME": "lo"}
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
    elif not options.unbound:
        bind_to_core()
    if options.foremost:
        foremost()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = BUILDERS[options.schedule](ranks, options.microbatches)
    sequences, length = SIZES.get(options.width, SIZES[256])
    model, runs = cut_blocks(options.width, options.blocks, length, schedule.stages)
    stages = [gpt.stage([model[k] for k in run]) for run in runs]
    params = {s: gpt.initialise(model, runs[s], seed=0, device=device) for s in schedule.stages_of(rank)}
    generator = torch.Generator().manual_seed(0)
    shape = (options.microbatches * sequences, length, options.width)
    inputs, targets = (torch.randn(shape, generator=generator).to(device) for _ in range(2))

    def our_step(engine: pp.stage.Engine) -> Callable[[], Gradients]:
        step = pp.value_and_grad(stages, squared, schedule, pp.P2P(), engine=engine)
        return lambda: step(params, inputs, targets)[1]

    if options.compile:
        names = "compiled", "as traced"
        step_ours = our_step(pp.engines.graph(compile=True))
        step_theirs = our_step(pp.engines.graph)
    else:
        names = "ppfunc", "torch"
        modules = {s: Blocks(stages[s], params[s]) for s in params}
        step_ours, step_theirs = (
            our_step(pp.engines.graph),
            their_step(options, schedule, modules, inputs, targets, rank),
        )
    agree(step_ours(), step_theirs())
    rounds = in_turn(step_ours, step_theirs, options.rounds, options.steps)
    ideal = ideal_step(stages, schedule, params, inputs[:sequences], targets[:sequences])
    if rank == 0:
        mine, other = median(a.wall for a, _ in rounds), median(b.wall for _, b in rounds)
        cpu, cpu_other = median(a.cpu for a, _ in rounds), median(b.cpu for _, b in rounds)
        print(
            f"{options.schedule}, {ranks} ranks, width {options.width}: {names[0]} {mine * 1e3:.2f} ms,"
            f" {names[1]} {other * 1e3:.2f} ms, ratio {median(a.wall / b.wall for a, b in rounds):.3f}; ideal"
            f" {ideal * 1e3:.2f} ms, measured over ideal {mine / ideal:.3f}; CPU of all ranks"
            f" {cpu * 1e3:.2f} and {cpu_other * 1e3:.2f} ms, ratio"
            f" {median(a.cpu / b.cpu for a, b in rounds):.3f}"
        )
    dist.destroy_process_group()


def cut_blocks(width: int, blocks: int, length: int, stages: int) -> tuple[list[gpt.Layer], list[range]]:
    """Blocks of a GPT, and the numbers of the blocks of each stage."""
    model = gpt.layers(gpt.Config(width=width, layers=blocks, context=length))[1:-1]
    return model, [range(a, b) for a, b in pairwise(blocks * s // stages for s in range(stages + 1))]


def bind_to_core() -> None:
    """Keep this process, threads of its transports included, on one core, as MPI's launchers do."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", choices=BUILDERS, default="1f1b", help=f"against torch: {', '.join(THEIRS)}"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument(
        "--unbound", action="store_true", help="let the operating system place ranks on cores"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="time compiled programs against the same ones as traced, not against torch",
    )
    add_foremost(parser)
    return parser.parse_args()


def their_step(
    options: argparse.Namespace,
    schedule: Schedule,
    modules: dict[int, Blocks],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    rank: int,
) -> Callable[[], Gradients]:
    """A step of torch's runtime of the same schedule."""
    stages = [PipelineStage(modules[s], s, schedule.stages, inputs.device) for s in sorted(modules)]
    made = THEIRS[options.schedule]
    single = issubclass(made, theirs.PipelineScheduleSingle)
    runtime = made(stages[0] if single else stages, options.microbatches, loss_fn=squared)
    first, last = schedule.placement[0] == rank, schedule.placement[-1] == rank

    def step() -> Gradients:
        for module in modules.values():
            module.zero_grad(set_to_none=True)
        runtime.step(*[inputs] * first, target=targets if last else None, losses=[] if last else None)
        return {
            s: [{k: p.grad for k, p in held.items()} for held in module.held] for s, module in modules.items()
        }

    return step


def agree(mine: Gradients, others: Gradients) -> None:
    """Both sides have to compute the same gradients, or the comparison means nothing."""
    assert mine.keys() == others.keys()
    for s in mine:
        torch.testing.assert_close(mine[s], others[s], rtol=1e-4, atol=1e-6)


def ideal_step(
    stages: list[Stage],
    schedule: Schedule,
    params: dict[int, list[gpt.Params]],
    x: torch.Tensor,
    target: torch.Tensor,
) -> float:
    """Seconds of the simulated step with each stage's own times, messages taking none."""
    last = schedule.stages - 1
    mine = {}
    for s, held in params.items():
        fn, example = (stages[s], (held, x))
        if s == last:
            fn, example = (lambda p, x, t, s=s: squared(stages[s](p, x), t)), (held, x, target)
        mine[s] = stage_times(pp.engines.graph(fn, example, name=f"stage {s}"), example)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    times = [found[s] for s in range(schedule.stages) for found in gathered if s in found]
    forward, whole, inputs, weights = zip(*times, strict=True)
    costs = Costs(forward=forward, backward=whole, backward_input=inputs, backward_weight=weights)
    return pp.simulate(schedule, costs).makespan


@torch.no_grad()
def stage_times(program: object, example: tuple, repeats: int = 30) -> tuple[float, float, float, float]:
    """Median seconds of forward, whole backward, input gradient and weight gradient; all ranks at once."""
    flat = program.flat
    held, x, *rest = example
    arguments = tuple(v for p in held for v in p.values()), (x,), tuple(rest)
    gy = tuple(torch.ones(leaf.shape, device=x.device) for leaf in program.y.leaves)
    wait = torch.cuda.synchronize if x.device.type == "cuda" else lambda: None
    rows = []
    for _ in range(repeats):
        times = []

        def timed(function: Callable[..., Any], *given: Any, times: list[float] = times) -> Any:
            wait()
            start = time.perf_counter()
            made = function(*given)
            wait()
            times.append(time.perf_counter() - start)
            return made

        _, residuals = timed(flat.forward, *arguments)
        timed(flat.backward, residuals, gy)
        _, residuals = flat.forward(*arguments)
        _, late = timed(flat.backward_input, residuals, gy)
        timed(flat.backward_weight, late)
        rows.append(times)
    return tuple(median(column) for column in zip(*rows, strict=True))


if __name__ == "__main__":
    main()

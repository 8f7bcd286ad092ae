"""What recording costs: steps with and without `record` in turn, and the compute that it measures beside
torch's profiler.

Run on the CPU::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/recorded.py

Printed are the median ratio of recorded to plain steps, in seconds and in CPU seconds of all ranks, and for
each rank the sum of its measured compute over the time that the profiler gives operators in a step.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ppfunc as pp


def stage(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x


def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call in which all ranks begin together, and its CPU seconds on all ranks."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    call()
    wall, used = time.perf_counter() - start, torch.tensor(time.process_time() - cpu)
    dist.all_reduce(used)
    return wall, float(used)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="of a microbatch")
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    params = {
        rank: {
            f"w{i}": torch.randn(options.width, options.width) / options.width**0.5
            for i in range(options.layers)
        }
    }
    x = torch.randn(2 * ranks * options.rows, options.width)
    with pp.P2P() as transport:
        step = pp.value_and_grad([stage] * ranks, loss, pp.one_f_one_b(ranks, 2 * ranks), transport)
        for _ in range(3):
            step.record(params, x, x)
        rounds = [
            (seconds(lambda: step(params, x, x)), seconds(lambda: step.record(params, x, x)))
            for _ in range(options.rounds)
        ]
        shares = []
        for _ in range(5):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                _, timeline = step.record(params, x, x)
            operators = (
                sum(
                    event.self_cpu_time_total
                    for event in profiler.key_averages()
                    if event.key.startswith("aten")
                )
                / 1e6
            )
            shares.append((timeline.makespan - timeline.idle[rank]) / operators)
    told: list[float] = [0.0] * ranks
    dist.all_gather_object(told, median(shares))
    if rank == 0:
        wall, cpu = (median(recorded[i] / plain[i] for plain, recorded in rounds) for i in (0, 1))
        plain = median(plain[1] for plain, _ in rounds) / ranks
        print(
            f"{ranks} ranks, width {options.width}: recorded over plain {wall:.3f}, in CPU seconds {cpu:.3f}"
            f" (a rank has {plain:.4f})"
        )
        print(
            "measured compute over the profiler's operators, by rank: "
            + " ".join(f"{share:.3f}" for share in told)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The first step of one stage in one process: the graph engine beside torch.distributed.pipelining.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/first_step.py

Both sides run in fresh processes, in turn. Printed are the CPU seconds of the first forward and backward, imports
aside, and of a later one; and how often the function of the stage was called.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A transformer block as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.second(x))))


def graph_step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward by the graph engine, which traces in the first step."""
    from ppfunc.stage import graph, stage_from_module

    fn, params, _ = stage_from_module(module)
    built = []

    def step() -> None:
        if not built:
            built.append(graph(fn, (params, x)))
        y, residuals = built[0].forward(params, x)
        built[0].backward(residuals, y)

    return step


def torch_step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """A step of one stage and one microbatch by torch.distributed.pipelining."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 1, loss_fn=lambda y, target: (y - target).square().sum())
    return lambda: schedule.step(x, target=x)


def measure(options: argparse.Namespace) -> None:
    """Print CPU seconds of the first step and of the third, and the calls of the module."""
    torch.set_num_threads(1)
    module = nn.Sequential(*(Block(options.width, 4) for _ in range(options.blocks)))
    calls: list[None] = []
    module.register_forward_pre_hook(lambda *_: calls.append(None))
    step = {"graph": graph_step, "torch": torch_step}[options.side](module, torch.randn(4, 128, options.width))
    times = []
    for _ in range(3):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
        if len(times) == 1:
            first_calls = len(calls)
    print(times[0], times[2], first_calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=["graph", "torch"], help="measure this one, in this process")
    options = parser.parse_args()
    if options.side:
        return measure(options)
    rounds = []
    for _ in range(options.rounds):
        command = [sys.executable, "-W", "ignore", __file__, f"--width={options.width}", f"--blocks={options.blocks}"]
        printed = {
            s: subprocess.run([*command, f"--side={s}"], stdout=subprocess.PIPE, text=True, check=True).stdout for s in ("graph", "torch")
        }
        rounds.append({side: tuple(map(float, text.split())) for side, text in printed.items()})
    for side in ("graph", "torch"):
        first, later, calls = (median(r[side][i] for r in rounds) for i in range(3))
        print(f"{side}: first step {first:.3f} s, a later one {later:.3f} s, {calls:.0f} calls of the stage in the first")
    print(f"ratio of first steps {median(r['graph'][0] / r['torch'][0] for r in rounds):.2f}")


if __name__ == "__main__":
    main()

"""Training at scale, piece by piece: each beside what it replaces, both in turn in one process group.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py block

* ``block``: forward, input gradient and weight gradient of a block whose parameters are DTensors, traced through, on a mesh of one
  rank, beside those of the same block on plain tensors, and beside DTensors under autograd.

Printed are the median CPU times of each side, and the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import ppfunc as pp
from ppfunc.stage.layout import local

Side = Callable[[], object]


class Block(nn.Module):
    """A feed-forward block with a residual connection: [b, t, d] to [b, t, d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def block(options: argparse.Namespace) -> None:
    """The cost of layouts where nothing is communicated."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))["tp"]
    plain = pp.stage_from_module(Block(options.width))
    laid = pp.parallelize(Block(options.width), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, gy = (torch.randn(2, 8, options.width) for _ in range(2))

    def traced(stage: pp.stage.ModuleStage) -> Side:
        flat, params = pp.graph(stage.fn, (stage.params, x)).flat, tuple(map(local, stage.params.values()))

        @torch.no_grad()
        def run() -> object:
            _, residuals = flat.forward(params, (x,), ())
            gx, rest = flat.backward_input(residuals, (gy,))
            return gx, flat.backward_weight(rest)

        return run

    def autograd() -> object:
        inputs = [local(p).detach().requires_grad_() for p in laid.params.values()]
        a = x.detach().requires_grad_()
        return torch.autograd.grad(laid.fn(dict(zip(laid.params, inputs, strict=True)), a), [*inputs, a], gy)

    sides = {"plain": traced(plain), "DTensor": traced(laid), "DTensor under autograd": autograd}
    compare(f"block of width {options.width}", sides, options)


def compare(title: str, sides: dict[str, Side], options: argparse.Namespace) -> None:
    """Run the sides in turn; the first is what the others are measured against."""
    for side in sides.values():
        side()
    rounds = [{name: measure(side, options.repeats) for name, side in sides.items()} for _ in range(options.rounds)]
    first = next(iter(sides))
    for name in sides:
        ratio = median(times[name] / times[first] for times in rounds)
        print(f"{title}, {name}: {median(times[name] for times in rounds) * 1e6:.0f} us, ratio to {first} {ratio:.3f}")


def measure(side: Side, repeats: int) -> float:
    """CPU seconds per run."""
    start = time.process_time()
    for _ in range(repeats):
        side()
    return (time.process_time() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=["block"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=100, help="runs of each side per round")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        {"block": block}[options.piece](options)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

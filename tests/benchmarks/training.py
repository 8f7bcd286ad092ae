"""Training at scale, piece by piece: each beside what it replaces, both in turn in one process group.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py block

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py optimizers --repeats 20
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/training.py reduction --repeats 3

* ``block``: forward, input gradient and weight gradient of a block whose parameters are DTensors, traced through, on a mesh of one
  rank, beside those of the same block on plain tensors, and beside DTensors under autograd.
* ``optimizers``: fused kernels on leaves of several sizes, beside torch's optimizers.
* ``reduction``: a backward, and the sum of its gradients over data ranks, beside DistributedDataParallel's on the same model.

Printed are the median CPU times of each side, and the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

import ppfunc as pp
from ppfunc.stage.layout import local
from ppfunc.training import Reducer, adamw, sgd

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


def optimizers(options: argparse.Namespace) -> None:
    """Fused kernels on leaves of several sizes, in place."""
    for leaves, size in ((16, 65536), (256, 4096), (256, 64), (256, 67)):  # the last are no whole vectors
        for name, ours, theirs in (
            ("adamw", adamw(1e-3, donate=True), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
            ("sgd with momentum", sgd(1e-3, 0.9, donate=True), lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True)),
        ):
            own = [torch.randn(size, requires_grad=True) for _ in range(leaves)]
            for p in own:
                p.grad = torch.randn(size)
            params = {f"layers.{n}.weight": p.detach().clone() for n, p in enumerate(own)}
            grads = {name: torch.randn(size) for name in params}
            now = [params, ours.init(params)]

            def update(now: list[Any] = now, grads: Any = grads, ours: Any = ours) -> None:
                now[:] = ours.update(grads, now[1], now[0])

            compare(f"{name}, {leaves} leaves of {size}", {"torch": theirs(own).step, "ppfunc": update}, options)


class Ranks:
    """All ranks of the job."""

    def __init__(self) -> None:
        self.size, self.place = dist.get_world_size(), dist.get_rank()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Callable[[], Any]:
        return dist.all_reduce(tensor, async_op=True).wait


def reduction(options: argparse.Namespace) -> None:
    """A backward, and the sum of its gradients over data ranks, against DistributedDataParallel's on the same model."""
    for layers, width in ((64, 32), (16, 256), (8, 1024)):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
        params = tuple(model.parameters())
        reducer, x = Reducer(params, [Ranks()]), torch.randn(4, width)

        def ours(model: nn.Module = model, params: Any = params, reducer: Reducer = reducer, x: torch.Tensor = x) -> None:
            reducer.add(torch.autograd.grad(model(x).square().mean(), params))
            reducer.launch()
            reducer.wait()

        def theirs(ddp: nn.Module = ddp, x: torch.Tensor = x) -> None:
            ddp.zero_grad(set_to_none=True)
            ddp(x).square().mean().backward()

        size = sum(p.nbytes for p in params) / 2**20
        compare(f"backward and sum, {2 * layers} leaves, {size:.1f} MB", {"torch": theirs, "ppfunc": ours}, options)


def compare(title: str, sides: dict[str, Side], options: argparse.Namespace) -> None:
    """Run the sides in turn; the first is what the others are measured against."""
    for side in sides.values():
        side()
    rounds = [{name: measure(side, options.repeats) for name, side in sides.items()} for _ in range(options.rounds)]
    first = next(iter(sides))
    for name in sides:
        ratio = median(times[name] / times[first] for times in rounds)
        if dist.get_rank() == 0:
            print(f"{title}, {name}: {median(times[name] for times in rounds) * 1e6:.0f} us, ratio to {first} {ratio:.3f}")


def measure(side: Side, repeats: int) -> float:
    """CPU seconds per run."""
    start = time.process_time()
    for _ in range(repeats):
        side()
    return (time.process_time() - start) / repeats


PIECES: dict[str, Callable[[argparse.Namespace], None]] = {"block": block, "optimizers": optimizers, "reduction": reduction}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=100, help="runs of each side per round")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        PIECES[options.piece](options)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

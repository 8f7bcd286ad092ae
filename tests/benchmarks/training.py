"""Parts of a training step, each beside torch's: optimizers, and sums of gradients over data ranks.

Run by torchrun on one rank (optimizers) or two (all)::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/training.py --parts optimizers reduction

Both sides run in turn, in one process group; what is printed is the median ratio over the rounds, below 1 where ours is faster.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from timing import measure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ppfunc.training import Reducer, adamw, sgd

Step = Callable[[], Any]


def compare(name: str, ours: Step, theirs: Step, rounds: int, steps: int) -> None:
    """Print the median times of both, in turn, and the median ratio."""
    pairs = [(measure(ours, steps), measure(theirs, steps)) for _ in range(rounds)]
    if dist.get_rank() == 0:
        mine, other = (median(times) * 1e3 for times in zip(*pairs, strict=True))
        ratio = median(a / b for a, b in pairs)
        print(f"{name:<44} ours {mine:8.3f} ms   torch {other:8.3f} ms   ratio {ratio:.2f}", flush=True)


def optimizers(rounds: int) -> None:
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

            compare(f"{name}, {leaves} leaves of {size}", update, theirs(own).step, rounds, 20)


class Ranks:
    """All ranks of the job."""

    def __init__(self) -> None:
        self.size, self.place = dist.get_world_size(), dist.get_rank()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Callable[[], Any]:
        return dist.all_reduce(tensor, async_op=True).wait


def reduction(rounds: int) -> None:
    """A backward, and the sum of its gradients over data ranks, against DistributedDataParallel's on the same model."""
    for layers, width, steps in ((64, 32, 10), (16, 256, 10), (8, 1024, 3)):
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
        compare(f"backward and sum, {2 * layers} leaves, {size:.1f} MB", ours, theirs, rounds, steps)


PARTS: dict[str, Callable[[int], None]] = {"optimizers": optimizers, "reduction": reduction}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for part in options.parts:
        PARTS[part](options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

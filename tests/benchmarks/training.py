"""Training at scale, piece by piece: each beside what it replaces, both in turn in one group of processes,
which it starts itself.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py                      # all pieces
    OMP_NUM_THREADS=1 python tests/benchmarks/training.py step --rounds 5      # one

* ``block``: forward, input gradient and weight gradient of a block whose parameters are DTensors, traced
  through, on a mesh of one rank, beside those of the same block on plain tensors, and beside DTensors under
  autograd.
* ``optimizers``: fused kernels on leaves of several sizes, and muon on matrices, beside torch's optimizers.
* ``reduction``: forwards, backwards, and the sum of their gradients over two data ranks, beside
  DistributedDataParallel's on the same model.
* ``step``: training steps of two pipelines of two ranks, beside torch.distributed.pipelining with
  DistributedDataParallel and torch's fused AdamW on the same model and schedule.
* ``update``: CPU of what follows the gradients (norm over two ranks of a pipeline, clip, AdamW in place):
  the median training step less the median step that computes gradients alone, of the threads that take them;
  and these training steps beside torch's.

Printed are medians of the seconds on the wall and of the CPU seconds of all ranks, and of the ratios round by
round to the first side. Where ranks share cores with others, CPU seconds tell more.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step_time import SIZES, Blocks, cut_blocks, gpt, squared
from timing import Cost, add_foremost, foremost, measure
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

import ppfunc as pp
from ppfunc.runtime import P2P
from ppfunc.runtime.ports.protocols import Collective
from ppfunc.schedule import Schedule
from ppfunc.stage.layout import local
from ppfunc.training.optim import adamw, muon, sgd
from ppfunc.training.update.buckets import Reducer, Sums
from tests.models import new_trainer

Side = Callable[[], object]
SIDES = ("torch", "ppfunc")


class Block(nn.Module):
    """A feed-forward block with a residual connection: [b, t, d] to [b, t, d]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def block(options: argparse.Namespace) -> None:
    """The cost of layouts where nothing is communicated."""
    mesh, width = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))["tp"], 64
    plain = pp.stage_from_module(Block(width))
    laid = pp.parallelize(Block(width), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, gy = (torch.randn(2, 8, width) for _ in range(2))

    def traced(stage: pp.stage.ModuleStage) -> Side:
        flat, params = (
            pp.engines.graph(stage.fn, (stage.params, x)).flat,
            tuple(map(local, stage.params.values())),
        )

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
    compare(f"block of width {width}", sides, options, 100)


def optimizers(options: argparse.Namespace) -> None:
    """Fused kernels on leaves of several sizes, in place."""
    for leaves, size in ((16, 65536), (256, 4096), (256, 64), (256, 67)):  # the last are no whole vectors
        for name, ours, theirs in (
            ("adamw", adamw(1e-3, donate=True), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
            (
                "sgd with momentum",
                sgd(1e-3, 0.9, donate=True),
                lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
            ),
        ):
            own = [torch.randn(size, requires_grad=True) for _ in range(leaves)]
            for p in own:
                p.grad = torch.randn(size)
            params = {f"layers.{n}.weight": p.detach().clone() for n, p in enumerate(own)}
            grads = {name: torch.randn(size) for name in params}
            now = [params, ours.init(params)]

            def run(now: list[Any] = now, grads: Any = grads, ours: Any = ours) -> None:
                now[:] = ours.update(grads, now[1], now[0])

            sides = dict(zip(SIDES, (theirs(own).step, run), strict=True))
            compare(f"{name}, {leaves} leaves of {size}", sides, options, 50)
    for leaves, rows, columns in ((8, 256, 256), (32, 64, 64), (4, 256, 1024)):
        drawn = torch.randn(2, leaves, rows, columns).unbind(1)
        own = [p.clone().requires_grad_() for p, _ in drawn]
        for p, (_, g) in zip(own, drawn, strict=True):
            p.grad = g.clone()
        ours, now = muon(1e-3), [{n: p.clone() for n, (p, _) in enumerate(drawn)}]
        grads, state = {n: g.clone() for n, (_, g) in enumerate(drawn)}, [ours.init(now[0])]

        def step(now: Any = now, state: Any = state, grads: Any = grads, ours: Any = ours) -> None:
            now[0], state[0] = ours.update(grads, state[0], now[0])

        sides = dict(zip(SIDES, (torch.optim.Muon(own, lr=1e-3).step, step), strict=True))
        compare(f"muon, {leaves} leaves of {rows} x {columns}", sides, options, 5)
        for p, mine in zip(own, now[0].values(), strict=True):
            torch.testing.assert_close(p.detach(), mine, rtol=1e-2, atol=1e-3)


def reduction(options: argparse.Namespace) -> None:
    """Backwards of some microbatches, and the sum of their gradients over data ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    with P2P(mesh=mesh, axes=pp.Axes("pp", "dp")) as transport:
        ranks = transport.collective(("dp",))
        transport.connect((), [torch.device("cpu")])
        for layers, width in ((64, 32), (16, 256), (8, 1024)):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
            ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
            stage, x = pp.stage_from_module(model), torch.randn(4, width)
            flat = pp.engines.graph(
                lambda params, x, stage=stage: stage.fn(params, x).square().mean(), (stage.params, x)
            ).flat
            params, weight = tuple(stage.params.values()), (torch.ones(()),)
            leaves = pp.stage.Signature.of(params).leaves
            reducer, backward = (
                Reducer(leaves, (None,) * len(leaves), [Sums(ranks, ranks, Collective())] * len(leaves)),
                add_up(flat.backward, len(leaves)),
            )

            @torch.no_grad()
            def ours(
                flat: Any = flat,
                given: Any = (params, (x,), ()),
                gy: Any = weight,
                reducer: Reducer = reducer,
                add_up: Any = backward,
            ) -> None:
                for m in range(options.microbatches):
                    add_up(flat.forward(*given)[1], gy, (reducer, m, reducer.totals()))
                reducer.launch()
                reducer.wait()

            def theirs(ddp: DistributedDataParallel = ddp, x: torch.Tensor = x) -> None:
                ddp.zero_grad(set_to_none=True)
                with ddp.no_sync():
                    for _ in range(options.microbatches - 1):
                        ddp(x).square().mean().backward()
                ddp(x).square().mean().backward()

            size = sum(p.nbytes for p in params) / 2**20
            title = f"{options.microbatches} backwards and a sum, {2 * layers} leaves, {size:.1f} MB"
            compare(title, dict(zip(SIDES, (theirs, ours), strict=True)), options, 10 if size < 10 else 3)


def add_up(backward: Any, leaves: int) -> Callable[..., object]:
    """A backward that adds its gradients up, as steps run it: while it makes them, where they are large."""
    if (accumulate := backward.accumulating) is not None:
        return accumulate.function
    run, numbers = backward.function, tuple(range(leaves))
    return lambda residuals, gy, into: into[0].add(run(residuals, gy)[0], numbers, into[1])


def step(options: argparse.Namespace) -> None:
    """Steps of two pipelines side by side, with the optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe, count = mesh.get_local_rank("pp"), options.microbatches
    schedule, first = pp.one_f_one_b(2, count), pipe == 0
    for width, repeats in ((64, 10), (256, 2)):
        stages, params = blocks(width, schedule, pipe)
        x, y = batch(width, count, seed=mesh.get_local_rank("dp"))
        module = Blocks(stages[pipe], params[pipe])
        ddp = DistributedDataParallel(
            module, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True
        )
        stage = PipelineStage(ddp, pipe, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        runtime = Schedule1F1B(stage, count, loss_fn=squared)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

        def theirs(
            runtime: Any = runtime, optimizer: Any = optimizer, x: torch.Tensor = x, y: torch.Tensor = y
        ) -> None:
            optimizer.zero_grad()
            runtime.step(*[x] * first, target=None if first else y, losses=None if first else [])
            optimizer.step()

        with new_trainer(
            stages, squared, schedule, adamw(1e-3, donate=True), mesh, axes=pp.Axes("pp", "dp")
        ) as trainer:
            now = [trainer.init(params)]

            def ours(
                now: list[Any] = now, trainer: Any = trainer, x: torch.Tensor = x, y: torch.Tensor = y
            ) -> None:
                now[0], _ = trainer.step(now[0], x, y)

            for side in (ours, theirs):
                side()
            torch.testing.assert_close(
                now[0].params[pipe], [dict(one.items()) for one in module.held], rtol=1e-4, atol=1e-5
            )
            compare(
                f"2 x 2 step, width {width}", dict(zip(SIDES, (theirs, ours), strict=True)), options, repeats
            )


def update(options: argparse.Namespace) -> None:
    """What follows the gradients, as the difference of whole steps; and whole steps of two ranks."""
    for width, steps in ((64, 10), (256, 1)):
        clipped(options, width, steps)


def clipped(options: argparse.Namespace, width: int, steps: int) -> None:
    """Steps of a pipeline with a norm over its ranks, and their gradients alone."""
    count, rank = options.microbatches, dist.get_rank()
    schedule = pp.one_f_one_b(2, count)
    stages, params = blocks(width, schedule, rank)
    x, y = batch(width, count, seed=0)
    module = Blocks(stages[rank], params[rank])
    runtime = Schedule1F1B(PipelineStage(module, rank, 2, torch.device("cpu")), count, loss_fn=squared)
    fused = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), adamw(1e-3, donate=True))

    def torch_gradients() -> None:
        module.zero_grad()
        runtime.step(*[x] * (rank == 0), target=y if rank else None, losses=[] if rank else None)

    def torch_step() -> None:
        torch_gradients()
        own = list(module.parameters())
        total = nn.utils.get_total_norm([p.grad for p in own]).square()
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(own, 1.0, total.sqrt())
        fused.step()

    with (
        pp.P2P() as other,
        pp.Trainer(stages, squared, schedule, optimizer, pp.P2P()) as trainer,
    ):
        gradients = pp.value_and_grad(stages, squared, schedule, other)
        now = [trainer.init(copy.deepcopy(params))]

        def our_step() -> None:
            now[0], _ = trainer.step(now[0], x, y)

        our_step(), torch_step()
        torch.testing.assert_close(
            now[0].params[rank], [dict(one.items()) for one in module.held], rtol=1e-4, atol=1e-5
        )
        sides = [our_step, lambda: gradients(params, x, y), torch_step, torch_gradients]
        times: list[list[float]] = [[] for _ in sides]
        for n in range(steps * options.rounds + steps):
            for side, seconds in zip(sides, times, strict=True):
                dist.barrier()
                start = time.thread_time()
                side()
                seconds += [time.thread_time() - start] * (n >= steps)
        title = f"step with clipping, 2 ranks, width {width}"
        compare(title, dict(zip(SIDES, (torch_step, our_step), strict=True)), options, steps)
    ours, ours_without, theirs, theirs_without = map(median, times)
    found = torch.tensor([ours - ours_without, theirs - theirs_without], dtype=torch.float64)
    dist.all_reduce(found)
    mine, other = (found * 1e6 / 2).tolist()
    if rank == 0:
        print(
            f"update, CPU of a rank, width {width}: ppfunc {mine:.0f} us, torch {other:.0f} us, ratio"
            f" {mine / other:.3f}",
            flush=True,
        )


def blocks(width: int, schedule: Schedule, pipe: int) -> tuple[list[Any], dict[int, Any]]:
    """The stages of eight blocks, and the parameters of those of a rank."""
    model, runs = cut_blocks(width, 8, SIZES[width][1], schedule.stages)
    return [gpt.stage([model[k] for k in run]) for run in runs], {
        s: gpt.initialise(model, runs[s], seed=0) for s in schedule.stages_of(pipe)
    }


def batch(width: int, microbatches: int, seed: int) -> list[torch.Tensor]:
    """Inputs and targets of a data rank."""
    generator, (sequences, length) = torch.Generator().manual_seed(seed), SIZES[width]
    return [torch.randn(microbatches * sequences, length, width, generator=generator) for _ in range(2)]


def compare(title: str, sides: dict[str, Side], options: argparse.Namespace, repeats: int) -> None:
    """Run the sides in turn; the first is what the others are measured against."""
    rounds = [{name: measure(side, repeats) for name, side in sides.items()} for _ in range(options.rounds)]
    first = next(iter(sides))
    for name in sides if dist.get_rank() == 0 else ():
        texts = []
        for kind in Cost._fields:
            times = [(getattr(costs[name], kind), getattr(costs[first], kind)) for costs in rounds]
            texts.append(
                f"{kind} {median(own for own, _ in times) * 1e6:.0f} us, ratio"
                f" {median(own / other for own, other in times):.3f}"
            )
        print(f"{title}, {name}: {'; '.join(texts)}", flush=True)


class Piece(NamedTuple):
    """A comparison, and how many ranks it takes."""

    run: Callable[[argparse.Namespace], None]
    ranks: int


PIECES = {
    "block": Piece(block, 1),
    "optimizers": Piece(optimizers, 1),
    "reduction": Piece(reduction, 2),
    "step": Piece(step, 4),
    "update": Piece(update, 2),
}


def work(rank: int, name: str, store: str, options: argparse.Namespace) -> None:
    """One rank of a piece."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    piece = PIECES[name]
    if options.foremost:
        foremost()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=piece.ranks)
    piece.run(options)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", choices=[*PIECES, []], help="all by default")
    parser.add_argument("--microbatches", type=int, default=8, help="of reductions and steps")
    parser.add_argument("--rounds", type=int, default=9)
    add_foremost(parser)
    options = parser.parse_args()
    for name in options.pieces or PIECES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (name, f"{folder}/store", options), nprocs=PIECES[name].ranks)


if __name__ == "__main__":
    main()

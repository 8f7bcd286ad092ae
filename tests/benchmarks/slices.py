"""Steps of slices beside 1F1B of whole sequences: time, difference of gradients, memory, prediction.

Run by torchrun, two ranks or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/slices.py --slices 4

Each rank has some blocks of attention and a multilayer perceptron, in float32. A slice attends to itself and
to the keys and values of the slices before it, which are its carry. Each schedule runs in turn with 1F1B;
``torch`` is torch's interleaved 1F1B with two stages per rank. Memory is the peak of a rank with parameters,
predicted over that of 1F1B, and measured over predicted, see ``memory.py``. Spans are measured over simulated
with the costs of a run before. ``--attention`` cuts slices of equal cost, see ``slice_lengths``.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nn
from memory import measured
from step_time import bind_to_core
from timing import add_foremost, foremost, in_turn, keep_freed_memory, report
from torch.distributed.pipelining import PipelineStage, schedules as theirs

import ppfunc as pp
from ppfunc.parallel import slice_lengths
from ppfunc.stage.tree import tree_leaves

sys.path.append(str(Path(__file__).parents[2]))

HEADS = 4


def block(params: dict[str, torch.Tensor], x: torch.Tensor, attend: Any) -> torch.Tensor:
    """Attend over tokens, then run the perceptron."""
    h = nn.layer_norm(x, x.shape[-1:])
    y = attend(*((h @ params[name]).unflatten(2, (HEADS, -1)).transpose(1, 2) for name in "qkv"))
    x = x + y.transpose(1, 2).flatten(2) @ params["out"]
    return x + nn.gelu(nn.layer_norm(x, x.shape[-1:]) @ params["up"]) @ params["down"]


def new_blocks(count: int, d: int) -> list[dict[str, torch.Tensor]]:
    """Draw the parameters of blocks of width d."""
    sizes = {**dict.fromkeys(["q", "k", "v", "out"], (d, d)), "up": (d, 4 * d), "down": (4 * d, d)}
    return [
        {name: torch.randn(size) / size[0] ** 0.5 / 2 for name, size in sizes.items()} for _ in range(count)
    ]


def whole(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """Run the blocks of a stage on whole sequences."""
    for of_block in params:
        x = block(of_block, x, lambda q, k, v: nn.scaled_dot_product_attention(q, k, v, is_causal=True))
    return x


def sliced(params: list[dict[str, torch.Tensor]], x: torch.Tensor, carry: Any) -> pp.Output:
    """Run the blocks of a stage on a slice; what is carried is contiguous, so that nothing copies it."""
    carries = []

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        past = carry and carry[len(carries)]
        y, kept = pp.carried_attention(*(t.contiguous() for t in heads), past)
        carries.append(kept)
        return y

    for of_block in params:
        x = block(of_block, x, attend)
    return pp.Output(x, carry=carries)


def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares."""
    return (y - target).square().mean()


class Blocks(torch.nn.Module):
    """The blocks of a stage as a module, for torch's runtime."""

    def __init__(self, params: list[dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.held = torch.nn.ModuleList(torch.nn.ParameterDict(p) for p in params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        return whole([dict(p.items()) for p in self.held], x)


def their_step(blocks: list[dict[str, torch.Tensor]], batch: list[torch.Tensor]) -> Any:
    """Return a step of torch's interleaved 1F1B of the blocks of a rank, in two stages."""
    rank, ranks, half = dist.get_rank(), dist.get_world_size(), len(blocks) // 2
    parts = {rank: Blocks(blocks[:half]), rank + ranks: Blocks(blocks[half:])}
    stages = [PipelineStage(part, s, 2 * ranks, torch.device("cpu")) for s, part in parts.items()]
    runtime = theirs.ScheduleInterleaved1F1B(stages, len(batch[0]), loss_fn=loss_fn)
    first, last = rank == 0, rank == ranks - 1

    def step() -> None:
        for part in parts.values():
            part.zero_grad(set_to_none=True)
        runtime.step(*[batch[0]] * first, target=batch[1] if last else None, losses=[] if last else None)

    return step


def main() -> None:
    """Measure every schedule in turn with 1F1B, and print lines for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {
        "slices": 4, "sequences": 2, "tokens": 1024, "width": 256, "blocks": 4, "rounds": 7
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", type=float, default=0.0)
    names = ["zb_h1", "seq1f1b", "seq_zb", "torch"]
    parser.add_argument("--schedules", nargs="+", choices=names, default=names)
    add_foremost(parser)
    options = parser.parse_args()
    if options.foremost:
        foremost()
    bind_to_core()
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    n, k, d = options.sequences, options.slices, options.width
    torch.manual_seed(rank)
    blocks = new_blocks(options.blocks, d)
    params = {rank: blocks}
    torch.manual_seed(-1)
    batch = [torch.randn(n, options.tokens, d) for _ in range(2)]
    lengths = slice_lengths(options.tokens, k, options.attention)
    cut = [pp.microbatch(part, n, slices=lengths).map(torch.Tensor.contiguous) for part in batch]
    weights = [tokens / options.tokens / n for tokens in lengths] * n
    schedules = {
        "1f1b": pp.one_f_one_b(ranks, n),
        "zb_h1": pp.zb_h1(ranks, n),
        "seq1f1b": pp.seq1f1b(ranks, n, k),
        "seq_zb": pp.seq_zb(ranks, n, k),
    }
    base, most, first, transports = None, 1, torch.zeros(0), []
    for name in ["1f1b", *options.schedules]:
        if name == "torch":
            report(name, "1f1b", in_turn(their_step(blocks, batch), base, options.rounds, 1))
            continue
        schedule = schedules[name]
        stage, given, more = (sliced, cut, weights) if schedule.slices else (whole, batch, None)
        ends = rank == 0, rank == ranks - 1
        given = [part if end else None for part, end in zip(given, ends, strict=True)]
        transports.append(pp.P2P(mapped=False))
        step = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transports[-1], loss_weights=more)
        peak = step.lower(params, *given).memory_analysis()[rank].peak
        found = torch.cat([t.flatten() for t in tree_leaves(step(params, *given)[1])])
        if base is None:
            first, most = found, peak
        bytes_of_run = measured(lambda step=step, given=given: step(params, *given), (params, given))
        step.record(params, *given)
        runs = [step.record(params, *given)[-1] for _ in range(3)]
        spans = [run.span / pp.simulate(run.schedule, before.costs()).span for before, run in pairwise(runs)]
        off = ((found - first).abs().max() / first.abs().max()).item()
        print(
            f"rank {rank}: {name} peak {peak / most:.3f}, measured over predicted {bytes_of_run / peak:.4f},"
            f" span over simulated {max(spans):.3f}, gradients off by {off:.1e}",
            flush=True,
        )
        run = lambda step=step, given=given: step(params, *given)  # noqa: E731
        base = base or run
        if name != "1f1b":
            report(name, "1f1b", in_turn(run, base, options.rounds, 1))
    for transport in transports:
        transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

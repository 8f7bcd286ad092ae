"""Steps of slices beside 1F1B and ZB-H1 of whole sequences: time, largest difference of a gradient, memory.

Run by torchrun, two ranks or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/slices.py --slices 4

Each rank has some blocks of attention and a multilayer perceptron, in float32. A slice attends to itself and
to the keys and values of the slices before it, which are its carry. Memory is the predicted peak of a rank
with parameters, see ``memory.py``; both are over those of 1F1B.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nn
from timing import add_foremost, foremost, in_turn, keep_freed_memory, report

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves

HEADS = 4


def block(params: dict[str, torch.Tensor], x: torch.Tensor, carry: Any) -> tuple[torch.Tensor, Any]:
    """Attend over the tokens of ``x`` and those of the carry, then run the perceptron."""
    rows, tokens, width = x.shape
    heads = (nn.layer_norm(x, (width,)) @ params["qkv"]).view(rows, tokens, 3, HEADS, width // HEADS)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    if carry is None:
        y = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        k, v = (torch.cat(pair, 2) for pair in zip(carry, (k, v), strict=True))
        mask = torch.ones(tokens, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tokens)
        y = nn.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + y.transpose(1, 2).reshape(x.shape) @ params["out"]
    return x + nn.gelu(nn.layer_norm(x, (width,)) @ params["up"]) @ params["down"], (k, v)


def whole(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """Run the blocks of a stage on whole sequences."""
    for of_block in params:
        x, _ = block(of_block, x, None)
    return x


def sliced(params: list[dict[str, torch.Tensor]], x: torch.Tensor, carry: Any) -> pp.Output:
    """Run the blocks of a stage on a slice."""
    carries = []
    for n, of_block in enumerate(params):
        x, kept = block(of_block, x, carry and carry[n])
        carries.append(kept)
    return pp.Output(x, carry=carries)


def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares."""
    return (y - target).square().mean()


def main() -> None:
    """Measure every schedule in turn with 1F1B, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {
        "slices": 4, "sequences": 2, "tokens": 1024, "width": 256, "blocks": 4, "rounds": 7
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    add_foremost(parser)
    options = parser.parse_args()
    if options.foremost:
        foremost()
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    n, k, d = options.sequences, options.slices, options.width
    torch.manual_seed(rank)
    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    params = {
        rank: [
            {name: torch.randn(size) / size[0] ** 0.5 / 2 for name, size in sizes.items()}
            for _ in range(options.blocks)
        ]
    }
    torch.manual_seed(-1)
    batch = [torch.randn(n, options.tokens, d) for _ in range(2)]
    cut = [pp.microbatch(part, n, slices=k).map(torch.Tensor.contiguous) for part in batch]
    schedules = [
        pp.one_f_one_b(ranks, n),
        pp.zb_h1(ranks, n),
        pp.seq1f1b(ranks, n, k),
        pp.seq_zb(ranks, n, k),
    ]
    transports = [pp.P2P() for _ in schedules]
    steps, peaks, results = [], [], []
    for schedule, transport in zip(schedules, transports, strict=True):
        stage, given = (sliced, cut) if schedule.slices else (whole, batch)
        step = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport)
        peaks.append(step.lower(params, *given).memory_analysis()[rank].peak)
        results.append(torch.cat([t.flatten() for t in tree_leaves(step(params, *given)[1])]))
        steps.append(lambda step=step, given=given: step(params, *given))
    first = results[0]
    for schedule, step, peak, found in zip(schedules, steps, peaks, results, strict=True):
        off = ((found - first).abs().max() / first.abs().max()).item()
        print(
            f"rank {rank}: {schedule.name} peak {peak / peaks[0]:.3f}, gradients off by {off:.1e}", flush=True
        )
        report(schedule.name, "1f1b", in_turn(step, steps[0], options.rounds, 2))
    for transport in transports:
        transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

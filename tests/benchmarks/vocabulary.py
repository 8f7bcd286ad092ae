"""Steps with an output layer in parts on all ranks, beside the best cut by whole layers.

Run by torchrun, two ranks or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/vocabulary.py

Blocks of attention and a multilayer perceptron, then an output layer over a large vocabulary with cross
entropy, in float32. The best cut by whole layers, by times measured here, runs under 1F1B. In parts, all
ranks have as many blocks. Memory is the peak of a rank with parameters, predicted, and measured over
predicted, see ``memory.py``. Spans are simulated with the costs of a run before, and measured over them.
"""

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nn
from memory import measured
from slices import new_blocks, whole
from step_time import bind_to_core
from timing import add_foremost, foremost, in_turn, keep_freed_memory, report

import ppfunc as pp
from ppfunc.parallel import partition_balanced
from ppfunc.stage.tree import tree_map

sys.path.append(str(Path(__file__).parents[2]))


def head(params: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Compute the logits."""
    return nn.linear(hidden, params["weight"])


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens."""
    return nn.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seconds(fn: Any, *params: Any) -> float:
    """Return the time of a forward and backward, the shortest of five."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        torch.func.grad(lambda p: fn(p).sum())(*params)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Measure both in turn, and print lines for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {
        "vocabulary": 32768, "width": 128, "blocks": 8, "microbatches": 8, "tokens": 128, "rounds": 7
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    add_foremost(parser)
    options = parser.parse_args()
    if options.foremost:
        foremost()
    bind_to_core()
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    d, m, blocks, vocabulary = options.width, options.microbatches, options.blocks, options.vocabulary
    torch.manual_seed(0)
    layers = new_blocks(blocks, d)
    output = {"weight": torch.randn(vocabulary, d) / d**0.5}
    x = torch.randn(m, options.tokens, d)
    labels = torch.randint(vocabulary, x.shape[:2])
    times = torch.tensor(
        [
            seconds(lambda p: whole([p], x[:1]), layers[0]),
            seconds(lambda p: cross_entropy(head(p, x[:1]), labels[:1]), output),
        ]
    )
    dist.all_reduce(times)  # as every rank has to choose the same cut
    one, last = times.tolist()
    cut = partition_balanced([one] * blocks + [last], ranks, allow_empty=True).split([*range(blocks + 1)])
    trees = [[layers[n] for n in of_rank if n < blocks] for of_rank in cut]
    print(f"rank {rank}: a block takes {one:.4f} s, the output layer {last:.4f} s, cut {[*map(len, cut)]}")

    def with_head(params: Any, x: torch.Tensor) -> torch.Tensor:
        return head(params[1], whole(params[0], x))

    by_layers = (
        [whole] * (ranks - 1) + [with_head],
        cross_entropy,
        pp.one_f_one_b(ranks, m),
        {s: (tree, output) if s == ranks - 1 else tree for s, tree in enumerate(trees)},
        None,
    )
    model = pp.vocabulary_parallel([whole] * ranks + [head], [vocabulary // ranks] * ranks)
    share = [1.0] * ranks + [last / one / blocks] * ranks + [0.01]
    costs = pp.schedule.Costs(forward=share, backward=[2 * f for f in share], activation=share)
    schedule = pp.with_parts(pp.one_f_one_b(ranks, m), lead=1, costs=costs)
    each = blocks // ranks
    evenly = {s: layers[s * each : (s + 1) * each] for s in range(ranks)}
    in_parts = model.stages, model.loss_fn, schedule, model.cut(evenly | {ranks: output}), labels
    runs: dict[str, Any] = {}
    found, peaks = [], []
    transports = []
    sides = {"layers": by_layers, "parts": in_parts}
    for name, (stages, loss_fn, order, params, everywhere) in sides.items():
        mine = tree_map(torch.clone, {k: params[k] for k in order.model_stages_of(rank)})  # of views, too
        batch = x if rank == 0 else None, labels if rank == ranks - 1 else everywhere
        transports.append(pp.P2P(mapped=False))
        step = pp.value_and_grad(stages, loss_fn, order, transports[-1])
        peak = step.lower(mine, *batch).memory_analysis()[rank].peak
        loss, _ = step(mine, *batch)
        found.append(loss)
        peaks.append(peak)
        bytes_of_run = measured(lambda s=step, p=mine, b=batch: s(p, *b), (mine, batch))
        step.record(mine, *batch)
        records = [step.record(mine, *batch)[-1] for _ in range(3)]
        spans = [r.span / pp.simulate(r.schedule, b.costs()).span for b, r in pairwise(records)]
        predicted = pp.simulate(records[-1].schedule, records[-1].costs()).span
        print(
            f"rank {rank}: {name} peak {peak / peaks[0]:.3f}, {peak / 2**20:.1f} MiB, measured over predicted"
            f" {bytes_of_run / peak:.4f}, span over simulated {max(spans):.3f}, simulated {predicted:.4f} s,"
            f" loss off by {abs(loss - found[0]):.1e}",
            flush=True,
        )
        runs[name] = lambda s=step, p=mine, b=batch: s(p, *b)
    report("parts", "layers", in_turn(runs["parts"], runs["layers"], options.rounds, 1))
    for transport in transports:
        transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The first step of a model like GPT-2 in several processes: the graph engine beside
torch.distributed.pipelining.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/first_step.py --ranks 4 --blocks 3

Both sides run in fresh processes, in turn. Printed are CPU seconds per rank: of what each side imports after
torch, during the first step too; of the first step, from making the step function on, without these imports;
and of the third. Also how often the module of a stage was called in the first.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, ROWS, TOKENS = 1000, 4, 128


class Imports:
    """Counts the CPU seconds of the imports of this process, by whatever statement or function."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False
        importlib: Any = sys.modules["_frozen_importlib"]  # calls this for modules that are not there yet
        self._load, importlib._find_and_load = importlib._find_and_load, self

    def __call__(self, *args: Any) -> Any:
        if self._inside:  # one that imports others
            return self._load(*args)
        start, self._inside = time.process_time(), True
        try:
            return self._load(*args)
        finally:
            self.seconds, self._inside = self.seconds + time.process_time() - start, False


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
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x + self.down(F.gelu(self.up(self.second(x))))


class Embedding(nn.Module):
    """Those of tokens and places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ours(module: nn.Module, rank: int, ranks: int, microbatches: int) -> Callable[[Tensor], object]:
    """A step of value_and_grad, which is traced in the first call."""
    import ppfunc as pp

    fn, params, _ = pp.stage_from_module(module)
    stages = [fn if stage == rank else None for stage in range(ranks)]
    step = pp.value_and_grad(stages, loss, pp.one_f_one_b(ranks, microbatches), pp.P2P())
    return lambda tokens: step(
        {rank: params}, tokens if rank == 0 else None, tokens if rank == ranks - 1 else None
    )


def theirs(module: nn.Module, rank: int, ranks: int, microbatches: int) -> Callable[[Tensor], object]:
    """A step of torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    schedule = Schedule1F1B(
        PipelineStage(module, rank, ranks, torch.device("cpu")), microbatches, loss_fn=loss
    )
    return lambda tokens: schedule.step(*[tokens] * (rank == 0), target=tokens if rank == ranks - 1 else None)


def measure(options: argparse.Namespace) -> None:
    """Print CPU seconds of imports, of the first step and of the third, and calls of the module, of this
    rank.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, width = dist.get_rank(), dist.get_world_size(), options.width
    ends = (
        [Embedding(width)] * (rank == 0),
        [nn.LayerNorm(width), nn.Linear(width, VOCABULARY)] * (rank == ranks - 1),
    )
    module = nn.Sequential(*ends[0], *(Block(width, 4) for _ in range(options.blocks)), *ends[1])
    calls: list[None] = []
    module.register_forward_pre_hook(lambda *_: calls.append(None))
    tokens = torch.randint(VOCABULARY, (ROWS * options.microbatches, TOKENS))
    dist.barrier()
    imports, start = Imports(), time.process_time()
    step = {"ppfunc": ours, "torch": theirs}[options.side](module, rank, ranks, options.microbatches)
    step(tokens)
    first, first_calls = time.process_time() - start - imports.seconds, len(calls)
    step(tokens)
    start = time.process_time()
    step(tokens)
    third = time.process_time() - start
    print(f"{imports.seconds} {first} {third} {first_calls}\n", end="", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=3, help="of a rank")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--side", choices=["ppfunc", "torch"], help="measure this one, in processes started by torchrun"
    )
    options = parser.parse_args()
    if options.side:
        return measure(options)
    sizes = [f"--{name}={getattr(options, name)}" for name in ("blocks", "microbatches", "width")]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={options.ranks}",
        __file__,
        *sizes,
    ]
    # Modules that a first step imports are compiled once per machine.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    sides = "ppfunc", "torch"
    rounds: dict[str, list[list[float]]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side in sides:
            printed = subprocess.run(
                [*command, f"--side={side}"], stdout=subprocess.PIPE, text=True, check=True, env=environment
            ).stdout
            rows = [map(float, line.split()) for line in printed.splitlines()]
            rounds[side].append([*map(mean, zip(*rows, strict=True))])
    found = {side: [*map(median, zip(*rounds[side], strict=True))] for side in sides}
    for side, (imported, first, third, calls) in found.items():
        print(
            f"{side}: per rank, imports {imported:.3f} s, first step {first:.3f} s, the third {third:.3f} s,"
            f" {calls:.0f} calls of the module in the first"
        )
    alone = found["ppfunc"][1] / found["torch"][1]
    both = median(sum(row[:2]) for row in rounds["ppfunc"]) / median(sum(row[:2]) for row in rounds["torch"])
    print(f"ratio of first steps {alone:.2f}, imports included {both:.2f}")


if __name__ == "__main__":
    main()

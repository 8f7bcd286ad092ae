"""Forward and backward of one stage in one process: the engine's programs beside each other and beside
autograd.

Run on the CPU, or with ``--device cuda``::

    OMP_NUM_THREADS=1 python tests/benchmarks/stage_time.py --width 64

All sides run in turn, in rounds that alternate. Printed are the median times of each, and the median of
its ratio to the forward and whole backward of the graph engine (F+B), round by round.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import ppfunc as pp
from ppfunc.stage import FlatProgram
from ppfunc.stage.tree import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gpt

SIZES = {64: (2, 16), 256: (4, 128)}  # width: (sequences, bytes) of a microbatch
Side = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=10, help="runs of each side per round")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sides = make_sides(options)
    for side in sides.values():
        side()
    rounds = [{name: measure(side, options) for name, side in sides.items()} for _ in range(options.rounds)]
    for name in sides:
        ratio = median(times[name] / times["F+B"] for times in rounds)
        print(
            f"width {options.width}, {name}: {median(times[name] for times in rounds) * 1e3:.3f} ms, ratio to"
            f" F+B {ratio:.3f}"
        )


def make_sides(options: argparse.Namespace) -> dict[str, Side]:
    """What is compared, by name."""
    sequences, length = SIZES.get(options.width, SIZES[256])
    model = gpt.layers(gpt.Config(width=options.width, layers=options.blocks, context=length))[1:-1]
    params = gpt.initialise(model, range(options.blocks), seed=0, device=options.device)
    x, gy = (torch.randn(sequences, length, options.width, device=options.device) for _ in range(2))
    leaves, treedef = tree_flatten(params)
    fn = gpt.stage(model)

    def whole(flat: FlatProgram) -> Side:
        @torch.no_grad()
        def run() -> object:
            return flat.backward(flat.forward(tuple(leaves), (x,), ())[1], (gy,))

        return run

    def split(flat: FlatProgram) -> Side:
        @torch.no_grad()
        def run() -> object:
            return flat.backward_weight(
                flat.backward_input(flat.forward(tuple(leaves), (x,), ())[1], (gy,))[1]
            )

        return run

    def autograd() -> object:
        inputs = [t.detach().requires_grad_() for t in (*leaves, x)]
        y = fn(treedef.unflatten(inputs[:-1]), inputs[-1])
        return torch.autograd.grad(y, inputs, gy)

    plain, compiled = (pp.engines.graph(compile=c)(fn, (params, x)).flat for c in (False, True))
    return {
        "F+B": whole(plain),
        "F+I+W": split(plain),
        "compiled F+B": whole(compiled),
        "compiled F+I+W": split(compiled),
        "autograd": autograd,
    }


def measure(side: Side, options: argparse.Namespace) -> float:
    """Seconds per run."""
    wait = torch.cuda.synchronize if torch.device(options.device).type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(options.repeats):
        side()
    wait()
    return (time.perf_counter() - start) / options.repeats


if __name__ == "__main__":
    main()

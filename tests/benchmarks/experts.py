"""Step time of stages with experts under DualPipeV: forward and backward of a pair interleaved, and in turn.

Run by torchrun, on two pipeline ranks with as many experts each as remain::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/experts.py --width 256 --tokens 256

and with exchanges that arrive late, as over links between hosts, on one pipeline rank::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/experts.py --pipeline 1 --delay 1

A stage is an exchange of tokens, a perceptron, and the exchange back: ``experts`` of
``tests/sharded_models.py``. Sides are measured in rounds that alternate, in one process group. Printed are
the median step times and CPU seconds of all ranks, and the medians of the ratios round by round (below 1:
interleaved is faster).
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from timing import in_turn, report
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.engines.tracing import emit

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models import same_bits, squared
from tests.sharded_models import expert_params, experts, random


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    with delayed(options.delay / 1e3) if options.delay else nullcontext():
        compare(options)
    dist.destroy_process_group()


def compare(options: argparse.Namespace) -> None:
    """Run both sides in turn, and print what they cost."""
    ranks = options.pipeline
    mesh = init_device_mesh("cpu", (ranks, dist.get_world_size() // ranks), mesh_dim_names=("pp", "ep"))
    schedule = pp.dualpipev(ranks, options.microbatches)
    own = schedule.stages_of(mesh.get_local_rank("pp"))
    params = {s: {k: t.float() for k, t in expert_params(s, options.width).items()} for s in own}
    shape, seed = (options.microbatches * options.tokens, 1, options.width), 2 * mesh.get_local_rank("ep")
    inputs, targets = (random(shape, seed + n).float() for n in range(2))
    stages = [experts(mesh["ep"])] * schedule.stages
    with pp.P2P(mesh=mesh, axes=pp.Axes("pp", "ep", experts="ep")) as transport:
        both = [
            pp.value_and_grad(stages, squared, schedule, transport, overlapped=overlapped)
            for overlapped in (pp.interleaved(), None)
        ]
        steps = [lambda step=step: step(params, inputs, targets) for step in both]
        assert same_bits(*(step() for step in steps))
        rounds = in_turn(*steps, options.rounds, options.steps)
    if dist.get_rank() == 0:
        print(f"dualpipev, {dist.get_world_size()} ranks, width {options.width}, {options.tokens} tokens")
    report("interleaved", "in turn", rounds)


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Let every exchange arrive so long after it was begun, or later. Programs run in Python for it."""
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    wait = torch.ops._c10d_functional.wait_tensor.default
    begin, end, due = exchange._op, wait._op, dict[int, float]()

    def begun(*args: Any, **kwargs: Any) -> Any:
        result = begin(*args, **kwargs)
        due[id(result)] = time.perf_counter() + seconds
        return result

    def ended(result: torch.Tensor) -> torch.Tensor:
        time.sleep(max(0.0, due.pop(id(result), 0.0) - time.perf_counter()))
        return end(result)

    with (
        patch.object(emit, "native", lambda *_: False),
        patch.object(exchange, "_op", begun),
        patch.object(wait, "_op", ended),
    ):
        yield


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of a microbatch, on every expert's rank")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline ranks; the others are experts'")
    parser.add_argument("--delay", type=float, default=0.0, help="of an exchange, in milliseconds")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps per round")
    return parser.parse_args()


if __name__ == "__main__":
    main()

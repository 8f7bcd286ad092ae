"""Split the architectures of `split_zoo` and print how well it goes.

    python tests/benchmarks/split_models.py [NAMES] [--numbers] [--processes]

For each, the greatest difference of a gradient to the whole model's, in float64, in evaluation and in
training under the same random numbers (the whole model's generator is set where a stage begins, as a step
sets it): of the stages in turn, at the shape of the split and at two others; and of steps over microbatches,
under each schedule. ``max`` is the greatest gradient. After that: seconds of a split, skip connections, and
what crosses that grows with the square of the length.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from split_zoo import MODELS
from torch import nn

import ppfunc as pp
from ppfunc.stage.abstract.purity import LogicalDraws

sys.path.append(str(Path(__file__).parents[2]))
from tests.splitter.modules import added_up, in_turn

Tensors = Mapping[str, torch.Tensor]
SEED = 3, 5
SCHEDULES: dict[str, Callable[[int], Any]] = {
    "1f1b": lambda stages: pp.one_f_one_b(stages, 4),
    "zbv": lambda stages: pp.zbv(stages // 2, 4),
    "dualpipev": lambda stages: pp.dualpipev(stages // 2, 4),
}
OVER_PROCESSES = (
    "gpt2",
    "llama",
    "bert",
    "vit",
    "t5",
    "mixtral",
    "whisper",
    "bart",
    "deberta",
    "mamba",
    "clip",
    "swin",
)


def scalar(output: Any) -> torch.Tensor:
    """A scalar of what a model returns."""
    found = output.values() if isinstance(output, Mapping) else output
    tensors = [t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim]
    return sum(
        ((t * torch.arange(1, t.shape[-1] + 1)).square().mean() for t in tensors),
        torch.zeros((), dtype=torch.float64),
    )


def made(name: str, training: bool) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().double().train(training)
    with torch.no_grad():
        for p in model.parameters():  # so that no bias is zero and no gradient tiny
            p += 0.1 * torch.randn_like(p)
    return model


@contextmanager
def seeded_where_stages_begin(model: nn.Module, at: tuple[str, ...], microbatch: int) -> Iterator[None]:
    """Within it, one call of the model draws as the stages do in a step, into transposed tensors, too."""

    def begin(stage: int) -> None:
        digest = blake2b(repr((*SEED, stage, microbatch)).encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little", signed=True))

    left = set(at)

    def noted(name: str) -> None:
        if name in left:
            left.remove(name)
            begin(1 + at.index(name))

    begin(0)
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: noted(name), prepend=True)
        for name in at
    ]
    try:
        with LogicalDraws():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def whole(model: nn.Module, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Gradients of the whole model; its buffers are as before."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(scalar(model(**inputs)), list(params.values()), allow_unused=True)
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
    return {n: g for n, g in zip(params, found, strict=True) if g is not None}


def worst(got: Tensors, want: Tensors) -> float:
    """The greatest difference; what is nowhere in the graph of the whole model is zero."""
    assert want.keys() <= got.keys(), sorted(want.keys() - got.keys())
    assert all(grad.isfinite().all() for grad in got.values()), (
        "a gradient is not finite"
    )  # a NaN is no greatest difference
    return max(
        float((grad - want.get(name, torch.zeros_like(grad))).abs().max())
        for name, grad in got.items()
        if grad.numel()
    )


def turn_error(model: nn.Module, parts: pp.Split, inputs: Tensors) -> float:
    torch.manual_seed(7)
    want = whole(model, inputs)
    torch.manual_seed(7)
    params = {
        s: {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tree.items()}
        for s, tree in parts.params.items()
    }
    output, *_ = in_turn(parts, inputs, params)
    leaves = [t for tree in params.values() for t in tree.values()]
    found = torch.autograd.grad(scalar(output), leaves, allow_unused=True)
    grads = iter([torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)])
    return worst(added_up({s: {n: next(grads) for n in tree} for s, tree in params.items()}), want)


def step_error(
    model: nn.Module,
    parts: pp.Split,
    inputs: Tensors,
    schedule: Any,
    transport: Any = None,
    rank: int | None = None,
) -> float:
    """The error of a step; each place of a tied parameter has the sum."""
    step = pp.value_and_grad(parts, lambda y, _: scalar(y), schedule, transport, has_aux=True)
    held = range(len(parts.stages)) if rank is None else schedule.model_stages_of(rank)
    m, rows = schedule.microbatches, next(iter(inputs.values())).shape[0]
    state = {s: parts.state[s] for s in held if s in parts.state}
    grads = step({s: parts.params[s] for s in held}, inputs, torch.zeros(rows), state=state, seed=SEED).grads
    each = []
    for i in range(m):
        with seeded_where_stages_begin(model, parts.at, i):
            each.append(whole(model, {k: v[i * rows // m : (i + 1) * rows // m] for k, v in inputs.items()}))
    want = {n: sum((e[n] for e in each), torch.zeros(())) / m for n in each[0]}
    got = {name: grad for tree in grads.values() for name, grad in tree.items()}
    return worst(got, want if rank is None else {n: g for n, g in want.items() if n in got})


def run(name: str, number: int | None) -> str:
    _, inputs, at = MODELS[name]
    shown = []
    for training in (False, True):
        model, example = made(name, training), inputs(2, 10)
        start = time.process_time()
        parts = pp.split(model, kwargs=example, at=number or at)
        seconds = time.process_time() - start
        errors = {
            "turn": max(turn_error(model, parts, given) for given in (example, inputs(3, 7), inputs(2, 12)))
        }
        for schedule, build in SCHEDULES.items():
            if len(parts.stages) % 2 == 0 or schedule == "1f1b":
                errors[schedule] = step_error(model, parts, inputs(8, 10), build(len(parts.stages)))
        errors["1f1b others"] = max(
            step_error(model, parts, given, SCHEDULES["1f1b"](len(parts.stages)))
            for given in (inputs(12, 7), inputs(8, 13))
        )
        shown.append(
            f"{'train' if training else 'eval'} "
            + " ".join(f"{key} {error:.0e}" for key, error in errors.items())
        )
    crossing = in_turn(parts, example)[2]
    squares = [list(shape) for shape in crossing if sum(size in (10, 11) for size in shape) > 1]
    greatest = max(float(g.abs().max()) for g in whole(model, example).values() if g.numel())
    shown.append(
        f"max {greatest:.0e}, {seconds:.2f} s, skips {list(parts.skips)}, tied {len(parts.tied)}, unused"
        f" {len(parts.unused)}"
    )
    shown.append(f"state {sum(map(len, parts.state.values()))}, with two axes of the length {squares}")
    return "; ".join(shown)


def in_a_process(rank: int, names: list[str]) -> None:
    for name in names or OVER_PROCESSES:
        model, inputs = made(name, True), MODELS[name][1]
        torch.manual_seed(11)
        batches = inputs(8, 10), inputs(12, 7), inputs(8, 12)
        for at, schedule in (
            (MODELS[name][2], pp.one_f_one_b(4, 4)),
            (8, pp.zbv(4, 4)),
            (8, pp.dualpipev(4, 8)),
        ):
            parts = pp.split(model, kwargs={key: t[:2] for key, t in batches[0].items()}, at=at)
            with pp.P2P(timeout=300) as transport:
                given = batches if schedule.microbatches == 4 else [inputs(16, 10)]
                error = max(step_error(model, parts, batch, schedule, transport, rank) for batch in given)
            print(f"rank {rank} {name}: {schedule.name}, {len(parts.stages)} stages, {error:.0e}", flush=True)


def over_processes(names: list[str]) -> int:
    """Run the steps in four processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    started = [
        subprocess.Popen([sys.executable, __file__, "--rank", *names], env={**common, "RANK": str(rank)})
        for rank in range(4)
    ]
    return max(process.wait() for process in started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of models; all by default")
    parser.add_argument(
        "--numbers", action="store_true", help="split into 2, 3 and 4 balanced stages, instead of by names"
    )
    parser.add_argument(
        "--processes",
        action="store_true",
        help="run steps in four processes, in training; by default of a dozen",
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.processes:
        sys.exit(over_processes(options.names))
    if options.rank:
        torch.distributed.init_process_group("gloo")
        in_a_process(torch.distributed.get_rank(), options.names)
        return
    failed = 0
    for name in options.names or MODELS:
        for number in (2, 3, 4) if options.numbers else (None,):
            try:
                print(f"{name:16}{number or ''}", run(name, number), flush=True)
            except Exception as error:
                failed += 1
                print(f"{name:16}{number or ''} {type(error).__name__}: {str(error)[:600]}", flush=True)
                if options.names:
                    traceback.print_exc()
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""Peak memory of a step per rank: predicted, measured, and that of torch.distributed.pipelining.

Run by torchrun, two ranks or more::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/benchmarks/memory.py --schedules 1f1b zbv
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/memory.py --models gpt2 t5 --shards params
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/memory.py --covering

Measured are the storages that operators make in a second step, with those that it is given: parameters,
batch and optimizer state. Messages take gloo, since memory that two processes map is not counted. Without
``--models`` the stages are blocks of a small GPT, whose steps make gradients and are compared with torch's.
With ``--models``, those of ``split_zoo.py``, which need transformers, are split and trained by AdamW; of four
ranks or more, half are data ranks. ``llama`` computes in bfloat16. ``--covering`` takes few cases of five
models, in which each two choices meet. Of ``--remats``, ``places`` is one choice for some modules of a model,
and ``save`` computes again all but products and attention. Torch checkpoints each block where the choice is
``full`` or ``save``.
"""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_time import THEIRS, Blocks, cut_blocks, gpt, squared, their_step
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import ppfunc as pp
from ppfunc.schedule import BUILDERS, Op, Schedule
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves

sys.path.append(str(Path(__file__).parents[2]))
from tests.covering import pairwise as covering
from tests.storages import LiveStorages

PLACES = {
    "gpt2": "transformer.h.*.mlp",
    "vit": "vit.layers.*",
    "t5": "*.layer.?",
    "mixtral": "model.layers.*.self_attn|model.layers.*.mlp",
    "llama": "model.layers.[02]",
}
ATEN = torch.ops.aten
SAVED = [ATEN.mm.default, ATEN.addmm.default, ATEN.linear.default]
SAVED += [ATEN._scaled_dot_product_flash_attention_for_cpu.default]
REMATS = "cheap", "none", "full", "places"
SCHEDULES = "gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev", "zb_h1"
Row = tuple[int, int]  # predicted and measured bytes


def measured(step: Callable[[], Any], given: Any) -> int:
    """The most bytes in a step, with those of the trees that it is given."""
    tensors = [local(t) for t in tree_leaves(given) if t is not None]
    gc.collect()
    with LiveStorages(tensors) as counted:
        step()
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) + counted.peak


def blocks(options: argparse.Namespace, schedule: Schedule, remat: Any, rank: int) -> tuple[Row, int | None]:
    """Of a step that makes the gradients of blocks, and the same of torch."""
    model, runs = cut_blocks(options.width, options.blocks, options.tokens, schedule.stages)
    stages = [gpt.stage([model[k] for k in run]) for run in runs]
    params = {s: gpt.initialise(model, runs[s], seed=0, device="cpu") for s in schedule.stages_of(rank)}
    generator = torch.Generator().manual_seed(0)
    shape = (options.microbatches * 2, options.tokens, options.width)
    inputs, targets = (torch.randn(shape, generator=generator) for _ in range(2))
    batch = [t if end else None for t, end in zip((inputs, targets), ends(schedule, rank), strict=True)]
    with pp.P2P(mapped=False) as transport:
        engine = pp.engines.graph(remat=remat)
        step = pp.value_and_grad(stages, squared, schedule, transport, engine=engine)
        predicted = step.lower(params, *batch).memory_analysis()[rank].peak
        step(params, *batch)
        row = predicted, measured(lambda: step(params, *batch), (params, batch))
    if remat not in ("none", "full", computed_again) or options.schedule not in THEIRS:
        return row, None
    if remat is computed_again and Op.I in schedule.ops:
        return row, None  # torch refuses a backward in two parts there
    if remat != "none":
        stages = [checkpointed([model[k] for k in run], save=remat is computed_again) for run in runs]
    modules = {s: Blocks(stages[s], params[s]) for s in params}
    theirs = their_step(options, schedule, modules, inputs, targets, rank)
    theirs()
    for module in modules.values():
        module.zero_grad(set_to_none=True)
    held = [list(module.parameters()) for module in modules.values()]
    return row, measured(theirs, (held, batch))


def computed_again(operator: Any, _: int) -> bool:
    """Compute again all but products and attention."""
    return operator not in SAVED


def checkpointed(run: list[gpt.Layer], save: bool) -> Callable[..., torch.Tensor]:
    """A stage of blocks, each in torch's checkpoint, which may save products and attention."""
    contexts = partial(create_selective_checkpoint_contexts, SAVED) if save else noop_context_fn

    def apply(params: list[gpt.Params], x: torch.Tensor) -> torch.Tensor:
        for layer, p in zip(run, params, strict=True):
            x = checkpoint(layer.apply, p, x, use_reentrant=False, context_fn=contexts)
        return x

    return apply


def ends(schedule: Schedule, rank: int) -> Iterator[bool]:
    """Tell if this rank runs the first stage, and the last."""
    return (schedule.placement[schedule.flows[0].stages[n]] == rank for n in (0, -1))


def trained(options: argparse.Namespace, name: str, schedule: Schedule, remat: Any, shard: str) -> Row:
    """Of a training step of a model that is split."""
    from split_zoo import MODELS

    make, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    if name == "llama":
        model = model.bfloat16()
    rows, sharded = 2 * schedule.microbatches, dist.get_world_size() > 2
    batch = inputs(rows, options.tokens)
    parts = pp.split(model, kwargs={k: t[:2] for k, t in batch.items()}, at=schedule.stages)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    transport = pp.P2P(
        mesh=mesh, axes=pp.Axes("pp", data="dp"), shard=shard if sharded else "none", mapped=False
    )
    rank = mesh.get_local_rank("pp")
    first, last = ends(schedule, rank)
    given = batch if first else None, torch.zeros(rows) if last else None
    held = schedule.model_stages_of(rank)
    params, state = ({s: tree[s] for s in held if s in tree} for tree in (parts.params, parts.state))
    precision = pp.Precision(compute=torch.bfloat16, master=torch.float32) if name == "llama" else None
    engine = pp.engines.graph(remat=remat)
    with pp.Trainer(
        parts, scalar, schedule, pp.optim.adamw(1e-3), transport, engine=engine, precision=precision
    ) as trainer:
        predicted = trainer.lower(params, *given, state=state).memory_analysis()[rank].peak
        before, _ = trainer.step(trainer.init(params, state), *given, seed=(0, 0))
        trainer._idle.clear()  # what it would use again is made within the step
        return predicted, measured(lambda: trainer.step(before, *given, seed=(0, 0)), (before, given))


def scalar(y: Any, _: Any) -> torch.Tensor:
    """The sum of squares of all that the last stage returns."""
    leaves = [t.float().square().mean() for t in tree_leaves(y) if t.is_floating_point()]
    return torch.stack(leaves).sum()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], help="of split_zoo.py")
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--remats", nargs="*", default=REMATS[:-1])
    parser.add_argument("--shards", nargs="*", default=["optimizer"], help="none, optimizer, params")
    parser.add_argument("--offload", action="store_true", help="residuals, where they are unused")
    parser.add_argument("--covering", action="store_true")
    for option, value in (("width", 64), ("blocks", 8), ("tokens", 16), ("microbatches", 8)):
        parser.add_argument(f"--{option}", type=int, default=value)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    models, offloads = options.models or ["blocks"], [options.offload]
    cases = list(product(models, options.schedules, options.remats, offloads, options.shards))
    if options.covering:
        cases = covering(PLACES, SCHEDULES, REMATS[1:], (False, True), ("none", "optimizer", "params"))
    for model, name, remat, offload, shard in cases:
        options.schedule = name
        ranks = dist.get_world_size() if model == "blocks" else 2
        schedule = BUILDERS[name](ranks, options.microbatches)
        schedule = pp.schedule.insert_offloads(schedule) if offload else schedule
        chosen: Any = computed_again if remat == "save" else remat
        chosen = {PLACES[model]: "full"} if remat == "places" else chosen
        if model == "blocks":
            row, theirs = blocks(options, schedule, chosen, rank)
        else:
            row, theirs = trained(options, model, schedule, chosen, shard), None
        sharded = "" if model == "blocks" else f" {shard}"
        report(f"{model} {name} {remat}{sharded}{' offload' * offload}", row, theirs)
    dist.destroy_process_group()


def report(name: str, row: Row, theirs: int | None) -> None:
    """Print a line per rank."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (row, theirs))
    for rank, ((predicted, most), other) in enumerate(rows) if dist.get_rank() == 0 else ():
        beside = "" if other is None else f", torch {other / 1e6:.3f}, ratio {most / other:.2f}"
        ours = f"predicted {predicted / 1e6:.3f} MB, measured {most / 1e6:.3f}, ratio {predicted / most:.4f}"
        print(f"{name}, rank {rank}: {ours}{beside}", flush=True)


if __name__ == "__main__":
    main()

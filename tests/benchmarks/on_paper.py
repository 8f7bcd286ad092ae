"""Lower a training step of a large model for a mesh of ranks that nobody has: seconds, memory, and the bytes
of every rank beside those by hand.

Run on the CPU::

    OMP_NUM_THREADS=1 python tests/benchmarks/on_paper.py              # both models
    OMP_NUM_THREADS=1 python tests/benchmarks/on_paper.py deepseek

* ``llama``: 70 billion parameters, 8 stages in 8 ranks, 16 data ranks that keep shards, 8 tensor ranks.
* ``deepseek``: 671 billion, in the sizes of DeepSeek-V3: 61 layers, of which 58 have 256 experts, in 8 stages
  in 8 ranks, 8 ranks of experts, 16 data ranks that keep shards. Latent attention has its matrices, and no
  angles; each expert takes the tokens that fit it best.

A microbatch is one sequence in bfloat16, with masters and AdamW in float32. Printed are CPU seconds and the
largest resident memory of this process, and for every rank: the peak; bytes of kept shards, optimizer and
gradients by hand, and what was counted over them.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppfunc as pp
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves

RANKS, DATA, PARTS = 8, 16, 8  # of the pipeline; that keep shards; of tensors or experts
Shapes = dict[str, tuple[int, ...]]


class Model(NamedTuple):
    """A model on paper.

    Args:
        layers: the number of layers.
        width, vocabulary, length: of activations, of the embedding, of a sequence.
        shapes: of the parameters of a layer, as one rank has them.
        cut: the dimension of a parameter of a layer that lies over the second axis, by name.
        layer: ``(mesh of the second axis) -> function of the parameters of a layer and x``.
        axes: names of the mesh.
    """

    layers: int
    width: int
    vocabulary: int
    length: int
    shapes: Callable[[int], Shapes]
    cut: dict[str, int]
    layer: Callable[[DeviceMesh], Callable[[Any, Tensor], Tensor]]
    axes: pp.Axes


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def llama(mesh: DeviceMesh) -> Callable[[Any, Tensor], Tensor]:
    """A layer of Llama, of the heads and columns of one rank."""

    def layer(p: Any, x: Tensor) -> Tensor:
        h = pp.collectives.pvary(norm(x, p["norm"]), mesh)
        q, k, v = ((h @ p[name]).unflatten(-1, (-1, 128)).transpose(1, 2) for name in ("q", "k", "v"))
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))  # one head of keys on each rank
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + pp.collectives.psum(y @ p["o"], mesh)
        h = pp.collectives.pvary(norm(x, p["norm2"]), mesh)
        return x + pp.collectives.psum((F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], mesh)

    return layer


def llama_shapes(_: int) -> Shapes:
    d, hidden, keys = 8192, 28672, 1024
    attention = {"q": (d, d // PARTS), "k": (d, keys // PARTS), "v": (d, keys // PARTS), "o": (d // PARTS, d)}
    feed = {"gate": (d, hidden // PARTS), "up": (d, hidden // PARTS), "down": (hidden // PARTS, d)}
    return {"norm": (d,), "norm2": (d,)} | attention | feed


def deepseek(mesh: DeviceMesh) -> Callable[[Any, Tensor], Tensor]:
    """A layer of DeepSeek-V3, of the experts of one rank."""

    def attention(p: Any, x: Tensor) -> Tensor:
        h = norm(x, p["norm"])
        q = (norm(h @ p["q_a"], p["q_norm"]) @ p["q_b"]).unflatten(-1, (128, 192))
        latent, angles = (h @ p["kv_a"]).split([512, 64], -1)
        k, v = (norm(latent, p["kv_norm"]) @ p["kv_b"]).unflatten(-1, (128, 256)).split([128, 128], -1)
        k = torch.cat([k, angles[:, :, None].expand(-1, -1, 128, -1)], -1)
        # Kernels that keep no scores take values as wide as keys.
        q, k, v = (t.transpose(1, 2) for t in (q, k, F.pad(v, (0, 64))))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :128]
        return x + y.transpose(1, 2).flatten(2) @ p["o"]

    def feed(gate: Tensor, up: Tensor, down: Tensor, h: Tensor) -> Tensor:
        return (F.silu(h @ gate) * (h @ up)) @ down

    def experts(p: Any, h: Tensor) -> Tensor:
        scores = torch.sigmoid((h @ p["router"]).float())  # [tokens, experts]
        room = len(h) * 8 // scores.shape[1]
        gates, tokens = (scores + p["bias"]).T.topk(room, dim=1)
        sent = pp.collectives.all_to_all(h[tokens], mesh, 0, 1)
        y = (F.silu(sent @ p["gates"]) * (sent @ p["ups"])) @ p["downs"]
        y = pp.collectives.all_to_all(y, mesh, 1, 0) * gates[..., None].to(h.dtype)
        return torch.zeros_like(h).index_add(0, tokens.flatten(), y.flatten(0, 1))

    def layer(p: Any, x: Tensor) -> Tensor:
        x = attention(p, x)
        h = norm(x, p["norm2"])
        y = feed(p["gate"], p["up"], p["down"], h)
        return x + y if "router" not in p else x + y + experts(p, h.flatten(0, 1)).view_as(x)

    return layer


def deepseek_shapes(n: int) -> Shapes:
    d, heads, hidden, own = 7168, 128, 2048, 256 // PARTS
    feed = hidden if n >= 3 else 18432
    norms = {"norm": (d,), "norm2": (d,), "q_norm": (1536,), "kv_norm": (512,)}
    q, kv = {"q_a": (d, 1536), "q_b": (1536, heads * 192)}, {"kv_a": (d, 576), "kv_b": (512, heads * 256)}
    rest = {"o": (heads * 128, d), "gate": (d, feed), "up": (d, feed), "down": (feed, d)}
    shapes = norms | q | kv | rest
    if n < 3:
        return shapes
    shapes |= {"router": (d, 256), "bias": (256,), "gates": (own, d, hidden), "ups": (own, d, hidden)}
    return shapes | {"downs": (own, hidden, d)}


COLUMNS = {"q": 1, "k": 1, "v": 1, "gate": 1, "up": 1, "o": 0, "down": 0}
MODELS = {
    "llama": Model(80, 8192, 128_256, 4096, llama_shapes, COLUMNS, llama, pp.Axes("pp", "dp", "tp")),
    "deepseek": Model(
        61, 7168, 129_280, 4096, deepseek_shapes, dict.fromkeys(("gates", "ups", "downs"), 0), deepseek,
        pp.Axes("pp", ("ep", "dp"), experts="ep"),
    ),
}  # fmt: skip


def stages_of(model: Model, mesh: DeviceMesh) -> tuple[list[Any], dict[int, Any]]:
    """The stages of a model, and their parameters without memory."""
    layer = model.layer(mesh)

    def parameter(name: str, shape: tuple[int, ...]) -> Tensor:
        t = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        dim = model.cut.get(name)
        return t if dim is None else DTensor.from_local(t, mesh, [Shard(dim)], run_check=False)

    def stage(s: int) -> Any:
        def run(p: Any, x: Tensor) -> Tensor:
            x = F.embedding(x, p["embed"]) if s == 0 else x
            for each in p["layers"]:
                x = layer(each, x)
            return norm(x, p["norm"]) @ p["head"] if s == RANKS - 1 else x

        return run

    bounds = [model.layers * s // RANKS for s in range(RANKS + 1)]
    params: dict[int, Any] = {}
    for s in range(RANKS):
        numbers = range(bounds[s], bounds[s + 1])
        params[s] = {"layers": [{k: parameter(k, v) for k, v in model.shapes(n).items()} for n in numbers]}
    ends = (0, "embed", (model.vocabulary, model.width)), (RANKS - 1, "head", (model.width, model.vocabulary))
    for s, name, shape in (*ends, (RANKS - 1, "norm", (model.width,))):
        params[s][name] = parameter(f"{name} of the model", shape)
    return [stage(s) for s in range(RANKS)], params


def next_token(y: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1).float(), ids.flatten())


def lower(name: str, microbatches: int, layers: int | None) -> tuple[dict[int, Any], dict[int, Any]]:
    """Lower a step; return the parameters of every stage, and the memory of every rank."""
    model = MODELS[name]._replace(layers=layers or MODELS[name].layers)
    names = {"llama": ("pp", "dp", "tp"), "deepseek": ("pp", "ep", "dp")}[name]
    sizes = tuple({"pp": RANKS, "dp": DATA}.get(axis, PARTS) for axis in names)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS * DATA * PARTS)
    try:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        stages, params = stages_of(model, mesh["tp" if "tp" in names else "ep"])
        precision = pp.Precision(compute=torch.bfloat16, master=torch.float32)
        transport = pp.OnPaper(mesh=mesh, axes=model.axes, shard="params")
        schedule, optimizer = pp.one_f_one_b(RANKS, microbatches), pp.optim.adamw(1e-4)
        trainer = pp.Trainer(stages, next_token, schedule, optimizer, transport, precision=precision)
        ids = torch.empty(microbatches, model.length, dtype=torch.int64, device="meta")
        return params, trainer.lower(params, ids, ids).memory_analysis()
    finally:
        dist.destroy_process_group()


def by_hand(params: Any) -> dict[str, float]:
    """Bytes of one rank: shards in float32 with a cast to bfloat16, their two moments, and gradients in
    bfloat16, whole in the buckets with the part of a sum.
    """
    whole = sum(local(p).numel() for p in tree_leaves(params))
    part = whole / DATA
    return {"shards": (4 + 2) * part, "optimizer": 8 * part, "gradients": 2 * whole + 2 * part}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all by default")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, help="at least 8; those of the model by default")
    options = parser.parse_args()
    for name in options.models or MODELS:
        start, wall = time.process_time(), time.perf_counter()
        params, memory = lower(name, options.microbatches, options.layers)
        cpu, seconds = time.process_time() - start, time.perf_counter() - wall
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        total = sum(p.numel() for p in tree_leaves(params)) / 1e9
        print(f"{name}: {total:.1f} billion parameters, {cpu:.0f} CPU s, {seconds:.0f} s, {most:.2f} GB")
        for rank, found in memory.items():
            texts = [
                f"{kind} {size / 2**30:.2f} GB x {getattr(found.most, kind) / size:.4f}"
                for kind, size in by_hand(params[rank]).items()
            ]
            print(f"  rank {rank}: peak {found.peak / 2**30:.1f} GB; {', '.join(texts)}")


if __name__ == "__main__":
    main()

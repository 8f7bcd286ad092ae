"""What `tune` takes, beside configurations tried by hand: predicted and measured seconds and bytes.

Run by torchrun, also with more processes than cores::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tests/benchmarks/tuning.py --models gpt mlp vit

Unless ``--latency`` says what a message takes, it is measured. Process 0 tunes alone; the limits are those in
which a third and two thirds of the configurations fit. Then all processes run what it takes and rows of every
grid, schedule, microbatch and rematerialisation, in turn; the seconds of each are the median of all steps.
Printed are, for each row, predicted and measured seconds, CPU seconds of all ranks over the cores, and
predicted and measured peaks; then the rank correlation of predicted seconds with both, beside that of every
other step with the steps between, which no prediction can exceed; and for each limit what tune takes over the
best that fits. ``--foremost`` runs all before other processes, for machines on which others run. Rows of a
grid share a transport, whose threads wake up to wait.
"""

import argparse
import os
import pickle
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.tuning.tune import remembering

sys.path.append(str(Path(__file__).parents[2]))
from tests.benchmarks.timing import add_foremost, foremost
from tests.storages import LiveStorages

Problem = tuple[nn.Module, Tensor, Tensor, Any]
Seconds = list[list[float]]  # of every step of every row


class Block(nn.Module):
    """A block of a transformer, or without heads its perceptron."""

    def __init__(self, width: int, heads: int = 0) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.heads:
            q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def problem(name: str) -> Problem:
    """A model, a row of its inputs and of its targets, and its loss."""
    torch.manual_seed(0)
    if name == "gpt":  # whose head takes as long as some blocks
        ids = torch.randint(2000, (1, 64))
        blocks = [Block(128, 4) for _ in range(6)]
        model = nn.Sequential(nn.Embedding(2000, 128), *blocks, nn.Linear(128, 2000))
        return model, ids, ids, lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    if name == "mlp":  # whose parameters are most of its memory
        x = torch.randn(1, 32, 256)
        return nn.Sequential(*(Block(256) for _ in range(4))), x, x, squared
    x = torch.randn(1, 128, 96)  # whose first blocks have longer sequences
    early, late = [Block(96, 4) for _ in range(4)], [Block(192, 4) for _ in range(4)]
    model = nn.Sequential(*early, nn.AvgPool2d((4, 1)), nn.Linear(96, 192), *late)
    return model, x, torch.randn(1, 32, 192), squared


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def hidden(weight: Tensor, x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ weight)
    return x


def meet(name: str) -> None:
    """Make a group under keys of its own: gloo would read those of a group that was destroyed."""
    host, port, rank, size = (os.environ[k] for k in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = dist.PrefixStore(name, dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))


def message_seconds(ranks: int, bandwidth: float) -> float:
    """CPU seconds of a message, without those of its bytes: what all processes take more than one with all
    stages. Stages compute in between, as messages take longer where caches are not their own.
    """
    schedule, x = pp.one_f_one_b(ranks, 16), torch.randn(16 * 32, 256)
    params = {stage: torch.randn(256, 256) / 16 for stage in range(ranks)}
    more = []
    with pp.P2P() as transport:
        alone, apart = (pp.value_and_grad([hidden] * ranks, squared, schedule, t) for t in (None, transport))
        for _ in range(12):
            seconds = []
            for step, held in ((alone, params), (apart, {dist.get_rank(): params[dist.get_rank()]})):
                dist.barrier()
                cpu = time.process_time()
                step(held, x, x)
                seconds.append(time.process_time() - cpu)
            dist.all_reduce(every := torch.tensor(seconds, dtype=torch.float64))
            more.append((every[1] - every[0] / ranks).item())
    return max(0.0, median(more) / (2 * 16 * (ranks - 1)) - x.nbytes / 16 / bandwidth)


def tuned(name: str, options: argparse.Namespace, ranks: int) -> tuple[list[Any], list[float]]:
    """Rows, of which the first two are what is taken for each of the two limits."""
    given = {"ranks": ranks, "batch": options.batch, "optimizer": pp.optim.adamw(1e-3)}
    given |= {"latency": options.latency, "bandwidth": options.bandwidth, "schedules": options.schedules}
    given |= {"shard": ["none"], "microbatch": options.microbatch, "effort": options.effort}
    start, (model, x, y, loss_fn) = time.perf_counter(), problem(name)
    every = pp.tune(model, x, loss_fn, y, top=1000, **given)
    peaks = sorted(max(row.peaks) for row in every.rows)
    limits = [float(peaks[len(peaks) * n // 3]) for n in (1, 2)]
    best = [next(row for row in every.rows if max(row.peaks) <= limit) for limit in limits]
    print(f"{name}: {len(every.rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    rest = [row for row in every.rows if row not in best]
    chosen = [*best, *rest[:: max(1, len(rest) // options.tries)]]
    return [row[:-1] for row in chosen], limits  # without the functions that make trainers


def peak_of(trainer: pp.Trainer, params: Any, batch: Any) -> int:
    """Bytes of a second step."""
    state, _ = trainer.step(trainer.init(params), *batch)
    trainer._idle.clear()  # buckets, whose memory would not be made within
    held = [local(t) for t in tree_leaves((state, batch)) if t is not None]
    with LiveStorages(held) as counted:
        trainer.step(state, *batch)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(storages.values()) + counted.peak


def run(name: str, rows: list[Any], options: argparse.Namespace) -> tuple[Seconds, Seconds, list[int]]:
    """Wall and CPU seconds of every step, and peak bytes, of every row on this rank."""
    model, x, y, loss_fn = problem(name)
    trained, peaks, links = [], [], {}
    for choice, schedule, at, *_ in rows:
        parts = pp.split(model, x, at=at)
        if (grid := (choice.pipe, choice.data)) not in links:
            mesh = init_device_mesh("cpu", grid, mesh_dim_names=("pp", "dp"))
            given = {"mesh": mesh, "axes": pp.Axes("pp", data="dp"), "shard": choice.shard}
            links[grid] = mesh, pp.P2P(**given, mapped=False), pp.P2P(**given)
        mesh, *transports = links[grid]
        engine = remembering(pp.engines.graph(remat=choice.remat))
        counted, timed = (
            pp.Trainer(parts, loss_fn, schedule, pp.optim.adamw(1e-3), transport, engine=engine)
            for transport in transports
        )
        mine, size = schedule.model_stages_of(mesh.get_local_rank("pp")), options.batch // choice.data
        ends = 0 in mine, len(parts.stages) - 1 in mine
        batch = [
            t.repeat(size, *[1] * (t.ndim - 1)) if e else None for t, e in zip((x, y), ends, strict=True)
        ]
        params = {s: tree_map(torch.clone, parts.params[s]) for s in mine}
        peaks.append(peak_of(counted, params, batch))
        state, _ = timed.step(timed.init(params), *batch)
        trained.append([timed, state, batch])
    walls, cpus = ([[] for _ in rows] for _ in range(2))
    for _ in range(options.rounds):
        for n, (trainer, state, batch) in enumerate(trained):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            trained[n][1], _ = trainer.step(state, *batch)  # a state that no step returned is compared
            walls[n].append(time.perf_counter() - wall)
            cpus[n].append(time.process_time() - cpu)
    for _, *transports in links.values():
        for transport in transports:
            transport.close()
    return walls, cpus, peaks


def correlation(one: Tensor, other: Tensor) -> float:
    """Rank correlation of two series."""
    ranks = torch.stack([series.argsort().argsort() for series in (one, other)])
    return torch.corrcoef(ranks.double())[0, 1].item()


def report(name: str, rows: list[Any], limits: list[float], ranks: list[Any]) -> None:
    every_wall, every_cpu, every_peak = (torch.tensor(each) for each in zip(*ranks, strict=True))
    steps = every_wall.amax(0), every_cpu.sum(0) / min(len(ranks), os.cpu_count() or 1)
    walls, cpus = (each.median(1).values for each in steps)
    peaks, predicted = every_peak.amax(0).tolist(), torch.tensor([row[3] for row in rows])
    for row, wall, cpu, peak in zip(rows, walls, cpus, peaks, strict=True):
        figures = f"predicted {row[3]:.4f} s, measured {wall:.4f}, CPU {cpu:.4f}"
        print(f"{name}: {row[1].name}, {row[0]}: {figures}; peak {max(row[5])} bytes, measured {peak}")
    wall, cpu = (correlation(predicted, each) for each in (walls, cpus))
    again, again_cpu = (correlation(*(t[:, n::2].median(1).values for n in (0, 1))) for t in steps)
    print(
        f"{name}: rank correlation {wall:.3f}, with CPU seconds {cpu:.3f}; of measured ones with"
        f" themselves {again:.3f}, of CPU seconds {again_cpu:.3f}"
    )
    for taken, limit in enumerate(limits):
        fits = [n for n, peak in enumerate(peaks) if peak <= limit]
        over = [(seconds[taken] / seconds[fits].min()).item() for seconds in (walls, cpus)]
        print(
            f"{name}: what tune takes is {over[0]:.3f} of the best of {len(fits)} that fit, of {len(rows)};"
            f" {over[1]:.3f} in CPU seconds; its peak is {peaks[taken]} of {limit:.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["gpt", "mlp", "vit"])
    parser.add_argument("--schedules", nargs="*", default=["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
    parser.add_argument("--microbatch", type=int, nargs="*", default=[2, 4, 8])
    for option, value in (("batch", 32), ("tries", 14), ("rounds", 15)):
        parser.add_argument(f"--{option}", type=int, default=value)
    for option, number in (("latency", None), ("bandwidth", 1e9), ("effort", 0.1)):
        parser.add_argument(f"--{option}", type=float, default=number)
    add_foremost(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size, run_id = (os.environ[k] for k in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    paths = {name: Path(tempfile.gettempdir(), f"{run_id}-{size}-{name}") for name in options.models}
    if options.foremost:
        foremost()
    if options.latency is None:
        meet("latency")
        options.latency = message_seconds(int(size), options.bandwidth)
        dist.destroy_process_group()
        print(f"rank {rank}: {options.latency:.6f} CPU seconds of a message", flush=True)
    for name, path in paths.items() if rank == "0" else ():  # before there is a group
        path.write_bytes(pickle.dumps(tuned(name, options, int(size))))
    meet("rows")
    for name, path in paths.items():
        dist.barrier()
        rows, limits = pickle.loads(path.read_bytes())
        of_ranks = [path.with_name(f"{path.name}-{n}") for n in range(int(size))]
        of_ranks[int(rank)].write_bytes(pickle.dumps(run(name, rows, options)))
        dist.barrier()
        if rank == "0":
            report(name, rows, limits, [pickle.loads(each.read_bytes()) for each in of_ranks])
            for each in (path, *of_ranks):
                each.unlink()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

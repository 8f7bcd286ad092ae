"""The same blocks under the same schedules in ppfunc, torch.distributed.pipelining and JAX.

Run where JAX is installed, `pip install jax`, with as many free cores as ranks::

    OMP_NUM_THREADS=1 python tests/benchmarks/beside_jax.py --width 64

Each side has processes of its own, which wait while another runs; each rank is bound to a core. Gradients of
all sides are compared first. Then sides run in turn, in rounds. Printed are, for each side, the median step
time, on the wall and on the CPU of all ranks, its ratio to the first side round by round (the median, the
quartiles), and its first step, imports aside. JAX runs GPipe as one program over a mesh of all ranks, and
1F1B as programs of stages: each in a process per rank, whose messages are gloo's, or in a single process.
Programs of ppfunc run in C++ once their library is built: the first run on a machine has it built.
"""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from step_time import SIZES, Blocks, bind_to_core, cut_blocks, gpt, squared, their_step
from timing import Cost, add_foremost, foremost, measure

import ppfunc as pp
from ppfunc.schedule import BUILDERS, Instruction, Op, Schedule

SIDES = (
    "ppfunc 1f1b",
    "ppfunc gpipe",
    "ppfunc-compiled 1f1b",
    "ppfunc-compiled gpipe",
    "torch 1f1b",
    "torch gpipe",
    "torch-compiled 1f1b",
    "torch-compiled gpipe",
    "jax 1f1b",
    "jax gpipe",
    "jax-single gpipe",
    "jax-single 1f1b",
)
Gradients = dict[int, list[dict[str, Any]]]  # of stages, one a rank: of their blocks
Step = Callable[[], Gradients]


class Problem(NamedTuple):
    """Stages of blocks, one a rank, and a batch for them, float32[m * b, t, d]."""

    name: str
    schedule: Schedule
    model: list[gpt.Layer]
    runs: list[range]
    inputs: torch.Tensor
    targets: torch.Tensor

    def params(self, stage: int) -> list[gpt.Params]:
        return gpt.initialise(self.model, self.runs[stage], seed=0)


def problem(options: argparse.Namespace, name: str) -> Problem:
    sequences, length = SIZES.get(options.width, SIZES[256])
    model, runs = cut_blocks(options.width, options.blocks, length, options.ranks)
    generator = torch.Generator().manual_seed(0)
    shape = (options.microbatches * sequences, length, options.width)
    batch = (torch.randn(shape, generator=generator) for _ in range(2))
    schedule = BUILDERS[name](options.ranks, options.microbatches)
    return Problem(name, schedule, model, runs, *batch)


# -- the sides of torch


def of_ppfunc(problem: Problem, rank: int, compiled: bool) -> Step:
    stages = [gpt.stage([problem.model[k] for k in run]) for run in problem.runs]
    engine = pp.engines.graph(compile=compiled)
    step = pp.value_and_grad(stages, squared, problem.schedule, pp.P2P(), engine=engine)
    params = {rank: problem.params(rank)}
    return lambda: step(params, problem.inputs, problem.targets)[1]


def of_torch(problem: Problem, rank: int, compiled: bool) -> Step:
    stage = gpt.stage([problem.model[k] for k in problem.runs[rank]])
    modules = {rank: Blocks(stage, problem.params(rank))}
    if compiled:
        modules[rank].compile()
    schedule = problem.schedule
    options = SimpleNamespace(schedule=problem.name, microbatches=schedule.microbatches)
    return their_step(options, schedule, modules, problem.inputs, problem.targets, rank)


# -- the sides of JAX, which is imported by their processes alone


def connect_jax(ranks: int, rank: int, single: bool) -> None:
    """Give JAX a device per rank: all of them in this process, or one in each process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if single:
        jax.config.update("jax_num_cpu_devices", ranks)
    elif ranks > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["JAX_COORDINATOR"], ranks, rank)


def blocks_of_jax(params: list[dict[str, Any]], x: Any, heads: int = gpt.Config().heads) -> Any:
    """The stage of `gpt.block` over arrays of JAX."""
    import jax
    from jax import numpy as jnp

    def norm(x: Any, weight: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * weight

    b, t, d = x.shape
    for p in params:
        qkv = jnp.einsum("btd,ped->pbte", norm(x, p["attention_norm"]), p["qkv"])
        q, k, v = qkv.reshape(3, b, t, heads, d // heads)
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * (d // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        h = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v).reshape(b, t, d)
        x = x + h @ p["attention_out"].T
        h = jax.nn.gelu(norm(x, p["hidden_norm"]) @ p["hidden"].T, approximate=False)
        x = x + h @ p["hidden_out"].T
    return x


def microbatches(problem: Problem) -> list[np.ndarray]:
    """Inputs and targets, float32[m, b, t, d]."""
    m = problem.schedule.microbatches
    return [t.unflatten(0, (m, -1)).numpy() for t in (problem.inputs, problem.targets)]


def gpipe_of_jax(problem: Problem) -> Step:
    """One program over the mesh: each tick all stages compute, and what they made moves on by one."""
    import jax
    from jax import lax, numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    ranks = problem.schedule.ranks
    mesh = jax.make_mesh((ranks,), ("rank",), axis_types=(jax.sharding.AxisType.Auto,))

    def losses(params: Any, inputs: Any, targets: Any) -> Any:
        params, rank = jax.tree.map(lambda leaf: leaf[0], params), lax.axis_index("rank")

        def tick(x: Any, given: Any) -> Any:
            y = blocks_of_jax(params, jnp.where(rank == 0, given, x))
            return lax.ppermute(y, "rank", [(r, r + 1) for r in range(ranks - 1)]), y

        fed = jnp.concatenate([inputs, jnp.zeros_like(inputs[: ranks - 1])])
        made = lax.scan(tick, jnp.zeros_like(inputs[0]), fed)[1]
        loss = jnp.square(made[ranks - 1 :] - targets).mean()
        return jnp.where(rank == ranks - 1, loss, 0.0)[None]

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        cut = jax.shard_map(
            losses, mesh=mesh, in_specs=(P("rank"), P(), P()), out_specs=P("rank"), check_vma=False
        )
        return cut(params, inputs, targets).sum()

    def place(whole: Any, spec: P) -> Any:
        return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), whole.__getitem__)

    held = [problem.params(s) for s in range(ranks)]
    stacked = [
        {name: place(np.stack([h[k][name].numpy() for h in held]), P("rank")) for name in held[0][k]}
        for k in range(len(held[0]))
    ]
    batch = [place(whole, P()) for whole in microbatches(problem)]
    program = jax.jit(jax.value_and_grad(loss))

    def step() -> Gradients:
        _, gradients = jax.block_until_ready(program(stacked, *batch))
        return {
            part.index[0].start or 0: [
                {k: leaf.addressable_shards[n].data[0] for k, leaf in block.items()} for block in gradients
            ]
            for n, part in enumerate(gradients[0]["qkv"].addressable_shards)
        }

    return step


def calls_of(schedule: Schedule, mine: list[int]) -> list[Instruction]:
    """Calls of these ranks in the order in which they begin."""
    timeline = pp.simulate(schedule)
    begun = [
        (start, s, call)
        for s in mine
        for start, call in zip(
            timeline.starts[s], (c for step in schedule.programs[s] for c in step), strict=True
        )
    ]
    return [call for *_, call in sorted(begun, key=lambda row: row[:2])]


class Messages:
    """What stages hand on in a step: within this process, or by torch.distributed to the ranks of others.

    Args:
        devices: those of this process, by stage.
        like: a message, of which all have the shape.
    """

    def __init__(self, schedule: Schedule, devices: dict[int, Any], like: torch.Tensor) -> None:
        self.devices, self.arrived, self.sent, self.expected = devices, {}, [], {}
        for s in devices:
            for op, source in (Op.F, s - 1), (Op.B, s + 1):
                if source not in devices and 0 <= source < schedule.stages:
                    for n in range(schedule.microbatches):
                        buffer = torch.empty_like(like)
                        self.expected[s, n, op] = buffer, dist.irecv(buffer, source, tag=self._tag(n, op))

    def _tag(self, n: int, op: Op) -> int:
        return 2 * n + (op is Op.B)

    def pass_on(self, value: Any, s: int, n: int, op: Op) -> None:
        import jax

        if s in self.devices:
            self.arrived[s, n, op] = jax.device_put(value, self.devices[s])
        else:
            message = torch.from_numpy(np.asarray(value))
            self.sent.append((message, dist.isend(message, s, tag=self._tag(n, op))))

    def take(self, s: int, n: int, op: Op) -> Any:
        import jax

        if (s, n, op) not in self.expected:
            return self.arrived.pop((s, n, op))
        buffer, work = self.expected.pop((s, n, op))
        work.wait()
        return jax.device_put(buffer.numpy(), self.devices[s])

    def finish(self) -> None:
        for _, work in self.sent:
            work.wait()


def one_f_one_b_of_jax(problem: Problem, mine: list[int]) -> Step:
    """Programs of stages, which a process hands out in the order of the schedule: a device has one stage.

    Args:
        mine: the stages of this process. Messages to and from others are those of `torch.distributed`.
    """
    import jax
    from jax import numpy as jnp

    schedule, devices = problem.schedule, dict(zip(mine, jax.local_devices(), strict=True))
    last, m = schedule.stages - 1, schedule.microbatches
    inputs, targets = (
        [jax.device_put(x, devices[s]) for x in batch] if s in devices else []
        for s, batch in zip((0, last), microbatches(problem), strict=True)
    )
    params = {
        s: jax.device_put([{k: v.numpy() for k, v in p.items()} for p in problem.params(s)], devices[s])
        for s in mine
    }
    forward = jax.jit(lambda p, x: jax.vjp(blocks_of_jax, p, x))
    closing = jax.jit(
        jax.grad(lambda p, x, target: jnp.square(blocks_of_jax(p, x) - target).mean() / m, (0, 1))
    )
    backward = jax.jit(lambda pull, gy: pull(gy))
    add = jax.jit(lambda total, more: jax.tree.map(jnp.add, total, more), donate_argnums=0)
    calls = calls_of(schedule, mine)

    def step() -> Gradients:
        pulls, totals = {}, {}
        messages = Messages(schedule, devices, problem.inputs.unflatten(0, (m, -1))[0])
        for n, x in enumerate(inputs):
            messages.pass_on(x, 0, n, Op.F)
        for call in calls:
            s, n = call.stage, call.microbatch
            if call.op is Op.F and s < last:
                y, pulls[s, n] = forward(params[s], messages.take(s, n, Op.F))
                messages.pass_on(y, s + 1, n, Op.F)
            elif call.op is Op.B:
                if s == last:
                    made, gx = closing(params[s], messages.take(s, n, Op.F), targets[n])
                else:
                    made, gx = backward(pulls.pop((s, n)), messages.take(s, n, Op.B))
                totals[s] = add(totals[s], made) if s in totals else made
                if s:
                    messages.pass_on(gx, s - 1, n, Op.B)
        messages.finish()
        return jax.block_until_ready(totals)

    return step


# -- one process of a side, and what drives them


def serve(options: argparse.Namespace) -> None:
    """Print what the first step costs, then what each round that is asked for does."""
    system, name = options.side.split()
    rank, single = int(os.environ["RANK"]), system == "jax-single"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo of JAX writes there
    torch.set_num_threads(1)
    if not single:
        bind_to_core()
    if options.foremost:
        foremost()
    dist.init_process_group(
        "gloo", f"file://{options.folder}/group", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    if system.startswith("jax"):
        connect_jax(options.ranks, rank, single)
    given = problem(options, name)
    dist.barrier()
    wall, cpu = perf_counter(), process_time()
    if system.startswith("jax"):
        mine = list(range(options.ranks)) if single else [rank]
        step = gpipe_of_jax(given) if name == "gpipe" else one_f_one_b_of_jax(given, mine)
    else:
        make = of_ppfunc if system.startswith("ppfunc") else of_torch
        step = make(given, rank, system.endswith("compiled"))
    gradients = step()
    cpu = process_time() - cpu
    leaves = {
        f"{s}.{k}.{leaf}": np.array(value)
        for s, blocks in gradients.items()
        for k, block in enumerate(blocks)
        for leaf, value in block.items()
    }
    np.savez(Path(options.folder) / f"{rank}.npz", **leaves)
    total = torch.tensor(cpu, dtype=torch.float64)
    dist.all_reduce(total)
    print(json.dumps((perf_counter() - wall, total.item())), file=answers)
    for line in sys.stdin:
        print(json.dumps(measure(step, int(line))), file=answers)
    dist.destroy_process_group()


class Side:
    """Processes of a side, and the folder of their gradients."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        number = 1 if name.startswith("jax-single") else options.ranks
        with socket.create_server(("127.0.0.1", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        sizes = ("width", "blocks", "microbatches", "ranks")
        command = [sys.executable, "-W", "ignore", __file__, f"--side={name}", f"--folder={folder}"]
        command += [f"--{size}={getattr(options, size)}" for size in sizes]
        command += ["--foremost"] * options.foremost
        self.processes = []
        for rank in range(number):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "JAX_COORDINATOR": coordinator}
            environment = os.environ | {key: str(value) for key, value in numbers.items()}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        self.first = self._answer()

    def _answer(self) -> Cost:
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise SystemExit(f"{self.name}: a process ended, with the error above")
        return Cost(*json.loads(lines[0]))

    def run(self, steps: int) -> Cost:
        for process in self.processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return self._answer()

    def gradients(self) -> dict[str, np.ndarray]:
        return {
            key: value
            for rank in range(len(self.processes))
            for key, value in np.load(self.folder / f"{rank}.npz").items()
        }

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sides: list[Side] = []
        try:
            for number, name in enumerate(options.sides):
                sides.append(Side(name, options, Path(folder, str(number))))
                mine, other = sides[0].gradients(), sides[-1].gradients()
                assert mine.keys() == other.keys()
                for key in mine:
                    np.testing.assert_allclose(other[key], mine[key], 1e-4, 1e-5, err_msg=f"{name}, {key}")
            rounds = [[side.run(options.steps) for side in sides] for _ in range(options.rounds)]
        finally:
            for side in sides:
                side.close()
    print(f"{options.ranks} ranks, width {options.width}; ratios to {options.sides[0]}")
    for side, costs in zip(sides, zip(*rounds, strict=True), strict=True):
        ratios = [[a[k] / b[0][k] for a, b in zip(costs, rounds, strict=True)] for k in range(2)]
        low, _, high = quantiles(ratios[0] * 2, n=4)
        print(
            f"{side.name}: {median(c.wall for c in costs) * 1e3:.2f} ms, ratio {median(ratios[0]):.3f}"
            f" ({low:.3f} to {high:.3f}); CPU {median(c.cpu for c in costs) * 1e3:.2f} ms, ratio"
            f" {median(ratios[1]):.3f}; first step {side.first.wall:.2f} s, CPU {side.first.cpu:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=str(SIDES))
    add_foremost(parser)
    parser.add_argument("--side", help="serve as a process of this one")
    parser.add_argument("--folder", help="of its gradients")
    options = parser.parse_args()
    if options.side:
        return serve(options)
    if importlib.util.find_spec("jax") is None and any(name.startswith("jax") for name in options.sides):
        print("Skipped: JAX is missing; pip install jax, or name --sides without it.")
        return
    compare(options)


if __name__ == "__main__":
    main()

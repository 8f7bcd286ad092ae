"""What the other ranks see of a fault: ppfunc beside torch.distributed.pipelining, real processes under gloo.

Starts its processes itself, anew for every fault and side, and ends within some minutes::

    python tests/benchmarks/faults.py

Four ranks train the same stages under 1F1B with SGD, over process groups with the same limit; in its third
step, unless the fault says otherwise, one fails. Printed are, of the ranks that live: the seconds from the
fault until the last of them has raised, how many of those that were told name the rank that failed, and the
steps that the weights of each have behind them (by their bits, compared with a clean run): one number where
all agree.
"""

import argparse
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ppfunc as pp
from tests.models import new_trainer

RANKS, MICROBATCHES, WIDTH, RATE = 4, 8, 16, 0.1
STEP, CLEAN = 2, 6  # the step that fails, from 0; the steps of a clean run


class Fault(NamedTuple):
    """Args:
    rank: that fails.
    place: where, one of "first" (before its first step), "forward", "backward" and "update".
    act: what happens there.
    lives: whether the rank can answer afterwards.
    """

    rank: int
    place: str
    act: Callable[[], None]
    lives: bool = False


def stage_raises() -> None:
    raise ArithmeticError("armed")


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def interrupt_twice() -> None:
    """The second interrupt comes while the first is handled."""
    threading.Timer(0.005, send(signal.SIGINT)).start()
    os.kill(os.getpid(), signal.SIGINT)


def never_come() -> None:
    time.sleep(1000)


FAULTS = {
    "a stage raises": Fault(2, "forward", stage_raises, lives=True),
    "killed before its first step": Fault(1, "first", send(signal.SIGKILL)),
    "killed in F": Fault(2, "forward", send(signal.SIGKILL)),
    "killed in B": Fault(1, "backward", send(signal.SIGKILL)),
    "killed at the end of a step": Fault(3, "update", send(signal.SIGKILL)),
    "rank 0 killed": Fault(0, "forward", send(signal.SIGKILL)),
    "frozen": Fault(2, "forward", send(signal.SIGSTOP)),
    "never comes": Fault(3, "first", never_come),
    "interrupted twice": Fault(1, "forward", interrupt_twice, lives=True),
}


class Seen(NamedTuple):
    """What has ended the training of a rank, when (seconds since the epoch), whom it names, and its weights
    afterwards.
    """

    at: float
    error: str
    named: int | None
    weights: str


# -- one rank ----------------------------------------------------------------------------------


class Noted(torch.autograd.Function):
    """Says that its backward begins."""

    @staticmethod
    def forward(x: torch.Tensor, reach: Callable[[str], None]) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.reach = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reach("backward")
        return gradient, None


def stage_of(reach: Callable[[str], None]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def stage(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        reach("forward")
        return torch.tanh(Noted.apply(x @ w, reach))

    return stage


def squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


make_trainer, P2P = new_trainer, pp.P2P  # here, so that they are imported once for all processes

Training = tuple[Callable[[], None], Callable[[], torch.Tensor]]  # a step, and the weights of this rank


def ours(
    rank: int, weight: torch.Tensor, batch: tuple[torch.Tensor, ...], reach: Callable[[str], None]
) -> Training:
    plain = pp.optim.sgd(RATE)

    def update(*args: Any, **options: Any) -> Any:
        reach("update")
        return plain.update(*args, **options)

    schedule, optimizer = pp.one_f_one_b(RANKS, MICROBATCHES), pp.optim.Optimizer(plain.init, update)
    trainer = make_trainer(
        [stage_of(reach)] * RANKS, squared, schedule, optimizer, transport=P2P(), engine=pp.engines.functional
    )
    held = [trainer.init({rank: weight})]

    def step() -> None:
        held[0], _ = trainer.step(held[0], *batch)

    return step, lambda: held[0].params[rank]


def theirs(
    rank: int, weight: torch.Tensor, batch: tuple[torch.Tensor, ...], reach: Callable[[str], None]
) -> Training:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight)
    fn = stage_of(reach)
    module.forward = lambda x: fn(module.weight, x)
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    schedule = Schedule1F1B(
        PipelineStage(module, rank, RANKS, torch.device("cpu")), MICROBATCHES, loss_fn=squared
    )

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*batch[:1] * (rank == 0), target=batch[1] if rank == RANKS - 1 else None)
        reach("update")
        optimizer.step()

    return step, lambda: module.weight.detach()


SIDES = {"ppfunc": ours, "torch": theirs}


def run(
    rank: int, port: int, limit: float, side: str, name: str | None, struck: Any, end: Connection
) -> None:
    """Train; strike where this rank is to fail, and tell what has ended it."""
    torch.set_num_threads(1)
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=limit)
    )
    dist.barrier()
    generator, done = torch.Generator().manual_seed(0), [0]
    weights = torch.randn(RANKS, WIDTH, WIDTH, generator=generator) / 4
    batch = tuple(torch.randn(4 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
    fault, calls = None if name is None else FAULTS[name], count()

    def reach(place: str) -> None:
        if (
            fault is None
            or rank != fault.rank
            or place != fault.place
            or (done[0] < STEP and place != "first")
        ):
            return
        if next(calls) == (
            0 if place in ("first", "update") else 2
        ):  # of a step, the third forward or backward
            struck.value = time.time()
            fault.act()

    reach("first")
    digests = []
    try:
        step, weights_now = SIDES[side](rank, weights[rank].clone(), batch, reach)
        digests.append(digest(weights_now()))
        while fault is not None or done[0] < CLEAN:
            step()
            done[0] += 1
            digests.append(digest(weights_now()))
    except BaseException as error:
        at = time.time()
        with suppress(KeyboardInterrupt):  # a second one, where the first was handled before it came
            time.sleep(0.05)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end.send(
            Seen(
                at,
                f"{type(error).__name__}: {error}"[:2000],
                named(error),
                digest(weights_now()) if digests else "",
            )
        )
    else:
        end.send(digests)
    end.recv()  # until all have told
    os._exit(0)


def digest(weight: torch.Tensor) -> str:
    return sha256(weight.numpy().tobytes()).hexdigest()


def named(error: BaseException) -> int | None:
    """The rank that an error says has failed: its attribute, or the only one that its text names."""
    if isinstance(error, pp.PipelineError):
        return error.rank
    found = set(re.findall(r"(?i)\brank[ :=]*(\d+)", str(error)))
    return int(found.pop()) if len(found) == 1 else None


# -- all of them -------------------------------------------------------------------------------


class Ran(NamedTuple):
    """Answers by rank, None of one that is gone or does not answer; and when the fault was."""

    answers: list[Any]
    struck: float


def train(side: str, name: str | None, limit: float) -> Ran:
    context = multiprocessing.get_context("fork")  # torch is imported once
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    struck, pipes = context.Value("d", 0.0), [context.Pipe() for _ in range(RANKS)]
    workers = [
        context.Process(target=run, args=(r, port, limit, side, name, struck, there))
        for r, (_, there) in enumerate(pipes)
    ]
    for worker, (_, there) in zip(workers, pipes, strict=True):
        worker.start()
        there.close()
    patience = time.monotonic() + 60 + 3 * limit
    silent = None if name is None or FAULTS[name].lives else FAULTS[name].rank
    answers = [None if rank == silent else answer(end, patience) for rank, (end, _) in enumerate(pipes)]
    for worker in workers:
        worker.kill()
        worker.join()
    return Ran(answers, struck.value)


def answer(end: Connection, until: float) -> Any:
    try:
        return end.recv() if end.poll(max(0.0, until - time.monotonic())) else None
    except (EOFError, ConnectionResetError):
        return None


def told(name: str, ran: Ran, clean: list[list[str]]) -> Iterator[str]:
    """The cells of a fault: seconds, names, steps."""
    fault = FAULTS[name]
    live = {rank: seen for rank, seen in enumerate(ran.answers) if fault.lives or rank != fault.rank}
    if lost := [rank for rank, seen in live.items() if seen is None]:
        yield from (f"rank {lost} never", "", "")
        return
    others = {rank: seen for rank, seen in live.items() if rank != fault.rank}
    yield f"{max(seen.at for seen in live.values()) - ran.struck:.2f} s"
    yield f"{sum(seen.named == fault.rank for seen in others.values())} of {len(others)}"
    steps = {
        clean[rank].index(seen.weights) if seen.weights in clean[rank] else -1
        for rank, seen in live.items()
        if seen.weights
    }
    yield " and ".join({-1: "none"}.get(n, str(n)) for n in sorted(steps)) or "0"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit", type=float, default=8.0, help="seconds of the process groups (default: %(default)s)"
    )
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS)
    )
    parser.add_argument("--texts", action="store_true", help="print the errors, too")
    options = parser.parse_args()
    clean = {side: train(side, None, options.limit).answers for side in SIDES}
    print(
        f"{'':30}" + "".join(f"{side + ': until all raised':26}{'named by':12}{'steps':10}" for side in SIDES)
    )
    for name in options.faults:
        ran = {side: train(side, name, options.limit) for side in SIDES}
        cells = [cell for side in SIDES for cell in told(name, ran[side], clean[side])]
        print(
            f"{name:30}"
            + "".join(f"{cell:{width}}" for cell, width in zip(cells, (26, 12, 10) * 2, strict=True)),
            flush=True,
        )
        if options.texts:
            for side in SIDES:
                for rank, seen in enumerate(ran[side].answers):
                    print(f"    {side} rank {rank}: {seen and seen.error[:300]!r}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

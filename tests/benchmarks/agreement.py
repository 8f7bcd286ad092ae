"""What it costs that a step begins and ends on all ranks together, beside gloo's own all-reduce of 8 bytes.

Starts its processes itself, which do nothing but agree, and ends within two minutes::

    python tests/benchmarks/agreement.py

Rounds alternate; medians of rounds, in microseconds. Below, on paper, what agreement adds to a step of 1 s
under 1F1B with as many microbatches as ranks, and where all ranks begin and end together; from the times of
this run.
"""

import argparse
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ppfunc.runtime.control.connections import Address, in_thread
from ppfunc.runtime.control.control import Control
from ppfunc.runtime.control.socket_links import SocketLinks
from ppfunc.runtime.control.tree import END, TreeMessages
from ppfunc.runtime.ports.protocols import LossPart
from ppfunc.runtime.transport.p2p import P2P
from ppfunc.stage import LeafSignature

MICROBATCHES = 8
LATENCY = 10.0  # microseconds between two hosts, assumed
CALL = (
    "step function 1 (value_and_grad); 1f1b of 8 microbatches (0123456789abcdef); loss weights 0.125 each"
    " (01234567); seed None; autocast off; mode train"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30, help="steps per round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")  # torch is imported once
    workers = [context.Process(target=run, args=(rank, options, port)) for rank in range(max(options.sizes))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def run(rank: int, options: argparse.Namespace, port: int) -> None:
    """One process: in each size of group that it belongs to, in turn."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=max(options.sizes)
    )
    for size in options.sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            compare(rank, size, group, options)
        dist.barrier()
    if rank == 0:
        report(parts_of_a_step())
    dist.barrier()
    dist.destroy_process_group()


def compare(rank: int, size: int, group: dist.ProcessGroup, options: argparse.Namespace) -> None:
    """Agreement and all-reduce in turn."""
    with P2P(group) as transport:
        step, eight = nothing(transport, rank, size), torch.zeros(1, dtype=torch.float64)
        sides: list[Callable[[], object]] = [step, lambda: dist.all_reduce(eight, group=group)]
        rounds = [[timed(side, options.steps, group) for side in sides] for _ in range(options.rounds)]
        if rank == 0:
            ours, theirs = (median(column) for column in zip(*rounds, strict=True))
            paired = median(a / b for a, b in rounds)
            print(
                f"{size:5} processes: agreement {ours:8.0f} us, all-reduce {theirs:8.0f} us, ratio"
                f" {paired:.2f}",
                flush=True,
            )
        dist.barrier(group)


def nothing(transport: P2P, rank: int, size: int) -> Callable[[], object]:
    """A step that does nothing, with the losses of its microbatches on the last rank."""
    parts = {size - 1: LossPart(size - 1, LeafSignature((MICROBATCHES,), torch.float32, False))}
    losses = {size - 1: torch.ones(MICROBATCHES)} if rank == size - 1 else {}
    key = "8 microbatches of float32[2,16,64] 0123456789abcdef" if rank == 0 else None

    def step() -> None:
        transport.begin(CALL, key, 0)
        transport.end(losses, parts)
        transport.ended += 1

    return step


def timed(side: Callable[[], object], steps: int, group: dist.ProcessGroup) -> float:
    """Microseconds of one call."""
    side()
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(steps):
        side()
    return (time.perf_counter() - start) / steps * 1e6


class Keys:
    """A rendezvous of two ranks in one process."""

    size, timeout, host = 2, 60.0, "127.0.0.1"

    def __init__(self, keys: dict[int, Address], rank: int) -> None:
        self.rank, self.address = rank, keys.get
        self.publish = partial(keys.__setitem__, rank)
        self.failure, self.forget = lambda awaited: None, lambda: None


def parts_of_a_step() -> dict[str, float]:
    """Microseconds of each part at the fastest fifth: both ends in this process, so that nothing has to be
    waited for.
    """
    keys: dict[int, Address] = {}
    links = [in_thread(partial(SocketLinks, Keys(keys, rank)), "meets") for rank in range(2)]
    root, child = (Control(each.result()) for each in links)
    tree = TreeMessages(child.links, (0, 1))
    parts = {1: LossPart(1, LeafSignature((MICROBATCHES,), torch.float32, False))}
    losses = f"1:{bytes(parts[1].leaf.nbytes).hex()}"
    found: dict[str, list[float]] = {}

    def clock(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        found.setdefault(name, []).append((time.perf_counter() - start) * 1e6)

    for step in range(1000):
        clock("begin", lambda: root.begin(CALL, "key", 0))
        clock("line", lambda: child.begin(CALL, None, 0))
        child.links.vote(step)
        clock("send", lambda: tree.send(END, f"-1 -1 {losses}", 0))
        clock("end", lambda: root.end({}, parts))
        root.ended += 1
        clock("mark", lambda: tree.recv(0, END))
        child.links.commit(step)
        child.ended += 1
        child._running.release()
    for control in (root, child):
        control.close()
    return {name: sorted(times)[len(times) // 5] for name, times in found.items()}


def report(times: dict[str, float]) -> None:
    """The model for many ranks."""
    line, mark, send = times["line"], times["mark"], times["send"]
    print("\nparts, us: " + ", ".join(f"{name} {value:.0f}" for name, value in times.items()))
    print(
        f"(h = {line:.0f} to take the line of a step, w = {mark:.0f} to take a mark, s = {send:.0f} to send; "
        f"{LATENCY:g} of latency assumed)"
    )
    for ranks in (64, 256, 1024):
        hidden, open_ = added_by_1f1b(ranks, times), added_together(ranks, times)
        print(
            f"{ranks:5} ranks: 1F1B {hidden:5.0f} us ({hidden / 1e4:.4f}% of 1 s), all ranks at once"
            f" {open_:5.0f} us ({open_ / 1e4:.4f}%)"
        )


def added_by_1f1b(ranks: int, times: dict[str, float]) -> float:
    """Microseconds that agreement adds to a step of 1 s.

    Rank 0 begins first and ends last: its own calls count, with two children each. Any other rank is held up
    only where the line comes later than its first activation.
    """
    forward = 1e6 / (3 * (2 * ranks - 1))  # a backward takes two forwards; ranks microbatches
    began = times["begin"] + times["send"]
    arrival = [began]
    start = [began]
    for rank in range(1, ranks):
        arrival.append(arrival[(rank - 1) // 2] + times["line"] + 2 * times["send"] + LATENCY)
        start.append(max(arrival[rank], start[-1] + forward))
    return start[-1] - (ranks - 1) * forward + times["end"] + times["mark"] + times["send"]


def added_together(ranks: int, times: dict[str, float]) -> float:
    """Microseconds where every rank begins and ends at the same time: the line down, marks up, the outcome
    down.
    """
    depth = (ranks - 1).bit_length()
    up = 2 * times["mark"] + times["send"] + LATENCY
    down = times["mark"] + 2 * times["send"] + LATENCY
    return times["begin"] + times["end"] + depth * (times["line"] + 2 * times["send"] + LATENCY + up + down)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

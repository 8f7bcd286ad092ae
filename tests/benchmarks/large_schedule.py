"""CPU seconds and memory of one rank of many, from a schedule of compute until its own part is bound.

One process stands for one rank; its peers are words::

    python tests/benchmarks/large_schedule.py --ranks 256 --microbatches 1024

Each repetition is a fresh process. Of every part the least is printed: building, which users may do ahead;
making the step function, which places communication and proves; lowering, which agrees with the peers;
compiling, which binds. ``--growth`` shows instead how building, placing, proving and simulating grow with the
ranks, from a quarter of them on, at the given microbatches per rank.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import torch

import ppfunc as pp
from ppfunc.schedule import place_communication
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.tree import tree_structure

PARTS = ("build", "place and prove", "lower", "bind")


class OneRank(pp.InProcess):
    """The transport of one rank: its peers agree with all it says, and give it activations of one form.

    Args:
        rank: of this process.
        schedule: of the step.
        form: signature of an activation.
    """

    def __init__(self, rank: int, schedule: pp.Schedule, form: Signature) -> None:
        self.rank, self.schedule, self.form = rank, schedule, form

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        return (self.rank,)

    def all_gather(self, text: str) -> list[str]:
        losses = Signature(
            tree_structure(0), (LeafSignature((self.schedule.microbatches,), torch.float32, False),)
        )
        last = self.schedule.stages - 1
        loss = [self.schedule.placement[last], losses.to_json(), []]
        return [text, json.dumps([{last: loss}, {}, {}])]

    def send_text(self, peer: int, text: str) -> None:
        pass

    def recv_text(self, peer: int) -> str:
        edge = next(
            e for e in self.schedule.edges if [self.schedule.placement[s] for s in e] == [peer, self.rank]
        )
        return json.dumps(
            {
                "edge": edge,
                "signatures": [self.form.to_json()],
                "microbatches": [0] * self.schedule.microbatches,
            }
        )

    def post(self, batch: Any) -> Any:
        return lambda buffers: None


def scale(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x


def bind(ranks: int, microbatches: int, rank: int, placed: bool) -> tuple[list[float], float]:
    """CPU seconds of each part, and the most memory in GB."""
    times = [time.process_time()]

    def lap() -> None:
        times.append(time.process_time())

    schedule = pp.one_f_one_b(ranks, microbatches)
    if placed:
        schedule = place_communication(schedule, lookahead=1)
    lap()
    stages: list[Any] = [scale if stage == rank else None for stage in range(ranks)]
    transport = OneRank(rank, schedule, Signature.of(torch.ones(1, requires_grad=True)).with_grad())
    step = pp.value_and_grad(stages, lambda y, t: (y - t).sum(), schedule, transport)
    lap()
    batch = torch.ones(microbatches)
    lowered = step.lower({rank: torch.tensor(2.0)}, batch, batch)
    lap()
    compiled = lowered.compile().step
    lap()
    assert len(compiled.calls) > 2 * microbatches
    return [end - begin for begin, end in pairwise(times)], resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss / 1e6


def on_paper(ranks: int, microbatches: int) -> tuple[list[float], float]:
    """CPU seconds to build, place, prove and simulate; and how many instructions were proved."""
    times = [time.process_time()]
    schedule = pp.one_f_one_b(ranks, microbatches)
    times.append(time.process_time())
    placed = place_communication(schedule)
    times.append(time.process_time())
    pp.check(placed)
    times.append(time.process_time())
    pp.simulate(schedule)
    times.append(time.process_time())
    return [end - begin for begin, end in pairwise(times)], sum(placed.counts.values())


def show_growth(options: argparse.Namespace) -> None:
    print(f"{'ranks':>5} {'microbatches':>12} {'instructions':>12}  build  place  check  simulate  us each")
    for ranks in (options.ranks // 4, options.ranks // 2, options.ranks, 2 * options.ranks):
        microbatches = options.microbatches * ranks // options.ranks
        command = [sys.executable, __file__, "--growth", "--once"]
        command += [f"--ranks={ranks}", f"--microbatches={microbatches}"]
        found = [json.loads(subprocess.check_output(command)) for _ in range(options.repetitions)]
        least = [min(column) for column in zip(*(times for times, _ in found), strict=True)]
        count = found[0][1]
        print(
            f"{ranks:5} {microbatches:12} {count:12} {least[0]:6.2f} {least[1]:6.2f} {least[2]:6.2f}"
            f" {least[3]:9.2f} {sum(least) / count * 1e6:8.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--rank", type=int, help="which one; by default one in the middle")
    parser.add_argument("--placed", action="store_true", help="begin with a schedule that has communication")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="from a quarter to twice as many ranks")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rank = options.ranks // 2 if options.rank is None else options.rank
    if options.growth:
        if options.once:
            print(json.dumps(on_paper(options.ranks, options.microbatches)))
        else:
            show_growth(options)
        return
    if options.once:
        bind(2, 2, 1, False)  # imports, and all that torch sets up
        print(json.dumps(bind(options.ranks, options.microbatches, rank, options.placed)))
        return
    command = [sys.executable, __file__, "--once", *sys.argv[1:]]
    found = [json.loads(subprocess.check_output(command)) for _ in range(options.repetitions)]
    least = [min(column) for column in zip(*(times for times, _ in found), strict=True)]
    print(
        f"rank {rank} of {options.ranks}, {options.microbatches} microbatches, CPU seconds, least of"
        f" {options.repetitions}"
    )
    for part, seconds in zip(PARTS, least, strict=True):
        print(f"{part:16} {seconds:6.2f}")
    print(f"{'after building':16} {min(sum(times[1:]) for times, _ in found):6.2f}   (one process)")
    print(f"{'memory':16} {max(memory for _, memory in found):6.2f} GB")


if __name__ == "__main__":
    main()

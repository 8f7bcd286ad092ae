"""Build schedules of two streams of microbatches in opposite directions: DualPipe, DualPipeV, Chimera."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.topology import v_shape

from ..instruction import B, F, Instruction, Op, overlap
from ..schedule import Flow, Schedule, by_place
from .loops import rank_by_rank, require


@naming_arguments
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Run two chains over the same ranks, entering at both ends, with overlapped forward and backward.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a replica of stage k, go down and walk the second half. With F&B the time of an
    overlapped pair, the bubble time is ``(p/2 - 1)(F&B + B - 3W)`` where F = I and W <= F, with
    ``p + 1`` live activations; every rank holds the parameters of two stages.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(dualpipe(ranks=4, microbatches=8)).replace("rank ", ""), end="")
    0  0F0 0F1 0F2 7F4 7I4 7W4 7F5 0F3;7B5----  .  7F6;0B0---- 7B6----  .  7F7;0B1---- 7B7---- 0I2 0W2 0I3 0W3
    1   .  1F0 6F4 1F1 6F5 1F2 6B4---- 6F6;1B0---- 1F3;6B5---- 6F7;1B1---- 6B6---- 1B2----  .  6I7 1I3 6W7 1W3
    2   .  5F4 2F0 5F5 2F1 5F6 2B0---- 2F2;5B4---- 5F7;2B1---- 2F3;5B5---- 2B2---- 5B6----  .  2I3 5I7 2W3 5W7
    3  4F4 4F5 4F6 3F0 3I0 3W0 3F1 4F7;3B1----  .  3F2;4B4---- 3B2----  .  3F3;4B5---- 3B3---- 4I6 4W6 4I7 4W7

    Args:
        ranks: number of ranks p, even.
        microbatches: number of microbatches of both directions together, even, at least 2p.

    Raises:
        ValueError: p or m odd, or m below 2p.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.2.1;
        deepseek-ai/DualPipe, ``dualpipe.py``.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    expected = f"an even number of at least 2 * ranks = {2 * ranks}"
    chains = _both_ways(ranks, microbatches, 2 * ranks, expected, "dualpipev")
    programs = []
    for r in range(ranks):
        up, down = stream(r, chains[0].microbatches), stream(2 * ranks - 1 - r, chains[1].microbatches)
        entering, leaving = (up, down) if r < ranks // 2 else (down, up)
        phases = eight_phases(entering, leaving, ranks // 2, min(r, ranks - 1 - r), microbatches // 2)
        programs.append(tuple((i,) for i in phases))
    return Schedule("dualpipe", v_shape(ranks), chains, tuple(programs), replicas=by_place(chains))


@naming_arguments
def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r; forwards of each overlap with backwards of its partner.

    With F&B the time of an overlapped pair of chunks, the bubble time is
    ``(p - 1)(F&B + B - 3W)`` where F = I and W <= F, with ``2p + 1`` live chunk activations.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(dualpipev(ranks=2, microbatches=4)).replace("rank ", ""), end="")
    0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1----  .  3F2;0B0---- 3B2----  .  3F3;0B1---- 3B3---- 0I2 0W2 0I3 0W3
    1   .  1F0 2F0 1F1 2F1 1F2 2B0---- 2F2;1B0---- 1F3;2B1---- 2F3;1B1---- 2B2---- 1B2----  .  2I3 1I3 2W3 1W3

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches, at least 2p.

    Raises:
        ValueError: an argument below 1, or fewer than 2p microbatches.

    References:
        deepseek-ai/DualPipe, ``dualpipev.py``; Sea AI Lab, "Cut-in-half", 2025.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    fits = microbatches >= 2 * ranks
    require("microbatches", microbatches, fits, f"at least 2 * ranks = {2 * ranks}", "split the batch finer")

    def program_of(r: int) -> Iterator[Instruction]:
        up, down = (stream(stage, range(microbatches)) for stage in (r, 2 * ranks - 1 - r))
        return eight_phases(up, down, ranks, r, microbatches)

    return rank_by_rank("dualpipev", v_shape(ranks), ranks, microbatches, program_of)


@naming_arguments
def chimera(ranks: int, microbatches: int) -> Schedule:
    """Run two chains in opposite directions over the same ranks, p / 2 microbatches of each at a time.

    Stages 0..p-1 go up the ranks and walk the first half of the microbatches; stages p..2p-1,
    stage p + k a replica of stage k, go down and walk the second half. Where F = B and m is a
    multiple of p, the bubble is ``(p - 2)/(2m + p - 2)`` of the makespan; at most p live
    activations; every rank holds the parameters of two stages.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(chimera(ranks=4, microbatches=4)), end="")
    rank 0  0F0 0F1  .  7F2 7B2 7F3 7B3 0B0  .  0B1
    rank 1   .  1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1  .
    rank 2   .  5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3  .
    rank 3  4F2 4F3  .  3F0 3B0 3F1 3B1 4B2  .  4B3

    Args:
        ranks: number of ranks p, even.
        microbatches: number of microbatches m of both directions together, even.

    Raises:
        ValueError: an argument below 1, or p or m odd.

    References:
        Li and Hoefler, Chimera, SC 2021 (arXiv:2107.06925), sections 3.1 and 3.5.
    """
    chains = _both_ways(ranks, microbatches, 2, "an even number", "1f1b")
    programs = []
    for r in range(ranks):
        slots = {}
        for chain, place in zip(chains, (r, ranks - 1 - r), strict=True):
            for k, m in enumerate(chain.microbatches):
                start = 2 * ranks * (k // (ranks // 2)) + 2 * (k % (ranks // 2))
                slots[start + place] = F(chain.stages[place], m)
                slots[start + 2 * ranks - 1 - place] = B(chain.stages[place], m)
        programs.append(tuple((slots[time],) for time in sorted(slots)))
    return Schedule("chimera", v_shape(ranks), chains, tuple(programs), replicas=by_place(chains))


def _both_ways(ranks: int, microbatches: int, least: int, expected: str, other: str) -> tuple[Flow, Flow]:
    """Make a chain up the ranks and one down, each for half of the microbatches.

    Raises:
        ValueError: an odd number, or fewer than ``least`` microbatches, where ``expected`` says what is
            right. ``other`` is a builder for odd numbers of ranks.
    """
    require_counts(ranks=ranks, microbatches=microbatches)
    require("ranks", ranks, ranks % 2 == 0, "an even number", f"use an even number, or {other}")
    fits = microbatches % 2 == 0 and microbatches >= least
    require("microbatches", microbatches, fits, expected, "split the batch finer")
    up, down = range(ranks), range(ranks, 2 * ranks)
    half = microbatches // 2
    return Flow(tuple(up), range(half)), Flow(tuple(down), range(half, microbatches))


class MicrobatchStream(NamedTuple):
    """The work that one stage still has to do: its forwards and its backwards, each in order."""

    forwards: Iterator[Instruction]
    backwards: Iterator[Instruction]


def stream(stage: int, microbatches: Sequence[int]) -> MicrobatchStream:
    """Make the stream of a stage's work on its microbatches, with nothing done yet."""
    return MicrobatchStream((F(stage, m) for m in microbatches), (B(stage, m) for m in microbatches))


def eight_phases(
    a: MicrobatchStream, b: MicrobatchStream, width: int, place: int, microbatches: int
) -> Iterator[Instruction]:
    """Yield the eight phases of the rank that is ``place`` ranks from the end where stream a enters.

    Args:
        a: the stream that starts here early and ends late (phase 0 in the original).
        b: the other stream (phase 1).
        width: ranks that a microbatch passes before it meets the other stream.
        place: distance of the rank from the entry, ``0 <= place < width``.
        microbatches: number of microbatches of each stream, at least ``2 * width``.
    """
    before = width - place - 1
    waiting: deque[Instruction] = deque()  # weight gradients put off, first in, first out

    def zero_bubble(x: MicrobatchStream) -> Instruction:
        whole = next(x.backwards)
        waiting.append(whole._replace(op=Op.W))
        return whole._replace(op=Op.I)

    def pair(x: MicrobatchStream, y: MicrobatchStream) -> Instruction:
        return overlap(next(x.forwards), next(y.backwards))

    for _ in range(2 * before):  # 1: forwards of a
        yield next(a.forwards)
    for _ in range(place + 1):  # 2: forwards of both
        yield from (next(a.forwards), next(b.forwards))
    for _ in range(before):  # 3: zero-bubble backward, its weights, forward of b
        yield from (zero_bubble(b), waiting.popleft(), next(b.forwards))
    for turn in range(microbatches - 2 * width + place + 1):  # 4: the steady state, overlapped
        if turn == 0 and before == 0:  # where the streams meet, overlapping the first pair would add a bubble
            yield from (next(a.forwards), next(b.backwards))
        else:
            yield pair(a, b)
        yield pair(b, a)
    for _ in range(before):  # 5: the forwards of b run out
        yield from (next(b.backwards), pair(b, a))
    for turn in range(2 * (place + 1)):  # 6: backwards of both, zero-bubble in the second half
        x = (b, a)[turn % 2]
        yield zero_bubble(x) if turn > place else next(x.backwards)
    for _ in range(before):  # 7: weights, zero-bubble backward of a
        yield from (waiting.popleft(), zero_bubble(a))
    yield from waiting  # 8: the weights that are left

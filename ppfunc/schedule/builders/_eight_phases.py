"""The program of a DualPipe rank: eight phases over two streams of microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ..instruction import Instruction, Op, overlap
from ._parts import B, F


class MicrobatchStream(NamedTuple):
    """The work that one stage still has to do: its forwards and its backwards, each in order."""

    forwards: Iterator[Instruction]
    backwards: Iterator[Instruction]


def stream(stage: int, microbatches: range) -> MicrobatchStream:
    """The work of one stage on its microbatches, none of it done yet."""
    return MicrobatchStream((F(stage, m) for m in microbatches), (B(stage, m) for m in microbatches))


def eight_phases(a: MicrobatchStream, b: MicrobatchStream, width: int, place: int, microbatches: int) -> Iterator[Instruction]:
    """The eight phases of the rank that is ``place`` ranks from the end where stream a enters.

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

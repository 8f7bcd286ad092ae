"""Schedules made of one pattern that repeats on a V, squeezed where it fills and where it drains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import itemgetter

from ...parallel.placement import v_shape
from ..instruction import Instruction, Op
from ..schedule import Schedule, single_chain
from ._parts import F, I, W

PERIOD = 6  # slots of a microbatch on a rank: forward, input and weight gradient of two chunks
SlotNumbers = dict[Instruction, int]
Slots = tuple[int, int, int, int]


def from_pattern(name: str, ranks: int, microbatches: int, slots: Callable[[int], Slots]) -> Schedule:
    """The schedule that repeats ``slots(rank)`` every six slots, as early as memory allows.

    Args:
        slots: where microbatch 0 has, on a rank, the forward of the first and of the second
            chunk and the input gradient of the second and of the first.
    """
    placement = v_shape(ranks)
    pattern = [_repeat(r, 2 * ranks - 1 - r, microbatches, slots(r)) for r in range(ranks)]
    return single_chain(name, placement, microbatches, _drain(_squeeze(pattern, placement), pattern, 2 * ranks))


def _repeat(first: int, second: int, microbatches: int, slots: Slots) -> SlotNumbers:
    """The slots of a rank with nothing moved; weight gradients take free slots, first in first out."""
    kinds = ((F, first), (F, second), (I, second), (I, first))
    times = {op(s, m): slot + PERIOD * m for (op, s), slot in zip(kinds, slots, strict=True) for m in range(microbatches)}
    taken = {time: i for i, time in times.items()}
    waiting: deque[Instruction] = deque()
    for time in range(max(taken) + len(taken)):
        i = taken.get(time)
        if i and i.op is Op.I:
            waiting.append(W(i.stage, i.microbatch))
        elif not i and waiting:
            times[waiting.popleft()] = time
    return times


def _needs(i: Instruction, stages: int) -> Iterator[Instruction]:
    """The instructions whose results this one consumes."""
    if i.op is Op.W:
        yield I(i.stage, i.microbatch)
        return
    if i.op is Op.I:
        yield F(i.stage, i.microbatch)
    beyond = i.stage - 1 if i.op is Op.F else i.stage + 1
    if 0 <= beyond < stages:
        yield Instruction(i.op, beyond, i.microbatch)


def _peak(times: SlotNumbers) -> int:
    """Most activations of a rank that wait for their weight gradient."""
    return max(accumulate((i.op is Op.F) - (i.op is Op.W) for i in sorted(times, key=times.__getitem__)))


def _squeeze(pattern: list[SlotNumbers], placement: tuple[int, ...]) -> SlotNumbers:
    """Every instruction, in the order of the pattern, in the earliest free slot that its inputs
    and the peak of the pattern's activations allow."""
    peak = max(map(_peak, pattern))
    busy: list[set[int]] = [set() for _ in pattern]
    live: list[list[int]] = [[] for _ in pattern]  # activations in each slot so far; after the last, as many as are held
    held = [0] * len(pattern)
    moved: SlotNumbers = {}
    for i, time in sorted((item for times in pattern for item in times.items()), key=itemgetter(1)):
        rank = placement[i.stage]
        ready = max((moved[n] + 1 for n in _needs(i, len(placement))), default=0)
        known = live[rank]
        if i.op is Op.F and time > len(known) and held[rank] >= peak:
            ready = time
        elif i.op is Op.F:
            ready = next((s + 1 for s in range(min(time, len(known)) - 1, ready - 1, -1) if known[s] >= peak), ready)
        slot = moved[i] = next(s for s in range(ready, time + 1) if s not in busy[rank])
        busy[rank].add(slot)
        known += [held[rank]] * (slot + 1 - len(known))
        change = (i.op is Op.F) - (i.op is Op.W)
        held[rank] += change
        for s in range(slot + (i.op is Op.W), len(known)):
            known[s] += change
    return moved


def _drain(squeezed: SlotNumbers, pattern: list[SlotNumbers], stages: int) -> list[list[Instruction]]:
    """The orders with, after a rank's last forward, weight gradients only where no input gradient is ready."""
    orders = [sorted(times, key=squeezed.__getitem__) for times in pattern]
    ends = [max(k for k, i in enumerate(order) if i.op is Op.F) + 1 for order in orders]
    programs = [order[:end] for order, end in zip(orders, ends, strict=True)]
    queues = [_queues(order[end:], rank) for rank, (order, end) in enumerate(zip(orders, ends, strict=True))]
    done = {i: squeezed[i] for program in programs for i in program}
    free = [squeezed[program[-1]] + 1 for program in programs]
    time = min(free)
    while any(map(any, queues)):
        for rank, program in enumerate(programs):
            for queue in queues[rank] if free[rank] <= time else ():
                if queue and all(done.get(n, time) < time for n in _needs(queue[0], stages)):
                    done[queue[0]] = time
                    program.append(queue.popleft())
                    break
        time += 1
    return programs


def _queues(tail: list[Instruction], first: int) -> list[deque[Instruction]]:
    """The input gradients of a rank's second and of its first stage, and its weight gradients."""
    late, early = ([i for i in tail if i.op is Op.I and (i.stage == first) == own] for own in (True, False))
    return [deque(early), deque(late), deque(i for i in tail if i.op is Op.W)]

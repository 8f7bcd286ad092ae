"""Schedules made of one pattern that repeats on a V, squeezed where it fills and where it drains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter

from ...parallel.placement import v_shape
from ..instruction import Instruction, Op
from ..schedule import Schedule, single_chain
from ._parts import F, I, W

PERIOD = 6  # slots of a microbatch on a rank: forward, input and weight gradient of two chunks
Times = dict[Instruction, int]
Slots = tuple[int, int, int, int]


def from_pattern(name: str, ranks: int, microbatches: int, slots: Callable[[int], Slots]) -> Schedule:
    """The schedule that repeats ``slots(rank)`` every six slots, as early as memory allows.

    Args:
        slots: where microbatch 0 has, on a rank, the forward of the first and of the second
            chunk and the input gradient of the second and of the first.
    """
    placement = v_shape(ranks)
    pattern = [_repeat(r, 2 * ranks - 1 - r, microbatches, slots(r)) for r in range(ranks)]
    squeezed = _squeeze(pattern, placement)
    orders = [sorted(times, key=squeezed.__getitem__) for times in pattern]
    return single_chain(name, placement, microbatches, _drain(orders, 2 * ranks))


def _repeat(first: int, second: int, microbatches: int, slots: Slots) -> Times:
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


def _live(times: Times) -> list[int]:
    """Activations alive in every slot, each from its forward to its weight gradient."""
    change = [0] * (max(times.values()) + 2)
    for i, time in times.items():
        change[time + (i.op is Op.W)] += (i.op is Op.F) - (i.op is Op.W)
    total = 0
    return [total := total + c for c in change]


def _squeeze(pattern: list[Times], placement: tuple[int, ...]) -> Times:
    """Every instruction, in the order of the pattern, in the earliest free slot that its inputs
    and the peak of the pattern's activations allow."""
    live = [_live(times) for times in pattern]
    peak = max(map(max, live))
    busy: list[set[int]] = [set() for _ in pattern]
    moved: Times = {}
    for i, time in sorted((item for times in pattern for item in times.items()), key=itemgetter(1)):
        rank = placement[i.stage]
        ready = max((moved[n] + 1 for n in _needs(i, len(placement))), default=0)
        if i.op is Op.F:
            ready = next((s + 1 for s in range(time - 1, ready - 1, -1) if live[rank][s] >= peak), ready)
        slot = next(s for s in range(ready, time + 1) if s not in busy[rank])
        busy[rank].add(slot)
        moved[i] = slot
        for s in range(slot, time) if i.op is Op.F else range(slot + 1, time + 1) if i.op is Op.W else ():
            live[rank][s] += 1 if i.op is Op.F else -1
    return moved


def _drain(orders: list[list[Instruction]], stages: int) -> list[list[Instruction]]:
    """The orders with, after a rank's last forward, weight gradients only where no input gradient is ready."""
    programs: list[list[Instruction]] = [[] for _ in orders]
    queues = [_queues(order, rank) for rank, order in enumerate(orders)]
    done: Times = {}
    time = 0
    while any(map(any, queues)):
        for program, (fixed, *free) in zip(programs, queues, strict=True):
            for queue in [fixed] if fixed else free:
                if queue and all(done.get(n, time) < time for n in _needs(queue[0], stages)):
                    done[queue[0]] = time
                    program.append(queue.popleft())
                    break
        time += 1
    return programs


def _queues(order: list[Instruction], first: int) -> list[deque[Instruction]]:
    """A rank's order up to its last forward; then its input gradients by stage, and its weight gradients."""
    end = max(k for k, i in enumerate(order) if i.op is Op.F) + 1
    tail = order[end:]
    late, early = ([i for i in tail if i.op is Op.I and (i.stage == first) == own] for own in (True, False))
    return [deque(order[:end]), deque(early), deque(late), deque(i for i in tail if i.op is Op.W)]

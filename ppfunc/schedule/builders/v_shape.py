"""Build schedules of two chunks per rank in a V, from a pattern that repeats: ZB-V, V-Half, V-Min."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter

from ppfunc._checks import naming_arguments, require_counts
from ppfunc.parallel.topology import Placement, v_shape

from ..instruction import F, I, Instruction, Op
from ..schedule import Schedule, single_chain
from .loops import rank_by_rank


@naming_arguments
def zbv(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r in a fixed pattern that has no gap at equal costs.

    No bubble in the span where F = I = W and ``m >= 2p - 1``, ``(p - 1)F`` per chunk of the
    makespan; at most ``2p`` chunk activations wait for their W.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(zbv(ranks=2, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
    rank 1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m; below ``2p - 1`` the pattern of ``2p - 1`` with
            the surplus left out.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv:2401.10241), section 6.
    """

    def program_of(r: int) -> Iterator[Instruction]:
        letters = _pattern(r, ranks, max(2 * ranks - 1, microbatches))
        left = {}
        for letter in set(letters):
            stage = r if letter.isupper() else 2 * ranks - 1 - r
            left[letter] = map(partial(Instruction, Op(letter.upper()), stage), range(microbatches))
        for letter in letters:
            if instruction := next(left[letter], None):  # else it is surplus
                yield instruction

    return rank_by_rank("zbv", v_shape(ranks), ranks, microbatches, program_of)


def _pattern(rank: int, ranks: int, microbatches: int) -> str:
    """Write the letters of the pattern: capitals for the first chunk, small ones for the second."""
    warm_up = "F" * (2 * (ranks - rank) - 1) + "fF" * rank + "fiw" * (ranks - rank)
    steady = "FIWfiw" * (microbatches - 2 * ranks + rank + 1) + "IWfiw" * (ranks - rank - 1)
    cool_down = "Ii" * rank + "IW" * (ranks - rank) + "w" * rank + "W" * rank
    return warm_up + steady + cool_down


@naming_arguments
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r in a pattern that keeps activations short-lived.

    Where F = I = W = 1 per chunk and ``m > p``, the bubble time is ``3p - 7`` for p even,
    ``3p - 4`` for p odd (1 for two ranks, 0 for one), below half of 1F1B's ``6(p - 1)``; at most
    ``2((p + 2) // 2)`` chunk activations wait for their W, half as many as full ones.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(v_half(ranks=3, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1  .  0I0 0W0  .  5F2 5I2 0I1 5W2 0W1  .  0I2 0W2
    rank 1   .  1F0 1F1  .  4F0  .  4F1 4I0 4W0 1F2 4I1 1I0 1W0 4W1 4F2  .  1I1 4I2 1W1 4W2 1I2 1W2  .
    rank 2   .   .  2F0 3F0 2F1 3F1  .   .  3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv:2405.15362), section 3.
    """

    placement, p, shift = v_shape(ranks), ranks, 0 if ranks % 2 else 3
    slots = [(2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2) for r in range(ranks)]
    return from_pattern("v_half", placement, microbatches, slots)


@naming_arguments
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Run stages r and 2p - 1 - r on rank r, each microbatch through the V without a stop.

    Where F = I = W = 1 per chunk and ``m > p``, the bubble time is ``4p - 7``, ``4p - 5`` or
    ``4p - 6`` for p of remainder 0, 1 or 2 by 3 (0 for one rank), two thirds of 1F1B's
    ``6(p - 1)``; at most ``2((p + 4) // 3)`` chunk activations wait for their W. Unequal costs
    cost more here than in any other schedule.

    >>> from ppfunc.schedule import to_grid
    >>> print(to_grid(v_min(ranks=3, microbatches=3)), end="")
    rank 0  0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0  .   .  5F2 5I2 0I1 0W1 5W2  .  0I2 0W2
    rank 1   .  1F0 1F1  .  4F0  .  4F1 4I0 4W0 1F2 1I0 1W0 4I1 4W1 4F2  .  1I1 4I2 1W1 4W2 1I2 1W2  .
    rank 2   .   .  2F0 3F0 2F1 3F1  .   .  3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .

    Args:
        ranks: number of ranks p, two stages each.
        microbatches: number of microbatches m.

    Raises:
        ValueError: an argument is below 1.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv:2405.15362), section 3.
    """

    placement, p, shift = v_shape(ranks), ranks, 0 if ranks % 3 else 2
    slots = [(r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1) for r in range(ranks)]
    return from_pattern("v_min", placement, microbatches, slots)


PERIOD = 6  # slots of a microbatch on a rank: forward, input and weight gradient of two chunks
SlotNumbers = dict[Instruction, int]
Slots = tuple[int, int, int, int]


def from_pattern(name: str, placement: Placement, microbatches: int, slots: Sequence[Slots]) -> Schedule:
    """Repeat slots every six slots, each instruction as early as memory allows.

    Args:
        slots: slots of microbatch 0 on each rank: forward of the first and of the second chunk, input
            gradient of the second and of the first.
    """
    require_counts(microbatches=microbatches)
    last = len(placement) - 1
    pattern = [_repeat(r, last - r, microbatches, mine) for r, mine in enumerate(slots)]
    programs = _drain(_squeeze(pattern, placement), pattern, len(placement))
    return single_chain(name, placement, microbatches, programs)


def _repeat(first: int, second: int, microbatches: int, slots: Slots) -> SlotNumbers:
    """Place the slots of a rank unmoved; weight gradients take free slots, first in first out."""
    kinds = ((F, first), (F, second), (I, second), (I, first))
    times = {
        op(s, m): slot + PERIOD * m
        for (op, s), slot in zip(kinds, slots, strict=True)
        for m in range(microbatches)
    }
    taken = {time: i for i, time in times.items()}
    waiting: deque[Instruction] = deque()
    for time in range(max(taken) + len(taken)):
        i = taken.get(time)
        if i and i.op is Op.I:
            waiting.append(i._replace(op=Op.W))
        elif not i and waiting:
            times[waiting.popleft()] = time
    return times


def _needs(i: Instruction, stages: int) -> Iterator[Instruction]:
    """List the instructions whose results this one consumes."""
    if i.op is Op.W:
        yield i._replace(op=Op.I)
        return
    if i.op is Op.I:
        yield i._replace(op=Op.F)
    beyond = i.stage - 1 if i.op is Op.F else i.stage + 1
    if 0 <= beyond < stages:
        yield i._replace(stage=beyond)


def _squeeze(pattern: list[SlotNumbers], placement: tuple[int, ...]) -> SlotNumbers:
    """Move every instruction to its earliest free slot, in the order of the pattern.

    Inputs come before uses, and activations stay within the peak of the pattern.
    """
    # The most activations of a rank that wait for their weight gradient at one time.
    orders = (sorted(times, key=times.__getitem__) for times in pattern)
    peak = max(n for order in orders for n in accumulate((i.op is Op.F) - (i.op is Op.W) for i in order))
    busy: list[set[int]] = [set() for _ in pattern]
    # Activations in each slot so far; after the last, as many as are held.
    live: list[list[int]] = [[] for _ in pattern]
    held = [0] * len(pattern)
    moved: SlotNumbers = {}
    for i, time in sorted((item for times in pattern for item in times.items()), key=itemgetter(1)):
        rank = placement[i.stage]
        ready = max((moved[n] + 1 for n in _needs(i, len(placement))), default=0)
        known = live[rank]
        if i.op is Op.F and time > len(known) and held[rank] >= peak:
            ready = time
        elif i.op is Op.F:
            ready = next(
                (s + 1 for s in range(min(time, len(known)) - 1, ready - 1, -1) if known[s] >= peak), ready
            )
        slot = moved[i] = next(s for s in range(ready, time + 1) if s not in busy[rank])
        busy[rank].add(slot)
        known += [held[rank]] * (slot + 1 - len(known))
        change = (i.op is Op.F) - (i.op is Op.W)
        held[rank] += change
        for s in range(slot + (i.op is Op.W), len(known)):
            known[s] += change
    return moved


def _drain(squeezed: SlotNumbers, pattern: list[SlotNumbers], stages: int) -> list[list[Instruction]]:
    """Delay the weight gradients after a rank's last forward until no input gradient is ready."""
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
    """Return the input gradients of a rank's second and of its first stage, and its weight gradients."""
    late, early = ([i for i in tail if i.op is Op.I and (i.stage == first) == own] for own in (True, False))
    return [deque(early), deque(late), deque(i for i in tail if i.op is Op.W)]

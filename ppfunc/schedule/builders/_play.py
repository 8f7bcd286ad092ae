"""The runs of the zero-bubble heuristic: which of F, I and W every rank does next, and when."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

Letters = list[str]


class StageTimes(NamedTuple):
    """Per rank: the times of F, I and W, and of a message that the rank sends; its memory in whole units.

    An activation takes ``held`` from F to I and ``kept`` from then to W; ``cap`` is what all of them may
    take.
    """

    forward: Sequence[Any]
    backward: Sequence[Any]
    weight: Sequence[Any]
    message: Sequence[Any]
    held: Sequence[int]
    kept: Sequence[int]
    cap: Sequence[int]

    def is_full(self, rank: int, forwards: int, backwards: int, weights: int) -> bool:
        """Tell if one more forward would exceed the cap, after so many F, I and W."""
        held, kept = self.held[rank], self.kept[rank]
        return (forwards - backwards + 1) * held + (backwards - weights) * kept > self.cap[rank]


class Rules(NamedTuple):
    """The settings of one run.

    Args:
        warm_up: per rank, the most forwards before its first input gradient.
        alternate: whether forwards and input gradients take turns after the warm-up; else what
            arrives first comes first.
        hold: whether a forward waits for an input gradient that arrives before it would end.
        eager: whether a weight gradient may delay what arrives in the meantime.
    """

    warm_up: Sequence[int]
    alternate: bool
    hold: bool
    eager: bool


class Outcome(NamedTuple):
    """The span and the makespan of a run, and the letters of every rank in order."""

    span: Any
    makespan: Any
    letters: tuple[Letters, ...]


def warm_ups(times: StageTimes, microbatches: int) -> list[list[int]]:
    """List candidates for the forwards of each rank before its first input gradient.

    They follow the round trip of a message, 1F1B, and the memory.
    """
    f, i, _, message, held, _, cap = times
    ranks = len(f)
    room = [min(microbatches, c // size) if size else microbatches for c, size in zip(cap, held, strict=True)]
    round_trips = [
        sum(f[s] + i[s] + message[s - 1] + message[s] for s in range(r + 1, ranks)) for r in range(ranks)
    ]
    fitting = [1 + int(round_trip // f[r]) if f[r] else room[r] for r, round_trip in enumerate(round_trips)]
    shapes = (
        [min(room[r] - r, n) for r, n in enumerate(fitting)],
        [min(room[r], ranks - r) for r in range(ranks)],
        room,
    )
    return [[max(1, n) for n in shape] for shape in shapes]


def play(times: StageTimes, microbatches: int, rules: Rules) -> Outcome | None:
    """Let the rank that can start first do its next instruction; None if ranks get stuck."""
    ranks = range(len(times.forward))
    letters: tuple[Letters, ...] = tuple([] for _ in ranks)
    ends: dict[str, list[list[Any]]] = {letter: [[] for _ in ranks] for letter in "FIW"}
    starts: list[Any] = [None for _ in ranks]
    free: list[Any] = [0 for _ in ranks]
    lengths = {"F": times.forward, "I": times.backward, "W": times.weight}

    def choice(r: int) -> tuple[Any, int, str]:
        start, letter = _next(r, times, ends, free[r], microbatches, rules) or (inf, "")
        return start, r, letter

    choices = [choice(r) for r in ranks]
    for _ in range(3 * microbatches * len(ranks)):
        start, r, letter = min(choices)
        if start == inf:
            return None
        starts[r] = start if starts[r] is None else starts[r]
        free[r] = start + lengths[letter][r]
        ends[letter][r].append(free[r])
        letters[r].append(letter)
        for near in range(max(0, r - 1), min(len(ranks), r + 2)):
            choices[near] = choice(near)
    return Outcome(max(e - s for s, e in zip(starts, free, strict=True)), max(free), letters)


def _next(
    r: int, times: StageTimes, ends: dict[str, list[list[Any]]], free: Any, microbatches: int, rules: Rules
) -> tuple[Any, str] | None:
    """Return the time and the letter of the rank's next start, or None while an arrival is unknown."""
    f, b, w = (len(ends[letter][r]) for letter in "FIW")
    warm = f >= rules.warm_up[r]
    forward = inf if f == microbatches or (b == 0 and warm) else _arrival("F", r, r - 1, f, times, ends)
    backward = inf if b == f else max(ends["F"][r][b], _arrival("I", r, r + 1, b, times, ends))
    weight = (free, "W") if b > w else None
    if rules.alternate and b < microbatches:
        backward_first = f == microbatches or f - b >= rules.warm_up[r]
        if (backward if backward_first else forward) == inf:
            return None
    else:
        if forward == backward == inf:
            return weight
        backward_first = backward <= max(forward, free) or (
            rules.hold and backward < max(forward, free) + times.forward[r]
        )
    if not backward_first and times.is_full(r, f, b, w):
        if weight or backward == inf:
            return weight
        backward_first = True
    start = max(free, backward if backward_first else forward)
    if weight and (free + times.weight[r] <= start or (rules.eager and free < start)):
        return weight
    return start, "I" if backward_first else "F"


def _arrival(
    letter: str, r: int, source: int, number: int, times: StageTimes, ends: dict[str, list[list[Any]]]
) -> Any:
    """Return when the product of neighbour ``source`` arrives: 0 without a neighbour, infinity if unknown."""
    if not 0 <= source < len(times.forward):
        return 0
    known = ends[letter][source]
    return known[number] + times.message[source] if number < len(known) else inf

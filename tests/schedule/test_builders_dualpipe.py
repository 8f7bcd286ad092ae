"""DualPipe and DualPipeV against a recorder that runs the control flow of the original."""

from __future__ import annotations

import pytest

from ppfunc.schedule import dualpipe, dualpipev


class Recorder:
    """A rank of the original engine with the compute replaced by text; directions, not phases, have
    stages.
    """

    def __init__(self, stages: tuple[int, int], first: tuple[int, int], flip: bool) -> None:
        self.stages, self.first, self.flip = stages, first, flip
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.cache: list[str] = []
        self.queue: list[list[str]] = []
        self.log: list[str] = []

    def forward(self, phase: int) -> str:
        direction = phase ^ self.flip
        number = self.forwards[direction]
        self.forwards[direction] += 1
        return f"{self.stages[direction]}F{self.first[direction] + number}"

    def backward(self, phase: int, zero_bubble: bool = False) -> str:
        direction = phase ^ self.flip
        number = self.backwards[direction]
        self.backwards[direction] += 1
        stage, microbatch = self.stages[direction], self.first[direction] + number
        if zero_bubble:
            self.cache.append(f"{stage}W{microbatch}")
            self.queue.append(self.cache)
            self.cache = []
        return f"{stage}{'I' if zero_bubble else 'B'}{microbatch}"

    def f(self, phase: int) -> None:
        self.log.append(self.forward(phase))

    def b(self, phase: int, zero_bubble: bool = False) -> None:
        self.log.append(self.backward(phase, zero_bubble))

    def fb(self, phase0: int, phase1: int) -> None:
        self.log.append(f"({self.forward(phase0)};{self.backward(phase1)})OVERLAP_F_B")

    def w(self) -> None:
        assert self.queue, "Pop empty queue."
        self.log += self.queue.pop(0)


def run(engine: Recorder, ranks: int, half_ranks: int, half_rank: int, count: int) -> list[str]:
    """Steps 1 to 8; ``ranks`` is twice ``half_ranks``, ``count`` the microbatches of one direction."""
    middle = half_rank == half_ranks - 1
    for _ in range((half_ranks - half_rank - 1) * 2):
        engine.f(0)
    for _ in range(half_rank + 1):
        engine.f(0)
        engine.f(1)
    for _ in range(half_ranks - half_rank - 1):
        engine.b(1, zero_bubble=True)
        engine.w()
        engine.f(1)
    for i in range(count - ranks + half_rank + 1):
        if i == 0 and middle:
            engine.f(0)
            engine.b(1)
        else:
            engine.fb(0, 1)
        engine.fb(1, 0)
    for _ in range(half_ranks - half_rank - 1):
        engine.b(1)
        engine.fb(1, 0)
    step_6, zero_bubble = half_rank + 1, False
    for i in range(step_6):
        if i == step_6 // 2 and half_rank % 2 == 1:
            zero_bubble = True
        engine.b(1, zero_bubble)
        if i == step_6 // 2 and half_rank % 2 == 0:
            zero_bubble = True
        engine.b(0, zero_bubble)
    for _ in range(half_ranks - half_rank - 1):
        engine.w()
        engine.b(0, zero_bubble=True)
    for _ in range(half_rank + 1):
        engine.w()
    assert not engine.queue
    assert engine.forwards == engine.backwards == [count, count]
    return engine.log


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_dualpipe(ranks):
    for microbatches in range(2 * ranks, 2 * ranks + 9, 2):
        schedule, half = dualpipe(ranks, microbatches), microbatches // 2
        for rank in range(ranks):
            engine = Recorder((rank, 2 * ranks - 1 - rank), (0, half), flip=rank >= ranks // 2)
            expected = run(engine, ranks, ranks // 2, min(rank, ranks - 1 - rank), half)
            assert [str(i) for i in schedule.instructions(rank)] == expected, (ranks, microbatches, rank)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_dualpipev(ranks):
    for microbatches in range(2 * ranks, 2 * ranks + 6):
        schedule = dualpipev(ranks, microbatches)
        for rank in range(ranks):
            engine = Recorder((rank, 2 * ranks - 1 - rank), (0, 0), flip=False)
            expected = run(engine, 2 * ranks, ranks, rank, microbatches)
            assert [str(i) for i in schedule.instructions(rank)] == expected, (ranks, microbatches, rank)


def test_the_two_chains_are_copies_of_each_other():
    schedule = dualpipe(4, 8)
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [(c.stages, list(c.microbatches)) for c in schedule.flows] == [
        ((0, 1, 2, 3), [0, 1, 2, 3]),
        ((4, 5, 6, 7), [4, 5, 6, 7]),
    ]
    assert schedule.replicas == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("build", "ranks", "microbatches", "message"),
    [
        (dualpipe, 3, 8, "ranks = 3, expected an even number"),
        (dualpipe, 4, 9, "microbatches = 9, expected an even number of at least 2 . ranks = 8"),
        (dualpipe, 4, 6, "microbatches = 6, expected an even number of at least 2 . ranks = 8"),
        (dualpipev, 4, 7, "microbatches = 7, expected at least 2 . ranks = 8"),
    ],
)
def test_what_does_not_fit_is_refused(build, ranks, microbatches, message):
    with pytest.raises(ValueError, match=message):
        build(ranks, microbatches)

"""Ranks that take turns: all come to their end, and the turns of a rank are near one another."""

from statistics import median

from ppfunc.schedule.proof.timeline import take_turns


def turns(ranks: int, microbatches: int) -> tuple[list[int], list[list[int]]]:
    """Let ranks wait as in 1F1B: for the backward of the next one, and for the forward of the one before."""
    past: list[list[int]] = [[] for _ in range(ranks)]
    order: list[int] = []
    ready = list(reversed(range(ranks)))
    waiting = set()

    def resume(rank: int) -> None:
        order.append(rank)
        waiting.discard(rank)
        while (done := len(past[rank])) < microbatches:
            if any(0 <= r < ranks and len(past[r]) < done + (r > rank) for r in (rank - 1, rank + 1)):
                waiting.add(rank)
                return
            past[rank].append(done)
            ready.extend(r for r in (rank - 1, rank + 1) if r in waiting)
            waiting.difference_update((rank - 1, rank + 1))

    take_turns(resume, ready, past)
    assert not ready
    return order, past


def test_all_ranks_come_to_their_end():
    for ranks, microbatches in ((1, 1), (2, 100), (5, 3), (100, 200)):
        _, past = turns(ranks, microbatches)
        assert past == [[*range(microbatches)]] * ranks


def test_few_ranks_have_turns_between_two_of_one():
    order, _ = turns(ranks=256, microbatches=256)
    latest: dict[int, int] = {}
    between = []
    for turn, rank in enumerate(order):
        if rank in latest:
            between.append(len(set(order[latest[rank] + 1 : turn])))
        latest[rank] = turn
    assert median(between) < 64

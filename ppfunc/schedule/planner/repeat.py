"""Plan very many microbatches by repeating the middle of a plan for fewer."""

from bisect import bisect_left

from ..costs import Number
from .orders import Direction, Order, Word, evaluate
from .problem import Problem


def fewer_microbatches(p: Problem) -> int:
    """Return how many microbatches to search: all, less a multiple of 12 beyond twice the ranks."""
    least = 2 * p.ranks
    return min(p.microbatches, least + (p.microbatches - least) % 12)


def extend(d: Direction, order: Order, microbatches: int) -> Order | None:
    """Lengthen an order to ``microbatches`` by repeating a stretch of each rank's word; None if none repeats.

    A stretch of q microbatches reaches, on every rank, from the F of the rank's first stage for microbatch x
    to that for x + q, and holds q operations of each code, so that it leaves memory as it was. Of all that
    run, the shortest is kept.

    Args:
        d: the rules of the problem with so many ``microbatches``.
        order: an order of fewer microbatches.
    """
    first = [min(word) for word in order]
    places = [[n for n, code in enumerate(word) if code == f] for word, f in zip(order, first, strict=True)]
    counts = [_counts(word) for word in order]
    more = microbatches - len(places[0])
    best: tuple[Number, Order] | None = None
    for q in (q for q in range(1, len(places[0])) if more % q == 0):
        for x in range(len(places[0]) - q):
            cuts = [(at[x], at[x + q]) for at in places]
            if all(_holds_each(counted, cut, q) for counted, cut in zip(counts, cuts, strict=True)):
                longer = tuple(
                    word[:a] + word[a:b] * (1 + more // q) + word[b:]
                    for word, (a, b) in zip(order, cuts, strict=True)
                )
                timing = evaluate(d, longer)
                if timing and (best is None or timing.value < best[0]):
                    best = timing.value, longer
                break
    return best[1] if best else None


def _counts(word: Word) -> dict[int, list[int]]:
    """Find the places of each code in a word."""
    places: dict[int, list[int]] = {}
    for n, code in enumerate(word):
        places.setdefault(code, []).append(n)
    return places


def _holds_each(places: dict[int, list[int]], cut: tuple[int, int], q: int) -> bool:
    """Tell if the stretch holds q operations of each code."""
    return all(bisect_left(at, cut[1]) - bisect_left(at, cut[0]) == q for at in places.values())

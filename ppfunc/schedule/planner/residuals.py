"""Choose what becomes of residuals in an order: they stay, move to the host, or are computed again."""

from collections.abc import Iterator

from ..instruction import Op
from ..passes.insert import insert_offloads, insert_recomputes
from ..schedule import Schedule
from .orders import FORWARD, INPUT, LEAVE, RETURN, WEIGHT, Order, Word, in_turn, order_of
from .problem import Problem

_WAYS = (Op.RECOMPUTE, Op.OFFLOAD)
_LOOKAHEADS, _SPARE = range(4), (0, 1, 2)  # chunks for copies under way


def residual_orders(p: Problem, schedule: Schedule) -> Iterator[tuple[str, Order]]:
    """Yield a schedule as it is, with all residuals moved or computed again, and with what exceeds the cap.

    Yields:
        The name of the way, and the order.
    """
    stages = {way: [s for s in range(len(p.place)) if allowed(p, s, way)] for way in _WAYS}
    ways, order = [way for way in _WAYS if stages[way]], order_of(schedule)
    yield "", order
    for lookahead in _LOOKAHEADS if Op.OFFLOAD in ways else ():
        yield "all moved", order_of(insert_offloads(schedule, stages[Op.OFFLOAD], lookahead=lookahead))
    if Op.RECOMPUTE in ways:
        again = order_of(insert_recomputes(schedule, stages[Op.RECOMPUTE]))
        yield "all computed again", again
        yield "all computed again in whole backwards", tuple(_whole(p, word) for word in again)
    for some in [*([way] for way in ways), *([ways] if len(ways) > 1 else [])]:
        for spare in _SPARE:
            words = (_fitted(p, rank, word, some, spare) for rank, word in enumerate(order))
            if len(found := [in_turn(p.microbatches, word) for word in words if word]) == p.ranks:
                yield f"some {' or '.join(map(str.lower, some))}", tuple(found)


def _whole(p: Problem, word: Word) -> Word:
    """Put each weight gradient right behind its input gradient."""
    pairs = ((item, item // p.microbatches % 5) for item in word)
    return [
        x
        for item, letter in pairs
        if letter != WEIGHT
        for x in (item, item + p.microbatches)[: 1 + (letter == INPUT)]
    ]


def allowed(p: Problem, stage: int, way: Op) -> bool:
    """Tell whether the residuals of a stage may go this way."""
    return (p.again if way is Op.RECOMPUTE else p.out)[stage] is not None


def _fitted(p: Problem, rank: int, word: Word, ways: list[Op], spare: int) -> Word | None:
    """Make a word fit: where memory is short, weight gradients come first, then the residuals go that are not
    used for longest.

    They move while the link is free on average, else they are computed again. None if nothing fits.

    Args:
        spare: how many of the largest chunks of the cap are left free.
    """
    m, at = p.microbatches, {item: place for place, item in enumerate(word)}
    cap = p.cap[rank] - spare * max(p.held[s] for s in p.stages_by_rank[rank])
    durations = {FORWARD: p.forward, INPUT: p.backward, WEIGHT: p.weight}
    here = dict[tuple[int, int], int]()  # by stage and microbatch, the place of the input gradient
    gone, waiting = (
        dict[tuple[int, int], Op](),
        list[int](),
    )  # where residuals are; weight gradients that wait
    fitted, held, now, link = Word(), 0, 0.0, 0.0

    def run(item: int, change: int) -> None:
        nonlocal held, now
        fitted.append(item)
        held += change
        now += durations[item // m % 5][item // m // 5]

    def make_room(need: int) -> bool:
        nonlocal held, link
        while held + need > cap:
            ready = [(place, key) for key, place in here.items() if any(allowed(p, key[0], w) for w in ways)]
            if waiting and p.kept[waiting[0] // m // 5]:
                run(waiting[0], -p.kept[waiting.pop(0) // m // 5])
            elif ready:
                _, (s, k) = max(ready)
                moves = Op.OFFLOAD in ways and allowed(p, s, Op.OFFLOAD)
                if moves and Op.RECOMPUTE in ways and allowed(p, s, Op.RECOMPUTE):
                    moves = link + (p.out[s] or 0) <= now
                gone[s, k] = Op.OFFLOAD if moves else Op.RECOMPUTE
                del here[s, k]
                held -= p.held[s] - (0 if moves else p.stub[s])
                if moves:
                    link += p.out[s] or 0
                    fitted.append((5 * s + LEAVE) * m + k)
            else:
                return False
        return True

    for item in word:
        code, k = divmod(item, m)
        s, letter = divmod(code, 5)
        if letter == FORWARD:
            if not make_room(p.held[s]):
                return None
            run(item, p.held[s])
            here[s, k] = at[(5 * s + INPUT) * m + k]
        elif letter == INPUT:
            if way := gone.get((s, k)):
                need = p.held[s] - (0 if way is Op.OFFLOAD else p.stub[s])
                if not make_room(need):
                    return None
                held += need
                fitted.append((5 * s + RETURN) * m + k)
            here.pop((s, k), None)
            run(item, p.kept[s] - p.held[s])
            waiting.append(item + m)
        elif item in waiting:
            waiting.remove(item)
            run(item, -p.kept[s])
    return fitted

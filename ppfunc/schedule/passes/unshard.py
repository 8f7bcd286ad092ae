"""Write into a schedule when the parameters of each stage are gathered, and when they are freed."""

from ppfunc._checks import require_counts

from ..instruction import COMPUTE, Instruction, Op, parts_of
from ..proof.order import in_order
from ..schedule import Program, Schedule
from .rewrite import insert, remove_unshards, rewrite

# Before each compute instruction, the stages in the order in which they are next used.
Orders = list[tuple[int, ...]]


def insert_unshards(schedule: Schedule, most: int = 2) -> Schedule:
    """Gather the parameters of a stage before they are used, and free them when others need the place.

    Equivalent to, on each rank::

        for each compute instruction, in order:
            wanted = its stages, and the one that is used next after them where ``most`` allows
            RESHARD what is never used again, then what is used latest until ``wanted`` fits in ``most``
            UNSHARD what is wanted and not there
        RESHARD the rest

    All of them stand right behind the compute instruction before, so that a gather runs beside the next one.
    Those that are there already are replaced.

    Args:
        most: how many stages may be unsharded at once on a rank, at least 1.

    Raises:
        ValueError: ``most`` is less than 1, or than the stages of an overlapped pair.

    References:
        Belady, A study of replacement algorithms for a virtual-storage computer, 1966: free what is used
        latest.

    >>> from ppfunc.schedule import gpipe, looped_bfs
    >>> print(insert_unshards(gpipe(ranks=1, microbatches=1)))
    0UNSHARD+0F0 0B0+0RESHARD
    >>> print(insert_unshards(looped_bfs(ranks=1, microbatches=1, chunks=2), most=1))
    0UNSHARD+0F0+0RESHARD+1UNSHARD 1F0 1B0+1RESHARD+0UNSHARD 0B0+0RESHARD
    """
    require_counts(most=most)
    return rewrite(remove_unshards(schedule), lambda program: _gathered(program, most))


def _gathered(program: Program, most: int) -> Program:
    program = tuple(tuple(i for _, i in in_order(step)) for step in program)
    places = [(s, p) for s, step in enumerate(program) for p, i in enumerate(step) if i.op in COMPUTE]
    uses = [tuple(dict.fromkeys(part.stage for part in parts_of(program[s][p]))) for s, p in places]
    first, *behind = _moves(uses, most)
    return insert(program, dict.fromkeys(places[:1], first), dict(zip(places, behind, strict=True)))


def _moves(uses: list[tuple[int, ...]], most: int) -> list[list[Instruction]]:
    """List the gathers and frees that come before the first use, and those that come after each use."""
    held: set[int] = set()
    moves: list[list[Instruction]] = []
    for now, order in zip([*uses, ()], [*_orders(uses), ()], strict=True):
        if len(now) > most:
            raise ValueError(
                f"most is {most}, but an overlapped pair uses stages {now[0]} and {now[1]} at once: expected"
                " at least 2"
            )
        wanted = order[: min(len(now) + 1, most)]
        # What is not used again comes first, then what is used latest.
        spare = sorted(
            held.difference(wanted), key=lambda s: (s in order, -order.index(s) if s in order else s)
        )
        needed = max(sum(s not in order for s in held), len(held.union(wanted)) - most)
        moves.append([Instruction(Op.RESHARD, s) for s in spare[:needed]])
        moves[-1] += [Instruction(Op.UNSHARD, s) for s in wanted if s not in held]
        held = held.difference(spare[:needed]).union(wanted)
    return moves


def _orders(uses: list[tuple[int, ...]]) -> Orders:
    orders: Orders = []
    order: tuple[int, ...] = ()
    for stages in reversed(uses):
        order = (*stages, *(s for s in order if s not in stages))
        orders.append(order)
    return orders[::-1]

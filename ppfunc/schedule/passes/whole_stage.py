"""Write the instructions of whole stages: gathers of parameters, sums of gradients, optimizer steps."""

from collections.abc import Collection
from dataclasses import replace

from ppfunc._checks import require_counts, require_stages

from ..errors import require_schedule
from ..instruction import COMPUTE, SHARDING, TAIL, Instruction, Op, parts_of
from ..proof.order import in_order
from ..schedule import Program, Schedule, Step
from .rewrite import cross_out, insert, remove_unshards, rewrite


def append_tail(
    schedule: Schedule,
    *,
    tied: bool | Collection[int] | None = None,
    reduce_grad: bool = True,
    step: bool = True,
) -> Schedule:
    """Add one last step to every rank: the reductions and optimizer steps of all its stages.

    Equivalent to, on each rank::

        for stage in stages: sum the gradients of its tied parameters and replicas
        for stage in stages: sum the gradients over the data parallel ranks
        for stage in stages: step the optimizer

    What a stage has already stays where it is, unless something is added that must come before it. Replicas
    of a stage come in the order of their groups, so that no two ranks wait for each other in different sums.

    Args:
        tied: the stages that get REDUCE_TIED, or whether all do: a stage in which nothing is tied has nothing
            to add to the sums. By default all where the chains hold replicas of stages, else none.
        reduce_grad: whether to write REDUCE_GRAD, in every stage.
        step: whether to write STEP, in every stage.

    Raises:
        ValueError: a tied stage that does not exist.

    >>> from ppfunc.schedule import gpipe
    >>> print(*append_tail(gpipe(ranks=1, microbatches=1), tied=True).programs[0][-1])
    0REDUCE_TIED 0REDUCE_GRAD 0STEP
    >>> print(append_tail(gpipe(ranks=2, microbatches=1), tied=[1], step=False))
    0F0 0B0 0REDUCE_GRAD
    1F0 1B0 1REDUCE_TIED+1REDUCE_GRAD
    """
    require_schedule(schedule)
    tied = bool(schedule.replicas) if tied is None else tied
    if isinstance(tied, bool):
        tied = range(schedule.stages) if tied else ()
    chosen = require_stages("tied", tied, schedule.stages)
    there = {
        (i.op, i.stage) for program in schedule.programs for step in program for i in step if i.op in TAIL
    }
    added: list[Instruction] = []
    group = {stage: number for number, stages in enumerate(schedule.replicas) for stage in stages}
    for stage in sorted(range(schedule.stages), key=lambda s: (group.get(s, s), s)):
        wanted = {Op.REDUCE_TIED: stage in chosen, Op.REDUCE_GRAD: reduce_grad, Op.STEP: step}
        ops = [op for op in TAIL if wanted[op] or (op, stage) in there]
        first = next((n for n, op in enumerate(ops) if (op, stage) not in there), len(ops))
        added += [Instruction(op, stage) for op in ops[first:]]
    tails = [
        tuple(i for op in TAIL for i in added if i.op is op and schedule.placement[i.stage] == r)
        for r in range(schedule.ranks)
    ]
    bare = cross_out(schedule, added.__contains__)
    return replace(
        bare, programs=tuple((*p, tail) if tail else p for p, tail in zip(bare.programs, tails, strict=True))
    )


def reduce_early(schedule: Schedule) -> Schedule:
    """Put every REDUCE_GRAD right behind the last backward of its stage, to overlap other compute.

    Equivalent to: cross out every REDUCE_GRAD; after the last B or W of each stage and the gathers that stand
    behind it, or after its REDUCE_TIED where that is later, write REDUCE_GRAD. A schedule without a backward
    stays as it is.

    >>> from ppfunc.schedule import append_tail, gpipe
    >>> print(reduce_early(append_tail(gpipe(ranks=1, microbatches=1))))
    0F0 0B0+0REDUCE_GRAD 0STEP
    """
    require_schedule(schedule)
    if schedule.forward_only:
        return schedule
    return rewrite(cross_out(schedule, lambda i: i.op is Op.REDUCE_GRAD), _with_reductions)


def _behind_unshards(step: Step, place: int) -> int:
    return next((n for n in range(place, len(step) - 1) if step[n + 1].op not in SHARDING), len(step) - 1)


def _with_reductions(program: Program) -> Program:
    last: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(program):
        for place, instruction in enumerate(step):
            for part in parts_of(instruction):
                if part.op in (Op.B, Op.W, Op.REDUCE_TIED):
                    last[part.stage] = (number, place)
        # Parameters that are gathered for the next compute come first.
        last |= {s: (n, _behind_unshards(step, place)) for s, (n, place) in last.items() if n == number}
    behind: dict[tuple[int, int], list[Instruction]] = {}
    for stage, position in sorted(last.items()):
        behind.setdefault(position, []).append(Instruction(Op.REDUCE_GRAD, stage))
    return insert(program, {}, behind)


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

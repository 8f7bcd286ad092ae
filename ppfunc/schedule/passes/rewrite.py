"""Rewrite the programs of a schedule, one rank at a time.

Passes take instructions or slots out, split and merge backwards, and write what values take beside compute
(loads, skips, offloads, recomputes) and what whole stages take: gathers, sums of gradients, optimizer steps.
"""

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from ppfunc._checks import naming_arguments, require_counts, require_stages

from ..errors import require_schedule
from ..instruction import (
    COMMUNICATION,
    COMPUTE,
    RESIDUAL_OPS,
    SHARDING,
    TAIL,
    Instruction,
    Op,
    elementary,
    parts_of,
)
from ..proof.order import in_order
from ..schedule import Program, Schedule, Step

Place = tuple[int, int]
"""Step, and place in the step."""
Insertions = Mapping[Place, Sequence[Instruction]]


def rewrite(schedule: Schedule, program_of: Callable[[Program], Iterable[Step]]) -> Schedule:
    """Return the schedule with each program replaced by ``program_of(program)``.

    Raises:
        ScheduleError: a value that is no schedule.
    """
    require_schedule(schedule)
    return replace(schedule, programs=tuple(tuple(program_of(program)) for program in schedule.programs))


def cross_out(schedule: Schedule, unwanted: Callable[[Instruction], bool]) -> Schedule:
    """Return the schedule without some instructions; a step that held nothing else is dropped."""

    def program_of(program: Program) -> Iterable[Step]:
        steps = ((step, tuple(i for i in step if not unwanted(i))) for step in program)
        return (new for old, new in steps if new or not old)

    return rewrite(schedule, program_of)


def insert(program: Program, before: Insertions, behind: Insertions) -> Program:
    """Write instructions before and behind some places of a program: the step, and the place in it."""
    return tuple(
        tuple(
            new
            for place, i in enumerate(step)
            for new in (*before.get((number, place), ()), i, *behind.get((number, place), ()))
        )
        for number, step in enumerate(program)
    )


@naming_arguments
def remove_communication(schedule: Schedule) -> Schedule:
    """Cross out every SEND and RECV; a step that held nothing else is dropped.

    For a compute-only schedule without idle steps it undoes ``place_communication``.

    >>> from ppfunc.schedule import gpipe, place_communication
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> remove_communication(place_communication(schedule)) == schedule
    True
    """
    return cross_out(schedule, lambda i: i.op in COMMUNICATION)


@naming_arguments
def remove_tail(schedule: Schedule) -> Schedule:
    """Cross out REDUCE_TIED, REDUCE_GRAD and STEP: undoes ``append_tail``.

    >>> from ppfunc.schedule import append_tail, gpipe
    >>> remove_tail(append_tail(gpipe(ranks=1, microbatches=1))) == gpipe(ranks=1, microbatches=1)
    True
    """
    return cross_out(schedule, lambda i: i.op in TAIL)


@naming_arguments
def remove_unshards(schedule: Schedule) -> Schedule:
    """Cross out UNSHARD and RESHARD: undoes ``insert_unshards``.

    >>> from ppfunc.schedule import gpipe, insert_unshards
    >>> remove_unshards(insert_unshards(gpipe(ranks=1, microbatches=1))) == gpipe(ranks=1, microbatches=1)
    True
    """
    return cross_out(schedule, lambda i: i.op in SHARDING)


@naming_arguments
def remove_slots(schedule: Schedule) -> Schedule:
    """Return the schedule without slots; passes that add instructions begin with this.

    >>> from ppfunc.schedule import allocate_slots, gpipe
    >>> remove_slots(allocate_slots(gpipe(ranks=2, microbatches=2))) == gpipe(ranks=2, microbatches=2)
    True
    """
    require_schedule(schedule)
    if not schedule.has_slots:
        return schedule
    return rewrite(schedule, lambda program: (tuple(map(_bare, step)) for step in program))


@naming_arguments
def compute_only(schedule: Schedule) -> Schedule:
    """Keep the compute of ``schedule``, as builders write it; a step without compute becomes idle.

    All residuals are kept then: nothing is computed again.

    >>> from ppfunc.schedule import deepspeed_train
    >>> print(*compute_only(deepspeed_train(ranks=2, microbatches=1)).instructions(1))
    1F0 1B0
    """
    kept = COMPUTE - {Op.RECOMPUTE}
    return remove_slots(
        rewrite(schedule, lambda program: (tuple(i for i in step if i.op in kept) for step in program))
    )


@naming_arguments
def forward_only(schedule: Schedule) -> Schedule:
    """Keep the loads and forwards in their order, without communication: the schedule for evaluation.

    Equivalent to: cross out every backward, reduction and message; an overlapped pair leaves its forward.
    """
    kept = rewrite(schedule, lambda program: filter(None, map(_forwards, program)))
    return replace(kept, name=f"{schedule.name} (forward only)")


def _bare(instruction: Instruction) -> Instruction:
    return instruction._replace(slot=None, parts=tuple(map(_bare, instruction.parts)))


def _forwards(step: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return tuple(part for i in step for part in parts_of(i) if part.op in (Op.F, Op.LOAD))


@naming_arguments
def split_backward(schedule: Schedule, *, overlapped: bool = False) -> Schedule:
    """Replace every B by I and then, in a step of its own, W.

    Equivalent to: after each instruction that holds a B, write the W of the same stage and
    microbatch, and turn that B into I. ``merge_backward`` undoes it.

    Args:
        overlapped: whether the backward of an overlapped pair is split too.

    >>> from ppfunc.schedule import gpipe
    >>> print(*split_backward(gpipe(ranks=1, microbatches=1)).instructions(0))
    0F0 0I0 0W0
    """
    return rewrite(schedule, lambda program: _split_program(program, overlapped))


def _split_program(program: Program, overlapped: bool) -> Iterator[Step]:
    for step in program:
        now: list[Instruction] = []
        for _, instruction in in_order(step):
            first, weight = _split(instruction, overlapped)
            now.append(first)
            if weight is not None:
                yield tuple(now)
                now = [weight]
        if now or not step:
            yield tuple(now)


def _split(instruction: Instruction, overlapped: bool) -> tuple[Instruction, Instruction | None]:
    if instruction.op is Op.B:
        return instruction._replace(op=Op.I), instruction._replace(op=Op.W)
    if overlapped and instruction.parts and instruction.parts[1].op is Op.B:
        forward, backward = instruction.parts
        return instruction._replace(parts=(forward, backward._replace(op=Op.I))), backward._replace(op=Op.W)
    return instruction, None


@naming_arguments
def merge_backward(schedule: Schedule) -> Schedule:
    """Replace an I and the W of the same stage and microbatch by B where nothing stands between them.

    Equivalent to: wherever W directly follows its I in the instructions of a rank (in the same
    step or a later one), cross it out and turn I into B; a step that becomes empty is dropped.

    >>> from ppfunc.schedule import gpipe, split_backward
    >>> schedule = gpipe(ranks=2, microbatches=2)
    >>> merge_backward(split_backward(schedule)) == schedule
    True
    """
    return rewrite(schedule, _merge_program)


def _merge_program(program: Program) -> Program:
    steps: list[list[Instruction]] = []
    last: tuple[int, int] | None = None  # step and place of the instruction before
    for step in program:
        steps.append([])
        for instruction in step:
            if instruction.op is Op.W and last is not None:
                merged = _merged(steps[last[0]][last[1]], instruction)
                if merged is not None:
                    steps[last[0]][last[1]] = merged
                    continue
            steps[-1].append(instruction)
            last = (len(steps) - 1, len(steps[-1]) - 1)
    return tuple(tuple(new) for new, old in zip(steps, program, strict=True) if new or not old)


def _merged(before: Instruction, weight: Instruction) -> Instruction | None:
    """Return ``before`` with its I turned into B, if ``weight`` belongs to that I."""
    if before.parts:
        backward = _merged(before.parts[1], weight)
        return None if backward is None else before._replace(parts=(before.parts[0], backward))
    same = (before.op, before.stage, before.microbatch) == (Op.I, weight.stage, weight.microbatch)
    return before._replace(op=Op.B) if same else None


def _insert_before(
    schedule: Schedule, op: Op, unless: Set[Op], wanted: Callable[[Op, int], bool]
) -> Schedule:
    """Write ``op`` before the instructions that want it, unless their microbatch has ``unless``.

    Args:
        schedule: a schedule, whose slots are taken away.
        op: the operation to write.
        unless: operations of which none may stand in the stage for the microbatch.
        wanted: function of the op and the stage of a part; before which parts it is written.
    """
    bare = remove_slots(schedule)
    there = {part[1:3] for program in bare.programs for part in elementary(program) if part.op in unless}

    def new(instruction: Instruction) -> Iterator[Instruction]:
        for part in parts_of(instruction):
            if wanted(part.op, part.stage) and part[1:3] not in there:
                yield Instruction(op, part.stage, part.microbatch)

    def written(step: Step) -> Step:
        ordered = tuple(i for old in _messages_first(step) for i in (*new(old), old))
        return ordered if len(ordered) > len(step) else step

    return rewrite(bare, lambda program: map(written, program))


@naming_arguments
def insert_loads(schedule: Schedule, *, targets: bool | None = None) -> Schedule:
    """Put a LOAD right before every forward that takes data: inputs first, targets last.

    Equivalent to: before each F of a stage that takes the batch, and of the last stage of a flow where
    targets are wanted, write the LOAD of the same microbatch, unless it is loaded anywhere already.

    Args:
        targets: whether last stages load; by default where there is a backward.

    >>> from ppfunc.schedule import inference
    >>> print(*insert_loads(inference(ranks=1, microbatches=2)).instructions(0))
    0LOAD0 0F0 0LOAD1 0F1
    """
    require_schedule(schedule)
    targets = not schedule.forward_only if targets is None else targets
    loading = schedule.heads | (schedule.ends if targets else set())
    return _insert_before(schedule, Op.LOAD, {Op.LOAD}, lambda op, stage: op is Op.F and stage in loading)


def _messages_first(step: Step) -> Step:
    return tuple(sorted(step, key=lambda i: i.op not in COMMUNICATION))


@naming_arguments
def insert_offloads(
    schedule: Schedule, stages: Iterable[int] | None = None, *, lookahead: int = 1
) -> Schedule:
    """Move residuals away after their forward and back before the backward that uses them first.

    Equivalent to: behind the compute instruction that comes ``lookahead`` compute instructions after each F
    of the chosen stages write OFFLOAD, which waits for the copy that begins with the end of F; before the one
    that comes as many before its B or I, write FETCH. Residuals that would not be away during any compute
    instruction stay where they are, and so do those that move already or are computed again. A plan
    with a cap and costs of ``offload`` moves only residuals that exceed the cap.

    Args:
        stages: the stages whose residuals move; all of them by default.
        lookahead: compute instructions of the rank that hide each way.

    Raises:
        ValueError: a negative lookahead, or a stage that does not exist.

    >>> from ppfunc.schedule import gpipe
    >>> print(*insert_offloads(gpipe(ranks=1, microbatches=4)).instructions(0))
    0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0FETCH0 0F3 0OFFLOAD2 0FETCH1 0B0 0OFFLOAD3 0FETCH2 0B1 0FETCH3 0B2 0B3
    """
    require_schedule(schedule)
    chosen = require_stages("stages", range(schedule.stages) if stages is None else stages, schedule.stages)
    require_counts(0, lookahead=lookahead)
    return rewrite(remove_slots(schedule), lambda program: _moved(program, chosen, lookahead))


def _moved(program: Program, chosen: set[int], lookahead: int) -> Program:
    """Write OFFLOAD behind the forwards, and FETCH before the backwards, of residuals that move."""
    program = tuple(map(_messages_first, program))
    there = {i[1:3] for step in program for i in step if i.op in RESIDUAL_OPS}
    places = [(s, p) for s, step in enumerate(program) for p, i in enumerate(step) if i.op in COMPUTE]
    forwards: dict[tuple[int, int | None], int] = {}  # the number of the compute instruction
    leave: dict[Place, list[Instruction]] = {}
    back: dict[Place, list[Instruction]] = {}
    for number, (at, place) in enumerate(places):
        for op, stage, microbatch, *_ in parts_of(program[at][place]):
            residuals = stage, microbatch
            if op is Op.F:
                forwards[residuals] = number + lookahead
            elif op in (Op.B, Op.I) and stage in chosen and residuals not in there and residuals in forwards:
                gone, needed = forwards[residuals], number - lookahead
                if gone + 1 < needed:
                    leave.setdefault(places[gone], []).append(Instruction(Op.OFFLOAD, *residuals))
                    back.setdefault(places[needed], []).append(Instruction(Op.FETCH, *residuals))
    return insert(program, back, leave)


@naming_arguments
def insert_recomputes(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """Keep only the inputs of forwards, which run again right before their backwards.

    Equivalent to: before each B or I of the chosen stages, or the pair that holds it, write RECOMPUTE, unless
    its residuals move, or are computed again already.

    Args:
        stages: the stages to compute again; all of them by default.

    Raises:
        ValueError: a stage that does not exist.

    >>> from ppfunc.schedule import gpipe
    >>> print(*insert_recomputes(gpipe(ranks=1, microbatches=2)).instructions(0))
    0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1
    """
    require_schedule(schedule)
    chosen = require_stages("stages", range(schedule.stages) if stages is None else stages, schedule.stages)
    return _insert_before(
        schedule, Op.RECOMPUTE, RESIDUAL_OPS, lambda op, stage: op in (Op.B, Op.I) and stage in chosen
    )


@naming_arguments
def with_skips(schedule: Schedule, skips: Collection[tuple[int, int]]) -> Schedule:
    """Add skip connections: ``Output.skips`` carries values from one stage to a later one.

    In a schedule of slices without a backward, one may lead back to an earlier stage: its value goes to the
    next slice of the sequence, as a model generates text from its own output. The first slice gets None.

    Args:
        schedule: any; its communication is placed anew if it has some.
        skips: ``(source stage, destination stage)`` of each, stages of the model. The source returns
            ``Output(y, skips={destination: tree})``, the destination gets ``Received(x, {source: tree})`` in
            the place of ``x``. Replicas have the same ones.

    Raises:
        TypeError: not a list of pairs.
        ValueError: a stage does not exist, or the destination is the source or its neighbour, or before it in
            a schedule without slices or with a backward.

    >>> from ppfunc import gpipe
    >>> with_skips(gpipe(ranks=3, microbatches=2), [(0, 2)]).skips
    ((0, 2),)
    """
    require_schedule(schedule)
    if not isinstance(skips, Collection) or not all(
        isinstance(edge, tuple | list) and len(edge) == 2 for edge in skips
    ):
        raise TypeError(
            f"skips: got {reprlib.repr(skips)} of type {type(skips).__name__}, expected a list of pairs"
            " (source, destination)"
        )
    flows = [{schedule.model_stages[s]: s for s in flow.stages} for flow in schedule.flows]
    along = {pair for flow in schedule.flows for pair in flow.pairs}
    edges = []
    for source, destination in skips:
        pairs = [(of[source], of[destination]) for of in flows if {source, destination} <= of.keys()]
        if not pairs or source == destination or not along.isdisjoint(pairs):
            raise ValueError(
                f"skips: got {(source, destination)}, expected (source, destination), two stages of the model"
                " with another one between them"
            )
        if any(schedule.shift(*pair) for pair in pairs) and not (schedule.slices and schedule.forward_only):
            raise ValueError(
                f"skips: got {(source, destination)}, expected (source, destination) in order: it leads"
                f" back to the next slice of a sequence, and {schedule.name} has"
                f" {'a backward' if schedule.slices else 'no slices'}; schedules such as decode can"
            )
        edges += pairs
    bare = remove_communication(schedule) if schedule.ops & {Op.SEND_F, Op.RECV_F} else schedule
    return replace(bare, skips=tuple(dict.fromkeys((*schedule.skips, *edges))))


@naming_arguments
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
            to add to the sums. By default all where stages have replicas, else none.
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


@naming_arguments
def reduce_early(schedule: Schedule) -> Schedule:
    """Put every REDUCE_GRAD right behind the last backward of its stage, to overlap other compute.

    Equivalent to: cross out every REDUCE_GRAD; after the last B or W of each stage and the gathers that stand
    behind it, or after the REDUCE_TIED of its rank where its own is later, write REDUCE_GRAD. A schedule
    without a backward stays as it is.

    >>> from ppfunc.schedule import append_tail, gpipe
    >>> print(reduce_early(append_tail(gpipe(ranks=1, microbatches=1))))
    0F0 0B0+0REDUCE_GRAD 0STEP
    """
    require_schedule(schedule)
    if schedule.forward_only:
        return schedule
    return rewrite(cross_out(schedule, lambda i: i.op is Op.REDUCE_GRAD), _with_reductions)


def _behind(step: Step, place: int) -> int:
    passed = {*SHARDING, Op.REDUCE_TIED}
    return next((n for n in range(place, len(step) - 1) if step[n + 1].op not in passed), len(step) - 1)


def _with_reductions(program: Program) -> Program:
    last: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(program):
        for place, instruction in enumerate(step):
            for part in parts_of(instruction):
                if part.op in (Op.B, Op.W, Op.REDUCE_TIED):
                    last[part.stage] = (number, place)
        # Parameters that are gathered for the next compute come first, and sums of copies on this rank, which
        # wait for each other.
        last |= {s: (n, _behind(step, place)) for s, (n, place) in last.items() if n == number}
    behind: dict[tuple[int, int], list[Instruction]] = {}
    for stage, position in sorted(last.items()):
        behind.setdefault(position, []).append(Instruction(Op.REDUCE_GRAD, stage))
    return insert(program, {}, behind)


# Before each compute instruction, the stages in the order in which they are next used.
Orders = list[tuple[int, ...]]


@naming_arguments
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
        most: number of stages that may be unsharded at once on a rank, at least 1.

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
    """List the gathers and frees that come before the first use, and after each use."""
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
    orders = accumulate(reversed(uses), lambda after, now: (*now, *(s for s in after if s not in now)))
    return [*orders][::-1]

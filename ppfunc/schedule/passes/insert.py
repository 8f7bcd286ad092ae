"""Write into a schedule what its values take beside compute: loads, skips, offloads and recomputes."""

import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ppfunc._checks import require_counts, require_stages

from ..costs import Costs, Number, require_costs
from ..errors import require_schedule
from ..instruction import COMMUNICATION, COMPUTE, RESIDUAL_OPS, Instruction, Op, parts_of
from ..schedule import Program, Schedule, Step
from .rewrite import Place, insert, remove_communication, remove_slots, rewrite

Residuals = tuple[int, int | None]  # stage, microbatch


def insert_loads(schedule: Schedule, *, targets: bool | None = None) -> Schedule:
    """Put a LOAD into the step of every forward that takes data: inputs first, targets last.

    Equivalent to: before each F of the first stage of a chain, and of the last one where targets
    are wanted, and after the communications of the step, write the LOAD of the same microbatch, unless it is
    loaded anywhere already.

    Args:
        targets: whether last stages load; by default where there is a backward.

    >>> from ppfunc.schedule import inference
    >>> print(*insert_loads(inference(ranks=1, microbatches=2)).instructions(0))
    0LOAD0 0F0 0LOAD1 0F1
    """
    require_schedule(schedule)
    targets = not schedule.forward_only if targets is None else targets
    loading = {c.stages[0] for c in schedule.chains} | {c.stages[-1] for c in schedule.chains if targets}
    bare = remove_slots(schedule)
    parts = (part for p in bare.programs for step in p for i in step for part in parts_of(i))
    there = frozenset((p.stage, p.microbatch) for p in parts if p.op is Op.LOAD)
    return rewrite(bare, lambda program: (_with_loads(step, loading, there) for step in program))


def _with_loads(step: Step, loading: set[int], there: frozenset[tuple[int, int | None]]) -> Step:
    loads = tuple(
        Instruction(Op.LOAD, p.stage, p.microbatch)
        for i in step
        for p in parts_of(i)
        if p.op is Op.F and p.stage in loading and (p.stage, p.microbatch) not in there
    )
    if not loads:
        return step
    step = _messages_first(step)
    messages = sum(i.op in COMMUNICATION for i in step)
    return (*step[:messages], *loads, *step[messages:])


def _messages_first(step: Step) -> Step:
    return tuple(sorted(step, key=lambda i: i.op not in COMMUNICATION))


def insert_offloads(
    schedule: Schedule,
    stages: Iterable[int] | None = None,
    *,
    lookahead: int = 1,
    cap: Number | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Move residuals away after their forward and back before the backward that uses them first.

    Equivalent to: behind the compute instruction that comes ``lookahead`` compute instructions after each F
    of the chosen stages write OFFLOAD, which waits for the copy that begins with the end of F; before the one
    that comes as many before its B or I, write FETCH. Residuals that would not be away during any compute
    instruction stay where they are, and so do those that move already or are computed again. With a cap only
    those move that exceed it, the longest unused first.

    Args:
        stages: the stages whose residuals move; all of them by default.
        lookahead: compute instructions of the rank that hide each way.
        cap: the most memory of residuals on a rank, in the unit of the costs: bytes, with those of
            ``step.lower(...).costs()``.
        costs: sizes of residuals; by default 1 each.

    Raises:
        ValueError: a negative lookahead, or a stage that does not exist; or residuals exceed the cap that
            cannot be away.

    >>> from ppfunc.schedule import gpipe
    >>> print(*insert_offloads(gpipe(ranks=1, microbatches=4), cap=3).instructions(0))
    0F0 0F1 0F2 0OFFLOAD1 0F3 0OFFLOAD2 0FETCH1 0B0 0FETCH2 0B1 0B2 0B3
    """
    require_schedule(schedule)
    chosen = require_stages("stages", range(schedule.stages) if stages is None else stages, schedule.stages)
    require_counts(0, lookahead=lookahead)
    costs = require_costs(costs).fitting(schedule.stages)
    return rewrite(remove_slots(schedule), lambda program: _moved(program, chosen, lookahead, cap, costs))


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
    bare = remove_slots(schedule)
    away = {i[1:3] for r in range(bare.ranks) for i in bare.instructions(r) if i.op in RESIDUAL_OPS}

    def again(instruction: Instruction) -> Iterator[Instruction]:
        for part in parts_of(instruction):
            if part.op in (Op.B, Op.I) and part.stage in chosen and part[1:3] not in away:
                yield Instruction(Op.RECOMPUTE, part.stage, part.microbatch)

    return rewrite(
        bare,
        lambda p: (tuple(new for i in step for new in (*again(i), i)) for step in map(_messages_first, p)),
    )


def _moved(program: Program, chosen: set[int], lookahead: int, cap: Number | None, costs: Costs) -> Program:
    """Write OFFLOAD behind the forwards, and FETCH before the backwards, of residuals that move."""
    program = tuple(map(_messages_first, program))
    away = {i[1:3] for step in program for i in step if i.op in RESIDUAL_OPS}
    places = [(s, p) for s, step in enumerate(program) for p, i in enumerate(step) if i.op in COMPUTE]
    forwards: dict[Residuals, int] = {}  # the number of the compute instruction
    spans: dict[Residuals, range] = {}  # the compute instructions during which they may be away
    held: list[Number] = [0] * len(places)  # during each compute instruction
    for number, (at, place) in enumerate(places):
        for op, stage, microbatch, *_ in parts_of(program[at][place]):
            residuals, size = (stage, microbatch), costs.of("activation", stage)
            if op in (Op.F, Op.RECOMPUTE):
                if residuals in forwards:
                    _add(held, range(forwards[residuals], forwards[residuals] + 1), size)
                    _add(held, range(forwards[residuals] + 1, number), costs.of("checkpoint", stage))
                forwards[residuals] = number
            elif residuals in forwards:
                share = costs.of("weight_share", stage) if op is Op.W else 1
                start, forwards[residuals] = forwards[residuals], number + 1  # what W needs is held on
                _add(held, range(start, number + 1), share * size)
                if op is not Op.W and stage in chosen and residuals not in away:
                    spans[residuals] = range(start + 1 + lookahead, number - lookahead)
    spans = {residuals: span for residuals, span in spans.items() if span}
    leave: dict[Place, list[Instruction]] = {}
    back: dict[Place, list[Instruction]] = {}
    for residuals in spans if cap is None else _exceeding(held, spans, cap, costs):
        start, stop = spans[residuals].start, spans[residuals].stop
        leave.setdefault(places[start - 1], []).append(Instruction(Op.OFFLOAD, *residuals))
        back.setdefault(places[stop], []).append(Instruction(Op.FETCH, *residuals))
    return insert(program, back, leave)


def _exceeding(
    held: list[Number], spans: Mapping[Residuals, range], cap: Number, costs: Costs
) -> list[Residuals]:
    """Choose residuals to be away so that the others fit, those with the longest spans first, in order."""
    moving = set[Residuals]()
    for number in range(len(held)):
        while held[number] > cap:
            there = [r for r, span in spans.items() if number in span and r not in moving]
            if not there:
                raise ValueError(
                    f"cap: got {cap}, expected {held[number]} or more: so much is in use, or too soon, at"
                    f" compute instruction {number} of a rank; offload more stages, or raise it"
                )
            longest = max(there, key=lambda residuals: len(spans[residuals]))
            moving.add(longest)
            _add(held, spans[longest], -costs.of("activation", longest[0]))
    return [residuals for residuals in spans if residuals in moving]


def _add(held: list[Number], numbers: range, size: Number) -> None:
    for number in numbers:
        held[number] += size


def with_skips(schedule: Schedule, skips: Collection[tuple[int, int]]) -> Schedule:
    """Add skip connections: ``Output.skips`` carries values from one stage to a later one.

    Args:
        schedule: any; its communication is placed anew if it has some.
        skips: ``(source stage, destination stage)`` of each, stages of the model, the source before the
            destination. The source returns ``Output(y, skips={destination: tree})``, the destination gets
            ``Received(x, {source: tree})`` in the place of ``x``. Replicas have the same ones.

    Raises:
        TypeError: not a list of pairs.
        ValueError: a stage does not exist, or the destination does not come after the source and its
            neighbour.

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
    places = {schedule.model_stages[stage]: place for place, stage in enumerate(schedule.chains[0].stages)}
    for source, destination in skips:
        if not {source, destination} <= places.keys() or places[destination] < places[source] + 2:
            raise ValueError(
                f"skips: got {(source, destination)}, expected (source, destination), two stages of the model"
                " with another one between them"
            )
    edges = [(c.stages[places[a]], c.stages[places[b]]) for a, b in skips for c in schedule.chains]
    bare = remove_communication(schedule) if schedule.ops & {Op.SEND_F, Op.RECV_F} else schedule
    return replace(bare, skips=tuple(dict.fromkeys(edges)))

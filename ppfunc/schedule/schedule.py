"""Hold the programs of all ranks in one immutable value."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import chain, compress, pairwise
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from ppfunc._checks import naming_arguments, naming_attributes, require_index, require_type
from ppfunc.parallel.topology import stages_of

from .collector import collector_paused
from .instruction import COMMUNICATION, Instruction, Op

Step = tuple[Instruction, ...]
"""Instructions whose messages are posted together."""
Program = tuple[Step, ...]


@naming_arguments
class Flow(NamedTuple):
    """The way of a set of microbatches through the stages: a chain, or a graph.

    Two flows may share stages. An edge between two stages is in every flow that has both.

    Args:
        stages: stage numbers in the order of the forward, each after the stages that it needs. The last stage
            has the loss function.
        microbatches: the numbers of the microbatches: a range, or where they are not consecutive an
            ascending tuple.
        edges: pairs ``(a, b)``, where the output of stage ``a`` is the input of stage ``b``; None for a
            chain, from each stage to the stage after it. The output goes to all stages with an edge from
            ``a``; where several edges lead to ``b``, its input is the tuple of their outputs, in the order
            of ``stages``. A stage to which no edge leads takes the batch.
    """

    stages: tuple[int, ...]
    microbatches: range | tuple[int, ...]
    edges: tuple[tuple[int, int], ...] | None = None

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """List the edges of a graph or of a chain."""
        return tuple(pairwise(self.stages)) if self.edges is None else self.edges


@naming_arguments
@naming_attributes
@dataclass(frozen=True, repr=False)
class Schedule:
    """The programs of all ranks as one value: hashable, comparable, with a stable digest.

    A step is a tuple of instructions, a program a rank's tuple of steps. A step posts its
    communications together as one batch, then loads, then computes; the compute waits for
    the receives that it consumes, wherever they were posted.

    ``str`` gives one line per rank: steps apart by a blank, the instructions of a step joined
    by ``+``, ``.`` for an idle step. :func:`ppfunc.schedule.to_grid` draws it on a scale of time.

    Args:
        name: the name of the builder that made it, or of the file it was read from.
        placement: rank of every stage; ``placement[s]`` holds stage ``s``.
        flows: the ways of the microbatches through the stages.
        programs: program of each rank.
        skips: additional edges ``(source stage, destination stage)`` of skip connections. One that leads back
            to an earlier stage goes to the next slice of the sequence.
        slices: number k of slices of a sequence, 0 where stages have no carry. Microbatch ``m`` is slice
            ``m % k`` of sequence ``m // k``. Every stage hands a carry from a slice to the next slice of the
            sequence, and its gradient back: an edge from the stage to itself that is shifted by one
            microbatch. With one slice, carries begin and end with each microbatch.
        replicas: groups of stages that are copies of one stage of the model, with the same parameters. With
            chains ``0..p-1`` and ``p..2p-1``: ``(0, p), (1, p+1), ...``.
    """

    name: str
    placement: tuple[int, ...]
    flows: tuple[Flow, ...]
    programs: tuple[Program, ...]
    skips: tuple[tuple[int, int], ...] = ()
    slices: int = 0
    replicas: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            " ".join("+".join(map(str, step)) or "." for step in program) for program in self.programs
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, ranks={self.ranks}, stages={self.stages},"
            f" microbatches={self.microbatches},{f' slices={self.slices},' if self.slices else ''}"
            f" instructions={sum(self.counts.values())},"
            f" digest={self.digest[:12]!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Copies compute anew what is cached beside the fields.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    _repr_pretty_: ClassVar[Callable[..., None]]  # see formats/__init__.py
    _repr_svg_: ClassVar[Callable[..., str | None]]

    @cached_property
    def ranks(self) -> int:
        """Count the ranks."""
        return len(self.programs)

    @cached_property
    def stages(self) -> int:
        """Count the stages, each replica too."""
        return len(self.placement)

    @property
    def per_sequence(self) -> int:
        """Count the microbatches of a sequence, 1 where they are no slices."""
        return max(self.slices, 1)

    @property
    def sequences(self) -> int:
        """Count the sequences over all flows, which are the microbatches where there are no slices."""
        return self.microbatches // self.per_sequence

    @cached_property
    def microbatches(self) -> int:
        """Count the microbatches over all flows."""
        return max((f.microbatches[-1] + 1 for f in self.flows), default=0)

    @cached_property
    def numbers(self) -> tuple[range | tuple[int, ...], ...]:
        """List the microbatches of every stage, ascending."""
        through: list[list[range | tuple[int, ...]]] = [[] for _ in self.placement]
        for flow in self.flows:
            for stage in flow.stages:
                through[stage].append(flow.microbatches)
        return tuple(map(merged, through))

    @cached_property
    def walked(self) -> tuple[range | frozenset[int], ...]:
        """Return the microbatches of every stage, to look numbers up in."""
        return tuple(m if isinstance(m, range) else frozenset(m) for m in self.numbers)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """List the stages that ``rank`` holds, ascending."""
        require_index("rank", rank, self.ranks)
        return stages_of(self.placement, rank)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Iterate over the instructions of ``rank`` in order, steps opened up, overlapped pairs whole."""
        require_index("rank", rank, self.ranks)
        return (i for step in self.programs[rank] for i in step)

    def _flat(self) -> Iterator[Instruction]:
        """Iterate over the instructions of all ranks."""
        return chain.from_iterable(chain.from_iterable(self.programs))

    @cached_property
    def counts(self) -> dict[Op, int]:
        """Count the instructions of each kind that occurs, overlapped pairs as pairs."""
        return dict(Counter(map(itemgetter(0), self._flat())))

    @cached_property
    def ops(self) -> frozenset[Op]:
        """Return the kinds of instruction that occur; overlapped pairs and their parts both count."""
        ops = set(self.counts)
        if Op.OVERLAP_F_B in ops:
            ops |= {part.op for i in self._flat() for part in i.parts}
        return frozenset(ops)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int | None]]:
        """Return stage and microbatch of every forward that keeps only its inputs, for a RECOMPUTE."""
        return frozenset(
            (i.stage, i.microbatch)
            for i in (self._flat() if Op.RECOMPUTE in self.counts else ())
            if i.op is Op.RECOMPUTE
        )

    @cached_property
    def has_slots(self) -> bool:
        """Tell whether any instruction names a slot."""
        if Op.OVERLAP_F_B in self.counts and any(p.slot is not None for i in self._flat() for p in i.parts):
            return True
        return not set(map(itemgetter(4), self._flat())) <= {None}

    @property
    def has_messages(self) -> bool:
        """Tell whether communication has been placed. True where no two ranks exchange anything."""
        return bool(self.ops & COMMUNICATION) or not self.crossing_edges

    @cached_property
    def forward_only(self) -> bool:
        """Tell whether the schedule has no backward, as in inference."""
        return not self.ops & {Op.B, Op.I, Op.W}

    @cached_property
    def heads(self) -> frozenset[int]:
        """Return the stages that take the batch."""
        return frozenset(stage for f in self.flows for stage in {*f.stages} - {b for _, b in f.pairs})

    @cached_property
    def ends(self) -> frozenset[int]:
        """Return the last stages of the flows, which have the loss function."""
        return frozenset(f.stages[-1] for f in self.flows)

    @property
    def chained(self) -> bool:
        """Tell whether the stages form chains, each in one flow, without edges of its own."""
        return (
            all(f.edges is None for f in self.flows)
            and sum(len(f.stages) for f in self.flows) == self.stages
            and self.replicas == by_place(self.flows)
        )

    @cached_property
    def _along(self) -> tuple[tuple[int, int], ...]:
        return tuple(dict.fromkeys(pair for f in self.flows for pair in f.pairs))

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """List every ``(source stage, destination stage)`` that an activation travels, skips last."""
        return (*self._along, *self.skips)

    @cached_property
    def _places(self) -> dict[int, int]:
        if len(self.flows) == 1:
            return {stage: place for place, stage in enumerate(self.flows[0].stages)}
        before: dict[int, list[int]] = {}
        for f in self.flows:
            for a, b in pairwise(f.stages):
                before.setdefault(b, []).append(a)
        sorter = TopologicalSorter(before | {f.stages[0]: before.get(f.stages[0], []) for f in self.flows})
        return {stage: place for place, stage in enumerate(sorter.static_order())}

    def shift(self, source: int, destination: int) -> int:
        """Return the distance of the microbatches at the ends of an edge: 1 where it leads back, else 0."""
        return int(self._places[destination] < self._places[source])

    def joins(self, microbatch: int, shift: int) -> bool:
        """Tell whether a microbatch and the microbatch ``shift`` after it are slices of one sequence.

        >>> from ppfunc.schedule import seq1f1b
        >>> schedule = seq1f1b(ranks=2, sequences=2, slices=3)
        >>> schedule.joins(1, 1), schedule.joins(2, 1), schedule.joins(3, -1)
        (True, False, False)
        """
        return self.slices > 1 and 0 <= microbatch % self.slices + shift < self.slices

    def numbered(self, microbatch: int | None) -> str:
        """Write the number of a microbatch as pictures have it: ``2.0`` for slice 0 of sequence 2."""
        if microbatch is None or self.slices < 2:
            return str(microbatch)
        return f"{microbatch // self.slices}.{microbatch % self.slices}"

    def successor(self, stage: int) -> int | None:
        """Return the stage to which the only edge from ``stage`` leads. If there is none, or more: None."""
        require_index("stage", stage, self.stages)
        return _only(b for a, b in self._along if a == stage)

    def predecessor(self, stage: int) -> int | None:
        """Return the stage from which the only edge to ``stage`` comes. If there is none, or more: None."""
        require_index("stage", stage, self.stages)
        return _only(a for a, b in self._along if b == stage)

    def other_end(self, message: Instruction) -> int | None:
        """Return the stage that a SEND or RECV has at its other end. Where no edge leads there: None."""
        require_type("message", message, Instruction, "an instruction such as 0SEND_F1")
        if message.peer is not None:
            return message.peer
        forwards = message.op in (Op.SEND_F, Op.RECV_B)
        return self.successor(message.stage) if forwards else self.predecessor(message.stage)

    @property
    def crossing_edges(self) -> tuple[tuple[int, int], ...]:
        """List the edges whose two stages are on different ranks."""
        return tuple((a, b) for a, b in self.edges if self.placement[a] != self.placement[b])

    @cached_property
    def model_stages(self) -> tuple[int, ...]:
        """Map each stage to its stage of the model: replicas to one, all numbered as the first of each."""
        first = {stage: min(group) for group in self.replicas for stage in group}
        firsts = [first.get(stage, stage) for stage in range(self.stages)]
        number = {stage: n for n, stage in enumerate(sorted({*firsts}))}
        return tuple(number[stage] for stage in firsts)

    def model_stages_of(self, rank: int) -> tuple[int, ...]:
        """List the stages of the model that ``rank`` runs, ascending; each process has its own replicas.

        >>> from ppfunc.schedule import dualpipe
        >>> schedule = dualpipe(ranks=2, microbatches=4)
        >>> schedule.stages_of(0), schedule.model_stages_of(0)
        ((0, 3), (0, 1))
        """
        return tuple(sorted({self.model_stages[stage] for stage in self.stages_of(rank)}))

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the programs, in hexadecimal: equal in every process and version.

        The name is not part of it: two schedules that do the same have the same digest.
        """
        head = [
            list(self.placement),
            [[f.stages, bounds(f.microbatches), *([] if f.edges is None else [f.edges])] for f in self.flows],
            self.skips,
            *([self.slices] if self.slices else []),
            *([] if self.replicas == by_place(self.flows) else [{"replicas": self.replicas}]),
        ]
        state = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())
        for program in self.programs:
            # In columns, whose text is made in a tenth of the time of that of every instruction.
            instructions = list(chain.from_iterable(program))
            ops, *numbers, parts = zip(*instructions, strict=True) if instructions else ((), ())
            pairs = list(map(str, compress(instructions, parts)))
            state.update(f"\n{list(map(len, program))} {' '.join(ops)} {numbers} {pairs}".encode())
        return state.hexdigest()


def _only(stages: Iterable[int]) -> int | None:
    """Return the only stage. If there is none, or more: None."""
    found = [*stages]
    return found[0] if len(found) == 1 else None


def merged(sets: Sequence[range | tuple[int, ...]]) -> range | tuple[int, ...]:
    """Return the microbatches of several flows, ascending."""
    return sets[0] if len(sets) == 1 else tuple(sorted(chain(*sets)))


def bounds(microbatches: range | tuple[int, ...]) -> dict[str, Any] | list[int]:
    """Write the numbers of microbatches as JSON has them."""
    if isinstance(microbatches, range) and microbatches.step == 1:
        return [microbatches.start, microbatches.stop]
    return {"numbers": [*microbatches]}


def by_place(flows: Sequence[Flow]) -> tuple[tuple[int, ...], ...]:
    """Group the stages at equal places of several flows: the replicas of most schedules that have some."""
    if len(flows) < 2:
        return ()
    return tuple(zip(*(f.stages for f in flows), strict=False))


@naming_arguments
@collector_paused()
def single_chain(
    name: str,
    placement: Iterable[int],
    microbatches: int,
    programs: Iterable[Iterable[Instruction]],
    *,
    slices: int = 0,
) -> Schedule:
    """Make a schedule of compute with one chain through stages 0, 1, ...: the usual way to write one.

    ``check`` proves it, ``place_communication`` adds its messages (a step function does both).

    >>> from ppfunc.schedule import B, F, check
    >>> programs = [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]
    >>> mine = single_chain("mine", placement=[0, 1], microbatches=1, programs=programs)
    >>> check(mine).peak_activations
    (1, 1)

    Args:
        name: name of the schedule, in pictures and errors.
        placement: the rank of every stage.
        microbatches: number of microbatches that walk the chain.
        programs: instructions of each rank in order, one per step.
        slices: number of slices of a sequence, 0 where stages have no carry; see :class:`Schedule`.

    Raises:
        TypeError: another type, or items that are not instructions.
    """
    for what, given, expected in (
        ("placement", placement, "the rank of every stage"),
        ("programs", programs, "a list per rank"),
    ):
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(f"{what}: got {given!r}, expected {expected}")
    require_type("microbatches", microbatches, int, "their number")
    placement, rows = (
        tuple(placement),
        [list(program) if isinstance(program, Iterable) else [program] for program in programs],
    )
    for rank, row in enumerate(rows):
        if wrong := [item for item in row if not isinstance(item, Instruction)]:
            raise TypeError(
                f"programs[{rank}]: got {wrong[0]!r}, expected a list of instructions, such as [F(0, 0),"
                " B(0, 0)]"
            )
    return Schedule(
        name,
        placement,
        (Flow(tuple(range(len(placement))), range(microbatches)),),
        tuple(tuple(zip(row)) for row in rows),
        slices=slices,
    )

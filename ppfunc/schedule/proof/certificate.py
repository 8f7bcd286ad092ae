"""Prove that a schedule can run and computes the right thing, or say where it does not."""

from dataclasses import dataclass
from itertools import groupby

from ppfunc._checks import require_counts, show_table

from ..collector import collector_paused
from ..dataflow import Dataflow
from ..instruction import COMMUNICATION, Op
from ..schedule import Schedule
from .earliest import earliest
from .order import OrderRecord, check_order
from .queues import check_queues
from .states import check_activations, check_loads, check_offloads, check_slots, check_tail, check_unshards
from .structure import check_structure


@dataclass(frozen=True, repr=False)
class Certificate:
    """Hold the facts that ``check`` has proved, tied to one schedule by its digest.

    Args:
        digest: of the schedule.
        name: of the schedule.
        ranks: number of ranks.
        stages: number of stages.
        chains: number of chains.
        microbatches: number of microbatches over all chains.
        instructions: ``(kind, how many)`` of each kind, overlapped pairs counted as pairs.
        peak_activations: largest number of live activations of each rank.
        models: the models under which it runs to its end.
        slots: number of slots of each stage, none where no slots are allocated.
        step_atomic: whether a barrier may stand between any two steps: step k of every rank needs nothing
            from a later step of another. What it consumes has been sent, together with all that moves in the
            same batch, or without communications computed, in a step <= k.
    """

    digest: str
    name: str
    ranks: int
    stages: int
    chains: int
    microbatches: int
    instructions: tuple[tuple[str, int], ...]
    peak_activations: tuple[int, ...]
    models: tuple[str, ...]
    slots: tuple[int, ...]
    step_atomic: bool

    def __repr__(self) -> str:
        return (
            f"Certificate({self.name!r}, ranks={self.ranks}, stages={self.stages},"
            f" microbatches={self.microbatches}, instructions={sum(count for _, count in self.instructions)},"
            f" digest={self.digest[:12]!r})"
        )

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.instructions)
        chains = "" if self.chains == 1 else f" in {self.chains} chains"
        lines = [
            f"{self.name}: proved",
            f"digest            {self.digest}",
            f"ranks             {self.ranks}",
            f"stages            {self.stages}{chains}",
            f"microbatches      {self.microbatches}",
            f"instructions      {counts}",
            f"peak activations  {_row(self.peak_activations, 'rank')}",
            f"no deadlock       {', '.join(self.models)}",
        ]
        if self.slots:
            lines.append(f"slots per stage   {_row(self.slots, 'stage')}")
        lines.append(f"step-atomic       {'yes' if self.step_atomic else 'no'}")
        return "\n".join(lines)

    _repr_pretty_ = show_table


@collector_paused()
def check(schedule: Schedule, *, max_activations: int | None = None) -> Certificate:
    """Prove a schedule, compute only or with communication, in one pass of linear time.

    Proved are: every stage computes every microbatch of its chain once forward and, unless the
    schedule has no backward at all, once backward (one B, or one I and then one W), in the order
    of the data; every message has one send and one receive, in one order at both ends; nothing
    waits for ever, be it in a rendezvous or with one queue in order at each end of each pair of
    ranks; no slot is overwritten while in use; what is offloaded or dropped is back before its use;
    parameters are unsharded before they are used, and resharded in the end; loads, reductions and
    optimizer steps are complete and in their place.

    Args:
        schedule: any value; one that is no schedule raises.
        max_activations: largest number of live activations that a rank may have.

    Raises:
        ScheduleError: the schedule is wrong; names rank, position and instruction.
        ValueError: ``max_activations`` is no number from 0.

    >>> from ppfunc.schedule import one_f_one_b
    >>> print(str(check(one_f_one_b(ranks=2, microbatches=4))).partition("ranks")[2])
                 2
    stages            2
    microbatches      4
    instructions      8 F, 8 B
    peak activations  2 1
    no deadlock       by data dependencies
    step-atomic       yes
    """
    if max_activations is not None:
        require_counts(0, max_activations=max_activations)
    check_structure(schedule)
    lowered = bool(schedule.ops & COMMUNICATION)
    atomic = _prove_order(schedule)
    check_offloads(schedule)
    check_loads(schedule)
    check_tail(schedule)
    check_unshards(schedule)
    return Certificate(
        digest=schedule.digest,
        name=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        chains=len(schedule.chains),
        microbatches=schedule.microbatches,
        instructions=tuple((op.value, schedule.counts[op]) for op in Op if op in schedule.counts),
        peak_activations=check_activations(schedule, max_activations),
        models=("rendezvous", "one queue per pair of ranks") if lowered else ("by data dependencies",),
        slots=check_slots(schedule),
        step_atomic=atomic,
    )


def _prove_order(schedule: Schedule) -> bool:
    """Prove that all runs, in order, to its end; returns whether the schedule is step-atomic."""
    flow = Dataflow(schedule)
    record = check_order(flow)
    if not schedule.has_messages:
        earliest(schedule, lambda op, stage: 1, lambda f, b: 1, lambda a, b: 0)
        return _values_are_atomic(flow, record)
    return check_queues(flow, record).step_atomic


def _values_are_atomic(flow: Dataflow, record: OrderRecord) -> bool:
    """Tell whether no value is made in a later step than the step that consumes it, messages left aside."""
    for value, steps in record.made.items():
        stage, _ = flow.place(value)
        for first, _ in flow.needs[Op.I if value % 2 else Op.F, stage]:
            inputs = record.made[first]
            if any(inputs[microbatch] > step for microbatch, step in steps.items()):
                return False
    return True


def _row(numbers: tuple[int, ...], of: str) -> str:
    """Write numbers in a row, equal neighbours as ``8 x 3`` if shorter; only extremes if very many."""
    groups = [(value, len(list(run))) for value, run in groupby(numbers)]
    if len(groups) > 24:
        low, high = min(numbers), max(numbers)
        return f"{low} ({of} {numbers.index(low)}) to {high} ({of} {numbers.index(high)})"
    return " ".join(f"{n} x {v}" if n > 3 else " ".join([str(v)] * n) for v, n in groups)

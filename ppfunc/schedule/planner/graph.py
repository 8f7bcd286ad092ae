"""Put the instructions of any graph of stages in order on their ranks, by a list schedule.

In time order, a rank that is free takes from its ready instructions the instruction with the longest way to
the end of the step, its *tail*: along the edges, through the microbatches of a stage in their order, and
along an order of the rank, if one is given. Forwards keep to the memory of their rank by the rule of the
banker: each takes what leaves room for all earlier microbatches to finish, so that no rank waits for ever.

An order comes from another schedule, or from a *block*: the instructions of one microbatch on a clock for
each rank, which goes round in the time that the busiest rank works for a microbatch. Each instruction takes
the first free arc of its clock that leaves arcs for the others. All microbatches then follow each other in
that period: of a chain, that is 1F1B.

References:
    Dijkstra, EWD623, 1977, for the banker; Yeung et al., Balancing Pipeline Parallelism with Vocabulary
    Parallelism (arXiv:2411.05288), for output layers in parts; Feng et al., Optimus (arXiv:2408.03505), for
    encoders in bubbles.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import accumulate, chain, pairwise, product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from ppfunc._checks import naming_arguments, require_counts, require_real, require_stages, require_type

from ..collector import collector_paused
from ..costs import Costs, Number, require_costs
from ..dataflow import Dataflow
from ..errors import require_schedule
from ..instruction import COMMUNICATION, F, Instruction, Op, elementary, microbatch_of
from ..passes.rewrite import compute_only
from ..proof.structure import check_flow, check_structure
from ..schedule import Flow, Schedule

_Words = Sequence[Sequence[Instruction]]  # the order of each rank; none where no order is given
_Order = tuple[_Words, Sequence[Number]]  # with the memory of each rank
_Arcs = list[tuple[Number, Number]]  # start and length of each
_ROUNDING = 2.0**-30  # share of a sum of floats
_BACKWARDS: dict[Op, tuple[Op, ...]] = {Op.B: (Op.B,), Op.I: (Op.I, Op.W)}


class _Work(NamedTuple):
    """Hold the instructions of a step, with their numbers.

    Args:
        placement: rank of every stage.
        needs: instructions that each instruction waits for, with the latency of each message.
        times: time of every instruction.
        memory: change of the memory of its rank by every instruction.
        codes: instructions of one kind and stage, in the order of their microbatches.
    """

    placement: Sequence[int]
    needs: dict[Instruction, dict[Instruction, Number]]
    times: dict[Instruction, Number]
    memory: dict[Instruction, Number]
    codes: list[list[Instruction]]

    def codes_of(self, rank: int) -> list[list[Instruction]]:
        return [code for code in self.codes if self.placement[code[0].stage] == rank]

    def peaks(self, words: _Words) -> list[Number]:
        return [max(accumulate((self.memory[job] for job in word), initial=0)) for word in words]


@naming_arguments
def arrange(
    placement: Sequence[int],
    flows: Sequence[Flow],
    *,
    skips: Sequence[tuple[int, int]] = (),
    replicas: Sequence[tuple[int, ...]] = (),
    apart: bool = False,
    cap: Number | Sequence[Number] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Make a schedule for any graph of stages: put the instructions of all microbatches in order.

    >>> from ppfunc.schedule import Flow, one_f_one_b, to_grid
    >>> arrange([0, 1, 2], [Flow((0, 1, 2), range(5))]).programs == one_f_one_b(3, 5).programs
    True
    >>> fork = Flow((0, 1, 2, 3), range(3), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    >>> print(to_grid(arrange([0, 0, 1, 1], [fork])), end="")
    rank 0  0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1  .   .  1B2 0B2
    rank 1   .  2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2  .

    Args:
        placement: rank of every stage.
        flows: stages, microbatches and edges.
        skips: pairs of stages with a skip connection, see :class:`Schedule`.
        replicas: groups of stages that are copies of one stage of the model.
        apart: whether the backwards are I and W, else B.
        cap: memory of all ranks, or of each rank, in the unit of the costs; by default that of the block, or
            where there are several flows without limit.
        costs: times of instructions and messages, activations and the share of them that is held on to W; by
            default F = I = W = 1, B = 2, and activations of 1 that are held on to W.

    Raises:
        ScheduleError: flows or skips that are no graph of the stages.
        ValueError: a cap below the activations of one microbatch, or costs for another number of stages.
    """
    for name, values in {
        "placement": placement,
        "flows": flows,
        "skips": skips,
        "replicas": replicas,
    }.items():
        require_type(name, values, Sequence, "a list")
    for stage, rank in enumerate(placement):
        require_counts(0, **{f"placement[{stage}]": rank})
    for number, flow in enumerate(flows):
        check_flow(number, flow)
    backward = _BACKWARDS[Op.I if apart else Op.B]
    costs = Costs(weight_share=1) if costs is None else require_costs(costs)
    rows: list[list[tuple[Instruction, ...]]] = [[] for _ in range(1 + max(placement, default=0))]
    for stage, microbatch in (pair for flow in flows for pair in product(flow.stages, flow.microbatches)):
        for rank in placement[stage : stage + 1]:
            rows[rank].append((F(stage, microbatch),))
    graph = tuple(placement), tuple(flows), tuple(map(tuple, rows)), tuple(skips)
    draft = Schedule("arranged", *graph, replicas=tuple(replicas))
    check_structure(draft)
    work = _work_of(draft, costs, lambda stage, microbatch: backward)
    caps = [*cap] if isinstance(cap, Sequence) else [inf if cap is None else cap] * draft.ranks
    if len(caps) != draft.ranks:
        raise ValueError(f"cap: got {len(caps)} numbers, expected {draft.ranks}, one per rank")
    for rank, most in enumerate(caps):
        require_real("cap", most)
        least = max((rest for _, rest, _ in _Bank(work, rank, most).open.values()), default=0)
        if not most >= least:
            place = f"the activations of one microbatch on rank {rank}"
            raise ValueError(f"cap: got {most!r}, expected at least {least!r}, {place}")
    return _in_order(draft, work, [_block_order(draft, work, caps)] if len(flows) == 1 else [([], caps)])


@naming_arguments
def spread(
    schedule: Schedule,
    *,
    into: int = 0,
    microbatches: Collection[int] | None = None,
    ranks: Sequence[int] | None = None,
    lead: int = 1,
    costs: Costs | None = None,
) -> Schedule:
    """Add copies of an encoder, each for its share of the microbatches, where ranks would wait.

    The encoder is the last stage of the model then. It takes the batch, and its value is a skip connection:
    it returns ``Output((), skips={into: value})``, and the stage ``into`` gets ``Received(x, {encoder:
    value})``, with None for a microbatch that has nothing to encode. Microbatches are dealt round the ranks.
    A forward of the encoder runs before its value is needed, its backward after the gradient has come.

    >>> from ppfunc.schedule import Costs, one_f_one_b, simulate
    >>> costs, schedule = Costs(forward=1, backward=2), one_f_one_b(ranks=8, microbatches=16)
    >>> simulate(schedule, costs).makespan, simulate(spread(schedule), costs).makespan
    (69, 72)

    Args:
        schedule: schedule of F, B, I and W, without slices.
        into: stage of the model that takes the value.
        microbatches: numbers of the microbatches that have something to encode; by default all.
        ranks: ranks that hold a copy; by default all.
        lead: number of microbatches that a rank may hold more than in ``schedule``. Of its share, a copy of
            the encoder may hold all activations.
        costs: times and activations of the stages of the model, the encoder last; by default F = I = W = 1.

    Raises:
        ScheduleError: a value that is no schedule.
        ValueError: a schedule with other instructions or slices; a stage, rank or microbatch that does not
            exist; costs for another number of stages.
    """
    schedule = _compute_of(schedule, lead)
    require_type("into", into, int, "a stage of the model")
    dealt = sorted(_numbers("microbatches", microbatches, schedule.microbatches))
    holders = _numbers("ranks", ranks, schedule.ranks)[: len(dealt)]
    copies = tuple(range(schedule.stages, schedule.stages + len(holders)))
    flows: list[Flow] = []
    skips: dict[tuple[int, int], None] = {}
    for flow in schedule.flows:
        entry = [stage for stage in flow.stages if schedule.model_stages[stage] == into]
        if not entry:
            raise ValueError(f"into: got {into!r}, expected a stage of the model that all microbatches take")
        for k, copy in enumerate(copies):
            if share := {*dealt[k :: len(copies)]}.intersection(flow.microbatches):
                flows.append(_flow((copy, *flow.stages), share, flow.pairs))
                skips[copy, entry[0]] = None
        if rest := {*flow.microbatches}.difference(dealt):
            flows.append(_flow(flow.stages, rest, flow.pairs))
    draft = replace(
        schedule,
        name=f"{schedule.name} (spread)",
        placement=(*schedule.placement, *holders),
        flows=tuple(flows),
        skips=(*schedule.skips, *skips),
        replicas=(*schedule.replicas, *([copies] if len(copies) > 1 else [])),
    )
    return _grown(schedule, draft, costs or Costs(weight_share=1), lead, free=copies)


@naming_arguments
def with_parts(
    schedule: Schedule,
    *,
    ranks: Sequence[int] | None = None,
    lead: int = 2,
    costs: Costs | None = None,
) -> Schedule:
    """Add an output layer in parts, a stage on each of several ranks, and a stage that joins them.

    With stages 0 to n - 1 of the model, all parts, n to n + k - 1, take the output of the last stage, and
    stage n + k takes the outputs of the parts, on the rank of the last stage: the stages of
    :func:`ppfunc.vocabulary_parallel`. What ``schedule`` has is put in order anew, with the parts.

    >>> from ppfunc.schedule import one_f_one_b
    >>> schedule = with_parts(one_f_one_b(ranks=2, microbatches=4))
    >>> schedule.placement, schedule.flows[0].edges
    ((0, 1, 0, 1, 1), ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4)))

    Args:
        schedule: schedule of F, B, I and W, without slices, whose microbatches all end in the same stage.
        ranks: rank of each part; by default a part on every rank.
        lead: number of microbatches that a rank may hold more than in ``schedule``: the way of a microbatch
            becomes longer. Where ranks have one stage each, 2 are enough to keep them busy, and with fewer
            the step takes longer than with a whole layer. So does a step of a light layer, or of as few
            microbatches as ranks: ``simulate`` both, or let :func:`ppfunc.tune` try them.
        costs: times and activations of the stages of the model, the parts and the join last; by default a
            stage F = I = W = 1, a part the k-th part of that, and nothing for the join.

    Raises:
        ScheduleError: a value that is no schedule.
        ValueError: a schedule with other instructions or slices, or with several last stages; a rank that
            does not exist; costs for another number of stages.

    References:
        Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism (arXiv:2411.05288).
    """
    schedule = _compute_of(schedule, lead)
    holders, n = _numbers("ranks", ranks, schedule.ranks), schedule.stages
    last, *others = schedule.ends
    if others:
        raise ValueError(f"schedule: got {schedule.name} with several last stages, expected one for all")
    parts, join = range(n, n + len(holders)), n + len(holders)
    added = (*((last, part) for part in parts), *((part, join) for part in parts))
    draft = replace(
        schedule,
        name=f"{schedule.name} (parts)",
        placement=(*schedule.placement, *holders, schedule.placement[last]),
        flows=tuple(
            _flow((*f.stages, *parts, join), f.microbatches, (*f.pairs, *added)) for f in schedule.flows
        ),
    )
    sizes = (*[len(parts)] * len({*schedule.model_stages}), *[1] * len(parts), 0)
    default = Costs(sizes, sizes, sizes, activation=sizes, weight_share=1)
    return _grown(schedule, draft, costs or default, lead)


def _compute_of(schedule: Schedule, lead: int) -> Schedule:
    """Return a schedule without its messages."""
    require_schedule(schedule)
    require_counts(0, lead=lead)
    others = [*sorted(schedule.ops - COMMUNICATION - {Op.F, Op.B, Op.I, Op.W}), *["slices"] * schedule.slices]
    if others:
        found = f"{schedule.name} with {others[0]}"
        raise ValueError(f"schedule: got {found}, expected F, B, I and W alone: add the rest afterwards")
    return compute_only(schedule)


def _numbers(name: str, values: Iterable[int] | None, count: int) -> list[int]:
    """Return different numbers below ``count``, by default all."""
    values = range(count) if values is None else values
    require_type(name, values, Iterable, "numbers, such as [0, 1]")
    if len(require_stages(name, numbers := [*values], count)) < max(len(numbers), 1):
        raise ValueError(f"{name}: got {numbers!r}, expected different numbers, at least one")
    return numbers


def _flow(stages: tuple[int, ...], microbatches: Iterable[int], edges: tuple[tuple[int, int], ...]) -> Flow:
    numbers = sorted(microbatches)
    walk = range(numbers[0], numbers[-1] + 1)
    chained = edges == tuple(pairwise(stages))
    return Flow(stages, walk if len(walk) == len(numbers) else tuple(numbers), None if chained else edges)


def _grown(base: Schedule, draft: Schedule, costs: Costs, lead: int, free: Sequence[int] = ()) -> Schedule:
    """Put the instructions of a draft, which has more stages than its base, in order.

    Args:
        lead: number of microbatches that a rank may hold more than in the base.
        free: stages whose memory does not count.
    """
    words = [elementary(program) for program in base.programs]
    ops = {job[1:3]: _BACKWARDS[job.op] for word in words for job in word if job.op in _BACKWARDS}
    usual = next((kinds for op, kinds in _BACKWARDS.items() if op in base.ops), ())
    costs = require_costs(costs).of_stages(draft.model_stages)
    work = _work_of(draft, costs, lambda *place: ops.get(place, usual), free)
    caps = work.peaks(words)
    for stage, numbers in enumerate(draft.numbers):
        size = work.memory[F(stage, numbers[0])]
        caps[draft.placement[stage]] += size * (lead + (stage >= base.stages))
    place = {job: n for word in words for n, job in enumerate(word)}
    turns = (place[a] < place[b] for code in work.codes for a, b in pairwise(code) if a in place)
    orders: list[_Order] = [(words if all(turns) else [], caps)]
    if len(draft.flows) == 1 and len({*ops.values()}) < 2:  # microbatches are alike
        orders.append(_block_order(draft, work, caps))
    return _in_order(draft, work, orders)


def _work_of(
    draft: Schedule, costs: Costs, backward: Callable[[int, int], tuple[Op, ...]], free: Sequence[int] = ()
) -> _Work:
    """Collect the instructions of a schedule.

    Args:
        backward: a function of a stage and a microbatch that gives B, or I and W, or nothing.
        free: stages whose memory does not count.
    """
    costs.fitting(draft.stages)
    dataflow, home = Dataflow(draft), draft.placement
    needs: dict[Instruction, dict[Instruction, Number]] = {}
    for flow in draft.flows:
        for m, stage in product(flow.microbatches, flow.stages):
            for kind in (Op.F, *backward(stage, m)):
                needs[Instruction(kind, stage, m)] = {
                    Instruction(backward(maker, m)[0] if value % 2 else Op.F, maker, m): (
                        costs.message_of(maker) if home[maker] != home[stage] else 0
                    )
                    for value, maker, _ in dataflow.needs[kind, stage]
                    if dataflow.takes(m, maker)
                }
    codes: dict[tuple[Op, int], list[Instruction]] = {}
    for job in sorted(needs, key=microbatch_of):
        codes.setdefault(job[:2], []).append(job)
    times, memory = dict[Instruction, Number](), dict[Instruction, Number]()
    for (op, stage), code in codes.items():
        size, share = (costs.of(name, stage) for name in ("activation", "weight_share"))
        counts = stage not in free and backward(stage, microbatch_of(code[0]))
        change = size * {Op.F: 1, Op.B: -1, Op.I: share - 1, Op.W: -share}[op] if counts else 0
        times |= dict.fromkeys(code, costs.time_of(op, stage))
        memory |= dict.fromkeys(code, change)
    return _Work(draft.placement, needs, times, memory, [*codes.values()])


@collector_paused()
def _in_order(draft: Schedule, work: _Work, orders: Sequence[_Order]) -> Schedule:
    """Return the draft with the programs of the shortest of several runs."""
    runs: list[tuple[Number, _Words]] = []
    for words, caps in orders:
        tails = _tails(work, words)
        runs += [_run(work, caps, tails, patience) for patience in (0, 0.5)]
    _, words = min(runs, key=itemgetter(0))
    return replace(draft, programs=tuple(tuple((job,) for job in word) for word in words))


def _tails(work: _Work, words: _Words) -> dict[Instruction, Number]:
    """Return the longest way from the start of every instruction to the end of the step."""
    before = {job: [*needs] for job, needs in work.needs.items()}
    for a, b in chain.from_iterable(map(pairwise, (*work.codes, *words))):
        before[b].append(a)
    tails: dict[Instruction, Number] = dict.fromkeys(before, 0)
    for job in reversed([*TopologicalSorter(before).static_order()]):
        tails[job] += work.times[job]
        for earlier in before[job]:
            tails[earlier] = max(tails[earlier], tails[job] + work.needs[job].get(earlier, 0))
    return tails


class _Bank:
    """Lend the memory of a rank to microbatches such that each can finish in its turn."""

    def __init__(self, work: _Work, rank: int, cap: Number) -> None:
        self.room, self.memory = cap * (1 + _ROUNDING), work.memory
        # By microbatch: instructions to come, memory of the forwards among them, memory that is held.
        self.open: dict[int, list[Number]] = {}
        for job in sorted(chain.from_iterable(work.codes_of(rank)), key=microbatch_of):
            account = self.open.setdefault(microbatch_of(job), [0, 0, 0])
            account[0] += 1
            account[1] += max(self.memory[job], 0)

    def grants(self, job: Instruction) -> bool:
        """Tell whether the microbatches before can still finish once a job has its memory."""
        room = self.room - self.memory[job]
        for microbatch, (_, rest, held) in self.open.items() if self.memory[job] > 0 else ():
            if microbatch == job.microbatch:
                break
            if rest > room:
                return False
            room += held
        return True

    def book(self, job: Instruction) -> None:
        change, account = self.memory[job], self.open[microbatch_of(job)]
        self.room -= change
        account[:] = account[0] - 1, account[1] - max(change, 0), account[2] + change
        if not account[0]:
            del self.open[microbatch_of(job)]


def _run(
    work: _Work, caps: Sequence[Number], tails: dict[Instruction, Number], patience: float
) -> tuple[Number, _Words]:
    """Run a step on paper, and return its time and the order of each rank.

    A rank waits for an instruction with a longer tail if that comes within ``patience`` times the length of
    the instruction that is ready.
    """
    readers: dict[Instruction, list[tuple[Instruction, Number]]] = {job: [] for job in work.needs}
    for job, needs in work.needs.items():
        for earlier, latency in needs.items():
            readers[earlier].append((job, latency))
    missing = {job: len(needs) for job, needs in work.needs.items()}
    arrival: dict[Instruction, Number] = dict.fromkeys(missing, 0)
    queues = [[*map(deque, work.codes_of(rank))] for rank in range(len(caps))]
    banks = [_Bank(work, rank, cap) for rank, cap in enumerate(caps)]
    words: list[list[Instruction]] = [[] for _ in caps]
    free: list[Number] = [0] * len(caps)
    events: list[tuple[Number, int]] = [(0, rank) for rank in range(len(caps))]
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        heads = [queue for queue in queues[rank] if queue and not missing[queue[0]]]
        heads.sort(key=lambda queue: (-tails[queue[0]], queue[0].op is Op.F))
        granted = [queue for queue in heads if banks[rank].grants(queue[0])]
        ready = next((n for n, queue in enumerate(granted) if arrival[queue[0]] <= now), len(granted))
        soon = min((arrival[queue[0]] for queue in granted[:ready]), default=inf)
        if granted[ready:] and soon > now + patience * work.times[granted[ready][0]]:
            job = granted[ready].popleft()
            banks[rank].book(job)
            words[rank].append(job)
            free[rank] = soon = now + work.times[job]
            for reader, latency in readers[job]:
                missing[reader] -= 1
                arrival[reader] = max(arrival[reader], free[rank] + latency)
                if not missing[reader]:
                    heappush(events, (arrival[reader], work.placement[reader.stage]))
        if soon < inf:
            heappush(events, (soon, rank))
    return max(free), words


def _block_order(draft: Schedule, work: _Work, caps: Sequence[Number]) -> _Order:
    """Let the microbatches of the only flow follow each other in the period of a block.

    Returns:
        The order of each rank, and the memory that it takes, at most ``caps``.
    """
    numbers, stretch, starts = draft.flows[0].microbatches, 1.0, dict[Instruction, Number]()
    needs = {job: before for job, before in work.needs.items() if job.microbatch == numbers[0]}
    while len(starts) < len(needs):
        starts, period = _block(work, needs, len(caps), stretch)
        stretch *= 1.02
    words: list[list[tuple[Number, Instruction]]] = [[] for _ in caps]
    for (k, m), (job, start) in product(enumerate(numbers), starts.items()):
        words[work.placement[job.stage]].append((start + k * period, job._replace(microbatch=m)))
    order = [[job for _, job in sorted(word, key=itemgetter(0))] for word in words]
    return order, [*map(min, caps, work.peaks(order))]


def _block(
    work: _Work, needs: dict[Instruction, dict[Instruction, Number]], ranks: int, stretch: float
) -> tuple[dict[Instruction, Number], Number]:
    """Start each instruction of a microbatch as early as its needs and the clock of its rank let it.

    Returns:
        Starts, and the period: the time of the busiest rank times ``stretch``. Where arcs are too short, some
        starts are missing.
    """
    todo: list[list[Number]] = [[] for _ in range(ranks)]
    for job in needs:
        todo[work.placement[job.stage]].append(work.times[job])
    period = max(map(sum, todo)) * stretch
    clocks: list[_Arcs] = [[] for _ in todo]
    starts: dict[Instruction, Number] = {}
    waiting = dict(needs)
    while waiting:
        ready = {
            job: max((starts[b] + work.times[b] + latency for b, latency in before.items()), default=0)
            for job, before in waiting.items()
            if before.keys() <= starts.keys()
        }
        job = min(ready, key=ready.__getitem__)
        wait, time, rank = 0, work.times[job], work.placement[job.stage]
        del waiting[job]
        todo[rank].remove(time)
        if time:
            places = _places(clocks[rank] or [(ready[job], period)], ready[job], time, period)
            fitting = [place for place in places if _have_room(place[1], todo[rank])]
            if not fitting:
                break
            wait, clocks[rank] = min(fitting, key=itemgetter(0))
        starts[job] = ready[job] + wait
    return starts, period


def _places(arcs: _Arcs, ready: Number, time: Number, period: Number) -> Iterator[tuple[Number, _Arcs]]:
    """Yield waits from ``ready`` to a start in an arc, first, last or ready, and the arcs that are left."""
    little = period * _ROUNDING
    for first, length in arcs:
        for offset in (0, length - time, (ready + little - first) % period - little):
            if -little <= offset <= length - time + little:
                left = [arc for arc in arcs if arc[0] != first]
                left += [(first, offset), (first + offset + time, length - offset - time)]
                wait = max((first + offset - ready + little) % period - little, 0)
                yield wait, [arc for arc in left if arc[1] > little]


def _have_room(arcs: _Arcs, times: Iterable[Number]) -> bool:
    """Tell whether the times fit in arcs, the longest first, each in the shortest arc that is left."""
    lengths = [length for _, length in arcs]
    for time in sorted(filter(None, times), reverse=True):
        fits = [length for length in lengths if length >= time * (1 - _ROUNDING)]
        if not fits:
            return False
        lengths[lengths.index(min(fits))] -= time
    return True

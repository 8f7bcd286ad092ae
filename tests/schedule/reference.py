"""A slow model of what ``check`` promises, which shares no code and no idea with it."""

from __future__ import annotations

from collections import Counter

SENDING = {"SEND_F": ("F", 1), "SEND_B": ("B", -1)}
RECEIVING = {"RECV_F": ("F", -1), "RECV_B": ("B", 1)}
COMPUTING = ("F", "B", "I", "W")


def parts(instruction):
    return instruction.parts or (instruction,)


def neighbour(schedule, stage, distance):
    """The stage so far along the chain, None outside."""
    stages = next(c.stages for c in schedule.chains if stage in c.stages)
    at = stages.index(stage) + distance
    return stages[at] if 0 <= at < len(stages) else None


def back(schedule, source, destination):
    """Whether the destination comes before the source in their chain."""
    stages = next(c.stages for c in schedule.chains if source in c.stages)
    return stages.index(destination) < stages.index(source)


def name_of(schedule, instruction):
    """The message as (kind, source, destination, microbatch), whichever end performs it; None if there is
    none.
    """
    sending = instruction.op in SENDING
    kind, distance = (SENDING if sending else RECEIVING)[instruction.op]
    if instruction.peer is None:
        other = neighbour(schedule, instruction.stage, distance)
    else:
        other = instruction.peer
        edge = (
            (instruction.stage, other)
            if instruction.op in ("SEND_F", "RECV_B")
            else (other, instruction.stage)
        )
        if edge not in schedule.skips:
            return None
        if back(schedule, *edge) and (instruction.microbatch + 1) % schedule.slices == 0:
            return None  # nothing comes after the last slice
    if other is None or schedule.placement[other] == schedule.placement[instruction.stage]:
        return None
    ends = (instruction.stage, other) if sending else (other, instruction.stage)
    return kind, *ends, instruction.microbatch


def wanted_compute(schedule):
    """How often each (stage, microbatch) has to do what."""
    walks = [(s, m) for c in schedule.chains for s in c.stages for m in c.microbatches]
    done = Counter(
        (p.op.value, p.stage, p.microbatch)
        for q in schedule.programs
        for step in q
        for i in step
        for p in parts(i)
        if p.op in COMPUTING
    )
    forward_only = not any(op != "F" for op, _, _ in done)
    for s, m in walks:
        times = tuple(done.pop((op, s, m), 0) for op in COMPUTING)
        if times != (1, 0, 0, 0) if forward_only else times not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            return False
    return not done


def inputs_of(schedule, part):
    """Values (kind, stage, microbatch) that a compute instruction consumes."""
    s, m = part.stage, part.microbatch
    if part.op == "W":
        return [("B", s, m)]
    k = max(schedule.slices, 1)
    if part.op == "F":
        before = [
            neighbour(schedule, s, -1),
            *(a for a, b in schedule.skips if b == s and not back(schedule, a, b)),
        ]
        last = [s, *(a for a, b in schedule.skips if b == s and back(schedule, a, b))] if m % k else []
        return [*(("F", a, m - 1) for a in last), *(("F", a, m) for a in before if a is not None)]
    after = [neighbour(schedule, s, 1), *(b for a, b in schedule.skips if a == s)]
    carry = [("B", s, m + 1)] if (m + 1) % k else []
    return [*carry, ("F", s, m), *(("B", b, m) for b in after if b is not None)]


class Model:
    """All ranks, all queues, moved forward until nothing changes.

    Args:
        queue: one per pair of ranks, or one per rank, which all its peers share.
        barrier: whether all ranks wait for each other between any two steps.
    """

    def __init__(self, schedule, queue="pair", barrier=False):
        self.schedule, self.queue, self.barrier = schedule, queue, barrier
        self.lowered = any(
            i.op in SENDING or i.op in RECEIVING for p in schedule.programs for step in p for i in step
        )
        self.todo = [
            [(k, item) for k, step in enumerate(p) for item in self.in_phases(step)]
            for p in schedule.programs
        ]
        self.computed = [set() for _ in schedule.programs]
        self.received = [set() for _ in schedule.programs]
        self.queues = {}
        self.logs = {}

    def in_phases(self, step):
        messages = [i for i in step if i.op in SENDING or i.op in RECEIVING]
        return ([messages] if messages else []) + [i for i in step if i.op in (*COMPUTING, "OVERLAP_F_B")]

    def accepts(self):
        schedule = self.schedule
        for rank, program in enumerate(schedule.programs):
            for i in (part for step in program for whole in step for part in (whole, *whole.parts)):
                chain = next(c for c in schedule.chains if i.stage in c.stages)
                if schedule.placement[i.stage] != rank or i.microbatch not in chain.microbatches:
                    return False
        if not wanted_compute(schedule):
            return False
        moved = True
        while moved:
            moved = any([self.advance(rank) for rank in range(schedule.ranks)]) or self.move_messages()
            if moved is None:
                return False
        ends = all(not todo for todo in self.todo) and all(not batches for batches in self.queues.values())
        return ends and all(
            self.logs.get((a, b, "in"), []) == log for (a, b, way), log in self.logs.items() if way == "out"
        )

    def advance(self, rank):
        if not self.todo[rank]:
            return False
        step, item = self.todo[rank][0]
        if self.barrier and step > min(todo[0][0] for todo in self.todo if todo):
            return False
        if isinstance(item, list):
            if not self.post(rank, item):
                return False
        elif not all(
            self.is_there(rank, part, value)
            for part in parts(item)
            for value in inputs_of(self.schedule, part)
        ):
            return False
        else:
            self.computed[rank] |= {
                ("F" if p.op == "F" else "B", p.stage, p.microbatch) for p in parts(item) if p.op != "W"
            }
        self.todo[rank].pop(0)
        return True

    def is_there(self, rank, part, value):
        kind, stage, microbatch = value
        home = self.schedule.placement[stage]
        if home == rank:
            return value in self.computed[rank]
        if not self.lowered:
            return value in self.computed[home]
        return (kind, stage, part.stage, microbatch) in self.received[rank]

    def post(self, rank, messages):
        names = [name_of(self.schedule, i) for i in messages]
        for i, name in zip(messages, names, strict=True):
            if name is None or (i.op in SENDING and (name[0], name[1], name[3]) not in self.computed[rank]):
                return False
        batches = {}
        for i, name in zip(messages, names, strict=True):
            way = "out" if i.op in SENDING else "in"
            peer = self.schedule.placement[name[2] if way == "out" else name[1]]
            ends = (rank, peer) if way == "out" else (peer, rank)
            if name in self.logs.setdefault((*ends, way), []):
                return False
            self.logs[*ends, way].append(name)
            batches.setdefault(peer if self.queue == "pair" else None, []).append([name, way, False])
        for key, batch in batches.items():
            self.queues.setdefault((rank, key), []).append(batch)
        return True

    def move_messages(self):
        heads = [batch[0] for batch in self.queues.values() if batch]
        moved = False
        for head in heads:
            for message in head:
                for other in (m for h in heads for m in h if m[0] == message[0] and m[1] != message[1]):
                    if not message[2]:
                        message[2] = other[2] = moved = True
        for (rank, _), batches in self.queues.items():
            if batches and all(m[2] for m in batches[0]):
                self.received[rank] |= {m[0] for m in batches.pop(0) if m[1] == "in"}
                moved = True
        return moved

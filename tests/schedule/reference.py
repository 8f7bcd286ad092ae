"""A slow model of what ``check`` promises, which shares no code and no idea with it."""

from __future__ import annotations

from collections import Counter

SENDING = {"SEND_F": "F", "SEND_B": "B"}
RECEIVING = {"RECV_F": "F", "RECV_B": "B"}
COMPUTING = ("F", "B", "I", "W")


def parts(instruction):
    return instruction.parts or (instruction,)


def along(flow):
    return list(zip(flow.stages, flow.stages[1:], strict=False)) if flow.edges is None else list(flow.edges)


def edges_of(schedule, microbatch):
    """The edges (source, destination, shift) on the way of a microbatch."""
    flow = next((f for f in schedule.flows if microbatch in f.microbatches), None)
    if flow is None:
        return []
    place = flow.stages.index
    every = [*along(flow), *(s for s in schedule.skips if set(s) <= set(flow.stages))]
    return [(a, b, int(place(b) < place(a))) for a, b in every]


def alone(schedule, stage, way):
    """The stage at the other end of the only edge from a stage, or to it; None without one."""
    ends = {edge[way] for f in schedule.flows for edge in along(f) if edge[1 - way] == stage}
    return ends.pop() if len(ends) == 1 else None


def name_of(schedule, instruction):
    """The message as (kind, source, rank, microbatch), whichever end performs it; None if there is none."""
    home, m = schedule.placement, instruction.microbatch
    sending = instruction.op in SENDING
    kind = (SENDING if sending else RECEIVING)[instruction.op]
    onward = int(kind == "F")
    stages = next((f.stages for f in schedule.flows if m in f.microbatches), ())
    order = sorted(stages, key=stages.index, reverse=not onward)
    for source in order:
        for rank in {home[s] for s in order} - {home[source]}:
            takers = {
                (b if onward else a): shift
                for a, b, shift in edges_of(schedule, m)
                if (a if onward else b) == source and home[b if onward else a] == rank
            }
            k = max(schedule.slices, 1)
            if all(shift and (m + 1) % k == 0 for shift in takers.values()):
                continue  # nobody takes it; nothing comes after the last slice
            first = next(stage for stage in order if stage in takers)
            far = None if alone(schedule, source, onward) == first else first
            near = None if alone(schedule, first, 1 - onward) == source else source
            if (instruction.stage, instruction.peer) == ((source, far) if sending else (first, near)):
                return kind, source, rank, m
    return None


def wanted_compute(schedule):
    """How often each (stage, microbatch) has to do what."""
    walks = [(s, m) for c in schedule.flows for s in c.stages for m in c.microbatches]
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
    edges = edges_of(schedule, m)
    if part.op == "F":
        before = [("F", a, m - shift) for a, b, shift in edges if b == s and (not shift or m % k)]
        return [*([("F", s, m - 1)] if m % k else []), *before]
    carry = [("B", s, m + 1)] if (m + 1) % k else []
    return [*carry, ("F", s, m), *(("B", b, m) for a, b, _ in edges if a == s)]


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
                through = [f for f in schedule.flows if i.stage in f.stages]
                if schedule.placement[i.stage] != rank or not any(
                    i.microbatch in f.microbatches for f in through
                ):
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
        return (kind, stage, rank, microbatch) in self.received[rank]

    def post(self, rank, messages):
        names = [name_of(self.schedule, i) for i in messages]
        for i, name in zip(messages, names, strict=True):
            if name is None or (i.op in SENDING and (name[0], name[1], name[3]) not in self.computed[rank]):
                return False
        batches = {}
        for i, name in zip(messages, names, strict=True):
            way = "out" if i.op in SENDING else "in"
            peer = name[2] if way == "out" else self.schedule.placement[name[1]]
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

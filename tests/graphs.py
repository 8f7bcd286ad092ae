"""Schedules of graphs drawn at random: stages with several edges, in flows that share stages."""

from __future__ import annotations

from itertools import combinations, pairwise

from ppfunc.schedule import B, F, Flow, I, Schedule, W


def random_graph(rng, most=6, ranks=None):
    """A schedule of some flows over a graph, each rank in a random order that is possible."""
    ranks = ranks or rng.randint(1, 3)
    stages = rng.randint(max(2, ranks), max(ranks, most))
    home = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(home)
    flows, skips, replicas = rng.choice([whole_flow, dealt_flows])(rng, stages)
    numbers = {m: flow for flow in flows for m in flow.microbatches}
    work = {}
    for m, flow in numbers.items():
        edges = [*flow.pairs, *(s for s in skips if set(s) <= set(flow.stages))]
        for s in flow.stages:
            work[F(s, m)] = [F(a, m) for a, b in edges if b == s]
            after = [(b, m) for a, b in edges if a == s]
            if rng.random() < 0.5:
                work[B(s, m)] = [F(s, m), *after]
            else:
                work[I(s, m)] = [F(s, m), *after]
                work[W(s, m)] = [I(s, m)]
    programs, done = [[] for _ in range(ranks)], set()
    while work:
        ready = [i for i, needs in work.items() if all(n in done for n in needs)]
        i = rng.choice(ready)
        del work[i]
        done.add(i)
        if i.op != "W" and i.op != "F":
            done.add((i.stage, i.microbatch))
        programs[home[i.stage]].append((i,))
    return Schedule("graph", tuple(home), flows, tuple(map(tuple, programs)), skips, replicas=replicas)


def some_edges(rng, order):
    """Edges of a graph in which every stage leads to another, the last excepted, and skip connections."""
    edges = [pair for pair in combinations(order, 2) if rng.random() < 0.5]
    ends = [a for a in order[:-1] if not any(a == source for source, _ in edges)]
    edges += [(a, order[-1]) for a in ends]
    edges.sort(key=lambda pair: (order.index(pair[0]), order.index(pair[1])))
    skips = [pair for pair in combinations(order, 2) if pair not in edges and rng.random() < 0.3]
    return tuple(edges), tuple(skips)


def flow_of(order, microbatches, edges):
    return Flow(order, microbatches, None if edges == tuple(pairwise(order)) else edges)


def whole_flow(rng, stages):
    order = tuple(rng.sample(range(stages), stages))
    edges, skips = some_edges(rng, order)
    return (flow_of(order, range(rng.randint(1, 3)), edges),), skips, ()


def dealt_flows(rng, stages):
    """Copies of a stage, each with some of the microbatches, before a graph of other stages."""
    copies = rng.randint(1, stages - 1)
    order = tuple(rng.sample(range(copies, stages), stages - copies))
    edges, skips = some_edges(rng, order)
    into = rng.choice(order)
    of = [rng.choice([*range(copies), None]) for _ in range(2 * copies)]
    of[:copies] = range(copies)
    rng.shuffle(of)
    flows = []
    for copy in dict.fromkeys(of):
        mine = tuple(m for m, c in enumerate(of) if c == copy)
        among = range(mine[0], mine[-1] + 1) if len(mine) == mine[-1] - mine[0] + 1 else mine
        before = () if copy is None else (copy,)
        flows.append(flow_of((*before, *order), among, edges))
    skips += tuple((copy, into) for copy in range(copies))
    return tuple(flows), skips, (tuple(range(copies)),) if copies > 1 else ()


DIAMOND = (0, 1), (0, 2), (1, 3), (2, 3)


def in_order(home, flows, skips=(), replicas=(), slices=0):
    """Every microbatch goes all the way before the next begins."""
    programs = [[] for _ in range(max(home) + 1)]
    for flow in flows:
        for m in flow.microbatches:
            for i in (*(F(s, m) for s in flow.stages), *(B(s, m) for s in reversed(flow.stages))):
                programs[home[i.stage]].append((i,))
    return Schedule("by hand", home, flows, tuple(map(tuple, programs)), skips, slices, replicas)


def diamond(**changed):
    return in_order((0, 0, 1, 1), (Flow((0, 1, 2, 3), range(2), DIAMOND)._replace(**changed),))


# Copies 2 and 3 of an encoder before stages 0 and 1, and microbatches without.
DEALT = in_order(
    (0, 1, 0, 1),
    (
        Flow((2, 0, 1), (0, 3), ((0, 1),)),
        Flow((3, 0, 1), range(1, 2), ((0, 1),)),
        Flow((0, 1), range(2, 3)),
    ),
    skips=((2, 0), (3, 0)),
    replicas=((2, 3),),
)

"""Draw steps at random: schedules of all builders and of none, passes, shapes, engines; poison what ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import product
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ppfunc as pp
from ppfunc.schedule import (
    Instruction,
    Op,
    Schedule,
    allocate_slots,
    insert_loads,
    insert_offloads,
    insert_recomputes,
    merge_backward,
    place_communication,
    remove_tail,
    single_chain,
    split_backward,
)
from ppfunc.stage.tree import tree_leaves, tree_map
from tests.builders import BUILDERS
from tests.models import (
    attention_block,
    attention_params,
    dense,
    mlp,
    mlp_params,
    normal,
    remembered,
    squared,
)

WIDTH = 4
TRAINING = [name for name, build in BUILDERS.items() if not build(2, 4).forward_only]
STAGES: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "dense": (dense, lambda seed: {"w": normal(WIDTH, WIDTH, seed=seed)}),
    "mlp": (mlp, lambda seed: mlp_params(WIDTH, seed)),
    "attention": (attention_block, lambda seed: attention_params(WIDTH, seed)),
}
REMATS: dict[str, Any] = {
    "none": "none",
    "cheap": "cheap",
    "full": "full",
    "every other": lambda operator, number: number % 2 == 0,
    "by place": {"*": "full"},
}
GRAPHS = {name: remembered(pp.engines.graph(remat=remat)) for name, remat in REMATS.items()}
DYNAMIC = {f"dynamic {name}": pp.engines.graph(remat=name, dynamic=True) for name in ("none", "full")}
CLOSURES = {"functional": pp.engines.functional, "eager": pp.engines.eager}
ENGINES = GRAPHS | DYNAMIC | CLOSURES


class Case(NamedTuple):
    """Two calls of a step function.

    Args:
        passes: those that made the schedule out of that of its builder.
        kinds: of the stages.
        forms: of each call: rows and length of every microbatch; of all of them, if the batch is whole.
        wants: gradients of parameters, and maybe of inputs.
    """

    schedule: Schedule
    passes: list[str]
    kinds: list[str]
    engine: str
    forms: list[list[tuple[int, int]] | tuple[int, int]]
    wants: int | tuple[int, ...]

    def __repr__(self) -> str:
        s = self.schedule
        return f"{s.name}, {s.ranks} ranks, {s.microbatches} microbatches, {self[1:]}\n{s}"

    @property
    def stages(self) -> list[Callable[..., Any]]:
        return [STAGES[kind][0] for kind in self.kinds]

    @property
    def params(self) -> dict[int, Any]:
        return {s: STAGES[kind][1](s) for s, kind in enumerate(self.kinds)}

    def batch(self, call: int) -> list[list[Tensor]]:
        """Inputs and targets, float64[rows, length, d] each."""
        forms, m = self.forms[call], self.schedule.microbatches
        forms = forms if isinstance(forms, list) else [forms] * m
        return [
            [normal(*form, WIDTH, seed=100 * call + 10 * which + n) for n, form in enumerate(forms)]
            for which in range(2)
        ]

    def step(self, transport: Any) -> Any:
        engine = ENGINES[self.engine]
        return pp.value_and_grad(
            self.stages, squared, self.schedule, transport, engine=engine, argnums=self.wants
        )


def drawn(seed: int, engines: Any = (*8 * [*GRAPHS], *4 * [*CLOSURES], *DYNAMIC)) -> Case:
    """Draw a case, the same for each seed."""
    random = Random(seed)
    schedule, passes = _passed(random, _ordered(random) if random.random() < 0.3 else _built(random))

    sizes = [(random.randint(1, 3), random.randint(1, 5)) for _ in range(2)]  # each is traced once
    return Case(
        schedule,
        passes,
        random.choices(list(STAGES), (4, 2, 1), k=len(set(schedule.model_stages))),
        random.choice(engines),
        [random.choice([size, random.choices(sizes, k=schedule.microbatches)]) for size in sizes],
        random.choice([0, 0, 0, (0, 1)]),
    )


def _built(random: Random) -> Schedule:
    name = random.choice(TRAINING)
    return remove_tail(BUILDERS[name](**random.choice(_arguments(name))))


@cache
def _arguments(name: str) -> list[dict[str, Any]]:
    """List arguments of a builder for few ranks and microbatches."""
    choices: dict[str, Any] = {"ranks": range(1, 5), "microbatches": range(1, 9), "chunks": (1, 2)}
    choices |= {"group": (None, 2, 3), "order": ("source", "head")}
    taken = [n for n in inspect.signature(BUILDERS[name]).parameters if n in choices]
    every = [dict(zip(taken, values, strict=True)) for values in product(*(choices[n] for n in taken))]
    return [few for few in every if few["ranks"] * few["microbatches"] <= 16 and _accepts(name, few)]


def _accepts(name: str, arguments: dict[str, Any]) -> bool:
    try:
        BUILDERS[name](**arguments)
    except ValueError:
        return False
    return True


def _ordered(random: Random) -> Schedule:
    """Draw a schedule that no builder makes: stages on any ranks, in any order that has what it needs."""
    ranks, m = random.randint(1, 3), random.randint(1, 5)
    count = random.randint(ranks, 4)
    placement = [*range(ranks), *random.choices(range(ranks), k=count - ranks)]
    random.shuffle(placement)
    parted = {(s, n) for s in range(count) for n in range(m) if random.random() < 0.5}
    programs: list[list[Instruction]] = [[] for _ in range(ranks)]
    todo = {(op, s, n) for op in "FB" for s in range(count) for n in range(m)} | {("W", *k) for k in parted}
    while todo:
        ready = sorted(one for one in todo if not todo.intersection(_before(*one)))
        todo.remove(one := random.choice(ready))
        op, s, n = one
        op = "I" if op == "B" and (s, n) in parted else op
        programs[placement[s]].append(Instruction(Op(op), s, n))
    return single_chain("random", tuple(placement), m, programs)


def _before(op: str, s: int, n: int) -> list[tuple[str, int, int]]:
    """List what runs before: F of the stage before, B of the stage after."""
    return {"F": [("F", s - 1, n)], "B": [("F", s, n), ("B", s + 1, n)], "W": [("B", s, n)]}[op]


def _passed(random: Random, schedule: Schedule) -> tuple[Schedule, list[str]]:
    """Apply some passes, and name them."""
    some, number = [s for s in range(schedule.stages) if random.random() < 0.6], random.randint(0, 2)
    passes: dict[str, Callable[[Schedule], Schedule]] = {
        "split": lambda s: split_backward(s, overlapped=number > 0),
        "merge": merge_backward,
        "recompute": lambda s: insert_recomputes(s, some),
        "offload": lambda s: insert_offloads(s, some, lookahead=number),
        "loads": insert_loads,
    }
    chosen = [name for name in random.sample(list(passes), len(passes)) if random.random() < 0.4]
    if random.random() < 0.5:
        chosen.append("slots")
        passes["slots"] = lambda s: allocate_slots(s if s.has_messages else place_communication(s))
    for name in chosen:
        schedule = passes[name](schedule)
    return schedule, chosen


def called(
    case: Case, rank: int | None, transport: Any, move: Callable[[Tensor], Tensor] = lambda t: t
) -> list[Any]:
    """Call a step with one batch, another, and the first again; return losses and gradients of each call.

    What it was given and has returned is poisoned after each call.

    Args:
        rank: that of this process; None if all are here.
        move: moves a tensor to a device.
    """

    def given(tree: Any) -> Any:
        return tree_map(lambda t: move(t.clone()), tree)

    placement, chains = case.schedule.placement, case.schedule.flows
    first, last = ({placement[chain.stages[n]] for chain in chains} for n in (0, -1))
    held = case.params if rank is None else case.schedule.model_stages_of(rank)
    params, step, results = given({s: case.params[s] for s in held}), case.step(transport), []
    for call in (0, 1, 0):
        batches: list[Any] = [
            given(rows) if rank is None or rank in at else None
            for rows, at in zip(case.batch(call), (first, last), strict=True)
        ]
        join = pp.Microbatches if isinstance(case.forms[call], list) else torch.cat
        batches = [rows and join(rows) for rows in batches]
        returned = step(params, *batches)
        loss, gradients, inputs = pp.runtime.StepResult(*returned)[:3]
        results.append(tree_map(lambda t: t.detach().cpu().clone(), (loss, gradients, inputs)))
        for t in tree_leaves((batches, tuple(returned))):
            if t is not None:
                t.fill_(torch.nan)
    return results


def rows(batch: Any) -> Tensor:
    """The elements of all microbatches, or of a whole batch, in one row."""
    return torch.cat([t.flatten() for t in tree_leaves(batch)])


def expected(case: Case, call: int) -> tuple[Tensor, dict[int, Any], list[Tensor]]:
    """Loss and gradients of the model in one piece, by plain autograd."""
    params, (inputs, targets) = tree_map(Tensor.requires_grad_, (case.params, case.batch(call)))
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs, targets, strict=True):
        for s, fn in enumerate(case.stages):
            x = fn(params[s], x)
        total = total + squared(x, target) / len(inputs)
    total.backward()
    return total.detach(), tree_map(lambda t: t.grad, params), [t.grad for t in inputs]

"""A trainer goes on by another schedule: the state stays as it is, the programs too, and the bits."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

import ppfunc as pp
from ppfunc.schedule import Costs, compute_only, simulate
from tests.models import new_trainer, same_bits, squared
from tests.training.trainer.problems import STEPS, TIED, problem, tied_problem, train

SCHEDULES = {
    "one stage per rank": (4, [pp.one_f_one_b, pp.gpipe, pp.zb_h2]),
    "loops": (2, [pp.interleaved_1f1b, pp.interleaved_zb]),
    "wave": (2, [pp.zbv, pp.v_half, pp.v_min]),
}


def going_on(trainer, builders, ranks, params, x, y):
    """The states after steps of each schedule in turn."""
    state, states = trainer.init(params), []
    for n, build in enumerate((builders * STEPS)[:STEPS]):
        trainer = trainer.with_schedule(build(ranks, 4))
        state, _ = trainer.step(state, x, y, seed=(0, n))
        states.append(state)
    return states


@pytest.mark.parametrize("options", [{"clip": 0.3}, {"on_nonfinite": "ignore"}], ids=["clip", "ignore"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_of_other_schedules_have_the_bits_of_one(name, options):
    ranks, builders = SCHEDULES[name]
    stages, params, x, y = tied_problem()
    traced, middle = [], stages[1]

    def counted(params, h):
        traced.append(h.shape)
        return middle(params, h)

    stages[1] = counted
    with new_trainer(
        stages, F.cross_entropy, builders[0](ranks, 4), pp.optim.adamw(1e-2), tied=TIED, **options
    ) as trainer:
        wanted, _ = train(trainer, params, x, y)
        before, states = len(traced), going_on(trainer, builders, ranks, params, x, y)
        assert len(traced) == before
        other = trainer.with_schedule(builders[1](ranks, 4))
        losses = [t.evaluate(wanted, x, y, seed=(0, 0)) for t in (trainer, other)]
    assert same_bits(states[-1], wanted) and losses[0] == losses[1]


def test_a_split_keeps_its_skips():
    stages = [
        lambda w, x: pp.Output(x * w, skips={2: x}),
        lambda w, x: x + w,
        lambda w, r: r.x * r.skips[0] * w,
    ]
    params = {s: tree["w"][0, :1] for s, tree in problem(3)[1].items()}
    _, _, x, y = problem(3)
    y = x
    with new_trainer(stages, squared, pp.with_skips(pp.gpipe(3, 4), [(0, 2)]), pp.optim.sgd(0.1)) as trainer:
        wanted, _ = train(trainer, params, x, y)
        *_, got = going_on(trainer, [pp.zb_h1, pp.gpipe, pp.one_f_one_b], 3, params, x, y)
    assert same_bits(got, wanted)


def test_what_would_move_the_state_is_refused():
    stages, *_ = problem()
    with new_trainer(stages, squared, pp.interleaved_1f1b(2, 4), pp.optim.sgd(0.1)) as trainer:
        with pytest.raises(
            ValueError, match="stages on ranks \\[0, 1, 1, 0\\]; the state lies on \\[0, 1, 0, 1\\]"
        ):
            trainer.with_schedule(pp.zbv(2, 4))
        with pytest.raises(pp.ScheduleError, match="expected a Schedule"):
            trainer.with_schedule("zbv")


def test_a_chain_does_not_go_on_for_a_graph():
    """Stages that read all stages before would take the last of them, and give other numbers."""
    fork = pp.schedule.Flow((0, 1, 2), range(2), edges=((0, 1), (0, 2), (1, 2)))
    schedule = pp.arrange([0, 1, 1], [fork])
    stages = [lambda p, x: p * (sum(x) if isinstance(x, tuple) else x)] * 3
    with pp.Trainer(stages, squared, schedule, pp.optim.sgd(0.1)) as trainer:
        chain = pp.plan(2, 2, placement=schedule.placement, effort=0.01).schedule
        with pytest.raises(
            ValueError, match=r"'plan' with the edges .*, expected those of the trainer, .*ppfunc.arr"
        ):
            trainer.with_schedule(chain)
        now = trainer.schedule
        again = pp.arrange(now.placement, now.flows, skips=now.skips, costs=pp.schedule.Costs(backward=3))
        assert trainer.with_schedule(again).schedule.flows == schedule.flows


def in_processes(rank, ranks, names):
    """A trainer in each process, and the same training in this one; one rank is given another schedule."""
    builders = SCHEDULES[names][1]
    stages, params, x, y = tied_problem()
    with new_trainer(
        stages, F.cross_entropy, builders[0](ranks, 4), pp.optim.adamw(1e-2), tied=TIED, clip=0.3
    ) as alone:
        wanted = going_on(alone, builders, ranks, params, x, y)[-1].params
    with new_trainer(
        stages, F.cross_entropy, builders[0](ranks, 4), pp.optim.adamw(1e-2), tied=TIED, clip=0.3,
        transport=pp.P2P(timeout=20),
    ) as trainer:  # fmt: skip
        mine = {s: params[s] for s in trainer.schedule.model_stages_of(rank)}
        got = going_on(trainer, builders, ranks, mine, x, y)[-1].params
        same = all(same_bits(got[s], wanted[s]) for s in mine)
        other = trainer.with_schedule(builders[1 + rank % 2](ranks, 4))
        try:
            other.step(other.init(mine), x, y, seed=(0, 0))
        except pp.AgreementError as error:
            return same, str(error)
    return same, "nothing"


def test_processes_go_on_together_and_refuse_different_schedules(two):
    for same, told in two(in_processes, "wave"):
        assert same and "schedule" in told


def from_different_steps(rank, ranks):
    """One rank goes on from a state before that of the other."""
    stages, params, x, y = problem(2)
    with pp.Trainer(stages, squared, pp.one_f_one_b(2, 4), pp.optim.sgd(0.1), pp.P2P(timeout=20)) as trainer:
        state, _ = trainer.step(trainer.init({rank: params[rank]}), x, y)
        after, _ = trainer.step(state, x, y)
        other = trainer.with_schedule(pp.zb_h1(2, 4))
        with pytest.raises(pp.AgreementError, match="another state"):
            other.step(state if rank else after, x, y)
        other.step(after, x, y)


def test_stages_of_different_steps_are_not_mixed_by_another_schedule(two):
    two(from_different_steps)


def test_a_slow_stage_gets_what_the_plan_promises():
    """The recipe of the docstring: of what a plan of the new costs gains, the schedule it gives has all."""
    schedule = pp.one_f_one_b(4, 8)
    slow = Costs([1, 1, 1.5, 1], backward_input=[1, 1, 1.5, 1], backward_weight=[1, 1, 1.5, 1])
    costs = simulate(schedule, slow).costs()
    after = pp.plan(4, 8, costs, placement=schedule.placement, cap=4)
    stages, params, x, y = problem()
    with new_trainer(stages, squared, schedule, pp.optim.sgd(0.1)) as trainer:
        then = trainer.with_schedule(after.schedule)
        state, _ = then.step(then.init(params), x, y)
        wanted, _ = trainer.step(trainer.init(params), x, y)
    assert same_bits(state, wanted)
    assert simulate(compute_only(then.schedule), slow).makespan == after.value
    assert after.value < simulate(schedule, slow).makespan

"""Say what another schedule of the same placement would gain, from the times of a step that was recorded."""

from dataclasses import replace
from typing import NamedTuple

from ppfunc.schedule import Timeline, compute_only, plan, simulate
from ppfunc.schedule.instruction import RESIDUAL_OPS
from ppfunc.schedule.planner.plan import Plan
from ppfunc.schedule.timeline import peak_activations
from ppfunc.training import Trainer


class Replan(NamedTuple):
    """A schedule beside the present one, both with measured costs, without sums and updates at the end.

    Args:
        gain: the share of the present seconds that the plan saves; at most 0 where it is no better.
        now: seconds of the present schedule.
        plan: the schedule and its bound; ``trainer.with_schedule(replan.plan.schedule)`` goes on with it.
    """

    gain: float
    now: float
    plan: Plan


def replan(trainer: Trainer, timeline: Timeline, *, effort: float = 1) -> Replan:
    """Plan again for the placement of a trainer, from the costs of a step, within the activations of today.

    Every rank gets the same plan from the timeline that ``trainer.record`` gives to all. Then, at the same
    point on all ranks::

        (state, metrics), timeline = trainer.record(state, inputs, targets)
        again = pp.replan(trainer, timeline)
        if again.gain > 0.02:
            trainer = trainer.with_schedule(again.plan.schedule)

    Where the schedule has no I and W apart, half of B is the time of each. What I leaves for W counts as a
    whole activation, so no rank ever holds more of them than now.

    Args:
        timeline: of ``trainer.record``, of this schedule.
        effort: as of :func:`ppfunc.plan`.

    Raises:
        ValueError: a schedule that moves residuals or computes them again; a timeline of another schedule;
            one of several chains, whose replicas no plan has.
    """
    present, costs = compute_only(trainer.schedule), timeline.costs()
    if moved := trainer.schedule.ops & RESIDUAL_OPS:
        raise ValueError(
            f"trainer: its schedule has {', '.join(sorted(moved))}, whose times a step does not tell; use"
            " plan(...) with costs of them"
        )
    rows = [
        [*map(list, map(s.instructions, range(s.ranks)))] for s in (present, compute_only(timeline.schedule))
    ]
    if rows[0] != rows[1] or not timeline.measured:
        raise ValueError(
            f"timeline: got a {'measured' if timeline.measured else 'simulated'} one of"
            f" {timeline.schedule.name!r}, expected that of trainer.record(...), of {present.name!r}"
        )
    if len(present.chains) > 1:
        raise ValueError(
            f"trainer: its schedule {present.name!r} has {len(present.chains)} chains, a plan has one; make a"
            " trainer of another schedule"
        )
    rest = {"step": 0, "reduce_grad": 0, "reduce_tied": 0, "unshard": 0}
    bare = replace(costs, backward=None, overlapped=None, weight_share=1, **rest)
    place, cap = present.placement, peak_activations(present, bare)
    found = plan(present.ranks, present.microbatches, bare, cap=cap, placement=place, effort=effort)
    now = simulate(present, costs).makespan
    return Replan(1 - found.value / now, now, found)

"""Costs of other stages: those of a schedule with replicas, those of a rank's share of the model."""

from __future__ import annotations

from fractions import Fraction

import pytest

import ppfunc as pp
from ppfunc.schedule import Costs, simulate


def test_schedules_are_compared_for_one_model():
    share = Costs(
        forward=6,
        backward_input=6,
        backward_weight=6,
        backward=12,
        overlapped=18,
        activation=6,
        parameters=6,
        communication=1,
    )
    for schedule, stages in (
        (pp.one_f_one_b(4, 8), 4),
        (pp.interleaved_1f1b(4, 8, chunks=3), 12),
        (pp.zbv(4, 8), 8),
        (pp.dualpipe(4, 8), 4),
        (pp.dualpipev(4, 8), 8),
        (pp.data_parallel(4, 2), 1),
    ):
        costs = share.per_rank(schedule)
        assert (costs.forward, costs.backward, costs.overlapped) == (24 / stages, 48 / stages, 72 / stages), (
            schedule.name
        )
        assert (costs.activation, costs.parameters, costs.communication) == (24 / stages, 24 / stages, 1)
        # Whatever the schedule, all ranks together compute every microbatch once.
        timeline = simulate(schedule, costs)
        assert sum(timeline.makespan - idle for idle in timeline.idle) == 4 * 18 * schedule.microbatches


def test_shares_are_exact_where_the_costs_are():
    costs = Costs(forward=1, backward=0.5).per_rank(pp.interleaved_1f1b(2, 2, chunks=3))
    assert costs.forward == Fraction(1, 3) and costs.backward == 0.5 / 3
    assert isinstance(Costs(forward=4).per_rank(pp.zbv(2, 2)).forward, int)
    assert Costs().per_rank(pp.gpipe(2, 2)) == Costs()


@pytest.mark.parametrize("value", [[1, 2], {0: 1}])
def test_costs_of_single_stages_have_no_share(value):
    with pytest.raises(ValueError, match="backward_input is .*, expected one number: that of a rank's share"):
        Costs(backward_input=value).per_rank(pp.gpipe(2, 2))


def test_costs_of_a_model_become_those_of_its_replicas():
    schedule = pp.dualpipe(2, 4)
    costs = Costs(forward=[1, 3], bytes={0: 7}, bandwidth=2, weight_share=[0.5, 0]).of_stages(
        schedule.model_stages
    )
    assert costs == Costs(
        forward=(1, 3, 1, 3), bytes=(7, 0, 7, 0), bandwidth=2, weight_share=(0.5, 0, 0.5, 0)
    )
    assert simulate(schedule, costs).makespan > simulate(schedule).makespan
    with pytest.raises(ValueError, match="forward has 3 numbers, expected 2"):
        Costs(forward=[1, 2, 3]).of_stages(schedule.model_stages)

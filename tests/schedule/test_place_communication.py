"""Where messages are put."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    BUILDERS,
    Flow,
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    allocate_slots,
    check,
    gpipe,
    insert_loads,
    interleaved_zb,
    one_f_one_b,
    place_communication,
    remove_communication,
    single_chain,
    split_backward,
    zbv,
)
from ppfunc.schedule.dataflow import Dataflow
from ppfunc.schedule.instruction import COMMUNICATION


def text(schedule):
    return [" | ".join(" ".join(map(str, step)) for step in program) for program in schedule.programs]


def made_from(text):
    """A schedule of one chain from lines such as ``0F0 0F1 / 1F0``, one rank each; stages in order of
    rank.
    """
    rows = [
        [Instruction(Op(cell[1]), int(cell[0]), int(cell[2])) for cell in row.split()]
        for row in text.split("/")
    ]
    placement = dict(sorted((i.stage, rank) for rank, row in enumerate(rows) for i in row))
    return single_chain("text", placement.values(), 1 + max(i.microbatch for row in rows for i in row), rows)


def test_the_picture_of_one_f_one_b():
    assert text(place_communication(one_f_one_b(ranks=2, microbatches=3))) == [
        "0F0 | 0SEND_F0 0F1 | 0SEND_F1 0RECV_B0 0B0 | 0F2 | 0SEND_F2 0RECV_B1 0B1 | 0RECV_B2 0B2",
        "1RECV_F0 1F0 | 1B0 | 1RECV_F1 1SEND_B0 1F1 | 1B1 | 1RECV_F2 1SEND_B1 1F2 | 1B2 | 1SEND_B2",
    ]


def test_neighbours_on_one_rank_need_no_message():
    lowered = place_communication(zbv(ranks=2, microbatches=2))
    messages = {
        (i.op, i.stage) for p in lowered.programs for step in p for i in step if i.op in COMMUNICATION
    }
    assert messages == {
        (Op.SEND_F, 0), (Op.RECV_F, 1), (Op.SEND_F, 2), (Op.RECV_F, 3),
        (Op.SEND_B, 3), (Op.RECV_B, 2), (Op.SEND_B, 1), (Op.RECV_B, 0),
    }  # fmt: skip


def test_a_rank_alone_sends_nothing():
    schedule = gpipe(ranks=1, microbatches=3)
    assert place_communication(schedule) == schedule


def test_idle_steps_are_dropped_and_other_instructions_kept():
    schedule = insert_loads(one_f_one_b(ranks=2, microbatches=2))
    idle = replace(schedule, programs=tuple(((), *p, ()) for p in schedule.programs))
    assert place_communication(idle) == place_communication(schedule)
    assert text(place_communication(idle))[1].startswith("1RECV_F0 1LOAD0 1F0")


def test_a_gradient_leaves_before_the_weight_gradient_is_computed():
    lowered = place_communication(split_backward(gpipe(ranks=2, microbatches=1)))
    assert text(lowered)[1] == "1RECV_F0 1F0 | 1I0 | 1SEND_B0 1W0"
    joined = replace(
        lowered,
        programs=(
            lowered.programs[0],
            (*lowered.programs[1][:1], (*lowered.programs[1][1], *lowered.programs[1][2])),
        ),
    )
    assert place_communication(remove_communication(joined)) == lowered


def test_a_step_of_several_computations_is_cut_where_a_message_must_stand():
    one_step = Schedule(
        "one step",
        (0, 1),
        (Flow((0, 1), range(2)),),
        (
            (tuple(Instruction(Op.F, 0, m) for m in range(2)),),
            (tuple(Instruction(Op.F, 1, m) for m in range(2)),),
        ),
    )
    assert text(place_communication(one_step)) == [
        "0F0 | 0SEND_F0 0F1 | 0SEND_F1",
        "1RECV_F0 1F0 | 1RECV_F1 1F1",
    ]


def test_a_receive_comes_early_where_the_order_of_the_pair_demands_it():
    # Rank 1 uses what it got first last: the message of microbatch 0 is received with that of microbatch 1.
    lowered = place_communication(made_from("0F0 0F1 / 1F1 1F0"))
    assert text(lowered) == ["0F0 | 0SEND_F0 0F1 | 0SEND_F1", "1RECV_F0 1RECV_F1 1F1 | 1F0"]
    check(lowered)


def test_a_message_that_would_hold_up_a_batch_gets_a_batch_of_its_own():
    # Rank 0 needs RECV_F3 of stage 3 for its next forward; a SEND_B0 in the same batch would make that
    # forward wait until rank 2 takes the gradient, which comes after it has got what rank 0 makes of F3.
    lowered = place_communication(interleaved_zb(ranks=3, microbatches=4))
    assert "| 3RECV_F3 | 3SEND_B0 3W0 | 3F3 |" in text(lowered)[0]
    program = lowered.programs[0]
    at = program.index((Instruction(Op.RECV_F, 3, 3),))
    joined = (*program[:at], program[at] + program[at + 1], *program[at + 2 :])
    with pytest.raises(ScheduleError, match="deadlock"):
        check(replace(lowered, programs=(joined, *lowered.programs[1:])))


def test_skip_connections_name_their_other_end():
    lowered = place_communication(replace(one_f_one_b(ranks=3, microbatches=1), skips=((0, 2),)))
    assert text(lowered) == [
        "0F0 | 0SEND_F0 0SEND_F0>2 0RECV_B0>2 0RECV_B0 0B0",
        "1RECV_F0 1F0 | 1SEND_F0 1RECV_B0 1B0 | 1SEND_B0",
        "2RECV_F0>0 2RECV_F0 2F0 | 2B0 | 2SEND_B0>0 2SEND_B0",
    ]
    check(lowered)


def test_what_is_lowered_stays_as_it_is():
    lowered = place_communication(gpipe(ranks=2, microbatches=2))
    assert place_communication(lowered) is lowered


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        place_communication(made_from("0F0 0B0 0F1 0B1 / 1F0 1F1 1B1 1B0"))
    assert (caught.value.rank, str(caught.value.instruction)) in {(0, "0B0"), (1, "1F1")}


def random_schedule(seed):
    """Any placement, chains, skip connections, and any order in which everything is there before it is
    used.
    """
    rng = random.Random(seed)
    ranks, length, chains = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 2)
    stages = length * chains
    placement = tuple(rng.randrange(ranks) for _ in range(stages))
    count = rng.randint(1, 4)
    paths = tuple(
        Flow(tuple(range(c * length, (c + 1) * length)), range(c * count, (c + 1) * count))
        for c in range(chains)
    )
    pairs = [(a, b) for c in paths for a in c.stages for b in c.stages if b >= a + 2]
    skips = tuple(sorted(rng.sample(pairs, min(len(pairs), rng.randrange(3)))))
    todo = []
    for chain in paths:
        for m in chain.microbatches:
            for s in chain.stages:
                todo.append((Op.F, s, m))
                todo += [(Op.I, s, m), (Op.W, s, m)] if rng.random() < 0.5 else [(Op.B, s, m)]
    bare = Schedule("random", placement, paths, tuple(() for _ in range(ranks)), skips)
    flow, made, programs = Dataflow(bare), set(), [[] for _ in range(ranks)]
    while todo:
        ready = [
            i for i in map(lambda t: Instruction(*t), todo) if all(v in made for v, _ in flow.consumed(i))
        ]
        chosen = rng.choice(ready)
        todo.remove(chosen[:3])
        made |= set(flow.products(chosen))
        program = programs[placement[chosen.stage]]
        if program and rng.random() < 0.2:
            program[-1] = (*program[-1], chosen)
        else:
            program.append((chosen,))
    return replace(bare, programs=tuple(map(tuple, programs)))


@given(st.integers(0, 2**32), st.integers(0, 3))
def test_any_placement_and_any_order_is_proved(seed, lookahead):
    schedule = random_schedule(seed)
    lowered = place_communication(schedule, lookahead=lookahead)
    assert check(lowered).peak_activations == check(schedule).peak_activations
    check(replace(lowered, programs=tuple(tuple((i,) for step in p for i in step) for p in lowered.programs)))
    check(allocate_slots(lowered))
    for rank in range(schedule.ranks):
        assert [i for i in lowered.instructions(rank) if i.op not in COMMUNICATION] == list(
            schedule.instructions(rank)
        )


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("p", "m"), [(2, 5), (3, 2), (4, 8), (6, 13)])
def test_every_placement_is_proved(name, p, m):
    try:
        schedule = BUILDERS[name](p, m)
    except ValueError:
        pytest.skip("the builder does not take these numbers")
    for lookahead in (0, 1, 2):
        lowered = place_communication(remove_communication(schedule), lookahead=lookahead)
        assert check(lowered).peak_activations == check(schedule).peak_activations


def test_receives_are_posted_early_as_far_as_the_order_of_the_pair_lets_them():
    lowered = place_communication(one_f_one_b(2, 4), lookahead=1)
    first, last = ([" ".join(map(str, step)) for step in program] for program in lowered.programs)
    assert last[:4] == ["1RECV_F0 1F0", "1RECV_F1 1B0", "1SEND_B0 1F1", "1RECV_F2 1B1"]
    # What the next compute consumes and what the one after it consumes are no one batch.
    assert first[-3:] == ["0SEND_F3 0RECV_B2", "0RECV_B3 0B2", "0B3"]

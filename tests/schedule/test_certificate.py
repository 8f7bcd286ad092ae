"""What ``check`` proves, and what it says about what is wrong."""

from __future__ import annotations

import pickle
import random
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import (
    Flow,
    Instruction,
    Op,
    Schedule,
    ScheduleError,
    allocate_slots,
    append_tail,
    check,
    data_parallel,
    deepspeed_inference,
    deepspeed_train,
    dualpipe,
    gpipe,
    inference,
    insert_loads,
    insert_offloads,
    one_f_one_b,
    place_communication,
    remove_slots,
    zb_h1,
)
from tests.clock import busy
from tests.schedule.written import made_from


def step_atomic(schedule):
    return check(schedule).step_atomic


def refused(schedule, **options):
    with pytest.raises(ScheduleError) as caught:
        check(schedule, **options)
    return caught.value


GOOD = ("0F0 | 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 | 1B0 | 1SEND_B0")
TWO = (
    "0F0 | 0SEND_F0 0F1 | 0SEND_F1 0RECV_B0 0B0 | 0RECV_B1 0B1",
    "1RECV_F0 1F0 | 1B0 | 1RECV_F1 1SEND_B0 1F1 | 1B1 | 1SEND_B1",
)

EXCHANGED = TWO[1].replace("1RECV_F0", "x").replace("1RECV_F1", "1RECV_F0").replace("x", "1RECV_F1")
BATCH = "0F0 | 0F1 | 0SEND_F0 0SEND_F1"

# rows, microbatches, rank, position, instruction, words of the reason
WRONG = {
    "forward missing": (("0SEND_F0 0RECV_B0 0B0", GOOD[1]), 1, 0, (0, 0), "0SEND_F0", "not computed"),
    "backward missing": (("0F0 | 0SEND_F0 0RECV_B0", GOOD[1]), 1, 0, (0, 0), "0F0", "backward, B or I of stage 0 for microbatch 0"),  # noqa: E501
    "microbatch missing": (GOOD, 2, 0, (1, 2), "0B0", "forward F of stage 0 for microbatch 1 is missing"),
    "weight gradient missing": (("0F0 0I0",), 1, 0, (0, 1), "0I0", "weight gradient W is missing"),
    "weight gradient after a whole backward": (("0F0 0B0 0W0",), 1, 0, (0, 2), "0W0", "has computed the weight gradient already"),  # noqa: E501
    "weight gradient first": (("0F0 0W0 0I0",), 1, 0, (0, 1), "0W0", "input gradient of stage 0"),
    "forward twice": (("0F0 0F0 0B0",), 1, 0, (0, 1), "0F0", "computed twice"),
    "weight gradient twice": (("0F0 0I0 0W0 0W0",), 1, 0, (0, 3), "0W0", "computed twice"),
    "backward twice": (("0F0 0B0 0I0 0W0",), 1, 0, (0, 2), "0I0", "computed twice"),
    "backward first": (("0B0 0F0",), 1, 0, (0, 0), "0B0", "output of stage 0 for microbatch 0"),
    "send missing": (("0F0 | 0RECV_B0 0B0", GOOD[1]), 1, 1, (0, 0), "1RECV_F0", "rank 0, at the other end, never sends"),  # noqa: E501
    "receive missing": ((GOOD[0], "1F0 | 1B0 | 1SEND_B0"), 1, 1, (0, 0), "1F0", "receive has not been posted"),  # noqa: E501
    "last receive missing": (("0F0 | 0SEND_F0 0B0", GOOD[1]), 1, 0, (1, 1), "0B0", "receive has not been posted"),  # noqa: E501
    "send twice": (("0F0 | 0SEND_F0 0SEND_F0 0RECV_B0 0B0", GOOD[1]), 1, 0, (1, 1), "0SEND_F0", "sent twice"),
    "send too early": (("0F0 0SEND_F0 | 0RECV_B0 0B0", GOOD[1]), 1, 0, (0, 1), "0SEND_F0", "not computed in an earlier step"),  # noqa: E501
    "late receive": ((GOOD[0], "1F0 | 1RECV_F0 1B0 | 1SEND_B0"), 1, 1, (0, 0), "1F0", "receive has not been posted"),  # noqa: E501
    "receives exchanged": ((TWO[0], EXCHANGED), 2, 1, (0, 1), "1F0", "receive has"),
    "receives exchanged in a batch": ((BATCH, "1RECV_F1 1RECV_F0 1F0 | 1F1"), 2, 1, (0, 0), "1RECV_F1", "one order"),  # noqa: E501
    "wrong rank": (("0F0 1F0 | 0SEND_F0 0RECV_B0 0B0", GOOD[1]), 1, 0, (0, 1), "1F0", "stage 1 is on rank 1"),
    "stage out of range": (("0F0 7F0", GOOD[1]), 1, 0, (0, 1), "7F0", "from 0 to 1"),
    "microbatch out of range": (("0F0 0F9", GOOD[1]), 1, 0, (0, 1), "0F9", "from 0 to 0"),
    "message at the end of the flow": (("0F0 0B0 | 0SEND_F0",), 1, 0, (1, 0), "0SEND_F0", "last of its flow"),
    "message at the begin of the flow": (("0RECV_F0 0F0 0B0",), 1, 0, (0, 0), "0RECV_F0", "first of its flow"),  # noqa: E501
    "unknown skip": (("0F0 | 0SEND_F0>1 0RECV_B0 0B0", GOOD[1]), 1, 0, (1, 0), "0SEND_F0>1", "no skip connection"),  # noqa: E501
    "step in one stage only": ((GOOD[0] + " | 0STEP", GOOD[1]), 1, 1, (2, 0), "1SEND_B0", "stage 1 ends with neither sum nor step, expected STEP"),  # noqa: E501
    "step twice": (("0F0 0B0 0STEP 0STEP",), 1, 0, (0, 3), "0STEP", "ends with STEP STEP, expected STEP"),
    "step first": (("0F0 0STEP 0B0",), 1, 0, (0, 1), "0STEP", "still computes after it"),
    "step before the sum": (("0F0 0B0 0STEP 0REDUCE_GRAD",), 1, 0, (0, 2), "0STEP", "ends with STEP REDUCE_GRAD, expected REDUCE_GRAD STEP"),  # noqa: E501
    "step without backward": (("0F0 0STEP",), 1, 0, (0, 1), "0STEP", "no backward"),
    "sum over tied places after the optimizer step": (
        ("0F0 0B0 0STEP 0REDUCE_TIED",), 1, 0, (0, 2), "0STEP", "expected REDUCE_TIED STEP"
    ),
    "sum over data ranks first": (("0F0 0REDUCE_GRAD 0B0 0STEP",), 1, 0, (0, 1), "0REDUCE_GRAD", "still computes after it"),  # noqa: E501
    "used while sharded": (("0F0 0UNSHARD 0B0 0RESHARD",), 1, 0, (0, 0), "0F0", "stage 0 are sharded, and F needs them whole: expected UNSHARD before it"),  # noqa: E501
    "used after the reshard": (("0UNSHARD 0F0 0RESHARD 0B0",), 1, 0, (0, 3), "0B0", "sharded since step 0, place 2"),  # noqa: E501
    "unsharded twice": (("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD",), 1, 0, (0, 2), "0UNSHARD", "whole since step 0, place 0, and UNSHARD needs them sharded: expected RESHARD"),  # noqa: E501
    "never resharded": (("0UNSHARD 0F0 0B0",), 1, 0, (0, 0), "0UNSHARD", "stay whole: expected a RESHARD"),
    "resharded twice": (("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD",), 1, 0, (0, 4), "0RESHARD", "sharded since step 0, place 3, and RESHARD needs them whole"),  # noqa: E501
    "stepped while unsharded": (("0UNSHARD 0F0 0B0 0STEP 0RESHARD",), 1, 0, (0, 3), "0STEP", "are whole since step 0, place 0, and STEP needs them sharded"),  # noqa: E501
    "one stage only unsharded": (
        ("0UNSHARD 0F0 0RESHARD 0UNSHARD | 0SEND_F0 0RECV_B0 0B0 0RESHARD", GOOD[1]), 1, 1, (0, 1), "1F0", "stage 1 are sharded",  # noqa: E501
    ),
    "load missing": (("0LOAD0 0F0 0F1",), 2, 0, (0, 2), "0F1", "data of stage 0 for microbatch 1 are missing, .* expected LOAD before"),  # noqa: E501
    "load late": (("0F0 | 0LOAD0",), 1, 0, (0, 0), "0F0", "are missing, .* expected LOAD before"),
    "load twice": (("0LOAD0 0LOAD0 0F0",), 1, 0, (0, 1), "0LOAD0", "are loaded since step 0, place 0, and LOAD needs them missing"),  # noqa: E501
    "fetch without offload": (("0F0 0FETCH0 0B0",), 1, 0, (0, 1), "0FETCH0", "are here since step 0, place 0, and FETCH needs them away: expected OFFLOAD"),  # noqa: E501
    "offload too early": (("0OFFLOAD0 0F0 0B0",), 1, 0, (0, 0), "0OFFLOAD0", "are not computed, and OFFLOAD needs them here: expected F"),  # noqa: E501
    "used while away": (("0F0 0OFFLOAD0 0B0",), 1, 0, (0, 2), "0B0", "are away since step 0, place 1, and B needs them here or back: expected FETCH"),  # noqa: E501
    "fetched when used up": (("0F0 0OFFLOAD0 0FETCH0 0B0 0OFFLOAD0",), 1, 0, (0, 4), "0OFFLOAD0", "used up"),
    "slot overwritten": (("0F0@0 0F1@0 0B0@0 0B1@0",), 2, 0, (0, 1), "0F1@0", "slot 0 of stage 0 still holds microbatch 0"),  # noqa: E501
    "slot changed": (("0F0@0 0B0@1",), 1, 0, (0, 1), "0B0@1", "in slot 0 of stage 0, got slot 1"),
    "slot left out": (("0F0@0 0B0",), 1, 0, (0, 1), "0B0", "has no slot"),
    "ranks wait for each other": (("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"), 2, 0, (0, 1), "0B0", "deadlock: rank 0 .*0B0.*rank 1 .*1F1"),  # noqa: E501
    "a rank waits for itself": (("(0F0;0B0)OVERLAP_F_B",), 1, 0, (0, 0), "(0F0;0B0)OVERLAP_F_B", "not computed before"),  # noqa: E501
    "batches cross": (
        ("0F0 | 0RECV_B0 | 0SEND_F0 | 0B0", "1RECV_F0 1F0 | 1B0 | 1SEND_B0"), 1, 0, (1, 0), "0RECV_B0",
        "deadlock: rank 0 posts the input gradient of stage 1 .* at step 1, before the output of stage 0 .* at step 2, which rank 1 posts at step 0, before the first at step 2",  # noqa: E501
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_schedules_are_refused(case):
    rows, microbatches, rank, position, instruction, words = WRONG[case]
    error = refused(made_from(*rows, microbatches=microbatches))
    assert (error.rank, error.position) == (rank, position)
    assert str(error.instruction) == str(instruction)
    assert re.search(words, error.reason), error.reason


@pytest.mark.parametrize("rows", [GOOD, ("0F0 0I0 0W0",), ("0F0",)])
def test_right_ones_are_accepted(rows):
    check(made_from(*rows))


def test_two_messages_in_opposite_orders_deadlock_in_a_queue():
    # Rank 0 has RECV_B0 before SEND_F1 in its queue, rank 1 the other way round; without queues both would
    # move.
    rows = (
        "0F0 | 0SEND_F0 0F1 | 0RECV_B0 | 0SEND_F1 0B0 | 0RECV_B1 0B1",
        "1RECV_F0 1F0 | 1B0 | 1RECV_F1 1F1 | 1SEND_B0 1B1 | 1SEND_B1",
    )
    error = refused(made_from(*rows, microbatches=2))
    assert "deadlock" in error.reason and "behind" in error.reason
    assert "rank 0" in error.reason and "rank 1" in error.reason


def test_the_message_shows_the_place():
    error = refused(made_from("0F0 | 0SEND_F0 0B0", GOOD[1]))
    assert (
        str(error)
        == "rank 0, step 1, place 1, 0B0: it needs the input gradient of stage 1 for microbatch 0, "
        "but its receive has not been posted before\n\n"
        "        step 0        step 1        step 2\n"
        "rank 0  0F0           0SEND_F0 0B0\n"
        "                               ^^^\n"
        "rank 1  1RECV_F0 1F0  1B0           1SEND_B0"
    )


def test_the_message_stays_short():
    lowered = place_communication(one_f_one_b(256, 300))
    program = lowered.programs[100]
    wide = (tuple(i for step in program for i in step),)
    for broken in (program[:500] + program[501:], wide):
        error = refused(replace(lowered, programs=(*lowered.programs[:100], broken, *lowered.programs[101:])))
        assert len(str(error)) < 2500
        assert "^" in str(error)


def test_a_long_circle_is_cut():
    # Each rank computes the forward only after it has got the backward.
    rows = [f"{s}F0 {s}B0 {s}F1 {s}B1" if s % 2 == 0 else f"{s}F0 {s}F1 {s}B1 {s}B0" for s in range(64)]
    assert len(str(refused(made_from(*rows, microbatches=2)))) < 2500


def test_errors_travel_between_processes():
    error = refused(made_from("0B0 0F0"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_limit_of_activations():
    schedule = one_f_one_b(ranks=4, microbatches=8)
    assert check(schedule, max_activations=4).peak_activations == (4, 3, 2, 1)
    error = refused(schedule, max_activations=3)
    assert (error.rank, str(error.instruction)) == (0, "0F3")
    assert check(inference(ranks=2, microbatches=4), max_activations=1).peak_activations == (1, 1)


def test_offloaded_residuals_do_not_count():
    schedule = insert_offloads(gpipe(ranks=2, microbatches=6), lookahead=1)
    assert check(schedule).peak_activations == (3, 3)


def test_the_certificate_is_tied_to_the_schedule():
    schedule = place_communication(zb_h1(ranks=3, microbatches=4))
    certificate = check(schedule)
    assert certificate.digest == schedule.digest
    assert certificate == check(replace(schedule))
    assert ("W", 12) in certificate.instructions
    assert schedule.digest in str(certificate)


def test_a_long_certificate_is_cut():
    assert "peak activations  1 (rank 63) to 64 (rank 0)\n" in str(check(one_f_one_b(64, 64)))
    assert "peak activations  64 x 4\n" in str(check(gpipe(64, 4)))


def test_step_atomicity():
    for p, m in ((1, 3), (4, 8), (3, 2)):
        for order in ("source", "head"):
            assert step_atomic(deepspeed_train(p, m, order=order))
        assert step_atomic(deepspeed_inference(p, m))
    assert (
        step_atomic(
            made_from(
                *GOOD[:1], GOOD[1].replace("1RECV_F0 1F0 | 1B0 | 1SEND_B0", "| 1RECV_F0 1F0 | 1B0 | 1SEND_B0")
            )
        )
        is False
    )
    aligned = made_from("0F0 | 0SEND_F0 | | 0RECV_B0 0B0", "| 1RECV_F0 1F0 | 1B0 | 1SEND_B0")
    assert step_atomic(aligned)
    assert not step_atomic(place_communication(one_f_one_b(3, 4)))


@pytest.mark.parametrize(("order", "other"), [("source", "head"), ("head", "source")])
def test_the_order_of_messages_and_the_number_of_buffers_go_together(order, other):
    # DeepSpeed changed both in one commit: the older order with the newer number overwrites a live input.
    old, new = deepspeed_train(4, 8, order=order), deepspeed_train(4, 8, order=other)
    sizes = [1 + max(i.slot for i in new.instructions(r) if i.slot is not None) for r in range(4)]

    def renumbered(rank, instruction):
        return (
            instruction
            if instruction.slot is None
            else instruction._replace(slot=instruction.microbatch % sizes[rank])
        )

    mixed = replace(
        old,
        programs=tuple(
            tuple(tuple(renumbered(r, i) for i in s) for s in p) for r, p in enumerate(old.programs)
        ),
    )
    if order == "source":
        assert "still holds" in refused(mixed).reason
    else:
        check(mixed)


def test_a_slot_waits_for_the_message_that_reads_it():
    # Rank 0 takes slot 0 of stage 0 again before rank 1 has taken the message in it. Rank 1 does so only
    # after a forward of the other chain, which comes to it by way of rank 2 from a later step of rank 0.
    rows = (
        "0F0@0 | 0SEND_F0@0 | 0F1@{slot} | 0SEND_F1@{slot} 3F2@0 | 3SEND_F2@0",
        "5RECV_F2@0 5F2@0 | 1RECV_F0@0 1F0@0 2F0@0 | 1RECV_F1@0 1F1@0 2F1@0",
        "4RECV_F2@0 4F2@0 | 4SEND_F2@0",
    )
    chains = (Flow((0, 1, 2), range(2)), Flow((3, 4, 5), range(2, 3)))

    def with_slot(slot):
        schedule = made_from(*(row.format(slot=slot) for row in rows))
        return replace(schedule, placement=(0, 1, 1, 0, 2, 1), flows=chains)

    check(with_slot(1))
    check(remove_slots(with_slot(0)))
    assert "deadlock" in refused(with_slot(0)).reason
    assert check(allocate_slots(with_slot(0))).slots[0] == 2


@pytest.mark.parametrize(
    "skips, text",
    [
        (((0, 1),), "skip (0, 1): expected two stages of one flow without an edge between them"),
        (((2, 0),), "skip (2, 0) leads back, to the next slice of a sequence: expected slices"),
        (((0, 2), (0, 2)), "skip (0, 2) is there twice, expected each once"),
    ],
)
def test_skips_that_lead_nowhere_or_are_there_twice_are_refused(skips, text):
    assert text in refused(replace(gpipe(ranks=3, microbatches=2), skips=skips)).reason


def test_copies_that_are_stepped_must_be_summed():
    schedule = dualpipe(ranks=2, microbatches=4)
    check(append_tail(schedule))
    assert "never summed" in refused(append_tail(schedule, tied=False)).reason
    for tied in (True, [1], [0, 1]):
        check(append_tail(remove_slots(gpipe(2, 2)), tied=tied))
    assert "stages (1, 3) are replicas, but" in refused(append_tail(schedule, tied=[0, 2])).reason
    alone = append_tail(schedule, tied=[0], step=False)
    assert "stage 2 ends with REDUCE_GRAD, expected REDUCE_TIED REDUCE_GRAD" in refused(alone).reason
    check(append_tail(place_communication(schedule), tied=[0, 2], step=False))
    with pytest.raises(ValueError, match=r"tied: got 9, expected a number from 0 to 1"):
        append_tail(gpipe(2, 2), tied=[9])
    check(data_parallel(ranks=2, microbatches=2))


def test_a_sum_over_copies_waits_for_all_of_them():
    schedule = append_tail(dualpipe(ranks=2, microbatches=4), step=False)
    lowered = place_communication(schedule)
    check(lowered)
    # The first rank sums its stage 0 and then waits for the sum while the other still needs its messages.
    program = [
        [i for i in step if (i.op, i.stage) not in ((Op.REDUCE_TIED, 0), (Op.REDUCE_GRAD, 0))]
        for step in lowered.programs[0]
    ]
    last = max(
        k
        for k, step in enumerate(program)
        if any(p.stage == 0 and p.op in (Op.B, Op.W) for i in step for p in (i, *i.parts))
    )
    early = (
        *map(tuple, program[: last + 1]),
        (Instruction(Op.REDUCE_TIED, 0), Instruction(Op.REDUCE_GRAD, 0)),
        *map(tuple, program[last + 1 :]),
    )
    moved = replace(lowered, programs=(early, *lowered.programs[1:]))
    if any(i.op is Op.SEND_B or i.op is Op.SEND_F for step in program[last + 1 :] for i in step):
        assert "sum over the replicas" in refused(moved).reason
    else:
        check(moved)


def test_loads_may_leave_out_the_targets():
    check(insert_loads(gpipe(2, 2)))
    check(insert_loads(gpipe(2, 2), targets=False))
    schedule = insert_loads(gpipe(3, 2))
    middle = replace(
        schedule,
        programs=tuple(
            ((Instruction(Op.LOAD, 1, 0),), *p) if r == 1 else p for r, p in enumerate(schedule.programs)
        ),
    )
    assert "data of stage 1 for microbatch 0 are received" in refused(middle).reason


STRUCTURES = {
    "no ranks": Schedule("x", (), (), ()),
    "no stages": Schedule("x", (), (), ((),)),
    "rank out of range": Schedule("x", (1,), (Flow((0,), range(1)),), ((),)),
    "no chain": Schedule("x", (0,), (), ((),)),
    "stage twice": Schedule("x", (0,), (Flow((0, 0), range(1)),), ((),)),
    "unknown stage": Schedule("x", (0,), (Flow((0, 1), range(1)),), ((),)),
    "unequal chains": Schedule("x", (0, 0, 0), (Flow((0,), range(1)), Flow((1, 2), range(1, 2))), ((),)),
    "shared microbatch": Schedule("x", (0, 0), (Flow((0,), range(2)), Flow((1,), range(1, 3))), ((),)),
    "no microbatch": Schedule("x", (0,), (Flow((0,), range(0)),), ((),)),
    "odd microbatches": Schedule("x", (0,), (Flow((0,), range(0, 4, 2)),), ((),)),
    "negative microbatches": Schedule("x", (0,), (Flow((0,), range(-1, 1)),), ((),)),
    "skip to a neighbour": Schedule("x", (0, 0), (Flow((0, 1), range(1)),), ((),), ((0, 1),)),
    "skip of three": Schedule("x", (0, 0), (Flow((0, 1), range(1)),), ((),), ((0, 1, 2),)),
    "skip twice": Schedule("x", (0, 0, 0), (Flow((0, 1, 2), range(1)),), ((),), ((0, 2), (0, 2))),
    "list of programs": Schedule("x", (0,), (Flow((0,), range(1)),), []),
    "list of steps": Schedule("x", (0,), (Flow((0,), range(1)),), ([],)),
    "list of instructions": Schedule("x", (0,), (Flow((0,), range(1)),), (([],),)),
    "no instruction": Schedule("x", (0,), (Flow((0,), range(1)),), (((1,),),)),
    "short instruction": Schedule(
        "x", (0,), (Flow((0,), range(1)),), (((tuple.__new__(Instruction, (Op.F, 0)),),),)
    ),
    "peer that is no number": Schedule(
        "x", (0,), (Flow((0,), range(1)),), (((Instruction(Op.RECV_F, 0, 0, []),),),)
    ),
    "immense range": Schedule("x", (0,), (Flow((0,), range(10**30)),), (((Instruction(Op.F, 0, 10**29),),),)),
    "huge range": Schedule("x", (0,), (Flow((0,), range(10**15)),), (((Instruction(Op.F, 0, 10**14),),),)),
    "no schedule": None,
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_values_that_are_no_schedules_are_refused(case):
    begin = time.perf_counter()
    assert refused(STRUCTURES[case]).reason
    assert time.perf_counter() - begin < busy()


LAYOUTS = (
    ((0, 1), (Flow((0, 1), range(2)),)),
    ((0, 1, 0), (Flow((0, 1, 2), range(2)),)),
    ((0, 1), (Flow((0,), range(1)), Flow((1,), range(1, 2)))),
)


def garbage(rng):
    """Instructions of which most have something that is not what it should be."""

    def anything():
        return rng.choice(
            [None, -1, 0, 1, 7, 10**20, 0.5, float("nan"), True, "F", (), (1,), [], rng.choice(list(Op))]
        )

    def instruction(depth=0):
        sound = [
            rng.choice(list(Op)),
            rng.randrange(3),
            rng.choice([None, 0, 0, 1]),
            rng.choice([None, None, 2]),
            rng.choice([None, None, 1]),
            (),
        ]
        if depth == 0 and rng.random() < 0.2:
            sound[5] = tuple(instruction(1) for _ in range(rng.randrange(3)))
        if rng.random() < 0.3:
            sound[rng.randrange(6)] = anything()
        return Instruction(*sound)

    def step():
        return tuple(instruction() if rng.random() < 0.98 else anything() for _ in range(rng.randrange(4)))

    return tuple(tuple(step() for _ in range(rng.randrange(5))) for _ in range(2))


@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_garbage_is_refused_and_nothing_else_is_raised(layout, seed):
    with pytest.raises(ScheduleError) as caught:
        check(Schedule("garbage", *layout, garbage(random.Random(seed))))
    assert str(caught.value)


def test_time_grows_with_the_number_of_instructions_only():
    def seconds(microbatches):
        lowered = place_communication(one_f_one_b(4, microbatches))
        return min(_timed(check, lowered) for _ in range(3)) / microbatches

    assert seconds(400) < 4 * busy() * seconds(40)


def _timed(function, *args):
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


def test_slots_are_proved_for_what_allocation_gives():
    certificate = check(allocate_slots(place_communication(one_f_one_b(4, 8))))
    assert certificate.slots == (4, 4, 3, 2)
    assert "slots per stage   4 4 3 2" in str(certificate)

"""The digest of a schedule, and what its copies carry."""

import copy
import pickle
from dataclasses import replace

from ppfunc.schedule import (
    B,
    F,
    Flow,
    I,
    Instruction,
    Op,
    Schedule,
    check,
    one_f_one_b,
    overlap,
    place_communication,
)


def _fields(schedule):
    return repr((schedule.placement, schedule.flows, schedule.programs, schedule.skips))


def test_schedules_that_differ_in_anything_but_the_name_have_different_digests():
    one, two = F(0, 0), Instruction(Op.B, 0, 0)
    whole, send = Instruction(Op.UNSHARD, 0), Instruction(Op.SEND_F, 0, 0)
    pairs = [
        overlap(F(0, 0), B(0, 1)),
        overlap(F(0, 0), I(0, 1)),
        overlap(F(0, 0), B(0, 2)),
        overlap(F(0, 1), B(0, 1)),
    ]
    slotted = [overlap(*(part._replace(slot=slot) for part in pairs[0].parts)) for slot in (0, 1)]
    programs = [
        (),
        ((),),
        ((), ()),
        ((one,),),
        ((two,),),
        ((one, two),),
        ((one,), (two,)),
        ((two,), (one,)),
        ((one, two), ()),
        ((), (one, two)),
        ((F(1, 0),),),
        ((F(0, 1),),),
        ((F(0, 256),),),
        ((whole, send),),
        ((whole,),),
        ((send,),),
        *(
            ((i._replace(**{field: value}),),)
            for i in (one, send)
            for field in ("peer", "slot")
            for value in (0, 1)
        ),
        *(
            ((i._replace(**{field: value}), one),)
            for i in (one, send)
            for field in ("peer", "slot")
            for value in (0, 1)
        ),
        ((one._replace(peer=0, slot=0),),),
        *(((i,),) for i in (*pairs, *slotted)),
    ]
    chains = [(Flow(stages, range(*m)),) for stages in ((0, 1), (1, 0)) for m in ((0, 2), (1, 2))]
    chains.append((Flow((0,), range(1)), Flow((1,), range(1, 2))))
    schedules = [
        *(Schedule("a", (0, 0), chains[0], (program,)) for program in programs),
        *(
            Schedule("a", (0, 0), chains[0], of_ranks)
            for of_ranks in ((), ((), ()), (programs[3], ()), ((), programs[3]))
        ),
        *(Schedule("a", placement, chains[0], ((), ())) for placement in ((0, 1), (1, 0), (0, 1, 1))),
        *(Schedule("a", (0, 0), of_two, ()) for of_two in chains[1:]),
        *(Schedule("a", (0, 0), chains[0], (), skips) for skips in (((0, 1),), ((1, 0),), ((0, 1), (1, 0)))),
    ]
    assert (
        len({schedule.digest for schedule in schedules})
        == len(set(map(_fields, schedules)))
        == len(schedules)
    )
    assert all(replace(schedule, name="b").digest == schedule.digest for schedule in schedules)


def test_copies_of_schedules_carry_their_fields_only():
    schedule = place_communication(one_f_one_b(2, 4))
    fresh = len(pickle.dumps(schedule))
    check(schedule)
    assert len(pickle.dumps(schedule)) == fresh
    assert pickle.loads(pickle.dumps(schedule)) == copy.copy(schedule) == schedule

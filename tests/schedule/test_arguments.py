"""Arguments of a wrong type are refused by their names, wherever a user passes them."""

import inspect

import pytest

import ppfunc.schedule as ps
from ppfunc.schedule import B, Costs, F, I, ScheduleError, W
from ppfunc.schedule.proof.timeline import timeline_of

GPIPE = ps.gpipe(3, 2)


def takes_one_schedule(function):
    first, *others = inspect.signature(function).parameters.values()
    return first.name == "schedule" and all(other.default is not other.empty for other in others)


OF_A_SCHEDULE = [
    name for name in dir(ps) if inspect.isfunction(f := getattr(ps, name)) and takes_one_schedule(f)
]


def test_they_are_found():
    assert {"check", "simulate", "to_csv", "place_communication", "insert_offloads"} <= {*OF_A_SCHEDULE}


@pytest.mark.parametrize("name", OF_A_SCHEDULE)
def test_what_is_no_schedule_is_refused(name):
    for wrong in (None, 3, "gpipe", ["0F0"]):
        with pytest.raises(ScheduleError, match=f"of type {type(wrong).__name__}, expected a Schedule"):
            getattr(ps, name)(wrong)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: ps.from_csv(None),
            TypeError,
            "text: got None of type NoneType, expected the content of a file",
        ),
        (lambda: ps.from_csv(b"0F0"), TypeError, "text: got b'0F0' of type bytes"),
        (lambda: ps.from_json(3), TypeError, "text: got 3 of type int"),
        (
            lambda: ps.parse_instruction(None),
            TypeError,
            "text: got None of type NoneType, expected the text of an instruction",
        ),
        (
            lambda: ps.find_builder(3),
            TypeError,
            "name: got 3 of type int, expected that of a schedule, such as '1f1b'",
        ),
        (lambda: Costs.from_json(b"{}"), TypeError, "text: got b'{}' of type bytes"),
        (lambda: Costs().per_rank(3), ScheduleError, "of type int, expected a Schedule"),
        (lambda: ps.with_skips(None, [(0, 2)]), ScheduleError, "of type NoneType"),
        (lambda: ps.with_skips(GPIPE, 3), TypeError, "skips: got 3 of type int, expected a list of pairs"),
        (
            lambda: ps.with_skips(GPIPE, iter([(0, 2)])),
            TypeError,
            "skips: got .* of type list_iterator, expected a list of pairs",
        ),
        (lambda: ps.lower_bound(3, [0, 1], 2), TypeError, "costs: got 3 of type int"),
        (
            lambda: ps.lower_bound(Costs(), 3, 2),
            TypeError,
            "placement: got 3 of type int, expected the rank of every stage",
        ),
        (lambda: ps.plan(2, 2, costs=3), TypeError, "costs: got 3 of type int"),
        (lambda: ps.plan(2, 2, cap=b"ab"), ValueError, "cap is b'ab', expected a finite number above 0"),
        (lambda: ps.zero_bubble(2, 2, costs=3), TypeError, "costs: got 3 of type int"),
        (lambda: ps.zero_bubble(2, 2, costs=0), TypeError, "costs: got 0 of type int"),
        (
            lambda: ps.check(GPIPE, max_activations="a"),
            ValueError,
            "max_activations = 'a', expected an integer of at least 0",
        ),
        (
            lambda: ps.insert_unshards(GPIPE, most="a"),
            ValueError,
            "most = 'a', expected an integer of at least 1",
        ),
        (
            lambda: ps.insert_offloads(GPIPE, lookahead="a"),
            ValueError,
            "lookahead = 'a', expected an integer of at least 0",
        ),
        (
            lambda: ps.to_svg(GPIPE, width="wide"),
            ValueError,
            "width is 'wide', expected a number of pixels from 960 to 100000",
        ),
        (
            lambda: ps.to_scatter(GPIPE),
            TypeError,
            "overview: got .* of type Schedule, expected what compare_schedules returns",
        ),
        (
            lambda: ps.to_scatter(ps.compare_schedules(2, 2, ["gpipe"]), width="wide"),
            ValueError,
            "width is 'wide', expected a number of pixels from 720 to 100000",
        ),
        (
            lambda: Costs(forward=[1, 2]).of("forwards", 0),
            ValueError,
            "name: got 'forwards', expected one of forward, backward_input",
        ),
        (
            lambda: Costs(forward=[1, 2]).of("forward", 2),
            ValueError,
            "stage: got 2, forward has numbers for the stages 0 to 1",
        ),
        (
            lambda: Costs(forward=[1, 2]).of("forward", -1),
            ValueError,
            "stage = -1, expected an integer of at least 0",
        ),
        (
            lambda: Costs().of_stages("ab"),
            TypeError,
            "stages: got 'ab', expected numbers of stages, such as schedule.model_stages",
        ),
        (lambda: GPIPE.stages_of("a"), ValueError, "rank: got 'a', expected a number from 0 to 2"),
        (lambda: GPIPE.instructions(-1), ValueError, "rank: got -1, expected a number from 0 to 2"),
        (lambda: GPIPE.model_stages_of(3), ValueError, "rank: got 3, expected a number from 0 to 2"),
        (lambda: GPIPE.successor(3), ValueError, "stage: got 3, expected a number from 0 to 2"),
        (lambda: GPIPE.predecessor([]), ValueError, r"stage: got \[\], expected a number from 0 to 2"),
        (
            lambda: GPIPE.other_end("0F0"),
            TypeError,
            "message: got '0F0' of type str, expected an instruction such as 0SEND_F1",
        ),
        (lambda: ps.parts_of("0F0"), TypeError, "instruction: got '0F0', expected an instruction such as"),
        (lambda: ps.zbv_greedy(2, 4, costs="ab"), TypeError, "costs: got 'ab' of type str"),
        (
            lambda: ps.to_grid(GPIPE, width="wide"),
            ValueError,
            "width = 'wide', expected an integer of at least 1",
        ),
        (
            lambda: ps.to_trace(3),
            ScheduleError,
            "of type int, expected a Schedule",
        ),
        (
            lambda: timeline_of(GPIPE, None, []),
            TypeError,
            "starts: got None of type NoneType, expected 3 rows of times",
        ),
        (
            lambda: timeline_of(GPIPE, [], []),
            ValueError,
            "starts: got 0 rows of times, expected 3, one per rank",
        ),
        (
            lambda: timeline_of(GPIPE, [1, 2, 3], []),
            TypeError,
            r"starts\[0\]: got 1 of type int, expected a row of times",
        ),
        (
            lambda: ps.compare_schedules(2, 2, cap="a"),
            TypeError,
            "cap is 'a' of type str, expected a number",
        ),
        (lambda: F("a", 0), ValueError, "stage = 'a', expected an integer of at least 0"),
        (lambda: B(0, None), ValueError, "microbatch = None, expected an integer of at least 0"),
        (lambda: I(-1, 0), ValueError, "stage = -1, expected an integer of at least 0"),
        (lambda: W(0, 0.5), ValueError, "microbatch = 0.5, expected an integer of at least 0"),
        (
            lambda: ps.overlap(F, 3),
            TypeError,
            r"forward: got <function F .*expected an instruction such as F\(0, 3\)",
        ),
        (
            lambda: ps.overlap(F(0, 0), 3),
            TypeError,
            r"backward: got 3 of type int, expected an instruction such as B\(3, 1\)",
        ),
        (
            lambda: ps.overlap(F(0, 0), F(0, 1)),
            ValueError,
            r"backward: got 0F1, expected an instruction such as B\(3, 1\)",
        ),
        (lambda: ps.overlap(B(0, 0), B(0, 1)), ValueError, "forward: got 0B0"),
    ],
)
def test_it_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()

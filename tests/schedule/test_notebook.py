"""Values show themselves in notebooks: pictures of bounded size, and tables."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

import ppfunc as pp
from ppfunc.schedule import Costs, Schedule, Timeline, check, from_csv, simulate, to_grid, to_svg


class Printer:
    """As IPython's: ``stack`` holds the values around what is printed, and itself."""

    def __init__(self, depth=1):
        self.stack, self.written = [0] * depth, ""

    def text(self, text):
        self.written += text


def shown(value, depth=1):
    printer = Printer(depth)
    value._repr_pretty_(printer, False)
    return printer.written


SMALL, LARGE = pp.one_f_one_b(ranks=4, microbatches=8), pp.one_f_one_b(ranks=40, microbatches=200)
HUGE = pp.gpipe(ranks=64, microbatches=1024)


def test_a_schedule_shows_its_picture_and_its_grid():
    assert SMALL._repr_svg_() == to_svg(SMALL, width=960)
    assert shown(SMALL) == f"{SMALL!r}\n{to_grid(SMALL)}".rstrip()
    assert shown(SMALL, depth=2) == repr(SMALL)


@pytest.mark.parametrize("schedule", [LARGE, HUGE], ids=["large", "huge"])
def test_what_is_shown_is_bounded(schedule):
    assert schedule._repr_svg_() is None and simulate(schedule)._repr_svg_() is None
    for text in (shown(schedule), shown(simulate(schedule))):
        assert len(text.splitlines()) <= 34 and all(len(line) <= 120 for line in text.splitlines())
    assert "rank 31" not in shown(HUGE) and shown(HUGE).count("\n") == 0
    assert shown(LARGE).endswith("… 8 more lines") and " …\n" in shown(LARGE)


def test_a_picture_fits_the_column_of_a_notebook():
    schedule = pp.one_f_one_b(ranks=8, microbatches=60)
    width = float(ElementTree.fromstring(to_svg(schedule)).get("width"))
    assert float(ElementTree.fromstring(schedule._repr_svg_()).get("width")) == 960 < width


def test_the_largest_picture_is_small_enough_for_a_page():
    largest = max((pp.dualpipev(8, m) for m in range(16, 60)), key=lambda s: len(s._repr_svg_() or ""))
    assert 150_000 < len(largest._repr_svg_()) < 300_000


def test_a_schedule_that_cannot_run_shows_its_steps():
    schedule = from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    assert schedule._repr_svg_() is None
    assert shown(schedule).endswith("rank 0  0F0  0B0  0F1  0B1\nrank 1  1F1  1F0  1B0  1B1")


def test_a_timeline_shows_its_picture_and_its_figures():
    timeline = simulate(SMALL, Costs(forward=1, backward=[2, 2, 2, 4]))
    root = ElementTree.fromstring(timeline._repr_svg_())
    assert timeline._repr_svg_() == to_svg(timeline, width=960) != SMALL._repr_svg_()
    assert root.tag.endswith("svg")
    assert shown(timeline) == str(timeline)
    assert str(timeline).splitlines() == [
        "1f1b: makespan 49, bubble 42.9%; span 49, bubble of the span 42.9%",
        "rank  computes  idle  peak activations",
        "   0        24    25                 4",
        "   1        24    25                 3",
        "   2        24    25                 2",
        "   3        40     9                 1",
    ]
    assert shown(timeline, depth=3) == repr(timeline)


def test_proofs_are_shown_as_tables():
    assert shown(check(SMALL)) == str(check(SMALL)) and "\n" not in shown(check(SMALL), depth=2)


def test_costs_are_tables_of_what_was_given():
    assert (
        str(Costs())
        == "stage  forward  backward_input  backward_weight\n each        1               1                1"
    )
    assert str(Costs(forward=[1, 2.34567], bytes=(10**9, 0))).splitlines()[1:] == [
        "    0        1               1                1  1000000000",
        "    1    2.346               1                1           0",
    ]
    assert [line.split() for line in str(Costs(communication={2: 3}, backward=2)).splitlines()] == [
        ["stage", "forward", "backward_input", "backward_weight", "backward", "communication"],
        ["2", "1", "1", "1", "2", "3"],
        ["others", "1", "1", "1", "2", "0"],
    ]
    assert shown(Costs(forward=[1] * 100)).endswith("… 69 more lines")


def test_methods_are_those_of_classes():
    """IPython looks for them on the class, and not on a class that is shown itself."""
    assert Schedule._repr_svg_(SMALL) == SMALL._repr_svg_()
    without_costs = SMALL._repr_svg_().replace("F, I and W take 1 each", "units of its costs")
    assert Timeline._repr_svg_(simulate(SMALL)) == without_costs
    assert replace(SMALL, name="other")._repr_svg_() != SMALL._repr_svg_()

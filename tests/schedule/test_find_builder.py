"""Builders by their names, in any spelling."""

from __future__ import annotations

import pytest

from ppfunc.schedule import (
    BUILDERS,
    find_builder,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    zbv,
)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_has_its_name(name):
    assert find_builder(name) is BUILDERS[name]
    assert find_builder(BUILDERS[name].__name__) is BUILDERS[name]


@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("1F1B", one_f_one_b),
        ("Schedule1F1B", one_f_one_b),
        ("GPipe", gpipe),
        ("Interleaved1F1B", interleaved_1f1b),
        ("InterleavedZeroBubble", interleaved_zb),
        ("ZBVZeroBubble", zbv),
        ("one_f_one_b", one_f_one_b),
        ("one-f-one-b", one_f_one_b),
    ],
)
def test_names_of_torch_and_other_spellings(name, builder):
    assert find_builder(name) is builder


def test_unknown_names_show_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown schedule 'gpip': expected one of gpipe, .*did you mean 'gpipe'"
    ):
        find_builder("gpip")

"""Configurations: a schedule by name, file or builder, and the sizes of batch and microbatch."""

from __future__ import annotations

import warnings

import pytest

from ppfunc.schedule import (
    BUILDERS,
    build_schedule,
    count_microbatches,
    find_builder,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    one_f_one_b,
    split_points_for,
    zbv,
)
from ppfunc.schedule.formats.files import write_csv


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
        ("Interleaved1F1B", interleaved_one_f_one_b),
        ("InterleavedZeroBubble", interleaved_zero_bubble),
        ("ZBVZeroBubble", zbv),
        ("one_f_one_b", one_f_one_b),
        ("one-f-one-b", one_f_one_b),
    ],
)
def test_names_of_torch_and_other_spellings(name, builder):
    assert find_builder(name) is builder


def test_by_name_builder_and_file(tmp_path):
    sizes = {"ranks": 2, "batch_size": 8, "microbatch_size": 2}
    expected = one_f_one_b(2, 4)
    assert build_schedule("1F1B", **sizes) == expected
    assert build_schedule(one_f_one_b, **sizes) == expected
    write_csv(expected, tmp_path / "mine.csv")
    assert build_schedule(tmp_path / "mine.csv", **sizes).digest == expected.digest
    assert build_schedule(str(tmp_path / "mine.csv"), **sizes).digest == expected.digest
    looped = build_schedule("interleaved_1f1b", ranks=2, batch_size=24, microbatch_size=4, chunks=3)
    assert looped == interleaved_one_f_one_b(2, 6, chunks=3)


def test_batches_that_do_not_divide_say_so():
    # The message once failed itself, because it named a number that was not computed yet.
    with pytest.raises(ValueError, match="a batch of 10 samples does not divide into microbatches of 4"):
        build_schedule("gpipe", ranks=2, batch_size=10, microbatch_size=4)
    for batch, micro, message in (
        (0, 1, "batch_size = 0"),
        (4, 0, "microbatch_size = 0"),
        (4, 2.0, r"microbatch_size = 2\.0, expected an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            count_microbatches(batch, micro)


def test_few_microbatches_warn_of_a_bubble():
    with pytest.warns(UserWarning, match="2 microbatches are fewer than the 4 stages of .* bubble") as record:
        build_schedule("gpipe", ranks=4, batch_size=8, microbatch_size=4)
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="4 microbatches are fewer than the 8 stages"):
        build_schedule("interleaved_1f1b", ranks=4, batch_size=4, microbatch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_schedule("gpipe", ranks=4, batch_size=8, microbatch_size=2)


def test_files_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no schedule at .*none.csv"):
        build_schedule(str(tmp_path / "none.csv"), ranks=2, batch_size=8, microbatch_size=2)
    with pytest.raises(FileNotFoundError):
        build_schedule(tmp_path, ranks=2, batch_size=8, microbatch_size=2)
    path = tmp_path / "mine.csv"
    write_csv(one_f_one_b(2, 4), path)
    with pytest.raises(ValueError, match="is for 2 ranks, but the configuration has 3"):
        build_schedule(path, ranks=3, batch_size=8, microbatch_size=2)
    with pytest.raises(ValueError, match="is for 4 microbatches, but the configuration has 8"):
        build_schedule(path, ranks=2, batch_size=8, microbatch_size=1)
    with pytest.raises(ValueError, match=r"takes no options, got \['chunks'\]"):
        build_schedule(path, ranks=2, batch_size=8, microbatch_size=2, chunks=2)
    path.write_text("0F0,0B0junk\n")
    with pytest.raises(ValueError, match="0B0junk"):
        build_schedule(path, ranks=1, batch_size=1, microbatch_size=1)


def test_unknown_names_show_the_known_ones():
    with pytest.raises(ValueError, match="unknown schedule 'gpip': expected one of gpipe, .*did you mean 'gpipe'"):
        build_schedule("gpip", ranks=2, batch_size=8, microbatch_size=2)


def test_split_points_for_a_schedule():
    assert split_points_for("1F1B", 8, 4) == ("layers.1", "layers.4", "layers.7")
    assert len(split_points_for("Interleaved1F1B", 16, 4)) == 7
    assert len(split_points_for("Interleaved1F1B", 32, 4, layers_per_stage=2)) == 15
    assert split_points_for(gpipe, 8, 1) == ()
    with pytest.raises(ValueError, match="exactly one stage per rank"):
        split_points_for("gpipe", 32, 4, layers_per_stage=4)
    with pytest.raises(ValueError, match="two or more stages per rank"):
        split_points_for("zbv", 32, 4, layers_per_stage=8)
    with pytest.raises(ValueError, match="cannot fill 8 stages"):
        split_points_for("zbv", 4, 4)

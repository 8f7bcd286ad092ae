"""Schedules of a configuration: a name or a file, and the microbatches of a batch."""

from __future__ import annotations

import warnings

import pytest

from ppfunc.schedule import BUILDERS, FormatError, configure, interleaved_1f1b, one_f_one_b, to_csv

SIZES = {"ranks": 4, "batch_size": 32, "microbatch_size": 4}


@pytest.mark.parametrize("name", ["1F1B", "Schedule1F1B", "one_f_one_b"])
def test_a_name_in_any_spelling(name):
    assert configure(name, **SIZES) == one_f_one_b(4, 8)


def test_options_are_those_of_the_builder():
    assert configure("Interleaved1F1B", 2, 8, chunks=3) == interleaved_1f1b(2, 8, chunks=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk'; did you mean 'chunks'"):
        configure("Interleaved1F1B", 2, 8, chunk=3)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_batch_with_a_microbatch_for_every_stage_is_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure(name, ranks=2, batch_size=32, microbatch_size=4)


def test_a_file_of_an_order_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(one_f_one_b(4, 8)))
    for given in (path, str(path)):
        made = configure(given, **SIZES)
        assert (made.name, made.programs) == ("mine", one_f_one_b(4, 8).programs)


def test_a_name_without_a_folder_is_a_file_where_it_has_a_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no schedule is at mine.csv"):
        configure("mine.csv", **SIZES)


def test_fewer_microbatches_than_stages_are_warned_of_where_it_is_called():
    with pytest.warns(UserWarning, match=r"3 microb.* fewer than the 4 .*may result in a bubble") as told:
        configure("1f1b", ranks=4, batch_size=12, microbatch_size=4)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="7 microbatches are fewer than the 8 stages"):
        configure("Interleaved1F1B", ranks=4, batch_size=7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: configure("1f1b", 4, 30, 4), ValueError, r"microbatch_size = 4 .*= 30: .*a batch of 32"),
        (lambda f: configure("1f1b", 4, 2, 4), ValueError, r"microbatch_size = 4 .*= 2: .*a batch of 4"),
        (lambda f: configure("1f1b", 4, 0), ValueError, "batch_size = 0, expected an integer of at least 1"),
        (lambda f: configure("1f1b", 4, 8, 0), ValueError, "microbatch_size = 0"),
        (lambda f: configure("1f1", 4, 8), ValueError, "unknown schedule '1f1'.*did you mean '1f1b'"),
        (lambda f: configure(None, 4, 8), TypeError, "schedule: got None .*the name .* or the path"),
        (lambda f: configure(f.parent, 4, 8), FileNotFoundError, "no schedule is at"),
        (lambda f: configure(f, 4, 8), ValueError, "has 2 ranks, the configuration 4"),
        (lambda f: configure(f, 2, 8), ValueError, "has 3 microbatches, the configuration 8"),
        (lambda f: configure(f, 2, 3, chunks=2), ValueError, "takes no options, got chunks: leave them out"),
        (lambda f: configure("1f1b", ranks=4), TypeError, "missing .*'batch_size'; it takes schedule,"),
    ],
)
def test_what_is_refused(tmp_path, call, error, message):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(one_f_one_b(2, 3)))
    with pytest.raises(error, match=message):
        call(path)


def test_a_file_that_is_no_schedule_is_told_as_such(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,nothing\n")
    with pytest.raises(FormatError):
        configure(path, ranks=1, batch_size=1)

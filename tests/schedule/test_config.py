"""Configurations: a schedule by name, file or builder, and the sizes of batch and microbatch."""

from __future__ import annotations

import json
import warnings

import pytest

from ppfunc.schedule import (
    BUILDERS,
    configure,
    find_builder,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    one_f_one_b,
    to_csv,
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
        ("Interleaved1F1B", interleaved_one_f_one_b),
        ("InterleavedZeroBubble", interleaved_zero_bubble),
        ("ZBVZeroBubble", zbv),
        ("one_f_one_b", one_f_one_b),
        ("one-f-one-b", one_f_one_b),
    ],
)
def test_names_of_torch_and_other_spellings(name, builder):
    assert find_builder(name) is builder


def schedule_of(schedule, *, ranks, batch_size, microbatch_size, **options):
    sizes = {"ranks": ranks, "batch_size": batch_size, "microbatch_size": microbatch_size}
    return configure({"schedule": schedule, **sizes, "options": options}).schedule


def test_by_name_builder_and_file(tmp_path):
    sizes = {"ranks": 2, "batch_size": 8, "microbatch_size": 2}
    expected = one_f_one_b(2, 4)
    assert schedule_of("1F1B", **sizes) == expected
    assert schedule_of(one_f_one_b, **sizes) == expected
    (tmp_path / "mine.csv").write_text(to_csv(expected))
    assert schedule_of(tmp_path / "mine.csv", **sizes).digest == expected.digest
    assert schedule_of(str(tmp_path / "mine.csv"), **sizes).digest == expected.digest
    looped = schedule_of("interleaved_1f1b", ranks=2, batch_size=24, microbatch_size=4, chunks=3)
    assert looped == interleaved_one_f_one_b(2, 6, chunks=3)


def test_batches_that_do_not_divide_say_so():
    # The message once failed itself, because it named a number that was not computed yet.
    with pytest.raises(ValueError, match="a batch of 10 samples does not divide into microbatches of 4"):
        schedule_of("gpipe", ranks=2, batch_size=10, microbatch_size=4)
    for batch, micro, message in (
        (0, 1, "batch_size = 0"),
        (4, 0, "microbatch_size = 0"),
        (4, 2.0, r"microbatch_size = 2\.0, expected an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            schedule_of("gpipe", ranks=2, batch_size=batch, microbatch_size=micro)


def test_few_microbatches_warn_of_a_bubble():
    with pytest.warns(UserWarning, match="2 microbatches are fewer than the 4 stages of .* bubble") as record:
        configure({"schedule": "gpipe", "ranks": 4, "batch_size": 8, "microbatch_size": 4})
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="4 microbatches are fewer than the 8 stages"):
        schedule_of("interleaved_1f1b", ranks=4, batch_size=4, microbatch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule_of("gpipe", ranks=4, batch_size=8, microbatch_size=2)


def test_files_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no schedule at .*none.csv"):
        schedule_of(str(tmp_path / "none.csv"), ranks=2, batch_size=8, microbatch_size=2)
    with pytest.raises(FileNotFoundError):
        schedule_of(tmp_path, ranks=2, batch_size=8, microbatch_size=2)
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(one_f_one_b(2, 4)))
    with pytest.raises(ValueError, match="is for 2 ranks, but the configuration has 3"):
        schedule_of(path, ranks=3, batch_size=8, microbatch_size=2)
    with pytest.raises(ValueError, match="is for 4 microbatches, but the configuration has 8"):
        schedule_of(path, ranks=2, batch_size=8, microbatch_size=1)
    with pytest.raises(ValueError, match=r"takes no options, got \['chunks'\]"):
        schedule_of(path, ranks=2, batch_size=8, microbatch_size=2, chunks=2)
    path.write_text("0F0,0B0junk\n")
    with pytest.raises(ValueError, match="0B0junk"):
        schedule_of(path, ranks=1, batch_size=1, microbatch_size=1)


def test_unknown_names_show_the_known_ones():
    with pytest.raises(
        ValueError, match="unknown schedule 'gpip': expected one of gpipe, .*did you mean 'gpipe'"
    ):
        schedule_of("gpip", ranks=2, batch_size=8, microbatch_size=2)


def split_points(schedule, layers, ranks, **more):
    sizes = {"ranks": ranks, "batch_size": 99, "microbatch_size": 1}
    return configure({"schedule": schedule, "layers": layers, **sizes, **more}).split_points


def test_split_points_for_a_schedule():
    assert split_points("1F1B", 8, 4) == ("layers.1", "layers.4", "layers.7")
    assert len(split_points("Interleaved1F1B", 16, 4)) == 7
    assert len(split_points("Interleaved1F1B", 32, 4, layers_per_stage=2)) == 15
    assert split_points(gpipe, 8, 1) == ()
    with pytest.raises(ValueError, match="exactly one stage per rank"):
        split_points("gpipe", 32, 4, layers_per_stage=4)
    with pytest.raises(ValueError, match="two or more stages per rank"):
        split_points("zbv", 32, 4, layers_per_stage=8)
    with pytest.raises(ValueError, match="4 layers in 8 stages"):
        split_points("zbv", 4, 4)


SIZES = {"ranks": 2, "batch_size": 8, "microbatch_size": 1}


def test_a_configuration_gives_the_schedule_and_the_split(tmp_path):
    text = json.dumps(
        {
            "schedule": "Interleaved1F1B",
            "layers": 12,
            "layers_per_stage": 2,
            "input_weight": 0,
            "output_weight": 0,
        }
        | SIZES
    )
    made = configure(json.loads(text))
    assert made.schedule == interleaved_one_f_one_b(2, 8, chunks=3)
    assert made.split_points == tuple(f"layers.{n}" for n in (2, 4, 6, 8, 10))
    named = ["h.3", "h.5", "h.9"]
    made = configure({"schedule": "interleaved_1f1b", "split_points": named} | SIZES)
    assert (made.schedule, made.split_points) == (interleaved_one_f_one_b(2, 8, chunks=2), tuple(named))
    assert configure({"schedule": "interleaved_1f1b", "options": {"chunks": 4}} | SIZES) == (
        interleaved_one_f_one_b(2, 8, chunks=4),
        None,
    )
    assert configure({"schedule": zbv, "layers": 6} | SIZES).split_points == (
        "layers.1",
        "layers.3",
        "layers.5",
    )
    (tmp_path / "mine.csv").write_text(to_csv(zbv(2, 8)))
    assert (
        len(
            configure(
                {"schedule": tmp_path / "mine.csv", "layers": 8, "layers_per_stage": 2} | SIZES
            ).split_points
        )
        == 3
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layer": 8}, "unknown key 'layer': expected some of schedule, .*; did you mean 'layers'"),
        ({"layers_per_stage": 2}, "has layers_per_stage, and no number of layers"),
        ({"layers": 8, "split_points": ["a"]}, "has split_points and layers"),
        (
            {"layers": 8, "layers_per_stage": 2},
            "the schedule has exactly one stage per rank, but 8 layers at 2 per stage make 2 on each of 2",
        ),
        ({"split_points": ["a", "b"]}, "cuts the model into 3 stages, but one_f_one_b has 2"),
        ({"layers": 1}, "1 layer"),
        ({"layers": "8", "layers_per_stage": 2}, "layers = '8', expected an integer"),
    ],
)
def test_configurations_that_say_too_much_or_too_little(wrong, message):
    with pytest.raises(ValueError, match=message):
        configure({"schedule": "1f1b"} | SIZES | wrong)
    with pytest.raises(ValueError, match="the configuration lacks schedule, ranks"):
        configure({"batch_size": 8, "microbatch_size": 1})

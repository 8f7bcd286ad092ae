"""Layouts written as text: repeats, groups, order, and errors that point at the place."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ppfunc.parallel import parse_layout


def test_the_layout_of_a_large_model():
    layout = parse_layout("Et*3|(tt|)*29,m|L", decoders=61, ranks=16)
    assert layout.stages == ("Ettt", *["tt"] * 29, "m", "L")
    assert layout.decoders == (3, *[2] * 29, 0, 0)
    assert layout.partition.boundaries == (0, *range(4, 63, 2), 63, 64)
    assert sum(layout.decoders) == 61
    assert layout.placement(16)[:18] == (*range(16), 0, 1)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("Ettt|(tt|)*3mL", ["Ettt", "tt", "tt", "tt", "mL"]),
        ("Et|t*3|tL", ["Et", "ttt", "tL"]),
        ("Ett*3|L", ["Etttt", "L"]),
        ("E(t|tt|t)*2,tL", ["Et", "tt", "tt", "tt", "ttL"]),
        ("E(|t)*2,tL", ["E", "t", "ttL"]),
        ("E,t,,t|,t*,2,L", ["Ett", "ttL"]),
        ("E(t)*10L", ["E" + "t" * 10 + "L"]),
        ("E((t|)*2t|)*2L", ["Et", "t", "t", "t", "t", "t", "L"]),
        ("Et*0L", ["EL"]),
    ],
)
def test_what_a_text_unfolds_to(text, stages):
    assert list(parse_layout(text).stages) == stages


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_text_round_trip(sizes):
    text = "|".join("t" * size for size in sizes)
    layout = parse_layout(f"E{text}L")
    assert str(layout) == f"E{text}L"
    assert parse_layout(str(layout)) == layout
    assert list(layout.decoders) == sizes
    # Short for the same: groups of one, and commas anywhere.
    assert parse_layout("E," + ",|".join(f"(t)*{size}" for size in sizes) + ",L") == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ex|L", r"at character 1, 'x\|L': expected a layer, E \(embedding\), t \(decoder\)"),
        ("E t|L", "at character 1"),
        ("Et*|L", r"at character 2, '\*\|L': expected a number"),
        ("*2EL", "at character 0"),
        ("E(tt|L", r"at character 1, '\(tt\|L': there is no '\)'"),
        ("Et)|L", r"at character 2, '\)\|L': there is no '\('"),
        ("Et*2*2L", "at character 4"),
        ("tt|L", "0 embedding layers 'E'"),
        ("tE|L", "exactly one, with which it begins"),
        ("Et|E|L", "2 embedding layers 'E'"),
        ("Et|t", "0 loss layers 'L'"),
        ("EtL|t", "exactly one, with which it ends"),
        ("Em|t|L", "decoder 't' after 'm'"),
        ("Et||L", r"stage 1 of 'Et\|\|L' would be empty: the sizes are \[2, 0, 1\]"),
        ("", "stage 0 of '' would be empty"),
        ("Et*9999999L", "more than 1000000 layers"),
        ("Et*99999999999999999999L", "more than 1000000 layers"),
        ("E(((t*999)*999)*999)*999L", "more than 1000000 layers"),
        ("(" * 2000, r"there is no .\). for this"),
    ],
)
def test_errors_point_at_the_place(text, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(text)


def test_counts_that_do_not_fit():
    with pytest.raises(ValueError, match="3 decoder layers 't', but the model has 4"):
        parse_layout("Ettt|L", decoders=4)
    with pytest.raises(ValueError, match="3 stages do not spread evenly over 2 ranks"):
        parse_layout("Et|t|L", ranks=2)
    assert parse_layout("Et||L", allow_empty=True).partition.sizes == (2, 0, 1)

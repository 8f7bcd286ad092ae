"""Costs as JSON: read again they are equal, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ppfunc.schedule import Costs
from ppfunc.schedule.costs import OF_A_SLICE

NUMBERS = st.integers(0, 10**9) | st.floats(0, 1e9) | st.fractions(0, 1000)
SHARES = st.floats(0, 1) | st.fractions(0, 1)
NAMES = [field.name for field in fields(Costs) if field.name not in ("seconds", "slices")]


def values(name: str) -> st.SearchStrategy:
    number = {"weight_share": SHARES, "bandwidth": st.integers(1, 9)}.get(name, NUMBERS)
    return (
        number
        | st.lists(number, min_size=1, max_size=4).map(tuple)
        | st.dictionaries(st.integers(0, 99), number, min_size=1, max_size=3)
    )


SLICES = st.lists(
    st.fixed_dictionaries({}, optional={name: values(name) for name in OF_A_SLICE}), min_size=1, max_size=3
).map(lambda rows: tuple(Costs(**row) for row in rows))


@given(st.fixed_dictionaries({}, optional={name: values(name) for name in NAMES} | {"slices": SLICES}))
def test_costs_are_read_again(given):
    costs = Costs(**given)
    again = Costs.from_json(costs.to_json())
    assert again == costs
    for name, value in given.items():
        assert isinstance(getattr(again, name), float) == isinstance(value, float), name
    assert json.loads(costs.to_json()).keys() <= given.keys()


def test_lists_come_back_as_tuples_and_defaults_stay_out():
    assert Costs.from_json('{"forward": [1, 2.5, "1/3"], "backward": null}') == Costs(
        forward=(1, 2.5, Fraction(1, 3))
    )
    assert Costs().to_json() == "{}" and Costs.from_json("{}") == Costs()
    assert Costs.from_json(Costs(2, seconds=True).to_json()) == Costs(2, seconds=True) != Costs(2)
    with pytest.raises(ValueError, match="seconds: expected true or false, got 1"):
        Costs.from_json('{"seconds": 1}')
    assert Costs(forward=[True + 1, 2]).to_json() == '{"forward": [2, 2]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value: line 1 column 1"),
        ("{", "not JSON: "),
        ("[1]", r"got \\[1\\], expected an object with some of forward"),
        ("1", "got 1, expected an object"),
        ('{"forwards": 1}', "got {'forwards': 1}, expected an object with some of forward, backward_input"),
        ('{"forward": 1, "forward": 2}', "the key 'forward' occurs twice in one object"),
        ('{"forward": "x"}', "forward is 'x', expected a number"),
        ('{"slices": 4}', "slices: expected a list of costs, got 4"),
        ('{"slices": [4]}', "got 4, expected an object with some of forward"),
        ('{"slices": [{"step": 1}]}', r"slices\\[0\\] has step, which belongs to a stage: give it beside"),
        ('{"slices": [{"slices": [{}]}]}', r"slices\\[0\\] has slices, which belongs to a stage"),
        ('{"forward": "1/0"}', "forward is '1/0', expected a number"),
        ('{"forward": "-1/2"}', "forward is '-1/2', expected a number"),
        ('{"forward": [1, true]}', "forward is True, expected a number"),
        ('{"forward": [[1]]}', r"forward is \\(1,\\), expected a number"),
        ('{"forward": {"0": [1]}}', r"forward is \\(1,\\), expected a number"),
        ('{"forward": {"a": 1}}', "forward has the key 'a', expected the number of a stage"),
        ('{"forward": {"00": 1}}', "forward has the key '00'"),
        ('{"forward": null}', "forward is None, expected a number"),
        ('{"forward": NaN}', "forward is nan, expected a finite number from 0"),
        ('{"forward": -1}', "forward is -1, expected a finite number from 0"),
        ('{"forward": 1e999}', "forward is inf, expected a finite number"),
        ('{"forward": ' + "9" * 4000 + "}", "forward is 9999.*, expected a finite number"),
        ('{"forward": ' + "9" * 9000 + "}", "Exceeds the limit .* for integer string conversion"),
        ('{"bandwidth": 0}', "bandwidth is 0"),
        ('{"weight_share": [1, 2]}', "weight_share is 2, expected at most 1"),
        ("[" * 10**5, "nested too deeply"),
        ('{"forward": [' + "[]," * 10**6 + "1]}", "got 3000016 characters, expected at most 1048576"),
        ('{"forward": "' + "x" * 10**6 + '"}', "forward is 'xxx"),
        ('{"' + "x" * 10**6 + '": 1}', "got {'xxx"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ValueError, match=message.replace("\\\\", "\\")) as caught:
        Costs.from_json(text)
    assert len(str(caught.value)) < 450

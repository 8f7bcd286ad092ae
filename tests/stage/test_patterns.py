"""The first pattern that matches counts; one that never is the first is refused."""

from itertools import product

import pytest
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.stage.signature import first_match, require_reachable
from tests.models import squared

COVERED = [
    ("*", "*counts"),
    ("*", "*"),
    ("*.bias|*norm*", "h.?.norm.weight"),
    ("h.*", "h.[0-4].mlp"),
    ("a?", "a?"),
    ("*", "a|b"),
    ("b", "a|b"),
]
APART = [("*counts", "*"), ("a?", "a*"), ("*a", "*b"), ("[ab]", "a|c"), ("*.*", "a[.b]c"), ("", "a")]


@pytest.mark.parametrize("earlier, later", COVERED)
def test_a_pattern_that_an_earlier_one_covers_is_refused(earlier, later):
    wording = "comes after .*, which takes all of its names; put it before"
    with pytest.raises(ValueError, match=wording):
        require_reachable("what", [earlier, later])
    with pytest.raises(ValueError, match=f"groups: .*{wording}"):
        pp.optim.by_name({earlier: pp.optim.sgd(0.1), **{later + "|z": pp.optim.sgd(0.2)}})
    with pytest.raises(ValueError, match=f"reduce_state: .*{wording}"):
        pp.Trainer(
            [lambda p, x: x], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1),
            reduce_state={earlier: "mean", later + "|z": "sum"},
        )  # fmt: skip


@pytest.mark.parametrize("earlier, later", APART)
def test_patterns_that_have_names_of_their_own_are_taken(earlier, later):
    require_reachable("what", [earlier, later])


NAMES = ["".join(letters) for size in range(5) for letters in product("ab.", repeat=size)]
one = st.lists(st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]"]), min_size=1, max_size=4).map(
    "".join
)


@given(one, one)
def test_all_names_of_what_is_refused_are_taken_before(earlier, later):
    try:
        require_reachable("what", [earlier, later])
    except ValueError:
        assert all(first_match(name, [earlier]) for name in NAMES if first_match(name, [later]))

"""Signatures: round trips through JSON, what they refuse; and patterns of the names of leaves."""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import ppfunc as pp
from ppfunc.runtime.values.arguments import form_of, same_form
from ppfunc.stage import LeafSignature, Signature
from ppfunc.stage.signature import first_match, flatten, require_reachable
from ppfunc.stage.tree import tree_flatten, tree_structure
from tests.models import squared


class Point(NamedTuple):
    x: Any
    y: Any


class Tagged:
    """Shows itself by what tensors alone have."""

    def __init__(self, value, tag):
        self.value, self.tag = value, tag

    def __repr__(self):
        return f"Tagged({self.value.shape})"


optree.register_pytree_node(
    Tagged,
    lambda t: ((t.value,), t.tag),
    lambda tag, c: Tagged(c[0], tag),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)

dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
leaves = st.builds(lambda s, d: torch.empty(s, dtype=d), st.lists(st.integers(0, 3), max_size=3), dtypes)
keys = st.one_of(
    st.text(max_size=3), st.integers(), st.booleans(), st.tuples(st.text(max_size=2), st.integers())
)


def nodes(below):
    dicts = st.dictionaries(st.text(max_size=3), below, max_size=3)
    return st.one_of(
        st.none(),
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.lists(below, max_size=3).map(lambda v: deque(v, maxlen=5)),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda d: defaultdict(list, d)),
        st.dictionaries(keys.filter(lambda k: isinstance(k, tuple)), below, max_size=2),
        st.dictionaries(st.integers(), below, max_size=2),
        st.builds(Point, below, below),
        st.builds(
            Tagged, below, st.one_of(st.none(), st.text(max_size=3), st.tuples(st.integers(), st.just("a")))
        ),
    )


@given(st.recursive(leaves, nodes, max_leaves=8))
def test_json_round_trip(tree):
    signature = Signature.of(tree)
    text = signature.to_json()
    again = Signature.from_json(text)
    assert again == signature and hash(again) == hash(signature) and again.to_json() == text
    assert tree_structure(again.unflatten(signature.leaves)) == signature.treedef


def test_the_order_of_keys_is_part_of_a_signature():
    """A stage may go by it: two orders are two forms, whose leaves come in their orders."""
    a, b = torch.zeros(1), torch.zeros(2)
    first, second = Signature.of({"a": a, "b": b}), Signature.of({"b": b, "a": a})
    assert first != second and first.to_json() != second.to_json()
    assert first.leaves == second.leaves[::-1] and first.treedef != second.treedef
    for signature in (first, second, first.without_grad(), second.with_grad()):
        read = Signature.from_json(signature.to_json())
        assert read == signature and hash(read) == hash(signature)
        assert list(read.unflatten([1, 2])) == list(signature.unflatten([1, 2]))


def test_a_leaf_that_is_no_tensor_is_refused_with_its_path():
    with pytest.raises(TypeError, match=r"params\['a'\]\[1\]: got 3 of type int, expected a tensor"):
        Signature.of({"a": (torch.zeros(1), 3)}, "params")


class Extended(dict):
    """As model outputs of libraries are."""


@dataclass
class Fields:
    a: Any


@pytest.mark.parametrize("made", [Extended, Fields, lambda a: {1, 2}, type("Listed", (list,), {})])
def test_a_container_that_optree_does_not_know_is_refused_as_such(made):
    mend = "make it a dict or a tuple of tensors, or register"
    with pytest.raises(
        TypeError,
        match=rf"y\[0\]: got .*, a class that neither optree nor torch.utils._pytree knows, .*; {mend}",
    ):
        Signature.of((made([("a", torch.zeros(1))]),), "y")


def test_only_floating_leaves_carry_gradients():
    with pytest.raises(ValueError, match="int64 was marked grad=True"):
        LeafSignature((2,), torch.int64, True)
    signature = Signature.of((torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64)))
    assert [leaf.grad for leaf in signature.leaves] == [True, False] and signature.nbytes == 20
    assert not any(leaf.grad for leaf in signature.without_grad().leaves)


@pytest.mark.parametrize(
    "structure",
    [
        [["os", "system", "true", 0]],
        [["subprocess", "Popen", ["list", "true"], 0]],
        [["os", "path", None, 0]],
        [["no_such_module", "Thing", None, 0]],
        [["builtins", "object", None, 0]],
        [["builtins", "dict", None, 0]],
        [["collections", "defaultdict", ["tuple", ["class", "eval"], ["list"]], 0]],
        [["collections", "defaultdict", ["tuple", {}, ["list"]], 0]],
        [["surprise", 0]],
        [["builtins", "dict", ["list", "a"], 0]],
        [["builtins", "dict", ["list", "a", "a"], 2], "*", "*"],
        [["builtins", "tuple", None, 2], None],
        [["builtins", "tuple", None, -1], None],
        [["builtins", "tuple", None, 1.0], None],
        [["builtins", "tuple", "more", 1], None],
        [None, None],
        [],
        {"tuple": []},
        7,
    ],
)
def test_hostile_structures_run_nothing(structure):
    with pytest.raises(ValueError):
        Signature.from_json(json.dumps([structure, []]))


LEAVES = (
    '[-1],"float32",true',
    '[1],"nn",true',
    '[1],"float32",1',
    '["a"],"float32",true',
    '[1],"int64",true',
    "[1]",
)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[" * 10_000 + "]" * 10_000 + ", []]",
        *(f'[["*"],[[{leaf}]]]' for leaf in LEAVES),
        "",
        "[]",
        "null",
        '["*", []]',
        "[1, 2, 3]",
        '["*", 3]',
    ],
)
def test_malformed_texts_are_refused(text):
    with pytest.raises(ValueError):
        Signature.from_json(text)


def test_a_class_that_shows_itself_by_what_tensors_alone_have():
    shown = str(Signature.of({"a": Tagged(torch.zeros(2), None), "b": torch.zeros(3)}))
    assert shown == "a tree of float32[2], float32[3]"


def test_require_names_the_leaf():
    signature = Signature.of({"w": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"x\['w'\]: got float32\[3,2\], expected float32\[2,3\]"):
        signature.require({"w": torch.zeros(3, 2)}, "x")
    with pytest.raises(ValueError, match="x: got the structure"):
        signature.require([torch.zeros(2, 3)], "x")


FORMED = {
    "a dictionary": lambda a, b: {"a": a, "b": b},
    "dictionaries": lambda a, b: {"a": {"c": a, "d": {}}, "b": {"d": {"c": b}}},
    "nested": lambda a, b: {"a": [a], "b": {"c": (b,)}},
    "deep": lambda a, b: reduce(lambda tree, _: {"a": tree}, range(100), {"a": a, "b": b}),
    "a tuple": lambda a, b: (a, b),
}


def ones(**options: Any) -> torch.Tensor:
    return torch.ones(2, 3, **options)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("make", FORMED.values(), ids=FORMED)
def test_a_tree_of_the_same_form_gives_its_leaves(make):
    form = form_of(*flatten(make(ones(), ones())))
    a, b = ones() * 2, torch.zeros(5, 3)[1:3]
    assert all(x is y for x, y in zip(same_form(make(a, b), form), (a, b), strict=True))


OTHERS = {
    "shape": lambda: torch.ones(2, 2),
    "rank": lambda: torch.ones(2, 3, 1),
    "dtype": lambda: ones(dtype=torch.float64),
    "device": lambda: ones(device="meta"),
    "strides": lambda: torch.ones(3, 2).T,
    "class": lambda: ones().as_subclass(Marked),
    "parameter": lambda: torch.nn.Parameter(ones(), requires_grad=False),
    "gradient": lambda: ones(requires_grad=True),
    "sparse": lambda: ones().to_sparse(),
    "number": lambda: 3,
    "nothing": lambda: None,
    "tree": lambda: {"x": ones()},
}


@pytest.mark.parametrize("make", FORMED.values(), ids=FORMED)
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_tree_with_another_leaf_is_of_another_form(make, other):
    form = form_of(*flatten(make(ones(), ones())))
    assert same_form(make(ones(), other()), form) is None


A, B, C = (ones() for _ in range(3))
STRUCTURES = [  # a tree, and trees of other structures
    ({"a": A, "b": B}, [{"b": A, "a": B}, {"a": A}, {"a": A, "b": B, "c": C}, (A, B), A, Extended(a=A, b=B)]),
    ({"a": A, "b": B}, [OrderedDict(a=A, b=B), defaultdict(None, {"a": A, "b": B})]),
    (
        [{"x": A}, B, []],
        [
            ({"x": A}, B, []),
            [{"x": A}, B],
            [{"x": A}, B, {}],
            [{"x": A}, [B], []],
            [{"x": A}, B, [], []],
            [[A], B, []],
        ],
    ),
    (
        {"x": {"a": A, "b": B}, "y": C, "z": {}},
        [
            {"x": {"b": B, "a": A}, "y": C, "z": {}},
            {"y": C, "x": {"a": A, "b": B}, "z": {}},
            {"x": {"a": A, "b": B}, "y": {"a": C}, "z": {}},
            {"x": {"a": A}, "y": B, "z": {"c": C}},
            {"x": {"a": A, "b": B}, "y": C, "z": None},
            {"x": (A, B), "y": C, "z": {}},
            {"x": OrderedDict(a=A, b=B), "y": C, "z": {}},
            {"x": {"a": A, "b": B}, "y": C},
        ],
    ),
]


@pytest.mark.parametrize("tree, others", STRUCTURES)
def test_a_tree_of_another_structure_is_of_another_form(tree, others):
    form = form_of(*flatten(tree))
    assert same_form(tree, form) is not None
    assert all(same_form(other, form) is None for other in others)
    with torch.inference_mode():
        leaves, treedef = tree_flatten(tree)
        assert same_form(treedef.unflatten(t.clone() for t in leaves), form) is None


def test_one_tensor_in_two_places_is_of_no_form_and_no_tensor_is_kept_alive():
    a = ones()
    form = form_of(*flatten({"a": a, "b": a}))
    assert same_form({"a": a, "b": a}, form) is None and same_form({"a": a, "b": ones()}, form) is not None
    seen = weakref.ref(a)
    del a
    assert seen() is None


# -- patterns: the first that matches counts; one that never is the first is refused

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

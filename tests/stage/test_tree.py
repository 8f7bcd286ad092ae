"""Trees: the classes of optree and of torch, the order of keys, depth."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from ppfunc.stage import Signature, outline
from ppfunc.stage.transforms import dual, for_samples, per_sample
from ppfunc.stage.tree import tree_flatten, tree_leaves, tree_map, tree_paths, tree_structure
from tests.stage.conftest import every


class ModelOutput(dict):
    """Registered as libraries of models register theirs: with keys as its context, a list."""


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Late:
    """Registered after the first tree was flattened."""

    a: Any
    b: Any


pytree.register_pytree_node(
    ModelOutput,
    lambda d: (list(d.values()), list(d.keys())),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
    serialized_type_name="tests.ModelOutput",
    flatten_with_keys_fn=lambda d: ([(pytree.MappingKey(k), v) for k, v in d.items()], list(d.keys())),
)
CONTEXT = {"deep": [1, (2,)]}
pytree.register_pytree_node(
    Plain,
    lambda p: ([p.value], CONTEXT),
    lambda values, context: Plain(*values) if context == CONTEXT else None,
)


def test_classes_registered_with_torch_are_nodes():
    tree = {"b": ModelOutput(y=torch.ones(2), x=None), "a": [Plain(torch.zeros(3))]}
    leaves, treedef = tree_flatten(tree)
    assert [len(t) for t in leaves] == [2, 3]
    assert tree_paths(treedef, "p") == ("p['b']['y']", "p['a'][0][0]")
    again = treedef.unflatten(leaves)
    assert type(again["b"]) is ModelOutput and list(again["b"]) == ["y", "x"] and type(again["a"][0]) is Plain
    assert hash(treedef) == hash(tree_structure(again)) and treedef == tree_structure(again)
    assert tree_leaves(tree_map(lambda t, u: len(t) + len(u), tree, again)) == [4, 6]
    signature = Signature.of(tree)
    assert Signature.from_json(signature.to_json()) == signature
    assert hash(Signature.from_json(signature.to_json())) == hash(signature)


def test_a_class_may_be_registered_at_any_time():
    with pytest.raises(
        TypeError, match=r"x: got .* of type Late, a class that neither optree nor torch.utils._pytree knows"
    ):
        Signature.of(Late(torch.ones(1), torch.ones(2)), "x")
    pytree.register_pytree_node(Late, lambda v: ([v.a, v.b], None), lambda values, _: Late(*values))
    assert len(Signature.of(Late(torch.ones(1), torch.ones(2))).leaves) == 2


@every
def test_stages_take_and_return_them(engine):
    def fn(p, x):
        return ModelOutput(h=x["h"] * p.value, kept=x["kept"])

    args = Plain(torch.full((2,), 3.0)), ModelOutput(h=torch.ones(2), kept=torch.ones(1))
    assert str(outline(fn, args).y) == "{'h': float32[2], 'kept': float32[1]}"
    program = engine(fn, args)
    y, residuals = program.forward(*args)
    gp, gx = program.backward(residuals, y)
    assert type(y) is type(gx) is ModelOutput and torch.equal(gp.value, torch.full((2,), 3.0))


def test_transforms_take_them():
    def fn(p, x):
        return ModelOutput(h=x["h"] * p.value)

    p, x = Plain(torch.full((2,), 3.0)), ModelOutput(h=torch.ones(4, 2))
    _, ty = dual(fn)((p, p), (x, None))
    assert torch.equal(ty["h"], torch.full((4, 2), 3.0))
    assert torch.equal(per_sample(fn)(for_samples(p, 4), x)["h"], fn(p, x)["h"])


def test_the_order_of_keys_does_not_depend_on_what_else_is_imported():
    code = (
        "import torch; from ppfunc.stage import Signature; before = Signature.of({'b': torch.ones(1), 'a':"
        " torch.ones(2)}); import torch.utils._cxx_pytree; after = Signature.of({'b': torch.ones(1), 'a':"
        " torch.ones(2)}); assert before == after and before.to_json() == after.to_json() and"
        " before.leaves[0].shape == (1,)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


KEYS = [
    "; run before: ", "\ud800", "\n'\"\\", "", "*", float("inf"), -0.0, 2**70, torch.float32, True, None,
    ("a", ("; run before: ", 1)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_keys_of_all_kinds_go_through_json(key):
    signature = Signature.of({key: torch.ones(1)})
    text = signature.to_json()
    again = Signature.from_json(text.encode().decode())
    assert again == signature and [type(k) for k in again.unflatten([0])] == [type(key)]
    str(signature).encode()
    str(signature.paths).encode()


@pytest.mark.parametrize("key", [float("nan"), (1, float("nan")), torch.strided, b"bytes"], ids=repr)
def test_keys_that_json_cannot_hold_are_refused_by_name(key):
    with pytest.raises(TypeError, match="in a tree structure"):
        Signature.of({key: torch.ones(1)}).to_json()


def test_results_of_torch_operators_go_through_json():
    signature = Signature.of(torch.max(torch.ones(2, 3), 1))
    assert Signature.from_json(signature.to_json()) == signature

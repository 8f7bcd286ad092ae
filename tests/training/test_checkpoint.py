"""Checkpoints on one rank: what is saved comes back, and what is damaged is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import ppfunc as pp
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training.checkpoint import saving, storage
from ppfunc.training.checkpoint.naming import named_leaves
from ppfunc.training.checkpoint.storage import Box, require_tiled, verify


def tree(seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 3, generator=g),
        "half": torch.randn(7, generator=g).bfloat16(),
        "ids": torch.randint(99, (2, 2), generator=g),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 3),
        "c": torch.randn(3, dtype=torch.complex64, generator=g),
        "rest": (torch.randn((), generator=g, dtype=torch.float64), [3 + seed, 0.1, True, "text\x1b"]),
    }


def zeros(like):
    return tree_map(
        lambda leaf: (
            torch.full_like(leaf, -1 if leaf.dtype.is_signed else 1)
            if isinstance(leaf, Tensor)
            else type(leaf)()
        ),
        like,
    )


def equal(one, other) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return all(
        (
            a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
            if isinstance(a, Tensor)
            else type(a) is type(b) and a == b
        )
        for a, b in pairs
    )


@pytest.fixture
def runs(tmp_path):
    for step in (1, 2):
        pp.checkpoint.save(tmp_path, tree(step), step=step)
    return tmp_path


def refused(path, match, like=None):
    with pytest.raises(pp.checkpoint.CheckpointError, match=match):
        pp.checkpoint.load(path, like=zeros(tree()) if like is None else like)


def test_a_state_that_was_donated_is_not_saved(tmp_path):
    with pp.Trainer(
        [lambda w, x: w * x], lambda y, t: y.sum(), pp.gpipe(1, 2), pp.optim.adamw(1e-3, donate=True)
    ) as trainer:
        before = trainer.init({0: torch.ones(2)})
        after, _ = trainer.step(before, torch.ones(2, 2), torch.ones(2))
    for state in (before, {"run": [before]}):
        with pytest.raises(
            ValueError, match="a step was given it, and has updated it in place, as donate=True"
        ):
            pp.checkpoint.save(tmp_path, state, step=1)
    assert pp.checkpoint.load(pp.checkpoint.save(tmp_path, after), like=after).step == 1


def test_a_checkpoint_is_no_folder_of_checkpoints(runs):
    with pytest.raises(
        ValueError,
        match=r"folder: .*step-2 is a checkpoint itself; give the folder in which there is one for each step",
    ):
        pp.checkpoint.save(pp.checkpoint.latest(runs), tree(3), step=3)
    assert equal(pp.checkpoint.load(runs, like=zeros(tree())), tree(2))


def test_what_is_saved_comes_back(tmp_path):
    saved = tree()
    path = pp.checkpoint.save(tmp_path / "new" / "runs", saved, step=3)
    assert path == tmp_path / "new" / "runs" / "step-3"
    assert sorted(os.listdir(path)) == ["00001-of-00001.safetensors", "manifest.json"] and os.listdir(
        path.parent
    ) == ["step-3"]
    like = zeros(saved)
    loaded = pp.checkpoint.load(path.parent, like=like)
    assert equal(loaded, saved) and equal(like, zeros(saved))
    assert equal(pp.checkpoint.load(path, like=like), saved)
    assert pp.checkpoint.latest(path.parent) == path
    assert torch.equal(load_file(path / "00001-of-00001.safetensors")["w"], saved["w"])


@pytest.mark.parametrize("dtype", storage.DTYPES.values(), ids=str)
def test_every_dtype(tmp_path, dtype):
    saved = {
        "a": torch.randint(2 if dtype is torch.bool else 256, (24,), dtype=torch.uint8).view(dtype),
        "b": torch.zeros(1),
    }
    pp.checkpoint.save(tmp_path, saved, step=0)
    loaded = pp.checkpoint.load(tmp_path, like={"a": torch.zeros_like(saved["a"]), "b": torch.ones(1)})
    assert loaded["a"].dtype == dtype and torch.equal(
        loaded["a"].view(torch.uint8), saved["a"].view(torch.uint8)
    )


def test_numbers_keep_their_bits(tmp_path):
    saved = {"a": 0.1, "b": float("inf"), "c": -0.0, "d": 2**62, "e": False, "f": "\ud800"}
    pp.checkpoint.save(tmp_path, saved, step=0)
    loaded = pp.checkpoint.load(tmp_path, like={key: type(value)() for key, value in saved.items()})
    assert str(loaded) == str(saved)
    with pytest.raises(ValueError, match="'e' is a number or text, bool, like has a number or text, int"):
        pp.checkpoint.load(tmp_path, like=saved | {"e": 0})


def test_layouts_in_memory_are_those_of_the_template(tmp_path):
    saved = {
        "a": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        "b": torch.arange(6.0).view(2, 3).conj(),
        "c": torch.ones(3).expand(2, 3),
    }
    pp.checkpoint.save(tmp_path, saved, step=0)
    loaded = pp.checkpoint.load(tmp_path, like=saved)
    assert equal(loaded, saved) and loaded["a"].stride() == saved["a"].stride()


# -- names, steps -----------------------------------------------------------------------------


def test_names_are_keys():
    state = pp.TrainState(
        torch.tensor(1),
        {0: {"a": [torch.zeros(1)]}},
        {0: {"mean": {"a": [torch.zeros(1)]}, "updates": torch.tensor(1)}},
        {},
        {},
    )
    assert [n for n, _ in named_leaves(state, None, "state")[0]] == [
        "step",
        "params.0.a.0",
        "optimizer.0.mean.a.0",
        "optimizer.0.updates",
    ]
    names = {0: {"a.0": "h.7"}}
    assert [n for n, _ in named_leaves(state, names, "state")[0]] == [
        "step",
        "params.h.7",
        "optimizer.mean.h.7",
        "optimizer.updates",
    ]
    with pytest.raises(ValueError, match="names: got None for 'a.0' of stage 0"):
        named_leaves(state, {}, "state")


def test_the_step_is_that_of_the_one_training_state(tmp_path):
    state = pp.TrainState(torch.tensor(7), {0: torch.ones(1)}, {0: {}}, {}, {})
    assert pp.checkpoint.save(tmp_path, {"state": state, "batch": 3}).name == "step-7"
    assert pp.checkpoint.save(tmp_path, {"state": state, "step": 9}).name == "step-9"
    with pytest.raises(ValueError, match="step: got None"):
        pp.checkpoint.save(tmp_path, {"a": state, "b": state})


def test_mistakes_are_named(tmp_path):
    one = torch.zeros(2)
    for state, error, match in [
        ({"a": one}, ValueError, "step: got None, expected a number"),
        ({"step": torch.tensor(0.5)}, ValueError, "step: got"),
        ({"step": -1}, ValueError, "step: got -1"),
        (
            {"step": 1, "a.b": one, "a": {"b": one}},
            ValueError,
            r"state\['a.b'\] and state\['a'\]\['b'\] are both called 'a.b'",
        ),
        ({"step": 1, "a": object()}, TypeError, r"state\['a'\] is of type object"),
        ({"step": 1, "__metadata__": one}, ValueError, "keeps the name"),
        ({"step": 1, "a": one.to_sparse()}, TypeError, "expected a dense tensor"),
        ({"step": 1, "a": one.to("meta")}, TypeError, "on meta"),
        (
            {"step": 1, "a": one.to(torch.complex128)},
            TypeError,
            "'a' has the dtype torch.complex128, expected one of torch.bool",
        ),
    ]:
        with pytest.raises(error, match=match):
            pp.checkpoint.save(tmp_path, state)
    save, export = (partial(call, tmp_path / "new") for call in (pp.checkpoint.save, pp.checkpoint.export))
    for call, error, match in [
        (lambda: save({"step": 1}, keep=0), ValueError, "keep: got 0"),
        (lambda: save({"step": 1}, group=3), TypeError, "group: got int"),
        (lambda: export({}), ValueError, "params: got no tensor, on any rank"),
        (lambda: export({0: {}}), ValueError, "params: got no tensor, on any rank"),
        (lambda: export({"n": 3}), TypeError, "params: 'n' is no tensor"),
        (lambda: export({}, most=0), ValueError, "most: got 0"),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert os.listdir(tmp_path) == []


def test_one_name_of_two_tensors_needs_the_same_values(tmp_path):
    names = {0: {"w": "shared"}, 1: {"w": "shared"}}
    one = torch.arange(4.0)
    pp.checkpoint.save(tmp_path, {0: {"w": one}, 1: {"w": one.clone()}}, step=0, names=names)
    loaded = pp.checkpoint.load(
        tmp_path, like={0: {"w": torch.zeros(4)}, 1: {"w": torch.zeros(4)}}, names=names
    )
    assert torch.equal(loaded[0]["w"], one) and torch.equal(loaded[1]["w"], one)
    assert loaded[0]["w"].data_ptr() != loaded[1]["w"].data_ptr()
    with pytest.raises(ValueError, match="'shared' has other values in two places of rank 0"):
        pp.checkpoint.save(tmp_path, {0: {"w": one}, 1: {"w": one + 1}}, step=1, names=names)
    with pytest.raises(ValueError, match="'shared' has other values in two places of rank 0"):
        pp.checkpoint.save(
            tmp_path, {0: {"w": one}, 1: {"w": torch.tensor([2.0, 3.0, 0.0, 1.0])}}, step=1, names=names
        )  # in another order
    with pytest.raises(ValueError, match=r"'shared' is float32\[4\] on rank 0, and float32\[3\] on rank 0"):
        pp.checkpoint.save(tmp_path, {0: {"w": one}, 1: {"w": one[:3]}}, step=1, names=names)
    assert os.listdir(tmp_path) == ["step-0"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("w"), "like lacks 'w', which step-1 has"),
        (lambda t: t.update(more=torch.zeros(1)), "step-1 lacks 'more', which like has"),
        (
            lambda t: t.update(w=torch.zeros(3, 5)),
            r"step-1: 'w' is float32\[5, 3\], like has float32\[3, 5\]",
        ),
        (
            lambda t: t.update(w=torch.zeros(5, 3, dtype=torch.float64)),
            r"'w' is float32\[5, 3\], like has float64\[5, 3\]",
        ),
        (lambda t: t.update(w=3), r"'w' is float32\[5, 3\], like has a number or text, int"),
    ],
)
def test_names_shapes_and_dtypes_are_checked_both_ways(tmp_path, change, match):
    pp.checkpoint.save(tmp_path, tree(), step=1)
    like = zeros(tree())
    change(like)
    with pytest.raises(ValueError, match=match):
        pp.checkpoint.load(tmp_path, like=like)


# -- damage -----------------------------------------------------------------------------------

FILE = "00001-of-00001.safetensors"


PARTS = {  # like, patterns, and what the warning or the error says
    "a part": ({"w": 0.0}, "a.*|n", "left out 'a.b', 'n'; as in like stays nothing"),
    "an adapter": (
        {"w": 0.0, "a": {"b": 0.0}, "n": 0, "x": 5.0},
        "x",
        "left out nothing; as in like stays 'x'",
    ),
    "lacking": ({"w": 0.0, "x": 5.0}, "a.*|n", "lacks 'x', which like has"),
    "left": ({"w": 0.0, "n": 0}, "n", "like lacks 'a.b'"),
    "idle": ({"w": 0.0}, "a.*|n|y*", "partial: 'y.' names nothing that step-1 or like lacks"),
    "meta": (
        {"w": 0.0, "x": torch.zeros(2, device="meta")},
        "x|a.*|n",
        "like: 'x', which step-1 lacks, has no values on meta; give a tensor",
    ),
    "nothing": ({"x": 5.0}, "*", "partial: nothing of like is in step-1: 'x'; .*names=split"),
    "shape": ({"w": torch.zeros(2)}, "a.*|n", "'w' is float32\\[\\], like has float32\\[2\\]"),
}


WHOLE = {  # patterns, the optimizer that saves, that which loads, and what is lacking
    "other": ("optimizer.*", pp.optim.sgd(1.0, momentum=0.9), pp.optim.adamw(1.0), "'optimizer.0.mean.w'"),
    "leaf": ("*.v", pp.optim.adamw(1.0), pp.optim.adamw(1.0), "'optimizer.0.mean.v'"),
    "group": (
        "optimizer.*",
        *(pp.optim.by_name({"*": make(1.0)}) for make in (pp.optim.sgd, pp.optim.adamw)),
        "'optimizer.0.group0.mean.w'",
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_an_optimizer_is_loaded_whole_or_not_at_all(tmp_path, kind):
    """The count of updates was loaded beside moments of zero, which no longer were corrected."""
    partial, saving, loading, lacking = WHOLE[kind]
    new = lambda optimizer: pp.Trainer([lambda p, x: x], lambda y, t: y.sum(), pp.gpipe(1, 1), optimizer)  # noqa: E731
    params = {0: {"w": torch.ones(1)}}
    pp.checkpoint.save(tmp_path, new(saving).init(params), step=1)
    like = {0: params[0] | {"v": torch.ones(1)}} if kind == "leaf" else params
    with pytest.raises(ValueError, match=f"partial: step-1 lacks {lacking}.* of the same optimizer"):
        pp.checkpoint.load(tmp_path, new(loading).init(like), partial=partial)


def test_parameters_alone_are_loaded(tmp_path):
    trainer = pp.Trainer([lambda p, x: x], lambda y, t: y.sum(), pp.gpipe(1, 1), pp.optim.adamw(1.0))
    state = trainer.init({0: {"w": torch.ones(1)}})
    pp.checkpoint.save(tmp_path, state, step=1)
    params = {0: {"w": torch.zeros(1)}}
    with pytest.raises(ValueError, match=r"lacks '0\.w', which like has, and has 'params\.0\.w'; load what"):
        pp.checkpoint.load(tmp_path, params)
    with pytest.warns(UserWarning, match="loaded in part"):
        found = pp.checkpoint.load(tmp_path, {"params": params}, partial="optimizer.*|step")
    assert equal(found["params"], state.params)


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_loaded_by_patterns_and_told(tmp_path, kind):
    like, partial, said = PARTS[kind]
    pp.checkpoint.save(tmp_path, {"w": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, "n": 3}, step=1)
    like = tree_map(lambda leaf: torch.tensor(leaf) if isinstance(leaf, float) else leaf, like)
    if "left out" not in said:
        with pytest.raises(ValueError, match=said):
            pp.checkpoint.load(tmp_path, like, partial=partial)
        return
    with pytest.warns(UserWarning, match=f"step-1 was loaded in part: {said}"):
        found = pp.checkpoint.load(tmp_path, like, partial=partial)
    wanted = {"w": 1.0, "a": {"b": 2.0}, "n": 3, "x": 5.0}
    assert equal(
        found, {k: tree_map(lambda v: torch.tensor(v) if type(v) is float else v, wanted[k]) for k in like}
    )
    assert all(
        one is not other
        for one, other in zip(tree_leaves(found), tree_leaves(like), strict=True)
        if isinstance(one, Tensor)
    )


def test_a_folder_of_another_run_is_told(tmp_path):
    state = {"w": torch.ones(2)}
    pp.checkpoint.save(tmp_path, state, step=1, run="one")
    for other in ("two", None):
        with pytest.raises(
            ValueError, match=f"run: got {other!r}, and .*step-1 is a checkpoint of the run 'one'"
        ):
            pp.checkpoint.save(tmp_path, state, step=2, run=other)
    with pytest.raises(TypeError, match="run: got 3, expected a text"):
        pp.checkpoint.save(tmp_path, state, step=2, run=3)
    pp.checkpoint.save_async(tmp_path, state, step=2, run="one").result()
    with pytest.raises(ValueError, match="run: got 'two', and .*step-2 is a checkpoint of the run 'one'"):
        pp.checkpoint.load(tmp_path, state, run="two")
    for run in ("one", None):
        assert equal(pp.checkpoint.load(tmp_path, state, run=run), state)
    assert names_in(tmp_path) == ["step-1", "step-2"]


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


DAMAGE = {
    "lost": (lambda p: (p / FILE).unlink(), f"'step-2/{FILE}' cannot be read: No such file"),
    "no manifest": (
        lambda p: (p / "manifest.json").unlink(),
        "'step-2/manifest.json' cannot be read: No such file",
    ),
    "cut": (lambda p: os.truncate(p / FILE, 100), f"'step-2/{FILE}' has 100 bytes, expected"),
    "longer": (lambda p: os.truncate(p / FILE, 9999), f"'step-2/{FILE}' has 9,999 bytes"),
    "flipped": (lambda p: flip(p / FILE, -1), f"tensor '.*' in 'step-2/{FILE}' has other bytes"),
    "flipped header": (lambda p: flip(p / FILE, 20), f"the header in 'step-2/{FILE}' has other bytes"),
    "flipped length": (lambda p: flip(p / FILE, 5), f"the header in 'step-2/{FILE}' has other bytes"),
    "flipped manifest": (lambda p: flip(p / "manifest.json", 50), "'step-2/manifest.json'"),
    "mixed": (
        lambda p: shutil.copy(p.parent / "step-1" / FILE, p / FILE),
        f"in 'step-2/{FILE}' has other bytes",
    ),
    "another's manifest": (
        lambda p: shutil.copy(p.parent / "step-1" / "manifest.json", p),
        f"'step-2/{FILE}' has",
    ),
    "another step": (
        lambda p: (shutil.rmtree(p), shutil.copytree(p.parent / "step-1", p)),
        "'step-2' holds the checkpoint of step 1",
    ),
    "a link to nothing": (
        lambda p: ((p / FILE).unlink(), (p / FILE).symlink_to(p.parent / "x")),
        f"'step-2/{FILE}' cannot be read: No such file",
    ),
    "a folder": (
        lambda p: ((p / FILE).unlink(), (p / FILE).mkdir()),
        f"'step-2/{FILE}' cannot be read: Is a directory",
    ),
    "a pipe": (  # which was waited for
        lambda p: ((p / FILE).unlink(), os.mkfifo(p / FILE)),
        f"'step-2/{FILE}' is no regular file",
    ),
    "a pipe for the manifest": (
        lambda p: ((p / "manifest.json").unlink(), os.mkfifo(p / "manifest.json")),
        "'step-2/manifest.json' is no regular file",
    ),
    "a device": (
        lambda p: ((p / FILE).unlink(), (p / FILE).symlink_to(os.devnull)),
        f"'step-2/{FILE}' is no regular file",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_name(runs, kind):
    damage, match = DAMAGE[kind]
    if kind == "another's manifest":  # of a save of another size
        pp.checkpoint.save(runs, tree(1) | {"w": torch.zeros(5, 4)}, step=3)
        (runs / "step-1").rename(runs / "aside")
        (runs / "step-3").rename(runs / "step-1")
    damage(runs / "step-2")
    refused(runs / "step-2", match)
    if kind == "another's manifest":
        shutil.rmtree(runs / "step-1")
        (runs / "aside").rename(runs / "step-1")
    with pytest.warns(UserWarning, match=match):
        assert pp.checkpoint.latest(runs) == runs / "step-1"
    with pytest.warns(UserWarning, match="step-1 is the latest good checkpoint; refused"):
        assert equal(pp.checkpoint.load(runs, like=zeros(tree())), tree(1))


def test_any_bit_that_flips_is_refused(runs):
    shutil.rmtree(runs / "step-1")
    for name in (FILE, "manifest.json"):
        path = runs / "step-2" / name
        good = path.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 150)):
            flip(path, at, at % 8)
            refused(runs / "step-2", "step-2/")
            with pytest.raises(
                pp.checkpoint.CheckpointError, match="has no good checkpoint; refused: .*step-2/"
            ):
                pp.checkpoint.latest(runs)
            path.write_bytes(good)
    assert equal(pp.checkpoint.load(runs, like=zeros(tree())), tree(2))


def test_damage_in_any_piece_of_a_tensor_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_PIECE", 16)
    saved = {"w": torch.arange(1.0, 10.0)}  # pieces of 16, 16 and 4 bytes
    path = pp.checkpoint.save(tmp_path, saved, step=2) / FILE
    assert equal(pp.checkpoint.load(tmp_path, like=zeros(saved)), saved)
    good = path.read_bytes()
    header, a, b, c = good[:-36], good[-36:-20], good[-20:-4], good[-4:]
    for data in (
        b + a + c,
        a + c + b,
        a + a + c,
        *(bytes(byte ^ (at == n) for n, byte in enumerate(a + b + c)) for at in range(36)),
    ):
        path.write_bytes(header + data)
        refused(tmp_path / "step-2", f"tensor 'w' in 'step-2/{FILE}' has other bytes", zeros(saved))
        with pytest.raises(pp.checkpoint.CheckpointError, match="tensor 'w' in .* has other bytes"):
            pp.checkpoint.latest(tmp_path)


def test_other_files_are_ignored(runs):
    """Nothing reads them, so they can do no harm."""
    for folder in (runs, runs / "step-2"):
        for name in (".DS_Store", ".metadata", "notes.pkl"):
            (folder / name).write_bytes(pickle.dumps(print))
    assert pp.checkpoint.latest(runs) == runs / "step-2"
    assert equal(pp.checkpoint.load(runs, like=zeros(tree())), tree(2))
    pp.checkpoint.save(runs, tree(3), step=3, keep=1)
    assert sorted(os.listdir(runs)) == [".DS_Store", ".metadata", "notes.pkl", "step-3"]


def test_links_are_followed(runs, tmp_path):
    """As those of the caches of Hugging Face, whose snapshots are links to files named by their digests."""
    (runs / "last").symlink_to(runs / "step-2")
    (runs / "step-2" / FILE).rename(tmp_path / "elsewhere")
    (runs / "step-2" / FILE).symlink_to(tmp_path / "elsewhere")
    assert equal(pp.checkpoint.load(runs / "last", like=zeros(tree())), tree(2))
    (tmp_path / "snapshot").mkdir()
    blob = pp.checkpoint.export(tmp_path / "blobs", {"a": torch.ones(2)}) / "model.safetensors"
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(blob)
    assert equal(pp.checkpoint.load(tmp_path / "snapshot", like={"a": torch.zeros(2)}), {"a": torch.ones(2)})


def test_what_was_not_committed_is_no_checkpoint(runs):
    (runs / "step-2").rename(runs / "step-2.writing-0a1b")
    assert pp.checkpoint.latest(runs) == runs / "step-1"
    refused(runs / "step-2.writing-0a1b", "'step-2.writing-0a1b' was not committed")
    with pytest.raises(FileNotFoundError, match="is no folder; give one"):
        pp.checkpoint.load(runs / "none", like={})
    (runs / "x" / "step-1.writing-0a1b").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="x has no checkpoint"):
        pp.checkpoint.load(runs / "x", like={})
    assert pp.checkpoint.latest(runs / "x") is None and pp.checkpoint.latest(runs / "none") is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: p.symlink_to(p.parent / "step-2"), "'step-.' holds the checkpoint of step 2"),
        (lambda p: p.symlink_to(p / "gone"), "'.*step-.' is no folder on a disk that all ranks share"),
        (lambda p: p.touch(), "'.*step-.' is no folder on a disk that all ranks share"),
    ],
    ids=["of another step", "to nothing", "a file"],
)
def test_a_link_or_a_file_in_the_place_of_a_checkpoint_is_told(runs, make, match):
    """Training would silently go on from an earlier step, or from the beginning."""
    make(runs / "step-7")
    for find in (pp.checkpoint.latest, lambda folder: pp.checkpoint.load(folder, like=zeros(tree()))):
        with pytest.warns(UserWarning, match=f"step-2 is the latest good checkpoint; refused: {match}"):
            find(runs)
    pp.checkpoint.save(runs, tree(3), step=3, keep=1)
    assert [re.sub("-[0-9a-f]{16}$", "", name) for name in sorted(os.listdir(runs))] == [
        "step-3",
        "step-7.damaged",
    ]
    make(runs / "step-1")
    pp.checkpoint.save(runs, tree(4), step=4, keep=1)
    assert sorted(os.listdir(runs))[:2] == ["step-1", "step-4"]


def failing(function, path, error):
    """A call of the operating system that fails for a file or a folder."""

    def call(where, *args):
        if str(path) in (os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)):
            raise error
        return function(where, *args)

    return call


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("preadv", OSError(5, "Input/output error")),
        ("fstat", OSError(5, "Input/output error")),
        ("open", PermissionError(13, "Permission denied")),
    ],
)
def test_what_cannot_be_read_is_damaged(runs, monkeypatch, name, error):
    monkeypatch.setattr(os, name, failing(getattr(os, name), runs / "step-2", error))
    refused(runs / "step-2", f"cannot be read: {error.strerror}")
    with pytest.warns(
        UserWarning, match=f"step-1 is the latest good checkpoint; refused: .*{error.strerror}"
    ):
        assert equal(pp.checkpoint.load(runs, like=zeros(tree())), tree(1))
    with pytest.warns(UserWarning, match="refused"):
        assert pp.checkpoint.latest(runs) == runs / "step-1"
    with pytest.raises(pp.checkpoint.CheckpointError):
        verify(runs / "step-2")


def test_a_folder_that_cannot_be_listed_is_not_empty(runs, monkeypatch):
    monkeypatch.setattr(
        os, "scandir", failing(os.scandir, runs, FileNotFoundError(2, "No such file or directory"))
    )
    refused(runs, "cannot be read")
    with pytest.raises(pp.checkpoint.CheckpointError, match="cannot be read"):
        pp.checkpoint.latest(runs)


def content_of(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())["content"]


def path_of(*keys):
    def change(content, value):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


PART = ("tensors", "w", 2, 0)  # box, file, offset, size, digest


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        (path_of(*PART, 1), "../secret.safetensors", "has no header of '../secret.safetensors'"),
        (path_of("headers", 0, 1), f"../step-1/{FILE}", "is outside of 'step-2'"),
        (path_of("headers"), [], "has no header of '00001-of-00001.safetensors'"),
        (path_of(*PART, 0), [[1, 0], [5, 3]], "hold each element once"),
        (path_of(*PART, 0), [[-1, 0], [5, 3]], "hold each element once"),
        (path_of(*PART, 0), [[0], [15]], "hold each element once"),
        (
            path_of(*PART, 0),
            [[0, 0], [4, 3]],
            "has the parts .4, 3. at .0, 0., expected parts that",
        ),
        (path_of(*PART, 0), [[0, 0], [2**62, 2**62]], "hold each element once"),
        (path_of("tensors", "w", 2), [], "has the parts none, expected parts that hold each element once"),
        (path_of("tensors", "w", 0), "os.system", "is damaged or foreign"),
        (path_of(*PART, 4), None, "tensor 'w' in .* has other bytes"),
        (path_of(*PART, 4), "0" * 64, "tensor 'w' in .* has other bytes"),
        (path_of("headers", 0, 4), "0" * 64, "the header in .* has other bytes"),
        (path_of("format"), "ppfunc checkpoint, version 1", "got the format 'ppfunc checkpoint, version 1'"),
        (path_of("step"), 10**30, "holds the checkpoint of step 10"),
        (path_of("tensors"), [], "damaged or foreign"),
        (path_of("more"), 3, "damaged or foreign"),
        (
            lambda content, _: content["tensors"]["w"][2].append(content["tensors"]["w"][2][0]),
            None,
            r"has the parts \[5, 3\] at \[0, 0\], \[5, 3\] at \[0, 0\], expected parts",
        ),
    ],
)
def test_a_manifest_that_tells_something_else_is_refused(runs, where, value, match):
    content = content_of(runs / "step-2")
    where(content, value)
    (runs / "step-2" / "manifest.json").write_bytes(storage.signed(content))  # whatever it says
    refused(runs / "step-2", match)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b'{"content": {}, "content": {}}',
        b'{"content": NaN}',
        b'{"content": ' + b"9" * 10_000 + b"}",
        b"\xff",
        b"{}",
    ],
)
def test_manifests_that_are_none(runs, text):
    (runs / "step-2" / "manifest.json").write_bytes(text)
    refused(runs / "step-2", "'step-2/manifest.json' is damaged or foreign")
    with pytest.warns(UserWarning, match="step-1 is the latest good .*'step-2/manifest.json' is damaged"):
        assert equal(pp.checkpoint.load(runs, like=zeros(tree())), tree(1))


def header(entries, data=b"", length=None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape=None, dtype="F32"):
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        header({}, length=2**63),
        header({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        header({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)),
        header({"a": entry(0, 8)}, bytes(4)),
        header({"a": entry(0, 4)}, bytes(8)),
        header({"a": entry(0, 4, [2])}, bytes(4)),
        header({"a": entry(0, 4, [-1])}, bytes(4)),
        header({"a": entry(0, 4, [2**62, 2**62, 0])}, bytes(4)),
        header({"a": entry(0, 4, [1], "pickle")}, bytes(4)),
        header({"a": entry(0, 4, [1], ["F32"])}, bytes(4)),
        header({"a": entry(0, 1, [1], "F8_E8M0")}, bytes(1)),
        header({"a\x1b[2J": 3}),
        header(b"[" * 50_000),
    ],
)
def test_hostile_headers_are_refused(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(pp.checkpoint.CheckpointError, match="model.safetensors' is no safetensors file that"):
        pp.checkpoint.load(tmp_path, like={"a": torch.zeros(1)})


# -- which steps stay --------------------------------------------------------------------------


def names_in(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_last_checkpoints_stay(tmp_path):
    for step in range(5):
        pp.checkpoint.save(tmp_path, tree(step), keep=2, step=step)
    assert names_in(tmp_path) == ["step-3", "step-4"]
    pp.checkpoint.save(tmp_path, tree(), keep=None, step=10)
    assert names_in(tmp_path) == ["step-10", "step-3", "step-4"]


def test_damaged_checkpoints_do_not_count(tmp_path):
    for step in range(4):
        pp.checkpoint.save(tmp_path, tree(step), step=step, keep=None)
    os.truncate(tmp_path / "step-3" / FILE, 10)
    os.truncate(tmp_path / "step-2" / FILE, 10)
    pp.checkpoint.save(tmp_path, tree(), step=4, keep=2)
    assert names_in(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]  # 4 and 1 are good
    pp.checkpoint.save(tmp_path, tree(), step=5, keep=1)
    assert names_in(tmp_path) == ["step-5"]


def test_the_one_just_written_stays(tmp_path):
    for step in range(3):
        pp.checkpoint.save(tmp_path, tree(step), step=step)
    saving.clean(tmp_path / "step-0", 1)
    assert names_in(tmp_path) == ["step-0", "step-2"]


def test_a_step_that_is_there_is_not_written_over(runs):
    for step in (0, 1, 2):
        with pytest.raises(
            FileExistsError,
            match=f"cannot save step-{step}: .*step-2 is a valid checkpoint of this or a later step",
        ):
            pp.checkpoint.save(runs, tree(9), step=step)
    assert names_in(runs) == ["step-1", "step-2"] and equal(pp.checkpoint.load(runs, like=tree()), tree(2))


def test_damaged_ones_make_way(runs):
    pp.checkpoint.save(runs, tree(3), step=3)
    flip(runs / "step-3" / FILE, -1)
    os.truncate(runs / "step-2" / FILE, 10)
    with pytest.warns(UserWarning, match="refused"):
        assert equal(pp.checkpoint.load(runs, like=tree()), tree(1))
    pp.checkpoint.save(runs, tree(7), step=2)
    assert [name.split(".d")[0] for name in names_in(runs)] == ["step-1", "step-2", "step-2", "step-3"]
    with warnings.catch_warnings(action="error"):
        assert equal(pp.checkpoint.load(runs, like=tree()), tree(7))


def test_leftovers_of_dead_writers_are_deleted(runs):
    for name in (
        "step-9.writing-00",
        "step-1.deleting-00",
        "step-1.damaged-00",
        "step-9.writing-zz",
        "other",
    ):
        (runs / name).mkdir()
    pp.checkpoint.save(runs, tree(), step=3)
    assert names_in(runs) == ["other", "step-1", "step-1.damaged-00", "step-2", "step-3", "step-9.writing-zz"]


# -- asynchronous saves ------------------------------------------------------------------------


def test_what_changes_after_an_asynchronous_save_is_not_saved(tmp_path):
    state = tree()
    before = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)
    saving = pp.checkpoint.save_async(tmp_path, state, step=1)
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor):
            leaf.zero_()
    assert saving.result() == tmp_path / "step-1" and saving.done()
    assert equal(pp.checkpoint.load(tmp_path, like=zeros(state)), before)


def test_one_asynchronous_save_at_a_time(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(file):
        begun.set()
        go.wait(20)
        fsync(file)

    pp.checkpoint.save(tmp_path, tree(), step=0)
    monkeypatch.setattr(os, "fsync", slow)
    first = pp.checkpoint.save_async(tmp_path, tree(1), step=1)
    assert begun.wait(20) and not first.done() and pp.checkpoint.latest(tmp_path) == tmp_path / "step-0"
    with pytest.raises(TimeoutError):
        first.result(0.01)
    assert not first.cancel()
    second = threading.Thread(target=pp.checkpoint.save, args=(tmp_path, tree(2)), kwargs={"step": 2})
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go.set()
    second.join()
    assert first.done() and pp.checkpoint.latest(tmp_path) == tmp_path / "step-2"


@pytest.fixture
def struck():
    """Interrupts the main thread, after some seconds; twice where told to."""
    timers, before = [], signal.getsignal(signal.SIGUSR1)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def strike(*seconds):
        for second in seconds:
            timers.append(
                threading.Timer(second, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
            )
            timers[-1].start()

    signal.signal(signal.SIGUSR1, interrupt)
    yield strike
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


def test_a_wait_for_a_save_that_is_interrupted_does_not_end_it(tmp_path, monkeypatch, struck):
    """The next one writes over the copies of the last one, when that has ended."""
    go, write = threading.Event(), storage.write_at
    monkeypatch.setattr(storage, "write_at", lambda *args: (go.wait(20), write(*args))[1])
    pp.checkpoint.save_async(tmp_path, tree(1), step=1)
    struck(0.1)
    with pytest.raises(KeyboardInterrupt):
        pp.checkpoint.save_async(tmp_path, tree(2), step=2)
    later = threading.Timer(0.3, go.set)
    later.start()
    try:
        pp.checkpoint.save_async(tmp_path, tree(3), step=3).result()
    finally:
        later.join()
    assert equal(pp.checkpoint.load(tmp_path / "step-1", like=zeros(tree())), tree(1))
    assert equal(pp.checkpoint.load(tmp_path / "step-3", like=zeros(tree())), tree(3))


def test_an_interrupt_stops_all_threads(monkeypatch, struck):
    """A thread ends the task that it is at: no other begins."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun = threading.Barrier(2)
    done = []

    def work(task):
        if task < 2:
            begun.wait(20)
        if threading.current_thread() is threading.main_thread():
            struck(0.1)
            time.sleep(20)
        time.sleep(0.5)
        done.append(task)

    with pytest.raises(KeyboardInterrupt):
        storage.in_threads(work, range(100))
    assert len(done) == 1


def test_errors_of_asynchronous_saves_surface(tmp_path, monkeypatch):
    pwrite = os.pwrite

    def full(file, data, at):
        if at:  # not the manifest, nor the header of a file
            raise OSError(28, "No space left on device")
        return pwrite(file, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        failed = pp.checkpoint.save_async(tmp_path, tree(), step=1)
        with pytest.raises(OSError, match="No space left"):
            failed.result()
        with pytest.warns(UserWarning, match="step-1 was not saved: OSError: .*No space left"):
            pp.checkpoint.save_async(tmp_path, {"n": 3}, step=1).result()
        unseen = pp.checkpoint.save_async(tmp_path, tree(), step=2)
        while not unseen.done():
            pass
    with pytest.warns(UserWarning, match="step-2 was not saved: OSError: .*No space left"):
        pp.checkpoint.save(tmp_path, tree(), step=2)
    assert names_in(tmp_path) == ["step-1", "step-2"]
    with pytest.raises(ValueError, match="step: got None"):
        pp.checkpoint.save_async(tmp_path, tree())


LAST_LINE = """
import sys, torch, ppfunc as pp
pp.checkpoint.save_async(sys.argv[1], {name: torch.ones(10_000) for name in "abc"}, step=1)
"""


def test_an_asynchronous_save_outlives_the_last_line_of_a_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LAST_LINE, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert (
        done.returncode == 0 and done.stderr == "" and pp.checkpoint.latest(tmp_path) == tmp_path / "step-1"
    )


# -- boxes ---------------------------------------------------------------------------------------


def cut(box: Box, draw) -> list[Box]:
    """A box cut in two, again and again."""
    wide = [d for d, size in enumerate(box.shape) if size > 1]
    if not wide or not draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(wide))
    at = draw(st.integers(1, box.shape[d] - 1))
    first = Box(box.offset, tuple(at if k == d else n for k, n in enumerate(box.shape)))
    offset, shape = (
        tuple(f(n) if k == d else n for k, n in enumerate(part))
        for part, f in zip(box, (lambda a: a + at, lambda n: n - at), strict=True)
    )
    return cut(first, draw) + cut(Box(offset, shape), draw)


def test_boxes_that_overlap_beside_a_gap_are_refused():
    """There are as many elements as the tensor has."""
    for boxes, shape in (
        ([Box((0,), (2,)), Box((1,), (2,))], (4,)),
        ([Box((0, 0), (2, 1)), Box((1, 0), (1, 2))], (2, 2)),
    ):
        with pytest.raises(ValueError, match="expected parts that hold each element once"):
            require_tiled(boxes, shape, "x")


@given(st.data())
def test_boxes_that_tile_are_told_from_others(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = data.draw(st.permutations(cut(Box.of_whole(shape), data.draw)))
    require_tiled(boxes, shape, "x")
    count = torch.zeros(shape)
    for box in boxes:
        count[box.within(Box.of_whole(shape))] += 1
    assert bool((count == 1).all())
    n = data.draw(st.integers(0, len(boxes) - 1))
    alike = [k for k, box in enumerate(boxes) if box.shape == boxes[n].shape and k != n]
    twice = [[*boxes[:k], boxes[n], *boxes[k + 1 :]] for k in alike]  # as many elements as there are
    for wrong in (boxes[:n] + boxes[n + 1 :], [*boxes, boxes[n]], *twice):
        with pytest.raises(ValueError, match="expected parts that hold each element once"):
            require_tiled(wrong, shape, "x")


# -- under a model's own names ------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = (
            torch.nn.Embedding(9, 4),
            torch.nn.Linear(4, 4),
            torch.nn.Linear(4, 9, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mix(self.embed(x)))


def test_a_split_is_saved_under_the_names_of_its_model(tmp_path):
    model, example = Tied(), torch.zeros(2, 3, dtype=torch.int64)
    two, three = (pp.split(model, example, at=at) for at in (["head"], ["mix", "head"]))
    path = pp.checkpoint.save(tmp_path / "runs", two.params, step=1, names=two)
    assert sorted(content_of(path)["tensors"]) == ["embed.weight", "mix.bias", "mix.weight"]
    loaded = pp.checkpoint.load(path, like=tree_map(torch.zeros_like, three.params), names=three)
    assert equal(loaded, three.params)
    folder = pp.checkpoint.export(tmp_path / "model", two.params, two)
    assert names_in(folder) == ["model.safetensors"]
    assert equal(
        load_file(folder / "model.safetensors"),
        {k: v for k, v in sorted(model.state_dict().items()) if k != "head.weight"},
    )
    assert equal(
        pp.checkpoint.load(folder, like=tree_map(torch.zeros_like, three.params), names=three), three.params
    )
    assert equal(three.load(folder).params, three.params)
    with pytest.raises(FileExistsError, match="model is there; give another folder"):
        pp.checkpoint.export(folder, two.params, two)


def test_an_export_in_several_files_has_an_index(tmp_path):
    params = {s: {"w": torch.full((10,), float(s)), "b": torch.zeros(3)} for s in range(3)}
    names = lambda stage, name: f"layers.{stage}.{name}"  # noqa: E731
    folder = pp.checkpoint.export(tmp_path / "new", params, names, most=80)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"] == {"total_size": 3 * 13 * 4}
        and names_in(folder)[0] == "model-00001-of-00003.safetensors"
    )
    assert len(names_in(folder)) == 4 and all("metadata" not in name for name in index["weight_map"])
    loaded = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert torch.equal(loaded["layers.2.w"], params[2]["w"]) and len(loaded) == 6
    like = tree_map(lambda t: torch.full_like(t, -1), params)
    assert equal(pp.checkpoint.load(folder, like=like, names=names), params)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        pp.checkpoint.CheckpointError, match="model-00002-of-00003.safetensors' cannot be read"
    ):
        pp.checkpoint.load(folder, like=like, names=names)


def test_an_export_that_fails_leaves_nothing_that_is_read(tmp_path, monkeypatch):
    params = {s: {"w": torch.full((10,), float(s))} for s in range(3)}
    for name in ("rename", "fsync"):
        for number in range(20):
            seen, function = [], getattr(os, name)

            def call(*args, seen=seen, function=function, number=number):
                seen.append(args)
                if len(seen) == number + 1:
                    raise OSError(28, "No space left on device")
                return function(*args)

            with monkeypatch.context() as patched:
                patched.setattr(os, name, call)
                try:
                    pp.checkpoint.export(tmp_path / "model", params, most=40)
                except OSError:
                    left = names_in(tmp_path)  # flushing the name of a whole folder may fail
                    assert left == [] or (left == ["model"] and len(names_in(tmp_path / "model")) == 4)
                    shutil.rmtree(tmp_path / "model", ignore_errors=True)
                    continue
            assert number > (4 if name == "fsync" else 0) and len(names_in(tmp_path / "model")) == 4
            shutil.rmtree(tmp_path / "model")
            break


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "x.pkl", ".safetensors", 3])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(
        pp.checkpoint.CheckpointError, match="has no weight_map from names to files beside it"
    ):
        pp.checkpoint.load(tmp_path, like={"w": torch.zeros(1)})


@pytest.mark.parametrize("homes", [{"a": "x"}, {"a": "x", "b": "y"}], ids=["one more", "of another file"])
def test_an_index_and_its_files_have_the_same_tensors(tmp_path, homes):
    for name in "xy":
        save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{file}.safetensors" for name, file in homes.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(pp.checkpoint.CheckpointError, match="do not have the same tensors: 'b'"):
        pp.checkpoint.load(tmp_path, like={"a": torch.zeros(1)})


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda runs: pp.checkpoint.save(None, {}), "folder: got None of type NoneType, expected a path"),
        (lambda runs: pp.checkpoint.load(3, {}), "folder: got 3 of type int, expected a path"),
        (lambda runs: pp.checkpoint.from_dcp(None, {}), "folder: got None of type NoneType, expected a path"),
        (lambda runs: pp.checkpoint.latest(None), "folder: got None of type NoneType, expected a path"),
        (
            lambda runs: pp.checkpoint.load(runs, {}, partial=["step"]),
            r"partial: got \['step'\] of type list, expected patterns in one text, such as",
        ),
        (
            lambda runs: pp.checkpoint.save(runs, {"w": torch.ones(2)}, step=1, names=5),
            "names: got 5 of type int, expected a split, .*leaf: name in the model.*, or a function",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(runs, call, match):
    with pytest.raises(TypeError, match=match):
        call(runs)


def test_tensors_are_made_elsewhere_by_default(tmp_path):
    """``torch.set_default_device``: what is read from a file is read by the host."""
    tree = {"w": torch.arange(6.0).view(2, 3), "ids": torch.arange(3)}
    with torch.device("meta"):
        pp.checkpoint.save(tmp_path, tree, step=0)
        found = pp.checkpoint.load(tmp_path, like=tree)
    assert all(torch.equal(found[name], tree[name]) for name in tree)

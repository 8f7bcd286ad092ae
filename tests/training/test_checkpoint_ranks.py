"""Checkpoints of many ranks: saved on one grid, loaded on another, and training that goes on as if nothing
had been.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import cache
from itertools import accumulate, product
from operator import sub
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ppfunc as pp
from ppfunc.parallel import Partition
from ppfunc.stage._torch import strided_shard
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.training.checkpoint import loading
from ppfunc.training.checkpoint.storage import DTYPES, Box, box_of
from tests.models import new_trainer, normal, same_bits, squared
from tests.sharded_models import full

SHAPES = [(5, 3), (8,), (2, 7, 3), (1,), (), (3, 0)]


def whole_tree() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {f"t{n}": torch.randn(shape, generator=g) for n, shape in enumerate(SHAPES)}


def laid(tree: Any, mesh: Any, placements: Any) -> Any:
    """Every leaf over the mesh, along the axes that it has."""

    def one(leaf: Tensor) -> Tensor:
        return distribute_tensor(
            leaf,
            mesh,
            [p if p.is_replicate() or p.dim < leaf.ndim else Replicate() for p in placements],
            src_data_rank=None,
        )

    return tree_map(one, tree)


def layouts(size):
    """Trees over all meshes of some ranks, in all ways."""
    ways = [Replicate(), Shard(0), Shard(1)]
    line, square = (
        init_device_mesh("cpu", (size,)),
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b")),
    )
    return [(line, [way]) for way in ways] + [(square, pair) for pair in product(ways, ways)]


def save_and_load_all_ways(rank, size, root):
    tree, ways = whole_tree(), layouts(size)
    for n, (mesh, placements) in enumerate(ways):
        saved = laid(tree, mesh, placements)
        for name, leaf in saved.items():
            box = box_of(leaf, "leaf")
            assert torch.equal(leaf.to_local(), tree[name][box.within(Box.of_whole(leaf.shape))])
        path = pp.checkpoint.save(f"{root}/{n}", saved, step=0)
        for other, wanted in (ways[(n + 5) % len(ways)], (mesh, placements)):
            like = laid(tree_map(lambda t: torch.full_like(t, torch.nan), tree), other, wanted)
            loaded = pp.checkpoint.load(path, like=like)
            for name in tree:
                assert isinstance(loaded[name], DTensor) and loaded[name].placements == like[name].placements
                part = tree[name][box_of(like[name], name).within(Box.of_whole(tree[name].shape))]
                assert torch.equal(loaded[name].to_local(), part), (mesh, placements, name)


def test_any_layout_loads_into_any_other(four, tmp_path):
    four(save_and_load_all_ways, str(tmp_path))
    for n in range(12):
        loaded = pp.checkpoint.load(
            tmp_path / str(n), like=tree_map(torch.zeros_like, whole_tree())
        )  # in one process
        assert all(torch.equal(loaded[name], t) for name, t in whole_tree().items())
        files = os.listdir(tmp_path / str(n) / "step-0")
        size = sum(
            t.nbytes
            for name in files
            if name != "manifest.json"
            for t in load_file(tmp_path / str(n) / "step-0" / name).values()
        )
        assert size == sum(t.nbytes for t in whole_tree().values())  # each element is written once


# -- training ------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 6


def layer(p, x):
    return x + torch.nn.functional.dropout(torch.tanh(x @ p["w"] + p["b"]), 0.2)


def initial(n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    return {"w": torch.randn(WIDTH, WIDTH, generator=g) / 3, "b": torch.randn(WIDTH, generator=g) / 3}


def batch(step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 + step))


@cache
def stages_of(partition: Partition) -> Any:
    """Made once in a process: trainers that share stages share what is traced of them."""
    return pp.stages_from_layers([layer] * LAYERS, partition)


class Job:
    """A trainer on a grid, and the names that its parameters have on any grid."""

    def __init__(self, sizes, data=1, shard="none", build=pp.one_f_one_b, donate=False):
        stages = len(sizes)
        self.mesh = (
            init_device_mesh("cpu", (stages, data), mesh_dim_names=("pp", "dp"))
            if dist.is_initialized()
            else None
        )
        partition = Partition((0, *accumulate(sizes)))
        self.held = range(stages) if self.mesh is None else [self.mesh.get_local_rank("pp")]
        self.place = 0 if self.mesh is None else self.mesh.get_local_rank("dp")
        self.data, self.partition = data, partition
        rate = pp.optim.warmup_cosine(peak=1e-2, warmup=2, steps=10)
        self.trainer = new_trainer(
            stages_of(partition), squared, build(stages, 4 // data), pp.optim.adamw(rate, donate=donate), self.mesh,  # noqa: E501
            axes=pp.Axes(pipe="pp", data="dp") if self.mesh else None, clip=0.1, scale=pp.dynamic_scale(interval=2), shard=shard,  # noqa: E501
        )  # fmt: skip
        self.state = self.trainer.init({s: [initial(n) for n in partition.layers_of(s)] for s in self.held})

    def name(self, stage: int, leaf: str) -> str:
        n, _, key = leaf.partition(".")
        return f"layers.{self.partition.layers_of(stage)[int(n)]}.{key}"

    def run(self, first, last, between=lambda: None):
        losses = []
        for step in range(first, last):
            x = batch(step).chunk(self.data)[self.place]
            self.state, metrics = self.trainer.step(self.state, x, x.roll(1, 1), seed=(7, step))
            losses.append(metrics.loss.item())
            between()
        return losses

    def save(self, root, step):
        return pp.checkpoint.save(
            root, {"state": self.state, "batch": step}, step=step, names=self.name, group=self.mesh
        )

    def load(self, root):
        like = {"state": self.state, "batch": -1}
        found = pp.checkpoint.load(root, like=like, names=self.name, group=self.mesh)
        self.state = found["state"]
        return found["batch"]


def train_a_while(rank, size, root, grid, first, last):
    with (job := Job(**grid)).trainer:
        start = job.load(root) if first else 0
        assert start == first
        losses = job.run(first, last)
        job.save(root, last)
        return losses


def stored(root) -> dict[str, Tensor]:
    """All tensors of the latest checkpoint, whole, by name."""
    content = json.loads((pp.checkpoint.latest(root) / "manifest.json").read_text())["content"]
    like = {
        name: torch.zeros(shape, dtype=DTYPES[dtype])
        for name, (dtype, shape, _) in content["tensors"].items()
    }
    like |= dict.fromkeys(content["values"], 0)
    return pp.checkpoint.load(root, like=like)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[n]), torch.as_tensor(other[n])) for n in one
    )


@pytest.mark.parametrize("shard", ["optimizer", "params"])
def test_resumed_training_is_uninterrupted_training(four, tmp_path, shard):
    grid = {"sizes": (2, 2), "data": 2, "shard": shard}
    whole = four(train_a_while, str(tmp_path / "whole"), grid, 0, 6)[0]
    first = four(train_a_while, str(tmp_path / "parts"), grid, 0, 3)[0]
    rest = four(train_a_while, str(tmp_path / "parts"), grid, 3, 6)[0]
    assert first + rest == whole
    assert same(stored(tmp_path / "whole"), stored(tmp_path / "parts"))
    names = stored(tmp_path / "whole").keys()
    assert {
        "state.params.layers.3.w",
        "state.optimizer.mean.layers.0.b",
        "state.optimizer.updates",
        "state.scale.scale",
        "batch",
    } <= names


def load_and_save(rank, size, root, grid, into):
    with (job := Job(**grid)).trainer:
        step = job.load(root)
        job.save(into, step)
        job.run(step, step + 1)


GRIDS = [
    {"sizes": (3, 1), "data": 2, "shard": "optimizer"},
    {"sizes": (1, 1, 1, 1)},
    {"sizes": (1, 3), "data": 2, "build": pp.gpipe},
    {"sizes": (4,), "data": 4, "shard": "params"},
    {"sizes": (2, 2), "data": 2, "shard": "params", "build": pp.zb_h1},
]


def test_a_checkpoint_loads_on_any_grid(four, tmp_path):
    four(train_a_while, str(tmp_path / "runs"), GRIDS[0], 0, 2)
    before = stored(tmp_path / "runs")
    for n, grid in enumerate(GRIDS):
        four(load_and_save, str(tmp_path / "runs"), grid, str(tmp_path / str(n)))
        assert same(stored(tmp_path / str(n)), before), grid
    job = Job((2, 1, 1))  # all stages in this process
    assert job.load(tmp_path / "runs") == 2
    job.save(tmp_path / "here", 2)
    assert same(stored(tmp_path / "here"), before)


def save_while_training(rank, size, root):
    with (job := Job((2, 2), data=2, donate=True)).trainer:
        savings = []

        def begin():
            savings.append(
                pp.checkpoint.save_async(root, job.state, step=len(savings) + 1, names=job.name, keep=None)
            )

        job.run(0, 4, begin)
        assert [saving.result().name for saving in savings] == [f"step-{n}" for n in (1, 2, 3, 4)]
    job = Job((2, 2), data=2)
    for step in range(1, 5):
        job.run(step - 1, step)
        like = job.trainer.init({s: [initial(n) for n in job.partition.layers_of(s)] for s in job.held})
        loaded = pp.checkpoint.load(f"{root}/step-{step}", like=like, names=job.name)
        assert same_bits(loaded, job.state)


def test_asynchronous_saves_of_states_that_are_donated(four, tmp_path):
    four(save_while_training, str(tmp_path))


# -- ranks that do not fit together ----------------------------------------------------------------


def disagree(rank, size, root):
    one = torch.arange(4.0)
    mesh = init_device_mesh("cpu", (size,))
    for state, kind, match in [
        ({"step": rank}, ValueError, "rank 0 saves step 0, rank 1 saves step 1"),
        (
            {"step": 0, "a": one + rank},
            ValueError,
            "'a' has other values on rank 0 and on rank 1; parts of one tensor have to be DTensors",
        ),
        (
            {"step": 0, "a": one[: rank + 1]},
            ValueError,
            r"'a' is float32\[1\] on rank 0, and float32\[2\] on rank 1",
        ),
        ({"step": 0, "a": float(rank)}, ValueError, "'a' is 0.0 on rank 0, and 1.0 on rank 1"),
        ({"step": 0, "a": one if rank else 3}, ValueError, r"'a' is 3 on rank 0, and float32\[4\] on rank 1"),
        ({"step": 0, "a": object() if rank == 1 else one}, TypeError, "state\\['a'\\] is of type object"),
        (
            {
                "step": 0,
                "a": DTensor.from_local(one, mesh, [strided_shard(0, 2)], run_check=False),
            },
            ValueError,
            "are no boxes",
        ),
    ]:
        with pytest.raises(kind, match=match):
            pp.checkpoint.save(root, state)
        if rank == 0:
            assert os.listdir(root) == []
        dist.barrier()
    with pytest.raises(ValueError, match="run: rank 0 saves run 'r0', rank 1 saves run 'r1'"):
        pp.checkpoint.save(root, {"step": 0}, run=f"r{rank}")
    pp.checkpoint.save(root, {"step": 0, "own": {rank: one}})
    for one_rank in range(size):
        more = {"more": one} if rank == one_rank else {}
        with pytest.raises(ValueError, match=f"step-0 lacks 'more', which like has on rank {one_rank}; load"):
            pp.checkpoint.load(root, like={"step": 0, "own": {rank: one}, **more})
    with pytest.raises(ValueError, match="like lacks 'own.1', which step-0 has"):
        pp.checkpoint.load(root, like={"step": 0, "own": {0: one}})
    with pytest.warns(UserWarning, match="left out 'own.1'; as in like stays nothing"):
        part = pp.checkpoint.load(root, like={"step": 0, "own": {0: one}}, partial="own.1")
    assert torch.equal(part["own"][0], one)
    loaded = pp.checkpoint.load(root, like={"step": 0, "own": {1 - rank: one}})
    assert torch.equal(loaded["own"][1 - rank], one)
    with pytest.raises(ValueError, match=r"like: 'step' is a number or text, .* on rank 1, and .* on rank 0"):
        pp.checkpoint.load(root, like={"step": 0 if rank else 0.5, "own": {rank: one}})


def test_ranks_that_do_not_fit_together_are_told(two, tmp_path):
    two(disagree, str(tmp_path))


def share_no_folder(rank, size, root):
    state = {"step": 1, "own": {rank: torch.ones(50)}}
    with pytest.raises(
        pp.checkpoint.CheckpointError,
        match="step-1.writing-.* is not there; give a folder that all ranks share",
    ):
        pp.checkpoint.save(f"{root}/{rank}", state)
    assert not os.path.exists(f"{root}/{rank}") or os.listdir(f"{root}/{rank}") == []
    pp.checkpoint.save(f"{root}/both", state)
    is_dir, other = Path.is_dir, loading._open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: (rank == 0 or path.name != "step-1") and is_dir(path))
        with pytest.raises(
            pp.checkpoint.CheckpointError,
            match="'.*/both/step-1' is no folder on a disk that all ranks share",
        ):
            pp.checkpoint.load(f"{root}/both", like=state)
    with pytest.MonkeyPatch.context() as patch:  # a good checkpoint of the same step, of another run
        pp.checkpoint.save(f"{root}/other", {"step": 1, "own": {rank: torch.zeros(50)}})
        patch.setattr(
            loading, "_open", lambda path: other(Path(str(path).replace("both", "other")) if rank else path)
        )
        with pytest.raises(
            pp.checkpoint.CheckpointError,
            match="both/step-1 is another checkpoint on rank 1 than on rank 0; give a folder that all",
        ):
            pp.checkpoint.load(f"{root}/both", like=state)
    assert torch.equal(pp.checkpoint.load(f"{root}/both", like=state)["own"][rank], torch.ones(50))


def test_a_folder_that_ranks_do_not_share_is_told(two, tmp_path):
    two(share_no_folder, str(tmp_path))


def fail_on_one(rank, size, root, what):
    state = {"step": 1, "own": {rank: torch.ones(50)}}
    patch = pytest.MonkeyPatch()
    if rank == 1:
        patch.setattr(os, what, no_space)
    try:
        with pytest.raises(
            (OSError, pp.checkpoint.CheckpointError), match="No space left.*00002-of-00002.safetensors"
        ):
            pp.checkpoint.save(root, state)
    finally:
        patch.undo()
    saving = None
    if rank == 1:
        patch.setattr(os, what, no_space)
    try:
        saving = pp.checkpoint.save_async(root, state)
        with pytest.raises(
            (OSError, pp.checkpoint.CheckpointError), match="No space left.*00002-of-00002.safetensors"
        ):
            saving.result()
    finally:
        patch.undo()
    dist.barrier()
    assert os.listdir(root) == []
    dist.barrier()
    pp.checkpoint.save(root, state)
    assert pp.checkpoint.latest(root) is not None


def is_told_to_save(rank, size, root, told):
    """Signals whose handler saves reach ranks in a step, which each of them leaves in another place."""
    seen = []

    def save(*_):
        try:
            pp.checkpoint.save(root, {"step": 1, "own": {rank: torch.ones(50)}})
        except RuntimeError as error:
            seen.append(str(error))

    def stage(w, x):
        if rank in told and not seen:
            os.kill(os.getpid(), signal.SIGUSR1)
        return x * w

    signal.signal(signal.SIGUSR1, save)
    with pp.P2P(timeout=20) as transport:
        engine = pp.engines.functional
        step = pp.value_and_grad([stage] * size, squared, pp.gpipe(size, 2), transport, engine=engine)
        loss, _ = step({rank: torch.ones(())}, torch.ones(2), torch.zeros(2))
    assert loss == 1 and len(seen) == (rank in told), seen
    assert all("within a step, which other ranks may have ended; let the handler" in text for text in seen)
    save()


@pytest.mark.parametrize("told", [[0], [0, 1]], ids=str)
def test_a_handler_that_saves_within_a_step_is_refused(two, tmp_path, told):
    """A rank waited in it for one that had voted, and so could run no handler, until the limit of both."""
    two(is_told_to_save, str(tmp_path), told)
    assert pp.checkpoint.latest(tmp_path).name == "step-1"


def one_is_slow(rank, size, root):
    patch, fsync, seconds = pytest.MonkeyPatch(), os.fsync, iter([2.5])
    if rank:
        patch.setattr(os, "fsync", lambda file: (time.sleep(next(seconds, 0)), fsync(file)))
    try:
        pp.checkpoint.save(root, {"step": 1, "own": {rank: torch.ones(50)}})
    finally:
        patch.undo()


def test_a_slow_disk_is_waited_for(two, tmp_path):
    two(one_is_slow, str(tmp_path))
    assert pp.checkpoint.latest(tmp_path) is not None


def no_space(*args):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["pwrite", "fsync"])
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(two, tmp_path, what):
    two(fail_on_one, str(tmp_path), what)


def damaged_for_one(rank, size, root):
    for step in (1, 2):
        pp.checkpoint.save(root, {"step": step, "own": {rank: torch.full((50,), float(step))}})
    if rank == 0:
        with open(f"{root}/step-2/00002-of-00002.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
    dist.barrier()
    like = {"step": 0, "own": {rank: torch.zeros(50)}}
    with pytest.raises(
        pp.checkpoint.CheckpointError,
        match=r"tensor 'own.1' in 'step-2/00002-of-00002.safetensors' has other bytes",
    ):
        pp.checkpoint.load(f"{root}/step-2", like=like)
    with pytest.warns(UserWarning, match="step-1 is the latest good checkpoint; refused: .*own.1"):
        assert pp.checkpoint.load(root, like=like)["step"] == 1
    pp.checkpoint.save(root, {"step": 2, "own": {rank: torch.zeros(50)}})
    assert pp.checkpoint.load(root, like=like)["step"] == 2


def test_damage_that_one_rank_finds_is_refused_by_all(two, tmp_path):
    two(damaged_for_one, str(tmp_path))


def unreadable_for_one(rank, size, root):
    for step in (1, 2):
        pp.checkpoint.save(root, {"step": step, "own": {rank: torch.full((50,), float(step))}})
    like, patch, preadv = {"step": 0, "own": {rank: torch.zeros(50)}}, pytest.MonkeyPatch(), os.preadv

    def fails(file, *args):
        if rank == who and re.search("step-2/.*safetensors", os.readlink(f"/proc/self/fd/{file}")):
            raise error
        return preadv(file, *args)

    patch.setattr(os, "preadv", fails)
    try:
        who, error = 1, OSError(5, "Input/output error")
        with pytest.warns(
            UserWarning, match="step-1 is the latest good checkpoint; refused: .*Input/output error"
        ):
            assert pp.checkpoint.load(root, like=like)["step"] == 1
        error = MemoryError("no memory")
        dist.barrier()
        if rank == 0:
            os.truncate(f"{root}/step-2/00001-of-00002.safetensors", 10)
        dist.barrier()
        if rank:  # this rank finds damage, the other one runs out of memory: none falls back
            patch.setattr(loading, "_open", lambda path: (_ for _ in ()).throw(error))
        with pytest.raises(MemoryError if rank else pp.checkpoint.CheckpointError, match="no memory"):
            pp.checkpoint.load(root, like=like)
    finally:
        patch.undo()
    dist.barrier()


def test_what_one_rank_cannot_read_is_refused_by_all(two, tmp_path):
    two(unreadable_for_one, str(tmp_path))


def export_empty(rank, size, root):
    pp.checkpoint.export(root, {rank: {"w": torch.ones(2), **({"none": torch.zeros(0, 3)} if rank else {})}})
    dist.barrier()
    assert pp.checkpoint.load(
        root, like={1: {"none": torch.zeros(0, 3), "w": torch.zeros(2)}, 0: {"w": torch.zeros(2)}}
    )[1]["none"].shape == (0, 3)


def test_an_empty_tensor_of_a_later_rank_is_exported(two, tmp_path):
    two(export_empty, str(tmp_path))


def many_saves(rank, size, root):
    def used():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    state = {"own": {rank: torch.ones(5)}}

    def saved(first, last):  # in both ways, each of which has threads of its own
        for step in range(first, last):
            (pp.checkpoint.save if step % 2 else pp.checkpoint.save_async)(root, state, step=step)
        pp.checkpoint.save(root, state, step=last)

    saved(0, 5)
    before = used()
    saved(6, 40)
    # Of 35 saves: were one left by every second of them, 17. Pools of threads may start meanwhile, and a
    # thread that has done its work may take a moment to end.
    limit = time.monotonic() + 10
    while max(map(sub, after := used(), before)) > 8 and time.monotonic() < limit:
        time.sleep(0.05)
    assert max(map(sub, after, before)) <= 8, (before, after)


def test_nothing_piles_up(two, tmp_path):
    two(many_saves, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-38", "step-39", "step-40"]


# -- under a model's own names ---------------------------------------------------------------------


def export_parts(rank, size, root):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "tp"))
    stage = mesh.get_local_rank("pp")
    names = {s: {"w": f"layers.{s}.weight", "b": f"layers.{s}.bias"} for s in (0, 1)}
    rule = {"w": Shard(1), "b": Replicate()}
    params = pp.stage.shard(
        {stage: dict(initial(stage))}, mesh["tp"], lambda name, leaf: rule[name.split(".")[1]]
    )
    folder = pp.checkpoint.export(root, params, names)
    loaded = pp.checkpoint.load(folder, like=tree_map(torch.zeros_like, params), names=names)
    assert all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(tree_leaves(loaded), tree_leaves(params), strict=True)
    )


def test_an_export_of_many_ranks_has_whole_tensors(four, tmp_path):
    four(export_parts, str(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    loaded = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    expected = {
        f"layers.{s}.{long}": initial(s)[short]
        for s in (0, 1)
        for short, long in (("w", "weight"), ("b", "bias"))
    }
    assert same(loaded, expected) and sorted(os.listdir(tmp_path))[-1] == "model.safetensors.index.json"
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())


def matrices(p, x):
    return torch.einsum("bi,eij->bj", torch.tanh(x @ p["w"]), p["stack"])


def going_on(rank, size, folder, shard, first):
    """Go on from the last checkpoint for two steps, and save; the parameters, whole."""
    mesh = None if size == 1 else init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    options = {} if mesh is None else {"axes": pp.Axes("pp", "dp"), "shard": shard}
    params = {0: {"w": normal(6, 4), "stack": normal(3, 4, 6, seed=1)}}
    with new_trainer([matrices], squared, pp.gpipe(1, 2), pp.optim.muon(0.1), mesh, **options) as trainer:
        state = trainer.init(params)
        state = pp.checkpoint.load(folder, like=state) if first else state
        for n in range(first, first + 2):
            x, y = (normal(8, 6, seed=10 * n + k)[rank * 8 // size : (rank + 1) * 8 // size] for k in (1, 2))
            state, _ = trainer.step(state, x, y)
        pp.checkpoint.save(folder, state, step=first + 2)
    return full(state.params[0])


def test_muon_goes_on_in_another_grid(two, tmp_path):
    expected = [going_on(0, 1, tmp_path / "alone", None, first) for first in (0, 2, 4)][-1]
    two(going_on, tmp_path / "cut", "params", 0)
    going_on(0, 1, tmp_path / "cut", None, 2)
    for got in two(going_on, tmp_path / "cut", "optimizer", 4):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)

"""Folders of ``torch.distributed.checkpoint``: read without running their pickles, and written for torch."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ppfunc as pp
from ppfunc.stage.tree import tree_map

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAN = torch.nan
TITAN = lambda stage, leaf: f"model.{leaf}"  # noqa: E731


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5), nn.LayerNorm(5, dtype=torch.float64))


def stages_of(model: nn.Module) -> dict[int, dict[str, Tensor]]:
    """Two stages of parameters, by the names of the model."""
    stages: dict[int, dict[str, Tensor]] = {0: {}, 1: {}}
    for name, value in model.named_parameters():
        stages[int(int(name.split(".")[0]) > 0)][name] = value.detach()
    return stages


def plain(stage: int, leaf: str) -> str:
    return leaf


def unset(tree: Any) -> Any:
    return tree_map(lambda t: torch.full_like(t, NAN), tree)


def require_values(got: Any, expected: dict[str, Tensor]) -> None:
    for stage in got.values():
        for name, value in stage.items():
            assert type(value) is Tensor and torch.equal(value, expected[name]), name


def test_parameters_and_moments_of_torch_are_read(tmp_path):
    """In the layout of names that torchtitan has."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() ** 2 for p in model.parameters()).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    state = {"model": model.state_dict(), "optimizer": moments, "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "titan")
    like = unset(stages_of(model))
    with pytest.warns(
        UserWarning, match=r"left out 'optimizer.*'train_state.step'|left out 'optimizer.*more"
    ):
        got = pp.checkpoint.from_dcp(
            tmp_path / "titan", like, names=TITAN, partial="optimizer.*|train_state.*"
        )
    require_values(got, model.state_dict())
    assert all(value.isnan().all() for stage in like.values() for value in stage.values())
    for moment in "exp_avg", "exp_avg_sq":
        with pytest.warns(UserWarning, match="loaded in part"):
            got = pp.checkpoint.from_dcp(
                tmp_path / "titan",
                like,
                names=lambda stage, leaf, moment=moment: f"optimizer.state.{leaf}.{moment}",
                partial="model.*|optimizer.*|train_state.*",
            )
        require_values(got, {name: optimizer.state[p][moment] for name, p in model.named_parameters()})


def test_torch_reads_what_is_written(tmp_path):
    model = new_model()
    path = pp.checkpoint.to_dcp(tmp_path / "new", stages_of(model), plain)
    other = new_model()
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(NAN)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    titan = {"model": unset(model.state_dict())}
    dcp.load(titan, checkpoint_id=pp.checkpoint.to_dcp(tmp_path / "titan", stages_of(model), TITAN))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in titan["model"].items())
    assert sorted(os.listdir(tmp_path)) == ["new", "titan"]
    with pytest.raises(FileExistsError, match="new is there"):
        pp.checkpoint.to_dcp(path, stages_of(model), plain)
    with pytest.raises(TypeError, match="'step' is no tensor"):
        pp.checkpoint.to_dcp(tmp_path / "number", {"step": 3})


def test_every_shape_and_dtype_comes_back(tmp_path):
    tree = {
        f"{dtype}{n}": torch.arange(24).reshape(2, 3, 4)[index].to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
        for n, index in enumerate(
            [..., (0, 1, 2), slice(2, 2), (slice(None), 1), (..., slice(None, None, 2))]
        )
    }
    path = pp.checkpoint.to_dcp(tmp_path / "new", tree)
    got = pp.checkpoint.from_dcp(path, tree_map(torch.zeros_like, tree))
    assert all(
        torch.equal(got[name], value) and got[name].dtype == value.dtype for name, value in tree.items()
    )
    # A view is saved without the memory around it.
    big = {"row": torch.zeros(1000, 1000)[0]}
    path = pp.checkpoint.to_dcp(tmp_path / "view", big)
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000


def fsdp_to_pipeline(rank, size, root):
    mesh = init_device_mesh("cpu", (size,))
    model = new_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcp.save(model.state_dict(), checkpoint_id=f"{root}/fsdp")
    mine = {rank: stages_of(new_model())[rank]}
    got = pp.checkpoint.from_dcp(f"{root}/fsdp", unset(mine), names=plain)
    assert {*got} == {rank} and {*got[rank]} == {*mine[rank]}
    require_values(got, expected)
    # Over a mesh, along another dimension: each rank reads its columns.
    like = {"0.weight": distribute_tensor(torch.full((3, 5), NAN), mesh, [Shard(1)])}
    with pytest.warns(UserWarning, match="loaded in part"):
        got = pp.checkpoint.from_dcp(f"{root}/fsdp", like, partial="*")
    assert got["0.weight"].placements == (Shard(1),)
    assert torch.equal(got["0.weight"].to_local(), expected["0.weight"].chunk(size, 1)[rank])
    return True


def pipeline_to_fsdp(rank, size, root):
    mesh = init_device_mesh("cpu", (size,))
    model = new_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    path = pp.checkpoint.to_dcp(f"{root}/pipeline", {rank: stages_of(model)[rank]}, plain)
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(NAN)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), expected[name]), name
    # Shards are written as they lie, and read by another number of processes.
    pp.checkpoint.to_dcp(f"{root}/shards", dict(model.state_dict()))
    return True


def fail_on_one(rank, size, root):
    errors = []
    try:
        pp.checkpoint.to_dcp(f"{root}/copies", {"w": torch.full((2,), float(rank))})
    except ValueError as error:
        errors.append(str(error))
    path = pp.checkpoint.to_dcp(f"{root}/cut", {f"w{rank}": torch.zeros(2)})
    if rank == 0:
        (path / "__0_0.distcp").write_bytes(b"")
    dist.barrier()
    try:
        pp.checkpoint.from_dcp(path, {f"w{rank}": torch.zeros(2)})
    except pp.checkpoint.CheckpointError as error:
        errors.append(str(error))
    return errors, sorted(os.listdir(root))


def test_shards_of_fsdp_are_read_by_two_stages(two, tmp_path):
    assert two(fsdp_to_pipeline, str(tmp_path)) == [True, True]


def test_two_stages_are_read_by_fsdp(two, tmp_path):
    assert two(pipeline_to_fsdp, str(tmp_path)) == [True, True]
    model = new_model()
    got = pp.checkpoint.from_dcp(tmp_path / "shards", unset(stages_of(model)), names=plain)
    require_values(got, model.state_dict())


def test_what_fails_on_one_rank_raises_on_all(two, tmp_path):
    for (differ, cut), folders in two(fail_on_one, str(tmp_path)):
        assert "'w' has other values on rank 0 and on rank 1" in differ
        assert "'cut/__0_0.distcp' is cut: it has 0 bytes" in cut
        assert folders == ["cut"]


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def folder(tmp_path) -> Path:
    return pp.checkpoint.to_dcp(tmp_path / "new", {"w": torch.ones(2, 3), "b": torch.ones(3)})


LIKE = {"w": torch.full((2, 3), NAN), "b": torch.full((3,), NAN)}


def refused(
    folder: Path, *words: str, like: Any = LIKE, kind: type = pp.checkpoint.CheckpointError, **more: Any
):
    with pytest.raises(kind) as caught:
        pp.checkpoint.from_dcp(folder, like, **more)
    assert all(word in str(caught.value) for word in words), caught.value


def change(folder: Path, how: Any) -> None:
    """Write ``.metadata`` anew."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_code_in_the_metadata_is_refused_by_name_and_does_not_run(folder):
    witness = folder / "ran"
    change(folder, lambda metadata: setattr(metadata, "planner_data", Hostile(witness)))
    refused(folder, ".metadata", "names 'posix.system'")
    assert not witness.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert witness.exists()  # with torch's own reader it runs


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("torch", "load"), ("torch", "serialization.os.system"), ("torch.hub", "load"),
     ("torch.distributed.checkpoint.metadata", "os.system"), ("pathlib", "Path"), ("torch", "Tensor")],
)  # fmt: skip
def test_no_other_name_is_admitted(folder, module, name):
    text = (
        pickle.PROTO
        + b"\x04"
        + b"".join(pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode() for part in (module, name))
    )
    (folder / ".metadata").write_bytes(text + pickle.STACK_GLOBAL + pickle.STOP)
    refused(folder, f"names '{module}.{name}'")


def test_a_pickle_changes_no_class(folder):
    """By setting attributes of a class that it may name."""
    text = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vversion\nVfoul\nstb."
    (folder / ".metadata").write_bytes(text)
    refused(folder, "damaged or foreign")
    assert Metadata.version is None
    assert pp.checkpoint.from_dcp is not None


def test_an_object_is_never_read(tmp_path):
    witness = tmp_path / "ran"
    path = tmp_path / "new"
    dcp.save({"w": torch.ones(2), "train_state": Hostile(witness)}, checkpoint_id=path)
    like = {"w": torch.full((2,), NAN)}
    refused(path, "like lacks 'train_state'", like=like, kind=ValueError)
    refused(path, "'train_state' is a pickled object, which is never read", like={**like, "train_state": 1},
            kind=ValueError)  # fmt: skip
    with pytest.warns(UserWarning, match="left out 'train_state'"):
        assert torch.equal(pp.checkpoint.from_dcp(path, like, partial="train_state")["w"], torch.ones(2))
    assert not witness.exists()


def test_code_in_the_item_of_a_tensor_does_not_run(tmp_path, folder):
    witness = tmp_path / "ran"
    torch.save(Hostile(witness), folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size

    def point(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, size

    change(folder, point)
    refused(folder, "__0_0.distcp", "no tensor that can be read")
    assert not witness.exists()


def test_names_shapes_and_dtypes_are_those_of_the_folder(folder):
    refused(folder, "lacks 'other'", like={**LIKE, "other": torch.zeros(1)}, kind=ValueError)
    refused(folder, "like lacks 'b'", like={"w": LIKE["w"]}, kind=ValueError)
    refused(
        folder, "'b' is float32[3], like has float32[4]", like={**LIKE, "b": torch.zeros(4)}, kind=ValueError
    )
    refused(folder, "'b' is float32[3], like has float64[3]", like={**LIKE, "b": torch.zeros(3).double()},
            kind=ValueError)  # fmt: skip
    with pytest.warns(UserWarning, match="left out 'b'; as in like stays 'c'"):
        got = pp.checkpoint.from_dcp(folder, {"w": LIKE["w"], "c": torch.tensor(7)}, partial="b|c")
    assert torch.equal(got["w"], torch.ones(2, 3)) and got["c"] == 7


def item_of(metadata: Metadata, name: str, rank: int) -> Any:
    return metadata.storage_data[MetadataIndex(name, [0] * rank)]


def test_an_item_of_another_shape_or_dtype_is_refused(folder):
    """``.metadata`` promises what is not in the file."""

    def exchange(metadata: Metadata) -> None:
        w, b = MetadataIndex("w", [0, 0]), MetadataIndex("b", [0])
        places = metadata.storage_data
        places[w], places[b] = places[b], places[w]

    change(folder, exchange)
    refused(
        folder, "has float32[3] as tensor 'w', expected float32[2, 3]", like={"w": LIKE["w"]}, partial="b"
    )
    change(folder, exchange)
    change(folder, lambda m: setattr(m.state_dict_metadata["b"].properties, "dtype", torch.int32))
    refused(
        folder, "has float32[3] as tensor 'b', expected int32[3]", like={**LIKE, "b": torch.zeros(3).int()}
    )


ONCE = "expected parts that hold each element once"


def test_a_gap_an_overlap_and_a_place_outside_are_refused(folder):
    whole = (folder / ".metadata").read_bytes()
    for how, words in (
        (lambda m: m.state_dict_metadata["w"].chunks.clear(), ONCE),
        (lambda m: m.state_dict_metadata["w"].chunks.append(m.state_dict_metadata["w"].chunks[0]), ONCE),
        (lambda m: setattr(item_of(m, "w", 2), "relative_path", "../new/__0_0.distcp"), "in no file of the"),
        (lambda m: setattr(item_of(m, "w", 2), "offset", -1), "are no whole numbers"),
        (lambda m: m.storage_data.clear(), "KeyError"),
        (lambda m: setattr(m, "state_dict_metadata", None), "damaged or foreign"),
    ):
        (folder / ".metadata").write_bytes(whole)
        change(folder, how)
        refused(folder, ".metadata", words)


def nested(depth: int) -> Any:
    """A list that holds the list of the depth before twice: few bytes of a pickle, and a text without end."""
    value: Any = ["the innermost"]
    for _ in range(depth):
        value = [value, value]
    return value


class Index:
    """A key of an item that any value names, or places: it is pickled as an index of torch's."""

    def __init__(self, name: Any, offset: Any = None) -> None:
        self.state = {"fqn": name, "offset": offset}

    def __reduce__(self) -> Any:
        return MetadataIndex, ("", None), self.state


NESTED = {
    "a size": lambda m: setattr(m.state_dict_metadata["w"], "size", nested(40)),
    "a dtype": lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", nested(40)),
    "a place": lambda m: setattr(item_of(m, "w", 2), "offset", nested(40)),
    "a file": lambda m: setattr(item_of(m, "w", 2), "relative_path", nested(40)),
    "an offset": lambda m: m.storage_data.update({Index("w", nested(40)): item_of(m, "w", 2)}),
    "a name": lambda m: m.storage_data.update({Index(nested(40)): item_of(m, "w", 2)}),
}


@pytest.mark.parametrize("case", NESTED)
def test_values_without_end_are_refused_at_once(folder, case):
    change(folder, NESTED[case])
    refused(folder, ".metadata", "damaged or foreign")


# A tuple of tuples, forty deep, each twice: few bytes, and a hash without end.
ENDLESS = pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 40
HASHED = {
    "a key": pickle.EMPTY_DICT + ENDLESS + pickle.NONE + pickle.SETITEM,
    "keys": pickle.EMPTY_DICT + pickle.MARK + ENDLESS + pickle.NONE + pickle.SETITEMS,
    "a dictionary": pickle.MARK + ENDLESS + pickle.NONE + pickle.DICT,
    "a set": pickle.EMPTY_SET + pickle.MARK + ENDLESS + pickle.ADDITEMS,
    "a frozen set": pickle.MARK + ENDLESS + pickle.FROZENSET,
}


@pytest.mark.parametrize("case", HASHED)
def test_what_takes_for_ever_to_hash_is_refused_at_once(folder, case):
    (folder / ".metadata").write_bytes(pickle.PROTO + b"\x04" + HASHED[case] + pickle.STOP)
    refused(folder, ".metadata", "damaged or foreign")


@pytest.mark.parametrize("where", ["state_dict_metadata", "storage_data", "planner_data"])
def test_a_key_that_is_no_name_is_refused(folder, where):
    change(folder, lambda m: getattr(m, where).update({("w", 0): next(iter(m.storage_data.values()))}))
    refused(folder, ".metadata", "it has a key of type tuple, which DCP does not write there")


def test_a_pipe_is_not_waited_for(folder):
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(folder, name, "is no regular file")


def test_cut_and_damaged_files_are_refused(folder):
    """Or, where a byte of the container is not part of a value, read as they were."""
    file, metadata = folder / "__0_0.distcp", folder / ".metadata"
    text, described = file.read_bytes(), metadata.read_bytes()
    for end in (0, 1, len(text) // 2, len(text) - 1):
        file.write_bytes(text[:end])
        refused(folder, "__0_0.distcp", "is cut")
    file.unlink()
    refused(folder, "__0_0.distcp", "cannot be read")
    file.write_bytes(text)
    change(folder, lambda m: setattr(item_of(m, "w", 2), "length", 2**60))
    refused(folder, "__0_0.distcp", "is cut")  # before there is memory for it
    for end in range(0, len(described), 7):
        metadata.write_bytes(described[:end])
        refused(folder, ".metadata", "damaged or foreign")
    metadata.unlink()
    refused(folder, ".metadata", "cannot be read")
    metadata.write_bytes(described)
    assert torch.equal(pp.checkpoint.from_dcp(folder, LIKE)["w"], torch.ones(2, 3))

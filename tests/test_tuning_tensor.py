"""Configurations with tensor ranks: laid out by a function, ranked, and trained as the whole model."""

from __future__ import annotations

import json
import math
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppfunc as pp
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves
from ppfunc.tuning.tune import Pieces, times_of
from tests.models import squared
from tests.storages import LiveStorages

WIDTH, ROWS, RATE = 16, 16, 1e-2
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
SPEEDS = (1e9, 1e9)
GRIDS = [(2, 1, 2), (1, 2, 2)]
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2))).double()


def batch_of():
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def optimizer():
    return pp.optim.chain(pp.optim.clip_by_global_norm(0.05), pp.optim.adamw(RATE))


def laid(mesh, plan=PLAN):
    return parallelize_module(model_of(), mesh, plan)


def arguments(**options):
    """Of a small search that counts, in which nothing is planned."""
    x = batch_of()
    given = {
        "model": model_of(),
        "args": x,
        "loss_fn": squared,
        "targets": x.tanh(),
        "optimizer": optimizer(),
    }
    some = {"ranks": 4, "schedules": ["1f1b"], "remat": ["none"], "microbatch": [4], "effort": 0}
    speed = {"speeds": SPEEDS, "latency": 1e-6, "bandwidth": 1e9}
    return given | some | speed | {"tensor": laid, "grids": GRIDS, "top": 1000} | options


def alone(steps):
    """Losses of steps of torch alone, and its parameters after them."""
    model, x, losses = model_of(), batch_of(), []
    adam = torch.optim.AdamW(model.parameters(), RATE)
    for _ in range(steps):
        loss = squared(model(x), x.tanh())
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        adam.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(rank, size, port):
    """Tune, then train with each row: losses, whole parameters, and predicted and measured peaks."""
    dist.destroy_process_group()  # that of the tests: a search has one of its own
    rows = pp.tune(**arguments(shard=["none", "params"])).rows
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = []
    for row in rows:
        mesh = init_device_mesh("cpu", row.choice[:3], mesh_dim_names=("pp", "dp", "tp"))
        axes, shard = pp.Axes("pp", data="dp", model="tp"), row.choice.shard
        transport = pp.P2P(mesh=mesh, axes=axes, shard=shard)
        mine = row.schedule.model_stages_of(mesh.get_local_rank("pp"))
        parts = pp.split(laid(mesh["tp"]), batch_of(), at=row.at)
        x = batch_of().chunk(row.choice.data)[mesh.get_local_rank("dp")].clone()
        x, y = x if 0 in mine else None, x.tanh() if len(parts.stages) - 1 in mine else None
        losses, measured = [], []
        with row.make(transport) as trainer:
            state = trainer.init({s: parts.params[s] for s in mine})
            for _ in range(STEPS):
                trainer._idle.clear()  # whose memory would not be made within
                held = [local(t) for t in tree_leaves((state, x, y)) if t is not None]
                with LiveStorages(held) as counted:
                    state, metrics = trainer.step(state, x, y)
                losses.append(metrics.loss.item())
                storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
                measured.append(sum(storages.values()) + counted.peak)
                assert any(isinstance(leaf, DTensor) for leaf in tree_leaves(state.params))
            whole = {
                name: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
                for tree in state.params.values()
                for name, leaf in tree.items()
            }
        # A thread of gloo may hold what it has sent or summed for longer than the step waits.
        found.append((str(row), losses, whole, row.peaks[mesh.get_local_rank("pp")], min(measured[1:])))
    return found


@pytest.mark.slow
def test_rows_train_as_the_whole_model_and_within_their_bytes(fresh, store_port):
    """Every grid, schedule and shard, in four processes, which tune before they have a group."""
    losses, params = alone(STEPS)
    ranks = fresh(4)(trained, store_port, timeout=200)
    assert len({row for row, *_ in ranks[0]}) == len(ranks[0]) >= 3
    for rows in zip(*ranks, strict=True):
        places = set()
        for name, of_rank, whole, predicted, measured in rows:
            torch.testing.assert_close(of_rank, losses, rtol=1e-10, atol=0, msg=name)
            for place, leaf in whole.items():
                torch.testing.assert_close(leaf, params[place], rtol=1e-9, atol=1e-12)
            places |= set(whole)
            assert measured <= predicted * 1.001, name
            assert predicted <= measured * 1.03, name
        assert places == set(params)


def test_a_rank_computes_its_part_and_collectives_take_time():
    """Of stages whose parameters are mostly cut: half of the seconds, and those of the sums beside them.

    F sums the activation of its block once, I its gradient once, each in two rounds of a ring of two.
    """
    rows, engine = batch_of()[:6], pp.engines.graph(remat="none")
    make = lambda pieces, schedule: pp.Trainer(  # noqa: E731
        pieces.split, squared, schedule, optimizer(), engine=engine
    )
    timed = lambda parts, speeds, *ring: times_of(make, Pieces(parts), (rows, rows), speeds, (2, *ring))  # noqa: E731
    whole = timed(pp.split(model_of(), rows, at=["1"]), SPEEDS, 0, 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        cut = pp.split(laid(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), rows, at=["1"])
        free, dear, here = timed(cut, SPEEDS, 0, 1e30), timed(cut, SPEEDS, 1, 1e3), timed(cut, None, 1, 1e3)
    finally:
        dist.destroy_process_group()
    assert 0.5 <= free.forward[1] / whole.forward[1] < 0.6 and 0.5 <= free.step[1] / whole.step[1] < 0.6
    sums = 2 * (1 + 2 * WIDTH * 8 / 2 / 1e3)
    for kind in ("forward", "backward", "backward_input"):
        assert vars(dear)[kind][1] - vars(free)[kind][1] == pytest.approx(sums), kind
        assert sums < vars(here)[kind][1] < sums + 1, kind
    assert dear.backward_weight[1] == free.backward_weight[1] and here.backward_weight[1] < 1


def test_ranks_are_searched_along_three_axes_and_named():
    found = pp.tune(**arguments(grids="any", shard=["none"]))
    read = json.loads(found.to_json())["rows"]
    assert [row["tensor"] for row in read] == [row.choice.tensor for row in found.rows]
    by_grid = {row.choice.grid: row for row in found.rows}
    assert set(by_grid) == {"4", "2 x 2", "1 x 4", "2 x 1 x 2", "1 x 2 x 2", "1 x 1 x 4"}
    row = by_grid["2 x 1 x 2"]
    assert max(row.peaks) < 0.7 * max(by_grid["2 x 2"].peaks)
    with pytest.raises(ValueError, match=r"data='dp', model='tp'\), shard='none'\) of a mesh of 2 x 1 x 2"):
        row.make()
    for sizes in ((1, 2, 2), (1, 1, 2)):
        mesh = fake_mesh(sizes)
        with pytest.raises(ValueError, match="expected P2P.* of a mesh of 2 x 1 x 2 ranks"):
            row.make(pp.OnPaper(mesh=mesh, axes=pp.Axes("pp", data="dp", model="tp")))
        dist.destroy_process_group()


def fake_mesh(sizes):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))


class Falsy:
    """Lays a model over ranks, and is false."""

    def __bool__(self):
        return False

    def __call__(self, mesh):
        return laid(mesh)


def test_a_function_that_is_false_is_called():
    found = pp.tune(**arguments(tensor=Falsy(), ranks=2, grids="any", shard=["none"]))
    assert {row.choice.tensor for row in found.rows} == {1, 2}


ENDS = {
    "head": ColwiseParallel(output_layouts=Replicate()),
    "out": ColwiseParallel(output_layouts=Replicate()),
}


HEADS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.head.weight
        self.double()

    def forward(self, x):
        return self.out(torch.tanh(self.head(x)))


def taken_back(mesh):
    return model_of()


def of_four(mesh):
    if mesh.size() > 2:
        raise ValueError("two heads over more ranks")
    return laid(mesh)


class Heads(nn.Module):
    """Three heads, which two ranks cannot share."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.double()

    def forward(self, x):
        return self.down(self.up(x).view(len(x), 3, 4).flatten(1))


def test_ranks_that_do_not_divide_the_heads_are_refused_with_what_to_do():
    """By a search, which splits, and by a step."""
    options = {"ranks": 2, "grids": [(1, 1, 2)], "microbatch": [4]}
    advice = "take a number of ranks that divides what this line reshapes, such as heads"
    with pytest.raises(pp.StageError, match=advice) as refused:
        pp.tune(
            **arguments(
                model=Heads(), tensor=lambda mesh: parallelize_module(Heads(), mesh, HEADS), **options
            )
        )
    assert "call the model itself" not in str(refused.value)
    mesh = fake_mesh((1, 1, 2))
    part = pp.parallelize(Heads(), mesh["tp"], HEADS)
    paper = pp.OnPaper(mesh=mesh, axes=pp.Axes("pp", data="dp", model="tp"))
    step = pp.value_and_grad([part.fn], squared, pp.gpipe(1, 4), paper)
    with pytest.raises(pp.StageError, match=f"test_tuning_tensor.py:.*Instead: .*{advice}"):
        step.lower({0: part.params}, batch_of(), batch_of())
    dist.destroy_process_group()


def test_what_the_user_lays_out_is_checked():
    """Sizes that cannot be are left out with their reason; a function that lays nothing out is refused."""
    found = pp.tune(**arguments(tensor=of_four, grids=[(1, 1, 4), (1, 2, 2)], shard=["none"]))
    assert found.refused == {"4 tensor ranks": "two heads over more ranks"}
    assert [row.choice[:3] for row in found.rows] == [(1, 2, 2)] and "1 refused" in str(found)
    model = model_of()
    with pytest.raises(TypeError, match="tensor: returned Sequential.*expected a copy of the model"):
        pp.tune(**arguments(tensor=taken_back))
    with pytest.raises(TypeError, match="tensor: returned Sequential.*expected a copy of the model"):
        pp.tune(**arguments(model=model, tensor=lambda mesh: parallelize_module(model, mesh, PLAN)))
    with pytest.raises(ValueError, match=r"grids: got .* and tensor=None; expected tensor ranks"):
        pp.tune(**arguments(tensor=None, grids=[(2, 1, 2)]))
    with pytest.raises(ValueError, match=r"grids: got \[\(2, 2\)\], and tensor=<function laid"):
        pp.tune(**arguments(grids=[(2, 2)]))
    with pytest.raises(TypeError, match="tensor: got .* expected a function of a mesh"):
        pp.tune(**arguments(tensor=PLAN))
    tied = Tied()
    with pytest.raises(TypeError, match="in which head.weight and out.weight are parameters of their own"):
        pp.tune(**arguments(model=tied, tensor=lambda mesh: parallelize_module(deepcopy(tied), mesh, ENDS)))
    assert not dist.is_initialized()

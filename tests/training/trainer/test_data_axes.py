"""Of several data axes, parameters are cut over the last, and kept alike along the others."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ppfunc as pp
from ppfunc.runtime.ports.protocols import Collective
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves
from tests.models import new_trainer, normal, squared
from tests.sharded_models import full

WIDTH = 8
TWO = pp.Axes("pp", ("out", "in"))


def stage(p, x):
    return torch.tanh(x @ p["w"]) + p["odd"].sum()


def params():
    return {"w": normal(WIDTH, WIDTH), "odd": normal(3)}


def trainer_over(sizes, names, axes, shard):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return new_trainer(
        [stage], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1), mesh, axes=axes, shard=shard, clip=1.0
    )


def stepped(trainer, state, n, rank):
    return trainer.step(state, normal(2, WIDTH, seed=10 * n + rank), normal(2, WIDTH, seed=9))


def kept_and_sent(rank, size, shard, folder):
    """Train over 1 x 2 x 2, save, and go on over 1 x 4; what is kept, sent, and the parameters."""
    sent = []

    def counted(name):
        method = getattr(Collective, name)

        def call(self, tensor, *args):
            sent.append((name, self.size, tensor.numel()))
            return method(self, tensor, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            patch.setattr(Collective, name, counted(name))
        with trainer_over((1, 2, 2), ("pp", "out", "in"), TWO, shard) as trainer:
            state, _ = stepped(trainer, trainer.init({0: params()}), 0, rank)
            sent.clear()
            state, metrics = stepped(trainer, state, 1, rank)
            messages, kept = (
                sorted(sent),
                sum(local(t).numel() for t in tree_leaves(state.optimizer[0]["mean"])),
            )
    path = pp.checkpoint.save(folder, state, step=1)
    after = {}
    for name, sizes, names, axes in (
        ("hybrid", (1, 2, 2), ("pp", "out", "in"), TWO),
        ("flat", (1, 4), ("pp", "dp"), pp.Axes("pp", "dp")),
    ):
        with trainer_over(sizes, names, axes, shard) as trainer:
            loaded = pp.checkpoint.load(path, like=trainer.init({0: params()}))
            torch.testing.assert_close(full(loaded.params[0]), full(state.params[0]), rtol=0, atol=0)
            after[name] = full(stepped(trainer, loaded, 2, rank)[0].params[0])
    torch.testing.assert_close(after["hybrid"], after["flat"], rtol=1e-12, atol=1e-14)
    return messages, kept, full(state.params[0]), metrics.grad_norm.item()


def test_parts_lie_over_the_last_axis_alone(four, tmp_path):
    size, common, padded = WIDTH * WIDTH, 2, 8  # buckets are whole lines of memory
    whole = [("all_reduce", 4, common), ("all_reduce", 4, size + padded)]
    cut = [("all_reduce", 4, common), ("all_reduce", 4, padded)]  # loss, norm; the leaf that no axis cuts
    cut += [("all_reduce", 2, size // 2), ("reduce_scatter", 2, size), ("all_gather", 2, size // 2)]
    expected = None
    for shard, sums in (("none", whole), ("optimizer", cut), ("params", cut)):
        found = four(kept_and_sent, shard, str(tmp_path / shard))
        expected = expected or found
        for (messages, kept, leaves, norm), (_, _, wanted, wanted_norm) in zip(found, expected, strict=True):
            assert messages == sorted(sums)
            assert kept == (size if shard == "none" else size // 2) + 3
            torch.testing.assert_close(leaves, wanted, rtol=1e-12, atol=1e-14)
            assert norm == pytest.approx(wanted_norm, rel=1e-12)


def odd(rank, size):
    """Axes that do not fit the mesh, each with what its error says."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "out", "in"))
    for axes in (pp.Axes("pp", ("out", "out")), pp.Axes("pp", ("out",)), pp.Axes("pp", ("out", "in", "pp"))):
        with pytest.raises(
            ValueError, match=r"axes: got Axes\(.*the mesh has the axes pp, out, in; name each"
        ):
            pp.P2P(mesh=mesh, axes=axes)
    with pytest.raises(ValueError, match="no axis of data ranks to cut over"):
        pp.P2P(mesh=mesh, axes=pp.Axes("pp", ()), shard="params")
    swapped = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("in", "pp", "out"))  # in any order
    with pp.P2P(mesh=swapped, axes=TWO, shard="params") as transport:
        trainer = pp.Trainer([stage], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1), transport)
        state, _ = stepped(trainer, trainer.init({0: params()}), 0, rank)
        assert state.params[0]["w"].to_local().shape == (WIDTH // 2, WIDTH)
        place = 2 * swapped.get_local_rank("out") + swapped.get_local_rank("in")
        assert transport.grid.along(transport.axes.data_axes).index(dist.get_rank()) == place
    return True


def test_axes_are_named_once_in_any_order(four):
    assert four(odd) == [True] * 4


def out_of_order(rank, size, ranks, names):
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    try:
        with pp.P2P(mesh=mesh, axes=pp.Axes("pp", *names[1:])) as transport:
            return transport.local_ranks(2)
    except ValueError as error:
        return str(error)


def test_ranks_stand_in_any_order_along_the_pipeline_alone(two):
    for got in two(out_of_order, [[1, 0]], ("pp", "dp")):
        assert "got the ranks [[1, 0]], which do not ascend along the axis 'dp'; torch joins" in got
    assert two(out_of_order, [1, 0], ("pp",)) == [(1,), (0,)]

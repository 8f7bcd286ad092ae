"""Process groups and meshes of a topology, in four processes."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.parallel import Topology, membership
from ppfunc.runtime import ProcessGroups, device_mesh, topology_of_mesh


def summed(group):
    """The sum over a group in which rank r adds 10 ** r: the digits show who took part."""
    total = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(total, group=group)
    return total.item()


def sum_of(ranks):
    return sum(10**rank for rank in ranks)


def groups_of_a_topology(rank, topology):
    mine = membership(topology, rank)
    with ProcessGroups(topology) as groups:
        assert groups.position == rank
        for kind, ranks in (
            ("replica", mine.replica_group),
            ("data", mine.data_parallel_group),
            ("pipe", mine.pipeline_group),
            ("slice", mine.slice_group),
        ):
            assert groups.ranks(kind) == ranks
            assert summed(groups[kind]) == sum_of(ranks)
    with pytest.raises(KeyError, match="no group of kind 'pipe'"):
        groups["pipe"]


def mesh_of_a_topology(rank):
    topology = Topology.of(pipe=2, data=2)
    mesh = device_mesh(topology)
    assert topology_of_mesh(mesh) == topology
    assert summed(mesh.get_group("pipe")) == sum_of(topology.group_of(rank, "pipe"))
    with pytest.raises(ValueError, match="2 x 3 = 6 ranks, but the world has 4"):
        ProcessGroups(Topology.of(pipe=2, data=3))


def mesh_of_the_user(rank):
    order = [3, 1, 2, 0]
    mesh = DeviceMesh("cpu", torch.tensor(order).view(2, 2), mesh_dim_names=("pp", "dp"))
    with ProcessGroups(mesh=mesh, names={"pp": "pipe", "dp": "data"}) as groups:
        assert groups.topology == Topology.of(pipe=2, data=2)
        assert order[groups.position] == rank
        place = membership(groups.topology, groups.position)
        assert set(groups.ranks("pipe")) == {order[p] for p in place.pipeline_group}
        assert set(groups.ranks("replica")) == {order[p] for p in place.replica_group}
        assert summed(groups["data"]) == sum_of(order[p] for p in place.data_parallel_group)
        assert groups.ranks("slice") == (rank,)
    assert summed(mesh.get_group("pp")) == sum_of(order[p] for p in place.pipeline_group)


def work(rank, store):
    """What each process does; a failure leaves a traceback and an exit status."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    groups_of_a_topology(rank, Topology.of(pipe=2, data=2))
    groups_of_a_topology(rank, Topology.of(model=2, pipe=2))
    mesh_of_a_topology(rank)
    mesh_of_the_user(rank)
    dist.destroy_process_group()


def test_groups_in_four_processes(tmp_path, capfd):
    # Forked, because importing torch four times would take most of the time.
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(rank, tmp_path / "store")) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    alive = [worker for worker in workers if worker.is_alive()]
    for worker in alive:
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0] * 4 and not alive, capfd.readouterr().err


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_mesh_without_names_is_refused(world_of_one):
    mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int))
    with pytest.raises(ValueError, match="the mesh has no names"):
        topology_of_mesh(mesh)
    mesh = device_mesh(Topology.of(pipe=1, data=1))
    with pytest.raises(ValueError, match="no dimension pp: its dimensions are pipe, data"):
        topology_of_mesh(mesh, {"pp": "pipe"})
    for wrong in ({}, {"topology": Topology.of(pipe=1, data=1), "mesh": mesh}):
        with pytest.raises(ValueError, match="a topology or a mesh, one of the two"):
            ProcessGroups(**wrong)


def test_processes_have_to_be_there_first():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        device_mesh(Topology.of(pipe=1, data=1))
    with pytest.raises(RuntimeError, match="init_process_group first"):
        ProcessGroups(Topology.of(pipe=1, data=1))

"""Bytes that each rank sends in a step and keeps after it, counted at torch's backends, and by hand."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import ppfunc as pp
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves
from tests.models import normal, squared

WIDTH, INNER, ROWS, M = 64, 16, 8, 4
FROZEN, TRAINED = WIDTH * WIDTH, 2 * WIDTH * INNER  # numbers of a stage
EXPERTS = WIDTH * WIDTH  # numbers of the one expert of a rank, that trains
HALF, SINGLE, DOUBLE = 2, 4, 8  # bytes of a number
BF16 = pp.Precision(compute=torch.bfloat16, master=torch.float32)
ONLY = {"w": False, "a": True, "b": True, "expert": True}


# Of each operation, the place of the tensor that a rank gives.
GIVEN = {"allreduce": 0, "_reduce_scatter_base": 1, "_allgather_base": 1, "alltoall_base": 1, "send": 0}


class Sent(TorchDispatchMode):
    """Counts the bytes that torch's backends are given to send, by operation, and the exchanges in stages."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.bytes = dict.fromkeys((*GIVEN, "all_to_all_single"), 0)
        for name, place in GIVEN.items():
            patch.setattr(c10d.Backend, name, self._counted(name, place))

    def _counted(self, name, place):
        operation = getattr(c10d.Backend, name)

        def call(group, *args):
            given = args[place]
            self.bytes[name] += sum(t.nbytes for t in (given if isinstance(given, list) else [given]))
            return operation(group, *args)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_to_all_single" in str(func):
            self.bytes["all_to_all_single"] += args[0].nbytes
        return func(*args, **(kwargs or {}))


class Case(NamedTuple):
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    axes: pp.Axes
    shard: str
    muon: bool = False

    @property
    def stages(self):
        return self.sizes[0]

    @property
    def parts(self):
        """The ranks over which parameters are cut."""
        return self.sizes[-1]

    @property
    def copies(self):
        """The ranks that have the same part of a parameter that all have."""
        return prod(self.sizes[1:-1])


FLAT = (2, 2), ("pp", "dp"), pp.Axes("pp", "dp")
HYBRID = (1, 2, 2), ("pp", "dp_replicate", "dp_shard"), pp.Axes("pp", ("dp_replicate", "dp_shard"))
WITH_EXPERTS = (1, 2, 2), ("pp", "ep", "dp"), pp.Axes("pp", ("ep", "dp"), experts="ep")
CASES = [
    *(Case(*form, shard) for form in (FLAT, WITH_EXPERTS) for shard in ("none", "optimizer", "params")),
    *(Case(*HYBRID, shard) for shard in ("optimizer", "params")),
    *(Case(*form, shard, True) for form, shard in ((FLAT, "optimizer"), (HYBRID, "params"), (FLAT, "none"))),
]


def kept(tree):
    """The bytes of the storages that leaves lie in, which may be larger than the leaves."""
    return sum(
        {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tree_leaves(tree))}.values()
    )


def counted(rank, size, case):
    """Take two steps; the bytes that the second sends, and those of parameters and optimizer after it."""
    mesh = init_device_mesh("cpu", case.sizes, mesh_dim_names=case.names)
    experts = case.axes.experts

    def stage(p, x):
        y = torch.tanh(x @ p["w"] + x @ p["a"] @ p["b"])
        if experts:
            sent = pp.collectives.all_to_all(y.unflatten(0, (2, -1)), mesh[experts], 0, 1)
            back = pp.collectives.all_to_all(torch.tanh(sent @ p["expert"]), mesh[experts], 1, 0)
            y = y + back.flatten(0, 1)
        return y

    shapes = {"w": (WIDTH, WIDTH), "a": (WIDTH, INNER), "b": (INNER, WIDTH)}
    shapes |= {"expert": (2, WIDTH, WIDTH)} if experts else {}
    params = {name: normal(*shape, seed=n).bfloat16() / 8 for n, (name, shape) in enumerate(shapes.items())}
    if experts:
        params = pp.stage.shard(
            params, mesh[experts], lambda name, _: [Shard(0)] if name == "expert" else None
        )
    only = {s: {name: ONLY[name] for name in params} for s in range(case.stages)}
    # Messages are counted at gloo.
    transport = pp.P2P(mesh=mesh, axes=case.axes, shard=case.shard, mapped=False)
    optimizer = pp.optim.muon(0.1) if case.muon else pp.optim.adamw(0.1)
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), optimizer)
    schedule = pp.one_f_one_b(case.stages, M)
    place = sum(mesh.get_local_rank(axis) * 10**n for n, axis in enumerate(case.axes.data_axes))
    x, y = normal(M * ROWS, WIDTH, seed=place).float(), normal(M * ROWS, WIDTH, seed=9).bfloat16()
    with pp.Trainer(
        [stage] * case.stages, squared, schedule, optimizer, transport, precision=BF16, trainable=only
    ) as trainer:
        state = trainer.init({mesh.get_local_rank("pp"): params})
        state, _ = trainer.step(state, x, y)
        with pytest.MonkeyPatch.context() as patch, Sent(patch) as sent:
            state, _ = trainer.step(state, x, y)
        return sent.bytes, kept(state.params), kept(state.optimizer)


def by_hand(case):
    """What every rank sends in a step, and keeps: all numbers follow from the shapes."""
    experts = EXPERTS if case.axes.experts else 0
    numbers, parts = TRAINED + experts, 1 if case.shard == "none" else case.parts
    sent = dict.fromkeys((*GIVEN, "all_to_all_single"), 0)
    # The loss, and norms by stage; weights of microbatches are equal.
    sent["allreduce"] = DOUBLE * (1 + case.stages)
    if case.shard == "none":
        sent["allreduce"] += HALF * numbers
    else:
        sent["_reduce_scatter_base"] = HALF * numbers
        # Of this rank's part, with those that have the same.
        sent["allreduce"] += HALF * TRAINED // parts if case.copies > 1 else 0
    if case.shard == "optimizer":  # masters, which the state has whole
        sent["_allgather_base"] = SINGLE * numbers // parts
    if case.shard == "params":  # casts, once a step: each rank has one stage
        sent["_allgather_base"] = HALF * (FROZEN + numbers) // parts
    if (
        case.muon and case.shard != "none"
    ):  # parts of two matrices, each to one rank, whole and back from there
        assert parts == 2
        sent["alltoall_base"] = SINGLE * 2 * numbers // parts
    message = HALF * M * ROWS * WIDTH
    sent["send"] = message if case.stages > 1 else 0
    sent["all_to_all_single"] = 4 * message if experts else 0  # there and back, forward and backward
    frozen = HALF * FROZEN // (parts if case.shard == "params" else 1)
    masters = SINGLE * numbers // (parts if case.shard == "params" else 1)
    return sent, frozen + masters, (1 if case.muon else 2) * SINGLE * numbers // parts


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{'x'.join(case.names)}-{case.shard}-{'muon' * case.muon}"
)
def test_each_rank_sends_and_keeps_the_bytes_that_shapes_give(four, case):
    sent, params, optimizer = by_hand(case)
    for got, kept_params, kept_optimizer in four(counted, case):
        assert got == pytest.approx(sent, rel=0.01)
        assert kept_params == pytest.approx(params, rel=0.01)
        assert kept_optimizer == pytest.approx(optimizer, rel=0.01)

"""Ranks that run the same batch are given the same: what differs is told in the first step, and again where a
trainer compares.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ppfunc as pp
from ppfunc.runtime.lowering import comparison
from tests.models import dense, normal, squared

D, M = 4, 2


def with_extra(p, x, extra):
    return dense(p, x) + extra


def batch(seed=0, rows=4):
    return normal(rows, D, seed=seed), normal(rows, D, seed=seed + 100)


def outcome(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except pp.AgreementError as error:
        return str(error)
    return "ran"


def held(rank):
    return {rank: {"w": normal(D, D, seed=rank)}}


# What ranks 0 and 1 of a pipeline are given, by the seeds of inputs and of targets, and what differs.
GIVEN = {
    "a loader sharded over the pipeline": ([(0, 0), (1, 1)], "inputs and targets"),
    "other inputs": ([(0, 0), (1, 0)], "inputs"),
    "other targets": ([(0, 0), (0, 1)], "targets"),
    "the same": ([(0, 0), (0, 0)], None),
    "what is read alone": ([(0, None), (None, 1)], None),
    "nothing where it is not read": ([(0, 0), (None, 0)], None),
    "targets alone on the last": ([(0, 0), (None, 1)], "targets"),
}


def two_stages(rank, size, form):
    """Each case in a step function of its own; what has come of it."""
    outcomes = {}
    with pp.P2P() as transport:
        for case, (seeds, _) in GIVEN.items():
            x, t = (
                None if seed is None else normal(4, D, seed=seed + n * 100)
                for n, seed in enumerate(seeds[rank])
            )
            if form == "microbatches":
                x, t = (b if b is None else pp.Microbatches(b.chunk(M)) for b in (x, t))
            schedule = pp.gpipe(2, M)
            if form == "trainer":
                trainer = pp.Trainer([dense, dense], squared, schedule, pp.optim.sgd(0.1), transport)
                call, args = trainer.step, (trainer.init(held(rank)), x, t)
            else:
                make = pp.evaluate if form == "evaluate" else pp.value_and_grad
                call, args = make([dense, dense], squared, schedule, transport), (held(rank), x, t)
            outcomes[case] = outcome(call, *args)
    return outcomes


@pytest.mark.parametrize("form", ["plain", "microbatches", "evaluate", "trainer"])
def test_what_both_ranks_of_a_pipeline_are_given_is_compared(two, form):
    for outcomes in two(two_stages, form):
        for case, (_, differs) in GIVEN.items():
            if differs is None:
                assert outcomes[case] == "ran", case
            else:
                told = (
                    f"{differs} of rank 0 differ from those of rank 1; every rank of a pipeline must be given"
                )
                assert told in outcomes[case] and "shard loaders over data ranks only" in outcomes[case], case


def over_a_mesh(rank, size, names, axes, by):
    """Every rank takes the batch of the seed that its place along the axis ``by`` gives."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    place = mesh.get_local_rank("pp")
    with pp.P2P(mesh=mesh, axes=pp.Axes(**axes)) as transport:
        trainer = pp.Trainer([dense, dense], squared, pp.gpipe(2, M), pp.optim.sgd(0.1), transport)
        return outcome(trainer.step, trainer.init(held(place)), *batch(mesh.get_local_rank(by)))


PLACES = {  # the mesh, the axis along which batches differ, and the ranks that are told, if any
    "over data ranks": (("pp", "dp"), {"data": "dp"}, "dp", None),
    "over the pipeline": (("pp", "dp"), {"data": "dp"}, "pp", [(0, 2), (1, 3)]),
    "over tensor ranks": (("pp", "tp"), {"model": "tp"}, "tp", [(0, 1)]),
    "over tensor ranks, the outer axis": (("tp", "pp"), {"model": "tp"}, "tp", [(0, 2)]),
}


@pytest.mark.parametrize("place", PLACES)
def test_ranks_along_every_axis_but_those_of_data_are_given_one_batch(four, place):
    names, axes, by, pairs = PLACES[place]
    outcomes = four(over_a_mesh, names, axes, by)
    if pairs is None:
        assert outcomes == ["ran"] * 4
    else:
        pairs = [f"rank {one} differ from those of rank {other}" for one, other in pairs]
        assert all(any(pair in told for pair in pairs) for told in outcomes), outcomes


def cut_inputs(rank, size, wrong):
    """Inputs whose columns lie over the tensor ranks: parts differ; those of one place along it do not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place, column = mesh.get_local_rank("pp"), mesh.get_local_rank("tp")
    x = DTensor.from_local(
        normal(4, D, seed=column + 2 * wrong * place), mesh["tp"], [Shard(1)], run_check=False
    )
    with pp.P2P(mesh=mesh, axes=pp.Axes(model="tp")) as transport:
        step = pp.value_and_grad([dense, dense], squared, pp.gpipe(2, M), transport)
        return outcome(step, held(place), x, normal(4, D, seed=9))


def test_parts_of_a_tensor_differ_where_they_should(four):
    assert four(cut_inputs, False) == ["ran"] * 4
    for told in four(cut_inputs, True):
        assert "inputs (tp 0) of rank 0 differ from those of rank 2" in told
        assert "inputs (tp 1)" not in told


def extras_of_replicas(rank, size):
    x, t = batch()
    with pp.P2P() as transport:
        step = pp.value_and_grad([with_extra, with_extra], squared, pp.dualpipe(2, 4), transport)
        params = {s: {"w": normal(D, D, seed=s)} for s in range(2)}
        same = {s: normal(4, D, seed=s + 50) for s in range(2)}
        other = {0: same[0], 1: normal(4, D, seed=60 + rank)}
        return outcome(step, params, x, t, extras=other), outcome(step, params, x, t, extras=same)


def test_extras_of_a_stage_that_two_ranks_hold_are_compared(two):
    for wrong, right in two(extras_of_replicas):
        assert "extras[1] of rank 0 differ from those of rank 1" in wrong and right == "ran"


# -- when


def often(rank, size, every):
    """From the second step on, the ranks are given other batches. Which steps tell, and the comparisons."""
    counted, own = [], comparison.require_same_batch
    from ppfunc.runtime.lowering import agreement

    agreement.require_same_batch = lambda *args: counted.append(0) or own(*args)
    outcomes = []
    try:
        with pp.P2P() as transport:
            trainer = pp.Trainer(
                [dense, dense], squared, pp.gpipe(2, M), pp.optim.sgd(0.1), transport, checksum_every=every
            )
            state = trainer.init(held(rank))
            for n in range(6):
                counted.clear()
                try:
                    state, _ = trainer.step(state, *batch(10 * n + (n > 0) * rank))
                    outcomes.append(("ran", len(counted)))
                except pp.AgreementError:
                    outcomes.append(("told", len(counted)))
                    break
            counted.clear()
            outcomes.append((outcome(trainer.evaluate, state, *batch()), len(counted)))
    finally:
        agreement.require_same_batch = own
    return outcomes


def test_a_trainer_compares_in_its_first_step_and_every_so_many(two):
    for outcomes in two(often, 3):
        assert outcomes == [("ran", 1), ("ran", 0), ("ran", 0), ("told", 1), ("ran", 1)]
    for outcomes in two(often, None):
        assert outcomes == [("ran", 1), *[("ran", 0)] * 5, ("ran", 1)]


def lowered_before(rank, size):
    x, t = batch(rank)
    with pp.P2P() as transport:
        step = pp.value_and_grad([dense, dense], squared, pp.gpipe(2, M), transport)
        meta = {rank: {"w": torch.empty(D, D, dtype=x.dtype, device="meta")}}
        lowered = outcome(step.lower, meta, x.to("meta"), t.to("meta"))
        return lowered, outcome(step, held(rank), x, t), outcome(step, held(rank), *batch())


def test_a_step_that_was_lowered_before_compares_the_first_values(two):
    for lowered, wrong, right in two(lowered_before):
        assert lowered == "ran" and "inputs and targets" in wrong and right == "ran"


def reads(rank, size):
    """Count how often numbers of tensors are read where the values of a batch are compared."""
    x, t = batch()
    trees = {"a": x, "b": [x + 1, x > 0]}
    counted, own = [], torch.Tensor.tolist

    def step_of(p, x):
        return dense(p, x["a"] if isinstance(x, dict) else x)

    def compared(*args):
        torch.Tensor.tolist = lambda tensor: counted.append("list") or own(tensor)
        try:
            return own_compare(*args)
        finally:
            torch.Tensor.tolist = own

    from ppfunc.runtime.lowering import agreement

    own_compare, agreement.require_same_batch = agreement.require_same_batch, compared
    try:
        with pp.P2P() as transport:
            step = pp.value_and_grad([step_of, step_of], squared, pp.gpipe(2, M), transport)
            step(held(rank), trees, t)
    finally:
        agreement.require_same_batch = own_compare
    return counted


def test_one_tensor_is_read_from_the_device(two):
    assert two(reads) == [["list"]] * 2

"""A training step from shapes alone: the bytes of what it keeps, by hand, and as processes count them."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ppfunc as pp
from ppfunc.runtime.paper.memories import Memories
from ppfunc.schedule import Op
from ppfunc.schedule.formats.svg import amount
from ppfunc.schedule.instruction import COMPUTE
from ppfunc.stage import Signature
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_leaves, tree_map
from tests.models import dense, normal, squared
from tests.pictures import SVG, require_legible
from tests.storages import LiveStorages

WIDTH, M = 64, 4
W = WIDTH * WIDTH
AXES = pp.Axes("pp", data="dp")
BF16 = pp.Precision(compute=torch.bfloat16)


def params(stages=2):
    return {s: {"w": normal(WIDTH, WIDTH, seed=s, dtype=torch.float32)} for s in range(stages)}


def batch():
    return normal(2 * M, WIDTH, dtype=torch.float32), normal(2 * M, WIDTH, seed=1, dtype=torch.float32)


def trainer_of(transport=None, schedule=None, optimizer=None, **options):
    schedule, optimizer = schedule or pp.one_f_one_b(2, M), optimizer or pp.optim.adamw(0.1)
    return pp.Trainer([dense] * schedule.stages, squared, schedule, optimizer, transport, **options)


def bytes_of(trees):
    return sum(local(leaf).nbytes for leaf in tree_leaves(trees))


@pytest.fixture
def on_paper():
    """Make transports for meshes of these sizes, of ranks without processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(sizes, names=("pp", "dp"), axes=AXES, shard="none"):
        count = torch.Size(sizes).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        return pp.OnPaper(mesh=mesh, axes=axes, shard=shard)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_mesh_without_processes_carries_no_messages(on_paper):
    mesh = on_paper((2, 2)).mesh
    with pytest.raises(ValueError, match="backend 'fake', which lacks messages; .*OnPaper"):
        pp.P2P(mesh=mesh, axes=AXES)


def most(lowered, rank=0):
    return lowered.memory_analysis()[rank].most


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("precision", [None, BF16], ids=["float32", "bf16"])
def test_bytes_in_one_process_are_those_by_hand(precision, donate):
    trainer = trainer_of(optimizer=pp.optim.adamw(0.1, donate=donate), precision=precision)
    memory = most(trainer.lower(params(), *batch()), 1)
    size = 2 if precision else 4  # bytes of a number that a stage computes with
    counter = 8  # of updates, int64
    assert (memory.params, memory.masters) == (size * W, 4 * W if precision else 0)
    assert memory.optimizer == 4 * 2 * W + counter
    assert memory.gradients == size * W  # of the sum: each microbatch is added as it is made
    few = 100  # of numbers of the update: a rate, a step
    assert 0 <= memory.updated - (0 if donate else 4 * 3 * W) <= few
    assert memory.messages == 3 * 2 * WIDTH * size


def test_what_is_kept_is_what_a_step_returns():
    trainer = trainer_of()
    lowered = trainer.lower(params(), *batch())
    state, _ = trainer.step(trainer.init(params()), *batch())
    for rank in lowered.memory_analysis():
        memory = most(lowered, rank)
        assert memory.params == bytes_of(state.params[rank])
        assert memory.optimizer == bytes_of(state.optimizer[rank])


def test_meta_tensors_and_signatures_lower_to_the_same():
    trainer, (inputs, targets) = trainer_of(), batch()
    meta = tree_map(lambda t: t.to("meta"), (params(), inputs, targets))
    signatures = (
        {s: Signature.of(p) for s, p in params().items()},
        Signature.of(inputs),
        Signature.of(targets),
    )
    lowered = [trainer.lower(*given) for given in ((params(), inputs, targets), meta, signatures)]
    assert len({each.as_text() for each in lowered}) == 1
    assert len({repr(each.memory_analysis()) for each in lowered}) == 1
    assert len({str(each.cost_analysis()) for each in lowered}) == 1


def test_stages_that_share_memory_are_refused():
    shared = params()[0]
    with pytest.raises(ValueError, match=r"params\[0\] 'w' and params\[1\] 'w' share memory; declare it"):
        trainer_of().lower({0: shared, 1: shared}, *batch())


def test_frozen_parameters_have_neither_gradients_nor_state():
    lowered = trainer_of(trainable={0: False, 1: True}).lower(params(), *batch())
    memory = most(lowered)
    assert memory.params == 4 * W and memory.gradients == 0
    assert memory.optimizer == 8  # the counter
    assert most(lowered, 1).gradients == 4 * W


def test_numbers_among_the_inputs_are_lowered():
    def scaled(p, x):
        return torch.tanh(x[0] @ p["w"]) * x[1]

    trainer = pp.Trainer([scaled], squared, pp.gpipe(1, M), pp.optim.sgd(0.1))
    inputs, targets = batch()
    lowered = trainer.lower(params(1), (inputs, 2.0), targets)
    assert most(lowered).params == 4 * W


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        # params, masters, shards, optimizer; gradients: the bucket, and this rank's part of its sum
        ("none", (2 * W, 4 * W, 0, 8 * W + 8, 2 * W)),
        ("optimizer", (2 * W, 4 * W, 0, 2 * W + 8, 2.5 * W)),
        # shards: one with its cast
        ("params", (0, 0, 1.5 * W, 2 * W + 8, 2.5 * W)),
    ],
)
def test_shards_are_counted_over_a_mesh_without_processes(on_paper, shard, expected):
    trainer = trainer_of(on_paper((2, 4), shard=shard), precision=BF16)
    lowered = trainer.lower(params(), *batch())
    for rank in range(2):
        memory = most(lowered, rank)
        counted = memory.params, memory.masters, memory.shards, memory.optimizer, memory.gradients
        assert counted == expected


def test_two_stages_are_gathered_at_once_at_most(on_paper):
    trainer = trainer_of(on_paper((2, 4), shard="params"), pp.looped_bfs(2, M, chunks=4))
    memory = trainer.lower(params(8), *batch()).memory_analysis()[0]
    assert memory.held.gathered == 2 * 4 * W
    assert memory.most.gathered <= 3 * 4 * W + W  # with the buffer of a gather, and what is sent for it


def test_parts_over_the_model_axis_are_those_of_one_rank(on_paper):
    transport = on_paper((2, 4, 8), ("pp", "dp", "tp"), pp.Axes("pp", "dp", "tp"), "optimizer")
    cut = {
        s: {"w": DTensor.from_local(p["w"][: WIDTH // 8], transport.mesh["tp"], [Shard(0)], run_check=False)}
        for s, p in params().items()
    }

    def row_parallel(p, x):
        return pp.collectives.psum(x[:, : WIDTH // 8] @ p["w"], transport.mesh["tp"])

    trainer = pp.Trainer([row_parallel] * 2, squared, pp.one_f_one_b(2, M), pp.optim.adamw(0.1), transport)
    memory = most(trainer.lower(cut, *batch()))
    assert (memory.params, memory.optimizer) == (4 * W // 8, 8 * W // 32 + 8)


OPTIMIZERS = {"adamw": pp.optim.adamw(0.1), "muon": pp.optim.muon(0.1)}


def lowered_by(rank, size, shard, name):
    """The memory that this rank of 2 x 2 counts, its kept bytes after a step, and the most in one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    transport, optimizer = pp.P2P(mesh=mesh, axes=AXES, shard=shard), OPTIMIZERS[name]
    with trainer_of(transport, optimizer=optimizer, precision=BF16) as trainer:
        own = {rank // 2: params()[rank // 2]}
        memory = trainer.lower(own, *batch()).memory_analysis()[rank // 2]
        inputs, targets = (t if rank // 2 == n else None for n, t in enumerate(batch()))
        state, _ = trainer.step(trainer.init(own), inputs, targets)
        trainer._idle.clear()  # whose memory would not be made within
        given = [local(t) for t in tree_leaves((state, inputs, targets))]
        with LiveStorages(given) as counted:
            trainer.step(state, inputs, targets)
        kept = bytes_of(state.params), bytes_of(state.optimizer)
        return memory, *kept, bytes_of(given) + counted.peak


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shard", ["none", "optimizer", "params"])
def test_processes_count_the_same_as_paper_and_hold_as_much(four, on_paper, shard, name):
    answers = four(lowered_by, shard, name)
    trainer = trainer_of(on_paper((2, 2), shard=shard), optimizer=OPTIMIZERS[name], precision=BF16)
    paper = trainer.lower(params(), *batch()).memory_analysis()
    for rank, (memory, params_kept, optimizer_kept, measured) in enumerate(answers):
        if name == "adamw" or rank % 2 == 0:  # the first data rank puts the matrix together
            assert memory == paper[rank // 2]
        # Half of the numbers are cast, two bytes each.
        kept = memory.most.shards - W if shard == "params" else memory.most.masters
        assert (params_kept, optimizer_kept) == (kept, memory.most.optimizer)
        assert memory.peak == pytest.approx(measured, rel=0.005) and memory.peak >= measured


def lowered_with_ties(rank, size):
    """Lower a trainer of tied stages, then take a step with values of which those of one rank are others."""
    with trainer_of(pp.P2P(), tied={"w": [(0, "w"), (1, "w")]}) as trainer:
        same, other = {rank: params(1)[0]}, {rank: params(2)[rank]}
        peak = trainer.lower(same, *batch()).memory_analysis()[rank].peak
        with pytest.raises(pp.AgreementError, match="has other values"):
            trainer.step(trainer.init(other), *batch())
        trainer.step(trainer.init(same), *batch())
        return peak


def test_tied_values_are_compared_when_they_are_there(two):
    assert min(two(lowered_with_ties)) > 0


def test_the_memory_of_all_ranks_is_printed_in_a_line_for_each():
    memory = trainer_of().lower(params(), *batch()).memory_analysis()
    head, *lines = repr(memory).splitlines()
    assert head.split("  ")[0] == "rank" and len(lines) == len(memory) == 2
    for (rank, held), line in zip(memory.items(), lines, strict=True):
        words = line.split()
        assert words[0] == str(rank) and f" {amount(held.peak)}B " in line and str(held.at or "end") in words
        assert line.endswith(f" {amount(held.largest[0].size)}B") and held.largest[0].name in line
    large = Memories([(0, memory[0]._replace(peak=123_456_789))], memory.schedule)
    assert " 123 MB " in repr(large) == str(large)


@pytest.mark.parametrize("schedule", [pp.gpipe(2, M), pp.zbv(2, M), pp.dualpipe(2, M)], ids=lambda s: s.name)
def test_the_picture_of_the_memory_has_the_bytes_of_every_rank(schedule):
    stages = len(set(schedule.model_stages))
    trainer = pp.Trainer([dense] * stages, squared, schedule, pp.optim.adamw(0.1))
    memories = trainer.lower(params(stages), *batch()).memory_analysis()
    root = require_legible(memories.to_svg())
    assert memories._repr_svg_() == memories.to_svg()
    lanes = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}path") is not None]
    pixels = 48 / max(memory.peak for memory in memories.values())
    for lane, (rank, memory) in zip(lanes, memories.items(), strict=True):
        told = f"{amount(memory.peak, 'B')} in {memory.at}"
        assert told in [t.text for t in root.iter(f"{SVG}text")] and f"rank {rank}: {told}" in root[1].text
        bars = lane.findall(f"{SVG}rect")
        assert len(bars) == sum(m.instruction.op in {*COMPUTE, Op.STEP} for m in memory.moments)
        assert max(float(bar.get("height")) for bar in bars) == pytest.approx(memory.peak * pixels, abs=0.01)
        highest, *_, lowest = lane.findall(f"{SVG}path")
        levels = [[float(y) for y in re.findall(r"V([\d.]+)", p.get("d"))] for p in (highest, lowest)]
        sizes = [
            (sum(m.after), m.after.params + m.after.optimizer + m.after.batch) for m in memory.moments
        ] + [(0, 0)]
        for level, size in zip(levels, zip(*sizes, strict=True), strict=True):
            assert level == pytest.approx([n * pixels for n in size], abs=0.01)


def test_the_legend_of_the_memory_has_what_is_held():
    step = pp.evaluate([dense] * 2, squared, pp.gpipe(2, M))
    root = require_legible(step.lower(params(), *batch()).memory_analysis().to_svg())
    assert not {"gradients", "residuals"} & {t.text for t in root.iter(f"{SVG}text")}


def test_a_picture_of_the_memory_that_would_be_large_is_not_shown():
    memories = trainer_of().lower(params(), *batch()).memory_analysis()
    many = Memories(((r, m._replace(moments=m.moments * 99)) for r, m in memories.items()), memories.schedule)
    assert many._repr_svg_() is None


def test_a_state_in_the_place_of_parameters_is_refused_by_name():
    trainer = trainer_of()
    with pytest.raises(TypeError, match=r"params: got .*, expected a dictionary \{stage: tree\}"):
        trainer.lower(trainer.init(params()), *batch())


def test_a_step_on_paper_is_refused(on_paper):
    trainer = trainer_of(on_paper((2, 2)))
    with pytest.raises(RuntimeError, match="on paper, whose ranks have no processes; call lower"):
        trainer.step(trainer.init(params()), *batch())


def test_a_transport_on_paper_that_does_not_fit_is_refused(on_paper):
    transport = on_paper((4, 2))
    with pytest.raises(ValueError, match="schedule of 2 ranks, the axis 'pp' of the mesh has 4"):
        trainer_of(transport)
    with pytest.raises(ValueError, match="no axis of data ranks to cut over"):
        pp.OnPaper(mesh=transport.mesh["pp"], shard="params")
    with pytest.raises(TypeError, match="mesh: got None, expected a DeviceMesh"):
        pp.OnPaper(mesh=None)


def test_what_an_update_makes_has_the_names_of_what_it_updates():
    memory = trainer_of(optimizer=pp.optim.adamw(0.1)).lower(params(), *batch()).memory_analysis()[1]
    names = [f"{tree}['w']" for tree in ("params[1]", "optimizer[1]['mean']", "optimizer[1]['square']")]
    for kinds in (("updated",), ("params", "masters", "optimizer")):
        assert sorted(h.name for h in memory.largest if h.kind in kinds and h.size == 4 * W) == sorted(names)

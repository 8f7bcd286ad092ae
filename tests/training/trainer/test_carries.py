"""Truncated backpropagation: a carry that goes on from step to step, beside a loop of plain torch."""

from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ppfunc as pp
from ppfunc.schedule import seq1f1b, seq_zb
from tests.models import new_trainer, normal, same_bits, squared

STAGES, SEQUENCES, ROWS, WIDTH, TOKENS, PIECES = 4, 2, 2, 6, 12, 5


def lstm(params, x, carry):
    """An LSTM without biases; its carry is the pair that torch's takes."""
    h, c = (torch.zeros_like(x[:, 0]),) * 2 if carry is None else carry
    rows = []
    for token in x.unbind(1):
        i, f, g, o = (token @ params["in"] + h @ params["again"]).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        rows.append(h)
    return pp.Output(torch.stack(rows, 1), carry=(h, c))


def params():
    return {
        s: {n: normal(WIDTH, 4 * WIDTH, seed=9 * s + i) for i, n in enumerate(("in", "again"))}
        for s in range(STAGES)
    }


# Of the batch of two data ranks, in pieces of a long sequence; the last is only evaluated.
INPUTS, TARGETS = (
    [normal(2 * SEQUENCES * ROWS, TOKENS, WIDTH, seed=seed + n) for n in range(PIECES + 1)]
    for seed in (40, 60)
)


def zeros():
    tree = tuple(torch.zeros(ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    return {s: pp.Microbatches([tree] * SEQUENCES) for s in range(STAGES)}


def by_torch(rows):
    """Parameters after the steps, losses of all pieces, norms: the carry is detached between pieces."""
    trained = params()
    leaves = [leaf.requires_grad_() for tree in trained.values() for leaf in tree.values()]
    optimizer = torch.optim.AdamW(leaves, 1e-2, weight_decay=0.1)
    losses, norms, carries = [], [], dict.fromkeys(trained)
    for x, target in zip(INPUTS, TARGETS, strict=True):
        y = x[:rows]
        for s, tree in trained.items():
            y, carry = (out := lstm(tree, y, carries[s])).y, out.carry
            carries[s] = tuple(t.detach() for t in carry)
        losses.append(squared(y, target[:rows]))
        if len(losses) <= PIECES:
            optimizer.zero_grad()
            losses[-1].backward()
            norms.append(torch.nn.utils.clip_grad_norm_(leaves, 0.1))
            optimizer.step()
    return trained, torch.stack(losses).detach(), torch.stack(norms)


def pieces(slices, rank=0):
    return [
        tuple(pp.microbatch(part.chunk(2)[rank], SEQUENCES, slices=slices) for part in pair)
        for pair in zip(INPUTS, TARGETS, strict=True)
    ]


def trained_by(trainer, stages, slices=3, rank=0, together=False, **options):
    """Parameters, losses and norms of the steps, each from the last carry of the one before."""
    *batches, last = pieces(slices, rank)
    state = trainer.init({s: params()[s] for s in stages})
    carry = {s: zeros()[s] for s in stages} if together else None
    if together:
        state, found = trainer.steps(state, batches, carry=carry, return_carry=True, **options)
        assert [metrics.carry is None for metrics in found] == [True] * (PIECES - 1) + [False]
    else:
        found = []
        for batch in batches:
            state, metrics = trainer.step(state, *batch, carry=carry, return_carry=True, **options)
            found.append(metrics)
            carry = metrics.carry
    carry = found[-1].carry
    assert not any(t.requires_grad for s in stages for one in carry[s] for t in one)
    after = trainer.evaluate(state, *last, carry=carry, **{n: w[0] for n, w in options.items()})
    losses = torch.stack([*(metrics.loss for metrics in found), after])
    return state, losses, torch.stack([metrics.grad_norm for metrics in found]), carry


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


SCHEDULES = {
    "seq1f1b": lambda k: seq1f1b(STAGES, SEQUENCES, k),
    "apart, in turn": lambda k: seq_zb(2, SEQUENCES, k, chunks=2),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_trainer_goes_on_as_a_loop_of_torch_that_detaches(schedule, together, donate):
    trainer = new_trainer(
        [lstm] * STAGES,
        squared,
        SCHEDULES[schedule](3),
        pp.optim.adamw(1e-2, weight_decay=0.1, donate=donate),
        clip=0.1,
    )
    state, losses, norms, _ = trained_by(trainer, range(STAGES), together=together)
    trained, wanted, wanted_norms = by_torch(SEQUENCES * ROWS)
    close(losses, wanted)
    close(norms, wanted_norms)
    close(state.params, {s: {n: t.detach() for n, t in tree.items()} for s, tree in trained.items()})
    assert losses[0] > losses[1] and not torch.equal(losses[-1], losses[-2])


@pytest.mark.parametrize("carry", [None, {}])
def test_steps_without_a_carry_begin_anew(carry):
    trainer, state = _trainer()
    batches = pieces(3)[:2]
    after, found = trainer.steps(state, batches, carry=carry)
    for batch, metrics in zip(batches, found, strict=True):
        state, alone = trainer.step(state, *batch)
        assert same_bits(metrics.loss, alone.loss)
    assert same_bits(after.params, state.params)


def test_uneven_slices_weigh_as_their_tokens():
    lengths = [5, 3, 4]
    trainer = new_trainer(
        [lstm] * STAGES,
        squared,
        seq1f1b(STAGES, SEQUENCES, 3),
        pp.optim.adamw(1e-2, weight_decay=0.1),
        clip=0.1,
    )
    found = trained_by(trainer, range(STAGES), lengths, together=True, loss_weights=[lengths * 2] * PIECES)
    close(found[1], by_torch(SEQUENCES * ROWS)[1])
    with pytest.warns(UserWarning, match=r"slices of \[5, 3, 4\] tokens have equal weights"):
        trainer.step(trainer.init(params()), *pieces(lengths)[0])


def test_masters_and_carries_in_bfloat16():
    """As a step of the parameters cast by hand, whose gradients the same optimizer takes."""
    optimizer, schedule = pp.optim.adamw(1e-2), seq_zb(STAGES, SEQUENCES, 3)
    precision = pp.Precision(torch.bfloat16, reduce=torch.float32, master=torch.float32)
    trainer = new_trainer([lstm] * STAGES, squared, schedule, optimizer, precision=precision)

    def cast(tree, dtype):
        return {name: leaf.to(dtype) for name, leaf in tree.items()}

    masters = {s: cast(tree, torch.float32) for s, tree in params().items()}
    moments = {s: optimizer.init(tree) for s, tree in masters.items()}
    step = pp.value_and_grad([lstm] * STAGES, squared, schedule, return_carry=True, sum_dtype=torch.float32)
    state, carry, carried = trainer.init(params()), None, None
    for x, target in pieces(3)[:PIECES]:
        state, metrics = trainer.step(state, x, target, carry=carry, return_carry=True)
        x = x.map(lambda part: part.bfloat16())
        found = step({s: cast(tree, torch.bfloat16) for s, tree in masters.items()}, x, target, carry=carried)
        for s in masters:
            masters[s], moments[s] = optimizer.update(found.grads[s], moments[s], masters[s])
        carry, carried = metrics.carry, found.carry
        assert all(same_bits(carry[s].trees, carried[s].trees) for s in carry)
        assert carry[0][0][0].dtype == torch.bfloat16
    torch.testing.assert_close(state.params, masters)


def over_processes(rank, size, shard, together):
    """By two ranks of the pipeline, or one and two data ranks, or both."""
    grid = {"none": (2, 1), "optimizer": (1, 2), "params": (2, 2)}[shard]
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("pp", "dp"))
    schedule = seq1f1b(grid[0], SEQUENCES, 3, chunks=STAGES // grid[0])
    optimizer = pp.optim.adamw(1e-2, weight_decay=0.1)
    options = {"axes": pp.Axes("pp", "dp"), "shard": shard, "clip": 0.1}
    with new_trainer([lstm] * STAGES, squared, schedule, optimizer, mesh, **options) as trainer:
        stages = schedule.model_stages_of(mesh.get_local_rank("pp"))
        _, losses, norms, carry = trained_by(trainer, stages, 3, mesh.get_local_rank("dp"), together)
    return losses, norms, {s: batch.trees for s, batch in carry.items()}


@pytest.mark.parametrize("together", [False, True])
def test_two_processes_have_the_bits_of_one(together, two):
    trainer = new_trainer(
        [lstm] * STAGES,
        squared,
        seq1f1b(2, SEQUENCES, 3, chunks=2),
        pp.optim.adamw(1e-2, weight_decay=0.1),
        clip=0.1,
    )
    _, losses, norms, carry = trained_by(trainer, range(STAGES), together=together)
    for found in two(over_processes, "none", together):
        assert same_bits(found[:2], (losses, norms))
        assert all(same_bits(trees, carry[s].trees) for s, trees in found[2].items())


@pytest.mark.parametrize("shard, pool", [("optimizer", "two"), ("params", "four")])
def test_each_data_rank_goes_on_with_its_own_sequences(shard, pool, request):
    _, losses, norms = by_torch(2 * SEQUENCES * ROWS)
    answers = request.getfixturevalue(pool)(over_processes, shard, True)
    for found in answers:
        close(found[0], losses)
        close(found[1], norms)
    assert all(not same_bits(a[2], b[2]) for a, b in pairwise(answers))


def _first(trees, stage=0):
    return {s: trees[s] for s in trees if s != stage}


def _trainer(cell=lstm, schedule=None):
    schedule = schedule or seq1f1b(STAGES, SEQUENCES, 3)
    trainer = new_trainer([cell] * STAGES, squared, schedule, pp.optim.sgd(0.1))
    return trainer, trainer.init(params())


def growing(tree, x, carry):
    seen = x if carry is None else torch.cat([carry, x], 1)
    return pp.Output((x + seen.mean(1, keepdim=True)) @ tree["in"] @ tree["again"].T, carry=seen)


def test_recorded_steps_and_evaluations_return_the_last_carries_of_a_step():
    (trainer, state), (batch, other) = _trainer(), pieces(3)[:2]
    _, metrics = trainer.step(state, *batch, carry=zeros(), return_carry=True)
    (_, recorded), _ = trainer.record(state, *batch, carry=zeros(), return_carry=True)
    evaluated = trainer.evaluate(state, *batch, carry=zeros(), return_carry=True)
    for s in range(STAGES):
        assert same_bits(metrics.carry[s].trees, recorded.carry[s].trees)
        assert same_bits(metrics.carry[s].trees, evaluated.carry[s].trees)
    lowered = trainer.lower(params(), *other, carry=metrics.carry)
    without = trainer.lower(params(), *other)
    assert lowered.memory_analysis()[0].peak > without.memory_analysis()[0].peak


MISTAKES = {
    "one that grows": (
        lambda trainer, state: trainer.steps(
            state,
            pieces(3)[:2],
            carry={s: pp.Microbatches([normal(ROWS, 1, WIDTH)] * SEQUENCES) for s in range(STAGES)},
        ),
        growing,
        "carry[0]: got float64[2,1,6] for sequence 0, whose last carry is float64[2,13,6]; steps of one call"
        " begin where the step before ends: give a first carry of that form, or call step() for each",
    ),
    "none of a stage": (
        lambda trainer, state: trainer.steps(state, pieces(3)[:2], carry=_first(zeros())),
        lstm,
        "carry: got the stages [1, 2, 3], this process runs [0, 1, 2, 3]; give those",
    ),
    "of a stage elsewhere": (
        lambda trainer, state: trainer.step(state, *pieces(3)[0], carry={7: zeros()[0]}),
        lstm,
        "carry: got the stages [7], this process runs [0, 1, 2, 3]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_carries_that_cannot_go_on_are_refused(mistake):
    run, cell, told = MISTAKES[mistake]
    trainer, state = _trainer(cell)
    with pytest.raises(ValueError) as error:
        run(trainer, state)
    assert told in str(error.value)
    trainer.step(state, *pieces(3)[0])  # nothing was updated


@pytest.mark.parametrize("call", ["step", "record", "evaluate"])
def test_last_carries_of_a_schedule_without_slices_are_refused(call):
    trainer, state = _trainer(lambda tree, x: lstm(tree, x, None).y, pp.gpipe(STAGES, SEQUENCES))
    with pytest.raises(ValueError, match="return_carry: got True, and the schedule 'gpipe.* has no slices"):
        getattr(trainer, call)(state, INPUTS[0], TARGETS[0], return_carry=True)

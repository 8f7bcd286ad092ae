"""Steps of slices of sequences, against the model in one piece."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

import ppfunc as pp
from ppfunc.schedule import dualpipe, forward_only, insert_recomputes, plan, seq1f1b, seq_zb
from ppfunc.stage.tree import tree_leaves
from tests.covering import by_pairs
from tests.models import same_bits
from tests.storages import LiveStorages

STAGES, SEQUENCES, ROWS, TOKENS, WIDTH = 4, 3, 2, 16, 8
ENGINES = {
    "graph": pp.engines.graph,
    "graph, all again": pp.engines.graph(remat="full"),
    "functional": pp.engines.functional,
    "eager": pp.engines.eager,
}


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear_attention(params, x, carry):
    """A carry of one form: the sum of the outer products of keys and values so far."""
    q, k, v = (x @ params[name] / 2 for name in "qkv")
    state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
    state = state if carry is None else state + carry[:, None]
    return pp.Output(x + torch.einsum("btd,btde->bte", q, state).tanh(), carry=state[:, -1])


def cached_attention(params, x, carry):
    """A carry that grows: the keys and values so far."""
    q, k, v = (x @ params[name] for name in "qkv")
    past = 0 if carry is None else carry[0].shape[1]
    k, v = (k, v) if carry is None else (torch.cat(pair, 1) for pair in zip(carry, (k, v), strict=True))
    mask = torch.ones(x.shape[1], past + x.shape[1], dtype=torch.bool, device=x.device).tril(past)
    return pp.Output(x + scaled_dot_product_attention(q, k, v, attn_mask=mask), carry=(k, v))


def recurrent(params, x, carry):
    """A carry token by token, a dictionary."""
    h = torch.zeros_like(x[:, 0]) if carry is None else carry["h"]
    rows = []
    for token in x.unbind(1):
        h = torch.tanh(token @ params["q"] + h @ params["k"])
        rows.append(h @ params["v"])
    return pp.Output(torch.stack(rows, 1), carry={"h": h})


def grouped_attention(params, x, carry):
    """Two heads of queries for one head of keys; once to all tokens, once to the last five."""
    q, k, v = (x @ params[name] for name in "qkv")
    q, k, v = (t.unflatten(2, (-1, WIDTH // 2)).transpose(1, 2) for t in (q, k[..., 4:], v[..., :4]))
    carry = {} if carry is None else carry
    y, far = pp.carried_attention(q, k, v, carry.get("far"))
    z, near = pp.carried_attention(q, v, k, carry.get("near"), window=5)
    return pp.Output(x + (y + z).transpose(1, 2).flatten(2).tanh(), carry={"far": far, "near": near})


def of_tokens(carry):
    """A carry in a form that does not depend on the slices: their keys and values joined."""
    if not isinstance(carry, dict) or "far" not in carry:
        return carry
    return carry | {"far": [torch.cat(parts, 2) for parts in zip(*carry["far"], strict=True)]}


CELLS = {
    "linear": linear_attention,
    "cache": cached_attention,
    "recurrent": recurrent,
    "grouped": grouped_attention,
}
PARAMS = {
    s: {n: normal(WIDTH, WIDTH, seed=9 * s + i) / 3 for i, n in enumerate("qkv")} for s in range(STAGES)
}
INPUTS, TARGETS = (
    normal(SEQUENCES * ROWS, TOKENS, WIDTH, seed=77),
    normal(SEQUENCES * ROWS, TOKENS, WIDTH, seed=78),
)


def loss_fn(y, target):
    return (y - target).square().mean()


def in_one_piece(cell, params, first=None):
    y, carries = INPUTS, {}
    for s in range(STAGES):
        out = cell(params[s], y, None if first is None else first[s])
        y, carries[s] = out.y, out.carry
    return loss_fn(y, TARGETS), carries


@cache
def expected(name):
    grads, carries = torch.func.grad(lambda params: in_one_piece(CELLS[name], params), has_aux=True)(PARAMS)
    return in_one_piece(CELLS[name], PARAMS)[0], grads, carries


def cut(slices):
    return tuple(pp.microbatch(batch, SEQUENCES, slices=slices) for batch in (INPUTS, TARGETS))


def weights(slices):
    """Of the tokens of each slice."""
    lengths = slices if isinstance(slices, list) else [TOKENS // slices] * slices
    return [n / TOKENS / SEQUENCES for n in lengths] * SEQUENCES


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


SCHEDULES = {
    "seq1f1b": lambda k: seq1f1b(STAGES, SEQUENCES, k),
    "seq_zb": lambda k: seq_zb(STAGES, SEQUENCES, k),
    "stages in turn": lambda k: seq1f1b(2, SEQUENCES, k, chunks=2),
    "in turn, apart": lambda k: seq_zb(2, SEQUENCES, k, chunks=2),
    "a planned V": lambda k: plan(2, SEQUENCES * k, placement="v", slices=k, effort=0.01).schedule,
    "computed again": lambda k: insert_recomputes(seq1f1b(STAGES, SEQUENCES, k)),
}


@pytest.mark.parametrize("slices, cell, schedule", by_pairs([1, 2, [5, 8, 3]], CELLS, SCHEDULES))
def test_every_schedule_gives_what_the_model_in_one_piece_gives(schedule, cell, slices):
    k = slices if isinstance(slices, int) else len(slices)
    step = pp.value_and_grad(
        [CELLS[cell]] * STAGES,
        loss_fn,
        SCHEDULES[schedule](k),
        loss_weights=weights(slices),
        return_carry=True,
    )
    found = step(PARAMS, *cut(slices))
    loss, grads, carries = expected(cell)
    close(found.loss, loss)
    close(found.grads, grads)
    assert found.carry_grads == {} and list(found.carry) == list(range(STAGES))
    joined = {s: pp.Microbatches(found.carry[s]).join() for s in found.carry}
    close(*({s: of_tokens(trees[s]) for s in joined} for trees in (joined, carries)))


@pytest.mark.parametrize(
    "build, slices, cell, engine", by_pairs([seq1f1b, seq_zb], [1, 2, 8], CELLS, ENGINES)
)
def test_every_engine_gives_what_the_model_in_one_piece_gives(engine, cell, slices, build):
    step = pp.value_and_grad(
        [CELLS[cell]] * STAGES, loss_fn, build(STAGES, SEQUENCES, slices), engine=ENGINES[engine]
    )
    loss, grads = step(PARAMS, *cut(slices))
    close(loss, expected(cell)[0])
    close(grads, expected(cell)[1])


def test_the_same_bits_under_every_schedule():
    results = [
        pp.value_and_grad([linear_attention] * STAGES, loss_fn, SCHEDULES[name](4))(PARAMS, *cut(4))
        for name in SCHEDULES
        if name != "computed again"
    ]
    whole = [result for result, name in zip(results, SCHEDULES, strict=False) if "apart" not in name]
    assert all(same_bits(result[0], whole[0][0]) for result in whole)
    for s in range(STAGES):
        assert all(same_bits(result[1][s], whole[0][1][s]) for result in whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_first_carry_has_a_gradient_and_the_last_is_the_next_first(engine):
    first = {s: normal(SEQUENCES * ROWS, WIDTH, WIDTH, seed=40 + s) for s in range(STAGES)}
    wanted, carries = torch.func.grad(
        lambda first: in_one_piece(linear_attention, PARAMS, first), has_aux=True
    )(first)
    given = {s: pp.microbatch(tree, SEQUENCES) for s, tree in first.items()}
    schedule = seq_zb(STAGES, SEQUENCES, 4)
    step = pp.value_and_grad(
        [linear_attention] * STAGES, loss_fn, schedule, engine=ENGINES[engine], return_carry=True
    )
    found = step(PARAMS, *cut(4), carry=given)
    close({s: tree.join() for s, tree in found.carry_grads.items()}, wanted)
    close({s: tree.join() for s, tree in found.carry.items()}, carries)
    # Truncated backpropagation: two halves of the sequences, the second begins where the first ends.
    halves = [tuple(pp.microbatch(b, SEQUENCES, slices=2) for b in pair) for pair in zip(
        INPUTS.chunk(2, 1), TARGETS.chunk(2, 1), strict=True
    )]  # fmt: skip
    step = pp.value_and_grad(
        [linear_attention] * STAGES, loss_fn, seq1f1b(STAGES, SEQUENCES, 2), return_carry=True
    )
    one = step(PARAMS, *halves[0])
    two = step(PARAMS, *halves[1], carry=one.carry)
    close((one.loss + two.loss) / 2, expected("linear")[0])


def test_an_evaluation_has_the_loss_and_the_last_carries():
    for schedule in (seq1f1b(STAGES, SEQUENCES, 4), forward_only(seq1f1b(2, SEQUENCES, 4, chunks=2))):
        step = pp.evaluate([cached_attention] * STAGES, loss_fn, schedule, return_carry=True)
        found = step(PARAMS, *cut(4))
        close(found.loss, expected("cache")[0])
        close(found.carry[STAGES - 1].join(), expected("cache")[2][STAGES - 1])


def test_a_slice_of_no_weight_still_carries():
    weighed = [0.0, 0.5, 0.0, 0.5] + [0.0] * 4 + [0.0, 0.0, 0.0, 1.0]

    def whole(params):
        y = INPUTS
        for s in range(STAGES):
            y = linear_attention(params[s], y, None).y
        parts = zip(*(pp.microbatch(b, SEQUENCES, slices=4) for b in (y, TARGETS)), weighed, strict=True)
        return sum(weight * loss_fn(y, target) for y, target, weight in parts)

    step = pp.value_and_grad(
        [linear_attention] * STAGES, loss_fn, seq_zb(STAGES, SEQUENCES, 4), loss_weights=weighed
    )
    loss, grads = step(PARAMS, *cut(4))
    close(loss, whole(PARAMS))
    close(grads, torch.func.grad(whole)(PARAMS))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [seq1f1b, seq_zb])
def test_slices_of_padding_at_the_end_of_a_sequence_are_left_out(engine, build):
    """No backward runs of what is no number; a slice of weight 0 before others is differentiated."""
    inputs = INPUTS.clone()
    inputs[:, TOKENS // 2 :] = torch.nan
    inputs, targets = (pp.microbatch(batch, SEQUENCES, slices=4) for batch in (inputs, TARGETS))
    step = pp.value_and_grad(
        [linear_attention] * STAGES,
        loss_fn,
        build(STAGES, SEQUENCES, 4),
        engine=ENGINES[engine],
        loss_weights=[0, 1 / SEQUENCES, 0, 0] * SEQUENCES,
    )

    def whole(params):
        y = INPUTS[:, : TOKENS // 2]
        for s in range(STAGES):
            y = linear_attention(params[s], y, None).y
        return loss_fn(y[:, TOKENS // 4 :], TARGETS[:, TOKENS // 4 : TOKENS // 2])

    loss, grads = step(PARAMS, inputs, targets)
    close((grads, loss), torch.func.grad_and_value(whole)(PARAMS))


def masked(y, target):
    """The mean over tokens that count, which is 0 / 0 of a slice of nothing but padding."""
    counted = target != 0
    return ((y - target).square() * counted).sum() / counted.sum()


@pytest.mark.parametrize("build", [seq1f1b, seq_zb])
def test_a_loss_of_no_weight_that_is_no_number_leaves_the_gradients_as_they_are(build):
    """Padding at the end of a sequence; also the loss that a stage adds, in a slice that others follow."""
    targets = TARGETS.clone()
    targets[:ROWS, 12:] = 0
    weighed = [0.1, 0.0, 0.1, 0.0, *[0.1] * 8]

    def adding(params, x, carry):
        return linear_attention(params, x, carry)._replace(loss=x.mean())

    stages = [linear_attention, adding, linear_attention, linear_attention]
    step = pp.value_and_grad(stages, masked, build(STAGES, SEQUENCES, 4), loss_weights=weighed)
    loss, grads = step(PARAMS, BATCH[0], pp.microbatch(targets, SEQUENCES, slices=4))

    def whole(params):
        y, more = INPUTS, 0
        for s in range(STAGES):
            more = y if s == 1 else more
            y = linear_attention(params[s], y, None).y
        cut = (pp.microbatch(part, SEQUENCES, slices=4) for part in (y, targets, more))
        return sum(w * (masked(a, b) + c.mean()) for a, b, c, w in zip(*cut, weighed, strict=True) if w)

    close(loss, whole(PARAMS))
    close(grads, torch.func.grad(whole)(PARAMS))
    again = step(PARAMS, BATCH[0], pp.microbatch(targets, SEQUENCES, slices=4), loss_weights=[0.1] * 12)
    assert not again[0].isfinite()  # what has weight counts


def test_slices_of_unlike_lengths_without_weights_are_warned_of():
    step = pp.value_and_grad([linear_attention] * STAGES, loss_fn, seq1f1b(STAGES, SEQUENCES, 3))
    told = (
        r"slices of \[5, 8, 3\] tokens have equal weights.*loss_weights=\[n / 48 for n in \[5, 8, 3\]\] \* 3"
    )
    with pytest.warns(UserWarning, match=told):
        step(PARAMS, *cut([5, 8, 3]))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_differentiates_the_last_carry(engine):
    """Where its derivative is infinite, zeros would make gradients that are no numbers."""

    def rooted(params, x, carry):
        out = linear_attention(params, x, carry and carry[0])
        return out._replace(carry=(out.carry, x.sum() if carry is None else (x.sum() * 0).sqrt()))

    step = pp.value_and_grad(
        [rooted] * STAGES, loss_fn, seq1f1b(STAGES, SEQUENCES, 2), engine=ENGINES[engine]
    )
    close(step(PARAMS, *cut(2))[1], expected("linear")[1])


def test_dropout_depends_on_the_sequence_and_the_slice_alone():
    def dropping(params, x, carry):
        out = linear_attention(params, x, carry)
        return out._replace(y=dropout(out.y, 0.5))

    first, *others = (
        pp.value_and_grad([dropping] * STAGES, loss_fn, build(4))(PARAMS, *cut(4), seed=(0, 1))
        for build in SCHEDULES.values()
    )
    for loss, grads in others:
        assert same_bits(loss, first[0])
        close(grads, first[1])

    def drawn(params, x, carry):
        return pp.Output(dropout(torch.ones_like(x), 0.5), carry=())

    step = pp.evaluate([drawn] * STAGES, None, seq1f1b(STAGES, SEQUENCES, 4), return_outputs=True)
    draws = step(PARAMS, cut(4)[0], seed=(0, 1))
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == SEQUENCES * 4


@pytest.mark.parametrize("build", [seq1f1b, seq_zb])
def test_tied_parameters_have_the_sum_of_the_gradients_of_all_slices(build):
    tied = {"q": [(0, "q"), (STAGES - 1, "q")]}
    params = {s: dict(tree) for s, tree in PARAMS.items()}
    params[STAGES - 1]["q"] = params[0]["q"].clone()
    step = pp.value_and_grad([linear_attention] * STAGES, loss_fn, build(STAGES, SEQUENCES, 4), tied=tied)
    grads = step(params, *cut(4))[1]
    wanted = torch.func.grad(lambda params: in_one_piece(linear_attention, params)[0])(params)
    wanted[0]["q"] = wanted[STAGES - 1]["q"] = wanted[0]["q"] + wanted[STAGES - 1]["q"]
    close(grads, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_count_is_carried_as_a_tensor(engine):
    def counting(params, x, carry):
        before, count = carry or (None, torch.tensor(0))
        out = linear_attention(params, x, before)
        seen = count + torch.arange(x.shape[1])
        return pp.Output(out.y + seen[:, None] / 8, carry=(out.carry, count + x.shape[1]))

    step = pp.value_and_grad(
        [counting] * STAGES,
        loss_fn,
        seq_zb(STAGES, SEQUENCES, 3),
        engine=ENGINES[engine],
        loss_weights=weights([5, 8, 3]),
        return_carry=True,
    )
    found = step(PARAMS, *cut([5, 8, 3]))

    def whole(params):
        y = INPUTS
        for s in range(STAGES):
            y = counting(params[s], y, None).y
        return loss_fn(y, TARGETS)

    close(found.grads, torch.func.grad(whole)(PARAMS))
    assert [tree[1].item() for tree in found.carry[0].trees] == [TOKENS] * SEQUENCES


def test_a_stage_may_carry_nothing():
    def plain(params, x, carry):
        return pp.Output(x @ params["q"] @ params["k"] @ params["v"], carry=())

    stages = [plain, linear_attention, linear_attention, plain]
    step = pp.value_and_grad(stages, loss_fn, seq1f1b(STAGES, SEQUENCES, 4))

    def whole(params):
        y = INPUTS
        for s, stage in enumerate(stages):
            y = stage(params[s], y, None).y
        return loss_fn(y, TARGETS)

    loss, grads = step(PARAMS, *cut(4))
    close(loss, whole(PARAMS))
    close(grads[1], torch.func.grad(whole)(PARAMS)[1])


@pytest.mark.parametrize("lengths, cell, build", by_pairs([[16], [5, 8, 3]], CELLS, [seq1f1b, seq_zb]))
def test_derivatives_along_a_direction_are_the_derivatives_of_the_model_in_one_piece(lengths, cell, build):
    first = {s: INPUTS[:, :1].expand(-1, WIDTH, -1) for s in range(STAGES)} if cell == "linear" else None
    carry = first and {s: pp.microbatch(tree, SEQUENCES) for s, tree in first.items()}
    direction = {
        s: {n: normal(WIDTH, WIDTH, seed=90 + 9 * s + i) / 100 for i, n in enumerate("qkv")} for s in PARAMS
    }

    def loss(params):
        return in_one_piece(CELLS[cell], params, first)[0]

    schedule = build(STAGES, SEQUENCES, len(lengths))
    jvp, hvp = (
        make([CELLS[cell]] * STAGES, loss_fn, schedule, loss_weights=weights(lengths))
        for make in (pp.jvp, pp.hvp)
    )
    value = torch.func.jvp(loss, (PARAMS,), (direction,))
    close(jvp(PARAMS, direction, *cut(lengths), carry=carry), value)
    found = hvp(PARAMS, direction, *cut(lengths), carry=carry)
    close((found.loss, found.slope), value)
    close((found.grads, found.products), torch.func.jvp(torch.func.grad(loss), (PARAMS,), (direction,)))


@pytest.mark.parametrize("cell", CELLS)
def test_models_of_an_ensemble_have_a_carry_each(cell):
    params = {s: {n: torch.stack([t, t.T]) for n, t in tree.items()} for s, tree in PARAMS.items()}
    step = pp.value_and_grad(
        *pp.ensemble([CELLS[cell]] * STAGES, loss_fn, carry=True),
        seq_zb(STAGES, SEQUENCES, 4),
        loss_shape=(2,),
    )

    def losses(params):
        return torch.func.vmap(lambda params: in_one_piece(CELLS[cell], params)[0])(params)

    found, grads = step(params, *cut(4))
    close(found, losses(params))
    close(grads, torch.func.grad(lambda params: losses(params).sum())(params))


def by_process(rank, size, name, cell):
    """Of this rank: loss, gradients and last carries; predicted and measured bytes of a step."""
    schedule = {"seq1f1b": seq1f1b, "seq_zb": seq_zb}[name](size, SEQUENCES, 4)
    params = {s: PARAMS[s] for s in schedule.stages_of(rank)}
    # Views with gaps would be copied by the operators that read them.
    inputs, targets = (batch.map(torch.Tensor.contiguous) for batch in cut(4))
    batch = inputs if rank == 0 else None, targets if rank == size - 1 else None
    with pp.P2P(mapped=False) as transport:
        step = pp.value_and_grad([CELLS[cell]] * size, loss_fn, schedule, transport, return_carry=True)
        memory = step.lower(params, *batch).memory_analysis()[rank]
        found = step(params, *batch)
        given = [t for t in tree_leaves((params, batch)) if t is not None]
        with LiveStorages(given) as counted:
            step(params, *batch)
    whole = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given}.values())
    return (
        found.loss,
        found.grads,
        {s: c.trees for s, c in found.carry.items()},
        memory.peak,
        whole + counted.peak,
    )


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["seq1f1b", "seq_zb"])
def test_processes_give_the_same_bits_and_the_bytes_that_are_predicted(name, cell, two):
    schedule = {"seq1f1b": seq1f1b, "seq_zb": seq_zb}[name](2, SEQUENCES, 4)
    step = pp.value_and_grad([CELLS[cell]] * 2, loss_fn, schedule, return_carry=True)
    alone = step({s: PARAMS[s] for s in range(2)}, *cut(4))
    for rank, (loss, grads, carry, predicted, most) in enumerate(two(by_process, name, cell)):
        assert same_bits(loss, alone.loss) and same_bits(grads[rank], alone.grads[rank])
        assert all(map(same_bits, carry[rank], alone.carry[rank].trees))
        assert predicted == pytest.approx(most, rel=0.01)


def test_four_processes_give_the_same_bits(four):
    """One stage each, I and W apart."""
    step = pp.value_and_grad([recurrent] * 4, loss_fn, seq_zb(4, SEQUENCES, 4), return_carry=True)
    alone = step(PARAMS, *cut(4))
    for rank, (loss, grads, carry, *_) in enumerate(four(by_process, "seq_zb", "recurrent")):
        assert same_bits(loss, alone.loss) and same_bits(grads[rank], alone.grads[rank])
        assert all(map(same_bits, carry[rank], alone.carry[rank].trees))


BATCH = cut(4)
MISTAKES = {
    "a number in a carry": (
        lambda: _step(lambda p, x, c: pp.Output(x @ p["q"], carry=(x, 3)))(PARAMS, *BATCH),
        "returned carry[1]: got 3 of type int, expected a tensor; return torch.tensor(3), int64",
    ),
    "a whole batch": (
        lambda: _step()(PARAMS, INPUTS, BATCH[1]),
        "inputs: got a whole batch, and the schedule 'seq1f1b' has 4 slices of a sequence; cut it,"
        " ppfunc.microbatch(inputs, 3, slices=4)",
    ),
    "rows for slices": (
        lambda: _step()(PARAMS, pp.microbatch(INPUTS.repeat(2, 1, 1), 12), BATCH[1]),
        "inputs: got sequences in no slices, the schedule 'seq1f1b' has 4; ppfunc.microbatch(inputs, 3,"
        " slices=4)",
    ),
    "slices without a carry": (
        lambda: pp.value_and_grad([torch.add] * 2, loss_fn, pp.one_f_one_b(2, 6))({0: 1, 1: 1}, *cut(2)),
        "inputs: got sequences in 2 slices, the schedule '1f1b' has none; ppfunc.microbatch(inputs, 6) cuts"
        " as many",
    ),
    "extras in other slices": (
        lambda: _step()(PARAMS, *BATCH, extras={0: pp.microbatch(INPUTS, SEQUENCES, slices=[1, 1, 1, 13])}),
        "extras[0]: got 2 rows in slices of [1, 1, 1, 13] tokens, the inputs have 2 in [4, 4, 4, 4]; cut both"
        " alike",
    ),
    "an axis of no slices": (
        lambda: pp.microbatch(INPUTS, 3, axis=2),
        "axis: got 2 without slices, of which it is the axis; leave it out",
    ),
    "another number": (
        lambda: _step()(PARAMS, *map(pp.Microbatches, cut(2))),
        "inputs: got 6 microbatches, the schedule has 12",
    ),
    "a carry in one piece": (
        lambda: _step()(PARAMS, *BATCH, carry=dict.fromkeys(range(STAGES), INPUTS)),
        "of type Tensor, expected ppfunc.Microbatches of a tree for each of the 3",
    ),
    "carries of some stages": (
        lambda: _step()(PARAMS, *BATCH, carry={0: pp.microbatch(INPUTS, 3)}),
        "carry: got the stages [0], this process runs [0, 1",
    ),
    "carries of too few sequences": (
        lambda: _step()(PARAMS, *BATCH, carry=dict.fromkeys(range(STAGES), pp.microbatch(INPUTS, 2))),
        "carry[0]: got Microbatches(2 of float64[3,16,8]), expected ppfunc.Microbatches of a tree for each",
    ),
    "sequences in another number of slices": (
        lambda: _step()(PARAMS, *(pp.microbatch(part, 6, slices=2) for part in (INPUTS, TARGETS))),
        "inputs: got sequences in 2 slices, the schedule 'seq1f1b' has 4; ppfunc.microbatch(inputs, 3,",
    ),
    "targets of other rows": (
        lambda: _step()(PARAMS, BATCH[0], pp.microbatch(TARGETS[:SEQUENCES], SEQUENCES, slices=4)),
        "targets: got 1 rows in slices of [4, 4, 4, 4] tokens, the inputs have 2 in [4, 4, 4, 4]; cut both",
    ),
    "targets in other slices": (
        lambda: _step()(PARAMS, BATCH[0], pp.microbatch(TARGETS, SEQUENCES, slices=[1, 7, 4, 4])),
        "targets: got 2 rows in slices of [1, 7, 4, 4] tokens",
    ),
    "a carry of stages with replicas": (
        lambda: pp.value_and_grad(
            [linear_attention] * 2, loss_fn, replace(dualpipe(2, 8), slices=2), return_carry=True
        ),
        "return_carry: got True, and stages of the schedule 'dualpipe' have replicas",
    ),
    "a carry of another stage": (
        lambda: _step()(PARAMS, *BATCH, carry={9: pp.microbatch(INPUTS, 3)}),
        "carry: got the stages [9]",
    ),
    "a carry without slices": (
        lambda: pp.value_and_grad([lambda p, x: x @ p["q"]] * STAGES, loss_fn, pp.gpipe(STAGES, 3))(
            PARAMS, INPUTS, TARGETS, carry={0: pp.microbatch(INPUTS, 3)}
        ),
        "carry: got one, and the schedule 'gpipe' has no slices; leave it out",
    ),
    "no carry returned": (
        lambda: _step(lambda p, x, c: x @ p["q"])(PARAMS, *BATCH),
        "it returns no carry, but the schedule has slices: return Output(y, carry=tree), or carry=()",
    ),
    "a carry returned without slices": (
        lambda: pp.value_and_grad(
            [lambda p, x: linear_attention(p, x, None)] * STAGES, loss_fn, pp.gpipe(STAGES, 3)
        )(PARAMS, INPUTS, TARGETS),
        "it returns a carry, but the schedule has no slices: take one of slices, such as seq1f1b",
    ),
    "a carry asked for without slices": (
        lambda: pp.value_and_grad(
            [linear_attention] * STAGES, loss_fn, pp.gpipe(STAGES, 3), return_carry=True
        ),
        "return_carry: got True, and the schedule 'gpipe' has no slices; leave it out",
    ),
    "a stage that takes none": (
        lambda: _step(lambda p, x: x @ p["q"])(PARAMS, *BATCH),
        "with one argument more for a carry of slices",
    ),
    "an ensemble": (
        lambda: pp.value_and_grad(
            *pp.ensemble([linear_attention] * STAGES, loss_fn), seq1f1b(STAGES, SEQUENCES, 4), loss_shape=(2,)
        )(PARAMS, *BATCH),
        "stages[0]: got a function of ppfunc.ensemble(carry=False), which knows no carry, and the schedule"
        " 'seq1f1b' has slices",
    ),
    "gradients of samples": (
        lambda: pp.per_sample_grad(
            [linear_attention] * STAGES, loss_fn, seq1f1b(STAGES, SEQUENCES, 4), samples=2
        )(PARAMS, *BATCH),
        "stages[0]: got a function of ppfunc.per_sample_grad, which knows no carry",
    ),
    "a first carry of another form": (
        lambda: _step()(PARAMS, *BATCH, carry=dict.fromkeys(range(STAGES), pp.microbatch(INPUTS, 3))),
        "x = Carried(x=float64[2,4,8] no grad, carry=float64[2,16,8] no grad)",
    ),
}  # fmt: skip


def _step(cell=linear_attention):
    return pp.value_and_grad([cell] * STAGES, loss_fn, seq1f1b(STAGES, SEQUENCES, 4))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_anything_runs(mistake):
    run, told = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, pp.StageError)) as error:
        run()
    assert told in str(error.value)


@pytest.mark.parametrize("slices", [1, 4, [5, 8, 3]], ids=str)
def test_slices_are_joined_to_what_was_cut(slices):
    assert same_bits(cut(slices)[0].join(), INPUTS)
    assert same_bits(cut(slices)[0].map(torch.neg).join(), -INPUTS)
    k = slices if isinstance(slices, int) else len(slices)
    run = pp.evaluate([cached_attention] * STAGES, None, seq1f1b(STAGES, SEQUENCES, k), return_outputs=True)
    y = INPUTS
    for s in range(STAGES):
        y = cached_attention(PARAMS[s], y, None).y
    found = run(PARAMS, cut(slices)[0])
    close(found.join(axis=1) if k > 1 else found.join(), y)
    if k > 1:
        with pytest.raises(ValueError, match="got slices alone; give their axis of tokens, axis=1, too"):
            found.join()
    with pytest.raises(ValueError, match="got an axis alone; give slices=k"):
        pp.microbatch(INPUTS, SEQUENCES).join(axis=1)
    with pytest.raises(ValueError, match="slices: got 5, expected a divisor of the 3 microbatches"):
        pp.microbatch(INPUTS, SEQUENCES).join(slices=5, axis=1)


def test_numbers_of_a_batch_are_those_of_each_slice_and_what_has_no_tokens_is_refused():
    batch = {"x": INPUTS, "scale": 2, "name": "a"}
    parts = pp.microbatch(batch, SEQUENCES, slices=[10, 6])
    assert [(part["x"].shape[1], part["scale"], part["name"]) for part in parts][:2] == [
        (10, 2, "a"),
        (6, 2, "a"),
    ]
    with pytest.raises(ValueError, match=r"batch: got ppfunc.replicated\(x\) or a mask of attention"):
        pp.microbatch((INPUTS, pp.replicated(TARGETS)), SEQUENCES, slices=2)


@pytest.mark.parametrize(
    "slices, axis, told",
    [
        (5, 1, "batch: got 16 tokens in axis 1 of the shape (2, 16, 8), and slices = 5, expected a divisor"),
        ([9, 8], 1, "batch: got 16 tokens in axis 1"),
        ([16, 0], 1, "slices = 0, expected an integer of at least 1"),
        (0, 1, "slices = 0, expected an integer of at least 1"),
        (4, 3, "batch: got the shape (2, 16, 8), which has no axis 3 of tokens to cut"),
        (4, 0, "axis = 0, expected an integer of at least 1"),
        ([], 1, "slices: got [], expected their number, or a list of lengths"),
        ([True] * 16, 1, "slices = True, expected an integer of at least 1"),
        ("4", 1, "slices: got '4', expected their number, or a list of lengths"),
        (True, 1, "slices = True, expected an integer of at least 1"),
        (4, "t", "axis = 't', expected an integer of at least 1"),
    ],
)
def test_slices_that_do_not_make_up_a_sequence_are_refused(slices, axis, told):
    with pytest.raises((ValueError, TypeError)) as error:
        pp.microbatch(INPUTS, SEQUENCES, slices=slices, axis=axis)
    assert told in str(error.value)

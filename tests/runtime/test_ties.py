"""Tied parameters: one parameter in several stages, with the sum of their gradients at each."""

from __future__ import annotations

import pytest
import torch

import ppfunc as pp
from ppfunc.runtime.ports.protocols import Collective
from ppfunc.stage.tree import tree_map
from tests.models import mlp, mlp_params, normal, squared
from tests.network.simulated import Simulated

D, V, M = 4, 8, 4
TIED = {"embedding": [(0, "table.weight"), (3, "head")]}
SCHEDULES = {
    "1f1b": lambda ranks: pp.one_f_one_b(4, M) if ranks == 4 else pp.looped_bfs(ranks, M, 4 // ranks),
    "zbv": lambda ranks: pp.zbv(ranks, M),
    "dualpipe": lambda ranks: pp.dualpipe(4, 2 * M),
    "dualpipev": lambda ranks: pp.dualpipev(ranks, 2 * ranks),
}


def first(params, tokens):
    return mlp(params["block"], params["table"]["weight"][tokens])


def last(params, x):
    return mlp(params["block"], x) @ params["head"].T


def stages_of(n):
    return [first, *[mlp] * (n - 2), last]


def problem(n=4, m=2 * M):
    table = normal(V, D, seed=1)
    blocks = {s: mlp_params(D, seed=10 * s) for s in range(n)}
    params = {s: blocks[s] for s in range(1, n - 1)}
    params[0] = {"table": {"weight": table}, "block": blocks[0]}
    params[n - 1] = {"head": table.clone(), "block": blocks[n - 1]}
    tokens = torch.randint(V, (3 * m, 2), generator=torch.Generator().manual_seed(2))
    return dict(sorted(params.items())), tokens, normal(3 * m, 2, V, seed=3)


def whole(params, tokens, targets, microbatches):
    """The loss and gradients of the model in one piece, whose head is the table."""
    n = len(params)

    def loss(params):
        params = params | {n - 1: params[n - 1] | {"head": params[0]["table"]["weight"]}}
        total = 0
        for x, target in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
            for fn, stage in zip(stages_of(n), params, strict=True):
                x = fn(params[stage], x)
            total = total + squared(x, target) / microbatches
        return total

    grads = torch.func.grad(loss)(params)
    grads[n - 1]["head"] = grads[0]["table"]["weight"]
    return loss(params), grads


def leaves(grads):
    return pp.stage.tree.tree_leaves(grads)


def close(grads, wanted):
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-13)
        for a, b in zip(leaves(grads), leaves(wanted), strict=True)
    )


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_the_gradient_is_the_sum_over_places_and_the_same_at_each(name):
    schedule = SCHEDULES[name](4)
    params, tokens, targets = problem()
    loss, grads = pp.value_and_grad(stages_of(4), squared, schedule, tied=TIED)(params, tokens, targets)
    want, wanted = whole(params, tokens, targets, schedule.microbatches)
    torch.testing.assert_close(loss, want)
    assert close(grads, wanted)
    assert torch.equal(grads[0]["table"]["weight"], grads[3]["head"])
    assert grads[0]["table"]["weight"].data_ptr() != grads[3]["head"].data_ptr()


def test_gradients_of_frozen_places_are_not_exchanged(monkeypatch):
    exchanged, (params, tokens, targets) = [], problem()
    monkeypatch.setattr(Collective, "all_reduce_in_order", lambda _, rows, owners: exchanged.append(rows))
    frozen = {0: {"table": False, "block": True}, 3: {"head": False, "block": True}}
    step = pp.value_and_grad(stages_of(4), squared, SCHEDULES["1f1b"](4), tied=TIED, trainable=frozen)
    _, grads = step(params, tokens, targets)
    assert not exchanged and not grads[0]["table"]["weight"].any() and not grads[3]["head"].any()


def in_processes(rank, ranks, name):
    schedule = SCHEDULES[name](ranks)
    n = len(set(schedule.model_stages))
    params, tokens, targets = problem(n)
    tied = {"embedding": [(n - 1, "head"), (0, "table.weight")]}
    _, wanted = whole(params, tokens, targets, schedule.microbatches)
    held = {s: params[s] for s in schedule.model_stages_of(rank)}
    loss, alone = pp.value_and_grad(stages_of(n), squared, schedule, tied=tied)(params, tokens, targets)
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(stages_of(n), squared, schedule, transport, tied=tied)
        for _ in range(2):
            found, grads = step(held, tokens, targets)
            assert torch.equal(found, loss)
            assert all(
                torch.equal(a, b)
                for a, b in zip(leaves(grads), leaves({s: alone[s] for s in grads}), strict=True)
            )
            assert close(grads, {s: wanted[s] for s in grads})
        if rank == schedule.placement[n - 1]:
            held[n - 1] = held[n - 1] | {"head": held[n - 1]["head"] + 1e-9}
        with pytest.raises(pp.AgreementError, match="differ between|has other values"):
            step(held, tokens, targets)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_in_two_processes(two, name):
    two(in_processes, name)


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_four_processes(four, name):
    four(in_processes, name)


def interleaved(rank, ranks, transport, dtype):
    """Rank 0 holds the first and the third place of a parameter, rank 1 the second, fourth and fifth."""
    params, schedule, tied = interleaved_problem(dtype)
    step = pp.value_and_grad([twice] * 4, wide_squared, schedule, transport, tied=tied)
    x = normal(3 * M, D, seed=9).to(dtype)
    return step({s: params[s] for s in schedule.model_stages_of(rank)}, x, x)[1]


def interleaved_problem(dtype):
    w = (normal(D, D) / D).to(dtype)
    params = {s: {"a": w.clone(), "b": normal(D, D, seed=s + 5).to(dtype) / D} for s in range(4)}
    params[3]["b"] = w.clone()
    places = [(0, "a"), (1, "a"), (2, "a"), (3, "a"), (3, "b")]
    return params, pp.looped_bfs(2, M, 2), {"w": places}


def twice(p, x):
    return torch.tanh(x @ p["a"] @ p["b"])


def wide_squared(y, target):
    return (y - target).abs().square().mean().double()


def in_two(rank, ranks, dtype):
    with pp.P2P(timeout=60) as transport:
        grads = interleaved(rank, ranks, transport, dtype)
    require_same_sums(grads, dtype)


def require_same_sums(grads, dtype):
    params, schedule, tied = interleaved_problem(dtype)
    x = normal(3 * M, D, seed=9).to(dtype)
    _, alone = pp.value_and_grad([twice] * 4, wide_squared, schedule, tied=tied)(params, x, x)
    for s, tree in grads.items():
        assert all(torch.equal(tree[leaf], alone[s][leaf]) for leaf in tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_sums_have_the_same_bits_in_any_number_of_processes(two, dtype):
    """Sums of floats depend on their order: it is that of the stages, wherever these are."""
    two(in_two, dtype)
    network = Simulated(2, seed=0)
    for result in network.run(lambda rank, transport: interleaved(rank, 2, transport, dtype)):
        assert result.error is None
        require_same_sums(result.value, dtype)


def test_values_that_differ_in_one_process_are_told():
    params, tokens, targets = problem()
    params[3]["head"][0, 0] += 1e-9
    with pytest.raises(
        pp.AgreementError, match=r"tied\['embedding'\] has other values in stage 0 than in stage 3"
    ):
        pp.value_and_grad(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED)(params, tokens, targets)
    with pytest.raises(pp.AgreementError, match="has other values"):
        pp.evaluate(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED)(params, tokens, targets)


def test_parameters_that_share_memory_are_declared():
    params, tokens, targets = problem()
    params[3]["head"] = params[0]["table"]["weight"]
    with pytest.raises(
        ValueError, match=r"params\[0\] 'table.weight' and params\[3\] 'head' share memory; declare it"
    ):
        pp.value_and_grad(stages_of(4), squared, pp.one_f_one_b(4, M))(params, tokens, targets)
    _, grads = pp.value_and_grad(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED)(
        params, tokens, targets
    )
    assert close(grads, whole(params, tokens, targets, M)[1])


def test_a_trainer_is_given_parameters_that_share_memory_as_tied_too():
    """Each place would be updated by itself, and what was one weight would be two."""
    params, tokens, targets = problem()
    params[3]["head"] = params[0]["table"]["weight"]
    apart = pp.Trainer(stages_of(4), squared, pp.one_f_one_b(4, M), pp.optim.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"params\[0\] 'table.weight' and params\[3\] 'head' share memory; declare it"
    ):
        apart.init(params)
    tied = pp.Trainer(stages_of(4), squared, pp.one_f_one_b(4, M), pp.optim.sgd(0.1), tied=TIED)
    state, _ = tied.step(tied.init(params), tokens, targets)
    assert torch.equal(state.params[0]["table"]["weight"], state.params[3]["head"])


DECLARE, COPY = "share memory; declare it", "share memory; give each a copy of its own"


def sharing():
    """Parameters of two stages that share memory, and the mend."""
    w, memory = normal(D, D), normal(8)
    return {
        "one tensor": (dict.fromkeys((0, 1), w), DECLARE),
        "one complex tensor": (dict.fromkeys((0, 1), w.to(torch.complex128)), DECLARE),
        "a transposed view": ({0: w, 1: w.t()}, COPY),
        "parts that overlap": ({0: memory[:5], 1: memory[4:]}, COPY),
    }


@pytest.mark.parametrize("what", sharing())
def test_memory_that_is_shared_is_seen_in_the_first_step_and_in_a_later_one(what):
    def stage(p, x):
        return torch.tanh((x * p.sum()).abs())

    shared, told = sharing()[what]
    apart, x = {s: p.clone() for s, p in shared.items()}, normal(3 * M, D)
    step = pp.value_and_grad([stage] * 2, squared, pp.gpipe(2, M))
    for _ in range(2):
        for given in (shared, shared):
            with pytest.raises(ValueError, match=told):
                step(given, x, x)
        before = step(apart, x, x)
    assert all(map(torch.equal, leaves(step(apart, x, x)), leaves(before)))


def test_leaves_of_one_stage_share_memory_unless_one_is_tied_and_neighbours_share_none():
    memory, x = normal(2 * D), normal(3 * M, D)
    params = {0: {"a": memory[:D], "b": memory[:D]}, 1: {"c": memory[D:]}}
    stages = [lambda p, x: torch.tanh(x * p["a"] * p["b"]), lambda p, x: x * p["c"]]
    _, grads = pp.value_and_grad(stages, squared, pp.gpipe(2, M))(params, x, x)
    assert torch.equal(grads[0]["a"], grads[0]["b"]) and grads[1]["c"].any()
    params[1]["c"], tied = memory[:D].clone(), {"w": [(0, "a"), (1, "c")]}
    with pytest.raises(ValueError, match=r"params\[0\] 'a' and params\[0\] 'b' share memory"):
        pp.value_and_grad(stages, squared, pp.gpipe(2, M), tied=tied)(params, x, x)


def test_tangents_may_be_one_tensor_and_parameters_may_not():
    w, x = {s: normal(D, D, seed=s) for s in range(2)}, normal(3 * M, D)
    same, apart = (
        torch.ones(D, D, dtype=torch.float64),
        {s: torch.ones(D, D, dtype=torch.float64) for s in range(2)},
    )
    fns = [lambda p, x: torch.tanh(x @ p)] * 2
    step = pp.hvp(fns, squared, pp.gpipe(2, M))
    shared = step(w, {0: same, 1: same}, x, x)
    assert all(torch.equal(a, b) for a, b in zip(leaves(shared), leaves(step(w, apart, x, x)), strict=True))
    with pytest.raises(ValueError, match=DECLARE):
        pp.hvp(fns, squared, pp.gpipe(2, M))({0: w[0], 1: w[0]}, apart, x, x)


def test_two_leaves_of_one_name_are_not_confused():
    def first_of(p, x):
        return x @ p["a.b"] + x @ p["a"]["b"]

    w, x = torch.eye(D, dtype=torch.float64), normal(3 * M, D)
    params = {0: {"a.b": w, "a": {"b": w.clone()}}, 1: {"a.b": w.clone(), "a": {"b": w.clone()}}}
    with pytest.raises(ValueError, match="has 2 leaves 'a.b'"):
        pp.value_and_grad([first_of] * 2, squared, pp.gpipe(2, M), tied={"e": [(0, "a.b"), (1, "a.b")]})(
            params, x, x
        )


def test_integers_may_be_tied_in_second_derivatives_too():
    params = {s: {"w": normal(D, D, seed=s), "n": torch.tensor(2)} for s in range(2)}
    direction = {s: {"w": torch.ones(D, D, dtype=torch.float64), "n": None} for s in range(2)}
    x, tied = normal(3 * M, D), {"n": [(0, "n"), (1, "n")]}
    fns = [lambda p, x: torch.tanh(x @ p["w"]) * p["n"]] * 2
    with_tie, without = (
        pp.hvp(fns, squared, pp.gpipe(2, M), tied=t)(params, direction, x, x) for t in (tied, None)
    )
    assert all(torch.equal(a, b) for a, b in zip(leaves(with_tie), leaves(without), strict=True))
    params[1]["n"] = torch.tensor(3)
    with pytest.raises(pp.AgreementError, match="has other values"):
        pp.hvp(fns, squared, pp.gpipe(2, M), tied=tied)(params, direction, x, x)


def test_a_place_alone_under_a_transform_is_refused():
    w, x = normal(D, D), normal(3 * M, D)
    step = pp.value_and_grad(
        [lambda p, x: x @ p] * 2,
        squared,
        pp.gpipe(2, M),
        tied={"e": [(0, ""), (1, "")]},
        engine=pp.engines.functional,
    )
    for mapped in (lambda a: step({0: a, 1: w}, x, x)[0], lambda a: step({0: w, 1: a}, x, x)[0]):
        with pytest.raises((ValueError, pp.PipelineError), match="only; apply it to both"):
            torch.func.vmap(mapped)(torch.stack([w, w]))


def test_two_places_in_one_stage_and_three_in_all():
    def doubled(params, x):
        return x @ params["a"] + x @ params["b"]

    def single(params, x):
        return x @ params["a"]

    w, x = normal(D, D), normal(3 * M, D, seed=1)
    params = {0: {"a": w, "b": w.clone()}, 1: {"a": w.clone()}}
    tied = {"w": [(0, "b"), (1, "a"), (0, "a")]}
    _, grads = pp.value_and_grad([doubled, single], squared, pp.gpipe(2, M), tied=tied)(params, x, x)
    mean = lambda w: sum(squared(x @ (2 * w) @ w, x) for x in x.chunk(M)) / M  # noqa: E731
    want = torch.func.grad(mean)(w)
    for found in (grads[0]["a"], grads[0]["b"], grads[1]["a"]):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)


def test_gradients_of_each_microbatch_are_summed_over_places():
    params, tokens, targets = problem()
    _, grads = pp.value_and_grad(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED, per_microbatch=True)(
        params, tokens, targets
    )
    _, summed = pp.value_and_grad(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED)(
        params, tokens, targets
    )
    torch.testing.assert_close(grads[3]["head"].sum(0), summed[3]["head"])


def test_second_derivatives():
    params, tokens, targets = problem()
    direction = {s: tree_map(torch.ones_like, tree) for s, tree in params.items()}
    step = pp.hvp(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED)
    result = step(params, direction, tokens, targets)
    loss, slope, grads, products = result.loss, result.slope, result.grads, result.products
    want, wanted = whole(params, tokens, targets, M)
    torch.testing.assert_close(loss, want)
    assert close(grads, wanted)

    def moved(t):
        shifted = {s: pp.stage.tree.tree_map(lambda p, v: p + t * v, params[s], direction[s]) for s in params}
        return whole(shifted, tokens, targets, M)

    (above, up), (below, down) = moved(1e-5), moved(-1e-5)
    torch.testing.assert_close(slope, (above - below) / 2e-5, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        products[3]["head"], (up[3]["head"] - down[3]["head"]) / 2e-5, rtol=1e-6, atol=1e-6
    )
    assert torch.equal(products[3]["head"], products[0]["table"]["weight"])
    assert torch.equal(
        pp.jvp(stages_of(4), squared, pp.one_f_one_b(4, M), tied=TIED)(params, direction, tokens, targets)[1],
        slope,
    )


@pytest.mark.parametrize(
    ("tied", "text"),
    [
        ([(0, "a")], "expected {name:"),
        ({"e": [(0, "table.weight")]}, "at least two places"),
        ({"e": ["table.weight", "head"]}, "expected places, such as"),
        ({"e": [(0, "table.weight"), (7, "head")]}, "does not exist; the stages are"),
        ({"e": [(0, "table.weight"), (0, "table.weight")]}, "is named twice"),
        ({"e": [(0, "table"), (3, "head")]}, r"has no leaf 'table'; it has .*'table.weight'"),
        ({"e": [(0, "table.weight"), (3, "block.bias")]}, "tied parameters have one shape and dtype"),
    ],
)
def test_what_cannot_be_tied_is_refused_by_name(tied, text):
    params, tokens, targets = problem()
    with pytest.raises((TypeError, ValueError), match=text):
        pp.value_and_grad(stages_of(4), squared, pp.one_f_one_b(4, M), tied=tied)(params, tokens, targets)


def forms_differ(rank, ranks):
    params, tokens, targets = problem(2)
    held = {rank: params[rank]}
    if rank:
        held[1] = held[1] | {"head": held[1]["head"].float()}
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(
            [first, last],
            squared,
            pp.one_f_one_b(2, M),
            transport,
            tied={"e": [(0, "table.weight"), (1, "head")]},
        )
        with pytest.raises(Exception, match="the tied parameters 'e' differ|differ|dtype"):
            step(held, tokens, targets)


def test_other_forms_in_other_processes_are_told(two):
    two(forms_differ)


def other_ties(rank, ranks):
    params, tokens, targets = problem(2)
    tied = {"e": [(0, "table.weight"), (1, "head")]} if rank else None
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad([first, last], squared, pp.one_f_one_b(2, M), transport, tied=tied)
        with pytest.raises(pp.AgreementError):
            step({rank: params[rank]}, tokens, targets)


def test_ranks_tie_the_same(two):
    two(other_ties)

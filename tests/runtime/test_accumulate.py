"""Gradients are added up while the backward makes them: the same bits, and the memory of a few."""

from __future__ import annotations

import pytest
import torch

import ppfunc as pp
from ppfunc.stage.engines.tracing import cut
from ppfunc.stage.tree import tree_leaves
from tests.live import Live
from tests.models import normal, squared

WIDTH, LAYERS, M = 16, 5, 4
SIZE = 8 * WIDTH * WIDTH  # bytes of the weight of a layer


def stage():
    """A new function, so that its programs are made anew; its first leaf is used twice, one more is none of
    the gradient's.
    """

    def chain(params, x):
        for w in params["w"]:
            x = torch.tanh(x @ w + params["b"])
        return x @ params["w"][0] + params["frozen"]

    return chain


def problem(schedule):
    params = {
        s: {
            "w": [normal(WIDTH, WIDTH, seed=10 * s + n) / 4 for n in range(LAYERS)],
            "b": normal(WIDTH),
            "frozen": torch.tensor(2),
        }
        for s in set(schedule.model_stages)
    }
    return params, normal(2 * M, WIDTH, seed=8), normal(2 * M, WIDTH, seed=9)


def in_parts(monkeypatch, run):
    """What is made with all gradients at once, two at once, and one after the other."""
    made = []
    for size in (2**20, 2 * SIZE, 1):
        monkeypatch.setattr(cut, "_TOGETHER", size)
        made.append(run())
    return [tree_leaves(one) for one in made]


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
def test_microbatches_whose_gradients_come_in_other_parts(monkeypatch):
    """A row more, and another path: leaves are used in another order, or not at all."""

    def crooked():
        def run(params, x):
            names = ("a", "b", "c") if len(x) == 2 else ("c", "a")
            for name in names:
                x = torch.tanh(x @ params[name])
            return x

        return run

    params = {0: {name: normal(WIDTH, WIDTH, seed=n) / 4 for n, name in enumerate("abc")}}
    sizes = [3, 2, 2, 3, 2]
    batch = [pp.Microbatches(list(normal(sum(sizes), WIDTH, seed=seed).split(sizes))) for seed in (1, 2)]
    for schedule in (pp.gpipe(1, 5), pp.zb_h1(1, 5)):
        whole, *others = in_parts(
            monkeypatch,
            lambda schedule=schedule: pp.value_and_grad([crooked()], squared, schedule)(params, *batch),
        )
        assert all(all(map(torch.equal, whole, parts)) for parts in others)


@pytest.mark.parametrize("schedule", [pp.gpipe(1, M), pp.zb_h1(1, M)], ids=["whole", "I and W apart"])
def test_a_step_holds_few_gradients_beside_their_sums(schedule, monkeypatch):
    """Those of a layer, however many may be added up at once: all would be as much as their sums."""
    params, inputs, targets = problem(schedule)
    most = []

    def run():
        step = pp.value_and_grad([stage()], squared, schedule)
        step(params, inputs, targets)
        with Live() as live:
            step(params, inputs, targets)
        most.append(live.most)
        return ()

    in_parts(monkeypatch, run)
    few = 3 * SIZE + (M * LAYERS + 8) * 2 * 8 * WIDTH * 2  # and activations
    assert all(LAYERS * SIZE < each < LAYERS * SIZE + few for each in most)


@pytest.mark.parametrize("schedule", [pp.gpipe(1, 1), pp.zb_h1(1, 1)], ids=["whole", "I and W apart"])
def test_a_backward_frees_what_it_has_used(schedule):
    """What lives at its last operator but few does not grow with the number of layers, whose activations its
    forward has kept.
    """

    def kept(layers):
        def deep(params, x):
            for _ in range(layers):
                x = torch.tanh(x * params)
            return x

        x = normal(64, 64)
        step = pp.value_and_grad([deep], squared, schedule)
        step({0: normal(64)}, x, x)
        with Live() as live:
            step({0: normal(64)}, x, x)
        return live.most, live.after["tanh_backward"]

    (few, last), (many, last_of_many) = kept(5), kept(20)
    assert many - few > 15 * 8 * 64 * 64 * 0.9
    assert last_of_many == last


def crossed(params, x):
    """Of its gradients some are fresh, others are y's own, the same twice, a view, or one element for all."""
    y = torch.tanh(x @ params["w"] + params["b"]) @ (params["d"] + params["e"])
    return y + params["f"].sum(0) + params["c"] * x + params["g"].t()


ENGINES = {
    "graph": {},
    "full": {"engine": pp.engines.graph(remat="full")},
    "wider sums": {"sum_dtype": torch.float64},
    "microbatches beside each other": {"per_microbatch": True},
    "functional": {"engine": pp.engines.functional},
    "eager": {"engine": pp.engines.eager},
    "tied": {"tied": {"w": [(0, "w"), (1, "d")], "c": [(0, "c"), (0, "g"), (1, "c")]}},
}
BUILDERS = {
    "gpipe": pp.gpipe,
    "1f1b": pp.one_f_one_b,
    "zb_h1": pp.zb_h1,
    "dualpipe": pp.dualpipe,
    "zbv": pp.zbv,
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("size", [1, 2**20])
def test_nothing_but_the_sums_is_written(build, options, size, monkeypatch):
    """The gradients are those of all microbatches, whatever is their memory; results of earlier steps, the
    parameters and the batch stay.
    """
    monkeypatch.setattr(cut, "_TOGETHER", size)
    schedule = build(2, 4)
    stages = sorted(set(schedule.model_stages))
    shapes = {"b": (WIDTH,), "f": (3, WIDTH)}
    params = {
        s: {k: normal(*shapes.get(k, (WIDTH, WIDTH)), seed=10 * s + n) / 4 for n, k in enumerate("wbcdefg")}
        for s in stages
    }
    for (s, k), *others in options.get("tied", {}).values():
        for t, other in others:
            params[t][other] = params[s][k].clone()
    inputs, targets = (normal(4 * WIDTH, WIDTH, seed=seed) for seed in (8, 9))
    held = [params, inputs, targets]
    copies = pp.stage.tree.tree_map(torch.clone, held)

    def made(**more):
        step = pp.value_and_grad(
            [crossed] * len(stages), squared, schedule, argnums=(0, 1), **(options | more)
        )
        return step(params, inputs, targets), step(params, targets, inputs), step

    first, second, step = made()
    kept = pp.stage.tree.tree_map(torch.clone, [first, second])
    step(params, inputs, targets)
    with monkeypatch.context() as patch:
        patch.setattr(cut, "_is_fresh", lambda *_: False)  # all are borrowed
        wanted = made()[:2]
    for one, other, again in zip(*map(tree_leaves, ([first, second], wanted, kept)), strict=True):
        assert torch.equal(one, other) and torch.equal(one, again)
    assert all(map(torch.equal, tree_leaves(held), tree_leaves(copies)))
    memory = [t.untyped_storage().data_ptr() for t in tree_leaves([first, second, held])]
    assert len(set(memory)) == len(memory)

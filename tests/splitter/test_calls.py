"""Calls of one model that differ: inputs that some microbatches have not, and values that steer shapes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ppfunc as pp
from ppfunc.stage import StageError

V, D, P, T, M, IMAGE = 11, 4, 3, 5, 4, 7


class Images(nn.Module):
    """Text with images in it, as in LLaVA: features take the places of a token; a router counts."""

    def __init__(self, scatter: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scatter = scatter
        self.embed = nn.Embedding(V, D)
        self.vision = nn.ModuleList([nn.Linear(P, P), nn.Linear(P, D)])
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids, pixels=None, sizes=None):
        h = self.embed(ids)
        if pixels is not None:
            features = self.vision[1](self.vision[0](pixels).tanh())
            features = features * (1 if sizes is None else sum(sizes))
            if self.scatter:
                h = h.masked_scatter((ids == IMAGE).unsqueeze(-1), features)
            else:
                h = h.clone()
                h[ids == IMAGE] = features
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(h)


class Grids(nn.Module):
    """Images cut into patches, as in Qwen2-VL: an input of integers says how many rows each has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.vision, self.head = nn.Embedding(V, D), nn.Linear(P, D), nn.Linear(D, V)
        self.double()

    def forward(self, ids, pixels, grid_thw):
        rows = torch.cat([torch.arange(h * w).repeat(t) for t, h, w in grid_thw.tolist()])
        ends = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0]).cumsum(0)
        features = self.vision(pixels * rows[:, None])
        images = [part.mean(0) for part in features.tensor_split(ends[:-1].tolist())]
        return self.head((self.embed(ids) + sum(images)).tanh())


def loss_fn(y, target):
    return F.cross_entropy(y.flatten(0, -2), target.flatten())


@cache
def texts():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(IMAGE, (M, 2, T), generator=generator)
    ids[0, 0, :2] = ids[3, 1, 4] = IMAGE
    return ids, torch.randint(V, (M, 2, T), generator=generator)


def with_images():
    ids, _ = texts()
    pixels = torch.randn(3, P, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return [
        {"ids": ids[0], "pixels": pixels[:2]},
        {"ids": ids[1]},
        {"ids": ids[2], "pixels": None},
        {"ids": ids[3], "pixels": pixels[2:], "sizes": [1, 2, 3]},
    ]


def with_grids():
    ids, _ = texts()
    grids = [[[1, 2, 2]], [[1, 2, 2], [2, 1, 3]], [[1, 2, 2]], [[1, 3, 3]]]
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "ids": row,
            "pixels": torch.randn(
                sum(t * h * w for t, h, w in grid), P, dtype=torch.float64, generator=generator
            ),
            "grid_thw": torch.tensor(grid),
        }
        for row, grid in zip(ids, grids, strict=True)
    ]


def whole(model, calls, targets):
    """Return the loss of the whole model, and the gradients by name."""
    loss = sum(loss_fn(model(**call), t) for call, t in zip(calls, targets, strict=True)) / M
    names, leaves = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


def require_whole(model, calls, targets, loss, grads):
    want, wanted = whole(model, calls, targets)
    torch.testing.assert_close(loss, want, rtol=0, atol=1e-14)
    for tree in grads.values():
        for name, gradient in tree.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-14)


EXAMPLES = {
    "one": (lambda calls: calls[0], ["blocks.0", "blocks.2"]),
    "several": (pp.Microbatches, ["blocks.0", "blocks.2"]),
    "cut in what some have not": (pp.Microbatches, ["vision.1", "blocks.1"]),
    "text first": (lambda calls: pp.Microbatches(calls[1:]), ["vision.1", "blocks.1"]),
    "balanced": (pp.Microbatches, 3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", EXAMPLES)
def test_microbatches_with_and_without_an_input(name):
    (example, at), calls, (_, targets) = EXAMPLES[name], with_images(), texts()
    model = Images(scatter=name == "several")
    parts = pp.split(model, example(calls), at=at)
    assert {*parts.tied} == {"embed.weight"} and not parts.unused
    step = pp.value_and_grad(parts, loss_fn, pp.one_f_one_b(3, M))
    for turned in (calls, calls[::-1]):
        loss, grads = step(parts.params, pp.Microbatches(turned), pp.Microbatches(targets))
        require_whole(model, turned, targets, loss, grads)


@pytest.mark.parametrize("engine", ["functional", "eager"])
def test_engines_that_do_not_trace(engine):
    calls, (_, targets), model = with_images(), texts(), Images()
    parts = pp.split(model, calls[0], at=["blocks.1"])
    step = pp.value_and_grad(parts, loss_fn, pp.zbv(1, M), engine=getattr(pp.engines, engine))
    require_whole(
        model, calls, targets, *step(parts.params, pp.Microbatches(calls), pp.Microbatches(targets))
    )


def test_an_input_that_the_split_did_not_have():
    calls, (_, targets), model = with_images(), texts(), Images()
    parts = pp.split(model, calls[1], at=["blocks.1"])
    assert {*parts.unused} == {name for name, _ in model.named_parameters() if "vision" in name}
    step = pp.value_and_grad(parts, loss_fn, pp.gpipe(2, M))
    with pytest.raises(StageError, match=r"stage 0: it reads the parameter vision.0.weight .* at the split"):
        step(parts.params, pp.Microbatches(calls), pp.Microbatches(targets))
    with pytest.raises(
        StageError,
        match=r"called with \{'idx': int64\[2,5\]\}, where the split had \{'ids': int64\[2,5\]\}, it rai.*"
        r"one example of each form, ppfunc.split\(model, ppfunc.Microbatches\(\[...\]\)\)",
    ):
        step(parts.params, pp.Microbatches([{"idx": c["ids"]} for c in calls]), pp.Microbatches(targets))
    with pytest.raises(ValueError, match="args: got the examples .*; give dictionaries of keyword"):
        pp.split(model, pp.Microbatches([calls[0], calls[1]["ids"]]), at=["blocks.1"])


def grid_split(model):
    return pp.split(model, with_grids()[0], at=["head"], constants=["grid_thw"])


def test_values_that_steer_shapes():
    calls, (ids, targets), model = with_grids(), texts(), Grids()
    with pytest.raises(
        StageError,
        match=r"these are values of its input grid_thw\. Instead: where few values occur, say so,"
        r" ppfunc.split\(..., constants=\['grid_thw'\]\)",
    ):
        pp.split(model, calls[0], at=["head"])
    parts = grid_split(model)
    step = pp.value_and_grad(parts, loss_fn, pp.one_f_one_b(2, M))
    for _ in range(2):
        loss, grads = step(parts.params, pp.Microbatches(calls), pp.Microbatches(targets))
        require_whole(model, calls, targets, loss, grads)
    assert step.cache_info().misses == 1
    by_place = pp.split(model, tuple(calls[0].values()), at=["head"], constants=["grid_thw"])
    inputs = pp.Microbatches([tuple(call.values()) for call in calls])
    again = pp.value_and_grad(by_place, loss_fn, pp.one_f_one_b(2, M))
    assert torch.equal(again(by_place.params, inputs, pp.Microbatches(targets))[0], loss)
    # A whole batch has the same values in each microbatch.
    one, labels = torch.ones(1, 3, dtype=torch.int64), targets.flatten(0, 1)[:M]
    batch = {"ids": ids.flatten(0, 1)[:M], "pixels": calls[0]["pixels"], "grid_thw": one.repeat(M, 1)}
    cut = [{name: t.chunk(M)[m] for name, t in batch.items()} for m in range(M)]
    require_whole(model, cut, labels.chunk(M), *step(parts.params, batch, labels))
    shared = {**batch, "grid_thw": pp.replicated(one)}
    require_whole(model, cut, labels.chunk(M), *step(parts.params, shared, labels))
    batch["grid_thw"][-1] = 2
    with pytest.raises(ValueError, match="a constant of the split with other values in each microbatch"):
        step(parts.params, batch, labels)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["grid"], "constants: got 'grid', expected names of arguments of the model, which are ids, pixels"),
        ("grid_thw", "constants: got .*, expected a list of names"),
        (["pixels"], "constants: got a tensor of torch.float64, expected integers or flags with values"),
    ],
)
def test_names_of_constants_that_are_refused(names, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pp.split(Grids(), with_grids()[0], at=["head"], constants=names)


def rows_by_mask(model, ids):
    return model.head(model.embed(ids))[ids != IMAGE]


def test_rows_chosen_by_a_mask_are_named():
    model = Images()
    model.forward = lambda ids: rows_by_mask(model, ids)
    with pytest.raises(
        StageError, match="values of its input ids. Instead: keep all elements and weigh them"
    ):
        pp.split(model, texts()[0][0], at=["head"])


def in_processes(rank, ranks, kind):
    (_, targets), calls = texts(), with_images() if kind == "images" else with_grids()
    model = Images() if kind == "images" else Grids()
    parts = (
        pp.split(model, pp.Microbatches(calls), at=["vision.1"]) if kind == "images" else grid_split(model)
    )
    want, wanted = whole(model, calls, targets)
    schedule = pp.one_f_one_b(2, M)
    held = {s: parts.params[s] for s in schedule.model_stages_of(rank)}
    inputs = pp.Microbatches(calls) if rank == 0 else None
    labels = pp.Microbatches(targets) if rank == 1 else None
    with pp.P2P(timeout=60) as transport:
        loss, grads = pp.value_and_grad(parts, loss_fn, schedule, transport)(held, inputs, labels)
        require_whole(model, calls, targets, loss, grads)
        trainer = pp.Trainer(parts, loss_fn, schedule, pp.optim.sgd(0.5), transport)
        state = trainer.init(held)
        for _ in range(2):
            state, metrics = trainer.step(state, inputs, labels)
        torch.testing.assert_close(trainer.evaluate(state, inputs, labels) < loss, torch.tensor(True))
    assert metrics.loss < want
    names = dict(model.named_parameters())
    first = {name: names[name] - 0.5 * gradient for name, gradient in wanted.items()}
    again = torch.func.functional_call
    leaves = {name: t.detach().requires_grad_() for name, t in first.items()}
    twice = (
        sum(loss_fn(again(model, leaves, (), call), t) for call, t in zip(calls, targets, strict=True)) / M
    )
    slopes = dict(zip(leaves, torch.autograd.grad(twice, [*leaves.values()]), strict=True))
    for tree in state.params.values():
        for name, leaf in tree.items():
            torch.testing.assert_close(leaf, first[name].detach() - 0.5 * slopes[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["images", "grids"])
def test_in_processes(two, kind):
    two(in_processes, kind)


class Router(nn.Module):
    """A router whose bias only a rule outside changes, as in DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.register_buffer("bias", torch.zeros(D))
        self.double()

    def forward(self, x):
        h = self.first(x)
        return self.last(h * torch.sigmoid(h.detach() + self.bias))


def test_a_buffer_that_the_model_reads_is_state_where_that_is_asked():
    model, x = Router(), torch.randn(8, D, dtype=torch.float64)
    assert not pp.split(model, x[:2], at=["last"]).state
    parts = pp.split(model, x[:2], at=["last"], state=["*bias"])
    assert {s: [*tree] for s, tree in parts.state.items()} == {0: ["bias"]}
    trainer = pp.Trainer(
        parts, F.mse_loss, pp.gpipe(2, M), pp.optim.sgd(0.1),
        update_state=lambda stage, state: {name: t + 1 for name, t in state.items()},
    )  # fmt: skip
    state = trainer.init(parts.params, state=parts.state)
    target = torch.zeros(8, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(3):
        state, metrics = trainer.step(state, x, target)
        loss = F.mse_loss(model(x), target)
        torch.testing.assert_close(metrics.loss, loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.bias += 1
        assert torch.equal(state.stage_state[0]["bias"], model.bias) and n < 3
    with pytest.raises(TypeError, match="state: got .* expected a list of patterns"):
        pp.split(model, x[:2], at=["last"], state="*bias")
    with pytest.raises(
        ValueError, match=r"state: '\*.biases' is no name of a buffer .* reads, which are bias"
    ):
        pp.split(model, x[:2], at=["last"], state=["*.biases"])


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, labels=None):
        y = self.b(self.a(x))
        loss = None if labels is None else F.mse_loss(y, labels)
        return {"loss": loss, "y": y, "aux": 0.0, "flag": True, "name": "y", "dtype": y.dtype, "of": y.device}


def test_outputs_hold_numbers_flags_and_texts():
    model, x = Answers(), torch.randn(8, D)
    parts = pp.split(model, x[:2], at=["b"])
    seen = []

    def loss(y, target):
        seen.append((y["aux"], y["flag"], y["name"], y["dtype"], y["of"]))
        return F.mse_loss(y["y"], target) + y["aux"]

    for inputs, target in ((x, x), (pp.microbatch(x, M), pp.microbatch(x, M))):
        value, _ = pp.value_and_grad(parts, loss, pp.gpipe(2, M))(parts.params, inputs, target)
        torch.testing.assert_close(value, F.mse_loss(model(x)["y"], x).detach())
        outputs = pp.evaluate(parts, loss, pp.gpipe(2, M), return_outputs=True)
        found = outputs(parts.params, inputs, target).outputs
        rows = [found] if inputs is x else [*found]
        wanted = 0.0, True, "y", torch.float32, torch.device("cpu")
        assert all((y["aux"], y["flag"], y["name"], y["dtype"], y["of"]) == wanted for y in [*rows])
        assert seen[-1] == wanted


def test_a_model_that_returns_its_loss_needs_no_target():
    model, x = Answers(), torch.randn(8, D)
    inputs = {"x": x, "labels": x.flip(0)}
    parts = pp.split(model, {name: t[:2] for name, t in inputs.items()}, at=["b"])
    want = F.mse_loss(model(x)["y"], x.flip(0)).detach()
    value, _ = pp.value_and_grad(parts, lambda y, _: y["loss"], pp.gpipe(2, M))(parts.params, inputs)
    trainer = pp.Trainer(parts, lambda y, _: y["loss"], pp.gpipe(2, M), pp.optim.sgd(0.1))
    _, metrics = trainer.step(trainer.init(parts.params), inputs)
    for got in (value, metrics.loss, trainer.evaluate(trainer.init(parts.params), inputs)):
        torch.testing.assert_close(got.float(), want)
    with pytest.raises(StageError, match="the loss: .* targets are None. Instead: pass targets="):
        pp.value_and_grad(parts, lambda y, t: F.mse_loss(y["y"], t), pp.gpipe(2, M))(parts.params, inputs)

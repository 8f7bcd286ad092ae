"""An output layer in parts of the vocabulary: the loss and gradients of the whole layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppfunc as pp
from ppfunc.schedule import Flow
from ppfunc.stage.tree import tree_leaves, tree_map
from tests.graphs import in_order
from tests.models import mlp, mlp_params, normal

D, V, CAP = 4, 11, 2.0
LOSSES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.2},
    "z": {"z_loss": 0.3},
    "all": {"label_smoothing": 0.1, "z_loss": 0.2, "ignore_index": 3},
}


def layer(params: Any, h: Tensor) -> Tensor:
    return CAP * torch.tanh(F.linear(h, params["weight"], params["bias"]) / CAP)


def embed(params: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, params["wte"]["weight"])


def whole_loss(
    logits: Tensor, target: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The loss of the whole logits, of each token by torch's cross entropy, then weighted."""
    labels, weights = target if isinstance(target, tuple) else (target, torch.ones(target.shape))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", **options)
    each = each.view(labels.shape) + z_loss * logits.logsumexp(-1).square()
    weights = weights.to(logits.dtype) * (labels != ignore_index)
    total = (each * weights).sum()
    return total / weights.sum() if reduction == "mean" else total


def batch(rows: int = 3, ignored: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(V, (2, rows, 5), generator=generator)
    if ignored is not None:
        labels[0, :2] = ignored
    return ids, labels


def params_of(dtype: torch.dtype = torch.float64, tied: bool = False) -> dict[int, Any]:
    weight = normal(V, D, seed=1, dtype=dtype)
    head = {
        "weight": weight if tied else normal(V, D, seed=2, dtype=dtype),
        "bias": normal(V, seed=3, dtype=dtype),
    }
    return {0: {"wte": {"weight": weight}}, 1: mlp_params(D, dtype=dtype), 2: head}


def run(model: Any, params: Any, x: Any, target: Any) -> Any:
    """Call the stages along the edges, without a schedule."""
    ys: list[Any] = []
    stages = range(len(model.stages))
    for stage, fn in enumerate(model.stages):
        into = [ys[a] for a, b in Flow(stages, range(1), model.edges).pairs if b == stage]
        taken = x if not into else into[0] if len(into) == 1 else tuple(into)
        ys.append(fn(params[stage], taken, *([target] if getattr(fn, "targeted", False) else [])))
    return model.loss_fn(ys[-1], target)


def whole(params: Any, x: Any, target: Any, **options: Any) -> Tensor:
    return whole_loss(layer(params[2], mlp(params[1], embed(params[0], x))), target, **options)


def near(got: Any, expected: Any, least: float = 1e-12) -> None:
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=least, atol=least)


STAGES = [embed, mlp, layer]
SIZES = {1: [11], 2: [6, 5], 3: [4, 4, 3], 4: [1, 5, 3, 2]}


@pytest.mark.parametrize("parts", SIZES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_derivatives_are_those_of_the_whole_layer(parts, name, weighted):
    options = LOSSES[name]
    model = pp.vocabulary_parallel(STAGES, SIZES[parts], pp.vocabulary_cross_entropy(**options))
    params, (ids, labels) = params_of(), batch(ignored=options.get("ignore_index", -100))
    target = (labels, normal(*labels.shape).abs()) if weighted else labels

    def in_parts(params: Any) -> Tensor:
        return run(model, model.cut(params), ids, target)

    def at_once(params: Any) -> Tensor:
        return whole(params, ids, target, **options)

    near(torch.func.grad_and_value(in_parts)(params), torch.func.grad_and_value(at_once)(params))
    moved = tree_map(lambda p: normal(*p.shape, seed=9), params)
    products = [torch.func.jvp(torch.func.grad(loss), (params,), (moved,)) for loss in (in_parts, at_once)]
    near(*products)


@pytest.mark.parametrize("parts", SIZES)
def test_cut_and_join_are_inverse_and_join_gives_gradients(parts):
    model = pp.vocabulary_parallel(STAGES, SIZES[parts], tied={"wte": [(0, "wte.weight"), (2, "weight")]})
    other = {"other": ((0, "wte.weight"), (1, "up"))}
    assert pp.vocabulary_parallel(STAGES, SIZES[parts], tied=other).tied == other
    params, (ids, labels) = params_of(tied=True), batch()
    cut = model.cut(params)
    near(model.join(cut), params, 0)
    assert len(model.tied) == parts
    for n in range(parts):
        (_, one), (stage, other) = model.tied[f"wte.{n}"]
        assert (one, other) == (f"wte.weight.{n}", "weight")
        assert cut[0]["wte"]["weight"][n].data_ptr() == cut[stage]["weight"].data_ptr()
    got = model.join(torch.func.grad(lambda p: run(model, p, ids, labels))(cut))
    near(got, torch.func.grad(lambda p: whole(p, ids, labels))(params))


def test_a_loss_of_ones_own_joins_what_its_parts_give():
    """The share of the largest logit, and its place."""

    def partial(logits, target, start, vocabulary):
        assert vocabulary == V
        largest, place = logits.max(-1)
        return largest, place + start, logits.logsumexp(-1)

    def join(parts, target):
        largest, places, normalisers = map(torch.stack, zip(*parts, strict=True))
        best = largest.argmax(0, keepdim=True)
        right = places.gather(0, best).squeeze(0) == target
        return (normalisers.logsumexp(0) - largest.gather(0, best).squeeze(0)).mean(), {"right": right}

    model = pp.vocabulary_parallel(STAGES, [6, 5], (partial, join))
    params, (ids, labels) = params_of(), batch()
    loss, aux = run(model, model.cut(params), ids, labels)
    logits = layer(params[2], mlp(params[1], embed(params[0], ids)))
    near(loss, -logits.log_softmax(-1).amax(-1).mean())
    assert torch.equal(aux["right"], logits.argmax(-1) == labels)


def test_bfloat16_has_statistics_in_float32():
    model = pp.vocabulary_parallel(STAGES, [6, 5])
    params, (ids, labels) = params_of(torch.bfloat16), batch()
    loss = run(model, model.cut(params), ids, labels)
    assert loss.dtype is torch.float32
    near(loss, whole(params, ids, labels), 1e-6)


def test_labels_and_weights_may_be_narrow():
    """Bytes do not hold the numbers of a large vocabulary, nor bfloat16 a sum of weights."""
    loss, rows = pp.vocabulary_cross_entropy(), 400
    logits, weights = normal(200, rows), torch.ones(200, dtype=torch.bfloat16)
    weights[::3] = 0.7
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        labels = torch.arange(200).remainder(127).to(dtype)
        parts = tuple(loss.partial(logits[:, a : a + 200], (labels, weights), a, rows) for a in (0, 200))
        wanted = whole_loss(logits, (labels.long(), weights.double()))
        near(loss.join(parts, (labels, weights)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_keeps_its_logits_once(dtype):
    """In float32, with a few numbers for each token."""
    tokens, rows = 64, 512
    partial, _ = pp.vocabulary_cross_entropy(label_smoothing=0.1, z_loss=0.1)
    logits = torch.zeros(tokens, rows, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        statistics = partial(logits, torch.zeros(tokens, dtype=torch.long), 0, rows)
    assert statistics[0].dtype is torch.float32
    assert tokens * rows * 4 <= sum(kept.values()) <= tokens * (rows + 16) * 4


def test_a_part_of_padding_gets_zeros():
    """A bias of minus infinity takes an entry out of the vocabulary."""
    params, (ids, labels) = params_of(), batch()
    params[2]["bias"][6:] = -torch.inf

    def linear(p: Any, h: Tensor) -> Tensor:
        return F.linear(h, p["weight"], p["bias"])

    def at_once(p: Any) -> Tensor:
        return whole_loss(linear(p[2], mlp(p[1], embed(p[0], ids))), labels % 6)

    model = pp.vocabulary_parallel([embed, mlp, linear], [6, 5])
    near(
        torch.func.grad_and_value(lambda p: run(model, model.cut(p), ids, labels % 6))(params),
        torch.func.grad_and_value(at_once)(params),
    )


def test_a_label_outside_the_vocabulary_is_not_silent():
    model = pp.vocabulary_parallel(STAGES, [6, 5])
    params, (ids, labels) = params_of(), batch()
    labels[0, 0] = V
    assert run(model, model.cut(params), ids, labels).isnan()
    labels[0, 0] = -100
    assert run(model, model.cut(params), ids, labels).isfinite()


REFUSED = {
    "parts: got 4 of type int, expected the rows of each part": lambda: pp.vocabulary_parallel(STAGES, 4),
    r"parts\[1\]": lambda: pp.vocabulary_parallel(STAGES, [4, 0]),
    "expected a plain tensor with 12 rows": lambda: pp.vocabulary_parallel(STAGES, [6, 6]).cut(params_of()),
    "stage 3 is missing": lambda: pp.vocabulary_parallel(STAGES, [6, 5]).join({2: params_of()[2]}),
    "label_smoothing": lambda: pp.vocabulary_cross_entropy(label_smoothing=1.5),
    "reduction": lambda: pp.vocabulary_cross_entropy(reduction="none"),
    "labels, a tensor of integers": lambda: run_with(torch.zeros(3, 5)),
    "target: got .*, expected labels, a tensor of integers, or": lambda: run_with(
        torch.zeros(3, 5, dtype=torch.bool)
    ),
    r"labels: got the shape \[3, 1\], expected \[3, 5\]": lambda: run_with(batch()[1][:, :1]),
    r"weights: got the shape \[3\]": lambda: run_with((batch()[1], torch.ones(3))),
    "output: got .*, expected logits, or the attribute logits": lambda: pp.vocabulary_cross_entropy()(
        (torch.ones(3, 5), torch.ones(3, 5)), batch()[1]
    ),
    "expected one tensor, the logits": lambda: run_with(batch()[1], lambda p, h: layer(p, h).flatten()),
}


def run_with(target: Any, head: Any = layer) -> Any:
    model = pp.vocabulary_parallel([embed, mlp, head], [6, 5])
    return run(model, model.cut(params_of()), batch()[0], target)


def test_the_loss_is_also_a_loss_function_of_whole_logits():
    loss, options = pp.vocabulary_cross_entropy(z_loss=0.1, label_smoothing=0.1), {"label_smoothing": 0.1}
    params, (ids, labels) = params_of(), batch()
    logits = layer(params[2], mlp(params[1], embed(params[0], ids)))
    wanted = whole_loss(logits, labels, z_loss=0.1, **options)
    for output in (logits, {"logits": logits}, VocabularyOutput(logits, logits)):
        near(loss(output, labels), wanted)


class VocabularyOutput(NamedTuple):
    """As models of transformers return it, with more beside."""

    logits: Tensor
    features: Tensor


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_refused(words):
    with pytest.raises((TypeError, ValueError), match=words):
        REFUSED[words]()


class LanguageModel(nn.Module):
    def __init__(self, *, tie: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=bias)
        if tie:
            self.lm_head.weight = self.embedding.weight

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for one in self.layers:
            h = h + torch.tanh(one(h))
        return self.norm(h)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.lm_head(self.hidden(ids)[:, slice(0, None), :])
        return {"logits": torch.tanh(logits / CAP) * CAP}


def split_of(model: nn.Module, at: Any = ("layers.1", "lm_head"), ids: Tensor | None = None) -> pp.Split:
    return pp.split(model.double(), batch()[0] if ids is None else ids, at=[*at])


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("tie", [False, True])
def test_a_split_has_its_output_layer_in_parts(parts, tie):
    torch.manual_seed(0)
    language, (ids, labels) = LanguageModel(tie=tie, bias=not tie), batch()
    split = split_of(language)
    model = pp.vocabulary_parallel(split, parts, pp.vocabulary_cross_entropy(z_loss=0.1))
    loss = whole_loss(language(ids)["logits"], labels, z_loss=0.1)
    loss.backward()
    cut = model.cut(split.params)
    grads, got = torch.func.grad_and_value(lambda p: run(model, p, ids, labels))(cut)
    near(got, loss.detach())
    whole = model.join(grads)
    for name, p in language.named_parameters():
        near(sum(tree[name] for tree in whole.values() if name in tree), p.grad)
    # Another number of parts, and the model itself, take what is joined.
    other = pp.vocabulary_parallel(split, 5 - parts)
    near(other.join(other.cut(model.join(cut))), dict(split.params), 0)
    split.put_back(model.join(tree_map(lambda p: p + 1, cut)))
    near(language.norm.bias, split.params[1]["norm.bias"])


class Otherwise(LanguageModel):
    """Does something else with its logits."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.last = last

    def forward(self, ids: Tensor) -> Any:
        return self.last(self, self.hidden(ids))


NOT_AN_OUTPUT_LAYER = {
    "log_softmax": lambda m, h: m.lm_head(h).log_softmax(-1),
    "cross_entropy|nll|softmax|view": lambda m, h: F.cross_entropy(
        m.lm_head(h).view(-1, V), torch.zeros(15).long()
    ),
    "add": lambda m, h: m.lm_head(h) + h.sum(-1, keepdim=True),
    "dropout": lambda m, h: F.dropout(m.lm_head(h), 0.5),
    "slice": lambda m, h: m.lm_head(h)[..., :D],
    "cumsum": lambda m, h: m.lm_head(h).cumsum(-1),
}


@pytest.mark.parametrize("words", NOT_AN_OUTPUT_LAYER)
def test_what_is_more_than_an_output_layer_is_refused(words):
    split = split_of(Otherwise(NOT_AN_OUTPUT_LAYER[words]))
    with pytest.raises(pp.StageError, match=words):
        pp.vocabulary_parallel(split, 2)


def test_a_layer_that_draws_is_refused():
    model = LanguageModel(tie=False)
    model.lm_head = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, V))
    with pytest.raises(pp.StageError, match="dropout"):
        pp.vocabulary_parallel(split_of(model), 2)
    assert len(pp.vocabulary_parallel(split_of(model.eval()), 2).stages) == 5


def test_a_split_that_is_cut_elsewhere_is_refused():
    with pytest.raises(pp.StageError, match="name the output layer"):
        pp.vocabulary_parallel(split_of(LanguageModel(), ["layers.1"]), 2)
    with pytest.raises(ValueError, match="tied: got ties beside a split"):
        pp.vocabulary_parallel(split_of(LanguageModel()), 2, tied={})


# -- through schedules


def schedule_of(model: Any, home: Any, microbatches: int) -> pp.Schedule:
    stages = tuple(range(len(model.stages)))
    return in_order(tuple(home), (Flow(stages, range(microbatches), model.edges),), model.skips)


TIES = {"wte": [(0, "wte.weight"), (2, "weight")]}
HOMES = {1: (0, 1, 0, 1), 2: (0, 1, 0, 1, 1), 3: (0, 1, 2, 0, 1, 2), 4: (0, 1, 0, 1, 1, 0, 0)}


@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
@pytest.mark.parametrize("parts", SIZES)
def test_a_step_has_the_gradients_of_the_whole_layer(engine, parts):
    options: Any = {"label_smoothing": 0.1, "z_loss": 0.2, "ignore_index": 3}
    loss = pp.vocabulary_cross_entropy(**options)
    model = pp.vocabulary_parallel(STAGES, SIZES[parts], loss, tied=TIES)
    params, (ids, labels) = params_of(tied=True), batch(4)
    schedule = schedule_of(model, HOMES[parts], 2)

    def at_once(p: Any) -> Tensor:
        halves = zip(ids.chunk(2), labels.chunk(2), strict=True)
        return sum(whole({**params, **p}, x, target, **options) for x, target in halves) / 2

    wanted, value = torch.func.grad_and_value(at_once)(params)
    total = wanted[0]["wte"]["weight"] + wanted[2]["weight"]
    wanted[0]["wte"]["weight"] = wanted[2]["weight"] = total
    step = pp.value_and_grad(model, model.loss_fn, schedule, engine=engine)
    got, grads = step(model.cut(params), ids, labels)
    near((got, model.join(grads)), (value, wanted))
    near(pp.evaluate(model, model.loss_fn, schedule)(model.cut(params), ids, labels), value)


def test_transforms_go_through_the_parts():
    model = pp.vocabulary_parallel(STAGES, [6, 5])
    params, (ids, labels) = params_of(), batch(2)
    moved = tree_map(lambda p: normal(*p.shape, seed=9), params)
    args = model, model.loss_fn, schedule_of(model, HOMES[2], 2)

    def at_once(p: Any) -> Tensor:
        return whole(p, ids, labels)

    cut, along = model.cut(params), model.cut(moved)
    near(pp.jvp(*args)(cut, along, ids, labels), torch.func.jvp(at_once, (params,), (moved,)))
    result = pp.hvp(*args)(cut, along, ids, labels)
    products = torch.func.jvp(torch.func.grad(at_once), (params,), (moved,))[1]
    near(model.join(result.products), products)
    _, each = pp.per_sample_grad(*args, samples=1)(cut, ids, labels)
    grads = torch.func.grad(at_once)(params)
    near(tree_map(lambda g: g.mean((0, 1)), {s: each[s] for s in (0, 1)}), {s: grads[s] for s in (0, 1)})


def next_label(output: Any, labels: Tensor) -> Tensor:
    return whole_loss(output["logits"], labels, z_loss=0.1)


def trained(model: Any, params: Any, schedule: pp.Schedule, loss_fn: Any, **options: Any) -> Any:
    """The parameters after two steps with clipped gradients."""
    optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(0.1), pp.optim.adamw(0.1))
    trainer = pp.Trainer(model, loss_fn, schedule, optimizer, **options)
    state, losses = trainer.init(params), []
    for _ in range(2):
        state, metrics = trainer.step(state, *batch(4))
        losses.append(metrics.loss)
    return state, losses


def test_training_is_that_of_the_whole_model_and_goes_on_in_other_parts(tmp_path):
    torch.manual_seed(0)
    language = LanguageModel()
    loss = pp.vocabulary_cross_entropy(z_loss=0.1)
    whole, split = split_of(language, ["layers.1"]), split_of(language)
    wanted, losses = trained(whole, whole.params, pp.one_f_one_b(2, 2), next_label)
    model = pp.vocabulary_parallel(split, 2, loss)
    schedule = pp.with_parts(pp.one_f_one_b(2, 2))
    assert schedule.flows[0].edges == model.edges
    state, got = trained(model, model.cut(split.params), schedule, model.loss_fn)
    near(got, losses)
    joined = model.join(state.params)
    assert joined.keys() == {0, 1, 2}
    for stage, name in ((stage, name) for stage, tree in wanted.params.items() for name in tree):
        near(joined[stage].get(name, joined[2].get(name)), wanted.params[stage][name], 1e-10)
    # What two parts have saved four parts load.
    pp.checkpoint.save(tmp_path / "two", {"params": state.params}, step=2)
    like = model.cut(tree_map(torch.zeros_like, dict(split.params)))
    loaded = pp.checkpoint.load(tmp_path / "two", like={"params": like})["params"]
    four = pp.vocabulary_parallel(split, 4, loss)
    params, (ids, labels) = four.cut(model.join(loaded)), batch(4)
    schedule = pp.with_parts(pp.one_f_one_b(2, 2), ranks=[0, 1])
    split.put_back(four.join(params))
    near(run(four, params, ids, labels), next_label(language(ids), labels).detach())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("name", ["embedding", "lm_head", "norm"])
def test_what_a_module_has_frozen_stays_in_parts(tie, name):
    torch.manual_seed(0)
    language = LanguageModel(tie=tie)
    language.get_submodule(name).requires_grad_(False)
    split = split_of(language)
    model = pp.vocabulary_parallel(split, 2, pp.vocabulary_cross_entropy(z_loss=0.1))
    schedule = pp.with_parts(pp.one_f_one_b(2, 2))
    state, _ = trained(model.stages, model.cut(split.params), schedule, model.loss_fn, tied=model.tied)
    given = dict(language.named_parameters(remove_duplicate=False))
    for tree in model.join(state.params).values():
        for leaf, value in tree.items():
            assert torch.equal(value, given[leaf]) is not given[leaf].requires_grad, leaf


def test_bfloat16_trains_with_masters():
    torch.manual_seed(0)
    language, ids = LanguageModel().float(), batch()[0]
    options: Any = {"precision": pp.Precision(compute=torch.bfloat16, master=torch.float32)}
    whole = pp.split(language, ids, at=["layers.1"])
    _, wanted = trained(whole, whole.params, pp.one_f_one_b(2, 2), next_label, **options)
    split = pp.split(language, ids, at=["layers.1", "lm_head"])
    model = pp.vocabulary_parallel(split, 2, pp.vocabulary_cross_entropy(z_loss=0.1))
    schedule = pp.with_parts(pp.one_f_one_b(2, 2))
    state, got = trained(model, model.cut(split.params), schedule, model.loss_fn, **options)
    near(got, wanted, 0.02)
    assert {p.dtype for p in tree_leaves(state.params)} == {torch.float32}


def test_a_schedule_without_a_place_for_the_parts_is_refused():
    model = pp.vocabulary_parallel(STAGES, SIZES[3])
    for schedule in (pp.one_f_one_b(6, 2), pp.with_parts(pp.one_f_one_b(2, 2))):
        with pytest.raises(ValueError, match=r"3 parts, and .* no edge .*pp.with_parts\(schedule, ranks="):
            pp.value_and_grad(model, model.loss_fn, schedule)


def by_process(rank: int, size: int) -> tuple[Tensor, Any]:
    model = pp.vocabulary_parallel(STAGES, [6, 5], tied=TIES)
    schedule = pp.with_parts(pp.one_f_one_b(size, 2))
    cut, (ids, labels) = model.cut(params_of(tied=True)), batch(4)
    with pp.P2P() as transport:
        step = pp.value_and_grad(model, model.loss_fn, schedule, transport)
        return step({s: cut[s] for s in schedule.model_stages_of(rank)}, ids, labels)


def test_parts_in_two_processes(two):
    model = pp.vocabulary_parallel(STAGES, [6, 5], tied=TIES)
    step = pp.value_and_grad(model, model.loss_fn, pp.with_parts(pp.one_f_one_b(2, 2)))
    loss, grads = step(model.cut(params_of(tied=True)), *batch(4))
    (one, first), (other, second) = two(by_process)
    near((one, other, {**first, **second}), (loss, loss, {s: grads[s] for s in {**first, **second}}))
    assert {**first, **second}.keys() == grads.keys()

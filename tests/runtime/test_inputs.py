"""Inputs that are not batches: parts that microbatches take whole, numbers, texts, flags, block masks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ppfunc as pp
from ppfunc.stage import eager, functional, graph
from tests.models import squared

ENGINES = [graph, functional, eager]
T, D = 16, 8


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.double()

    def forward(self, x, table, scale=1.0, mode="add", flag=True):
        y = self.b(torch.tanh(self.a(x) + table)) * scale
        return (y + 1 if mode == "add" else y * 2) + (0 if flag else 3)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def want(model, x, t, *others, **named):
    parts = zip(x.chunk(2), t.chunk(2), strict=True)
    return sum(squared(model(part, *others, **named), target) for part, target in parts) / 2


def split_and_stage(model, args, kwargs=None):
    """The model in two stages and in one, each with its parameters."""
    parts = pp.split(model, args, kwargs, at=["b"])
    yield parts, parts.params, pp.gpipe(2, 2)
    fn, params, _ = pp.stage_from_module(model)
    yield [fn], {0: params}, pp.gpipe(1, 2)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return Scaled(), draw(4, T, D), draw(4, T, D), draw(T, D)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_replicated_goes_whole_to_every_microbatch_and_its_gradient_is_the_sum(engine, problem):
    model, x, t, table = problem
    for stages, params, schedule in split_and_stage(model, (x[:2], table)):
        step = pp.value_and_grad(stages, squared, schedule, engine=engine, argnums=(0, 1))
        for _ in range(2):
            result = step(params, (x, pp.replicated(table)), t)
        assert step.cache_info()[:2] == (1, 1)
        leaves = x.clone().requires_grad_(), table.clone().requires_grad_()
        loss = want(model, leaves[0], t, leaves[1])
        torch.testing.assert_close(result.loss, loss.detach())
        for got, expected in zip(result.input_grads, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(got, expected)


def test_a_leaf_without_the_rows_of_the_batch_is_told_of_the_marker(problem):
    model, x, t, table = problem
    parts = pp.split(model, (x[:2], table), at=["b"])
    step = pp.value_and_grad(parts, squared, pp.gpipe(2, 2))
    for other in (table, table[:1], torch.ones((), dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"what every microbatch takes whole is ppfunc.replicated\(x\)"):
            step(parts.params, (x, other), t)
    with pytest.raises(TypeError, match=r"params\[0\]: got ppfunc.replicated\(x\), .* give x itself"):
        step({**parts.params, 0: pp.replicated(parts.params[0])}, (x, pp.replicated(table)), t)
    cut = pp.microbatch({"x": x, "table": pp.replicated(table), "scale": 2.0}, 2)
    assert cut[1]["table"] is table and cut[1]["scale"] == 2.0 and torch.equal(cut[1]["x"], x[2:])


CHANGES = [{}, {"scale": 3.0}, {"scale": 1}, {"scale": True}, {"mode": "double", "flag": False}]


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_texts_and_flags_may_change_from_step_to_step(engine, problem):
    model, x, t, table = problem
    named = {"scale": 2.0, "mode": "add", "flag": True}
    parts = pp.split(model, (x[:2], table), named, at=["b"])
    by_name = pp.split(model, kwargs={"x": x[:2], "table": table, **named}, at=["b"])
    for split, inputs in (
        (parts, lambda change: (x, pp.replicated(table), change)),
        (by_name, lambda change: {"table": pp.replicated(table), **change, "x": x}),
    ):
        step = pp.value_and_grad(split, squared, pp.gpipe(2, 2), engine=engine)
        for change in (*CHANGES, *CHANGES):
            loss, _ = step(split.params, inputs(change), t)
            torch.testing.assert_close(loss, want(model, x, t, table, **{**named, **change}).detach())
        assert step.cache_info()[:2] == (len(CHANGES), len(CHANGES))
        assert len(split._source._codes) == len(CHANGES)


def test_positional_numbers_and_those_of_a_stage_by_hand_may_change(problem):
    model, x, t, table = problem
    parts = pp.split(model, (x[:2], table, 2.0), at=["b"])
    step = pp.value_and_grad(parts, squared, pp.gpipe(2, 2))
    for scale in (None, 3.0):
        loss, _ = step(parts.params, (x, pp.replicated(table), scale), t)
        torch.testing.assert_close(loss, want(model, x, t, table, scale or 2.0).detach())
    fn, params, _ = pp.stage_from_module(model)
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2))
    loss, _ = step({0: params}, {"x": x, "table": pp.replicated(table), "mode": "double"}, t)
    torch.testing.assert_close(loss, want(model, x, t, table, mode="double").detach())
    step = pp.value_and_grad(parts, squared, pp.gpipe(2, 2))
    loss, _ = step(parts.params, (x, pp.replicated(table), None, {"mode": "double"}), t)
    torch.testing.assert_close(loss, want(model, x, t, table, 2.0, mode="double").detach())


def test_a_trainer_takes_them_too(problem):
    model, x, t, table = problem
    parts = pp.split(model, (x[:2], table), {"scale": 2.0}, at=["b"])
    precision = pp.Precision(compute=torch.float64)
    trainer = pp.Trainer(parts, squared, pp.gpipe(2, 2), pp.optim.sgd(0.0), precision=precision)
    state = trainer.init(parts.params)
    for scale in (2.0, 3.0):
        inputs = (x, pp.replicated(table), {"scale": scale})
        state, metrics = trainer.step(state, inputs, t)
        expected = want(model, x, t, table, scale).detach()
        torch.testing.assert_close(metrics.loss, expected)
        torch.testing.assert_close(trainer.evaluate(state, inputs, t), expected)


# -- block masks


class Attention(nn.Module):
    """Attention by the function of a block mask and by its blocks."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, 3 * D, dtype=torch.float64)

    def forward(self, x, mask):
        q, k, v = self.q(x).unsqueeze(1).chunk(3, -1)
        rows, places = torch.arange(len(x))[:, None, None, None], torch.arange(T)
        seen = mask.mask_mod(rows, torch.zeros(1, dtype=torch.int64), places[:, None], places)
        blocks = mask.to_dense().repeat_interleave(8, -1).repeat_interleave(8, -2) > 0
        return x + F.scaled_dot_product_attention(q, k, v, seen & blocks).squeeze(1)


class Attentions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Attention()

    def forward(self, x, mask):
        return self.b(self.a(x, mask), mask)


def causal(b, h, q, kv):
    return q >= kv


def packed(documents):
    def same(b, h, q, kv):
        return documents[b, q] == documents[b, kv]

    return same


def by_partial(documents, b, h, q, kv):
    return documents[b, q] == documents[b, kv]


def with_options(documents):
    options = {"documents": documents}

    def same(b, h, q, kv, *, window=8):
        table = options["documents"]
        return (table[b, q] == table[b, kv]) & (q - kv < window)

    return same


class Documents:
    table = None

    def __call__(self, b, h, q, kv):
        return self.table[b, q] == self.table[b, kv]


THE_DOCUMENTS = Documents()  # whose table changes from batch to batch


def by_object(documents):
    THE_DOCUMENTS.table = documents
    return THE_DOCUMENTS


def by_attributes(documents):
    """Its table is an attribute of an attribute, and it captures itself: neither was read anew."""
    THE_DOCUMENTS.inner = Documents()
    THE_DOCUMENTS.inner.table = documents

    def same(b, h, q, kv):
        table = THE_DOCUMENTS.inner.table if same is not None else None
        return table[b, q] == table[b, kv]

    return same


MASKS = {
    "attributes": by_attributes,
    "options": with_options,
    "object": by_object,
    "closure": lambda d: and_masks(causal, packed(d)),
    "partial": lambda d: partial(by_partial, d),
    "without rows": lambda d: causal,
    "table": lambda d: lambda b, h, q, kv: (d[b] == d[b, q]).any() & (d[b, q] == d[b, kv]),  # not by element
}


@pytest.mark.parametrize(
    "kind, engine", [*((kind, graph) for kind in MASKS), ("closure", functional), ("closure", eager)]
)
def test_block_masks_are_cut_with_the_batch(engine, kind):
    torch.manual_seed(0)
    model, x, t = Attentions(), draw(4, T, D), draw(4, T, D)

    def mask(documents, rows):
        return create_block_mask(MASKS[kind](documents), rows, None, T, T, device="cpu", BLOCK_SIZE=8)

    every = [torch.randint(0, 3, (4, T)).sort(-1).values for _ in range(2)]
    for stages, params, schedule in split_and_stage(model, (x[:2], mask(every[0][:2], 2))):
        step = pp.value_and_grad(stages, squared, schedule, engine=engine)
        for documents in every:
            loss, _ = step(params, (x, mask(documents, 4)), t)
            parts = zip(x.chunk(2), t.chunk(2), documents.chunk(2), strict=True)
            expected = sum(squared(model(a, mask(d, 2)), b) for a, b, d in parts) / 2
            torch.testing.assert_close(loss, expected.detach())
        assert step.cache_info().misses == 1  # other documents, one program
    shared = create_block_mask(causal, None, None, T, T, device="cpu", BLOCK_SIZE=8)
    fn, params, _ = pp.stage_from_module(model.a)
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2), engine=engine)
    loss, _ = step({0: params}, x, t, extras={0: shared})
    torch.testing.assert_close(loss, want(model.a, x, t, shared).detach())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_heads_of_a_mask_are_those_of_the_attention_or_one():
    """A block mask that is given takes part in flex attention as one that the stage makes."""
    documents, x = torch.randint(0, 3, (2, 8)).sort(-1).values, draw(2, 2, 8, 4)

    def both(b, h, q, kv):
        return (documents[b, q] == documents[b, kv]) & (q - kv < 4 + h)

    def attend(p, x, mask):
        return flex_attention(x, x, x, block_mask=mask)

    for heads, function in ((2, both), (None, causal)):
        mask = create_block_mask(function, 2, heads, 8, 8, device="cpu", BLOCK_SIZE=4)
        step = pp.evaluate([attend], squared, pp.gpipe(1, 2))
        got = step({0: ()}, x, x, extras={0: mask})
        seen = create_mask(function, 2, 2, 8, 8, device="cpu")
        torch.testing.assert_close(got, squared(F.scaled_dot_product_attention(x, x, x, seen), x))


class Flexible(nn.Module):
    """Flex attention with a mask, and with a parameter in its scores; or the same by hand."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.slope = nn.Linear(D, 3 * D), nn.Parameter(torch.tensor(0.1))
        self.attend = attend
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if self.attend:
            mask = create_block_mask(causal, None, None, T, T, device="cpu", BLOCK_SIZE=8)
            score = lambda s, b, h, i, j: s + self.slope * (i - j)  # noqa: E731
            return x + self.attend(q, k, v, score_mod=score, block_mask=mask).squeeze(1)
        steps = torch.arange(T)[:, None] - torch.arange(T)
        scores = (self.slope * steps).masked_fill(steps < 0, -torch.inf)
        return x + F.scaled_dot_product_attention(q, k, v, scores).squeeze(1)


class Two(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.a, self.b = Flexible(attend), Flexible(attend)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_has_gradients_on_the_cpu(engine, compiled):
    """Torch's kernel has none; one that the model has compiled is called as Python by a split."""
    if compiled and engine is not graph and torch.__version__ >= "2.14":
        pytest.skip("its compiler fails beneath modes and torch.func")
    torch.manual_seed(0)
    plain, x, t = Two(None), draw(4, T, D), draw(4, T, D)
    model = Two(torch.compile(flex_attention, backend="eager") if compiled else flex_attention)
    model.load_state_dict(plain.state_dict())
    want(plain, x, t).backward()
    for stages, params, schedule in split_and_stage(model, (x[:2],)):
        _, grads = pp.value_and_grad(stages, squared, schedule, engine=engine)(params, x, t)
        for name, p in plain.named_parameters():
            got = next(g for tree in grads.values() for n, g in tree.items() if n == name)
            torch.testing.assert_close(got, p.grad)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*[draw(1, 1, 16, D).requires_grad_()] * 3)


def test_a_mask_function_of_another_number_gives_another_mask():
    torch.manual_seed(0)
    model, x, t = Attentions(), draw(4, T, D), draw(4, T, D)
    fn, params, _ = pp.stage_from_module(model.a)
    step = pp.value_and_grad([fn], squared, pp.gpipe(1, 2))

    def function(kind):
        return lambda b, h, q, kv: (q >= kv) & (q - kv < (4 if isinstance(kind, bool) else 9))

    for kind in (1, True, 1.0):
        mask = create_block_mask(function(kind), None, None, T, T, device="cpu", BLOCK_SIZE=8)
        loss, _ = step({0: params}, x, t, extras={0: mask})
        torch.testing.assert_close(loss, want(model.a, x, t, mask).detach())


class Largest(TorchDispatchMode):
    """Notes the most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            self.elements = max(self.elements, t.numel() if isinstance(t, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("kind", ["options", "partial", "without rows"])
def test_a_mask_is_as_large_as_what_it_reads(kind):
    t = 512
    documents = torch.randint(0, 3, (4, t)).sort(-1).values
    b, h, q, kv = torch.randint(0, t, (4, 1000))
    mask = create_block_mask(MASKS[kind](documents), 4, None, t, t, device="cpu")
    with Largest() as largest:
        parts = pp.microbatch((documents, mask), 2)
    assert largest.elements <= documents.numel()
    for i, (_, part) in enumerate(parts):
        assert torch.equal(part.kv_indices, mask.kv_indices[2 * i : 2 * i + 2])
        rows = b % 2
        assert torch.equal(part.mask_mod(rows, h, q, kv), mask.mask_mod(rows + 2 * i, h, q, kv))


class MaskInside(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.a, self.b, self.make = nn.Linear(D, 3 * D), nn.Linear(D, D), make
        self.double()

    def forward(self, x, documents):
        mask = self.make(and_masks(causal, packed(documents)), len(x))
        q, k, v = self.a(x).unsqueeze(1).chunk(3, -1)
        return self.b(F.scaled_dot_product_attention(q, k, v, mask).squeeze(1))


def of_blocks(function, rows):
    mask = create_block_mask(function, rows, None, T, T, device="cpu", BLOCK_SIZE=8)
    return mask.to_dense().repeat_interleave(8, -1).repeat_interleave(8, -2) > 0


@pytest.mark.parametrize("make", [of_blocks, lambda f, rows: create_mask(f, rows, 1, T, T, device="cpu")])
def test_masks_are_made_inside_of_tensors_of_the_model(make):
    torch.manual_seed(0)
    model, x, t = MaskInside(make), draw(4, T, D), draw(4, T, D)
    documents = torch.randint(0, 3, (4, T)).sort(-1).values
    parts = zip(x.chunk(2), t.chunk(2), documents.chunk(2), strict=True)
    expected = sum(squared(model(a, d), b) for a, b, d in parts) / 2
    for stages, params, schedule in split_and_stage(model, (x[:2], documents[:2])):
        loss, _ = pp.value_and_grad(stages, squared, schedule)(params, (x, documents), t)
        torch.testing.assert_close(loss, expected.detach())


def over_processes(rank, size):
    torch.manual_seed(0)
    model, x, t, table = Scaled(), draw(4, T, D), draw(4, T, D), draw(T, D)
    named = {"scale": 2.0, "mode": "add"}
    parts = pp.split(model, (x[:2], table), named, at=["b"])
    params = {rank: parts.params[rank]}
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(parts, squared, pp.gpipe(2, 2), transport)
        for change in ({}, {"scale": 3.0}, {"mode": "double"}, {"scale": 3.0}):
            inputs = (x, pp.replicated(table), change) if rank == 0 else None
            loss, _ = step(params, inputs, t if rank else None)
            torch.testing.assert_close(loss, want(model, x, t, table, **{**named, **change}).detach())
        assert step.cache_info()[:2] == (1, 3)
        model, documents = Attentions(), torch.randint(0, 3, (4, T)).sort(-1).values
        masks = [
            create_block_mask(MASKS["closure"](d), len(d), None, T, T, device="cpu", BLOCK_SIZE=8)
            for d in (documents, documents[:2], documents[2:])
        ]
        parts = pp.split(model, (x[:2], masks[1]), at=["b"])
        step = pp.value_and_grad(parts, squared, pp.gpipe(2, 2), transport)
        loss, _ = step({rank: parts.params[rank]}, None if rank else (x, masks[0]), t if rank else None)
        expected = [squared(model(x[i : i + 2], masks[1 + i // 2]), t[i : i + 2]) for i in (0, 2)]
        torch.testing.assert_close(loss, sum(expected).detach() / 2)


def test_values_that_change_reach_the_stages_of_other_processes(two):
    two(over_processes)

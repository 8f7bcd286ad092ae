"""Causal models split for schedules of slices: their cache is the carry of the stages."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.schedule import one_f_one_b, seq1f1b, seq_zb
from ppfunc.splitter.cache import closed, opened
from ppfunc.stage import StageError
from tests.covering import by_pairs

WORDS, WIDTH, ROWS, SEQUENCES, TOKENS = 11, 8, 2, 2, 12
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}


class Cache:
    """Keys and values, sums and counts, as models keep them: assigned, written in place, and as numbers."""

    def __init__(self, window: int) -> None:
        self.window, self.seen = torch.tensor(window), 0
        self.keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sums: list[torch.Tensor] = []


class Layer(nn.Module):
    """Attention over a window of tokens, and a decaying sum over all tokens so far, written in place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in "qkvo")

    def forward(self, x, kept, start):
        q, *new = q, k, v = self.q(x), self.k(x), self.v(x)
        if self.number in kept.keys:
            old_k, old_v = map(self.read, kept.keys[self.number])
            k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
        window, far = int(kept.window), start + x.shape[1] - k.shape[1]
        mine = torch.arange(start, start + x.shape[1])[:, None]
        theirs = torch.arange(far, start + x.shape[1])
        seen = (theirs <= mine) & (theirs > mine - window)
        y = torch.where(seen, q @ k.mT, float("-inf")).softmax(-1) @ v
        kept.keys[self.number] = [*map(self.window, (k[:, 1 - window :], v[:, 1 - window :]), new)]
        first = len(kept.sums) == self.number
        if first:
            kept.sums.append(torch.zeros_like(x[:, 0]))
        sums = [torch.zeros_like(x[:, 0]) if first else self.begin(kept.sums[self.number])]
        for token in v[:, -x.shape[1] :].unbind(1):
            sums.append(self.decay * sums[-1] + token)
        kept.sums[self.number].copy_(self.keep(sums[-1]))  # in place, though the gradient of decay needs it
        return x + self.o(y) + torch.stack(sums[1:], 1).tanh()

    def read(self, old):
        return old

    def window(self, rows, new):
        return rows

    def begin(self, sums):
        return sums

    def keep(self, sums):
        return sums


class Causal(nn.Module):
    layer = Layer

    def __init__(self, layers: int = 4, window: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.window = window
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * TOKENS, WIDTH)
        self.layers = nn.ModuleList(self.layer(n) for n in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, ids, cache_params=None, mask=None, use_cache=False):
        kept = Cache(self.window) if cache_params is None else cache_params
        start = kept.seen
        x = self.words(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        for layer in self.layers:
            x = layer(x, kept, start)
        kept.seen = start + ids.shape[1]
        x = x if mask is None else x * mask[..., None]
        return {"logits": self.head(x), "cache_params": self.keep(kept) if use_cache else None}

    def keep(self, kept):
        return kept


def batch(words: int = WORDS):
    ids = torch.randint(0, words, (SEQUENCES * ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


def lengths(slices):
    return [TOKENS // slices] * slices if isinstance(slices, int) else slices


def weights(slices):
    """Of the tokens of each slice."""
    return [n / TOKENS / SEQUENCES for n in lengths(slices)] * SEQUENCES


def cut(slices, words=WORDS):
    return tuple(pp.microbatch(part, SEQUENCES, slices=slices) for part in batch(words))


def require_the_gradients_of(model, slices, at, engine=pp.engines.graph, build=seq1f1b, words=WORDS):
    """Compare a step of slices with the model in one piece."""
    model.zero_grad()
    ids, targets = batch(words)
    wanted = loss_fn(model(ids), targets)
    wanted.backward()
    parts = pp.split(model, ids[:ROWS], at=at, slices=slices)
    schedule = build(len(parts.stages), SEQUENCES, len(lengths(slices)))
    step = pp.value_and_grad(parts, loss_fn, schedule, engine=engine, loss_weights=weights(slices))
    loss, grads = step(parts.params, *cut(slices, words))
    torch.testing.assert_close(loss, wanted.detach(), rtol=0, atol=1e-12)
    found = {name: grad for tree in grads.values() for name, grad in tree.items()}
    for name, p in model.named_parameters():
        if name not in parts.unused:
            torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-12)
    return parts


@pytest.mark.parametrize(
    "engine, at, slices", by_pairs([*ENGINES], [2, ["layers.1", "layers.3"], ["head"]], [2, 3, [5, 1, 6]])
)
def test_slices_give_the_gradients_of_the_model_in_one_piece(slices, at, engine):
    require_the_gradients_of(Causal(), slices, at, ENGINES[engine])


@pytest.mark.parametrize("build", [seq_zb, lambda s, n, k: seq1f1b(s // 2, n, k, chunks=2)])
def test_every_schedule_of_slices_takes_them(build):
    require_the_gradients_of(Causal(), 3, 4, build=build)


def test_a_cache_of_one_form_is_traced_once_for_all_later_slices():
    class Recurrent(Causal):
        def forward(self, ids, cache_params=None, use_cache=False):
            before = None if cache_params is None else cache_params["h"]
            x, rows = self.words(ids), []
            for token in x.unbind(1):
                before = token if before is None else torch.tanh(self.layers[0].q(before) + token)
                rows.append(before)
            return {"logits": self.head(torch.stack(rows, 1)), "cache_params": {"h": before}}

    parts = require_the_gradients_of(Recurrent(1), 4, ["head"])
    assert len(parts._source._codes) == 2
    out = parts.stages[0](parts.params[0], batch()[0][:ROWS, :3], None)
    assert [t.shape for t in out.y[1]] == [(ROWS, 3, WIDTH)]  # the cache does not travel
    assert [t.shape for t in out.carry.tensors] == [(ROWS, WIDTH)]


def test_steps_may_have_other_slices_than_the_split():
    model, (ids, targets) = Causal(), batch()
    parts = pp.split(model, ids[:1].to("meta"), at=2, slices=2)
    for slices in (3, [2, 10]):
        step = pp.evaluate(
            parts, loss_fn, seq1f1b(2, SEQUENCES, len(lengths(slices))), loss_weights=weights(slices)
        )
        torch.testing.assert_close(
            step(parts.params, *cut(slices)), loss_fn(model(ids), targets), rtol=0, atol=1e-12
        )


def test_the_last_carry_is_the_first_of_the_next_step():
    model, (ids, targets) = Causal(), batch()
    parts = pp.split(model, ids[:ROWS], at=2, slices=4)
    step = pp.evaluate(parts, loss_fn, seq1f1b(2, SEQUENCES, 2), return_carry=True)
    first, second = (
        tuple(pp.microbatch(part, SEQUENCES, slices=2) for part in half)
        for half in zip(ids.chunk(2, 1), targets.chunk(2, 1), strict=True)
    )
    one = step(parts.params, *first)
    two = step(parts.params, *second, carry=one.carry)
    torch.testing.assert_close((one.loss + two.loss) / 2, loss_fn(model(ids), targets), rtol=0, atol=1e-12)
    rows = {s: pp.microbatch(pp.Microbatches(tree).join(), 2 * SEQUENCES) for s, tree in one.carry.items()}
    halved = tuple(
        pp.microbatch(part, 2 * SEQUENCES, slices=2) for part in (ids.chunk(2, 1)[1], targets.chunk(2, 1)[1])
    )
    step = pp.evaluate(parts, loss_fn, seq1f1b(2, 2 * SEQUENCES, 2))
    with pytest.raises(StageError, match=r"carry of stage 0: got .*\[1,3,8\].*, expected .*\[2,3,8\]"):
        step(parts.params, *halved, carry=rows)
    with pytest.raises(
        StageError, match="carry of stage 0: got tuple, expected what an earlier step returned"
    ):
        step(parts.params, *halved, carry=dict.fromkeys(rows, pp.Microbatches([(ids[:1],)] * 2 * SEQUENCES)))


def test_a_stage_may_have_a_state_beside_its_carry():
    class Counting(Causal):
        def forward(self, ids, cache_params=None):
            self.calls.add_(1)
            return super().forward(ids, cache_params, use_cache=True)

        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    model, (ids, targets) = Counting(), batch()
    parts = pp.split(model, ids[:ROWS], at=2, slices=3)
    step = pp.value_and_grad(parts, loss_fn, seq1f1b(2, SEQUENCES, 3), has_aux=True)
    found = step(parts.params, *cut(3), state=parts.state)
    torch.testing.assert_close(found.loss, loss_fn(model(ids), targets).detach(), rtol=0, atol=1e-12)
    assert [int(t) for tree in found.aux.state.values() for t in tree.values()] == [6]


def in_processes(rank, ranks):
    schedule, slices = seq1f1b(ranks, SEQUENCES, 3), [5, 1, 6]
    ids, _ = batch()
    parts = pp.split(Causal(), ids[:ROWS], at=2, slices=slices)
    wanted = pp.value_and_grad(parts, loss_fn, schedule, loss_weights=weights(slices))(
        parts.params, *cut(slices)
    )
    with pp.P2P(timeout=60) as transport:
        step = pp.value_and_grad(parts, loss_fn, schedule, transport, loss_weights=weights(slices))
        for _ in range(2):
            loss, grads = step({rank: parts.params[rank]}, *cut(slices))
            torch.testing.assert_close(loss, wanted[0], rtol=0, atol=0)
            torch.testing.assert_close(grads, {rank: wanted[1][rank]}, rtol=0, atol=1e-15)


def test_in_processes(two):
    two(in_processes)


class Forgetful(Causal):
    class layer(Layer):
        def keep(self, sums):
            return sums.detach()


class ReadsKeys(Causal):
    class layer(Layer):
        def read(self, old):
            return old.detach()


class ReadsSums(Causal):
    class layer(Layer):
        def begin(self, sums):
            with torch.no_grad():
                return 1 * sums


class KeepsOld(Causal):
    """Detaches only what it hands on: the gradient of a slice reaches the slice before it alone."""

    class layer(Layer):
        def window(self, rows, new):
            return torch.cat([rows[:, : -new.shape[1]].detach(), new], 1)


class Short(Causal):
    """Keeps fewer keys than its mask lets it see."""

    class layer(Layer):
        def window(self, rows, new):
            return rows[:, 1:]


class Fresh(Causal):
    """Begins anew in each slice of several tokens."""

    def forward(self, ids, cache_params=None, use_cache=False):
        return super().forward(ids, use_cache=use_cache)


class Kept(Causal):
    def keep(self, kept):
        kept.read = lambda: None
        return kept


class Without(Causal):
    def keep(self, kept):
        return None


class NoCache(Causal):
    def forward(self, ids):
        return super().forward(ids)


@pytest.mark.parametrize(
    "kind, kwargs, error, match",
    [
        (
            NoCache,
            {},
            TypeError,
            "slices: got a NoCache, whose forward takes none of past_key_values, cache_par",
        ),
        (Without, {}, StageError, "the model: it returned no cache_params, which slices need"),
        (
            Forgetful,
            {},
            StageError,
            r"its cache_params holds a tensor of shape \(2, 8\), without its gradient",
        ),
        (
            ReadsKeys,
            {},
            StageError,
            r"its cache_params holds a tensor of shape \(2, 3, 8\), which layers.0 reads without its gradient"
            r", called at .*test_slices.py:\d+\. Instead: leave slices out",
        ),
        (
            ReadsSums,
            {},
            StageError,
            r"holds a tensor of shape \(2, 8\), which layers.0 reads without its gradient",
        ),
        (KeepsOld, {"slices": 6}, StageError, r"holds a tensor of shape \(2, 3, 8\), without its gradient"),
        (
            Short,
            {},
            StageError,
            "with its cache_params it computes other values than without it: slice by slice the first row of"
            r" the example differs by 0\.\d+ of its norm",
        ),
        (
            Causal,
            {"ids": 99},
            StageError,
            "it raised IndexError at .* when it was called on a row of the example, slice by slice: .*Instead"
            ": give tokens that the model takes; with tokens on meta it is not called",
        ),
        (Fresh, {}, StageError, r"cache_params holds a tensor .*, which it does not read in the next slice"),
        (Kept, {}, StageError, "its cache_params, a Cache, could not be taken apart: .*lambda"),
        (Causal, {"mask": 1}, ValueError, "args: got the tensors ids, mask, expected the tokens alone"),
        (Causal, {"use_cache": False}, ValueError, "args: got use_cache, which slices need to set; leave it"),
        (Causal, {"slices": 5}, ValueError, "slices: got 5 and 12 tokens, expected a divisor of them"),
        (Causal, {"slices": [12, 0]}, ValueError, r"slices: got \[12, 0\] and 12 tokens, expected a divisor"),
        (Causal, {"slices": "2"}, ValueError, "slices: got '2' and 12 tokens, expected a divisor"),
    ],
)
def test_what_cannot_be_sliced_is_refused_by_name(kind, kwargs, error, match):
    ids, _ = batch()
    args = {"ids": ids[:ROWS]} | ({"mask": torch.ones(ROWS, TOKENS)} if "mask" in kwargs else {})
    args |= {"use_cache": False} if "use_cache" in kwargs else {}
    args["ids"] = args["ids"] + kwargs.get("ids", 0)
    with pytest.raises(error, match=match):
        pp.split(kind(), args, at=2, slices=kwargs.get("slices", 2))


class Detaching(Causal):
    """Detaches activations, as it does in one piece too; draws, and counts its calls in training."""

    class layer(Layer):
        def forward(self, x, kept, start):
            y = super().forward(x, kept, start)
            return y + 0.1 * self.dropout(y.detach().tanh())

        def __init__(self, number):
            super().__init__(number)
            self.dropout = nn.Dropout(0.5)

    def __init__(self):
        super().__init__()
        self.probe = nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, cache_params=None, use_cache=False):
        if self.training:
            self.calls.add_(1)
        output = super().forward(ids, cache_params, use_cache=use_cache)
        probed = self.probe(output["logits"].detach()[..., :WIDTH])
        return output | {"logits": output["logits"] + probed.cos(), "probed": probed}


def test_other_detached_values_are_those_of_the_model():
    require_the_gradients_of(Detaching().eval(), 3, 2)


def test_a_model_is_left_as_it_was_by_calls_of_its_slices():
    model, drawn = Detaching(), torch.get_rng_state()
    model.layers[1].eval()
    pp.split(model, batch()[0], at=2, slices=3)
    modes = [m.training for m in model.modules() if m not in {*model.layers[1].modules()}]
    assert all(modes) and not any(m.training for m in model.layers[1].modules())
    assert int(model.calls) == 0 and torch.equal(torch.get_rng_state(), drawn)


def test_a_model_without_values_is_trusted():
    """No values are compared, gradients are followed all the same."""
    ids = batch()[0].to("meta")
    pp.split(Short(), ids, at=2, slices=2)
    pp.split(Short().to("meta"), ids, at=2, slices=2)
    with pytest.raises(StageError, match="which layers.0 reads without its gradient"):
        pp.split(ReadsKeys().to("meta"), ids, at=2, slices=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_compared_as_exactly_as_their_dtype_is(dtype):
    pp.split(Causal().to(dtype), batch()[0], at=2, slices=3)
    with pytest.raises(StageError, match="with its cache_params it computes other values"):
        pp.split(Short().to(dtype), batch()[0][:ROWS], at=2, slices=6)


def test_integers_of_a_cache_are_made_where_they_were():
    kept = {"here": torch.tensor([2, 3]), "there": torch.tensor(4, device="meta"), "kept": torch.ones(1)}
    numbers = {id(kept["here"]): [2, 3], id(kept["there"]): [4]}
    form, tensors = closed({"cache": kept}, "cache", lambda t: numbers.get(id(t)))
    made = opened(form, tensors)
    assert torch.equal(made["here"], kept["here"]) and made["there"].device.type == "meta"
    assert [*tensors] == [made["kept"]]


def test_slices_belong_to_schedules_of_slices():
    ids, targets = batch()
    sliced, whole = (pp.split(Causal(), ids[:ROWS], at=2, slices=slices) for slices in (2, None))
    with pytest.raises(
        StageError, match="it returns a carry, but the schedule has no slices: take one of sl"
    ):
        pp.evaluate(sliced, loss_fn, one_f_one_b(2, SEQUENCES))(sliced.params, ids, targets)
    with pytest.raises(ValueError, match="a model that was split without slices=, which knows no carry"):
        pp.evaluate(whole, loss_fn, seq1f1b(2, SEQUENCES, 2))(whole.params, *cut(2))
    with pytest.raises(TypeError, match="args: got Microbatches, expected one example with slices"):
        pp.split(Causal(), pp.Microbatches([ids, ids[:1]]), at=2, slices=2)


SMALL = dict(
    vocab_size=37, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
MAMBA2 = dict(hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "Llama": SMALL,
    "Qwen3": SMALL,
    "Gemma3": SMALL | {"sliding_window": 4, "layer_types": SLIDING},
    "Mistral": SMALL | {"sliding_window": 4},
    "Mamba2": dict(vocab_size=37, num_hidden_layers=3) | MAMBA2,
}


@cache
def shipped(name):
    transformers = pytest.importorskip("transformers")
    kinds = [getattr(transformers, name + kind, None) for kind in ("TextConfig", "Config")]
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(next(filter(None, kinds))(**MODELS[name])).double()


@pytest.mark.parametrize("engine", ["graph", "eager"])
@pytest.mark.parametrize("slices, at", [(2, 2), ([1, 7, 4], 3)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_as_they_ship(name, slices, at, engine, monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "float", torch.Tensor.double
    )  # parts of them compute in single precision
    require_the_gradients_of(shipped(name), slices, at, ENGINES[engine], words=37)


def test_a_model_of_transformers_with_another_window_in_its_cache_is_refused():
    transformers = pytest.importorskip("transformers")
    for window in (4, TOKENS):
        config = transformers.MoshiConfig(**SMALL | {"sliding_window": window, "ffn_dim": 48})
        model = transformers.MoshiForCausalLM(config)
        refused = pytest.raises(StageError, match="with its past_key_values it computes other values")
        with refused if window == 4 else nullcontext():
            pp.split(model, batch()[0], at=2, slices=2)


def test_a_model_of_transformers_that_begins_anew_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=37, hidden_size=32, num_hidden_layers=2, state_size=8)
    with pytest.raises(StageError, match="its cache_params holds a tensor .*, which it does not read"):
        pp.split(transformers.MambaForCausalLM(config), batch()[0], at=2, slices=2)

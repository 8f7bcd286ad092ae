"""Adapters of low rank over a frozen model in bfloat16: the bits of torch, saved without the base, merged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import ppfunc as pp

M, ROWS, LENGTH, VOCABULARY = 4, 8, 6, 32
IDS = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS).index_fill_(1, torch.tensor([LENGTH - 1]), 0)  # of another length than the batch
TARGETS = ("q_proj", "v_proj")


class LoRA(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)

    def merged(self) -> nn.Linear:
        self.base.weight.data += self.scale * self.b @ self.a
        return self.base


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = (p(x)[:, None] for p in (self.q_proj, self.k_proj, self.v_proj))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None].bool())[:, 0]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(width), Attention(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.self_attn(self.input_layernorm(x), mask)


class Decoder(nn.Module):
    """A model in the names of Llama."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(VOCABULARY, width)})
        self.model["layers"] = nn.ModuleList(Layer(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](input_ids)
        for layer in self.model["layers"]:
            x = layer(x, attention_mask)
        return self.lm_head(x)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, use_cache=False,
        num_key_value_heads=1, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def by_hand(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers if hasattr(model.model, "layers") else model.model["layers"]:
        for name in TARGETS:
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    return model


def by_peft(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=[*TARGETS])
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def made(model, adapt, seed=0):
    """A model in bfloat16, with the same adapters every time."""
    torch.manual_seed(seed)
    whole = model().bfloat16()
    torch.manual_seed(1)
    return adapt(whole)


def split_of(model, stages):
    return pp.split(model, {"input_ids": IDS[: ROWS // M], "attention_mask": MASK[: ROWS // M]}, at=stages)


def trainer_of(split, build, master=None):
    precision = pp.Precision(compute=torch.bfloat16, reduce=torch.float32, master=master) if master else None
    return pp.Trainer(split, next_token, build, pp.optim.adamw(1e-2), precision=precision)


def next_token(out, ids):
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def trained(trainer, state, steps=3):
    for _ in range(steps):
        state, metrics = trainer.step(state, {"input_ids": IDS, "attention_mask": MASK}, IDS)
    return state, metrics.loss.item()


def by_torch(model, master, steps=3):
    """Train by plain autograd and torch's optimizer, on float32 copies where there are masters."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = [p.detach().to(master, copy=True) if master else p for p in own.values()]
    optimizer = torch.optim.AdamW(kept, lr=1e-2, fused=True)
    for _ in range(steps):
        sums = [torch.zeros_like(p) for p in kept]
        for ids, mask in zip(IDS.chunk(M), MASK.chunk(M), strict=True):
            loss = next_token(model(input_ids=ids, attention_mask=mask), ids) / M
            for total, g in zip(sums, torch.autograd.grad(loss, list(own.values())), strict=True):
                total += g
        for p, g in zip(kept, sums, strict=True):
            p.grad = g
        optimizer.step()
        with torch.no_grad():
            for p, value in zip(own.values(), kept, strict=True):
                p.copy_(value)
    return dict(zip(own, (p.detach() for p in kept), strict=True))


def adapters(split, state):
    """Leave out the base of a state."""
    free = {name for name, p in split.model.named_parameters() if p.requires_grad}
    params = {s: {n: p for n, p in tree.items() if n in free} for s, tree in state.params.items()}
    return state._replace(params=params)


pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of peft

CASES = [(Decoder, by_hand), (llama, by_hand), (llama, by_peft)]


@pytest.mark.parametrize("model, adapt", CASES, ids=["own", "transformers", "peft"])
@pytest.mark.parametrize("master", [None, torch.float32])
def test_adapters_train_to_the_bits_of_torch(model, adapt, master):
    split = split_of(made(model, adapt), 4)
    before = {s: {n: p.clone() for n, p in tree.items()} for s, tree in split.params.items()}
    trainer = trainer_of(split, pp.zb_h1(4, M), master)
    state, _ = trained(trainer, trainer.init(split.params))
    expected = by_torch(made(model, adapt), master)
    got = {name: p for tree in adapters(split, state).params.values() for name, p in tree.items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    for s, tree in state.params.items():
        for name in tree.keys() - expected.keys():
            assert tree[name].dtype is torch.bfloat16 and torch.equal(tree[name], before[s][name])


@pytest.mark.parametrize("model, adapt", CASES[:2], ids=["own", "transformers"])
def test_adapters_are_saved_without_the_base_loaded_into_other_stages_and_merged(model, adapt, tmp_path):
    split = split_of(made(model, adapt), 4)
    trainer = trainer_of(split, pp.zb_h1(4, M), torch.float32)
    state, _ = trained(trainer, trainer.init(split.params))
    small = adapters(split, state)
    folder = pp.checkpoint.save(tmp_path / "run", small, names=split)
    numbers = sum(p.numel() for tree in small.params.values() for p in tree.values())
    assert sum(p.stat().st_size for p in folder.glob("*.safetensors")) < 4 * 3 * numbers + 10_000

    halves = split_of(made(model, adapt), 2)
    other = trainer_of(halves, pp.one_f_one_b(2, M), torch.float32)
    fresh = other.init(halves.params)
    loaded = pp.checkpoint.load(tmp_path / "run", adapters(halves, fresh), names=halves)
    whole = loaded._replace(params={s: fresh.params[s] | tree for s, tree in loaded.params.items()})
    assert trained(other, whole, 1)[1] == trained(trainer, state, 1)[1]

    halves.put_back(whole.params)
    merged = halves.model
    for layer in merged.model.layers if hasattr(merged.model, "layers") else merged.model["layers"]:
        for name in TARGETS:
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).merged())
    bare = split_of(merged, 2)
    pp.checkpoint.export(tmp_path / "merged", bare.params, bare)
    plain = model().bfloat16()
    missing = plain.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"), strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys
    given = {"input_ids": IDS, "attention_mask": MASK}
    with torch.no_grad():
        mine, theirs = (getattr(y, "logits", y) for y in (plain(**given), merged(**given)))
    assert torch.equal(mine, theirs)


def test_what_peft_saves_is_what_the_package_exports(tmp_path):
    peft = pytest.importorskip("peft")
    split = split_of(made(llama, by_peft), 4)
    trainer = trainer_of(split, pp.zb_h1(4, M))
    state, _ = trained(trainer, trainer.init(split.params))
    split.put_back(state.params)
    split.model.save_pretrained(tmp_path / "peft")
    small = adapters(split, state).params
    pp.checkpoint.export(tmp_path / "ours", small, lambda stage, name: name.replace(".default", ""))
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(
        llama().bfloat16(), tmp_path / "peft", autocast_adapter_dtype=False
    )
    given = {"input_ids": IDS, "attention_mask": MASK}
    with torch.no_grad():
        assert torch.equal(again(**given).logits, split.model.eval()(**given).logits)

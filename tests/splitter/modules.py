"""Small models, each with one thing that a split could get wrong, and the whole model's gradients to compare
with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppfunc.splitter import Split
from ppfunc.stage.program import Output, Received
from ppfunc.stage.tree import tree_leaves

D = 4


def rows(n: int = 3) -> Tensor:
    return torch.randn(n, D, dtype=torch.float64)


class Base(nn.Module):
    """Three layers, cut before ``b`` and before ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))


class Plain(Base):
    def forward(self, x):
        return self.c(self.b(self.a(x)).tanh())


class NoGradOverACut(Base):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            g = self.b(h * 2)
        return self.c(h + g)


class Detached(Base):
    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h.detach()) * h)


class InPlaceThroughAView(Base):
    def forward(self, x):
        h = self.a(x)
        top = h[:, :2]
        g = self.b(x)
        top.mul_(g[:, :2])
        return self.c(h + g)


class InPlaceAcrossACut(Base):
    def forward(self, x):
        h = self.a(x)
        torch.neg_(h)
        g = self.b(x)
        h += g
        return self.c(h) + h


class MaskFilledInPlace(Base):
    def forward(self, x):
        mask = torch.zeros(D, D, dtype=torch.bool, device=x.device)
        mask[0, 1:] = True
        h = self.a(x).masked_fill(mask[0], -2.0)
        h = self.b(h).masked_fill(mask[0], 3.0)
        return self.c(h)


class MaskFilledByFloatsThroughAView(Base):
    def forward(self, x):
        mask = torch.zeros(x.shape[0], D, dtype=x.dtype)
        mask[0].add_(x[0].abs())
        return self.c(self.b(self.a(x)) * mask) * mask


class NoiseForSeveralStages(Base):
    def forward(self, x):
        noise = torch.rand(x.shape[0], D, dtype=x.dtype)
        return self.c(self.b(self.a(x) * noise) * noise) * noise


class DrawsWhatNobodyReads(Base):
    def forward(self, x):
        torch.rand(3)
        h = self.b(self.a(x))
        torch.rand(3)
        return self.c(h) * torch.rand(D, dtype=x.dtype)


class StridesOfATranspose(Base):
    """The view is one of what a message would otherwise have made contiguous."""

    def forward(self, x):
        h = self.a(x).t().exp()
        g = self.b(x)
        return self.c(g) + h.t().view(-1)[: g.numel()].view(g.shape)


class Reused(Base):
    def forward(self, x):
        return self.a(self.c(self.b(self.a(x))))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight.requires_grad_(False)
        self.unused = nn.Linear(D, D)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class BatchNorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(D), nn.BatchNorm1d(D, momentum=0.3)

    def forward(self, x):
        return self.c(self.second(self.b(self.first(self.a(x)))))


class BufferAssignedAnew(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(D))
        self.register_buffer("table", torch.arange(float(D)))

    def forward(self, x):
        h = self.b(self.a(x) * self.table)
        self.seen = self.seen * 0.5 + h.detach().mean(0)
        return self.c(h) + self.seen + self.table


class BufferReadLater(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(D))

    def forward(self, x):
        h = self.a(x)
        self.seen.mul_(0.5).add_(h.detach().mean(0))
        return self.c(self.b(h)) * self.seen


class Autocast(Base):
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            g = self.b(h.float()).double()
        return self.c(h + g)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None  # on purpose not the derivative


class OwnBackward(Base):
    def forward(self, x):
        return self.c(Tripled.apply(self.b(Tripled.apply(self.a(x), 3.0)), 5.0))


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp(), x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, g, h):
        return g * ctx.saved_tensors[0] * 2 + h


class OwnBackwardOfTwoResults(Base):
    def forward(self, x):
        e, f = NewStyle.apply(self.a(x))
        return self.c(self.b(e)) + f


class ChunkOverACut(Base):
    def forward(self, x):
        one, two = self.a(x).chunk(2, dim=-1)
        h = self.b(torch.cat([two, one], -1))
        largest, at = h.max(-1)
        return self.c(h) * largest[:, None] + at[:, None] + one.sum()


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.LSTM(D, D, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        y, (h, c) = self.b(self.a(x)[:, None])
        return self.c(y[:, 0]) + h[0] * c[1]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True)
        self.c = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.c(self.b(self.a(x)[:, None]))


class Norms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.c = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))
        self.d = nn.LayerNorm(D)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


class HiddenTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.arange(float(D), dtype=torch.float64)

    def forward(self, x):
        return self.c(self.b(self.a(x)) + self.hidden) * self.hidden


class Dropouts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        h = self.drop(self.a(x))
        h = self.b(h) + torch.rand_like(h) * h
        return F.alpha_dropout(self.c(self.drop(h)), 0.3, self.training)


class MasksOfTheFormOfActivations(Base):
    """Three masks that depend on the form of an activation alone: they are made again in every stage."""

    def forward(self, x):
        h = self.a(x)
        mask = torch.ones_like(h).tril() + h.new_full((1, 1), 2.0).expand_as(h)
        mask[:, 0] = 0.5
        h = self.b(h * mask)
        return self.c(h) * mask.type_as(h) + torch.zeros(1).to(h)


class AsStrided(Base):
    """Reads memory by strides that a message would not keep."""

    def forward(self, x):
        h = self.a(x)[:, 1:]
        g = self.b(x)
        return self.c(g)[:, :2] * h.t().as_strided((x.shape[0], 2), (h.stride(0), 1), h.storage_offset())


class FilledInTwoStages(Base):
    def forward(self, x):
        h = self.a(x)
        filled = torch.zeros_like(h)
        filled[:, :2] = h[:, :2]
        g = self.b(h)
        filled[:, 2:] = g[:, :2].float()
        return self.c(filled) + filled


class WritesItsInput(Base):
    def forward(self, x):
        x.mul_(2.0)
        h = self.b(self.a(x))
        return self.c(h) + x


class AddsToItsIntegers(Base):
    """A write that must not be done again in a later stage."""

    def forward(self, x):
        x = x.add_(1)
        h = self.b(self.a(x.double()))
        return self.c(h * x) + x


class GradientsInside(Base):
    def forward(self, x):
        h = self.a(x)
        slope = torch.func.grad(lambda t: self.b(t).tanh().square().sum())(h)
        y, tangent = torch.func.jvp(lambda t: self.b(t).tanh(), (h,), (slope,))
        return self.c(y * tangent)


class AsksForAGradient(Base):
    """As models do of which a part is checkpointed."""

    def forward(self, x):
        h = x[:, None]
        h.requires_grad = True
        return self.c(self.b(self.a(h[:, 0]).requires_grad_()))


class ChecksValues(Base):
    def forward(self, x):
        torch._check_tensor_all_with(ValueError, x < 99, lambda: "too large")
        h = torch.distributions.Normal(self.a(x), 1 + x.square()).cdf(x)
        return self.c(self.b(h))


class CachesATable(Base):
    @staticmethod
    @cache
    def table(dtype):
        return torch.arange(D, dtype=dtype)

    def forward(self, x):
        h = self.a(x) + self.table(x.dtype)
        return self.c(self.b(h) * self.table(x.dtype))


class NumbersInTheCode(Base):
    def forward(self, x):
        sizes = torch.tensor([2, 3])
        h = self.a(x)
        if sizes.sum().item() == 5 and bool((sizes > 1).all()):
            h = h * sizes[0].item()
        return self.c(self.b(h)) * torch.tensor(2.0, dtype=x.dtype)


class CallsForwardByItself(Base):
    def forward(self, x):
        return self.c.forward(self.b.forward(self.a(x)).tanh())


class LooksAtAMaskOfItsOwn(Base):
    """Its shapes are those of the values of a mask that it makes, and changes in place through a view."""

    def forward(self, x):
        mask = torch.ones(x.shape[0], D)
        before = mask.sum().item()
        mask[:, 3:] = torch.zeros_like(x[:, :1], dtype=mask.dtype)
        lengths = mask.sum(1).long()
        kept = mask[0].nonzero().flatten()
        h = self.a(x)[:, : lengths.max().item()]
        lengths[:1] = 2
        h = F.pad(h, (0, D - h.shape[1])) * before + lengths.double().mean()
        kinds = torch.unique(lengths)
        return self.c(
            self.b(h)[:, kept].sum(1, keepdim=True)
            * (mask.double() + len(kinds) + sum(k.item() for k in kinds))
        )


class VmapInside(Base):
    def forward(self, x):
        index = torch.arange(D)
        allowed = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(index, index)
        h = torch.vmap(lambda row: row * row.sum())(self.a(x))
        return self.c(self.b(h) @ allowed.double()) @ allowed.double()


class ShapesOfFloats(Base):
    def forward(self, x):
        h = self.a(x)
        scale = torch.ones_like(h).cumsum(0) + h.new_full((1,), 2.0)
        return self.c(self.b(h * scale) / scale)


class EarlyResult(Base):
    def forward(self, x):
        h = self.a(x)
        return h, self.c(self.b(h)), 3, "text", None, [h, {"again": h.sum()}]


@dataclass
class Answer(OrderedDict):
    """A class of outputs as transformers has them: a mapping whose entries are attributes."""

    logits: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        self.update(logits=self.logits, cache=self.cache)


def _answer(values: list[Any], keys: Any) -> Answer:
    return Answer(**dict(zip(keys, values, strict=True)))


torch.utils._pytree.register_pytree_node(
    Answer,
    lambda a: ([a.logits, a.cache], ("logits", "cache")),
    _answer,
    serialized_type_name="tests.splitter.Answer",
)


class Cache:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ClassOfOutputs(Base):
    def forward(self, x, *, scale=None, offset: Tensor | None = None, twice: bool = False):
        h = self.b(self.a(x))
        if offset is not None:
            h = h + offset
        y = self.c(h)
        return Answer(logits=2 * y if twice else y, cache=Cache(h))


WRITE_INPUTS = WritesItsInput, AddsToItsIntegers
ZOO = [Encoder, *(kind for kind in Base.__subclasses__() if kind not in WRITE_INPUTS)]
"""Those that a split is compared with the whole model on."""


class EncoderDecoder(nn.Module):
    """Tied embeddings, an encoder whose output goes to every layer of the decoder, masks, a bias made once
    from parameters.
    """

    def __init__(self, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, D)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(D, 2, 8, batch_first=True) for _ in range(2))
        self.bias = nn.Embedding(16, 1)
        self.head = nn.Linear(D, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequency", torch.linspace(0, 1, D))

    def positions(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1], device=ids.device)[:, None] * self.frequency

    def forward(self, ids, decoder_ids, mask=None):
        hidden = None if mask is None else mask == 0
        x = self.embed(ids) + self.positions(ids).sin()
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=hidden)
        length = decoder_ids.shape[1]
        at = torch.arange(length, device=ids.device)
        bias = self.bias((at[:, None] - at).clamp(0, 15))[..., 0]
        causal = (at[:, None] < at).to(bias.dtype) * -1e9 + bias
        y = self.embed(decoder_ids) + self.positions(decoder_ids).cos()
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=causal, memory_key_padding_mask=hidden)
        return self.head(y)


class Decoder(nn.Module):
    """A decoder whose masks and rotary tables are made once, at its beginning."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(layers))
        self.head = nn.Linear(D, 11)

    def forward(self, ids, mask=None):
        at = torch.arange(ids.shape[1], device=ids.device)
        table = (at[:, None] * 0.1).cos().double()
        allowed = (at[:, None] >= at)[None, None]
        if mask is not None:
            allowed = allowed & (mask[:, None, None, :] != 0)
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = (
                x
                + F.scaled_dot_product_attention(
                    (q * table)[:, None], (k * table)[:, None], v[:, None], attn_mask=allowed
                )[:, 0]
            )
        return self.head(x)


def scalar(output: Any) -> Tensor:
    """Reduce a result to a scalar that depends on all of its tensors."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
    assert leaves
    return sum(
        ((t.double() * (n + 1.5)).square().sum() for n, t in enumerate(leaves)),
        torch.zeros((), dtype=torch.float64),
    )


def in_turn(
    parts: Split, inputs: Any, params: Mapping[int, Any] | None = None
) -> tuple[Any, dict[int, Any], list[tuple[int, ...]]]:
    """Call the stages in turn; return the result, their new state, and the shapes of all that crosses a
    boundary, but for tensors without elements.
    """
    x, skips, state, crossing = inputs, {}, {}, []
    for stage, fn in enumerate(parts.stages):
        into = {a: skips[a, b] for a, b in parts.skips if b == stage}
        given = [parts.state[stage]] if stage in parts.state else []
        out = fn((params or parts.params)[stage], Received(x, into) if into else x, *given)
        if isinstance(out, Output):
            skips |= {(stage, b): tree for b, tree in (out.skips or {}).items()}
            crossing += [tuple(t.shape) for tree in (out.skips or {}).values() for t in tree]
            state |= {stage: out.state} if out.state is not None else {}
            out = out.y
        x = out
        if stage < len(parts.stages) - 1:
            crossing += [tuple(t.shape) for t in x[1]]
            assert all(t.numel() == 0 for t in tree_leaves(x[0]))
    return x, state, crossing


def added_up(grads: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients by name, summed over the places of tied parameters."""
    total: dict[str, Tensor] = {}
    for tree in grads.values():
        for name, grad in tree.items():
            total[name] = total[name] + grad if name in total else grad
    return total


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def whole(model: nn.Module, inputs: Any, seed: int = 7) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Gradients by name, buffers after the call, and the result, of the whole model, which stays as it
    was.
    """
    before = {name: b.clone() for name, b in model.named_buffers()}
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in before}
    held = {name: owners[name]._buffers[name.rpartition(".")[2]] for name in before}
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    result = call(model, inputs)
    found = torch.autograd.grad(scalar(result), list(params.values()), allow_unused=True)
    after = {name: b.detach().clone() for name, b in model.named_buffers()}
    with torch.no_grad():
        for name, b in held.items():
            owners[name]._buffers[name.rpartition(".")[2]] = b
            b.copy_(before[name])
    return {name: g for name, g in zip(params, found, strict=True) if g is not None}, after, result


def require_equal(model: nn.Module, parts: Split, inputs: Any) -> None:
    """Require of the stages in turn the result, gradients and buffers of the whole model, under the same
    random numbers.
    """
    want, after, result = whole(model, inputs)
    params = {
        s: {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tree.items()}
        for s, tree in parts.params.items()
    }
    torch.manual_seed(7)
    got, state, _ = in_turn(parts, inputs, params)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(r) for r in (got, result)), strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        elif not isinstance(b, Cache):
            assert a == b
    leaves = [t for tree in params.values() for t in tree.values()]
    found = torch.autograd.grad(scalar(got), leaves, allow_unused=True)
    grads = iter([torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)])
    total = added_up({s: {n: next(grads) for n in tree} for s, tree in params.items()})
    for name, grad in total.items():
        torch.testing.assert_close(grad, want.get(name, torch.zeros_like(grad)), rtol=1e-12, atol=1e-12)
    assert want.keys() <= total.keys()
    for tree in state.values():
        for name, buffer in tree.items():
            torch.testing.assert_close(buffer, after[name], rtol=0, atol=0)
    unwritten = {name for name, b in model.named_buffers() if not torch.equal(b, after[name])} - {
        n for t in state.values() for n in t
    }
    assert not unwritten

"""A byte-level GPT as pure functions: layers are (init, apply) pairs, and stages are runs of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

import ppfunc as pp

Params = dict[str, Tensor]
TEMPERATURE = 0.8  # of sampled text: below 1 prefers likely bytes
CUT = {
    "qkv": 1,
    "attention_out": 1,
    "hidden": 0,
    "hidden_out": 1,
}  # by leaf, the axis that tensor parallel ranks divide


class Config(NamedTuple):
    """Sizes of the model; ``layers`` counts the blocks between the embedding and the head."""

    width: int = 64
    layers: int = 8
    heads: int = 4
    context: int = 64
    vocabulary: int = 256
    tied: bool = False  # the head has the vectors of the embedding


class Layer(NamedTuple):
    """``init(generator) -> params`` and the pure ``apply(params, x) -> y``.

    An embedding is also given the positions of the tokens, by default from 0; a block ``attend(q, k, v)``,
    the attention of queries to keys and values float[b, head, t, e], by default causal.
    """

    init: Callable[[Generator], Params]
    apply: Callable[..., Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def normal(generator: Generator, *shape: int, std: float = 0.02) -> Tensor:
    return torch.randn(*shape, generator=generator) * std


def embedding(config: Config) -> Layer:
    """Bytes to vectors: int64[b, t] -> float[b, t, d]."""

    def init(generator: Generator) -> Params:
        return {
            "byte": normal(generator, config.vocabulary, config.width, std=0.1 if config.tied else 1.0),
            "position": normal(generator, config.context, config.width, std=0.1),
        }

    def apply(params: Params, tokens: Tensor, positions: Tensor | slice | None = None) -> Tensor:
        positions = slice(tokens.shape[1]) if positions is None else positions
        return F.embedding(tokens, params["byte"]) + params["position"][positions]

    return Layer(init, apply)


def block(config: Config, mesh: DeviceMesh | None = None) -> Layer:
    """Causal attention, then a perceptron of one hidden layer: float[b, t, d] -> float[b, t, d].

    Over a mesh every rank has some of the heads and of the hidden units: its part of ``CUT``.
    """
    d = config.width

    def given(x: Tensor) -> Tensor:
        return x if mesh is None else pp.collectives.pvary(x, mesh)

    def summed(x: Tensor) -> Tensor:
        return x if mesh is None else pp.collectives.psum(x, mesh)

    def init(generator: Generator) -> Params:
        # What is added to the residual stream starts small, so that depth does not matter at first.
        std, small = d**-0.5, (2 * d * config.layers) ** -0.5
        return {
            "attention_norm": torch.ones(d),
            "qkv": normal(generator, 3, d, d, std=std),
            "attention_out": normal(generator, d, d, std=small),
            "hidden_norm": torch.ones(d),
            "hidden": normal(generator, 4 * d, d, std=std),
            "hidden_out": normal(generator, d, 4 * d, std=small / 2),
        }

    def apply(params: Params, x: Tensor, attend: Callable[..., Tensor] = causal) -> Tensor:
        h = given(F.layer_norm(x, (d,), params["attention_norm"]))
        qkv = F.linear(h, params["qkv"].flatten(0, 1))
        q, k, v = rearrange(qkv, "b t (part head e) -> part b head t e", part=3, e=d // config.heads)
        h = attend(q, k, v)
        x = x + summed(F.linear(rearrange(h, "b head t e -> b t (head e)"), params["attention_out"]))
        h = given(F.layer_norm(x, (d,), params["hidden_norm"]))
        return x + summed(F.linear(F.gelu(F.linear(h, params["hidden"])), params["hidden_out"]))

    return Layer(init, apply)


def head(config: Config) -> Layer:
    """Vectors to scores of the next byte: float[b, t, d] -> float[b, t, vocabulary]."""

    def init(generator: Generator) -> Params:
        return {
            "norm": torch.ones(config.width),
            "out": normal(generator, config.vocabulary, config.width, std=0.01),
        }

    def apply(params: Params, x: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (config.width,), params["norm"]), params["out"])

    return Layer(init, apply)


def layers(config: Config, mesh: DeviceMesh | None = None) -> list[Layer]:
    """The whole model in order: the embedding, the blocks, the head."""
    if config.width % config.heads:
        raise ValueError(
            f"width must be a multiple of heads, got width {config.width} and {config.heads} heads"
        )
    return [embedding(config), *(block(config, mesh) for _ in range(config.layers)), head(config)]


def placement(name: str, leaf: Tensor) -> Placement | None:
    """How a leaf lies over tensor parallel ranks, a rule for ``pp.stage.shard``."""
    axis = CUT.get(name.rpartition(".")[2])
    return None if axis is None else Shard(axis)


def stage(run: Sequence[Layer]) -> Callable[[list[Params], Tensor], Tensor]:
    """One stage: the layers of ``run`` one after the other, over the list of their parameters."""

    def apply(params: list[Params], x: Tensor) -> Tensor:
        for layer, p in zip(run, params, strict=True):
            x = layer.apply(p, x)
        return x

    return apply


def multiplications(config: Config) -> list[int]:
    """Multiplications per byte of every layer of the model, by which its stages can be balanced."""
    d = config.width
    return [d, *[12 * d * d + 2 * config.context * d] * config.layers, config.vocabulary * d]


def initialise(
    model: Sequence[Layer], numbers: Sequence[int], seed: int, device: torch.device | str = "cpu"
) -> list[Params]:
    """Parameters of the layers ``numbers`` of the model.

    Every layer has a random generator of its own, so that its values depend on the seed and on
    its place in the model, never on the stage or the rank that holds it.
    """
    generator = torch.Generator()
    drawn = [model[k].init(generator.manual_seed(1_000_003 * seed + k)) for k in numbers]
    return [{name: value.to(device) for name, value in params.items()} for params in drawn]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per byte, float32[], of scores float[b, t, v] for targets int64[b, t]."""
    return F.cross_entropy(rearrange(scores.float(), "b t v -> (b t) v"), rearrange(targets, "b t -> (b t)"))


@torch.no_grad()
def generate(model: Sequence[Layer], params: list[Params], prompt: Tensor, length: int, seed: int) -> str:
    """Text that continues ``prompt``, uint8[t], by ``length`` sampled bytes, without a pipeline."""
    whole, context = stage(model), len(prompt)
    generator = torch.Generator().manual_seed(seed)
    text = prompt.long()
    for _ in range(length):
        scores = whole(params, text[None, -context:].to(params[0]["byte"].device))[0, -1]
        chosen = torch.multinomial((scores.cpu() / TEMPERATURE).softmax(-1), 1, generator=generator)
        text = torch.cat([text, chosen])
    return bytes(text.tolist()).decode("utf-8", "replace")

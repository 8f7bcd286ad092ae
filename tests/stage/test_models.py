"""Models that nobody here wrote, cut into stages as a user cuts them, against the model in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ppfunc as pp
from tests.models import squared

M = 3
ENGINES = {"graph": pp.engines.graph, "functional": pp.engines.functional, "eager": pp.engines.eager}
SCHEDULES = {"1f1b": pp.one_f_one_b, "zero bubble": pp.zb_h1}
WAYS = [("graph", "1f1b"), ("graph", "zero bubble"), ("functional", "zero bubble"), ("eager", "1f1b")]

ways = pytest.mark.parametrize(("engine", "schedule"), WAYS[1:])
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(*shape: int, below: int = 32) -> Tensor:
    return torch.randint(below, shape)


class Cut(NamedTuple):
    """A model, and the same model as stages.

    Args:
        whole: the model in one piece.
        parts: its stages, which share their parameters and buffers with it.
        loss_fn: of one microbatch.
        inputs, targets: whole batches.
        extras: further inputs of the stages.
    """

    whole: Callable[[Tensor], Tensor]
    parts: Sequence[nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    extras: dict[int, Any] | None = None


def run(cut: Cut, engine: str, schedule: str, **given: Any) -> tuple[Tensor, dict[int, Any], dict[int, Any]]:
    """Loss, gradients and buffers after a step of the pipeline."""
    stages = [pp.stage_from_module(part) for part in cut.parts]
    made = SCHEDULES[schedule](len(stages), M)
    step = pp.value_and_grad([s.fn for s in stages], cut.loss_fn, made, engine=ENGINES[engine], has_aux=True)
    params = {n: s.params for n, s in enumerate(stages)}
    # Copies: those of the modules change when the whole model runs.
    state = {n: {k: b.clone() for k, b in s.state.items()} for n, s in enumerate(stages) if s.state}
    result = step(params, cut.inputs, cut.targets, state=state, extras=cut.extras, **given)
    loss, aux, grads = result.loss, result.aux, result.grads
    return loss, grads, aux.state


def compare(cut: Cut, engine: str, schedule: str = "zero bubble") -> None:
    """The pipeline gives loss, gradients and buffers of the whole model on one microbatch after the other.

    The whole model runs after the pipeline, so that its buffers are still those from before.
    """
    loss, grads, state = run(cut, engine, schedule)
    total = (
        sum(
            cut.loss_fn(cut.whole(x), t)
            for x, t in zip(cut.inputs.chunk(M), cut.targets.chunk(M), strict=True)
        )
        / M
    )
    named = [dict(part.named_parameters()) for part in cut.parts]
    wanted = [p for own in named for p in own.values() if p.requires_grad]
    rest = iter(torch.autograd.grad(total, wanted, materialize_grads=True))
    want = {
        n: {k: next(rest) if p.requires_grad else torch.zeros_like(p) for k, p in own.items()}
        for n, own in enumerate(named)
    }
    assert any(g.abs().max() > 1e-4 for own in want.values() for g in own.values())
    torch.testing.assert_close(loss, total.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, want, rtol=1e-10, atol=1e-10)
    for n, after in state.items():
        torch.testing.assert_close(after, dict(cut.parts[n].named_buffers()), rtol=1e-10, atol=1e-10)


class Basic(nn.Module):
    """The basic block of a ResNet, as torchvision has it."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Basic(4, 4, 1),
        Basic(4, 8, 2),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).double()


def split_sequential(whole: nn.Sequential, boundaries: list[int]) -> list[nn.Sequential]:
    """Cut a chain of modules before these positions; an empty part does nothing."""
    partition = pp.parallel.Partition((0, *boundaries, len(whole)), allow_empty=True)
    return [nn.Sequential(*part) for part in partition.split([*whole])]


def split_resnet() -> Cut:
    whole = resnet()
    return Cut(whole, split_sequential(whole, [5]), entropy, draw(M * 3, 3, 8, 8), tokens(M * 3, below=10))


@ways
def test_resnet_with_running_statistics(engine, schedule):
    compare(split_resnet(), engine, schedule)


def test_resnet_in_evaluation():
    cut = split_resnet()
    cut.whole.eval()
    compare(cut, "graph")


@engines
def test_recurrent_layers_that_hand_on_their_memory(engine):
    """Outputs of an LSTM go on as they are: ``(x, (h, c))`` are the arguments of the next."""
    layers = [nn.LSTM(8, 8).double() for _ in range(2)]
    last = Final()

    def whole(x: Tensor) -> Tensor:
        memory = None
        for layer in layers:
            x, memory = layer(x, memory)
        return last(x, memory)

    compare(Cut(whole, [*layers, last], squared, draw(M * 2, 2, 8), draw(M * 2, 2, 8)), engine)


class Final(nn.Module):
    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor]) -> Tensor:
        return x * memory[1]


class Packed(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]


def test_packed_sequences_want_the_eager_engine():
    layers = nn.Embedding(32, 8), Packed(8, 4, batch_first=True, bidirectional=True), nn.Linear(8, 32)
    whole = nn.Sequential(*layers).double()
    parts = split_sequential(whole, [1, 1, 2])  # an empty stage does nothing
    model = Cut(whole, parts, entropy, tokens(M * 2, 5), tokens(M * 2, 5))
    compare(model, "eager")
    for engine, reason in [("graph", "_pack_padded_sequence"), ("functional", "use the eager engine")]:
        with pytest.raises(pp.StageError, match=f"^stage 2: .*{reason}"):
            run(model, engine, "1f1b")


@ways
def test_encoder_layers_with_a_mask_among_the_extras(engine, schedule):
    layers = [
        nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=n % 2 == 0
        )
        for n in range(2)
    ]
    nn.ModuleList(layers).double()
    mask = (torch.arange(5) < torch.tensor([5, 3])[:, None]).logical_not()

    def whole(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, src_key_padding_mask=mask)
        return x

    extras = {s: {"src_key_padding_mask": mask.repeat(M, 1)} for s in range(2)}
    compare(Cut(whole, layers, squared, draw(M * 2, 5, 8), draw(M * 2, 5, 8), extras), engine, schedule)


class Experts(nn.Module):
    """A mixture of experts: the best two of them for every token, weighted by a softmax."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        return x + self.mixed(flat, weights, chosen).view_as(x)

    def mixed(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert sees all tokens: no shape depends on a value."""
        return sum(
            f(flat) * (weights * (chosen == e)).sum(-1, keepdim=True) for e, f in enumerate(self.experts)
        )


class Gathering(Experts):
    def mixed(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for e in chosen.unique():
            row, k = torch.where(chosen == e)
            out.index_add_(0, row, self.experts[e](flat.index_select(0, row)) * weights[row, k, None])
        return out


class Sorting(Experts):
    def mixed(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        given = zip(self.experts, flat[order // 2].split(counts), strict=True)
        made = torch.cat([expert(part) for expert, part in given]) * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, order // 2, made)


def mixture(experts: type[Experts]) -> Cut:
    whole = nn.Sequential(*(experts(8, 4) for _ in range(3))).double()
    # Few tokens and many experts: some microbatches leave an expert without any.
    return Cut(whole, split_sequential(whole, [1, 2]), squared, draw(M, 2, 8), draw(M, 2, 8))


@engines
def test_experts_that_see_all_tokens(engine):
    compare(mixture(Experts), engine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("engine", ["functional", "eager"])
@pytest.mark.parametrize("experts", [Gathering, Sorting])
def test_experts_by_data_dependent_routing(engine, experts, schedule):
    compare(mixture(experts), engine, schedule)


@pytest.mark.parametrize(("experts", "operator"), [(Gathering, "aten._unique2"), (Sorting, "aten.bincount")])
def test_data_dependent_routing_is_refused_by_name_when_traced(experts, operator):
    message = (
        rf"^stage 0: .* depend on the values of tensors \(operator {operator}.*use the functional engine"
    )
    with pytest.raises(pp.StageError, match=message):
        run(mixture(experts), "graph", "1f1b")


@engines
def test_parametrised_weights(engine):
    """Spectral norm has buffers, which its power iteration changes."""
    whole = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.Sequential(nn.PReLU(), nn.LayerNorm(8), nn.Linear(8, 4)),
    ).double()
    parts = split_sequential(whole, [1, 2, 3])
    compare(Cut(whole, parts, squared, draw(M * 3, 8), draw(M * 3, 4)), engine)

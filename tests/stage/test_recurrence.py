"""Recurrent layers on CUDA, whose kernels in cuDNN have no derivative that can be traced."""

from __future__ import annotations

import optree
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ppfunc as pp
from ppfunc.stage.abstract.evaluation import without_values
from ppfunc.stage.abstract.purity import WithoutCudnn
from ppfunc.stage.engines.tracing.joint import Record
from tests.models import normal, squared


class Recurrent(nn.Module):
    """A bidirectional layer and what it hands on: float64[b, t, d] to the same."""

    def __init__(self, kind: type[nn.RNNBase], d: int) -> None:
        super().__init__()
        self.memory, self.out = (
            kind(d, d, num_layers=2, batch_first=True, bidirectional=True),
            nn.Linear(2 * d, d),
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.memory(x)[0])


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize(
    "engine",
    [
        pp.engines.graph,
        pytest.param(pp.engines.graph(compile=True), marks=pytest.mark.compiler),
        pp.engines.eager,
    ],
    ids=["graph", "compiled", "eager"],
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_cuda_are_those_on_the_cpu(
    kind: type[nn.RNNBase], engine: pp.stage.Engine
) -> None:
    torch.manual_seed(0)
    stages, params, _ = zip(*(pp.stage_from_module(Recurrent(kind, 4)) for _ in range(2)), strict=True)
    given = dict(enumerate(params)), normal(4, 3, 4, seed=1), normal(4, 3, 4, seed=2)
    schedule = pp.zb_h1(2, 4)
    wanted = pp.value_and_grad(stages, squared, schedule, engine=pp.engines.eager)(*given)
    found = pp.value_and_grad(stages, squared, schedule, engine=engine)(
        *optree.tree_map(torch.Tensor.cuda, given)
    )
    for ours, theirs in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_layer_alone_runs_without_cudnn(kind: type[nn.RNNBase]) -> None:
    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add((func.overloadpacket.__name__, torch.backends.cudnn.enabled))
            return func(*args, **(kwargs or {}))

    seen: set[tuple[str, bool]] = set()
    net = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    with See(), WithoutCudnn():
        net(torch.zeros(2, 4))
        torch.cos(torch.zeros(2))
    assert ("cos", True) in seen and ("addmm", True) in seen and not all(enabled for _, enabled in seen)


def test_the_lines_of_a_stage_with_such_a_layer_are_known() -> None:
    """Where a stage ends was taken to be at the mode, above which no line and no module was looked for."""
    with without_values():
        x, record = torch.zeros(2), Record("the stage")
        record.place(x, "x")
        with record, WithoutCudnn():
            torch.cos(x)
    assert [node.meta["place"] for node in record.graph.nodes if __file__ in node.meta.get("place", "")]

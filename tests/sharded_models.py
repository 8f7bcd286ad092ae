"""Stages whose parameters and activations are cut over the ranks of an axis, beside the same stages whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

import ppfunc as pp
from ppfunc.stage.engines.tracing.graph import is_post, is_wait
from ppfunc.stage.tree import tree_leaves, tree_map

B, T, D, H = 2, 4, 4, 2
W = torch.float64


class Sharded(NamedTuple):
    """A stage in two forms.

    Args:
        whole: ``(params, x) -> y``.
        cut: ``(mesh) -> stage``, on the parts of a rank.
        shapes: of the parameters, whole.
        placements: of the parameters.
        x, y: the axis along which the input and the output are cut; None where they are whole on every rank.
    """

    whole: Callable[[Any, Tensor], Tensor]
    cut: Callable[[Any], Callable[[Any, Tensor], Tensor]]
    shapes: dict[str, tuple[int, ...]]
    placements: dict[str, Placement]
    x: int | None = None
    y: int | None = None

    def params(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, dtype=W, generator=generator) / 2 for name, shape in self.shapes.items()
        }

    def parts(self, params: Any, rank: int, size: int) -> Any:
        """The parameters of one rank, or tensors of their shapes."""
        return {name: part(t, self.placements[name], rank, size) for name, t in params.items()}


def part(t: Tensor, placement: Placement | int | None, rank: int, size: int) -> Tensor:
    axis = (
        placement.dim if isinstance(placement, Shard) else placement if isinstance(placement, int) else None
    )
    return t if axis is None else t.chunk(size, axis)[rank].clone()


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=W, generator=torch.Generator().manual_seed(seed))


def rows_and_columns(mesh: Any) -> Callable[[Any, Tensor], Tensor]:
    """A column-parallel layer, then a row-parallel one."""

    def stage(p: Any, x: Tensor) -> Tensor:
        return (
            x
            + pp.collectives.psum(torch.tanh(pp.collectives.pvary(x, mesh) @ p["a"]) @ p["b"], mesh) * p["c"]
        )

    return stage


def sequence(mesh: Any) -> Callable[[Any, Tensor], Tensor]:
    """The same with activations that are cut along time, and a gain that every rank applies to its own."""

    def stage(p: Any, x: Tensor) -> Tensor:
        gain = pp.collectives.pvary(p["c"], mesh)
        h = torch.tanh(pp.collectives.all_gather(x * gain, mesh, 1) @ p["a"]) @ p["b"]
        return x + pp.collectives.psum_scatter(h, mesh, 1) * gain

    return stage


def mixed(q: Tensor) -> Tensor:
    """Attention of every head over all of time: [b, t, h, e]."""
    scores = torch.einsum("bthe,bshe->bhts", q, q).softmax(-1)
    return torch.einsum("bhts,bshe->bthe", scores, q)


def heads(mesh: Any) -> Callable[[Any, Tensor], Tensor]:
    """Attention between two exchanges: of time for heads, and back."""

    def stage(p: Any, x: Tensor) -> Tensor:
        q = (x @ pp.collectives.pvary(p["w"], mesh)).unflatten(-1, (H, D // H))
        y = mixed(pp.collectives.all_to_all(q, mesh, 2, 1))
        return x + pp.collectives.all_to_all(y, mesh, 1, -2).flatten(-2)

    return stage


def vocabulary(mesh: Any) -> Callable[[Any, Tensor], Tensor]:
    """A head that is cut over its outputs, of which every rank takes the same softmax."""
    return lambda p, x: pp.collectives.all_gather(
        pp.collectives.pvary(x, mesh) @ p["w"], mesh, -1, replicated=True
    ).log_softmax(-1)


def mlp(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["a"]) @ p["b"] * p["c"]


_MLP = {"a": (D, 4 * D), "b": (4 * D, D), "c": (D,)}
_ROWS: dict[str, Placement] = {"a": Shard(1), "b": Shard(0), "c": Replicate()}

MODELS = {
    "rows and columns": Sharded(mlp, rows_and_columns, _MLP, _ROWS),
    "sequence": Sharded(
        lambda p, x: x + torch.tanh((x * p["c"]) @ p["a"]) @ p["b"] * p["c"], sequence, _MLP, _ROWS, 1, 1
    ),
    "heads": Sharded(
        lambda p, x: x + mixed((x @ p["w"]).unflatten(-1, (H, D // H))).flatten(-2),
        heads,
        {"w": (D, D)},
        {"w": Replicate()},
        1,
        1,
    ),
    "vocabulary": Sharded(
        lambda p, x: (x @ p["w"]).log_softmax(-1), vocabulary, {"w": (D, 2 * D)}, {"w": Shard(1)}
    ),
}


def largest_difference(one: Any, other: Any) -> float:
    """Of two trees, relative to the largest entry."""
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def full(tree: Any) -> Any:
    """The tree with DTensors made whole."""
    return tree_map(lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t, tree)


def experts(mesh: Any) -> Callable[[Any, Tensor], Tensor]:
    """An expert of every rank between two exchanges of tokens, beside one that all ranks have."""

    def stage(p: Any, x: Tensor) -> Tensor:
        sent = pp.collectives.all_to_all(torch.tanh(x @ p["route"]), mesh, 0, 1)
        h = torch.tanh(sent @ p["up"]) @ p["down"]
        back = pp.collectives.all_to_all(h, mesh, 1, 0)
        return x + back + torch.tanh(x @ p["shared"])

    return stage


def expert_params(seed: int, width: int = D) -> dict[str, Tensor]:
    names = enumerate(("route", "up", "down", "shared"))
    return {name: random((width, width), 10 * seed + n) / width**0.5 for n, name in names}


def products_beside(body: Any) -> list[int]:
    """How many products stand between each collective of a program and its wait."""
    at = {node: n for n, node in enumerate(body)}
    waits = {node.args[0]: n for node, n in at.items() if is_wait(node)}
    gaps = [body[n : waits[node]] for node, n in at.items() if is_post(node)]
    return [sum(node.name.startswith("mm") for node in gap) for gap in gaps]

"""Communicate between the ranks of a mesh axis inside stages, by collectives whose derivatives are right to
any order.
"""

from collections.abc import Callable
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from ppfunc._checks import naming_arguments

from ._torch import FUNCTIONAL_COLLECTIVES as functional, load_collectives
from .layout import require_axis

__all__ = ["all_gather", "all_to_all", "context_attention", "psum", "psum_scatter", "pvary"]


def psum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum ``x`` over the ranks of an axis; every rank gets the sum.

    All ranks must go on to compute the same with it, as after a row-parallel layer. Its gradient is then the
    same everywhere, and passes unchanged to what each rank adds. A plain all-reduce would multiply it by the
    number of ranks.

    Args:
        x: the same shape on every rank.
        mesh: an axis of a mesh, such as ``mesh["tp"]``.

    Raises:
        TypeError, ValueError: not a tensor of numbers, or not one axis of a mesh.

    References:
        Shoeybi et al., Megatron-LM, 2019, section 3 (``g``); ``jax.lax.psum``.
    """
    return _apply("psum", x, mesh)


def pvary(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mark ``x``, the same on all ranks of an axis, as used differently by each; the transpose of `psum`.

    Returns ``x``. Its gradient is the sum over ranks: use it before a column-parallel layer, and around a
    replicated parameter that each rank uses on its own part of the data. Arguments as of :func:`psum`.

    References:
        Shoeybi et al., Megatron-LM, 2019, section 3 (``f``); ``jax.lax.pvary``.
    """
    return _apply("pvary", x, mesh)


def all_gather(x: Tensor, mesh: DeviceMesh, axis: int = 0, *, replicated: bool = False) -> Tensor:
    """Join the ``x`` of all ranks along ``axis``; the transpose of `psum_scatter`.

    Args:
        x, mesh: tensor and axis, see :func:`psum`.
        axis: the axis along which they are joined.
        replicated: whether all ranks go on to compute the same with it, such as a loss; its gradient is then
            the same everywhere, and each takes its part. By default each computes something else, and their
            gradients are summed.
    """
    return _apply("gather" if replicated else "all_gather", x, mesh, axis)


def psum_scatter(x: Tensor, mesh: DeviceMesh, axis: int = 0) -> Tensor:
    """Sum ``x`` over the ranks, of which each gets a part along ``axis``; the transpose of `all_gather`.

    Arguments as of :func:`all_gather`; the number of ranks divides the size of the axis.
    """
    return _apply("psum_scatter", x, mesh, axis)


def all_to_all(x: Tensor, mesh: DeviceMesh, split_axis: int, concat_axis: int) -> Tensor:
    """Cut ``x`` along ``split_axis``, send part ``i`` to rank ``i``; join the parts that come.

    Its transpose exchanges back, with the two axes in the other order. The parts are equal: the shapes in a
    stage are known before it runs, so that no count of tokens can be one of them. Send tokens to experts in
    rows of a fixed number, of zeros where there is no token.

    Args:
        x, mesh: tensor and axis, see :func:`psum`.
        split_axis: the axis that is cut, into as many parts as there are ranks.
        concat_axis: the axis along which the parts from all ranks are joined, in their order.
    """
    return _apply("all_to_all", x, mesh, split_axis, concat_axis)


@naming_arguments
def context_attention(q: Tensor, k: Tensor, v: Tensor, axis: DeviceMesh, causal: bool = True) -> Tensor:
    """Attend over sequences that are cut over the ranks of an axis, in the order of the ranks.

    Equivalent to, of whole sequences, the part of this rank of::

        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    Ranks exchange heads for time, and back: each attends over all of time for its part of the heads. So no
    rank waits for others under a causal mask, and all derivatives are those of the whole. As there, second
    derivatives want the kernel ``SDPBackend.MATH``, which :func:`ppfunc.hvp` and its siblings take.

    Args:
        q: float[b, heads, t, d]; the ranks divide the heads.
        k, v: likewise, of as many heads, or of a divisor of them; of another time only if not ``causal``.
        axis: an axis of a mesh, such as ``mesh["cp"]``.
        causal: each position attends to itself and those before it.

    Returns:
        float[b, heads, t, width of v].

    Raises:
        TypeError, ValueError: shapes or dtypes that do not go together, or not one axis of a mesh.

    References:
        Jacobs et al., DeepSpeed Ulysses, 2023.
    """
    require_axis(axis, "context_attention")
    if not all(isinstance(t, Tensor) and t.dtype == q.dtype and t.is_floating_point() for t in (q, k, v)):
        dtypes = ", ".join(str(getattr(t, "dtype", type(t).__name__)) for t in (q, k, v))
        raise TypeError(f"context_attention: got q, k, v of {dtypes}, expected floating point, of one dtype")
    ranks, shapes = axis.size(), [list(t.shape) for t in (q, k, v)]
    if (
        any(t.ndim != 4 or not t.shape[1] for t in (q, k, v))
        or shapes[1][:3] != shapes[2][:3]
        or shapes[0][::3] != shapes[1][::3]
        or (causal and q.shape[2] != k.shape[2])
        or q.shape[1] % k.shape[1]
        or q.shape[1] % ranks
    ):
        raise ValueError(
            f"context_attention: got q, k, v of the shapes {', '.join(map(str, shapes))}, expected [b, heads,"
            f" t, d], of one b, d of q and k{', and t' if causal else ''}, with a number of heads of q that"
            f" the {ranks} ranks and the heads of k and v divide"
        )
    groups = k.shape[1]
    copies = lcm(groups, ranks) // groups  # each rank has a whole number of heads of k and v
    if copies > 1:
        k, v = (t.repeat_interleave(copies, 1) for t in (k, v))
    q, k, v = (all_to_all(t, axis, 1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    y = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return all_to_all(y, axis, 2, 1)


class _Collective(NamedTuple):
    """Describe a linear map over the ranks of a group."""

    kind: str
    group: str
    size: int
    rank: int
    axes: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_complex() and self.kind != "pvary":
            return torch.view_as_complex(
                _MAPS[self.kind](self, torch.view_as_real(x.resolve_conj())).contiguous()
            )
        return _MAPS[self.kind](self, x)

    @property
    def transpose(self) -> "_Collective":
        return self._replace(kind=_TRANSPOSES.get(self.kind, self.kind), axes=self.axes[::-1])

    @property
    def batched(self) -> "_Collective":
        """Return the same map for tensors with a further axis in front."""
        return self._replace(axes=tuple(axis + 1 for axis in self.axes))


class _Communicate(torch.autograd.Function):
    """Applies a collective; all of its derivatives do as well, so that they can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, collective: _Collective) -> Tensor:
        return collective(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Collective], output: Tensor) -> None:
        ctx.collective = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Communicate.apply(gradient, ctx.collective.transpose), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return _Communicate.apply(tangent, ctx.collective)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, collective: _Collective) -> Any:
        return _Communicate.apply(x.movedim(in_dims[0], 0), collective.batched), 0


def _apply(kind: str, x: Tensor, mesh: DeviceMesh, *axes: int) -> Tensor:
    load_collectives()
    name = {"gather": "all_gather"}.get(kind, kind)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
    if x.dtype is torch.bool:
        raise TypeError(f"{name}: got a tensor of booleans, expected one of numbers; convert it: x.int()")
    require_axis(mesh, name)
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"{name}: got the axis {axis} of a tensor of shape {list(x.shape)}, expected one that it has"
            )
    size, places = mesh.size(), tuple(axis % x.ndim for axis in axes)
    if kind in ("psum_scatter", "all_to_all") and x.shape[places[0]] % size:
        raise ValueError(
            f"{name}: got the shape {list(x.shape)}, axis {axes[0]} of which {size} ranks do not divide; pad"
            " it to a multiple"
        )
    return _Communicate.apply(
        x, _Collective(kind, mesh.get_group().group_name, size, mesh.get_local_rank(), places)
    )


# -- the maps; what a group sends is contiguous, cut and joined along its first axis


def _along_axis(operator: Callable[..., Tensor], *options: Any) -> Callable[[_Collective, Tensor], Tensor]:
    """Make a map along any axis from a collective operator, which joins or cuts along axis 0."""

    def apply(self: _Collective, x: Tensor) -> Tensor:
        rows = x.movedim(self.axes[0], 0).contiguous()
        joined = functional.wait_tensor(operator(rows, *options, self.size, self.group))
        return joined.movedim(0, self.axes[0])

    return apply


def _all_to_all(self: _Collective, x: Tensor) -> Tensor:
    split, concat = self.axes
    rows = x.movedim(split, 0).contiguous()
    counts = [len(rows) // self.size] * self.size
    received = functional.wait_tensor(functional.all_to_all_single(rows, counts, counts, self.group))
    parts = received.unflatten(0, (self.size, -1))
    return parts.movedim(1, split + 1).movedim(0, concat).flatten(concat, concat + 1)


_all_gather = _along_axis(functional.all_gather_into_tensor)

_MAPS: dict[str, Callable[[_Collective, Tensor], Tensor]] = {
    "psum": lambda self, x: functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", self.group)),
    "pvary": lambda self, x: x.view_as(x),
    "all_gather": _all_gather,
    "psum_scatter": _along_axis(functional.reduce_scatter_tensor, "sum"),
    "gather": _all_gather,
    "part": lambda self, x: x.chunk(self.size, self.axes[0])[self.rank].clone(),
    "all_to_all": _all_to_all,
}

_TRANSPOSES = {
    "psum": "pvary",
    "pvary": "psum",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "gather": "part",
    "part": "gather",
}

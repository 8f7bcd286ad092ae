"""Attend causally in slices of sequences, whose keys and values so far are a carry."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ppfunc._checks import naming_arguments, require_counts, shown

from ._torch import transforms

aten = torch.ops.aten

Carry = tuple[tuple[Tensor, Tensor], ...]


@naming_arguments
def carried_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carry: Sequence[tuple[Tensor, Tensor]] | None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Carry]:
    """Attend causally in a slice of a sequence, to its tokens so far and to the slices before.

    Equivalent to, for the slice with the tokens ``start..end-1`` of whole sequences::

        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[:, :, start:end]

    On a CPU a fused kernel attends to the slice and to each slice before, without a mask, and the results are
    weighed by their normalisers. Second and higher derivatives are derivatives of the formula, unfused.
    Elsewhere, and where values have another width than keys, torch attends to all keys under a mask.

    Args:
        q: queries of the slice, float[b, heads, t, d].
        k, v: keys and values of the slice, float[b, heads of q or a divisor, t, d]; values may have another
            width.
        carry: keys and values of the slices before, as the call for the last of them returned; None for the
            first slice.
        scale: factor of the products of queries and keys, float above 0; ``d ** -0.5`` by default.
        window: count of the tokens that a query sees, itself and those before, int; all by default. The carry
            is a view of the last ``window - 1`` of them.

    Returns:
        ``(y, carry)``: float[b, heads, t, width of v], and pairs ``(keys, values)``, the last of which are
        ``k`` and ``v``, not copied; with a window, one pair. To decode token by token, join the pairs now and
        then: ``(tuple(torch.cat(part, 2) for part in zip(*carry)),)``.

    Raises:
        TypeError, ValueError: shapes or dtypes that do not go together, or a carry of another form.

    References:
        Sun et al., Seq1F1B, 2024; Liu et al., Ring Attention, 2023, for the normaliser.

    >>> q, k, v = torch.randn(3, 2, 4, 6, 8)
    >>> whole, _ = carried_attention(q, k, v, None)
    >>> first, carry = carried_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], None)
    >>> second, carry = carried_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], carry)
    >>> torch.allclose(torch.cat((first, second), 2), whole, atol=1e-5), len(carry)
    (True, 2)
    """
    past = () if carry is None else carry
    _require(q, k, v, past)
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        raise ValueError(f"scale: got {shown(scale)}, expected a number above 0, or None for d ** -0.5")
    seen = (*past, (k, v))
    if window is not None:
        require_counts(window=window)
        k, v = (torch.cat(parts, 2) for parts in zip(*seen, strict=True))
        past, seen = (), ((k[:, :, 1 - window :], v[:, :, 1 - window :]),) if window > 1 else ()
    given = q, k, v, *(part for pair in past for part in pair)
    if "Jvp" in transforms():  # an autograd.Function cannot be differentiated forward twice
        return _unfused(scale, window, *given), seen
    if q.device.type == "cpu" and q.shape[3] == v.shape[3]:
        return _Attention.apply(scale, window, *given)[0], seen
    return _joined(scaled_dot_product_attention, scale, window, *given), seen


def _require(q: Tensor, k: Tensor, v: Tensor, past: Any) -> None:
    """Raise for tensors that do not go together, and for a carry of another form."""
    for name, part in {"q": q, "k": k, "v": v}.items():
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.dtype != q.dtype:
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"{name}: got {got}, expected floating point, the same dtype for q, k and v")
    b, heads, tokens, d = q.shape if q.ndim == 4 else (0,) * 4
    groups = k.shape[1] if k.ndim == 4 else 0
    if (
        not (tokens and groups)
        or heads % groups
        or k.shape != (b, groups, tokens, d)
        or v.shape[:-1] != k.shape[:-1]
    ):
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise ValueError(
            f"q, k, v: got the shapes {shapes}, expected [b, heads, t, d] of one slice, at least one token,"
            " and heads of k and v in a number that divides the heads of q"
        )
    if not isinstance(past, list | tuple) or not all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(
            isinstance(old, Tensor)
            and (old.ndim, old.dtype, old.shape[:2], old.shape[3:])
            == (4, q.dtype, (b, groups), new.shape[3:])
            and old.shape[2] == pair[0].shape[2] > 0
            for old, new in zip(pair, (k, v), strict=True)
        )
        for pair in past
    ):
        raise ValueError(
            f"carry: got {shown(past)}, expected the carry of the slice before, pairs (keys, values) of"
            f" {q.dtype}[{b}, {groups}, tokens, {d} and {v.shape[3]}], or None for the first slice"
        )


_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MATH = aten._scaled_dot_product_attention_math.default


def _bias(q: Tensor, k: Tensor, window: int | None) -> Tensor | None:
    """Return float[t, tokens of k], -inf where a query does not see a key.

    Returns None for a plain causal mask, which kernels make themselves.
    """
    t, tokens = q.shape[2], k.shape[2]
    if t == tokens and (window is None or window >= t):
        return None
    hidden = torch.full((t, tokens), float("-inf"), dtype=q.dtype, device=q.device)
    after = hidden.triu(tokens - t + 1)
    return after if window is None else after + hidden.tril(tokens - t - window)


def _dense(t: Tensor) -> Tensor:
    """Return a tensor whose last axis has no gaps, which the kernels take for granted."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _joined(attend: Callable[..., Tensor], scale: float | None, window: int | None, *given: Tensor) -> Tensor:
    """Attend to all keys at once, under a mask."""
    q, k, v, *past = given
    k, v = torch.cat((*past[::2], k), 2), torch.cat((*past[1::2], v), 2)
    bias = _bias(q, k, window)
    return attend(q, k, v, bias, 0.0, bias is None, scale=scale, enable_gqa=True)


def _unfused(*given: Any) -> Tensor:
    """Attend by the formula, which has derivatives of any order."""
    return _joined(lambda *args, **options: _MATH(*args, **options)[0], *given)


def _unfused_backward(
    scale: float | None, window: int | None, _y: Tensor, _norm: Tensor, gy: Tensor, *given: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients by the formula, from the queries, keys and values alone."""
    return torch.func.vjp(partial(_unfused, scale, window), *given)[1](gy)


class _Attention(torch.autograd.Function):
    """Attends to the slice and to each slice before; returns also the logarithm of the normaliser."""

    @staticmethod
    def forward(scale: float | None, window: int | None, *given: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *past = map(_dense, given)
        bias = _bias(q, k, window)
        y, norm = _FLASH(q, k, v, is_causal=bias is None, attn_mask=bias, scale=scale)
        wide = torch.promote_types(q.dtype, torch.float32)  # which torch 2.11 takes for float32 when traced
        norm = norm.to(wide)
        for keys, values in zip(past[::2], past[1::2], strict=True):
            more, other = _FLASH(q, keys, values, scale=scale)
            other = other.to(wide)
            y = torch.lerp(y.to(wide), more.to(wide), (other - norm).sigmoid().unsqueeze(-1))
            norm = torch.logaddexp(norm, other)
        return y.to(q.dtype), norm

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[:2]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y, norm, *given = ctx.saved_tensors
        return None, None, *_Backward.apply(*ctx.options, y, norm, gradients[0], *given)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        return _folded(_Attention, info, dims, inputs)


class _Backward(torch.autograd.Function):
    """Computes the gradients: under the normaliser of all keys, those of the slices add up."""

    @staticmethod
    def forward(
        scale: float | None, window: int | None, y: Tensor, norm: Tensor, gy: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        y, q, k, v, *past = map(_dense, (y, *given))
        bias = _bias(q, k, window)
        gq, *rest = _FLASH_BACKWARD(gy, q, k, v, y, norm, 0.0, bias is None, attn_mask=bias, scale=scale)
        for pair in zip(past[::2], past[1::2], strict=True):
            more, *gradients = _FLASH_BACKWARD(gy, q, *pair, y, norm, 0.0, False, scale=scale)
            gq, rest = gq + more, rest + gradients
        return gq, *rest

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pull = torch.func.vjp(partial(_unfused_backward, *ctx.options), *ctx.saved_tensors)[1]
        return None, None, *pull(gradients)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        return _folded(_Backward, info, dims, inputs)


def _folded(function: Any, info: Any, dims: Any, inputs: Any) -> Any:
    """Call a function on tensors whose mapped axis is folded into their first."""
    n = info.batch_size
    folded = (
        (t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
        for t, dim in zip(inputs[2:], dims[2:], strict=True)
    )
    results = function.apply(*inputs[:2], *folded)
    return tuple(t.unflatten(0, (n, -1)) for t in results), (0,) * len(results)

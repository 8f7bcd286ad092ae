"""Count multiplications and additions of operators: torch's formulas, and ours where torch has no formula.

Splitting, costs on paper, tuning and the choice of what is computed again all count by these.
"""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

aten = torch.ops.aten

_FORMULAS: dict[tuple[Any, ...], Any] = {  # by shapes, first of the arguments, then of the result
    (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_fused_attention_overrideable,
        aten._scaled_dot_product_attention_math_for_mps,
    ): lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_fused_attention_overrideable_backward,
    ): lambda gy, q, k, v, *_, **__: sdpa_backward_flop_count(gy, q, k, v),
    (aten.linear, aten.mv, aten.dot, aten.vdot, aten._int_mm): (
        lambda a, *_, out_shape, **__: 2 * prod(out_shape) * a[-1]
    ),
    (aten.addmv,): lambda _, a, *__, out_shape, **___: 2 * prod(out_shape) * a[-1],
    (aten.addbmm,): lambda _, a, *__, out_shape, **___: 2 * prod(out_shape) * a[0] * a[-1],
    # Of two matrices, the axis that is summed over is cut into the groups.
    (aten._grouped_mm, aten._scaled_grouped_mm): lambda a, b, *_, out_shape, **__: (
        2 * prod(out_shape) * a[-1] // (out_shape[0] if len(a) == len(b) == 2 else 1)
    ),
}
# By operators of which the registry of this torch has no formula.
OWN: dict[Any, Any] = {
    packet: count for packets, count in _FORMULAS.items() for packet in packets if packet not in flop_registry
}


def flops_of(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Count the operations of a call; 0 for an operator without products.

    >>> flops_of(aten.mv, (torch.ones(2, 3), torch.ones(3)), {}, torch.ones(2))
    12
    """
    formula = flop_registry.get(packet) or (packet in OWN and shape_wrapper(OWN[packet]))
    return formula(*args, **kwargs, out_val=result) if formula else 0


def flop_counter() -> FlopCounterMode:
    """Make torch's counter, with all formulas."""
    return FlopCounterMode(display=False, custom_mapping=OWN)

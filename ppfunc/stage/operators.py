"""Tell the effects of operators of torch: writes, draws, communication; and count their operations."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from ._torch import OpOverload, schema

aten = torch.ops.aten

# Namespaces of the operators that communicate.
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether this call draws random numbers.

    Attention with a dropout of zero does not, nor does a backward that is given the seed of its forward.

    >>> draws(torch.ops.aten.rand_like.default, (torch.zeros(2),), {})
    True
    >>> draws(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, (), {"dropout_p": 0.5})
    False
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = schema(func).arguments
    if any(argument.name == "philox_seed" for argument in arguments):
        return False
    for position, argument in enumerate(arguments):
        if argument.name in ("dropout_p", "dropout"):
            if position < len(args):
                return args[position] != 0
            return kwargs.get(argument.name, argument.default_value) != 0
    return True


# Operators that write into running statistics in training without declaring it.
_NORMS = "batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"
_RUNNING_STATISTICS = {getattr(aten, name).default for name in _NORMS}


class _Effects(NamedTuple):
    """Describe the effects of an operator.

    Args:
        writes: positions and names of the arguments that it writes into.
        statistics: whether it writes into running statistics without declaring it.
        seeded: whether it may draw random numbers.
        view: whether its results may be views of its arguments.
    """

    writes: tuple[tuple[int, str], ...] = ()
    statistics: bool = False
    seeded: bool = False
    view: bool = False


@cache
def effects_of(func: Any) -> _Effects:
    """Read the effects of an operator from its schema; a function that is no operator has no effects."""
    if not isinstance(func, OpOverload):
        return _Effects()
    arguments = enumerate(schema(func).arguments)
    writes = tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    # The argument of `lift_fresh` is a tensor just made of Python or numpy data.
    view = func is not aten.lift_fresh.default and any(
        result.alias_info is not None for result in schema(func).returns
    )
    return _Effects(writes, func in _RUNNING_STATISTICS, torch.Tag.nondeterministic_seeded in func.tags, view)


def is_collective(func: Any) -> bool:
    """Tell whether an operator communicates, or waits for a communication."""
    return getattr(func, "namespace", "") in _COLLECTIVES


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that a call of an operator writes into."""
    effects = effects_of(func)
    values: list[Any] = [args[n] if n < len(args) else kwargs.get(name) for n, name in effects.writes]
    if effects.statistics and args[5]:
        values += args[3:5]
    return list(tensors_in(values))


def flat(values: Any) -> Iterator[Any]:
    """Iterate over arguments or results of operators, which nest tuples, lists and dictionaries alone."""
    inside = values.values() if isinstance(values, dict) else values
    for value in inside if isinstance(values, (tuple, list, dict)) else (values,):
        if isinstance(value, (tuple, list, dict)):
            yield from flat(value)
        else:
            yield value


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among the arguments or results of an operator."""
    return (value for value in flat(values) if isinstance(value, torch.Tensor))


# -- multiplications and additions: torch's formulas, and ours where torch has no formula


def _of_heads(q: Sequence[int], *others: Sequence[int]) -> tuple[Sequence[int], ...]:
    """Return the shapes of queries, keys and values, all with the heads of the queries."""
    return q, *((b, q[1], *rest) for b, _, *rest in others)


@cache
def own_formulas() -> dict[Any, Any]:
    """Return the formulas of the operators that the registry of this torch lacks."""
    # Takes time to import, as the other functions of its module do.
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    formulas: dict[tuple[Any, ...], Any] = {  # by shapes, first of the arguments, then of the result
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_fused_attention_overrideable,
            aten._scaled_dot_product_attention_math_for_mps,
        ): lambda q, k, v, *_, **__: sdpa_flop_count(*_of_heads(q, k, v)),
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            aten._scaled_dot_product_fused_attention_overrideable_backward,
        ): lambda gy, q, k, v, *_, **__: sdpa_backward_flop_count(gy, *_of_heads(q, k, v)),
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
    return {
        packet: count
        for packets, count in formulas.items()
        for packet in packets
        if packet not in flop_registry
    }


def flops_of(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Count the operations of a call; 0 for an operator without products.

    >>> flops_of(aten.mv, (torch.ones(2, 3), torch.ones(3)), {}, torch.ones(2))
    12
    """
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    own = own_formulas()
    formula = flop_registry.get(packet) or (packet in own and shape_wrapper(own[packet]))
    return formula(*args, **kwargs, out_val=result) if formula else 0


def flop_counter() -> Any:
    """Make torch's counter, with all formulas."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping=own_formulas())

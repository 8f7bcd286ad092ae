"""Give instructions their cost on paper: time, messages, memory."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Rational, Real
from typing import Any, Literal, Self, get_args, overload

Number = Any  # int, float or Fraction; nothing is converted
PerStage = Number | Sequence[Number] | Mapping[int, Number]
_Optional = Literal["backward", "overlapped", "bandwidth"]


@dataclass(frozen=True, repr=False)
class Costs:
    """Times and sizes per stage, in any unit; ints and Fractions stay exact.

    Every value is one number for all stages, a sequence with one number per stage, or a mapping
    from some stages to numbers, where the others keep the default.

    Args:
        forward: time of F.
        backward_input: time of I.
        backward_weight: time of W.
        backward: time of B; by default that of I and W together.
        overlapped: time of an overlapped pair, by the stage of its forward; by default that of
            its two parts together.
        communication: latency of a message, by the stage that sends it.
        bytes: size of a message, by the stage that sends it.
        bandwidth: bytes per unit of time, by the stage that sends; by default without limit.
        activation: memory that a forward keeps for its backward.
        weight_share: share of it that is held on from I to W, between 0 and 1.
        parameters: memory that the stage takes all the time: parameters, gradients, optimizer state.
        unshard: time of UNSHARD, which runs beside compute.
        reduce_tied: time of REDUCE_TIED, likewise.
        reduce_grad: time of REDUCE_GRAD, likewise.
        step: time of STEP.

    Raises:
        ValueError: a negative number, one that is not a number, a bandwidth of zero.

    >>> Costs(forward=1, backward=2).of("backward", stage=0)
    2
    >>> Costs(forward=[1, 2], communication={0: 3}).of("forward", stage=1)
    2
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    backward: PerStage | None = None
    overlapped: PerStage | None = None
    communication: PerStage = 0
    bytes: PerStage = 0
    bandwidth: PerStage | None = None
    activation: PerStage = 1
    weight_share: PerStage = 0
    parameters: PerStage = 0
    unshard: PerStage = 0
    reduce_tied: PerStage = 0
    reduce_grad: PerStage = 0
    step: PerStage = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            for value in _values(getattr(self, field.name)):
                _require(field.name, value)

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"Costs({', '.join(f'{name}={reprlib.repr(value)}' for name, value in given if value is not getattr(Costs, name))})"

    @overload
    def of(self, name: _Optional, stage: int) -> Number | None: ...

    @overload
    def of(self, name: str, stage: int) -> Number: ...

    def of(self, name: str, stage: int) -> Number | None:
        """Return the value ``name`` for ``stage``; None where a value is left out that may be."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            return value.get(stage, getattr(type(self), name))
        return value[stage] if isinstance(value, Sequence) else value

    def fitting(self, stages: int) -> Self:
        """Return these costs after checking that they fit a schedule of so many stages.

        Raises:
            ValueError: a sequence of another length, a mapping with a stage that does not exist.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence) and len(value) != stages:
                raise ValueError(f"{field.name} has {len(value)} numbers, expected {stages}, one per stage")
            unknown = [s for s in value if s not in range(stages)] if isinstance(value, Mapping) else []
            if unknown:
                raise ValueError(f"{field.name} names stage {unknown[0]!r}, expected stages from 0 to {stages - 1}")
        return self

    def backward_of(self, stage: int) -> Number:
        """Return the time of a whole backward."""
        whole = self.of("backward", stage)
        return self.of("backward_input", stage) + self.of("backward_weight", stage) if whole is None else whole

    def pair_of(self, forward: int, backward: int, whole: bool = True) -> Number:
        """Return the time of an overlapped pair from the stages of its parts; ``whole`` for B, else I."""
        given = self.of("overlapped", forward)
        if given is not None:
            return given
        return self.of("forward", forward) + (self.backward_of(backward) if whole else self.of("backward_input", backward))

    def message_of(self, stage: int) -> Number:
        """Return the time from the end of a producer in ``stage`` until another rank has its product."""
        latency, size, bandwidth = self.of("communication", stage), self.of("bytes", stage), self.of("bandwidth", stage)
        if not size or bandwidth is None:
            return latency
        if isinstance(size, Rational) and isinstance(bandwidth, Rational):
            from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

            return latency + Fraction(size, bandwidth)
        return latency + size / bandwidth


def _values(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _require(name: str, value: Any) -> None:
    if value is None and name in get_args(_Optional):
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected a number")
    if value < 0 or not value < float("inf"):
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0")
    if name == "bandwidth" and value == 0:
        raise ValueError("bandwidth is 0, expected more; leave it out for messages that take no time per byte")
    if name == "weight_share" and not value <= 1:
        raise ValueError(f"weight_share is {value}, expected at most 1")

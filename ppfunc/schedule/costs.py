"""Give instructions their cost on paper: time, messages, memory."""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Rational, Real
from typing import Any, Self

from ppfunc._checks import naming_arguments, require_counts, require_type, show_table, table

from .errors import require_schedule
from .instruction import KINDS, Op
from .json import plain, read_values
from .schedule import Schedule

Number = Any  # int, float or Fraction; nothing is converted
PerStage = Number | Sequence[Number] | Mapping[int, Number]
_OPTIONAL = ("backward", "overlapped", "bandwidth", "recompute", "offload", "fetch")
_MOST = 1e100  # sums of many stay within the floats
OF_THE_MODEL = (  # divided where the model is cut into more stages
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "overlapped",
    "unshard",
    "reduce_tied",
    "reduce_grad",
    "step",
    "recompute",
    "offload",
    "fetch",
    "activation",
    "parameters",
)
OF_A_STAGE = ("unshard", "reduce_tied", "reduce_grad", "step", "parameters")  # whatever the microbatches
OF_A_SLICE = (*(name for name in OF_THE_MODEL if name not in OF_A_STAGE), "checkpoint", "bytes")


@naming_arguments
@dataclass(frozen=True, repr=False)
class Costs:
    """Hold times and sizes per stage, in any unit; ints and Fractions stay exact.

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
        recompute: time of RECOMPUTE; by default that of F. A plan recomputes where it is given.
        checkpoint: memory that a forward keeps for its RECOMPUTE: the inputs of the stage.
        offload: time of OFFLOAD, which copies all residuals of a microbatch to the host; by default none. A
            plan offloads where it is given.
        fetch: time of FETCH, which copies them back; by default that of OFFLOAD.
        parameters: memory that the stage takes all the time: parameters, gradients, optimizer state.
        unshard: time of UNSHARD, which runs beside compute.
        reduce_tied: time of REDUCE_TIED, which runs beside compute.
        reduce_grad: time of REDUCE_GRAD, which runs beside compute.
        step: time of STEP.
        seconds: whether times are seconds, so that texts and pictures say so; by default they have no unit.
        slices: costs of each slice of a sequence, for schedules with as many slices; by default all slices
            have the numbers beside. The numbers beside are then costs of whole sequences, for schedules
            without slices, and costs of stages.

    Raises:
        ValueError: a negative number, one that is not a number, a bandwidth of zero; costs of a slice that
            have slices, or numbers that belong to a stage.

    >>> Costs(forward=1, backward=2).of("backward", stage=0)
    2
    >>> Costs(forward=[1, 2], communication={0: 3}).of("forward", stage=1)
    2
    >>> Costs(forward=4, slices=[Costs(forward=1), Costs(forward=3)]).of_slice(1).of("forward", stage=0)
    3
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
    recompute: PerStage | None = None
    checkpoint: PerStage = 0
    offload: PerStage | None = None
    fetch: PerStage | None = None
    parameters: PerStage = 0
    unshard: PerStage = 0
    reduce_tied: PerStage = 0
    reduce_grad: PerStage = 0
    step: PerStage = 0
    _: KW_ONLY
    seconds: bool = False
    slices: Sequence["Costs"] = ()

    def __post_init__(self) -> None:
        for name, value in self.numbers.items():
            for number in _values(value):
                _require(name, number)
        require_type("slices", self.slices, Sequence, "costs of each slice")
        for n, costs in enumerate(self.slices):
            require_type(f"slices[{n}]", costs, Costs, "Costs(forward=..., ...)")
            if wrong := costs._changed().keys() & {"slices", *OF_A_STAGE}:
                raise ValueError(
                    f"slices[{n}] has {min(wrong)}, which belongs to a stage: give it beside slices"
                )

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the values that are numbers, of all stages or per stage, by name."""
        return {name: value for name, value in vars(self).items() if name not in ("seconds", "slices")}

    @property
    def per_stage(self) -> dict[str, Any]:
        """Return the values that are sequences or mappings, by name; slices' too."""
        mine = {k: v for k, v in self.numbers.items() if isinstance(v, Sequence | Mapping)}
        return {k: v for costs in self.slices for k, v in costs.per_stage.items()} | mine

    def __repr__(self) -> str:
        return f"Costs({', '.join(f'{name}={reprlib.repr(v)}' for name, v in self._changed().items())})"

    def _changed(self) -> dict[str, Any]:
        """Return the values that are not the defaults."""
        return {name: value for name, value in vars(self).items() if value is not getattr(Costs, name)}

    def __str__(self) -> str:
        """Draw a table with a line per stage: the times, and all that differs from the defaults."""
        times = ("forward", "backward_input", "backward_weight")
        values = self.numbers
        names = [name for name, value in values.items() if name in times or value != getattr(Costs, name)]
        stages = sorted({s for v in values.values() for s in _stages(v)})
        rows: list[tuple[Any, int]] = [(s, s) for s in stages]
        if not any(isinstance(value, Sequence) for value in values.values()):
            rows.append(("others" if stages else "each", 1 + max(stages, default=0)))
        mine = table(["stage", *names], [[label, *(self.of(name, s) for name in names)] for label, s in rows])
        mine += "\ntimes in seconds" * self.seconds
        return "\n\n".join([mine, *(f"slice {n}\n{costs}" for n, costs in enumerate(self.slices))])

    _repr_pretty_ = show_table

    def of(self, name: str, stage: int) -> Any:
        """Return the value ``name`` for ``stage``.

        Returns:
            The number, or None for an optional value that was left out.

        Raises:
            ValueError: there is no such value, or no number for this stage.
        """
        if not isinstance(name, str) or name not in self.numbers:
            raise ValueError(f"name: got {name!r}, expected one of {', '.join(self.numbers)}")
        value = getattr(self, name)
        require_counts(0, stage=stage)
        if isinstance(value, Mapping):
            return value.get(stage, getattr(type(self), name))
        if isinstance(value, Sequence) and stage >= len(value):
            raise ValueError(f"stage: got {stage}, {name} has numbers for the stages 0 to {len(value) - 1}")
        return value[stage] if isinstance(value, Sequence) else value

    def of_slice(self, number: int) -> "Costs":
        """Return the costs of a slice of a sequence: of ``slices``, or these where all slices are alike."""
        return self.slices[number] if self.slices else self

    def of_stages(self, stages: Sequence[int]) -> Self:
        """Return the costs of these stages, in this order, each at least once.

        So costs of the stages of a model become those of a schedule with replicas:
        ``costs.of_stages(schedule.model_stages)``.

        Raises:
            TypeError: not numbers of stages.
            ValueError: these costs are for another number of stages.

        >>> Costs(forward=[1, 2]).of_stages([0, 1, 0, 1]).forward
        (1, 2, 1, 2)
        """
        if not isinstance(stages, Sequence) or not all(isinstance(s, int) for s in stages):
            raise TypeError(
                f"stages: got {reprlib.repr(stages)}, expected numbers of stages, such as"
                " schedule.model_stages"
            )
        self.fitting(1 + max(stages, default=-1))
        unequal = [name for name, value in self.numbers.items() if _stages(value)]
        values: dict[str, Any] = {name: tuple(self.of(name, s) for s in stages) for name in unequal}
        return replace(self, slices=tuple(costs.of_stages(stages) for costs in self.slices), **values)

    def per_rank(self, schedule: Schedule) -> Self:
        """Divide the costs of one rank's share of the model among the stages of ``schedule``.

        So schedules with one stage per rank, with several, and with replicas are timed for one model. Times,
        activations and parameters are shared among the stages of a share, those of a graph too, alike;
        messages stay as they are. Slices
        take equal parts of what a microbatch takes, messages too, unless costs of each slice are given.

        Raises:
            ValueError: a value is not one number for all; costs of another number of slices.

        >>> from ppfunc.schedule import one_f_one_b, zbv
        >>> share = Costs(forward=2, backward_input=2, backward_weight=2)
        >>> [share.per_rank(s).of("forward", 0) for s in (one_f_one_b(4, 8), zbv(4, 8))]
        [2, 1]
        """
        require_schedule(schedule)
        self.fitting(slices=schedule.slices)
        slices = schedule.per_sequence if not self.slices else 1
        of_slices = tuple(costs._shared(schedule, 1) for costs in self.slices)
        return replace(self._shared(schedule, slices), slices=of_slices)

    def _shared(self, schedule: Schedule, slices: int) -> Self:
        """Divide costs of a rank's share of the model among its stages, and among equal slices."""
        stages = len(set(schedule.model_stages))
        shares = {
            name: (schedule.ranks, stages * (1 if name in OF_A_STAGE else slices)) for name in OF_THE_MODEL
        }
        shares |= dict.fromkeys(("checkpoint", "bytes") if slices > 1 else (), (1, slices))
        return self.divided(shares, portion)

    def divided(
        self, shares: Mapping[str, tuple[int, int]], divide: Callable[[Number, int, int], Number]
    ) -> Self:
        """Divide some costs.

        Args:
            shares: part and whole of each, by name.
            divide: function of a value, a part and a whole, such as :func:`exact_portion`.

        Raises:
            ValueError: a value is not one number for all.
        """
        values = {name: value for name in shares if (value := getattr(self, name)) is not None}
        if several := [name for name, value in values.items() if _stages(value)]:
            raise ValueError(
                f"{several[0]} is {values[several[0]]!r}, expected one number: that of a rank's share of the"
                " model"
            )
        portions = {name: divide(value, *shares[name]) for name, value in values.items()}
        return replace(self, **portions)

    def in_slices(self, slices: Sequence["Costs"]) -> Self:
        """Return these costs with costs of each slice, whose sums are the costs of whole sequences."""
        sums = {name: _sum([getattr(costs, name) for costs in slices]) for name in OF_A_SLICE}
        return replace(self, slices=tuple(slices), **sums)

    def fitting(self, stages: int | None = None, slices: int = 0) -> Self:
        """Return these costs after checking that they fit a schedule with a number of stages and of slices.

        Raises:
            ValueError: a sequence of another length, a mapping with a stage that does not exist, costs of
                another number of slices.
        """
        if slices and self.slices and len(self.slices) != slices:
            got = f"slices has costs of {len(self.slices)} slices"
            raise ValueError(f"{got}, expected {slices}, one per slice of a sequence of the schedule")
        if stages is None:
            return self
        for costs in self.slices:
            costs.fitting(stages)
        for name, value in self.numbers.items():
            if isinstance(value, Sequence) and len(value) != stages:
                raise ValueError(
                    f"{name} has {len(value)} numbers, expected {stages}, one per stage or layer"
                )
            if unknown := [s for s in _stages(value) if s not in range(stages)]:
                raise ValueError(f"{name} names stage {unknown[0]!r}, expected stages from 0 to {stages - 1}")
        return self

    def to_json(self) -> str:
        """Return the costs as one JSON object, without defaults; Fractions as ``"1/3"``.

        >>> Costs(forward=[1, 2], bandwidth=0.5).to_json()
        '{"forward": [1, 2], "bandwidth": 0.5}'
        """
        return json.dumps(self._plain())

    def _plain(self) -> dict[str, Any]:
        changed = self._changed()
        values = {name: plain(changed[name]) for name in self.numbers if name in changed}
        values |= {"seconds": True} if self.seconds else {}
        return values | ({"slices": [costs._plain() for costs in self.slices]} if self.slices else {})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read costs from one JSON object; a list has one number per stage and comes back as a tuple.

        Raises:
            ValueError: the text is something else; a key or a value is wrong, which is named.

        >>> Costs.from_json('{"forward": [1, "3/2"], "backward": {"0": 4}}')
        Costs(forward=(1, Fraction(3, 2)), backward={0: 4})
        """
        return cls._read(read_values(text, tuple(cls.__dataclass_fields__)))

    @classmethod
    def _read(cls, values: dict[str, Any]) -> Self:
        return cls(**values | {n: tuple(map(cls._read, values[n])) for n in values.keys() & {"slices"}})

    def backward_of(self, stage: int) -> Number:
        """Return the time of a whole backward."""
        whole = self.of("backward", stage)
        return (
            self.of("backward_input", stage) + self.of("backward_weight", stage) if whole is None else whole
        )

    def time_of(self, op: Op, stage: int) -> Number:
        """Return the time of an instruction that is no message and no overlapped pair."""
        if op == "B":
            return self.backward_of(stage)
        time = self.of(KINDS[op].cost or op.lower(), stage)
        if time is None and op == "FETCH":
            time = self.of("offload", stage)
        return time if time is not None else self.of("forward", stage) if op == "RECOMPUTE" else 0

    def message_of(self, stage: int) -> Number:
        """Return the time from the end of a producer in ``stage`` until another rank has its product."""
        latency, size, bandwidth = (
            self.of("communication", stage),
            self.of("bytes", stage),
            self.of("bandwidth", stage),
        )
        if not size or bandwidth is None:
            return latency
        if isinstance(size, Rational) and isinstance(bandwidth, Rational):
            # Here, because most uses of schedules need none and it loads slowly.
            from fractions import Fraction

            return latency + Fraction(size, bandwidth)
        return latency + size / bandwidth


def require_costs(costs: Any) -> Costs:
    """Check the argument ``costs``. By default, and for None, costs are ``Costs()``.

    Raises:
        TypeError: neither costs nor None.
    """
    require_type("costs", costs, Costs | None, "Costs(forward=..., ...)")
    return Costs() if costs is None else costs


def _sum(values: Sequence[Any]) -> Any:
    """Add up values of one form: numbers, or numbers per stage."""
    if None in values or not isinstance(values[0], Sequence | Mapping):
        return None if None in values else sum(values)
    if isinstance(values[0], Mapping):
        return {stage: sum(value[stage] for value in values) for stage in values[0]}
    return tuple(map(sum, zip(*values, strict=True)))


def _values(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _stages(value: Any) -> Sequence[int]:
    """List the stages that a value names; empty if it is one number for all."""
    if isinstance(value, Mapping):
        return list(value)
    return range(len(value)) if isinstance(value, Sequence) else ()


def exact_portion(value: Number, part: int, whole: int) -> Number:
    """Return ``value * part / whole``, exact if ``value`` is a whole number or a fraction."""
    if not isinstance(value, Rational):
        return float(value) * part / whole
    from fractions import Fraction  # here, because most uses of schedules need none and it loads slowly

    share = Fraction(value) * part / whole
    return int(share) if share.denominator == 1 else share


def portion(value: Number, part: int, whole: int) -> Number:
    """Return :func:`exact_portion` as a float if both are equal: simulations are faster with floats."""
    share = exact_portion(value, part, whole)
    return share if isinstance(share, int) or float(share) != share else float(share)


def _require(name: str, value: Any) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected a number")
    if value < 0 or not value <= _MOST:
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected a finite number from 0 to {_MOST:g}")
    if name == "bandwidth" and value == 0:
        raise ValueError(
            "bandwidth is 0, expected more; leave it out for messages that take no time per byte"
        )
    if name == "weight_share" and not value <= 1:
        raise ValueError(f"weight_share is {reprlib.repr(value)}, expected at most 1")

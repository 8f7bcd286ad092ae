"""Arrange ranks on a grid with named axes, and stages on ranks, by integer arithmetic.

A placement is a tuple of ranks, one entry per stage.
"""

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from ppfunc._checks import naming_arguments, require_counts, require_index, require_one_of


@naming_arguments
@dataclass(frozen=True)
class Topology:
    """Ranks ``0..world_size-1`` on a grid with named axes, row-major: the last axis varies fastest.

    Every question takes a few integer operations per axis; no table of ranks is stored.

    Args:
        axes: the names of the axes, each a Python identifier, slowest first.
        sizes: the size of each axis, one or more.

    >>> topology = Topology(("pipe", "data"), (2, 3))
    >>> topology.rank(pipe=1, data=0), topology.coordinate(4)
    (3, Coordinate(pipe=1, data=1))
    >>> list(topology.groups("pipe"))
    [(0, 3), (1, 4), (2, 5)]
    >>> print(topology)
    pipe=2,data=3
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if len(self.axes) != len(self.sizes):
            raise ValueError(f"expected one size per axis, got axes {self.axes} and sizes {self.sizes}")
        try:
            _coordinates(self.axes)
        except ValueError as error:
            raise ValueError(
                f"axes: got {self.axes}, expected different Python identifiers; {error}"
            ) from None
        require_counts(**dict(zip(self.axes, self.sizes, strict=True)))

    @classmethod
    def of(cls, **sizes: int) -> "Topology":
        """Make the topology with these axes in this order: ``Topology.of(pipe=2, data=3)``."""
        return cls(tuple(sizes), tuple(sizes.values()))

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Read a topology as ``str`` writes it: ``Topology.parse("pipe=2,data=3")``.

        Raises:
            ValueError: the text is not ``axis=size`` terms between commas.
        """
        terms = [term.partition("=") for term in text.split(",")]
        try:
            sizes = tuple(int(size) for _, _, size in terms)
        except ValueError:
            raise ValueError(f"cannot read {text!r}: expected such as pipe=2,data=2,model=2") from None
        return cls(tuple(axis.strip() for axis, _, _ in terms), sizes)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    @cached_property
    def world_size(self) -> int:
        """Count the ranks."""
        return math.prod(self.sizes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return, per axis, the difference of two neighbouring ranks."""
        return tuple(math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 0 for an axis that the topology does not have.

        Code for several kinds of parallelism need not know which are in use.
        """
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 0

    def rank(self, **coordinate: int) -> int:
        """Find the rank at a coordinate, which names every axis.

        Raises:
            ValueError: for a missing or unknown axis, or an index outside its axis.
        """
        self._require(coordinate)
        if missing := [axis for axis in self.axes if axis not in coordinate]:
            raise ValueError(
                f"coordinate: {', '.join(missing)} of {self} missing, expected all; ranks_where takes some"
            )
        return sum(coordinate[axis] * stride for axis, stride in zip(self.axes, self.strides, strict=True))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Find the coordinate of ``rank``: a named tuple with one field per axis.

        Raises:
            ValueError: for a rank outside the topology.
        """
        require_index("rank", rank, self.world_size)
        pairs = zip(self.strides, self.sizes, strict=True)
        return _coordinates(self.axes)(rank // stride % size for stride, size in pairs)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """List the coordinates of all ranks, in the order of the ranks."""
        return map(_coordinates(self.axes), product(*map(range, self.sizes)))

    def moved(self, rank: int, **coordinate: int) -> int:
        """Find the rank at the coordinate of ``rank`` with the named axes replaced.

        Raises:
            ValueError: for an unknown axis, or a rank or an index out of range.

        >>> Topology.of(pipe=2, data=2, model=2).moved(1, pipe=1)
        5
        """
        return self.rank(**dict(zip(self.axes, self.coordinate(rank), strict=True)) | coordinate)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Iterate over the groups of ranks that differ along these axes alone, each ascending.

        The other axes vary row-major, in their declared order. Axes that the topology does not have count
        nothing, as in `axis_size`: no groups where all of ``axes`` are missing. Without axes, every rank is
        a group.

        >>> list(Topology.of(pipe=2, data=2, model=2).groups("pipe", "model"))
        [(0, 1, 4, 5), (2, 3, 6, 7)]
        """
        known = [axis for axis in axes if axis in self.axes]
        firsts = self._ranks(**dict.fromkeys(known, 0)) if known or not axes else iter(())
        return (self.group_of(first, *known) for first in firsts)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Find the group along these axes that ``rank`` is in, ascending.

        >>> Topology.of(pipe=2, data=2, model=2).group_of(3, "pipe")
        (3, 7)
        """
        self._require_axes(axes)
        pairs = zip(self.axes, self.coordinate(rank), strict=True)
        return tuple(self._ranks(**{axis: index for axis, index in pairs if axis not in axes}))

    def ranks_where(self, **coordinate: int) -> tuple[int, ...]:
        """List the ranks whose coordinate matches on the named axes, ascending.

        >>> Topology.of(pipe=2, data=2, model=2).ranks_where(pipe=0, data=1)
        (2, 3)
        """
        self._require(coordinate)
        return tuple(self._ranks(**coordinate))

    def rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Write the coordinate of ``rank`` for file names, without the axes to omit.

        >>> Topology.of(a=2, b=2).rank_repr(3), Topology.of(a=2, b=2).rank_repr(3, omit_axes=["a"])
        ('a_01-b_01', 'b_01')
        """
        omitted = frozenset(omit_axes)
        pairs = zip(self.axes, self.coordinate(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in pairs if axis not in omitted)

    def _ranks(self, **chosen: int) -> Iterator[int]:
        """List the ranks at the chosen indices, ascending."""
        axes = zip(self.axes, self.sizes, self.strides, strict=True)
        offsets = (
            [chosen[axis] * stride] if axis in chosen else range(0, size * stride, stride)
            for axis, size, stride in axes
        )
        return map(sum, product(*offsets))

    def _require(self, coordinate: dict[str, int]) -> None:
        self._require_axes(coordinate)
        for axis, index in coordinate.items():
            require_index(axis, index, self.axis_size(axis))

    def _require_axes(self, axes: Iterable[str]) -> None:
        unknown = [axis for axis in axes if axis not in self.axes]
        if unknown:
            raise ValueError(
                f"unknown axis {', '.join(map(repr, unknown))}: the axes of {self} are {', '.join(self.axes)}"
            )


@naming_arguments
def default_grid(world_size: int) -> Topology:
    """Choose a topology of ``world_size`` ranks with the axes pipe and data.

    The prime factors, ascending, go to the pipeline and to data parallelism in turn. Data is innermost: its
    reductions get the fastest links.

    >>> [str(default_grid(n)) for n in (1, 6, 12, 30)]
    ['pipe=1,data=1', 'pipe=2,data=3', 'pipe=6,data=2', 'pipe=10,data=3']
    """
    require_counts(world_size=world_size)
    factors = prime_factors(world_size)
    return Topology.of(pipe=math.prod(factors[0::2]), data=math.prod(factors[1::2]))


def prime_factors(number: int) -> tuple[int, ...]:
    """Factor a number of ranks into primes, ascending.

    Raises:
        ValueError: a number below 1.

    >>> prime_factors(12), prime_factors(1)
    ((2, 2, 3), ())
    """
    require_counts(number=number)
    factors, candidate = list[int](), 2
    while candidate * candidate <= number:
        if number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        else:
            candidate += 1
    return (*factors, number) if number > 1 else tuple(factors)


@lru_cache(maxsize=64)
def _coordinates(axes: tuple[str, ...]) -> Callable[[Iterable[int]], tuple[int, ...]]:
    """Define a named tuple with one field per axis; return its constructor from an iterable."""
    # The names are not literals.
    return namedtuple("Coordinate", axes)._make  # type: ignore[attr-defined]


Placement = tuple[int, ...]
"""``placement[stage]`` is the rank that holds the stage."""


@naming_arguments
def loop(ranks: int, chunks: int = 1) -> Placement:
    """Deal stages round the ranks, ``chunks`` times: stage ``s`` is on rank ``s % ranks``.

    >>> loop(3, chunks=2)
    (0, 1, 2, 0, 1, 2)
    """
    require_counts(ranks=ranks, chunks=chunks)
    return tuple(range(ranks)) * chunks


@naming_arguments
def v_shape(ranks: int, chunks: int = 2) -> Placement:
    """Let stages go up the ranks, down, up again, ``chunks`` times: the two stages at a turn share a rank.

    >>> v_shape(3), v_shape(2, chunks=3)
    ((0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 0, 1))
    """
    require_counts(ranks=ranks, chunks=chunks)
    up = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (up[::-1] if chunk % 2 else up))


@naming_arguments
def explicit(ranks_of_stages: Iterable[int]) -> Placement:
    """Make the placement with these ranks: that of stage 0, of stage 1, and so on.

    Raises:
        ValueError: the placement is empty, or a rank between 0 and the largest holds no stage.

    >>> explicit([0, 1, 1, 0])
    (0, 1, 1, 0)
    """
    placement = tuple(ranks_of_stages)
    wrong = [r for r in placement if isinstance(r, bool) or not isinstance(r, int) or r < 0]
    if wrong or not placement:
        raise ValueError(
            f"a placement is the rank, 0 or more, of each of one or more stages; got {placement}"
        )
    idle = sorted(set(range(max(placement))) - set(placement))
    if idle:
        raise ValueError(
            f"ranks {idle} hold no stage in {placement}: number the ranks 0..{len(set(placement)) - 1}"
            " without gaps"
        )
    return placement


@naming_arguments
def place(style: str, ranks: int, stages: int) -> Placement:
    """Place ``stages`` stages on ``ranks`` ranks in a style.

    Args:
        style: ``"loop"`` or ``"v"``.
        ranks: number of ranks.
        stages: number of stages, a multiple of ``ranks``.

    Raises:
        ValueError: an unknown style, or stages that do not spread evenly over the ranks.

    >>> place("v", ranks=4, stages=8)
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    styles = {"loop": loop, "v": v_shape}
    require_one_of("style", style, list(styles))
    require_counts(ranks=ranks, stages=stages)
    if stages % ranks:
        raise ValueError(
            f"{stages} stages do not spread evenly over {ranks} ranks: use a multiple of {ranks}"
        )
    return styles[style](ranks, stages // ranks)


@naming_arguments
def stages_of(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """List the stages that ``rank`` holds, ascending.

    >>> stages_of(loop(4, 2), 1), stages_of(v_shape(4), 1)
    ((1, 5), (1, 6))
    """
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)

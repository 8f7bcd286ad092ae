"""Place ranks on a binary tree, along which control messages travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankTree(NamedTuple):
    """A binary tree over some ranks, as one of them sees it.

    Args:
        members: the ranks; that at place n has those at 2n + 1 and 2n + 2 below it.
        parent: the rank above, None at the top.
        children: the ranks below, by place.
    """

    members: Sequence[int]
    parent: int | None
    children: dict[int, int]

    @classmethod
    def over(cls, members: Sequence[int], rank: int) -> RankTree:
        """The tree as ``rank`` sees it, over ranks in this order.

        >>> RankTree.over((0, 4, 8, 12), 4).neighbours
        [0, 12]
        """
        place = members.index(rank)
        below = (n for n in (2 * place + 1, 2 * place + 2) if n < len(members))
        return cls(members, members[(place - 1) // 2] if place else None, {n: members[n] for n in below})

    @property
    def neighbours(self) -> list[int]:
        """The rank above, if there is one, and those below."""
        above = [] if self.parent is None else [self.parent]
        return [*above, *self.children.values()]


def is_below(top: int, place: int) -> bool:
    """Whether a place is in the tree under ``top``, or is it.

    >>> [place for place in range(15) if is_below(2, place)]
    [2, 5, 6, 11, 12, 13, 14]
    """
    while place > top:
        place = (place - 1) // 2
    return place == top


def path(one: int, other: int) -> list[int]:
    """The way through the tree from one place to another.

    >>> path(3, 5)
    [3, 1, 0, 2, 5]
    """
    up, down = [one], [other]
    while up[-1] != down[-1]:
        longer = up if up[-1] > down[-1] else down
        longer.append((longer[-1] - 1) // 2)
    return up + down[-2::-1]

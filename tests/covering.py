"""Few cases out of a product of choices, which tell as much as all where faults need two of the choices."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*factors: Collection[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each two values of two factors are together at least once; of several that serve, the
    first of the product, so put what is cheap first.

    >>> len(pairwise("abc", "de", "fg", "hi"))
    6
    """
    every = list(product(*map(range, map(len, factors))))
    missing, cases = {pair for case in every for pair in _pairs(case)}, []
    while missing:
        case = max(every, key=lambda case: len(missing.intersection(_pairs(case))))
        missing.difference_update(_pairs(case))
        cases.append(tuple(list(values)[n] for values, n in zip(factors, case, strict=True)))
    return cases


def by_pairs(*factors: Collection[Any]) -> list[Any]:
    """Parameters of a test: the whole product of the factors, of which `--large` alone runs what is not in
    `pairwise`.
    """
    few = pairwise(*factors)
    return [
        pytest.param(
            *case,
            marks=() if case in few else pytest.mark.large,
            id="-".join(getattr(value, "__name__", str(value)) for value in case),
        )
        for case in product(*factors)
    ]


def _pairs(case: tuple[int, ...]) -> list[Any]:
    return list(combinations(enumerate(case), 2))

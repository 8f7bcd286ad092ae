"""Mark the cases that only ``--large`` runs; move trees between devices; expect what is reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optree
import pytest


def cases(every: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Return cases for ``parametrize``: a few, and those that ``--large`` adds.

    Args:
        every: values, or tuples of them.
        few: those of every run; each is among ``every``.
    """
    listed, few = list(every), list(few)
    assert all(case in listed for case in few), few
    return [case if case in few else pytest.param(*_values(case), marks=pytest.mark.large) for case in listed]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def on_device(tree: Any) -> Any:
    return optree.tree_map(lambda t: t.cuda(), tree)


def on_host(tree: Any) -> Any:
    return optree.tree_map(lambda t: t.cpu(), tree)


def take(reports: list[Any]) -> list[Any]:
    """What was reported until now, which is expected."""
    taken, reports[:] = list(reports), []
    return taken

"""Run tests of a GPU on a simulated one: ``pytest -p tests.simulated.plugin -m cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.simulated import names

_session = ExitStack()


def pytest_configure() -> None:
    _session.enter_context(names.simulated())


def pytest_unconfigure() -> None:
    _session.close()


@pytest.fixture(autouse=True)
def without_races() -> Iterator[None]:
    """Fail a test in which there was a race."""
    yield
    races, names.device().races[:] = list(names.device().races), []
    assert not races, f"{len(races)} races, the first: {races[0]}"

"""Tests on a simulated accelerator, which takes a process of its own: see ``test_in_processes.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import guard, names, probe
from tests.simulated.groups import BACKENDS, in_threads, simulated_nccl

_HERE = Path(__file__).parent
_RUNNER = "test_in_processes.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the tests where no others run in this process; elsewhere what runs them in one of their own."""
    if collection_path.parent != _HERE or not collection_path.name.startswith("test_"):
        return None
    asked = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    alone = all(path.resolve().is_relative_to(_HERE) for path in asked)
    return alone is (collection_path.name == _RUNNER) or None


@pytest.fixture(scope="session")
def installed() -> None:
    """Install the guard, before any backward of this process; skips where it does not fit."""
    if reason := guard.missing() or probe.broken():
        pytest.skip(reason)
    gc.collect()
    gc.freeze()  # what is there stays, and the end of each simulation looks at what it has left alone


@pytest.fixture
def simulate(installed: None) -> Iterator[Callable[..., Any]]:
    """Simulate accelerators, with options of ``Device``, until the next or the end; a race fails the test."""
    with ExitStack() as stack:
        made = []

        def start(**options: Any) -> Any:
            stack.close()
            made.append(stack.enter_context(names.simulated(**options)))
            return made[-1]

        yield start
        races = [race for gpu in made for race in gpu.races]
        assert not races, f"{len(races)} races, the first: {races[0]}"


@pytest.fixture
def ranks(simulate: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Run a function on each rank, a thread; ``ranks.gpu`` and ``ranks.count`` say what was simulated."""

    def run(
        function: Callable[..., Any],
        *arguments: Any,
        size: int = 2,
        seed: int = 0,
        hang: float = 30.0,
        backend: str = BACKENDS,
        **options: Any,
    ) -> list[Any]:
        run.gpu = simulate(devices=max(size, 2), seed=seed, hang=hang)
        with simulated_nccl(**options) as run.count:
            return in_threads(size, function, *arguments, backend=backend)

    return run


@pytest.fixture
def gpu(simulate: Callable[..., Any]) -> Any:
    """A process with two devices."""
    return simulate()

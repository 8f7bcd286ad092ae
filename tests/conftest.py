"""Shared by all tests: Hypothesis profiles, and pools of processes joined by gloo."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import random
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.clock import busy

# Inductor would start processes that import torch, in each process that compiles a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums of several threads have other bits
# All that torch imports would be visited again and again: not before the tests, and not by the tests.
gc.disable()
# Programs run in Python unless a test, or who runs them, asks for C++: no test waits for a compiler.
os.environ.setdefault("PPFUNC_NATIVE", "never")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="1000 examples of each property, and every case")
    parser.addoption("--random", action="store_true", help="run the property tests with new examples")


def pytest_configure(config: pytest.Config) -> None:
    """Take the same examples in every run, unless asked for others."""
    settings.register_profile(
        "ppfunc",
        max_examples=1000 if config.getoption("--large") else 25,
        derandomize=not config.getoption("--random"),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("ppfunc")


def few(examples: int) -> settings:
    """Settings of a property that runs for each of many cases; ``--large`` has no fewer examples of these."""
    every = settings.default.max_examples
    return settings(max_examples=every if every >= 1000 else examples)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same numbers in every run, whatever tests this process has run before."""
    random.seed(0)
    if torch := sys.modules.get("torch"):  # its function keeps a traceback of each call until CUDA begins
        (torch if torch.cuda.is_initialized() else torch.default_generator).manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip(items, "large", "takes minutes: with --large", lambda: config.getoption("--large"))
    _skip(items, "cuda", "no CUDA device", _has_cuda)
    _skip(items, "compiler", "no C++ compiler", _has_compiler)
    for item in items:
        if item.get_closest_marker("compiler"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # those of inductor


def pytest_collection_finish() -> None:
    _collect_garbage()


def _collect_garbage() -> None:
    """Collect the garbage of what is made from now on, not as often as after each 700 new objects."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def _skip(items: list[pytest.Item], marker: str, reason: str, available: Callable[[], bool]) -> None:
    """Skip what is marked where what it needs is absent."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_compiler() -> bool:
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))))


_JOINED = -1  # in the place of a job's number
_JOBS = 40  # of processes: torch keeps the groups of tests, and their threads wake in each job


class Processes:
    """Processes joined in one gloo group, each of which runs ``function(rank, size, *args)`` when asked.

    Functions are found by file and name, and must stand at the top of their test module.
    """

    def __init__(self, size: int) -> None:
        self.size, self._job = size, 0
        self._gone: set[int] = set()  # ranks that have ended before they answered, as their tests know
        self._begin()

    def _begin(self) -> None:
        from tests.forks import forked

        context = forked()
        size, meeting = self.size, f"tcp://127.0.0.1:{_free_port()}"
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pipes]
        self.workers = [
            context.Process(target=_work, args=(rank, size, meeting, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker, (_, theirs) in zip(self.workers, pipes, strict=True):
            worker.start()
            theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Ask every process to run ``function``. Where one has ended, all begin anew.

        Warns of one that has ended by itself after its answer, or while it was stopped.
        """
        dead = {rank: worker.exitcode for rank, worker in enumerate(self.workers) if not worker.is_alive()}
        if dead or (self._job and self._job % _JOBS == 0):
            self.close()
            self._begin()
        if dead or self._job % _JOBS == 0:
            self._join()
        for rank in dead.keys() - self._gone:
            warnings.warn(f"rank {rank} of {self.size} ended after its answer: {dead[rank]}", stacklevel=2)
        self._gone.clear()
        self._signal(signal.SIGCONT)
        self._job += 1
        for end in self._ends:
            end.send((self._job, function.__code__.co_filename, function.__name__, args))

    def _join(self, tries: int = 3) -> None:
        """Wait until all are in the group. One whose port another process has taken begins anew."""
        while errors := [error for end in self._ends if (error := _reply(end)) is not None]:
            self.close()
            tries -= 1
            if not tries:
                raise errors[0]
            self._begin()

    def answers(self, timeout: float = 60, stopped: int | None = None) -> list[Any]:
        """Return the answer of each rank: an exception as itself, None for a process that is gone or stopped.

        Raises TimeoutError where one does not answer.
        """
        answers: list[Any] = [None] * self.size
        waiting = {end: rank for rank, end in enumerate(self._ends) if rank != stopped}
        while waiting:
            ready = wait(waiting, timeout) or wait(waiting, timeout * (busy() - 1))
            if not ready:
                raise TimeoutError(f"ranks {list(waiting.values())} did not answer within {timeout} s")
            for end in ready:
                try:
                    job, answer = end.recv()
                except (EOFError, ConnectionResetError):
                    job, answer = self._job, None
                    self._gone.add(waiting[end])
                if job == self._job:  # not a late one to an earlier test
                    answers[waiting.pop(end)] = answer
        return answers

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Run ``function`` on every rank; raises the first exception."""
        self.start(function, *args)
        answers = self.answers(timeout)
        self._signal(signal.SIGSTOP)  # threads of each group would wake a hundred times a second
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            if worker.is_alive():
                os.kill(worker.pid, number)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()


def _reply(end: Connection) -> Exception | None:
    """Return what has kept a process from joining the group; None if it has joined."""
    if not end.poll(120) and not end.poll(120 * (busy() - 1)):
        return TimeoutError("a process did not join the group within two minutes")
    try:
        _, error = end.recv()
    except (EOFError, ConnectionResetError):
        return RuntimeError("a process has ended before it joined the group")
    return error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(rank: int, size: int, meeting: str, end: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":  # end with the server, though stopped, and let it end with the tests
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.close(forkserver._forkserver._forkserver_alive_fd)
    torch.set_num_threads(1)
    _collect_garbage()
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    except Exception as error:
        end.send((_JOINED, RuntimeError(f"rank {rank} of {size} did not join the group: {error}")))
        raise
    end.send((_JOINED, None))
    while True:
        job, path, name, args = end.recv()
        torch.manual_seed(0)
        try:
            answer = getattr(_module(path), name)(rank, size, *args)
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            answer = error
        except (pytest.fail.Exception, KeyboardInterrupt) as error:  # that of pytest.raises, no Exception
            answer = AssertionError("".join(traceback.format_exception(error)))
        end.send((job, answer))


_MODULES: dict[str, Any] = {}


def _module(path: str) -> Any:
    if path not in _MODULES:
        spec = importlib.util.spec_from_file_location(f"job_{len(_MODULES)}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _MODULES[path] = module
    return _MODULES[path]


def _shared(size: int, scope: Any) -> Any:
    """A fixture of processes that tests share."""

    @pytest.fixture(scope=scope)
    def shared() -> Iterator[Processes]:
        processes = Processes(size)
        yield processes
        processes.close()

    return shared


two, four = _shared(2, "session"), _shared(4, "session")
three, eight = _shared(3, "module"), _shared(8, "module")


@pytest.fixture
def fresh() -> Iterator[Callable[[int], Processes]]:
    """Makes processes for one test, which may kill them."""
    made: list[Processes] = []

    def make(size: int) -> Processes:
        made.append(Processes(size))
        return made[-1]

    yield make
    for processes in made:
        processes.close()


@pytest.fixture
def store_port() -> Iterator[int]:
    """The port of a store for processes that meet as torchrun's do."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.fixture
def soon() -> float:
    """Seconds within which ranks hear of a failure, far less than the timeouts of their transports; more on a
    busy machine.
    """
    return 2 * busy()

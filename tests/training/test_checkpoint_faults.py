"""A save that dies at any of its calls of the operating system leaves the old checkpoint or the new one, and
never another.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.runtime.control.links import Rendezvous
from ppfunc.training.checkpoint.peers import Peers
from tests.clock import busy

WRITES = "write", "pwrite"
CALLS = *WRITES, "open", "mkdir", "fsync", "rename", "unlink", "rmdir", "close", "scandir", "listdir"


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "a": torch.full((300,), float(step)),
        "b": torch.full((7, 5), float(step), dtype=torch.float64),
        "c": torch.tensor(step),
    }


def load(root: Path) -> int:
    """The step that is loaded, all of one save."""
    like = {
        "step": 0,
        "a": torch.full((300,), torch.nan),
        "b": torch.full((7, 5), torch.nan, dtype=torch.float64),
        "c": torch.tensor(-1),
    }
    found = pp.checkpoint.load(root, like=like)
    step = found["step"]
    assert all(bool((found[name] == step).all()) for name in "abc"), found
    assert pp.checkpoint.latest(root) == root / f"step-{step}"
    return step


class Count:
    """Counts calls of the operating system of every thread, and does something at one of them.

    Args:
        number: of the call, from 0.
        before: called at that, with the function and its arguments, in its place.
    """

    def __init__(self, number: int, before: Callable[..., Any]) -> None:
        self.number, self.before, self.seen, self.lock = number, before, 0, threading.Lock()

    def patch(self, set_: Callable[[Any, str, Any], None], calls: Sequence[str] = CALLS) -> None:
        for name in calls:
            set_(os, name, self.counted(getattr(os, name)))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                now = self.seen == self.number
                self.seen += 1
            return (self.before if now else lambda f, *a, **k: f(*a, **k))(function, *args, **kwargs)

        return call


def die_before(function, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(function, *args, **kwargs):
    if len(args) > 1 and isinstance(args[1], memoryview):  # a write
        function(args[0], args[1][: len(args[1]) // 2], *args[2:])
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(job: Callable[[], None]) -> int:
    """Run ``job`` in a copy of this process; the signal that has ended it, 0 for none."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed_at_every_call(
    tmp_path: Path,
    die: Any,
    inside: str = "",
    begin: Callable[[Path], None] = lambda root: None,
    calls: Sequence[str] = CALLS,
    **options: Any,
) -> Iterator[Path]:
    """Save in children that end at the first call, the second and so on, until one lives; yield the folder of
    each, in which a save may have been before.
    """
    for number in range(500):
        root = tmp_path / str(number) / inside
        if (tmp_path / "first").exists():
            shutil.copytree(tmp_path / "first", root)

        def job(root: Path = root, number: int = number) -> None:
            begin(root)
            Count(number, die).patch(setattr, calls)
            pp.checkpoint.save(root, state(2), **options)

        ended = in_child(job)
        yield root
        if not ended:
            return


@pytest.mark.parametrize(
    ("die", "keep", "calls", "least"),
    [(die_before, 1, CALLS, 25), (die_before, 2, CALLS, 25), (die_within, 1, WRITES, 3)],
)
def test_a_save_that_is_killed_at_any_call_leaves_old_or_new(tmp_path, die, keep, calls, least):
    pp.checkpoint.save(tmp_path / "first", state(1))
    outcomes = []
    for root in killed_at_every_call(tmp_path, die, keep=keep, calls=calls):
        outcomes.append(load(root))
        pp.checkpoint.save(root, state(3), keep=1)
        assert load(root) == 3 and os.listdir(root) == ["step-3"]
    assert len(outcomes) > least and outcomes[0] == 1 and outcomes[-1] == 2
    assert outcomes == sorted(outcomes)


def test_the_first_save_that_is_killed_leaves_nothing_or_all(tmp_path):
    for root in killed_at_every_call(tmp_path, die_before, inside="runs"):
        assert (pp.checkpoint.latest(root) is None) or load(root) == 2
    assert load(root) == 2


def test_an_error_at_any_call_leaves_old_or_new(tmp_path, monkeypatch):
    """The disk is full, or fails: the save raises, or has saved; nothing of it is left over."""

    def fail(function, *args, **kwargs):
        if function.__name__ == "close":
            function(*args, **kwargs)
        raise OSError(28, "No space left on device")

    pp.checkpoint.save(tmp_path / "first", state(1))
    for number in range(500):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", root)
        count, raised = Count(number, fail), None
        with monkeypatch.context() as patched:
            count.patch(patched.setattr)
            try:
                pp.checkpoint.save(root, state(2), keep=None)
            except (OSError, pp.checkpoint.CheckpointError) as error:
                raised = error
            except UserWarning as warning:  # saved, but cleaning has failed
                raised = warning
        assert load(root) == 2 if raised is None else load(root) in (1, 2)
        pp.checkpoint.save(root, state(3), keep=1)
        assert os.listdir(root) == ["step-3"]
        if count.seen <= number:
            break
    assert number > 20


# -- loss of power ------------------------------------------------------------------------------


def logged(log: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A call that notes what it has changed on the disk, by numbers of inodes."""

    def note(*event: Any) -> None:
        WRITE(log, (json.dumps(event) + "\n").encode())

    def call(*args: Any, **kwargs: Any) -> Any:
        parent = (
            None
            if kwargs.get("dir_fd") is not None or not isinstance(args[0], (str, Path))
            else os.path.dirname(args[0])
        )
        new = function.__name__ in ("open", "mkdir") and parent is not None and not os.path.lexists(args[0])
        found = function(*args, **kwargs)
        match function.__name__:
            case "open" | "mkdir" if new:
                note("made", str(args[0]), os.stat(parent).st_ino)
            case "rename":
                note("renamed", str(args[0]), str(args[1]), os.stat(parent).st_ino)
            case "write" | "pwrite":
                note("written", os.fstat(args[0]).st_ino)
            case "fsync":
                note("flushed", os.fstat(args[0]).st_ino)
        return found

    call.__name__ = function.__name__
    return call


WRITE = os.write


@pytest.mark.parametrize("lost", ["data", "names", "the first rename"])
def test_what_was_not_flushed_may_be_lost(tmp_path, lost):
    """The power fails at any call: bytes that no fsync has followed are gone, or names in folders that none
    has followed.
    """

    def begin(root):
        log = os.open(f"{root}.log", os.O_WRONLY | os.O_CREAT)
        for name in ("open", "mkdir", "write", "pwrite", "fsync", "rename"):
            setattr(os, name, logged(log, getattr(os, name)))

    pp.checkpoint.save(tmp_path / "first", state(1))
    outcomes = []
    for root in killed_at_every_call(tmp_path, die_before, begin=begin, keep=1):
        lose(root, [json.loads(line) for line in Path(f"{root}.log").read_text().splitlines()], lost)
        outcomes.append(load(root))
    assert outcomes[0] == 1 and outcomes[-1] == 2 and outcomes == sorted(outcomes)


def lose(root: Path, events: list[Any], lost: str) -> None:
    """Take from a folder what the loss of power may take."""
    flushed = {event[1]: n for n, event in enumerate(events) if event[0] == "flushed"}
    if lost == "data":
        dirty = {
            event[1]
            for n, event in enumerate(events)
            if event[0] == "written" and flushed.get(event[1], -1) < n
        }
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in dirty:
                os.truncate(path, 0)
        return
    if lost == "the first rename":  # while later ones have reached the disk
        renamed = [
            n for n, event in enumerate(events) if event[0] == "renamed" and flushed.get(event[3], -1) < n
        ]
        events = events[: renamed[0] + 1] if renamed else []
    now: dict[str, str] = {}  # where folders are that were renamed since
    for n, event in reversed(list(enumerate(events))):
        if lost != "names" and event[0] != "renamed":
            continue
        if event[0] == "renamed" and flushed.get(event[3], -1) < n and os.path.exists(event[2]):
            os.rename(event[2], event[1])
        elif event[0] == "renamed":
            now[event[1]] = event[2]
        elif event[0] == "made" and flushed.get(event[2], -1) < n:
            folder, name = os.path.split(event[1])
            path = os.path.join(now.get(folder, folder), name)
            if os.path.lexists(path):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


# -- ranks that die -----------------------------------------------------------------------------


def save_again_and_again(rank, size, root, last):
    for step in range(2, last):
        pp.checkpoint.save(
            str(root),
            {
                "step": step,
                "own": {rank: torch.full((20_000,), float(step))},
                "all": torch.full((9,), float(step)),
            },
            keep=2,
        )


def save_and_end_while_connecting(rank, size, root, last, late):
    """The last rank is there, and ends before the others have reached it. A late one comes once the other
    has given up.
    """
    from ppfunc.training.checkpoint import peers

    if rank == last:
        peers.SocketLinks = lambda *_: os._exit(0)
    given_up = Path(root) / "given up"
    while rank == late and not given_up.exists():
        time.sleep(0.02)
    try:
        pp.checkpoint.save(root, {"step": 1})
    finally:
        given_up.touch()


@pytest.mark.parametrize("last, late", [(0, None), (1, None), (2, None), (0, 2), (1, 2), (2, 1)])
def test_a_rank_that_ends_while_the_others_connect_is_named_at_once(fresh, tmp_path, last, late):
    processes = fresh(3)
    processes.start(save_and_end_while_connecting, str(tmp_path), last, late)
    answers = processes.answers(timeout=20 * busy())  # gloo asks an address for minutes
    assert answers[last] is None
    for answer in answers[:last] + answers[last + 1 :]:
        assert isinstance(answer, pp.checkpoint.CheckpointError) and f"rank {last} is gone" in str(answer)


def save_and_stop_while_connecting(rank, size, root, last):
    """The last rank is there, and is stopped before the others have reached it. How long the others have
    waited, and what they raise.
    """
    from ppfunc.training.checkpoint import peers

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
    began = time.monotonic()
    if rank == last:
        peers.SocketLinks = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        pp.checkpoint.save(str(root), {"step": 1})
    except pp.checkpoint.CheckpointError as error:
        return str(error), time.monotonic() - began


@pytest.mark.parametrize("last", [0, 2])  # the first serves the store
def test_a_rank_that_is_stopped_while_the_others_connect_is_named(fresh, tmp_path, last):
    processes = fresh(3)
    processes.start(save_and_stop_while_connecting, str(tmp_path), last)
    for rank, answer in enumerate(processes.answers(40, stopped=last)):
        if rank != last:
            text, seconds = answer
            assert f"rank {last} has failed: " in text and seconds < 20 * busy()
            assert f"rank {last} has not come" in text or (last == 0 and "serves the store" in text)


def save_and_give_up(rank, size, root):
    """A handler of a signal raises on the last rank, while it waits for the others in a save; it lives on."""

    def terminated(number, frame):
        raise RuntimeError("terminated")

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        if rank == size - 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        elif rank == 0:
            peers = Peers(None)
            time.sleep(2.0)
            with peers:
                peers.all_gather(None)
        pp.checkpoint.save(str(root), {"a": torch.ones(3)}, step=1)
    except (RuntimeError, pp.checkpoint.CheckpointError) as error:
        return type(error).__name__, str(error)
    finally:
        signal.signal(signal.SIGTERM, before)
    return None


def test_a_rank_that_gives_up_in_a_save_and_lives_on_is_named(fresh, tmp_path):
    processes = fresh(3)
    *others, last = processes(save_and_give_up, tmp_path)
    assert last == ("RuntimeError", "terminated")
    for name, text in others:
        assert name == "RankError" and "rank 2 has failed: RuntimeError: terminated" in text


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint(fresh, tmp_path, seed):
    """Ranks are killed at any time; the others raise at once, and what can be loaded is of one save."""
    draw = random.Random(seed)
    processes = fresh(3)
    processes(save_again_and_again, str(tmp_path), 3)
    processes.start(save_again_and_again, str(tmp_path), 10**9)  # the first call is refused: step 2 is there
    assert [type(answer) for answer in processes.answers()] == [FileExistsError] * 3
    shutil.rmtree(tmp_path / "step-2")
    processes.start(save_again_and_again, str(tmp_path), 10**9)
    time.sleep(draw.uniform(0.1, 0.6))
    processes.workers[draw.randrange(3)].kill()
    answers = processes.answers(timeout=120)
    assert sum(answer is None for answer in answers) == 1
    assert all(
        isinstance(answer, pp.checkpoint.CheckpointError) for answer in answers if answer is not None
    ), answers
    path = pp.checkpoint.latest(tmp_path)
    if path is not None:
        like = {"step": 0, "own": {rank: torch.zeros(20_000) for rank in range(3)}, "all": torch.zeros(9)}
        found = pp.checkpoint.load(path, like=like)
        assert all(bool((leaf == found["step"]).all()) for leaf in (*found["own"].values(), found["all"]))
    pp.checkpoint.save(tmp_path, {"step": 10**6})
    assert not [name for name in os.listdir(tmp_path) if "." in name]


def test_where_the_group_of_the_world_has_no_gloo_no_rank_is_taken_for_gone():
    """As under NCCL alone: it refuses a receive on the CPU, which told of a process that had ended."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert Rendezvous("test", dist.group.WORLD, 1.0).alive(0)
    finally:
        dist.destroy_process_group()

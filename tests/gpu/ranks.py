"""Steps on a device, in this process and between two."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import optree
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.schedule import insert_offloads
from tests.forks import forked
from tests.models import dense, problem, same_bits, squared
from tests.simulated import test_experts as experts
from tests.simulated.test_training import train
from tests.training.trainer import test_context as context

WAYS = ("raises", "raises while rank 1 posts", "killed", "runs out of memory", "reads out of bounds")
TRAINED = (((2, 1), "none"), ((1, 2), "none"), ((1, 2), "optimizer"), ((1, 2), "params"))


def step_of(
    schedule: pp.Schedule,
    transport: Any,
    device: torch.device,
    stage: Any = dense,
    engine: Any = pp.engines.graph,
    overlapped: Any = None,
) -> tuple[Callable[[], Any], Any]:
    """Make a step on a device, and compute what the whole model gives on the CPU: loss and gradients."""
    params, inputs, targets = problem(schedule)
    wanted = pp.value_and_grad([dense] * len(params), squared, schedule)(params, inputs, targets)
    if transport is not None:
        params = {
            schedule.model_stages[s]: params[schedule.model_stages[s]]
            for s in schedule.stages_of(dist.get_rank())
        }
    held = {s: {k: v.to(device) for k, v in tree.items()} for s, tree in params.items()}
    step = pp.value_and_grad(
        [stage] * len(wanted[1]), squared, schedule, transport or pp.InProcess(), engine=engine,
        overlapped=overlapped,
    )  # fmt: skip
    there = inputs.to(device), targets.to(device)
    return lambda: step(held, *there), wanted


def step_in_process() -> Callable[[], Any]:
    return step_of(pp.one_f_one_b(2, 4), None, torch.device("cuda"))[0]


def host_waits(make: Callable[[], Callable[[], Any]]) -> int:
    """Count how often torch holds up the host in a second step."""
    step = make()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def sanitized() -> int:
    """Take steps on several streams under torch's CUDA sanitizer, which raises for a race; count them."""
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    there = torch.device("cuda")
    steps = [
        step_of(pp.dualpipev(2, 4), None, there, overlapped=pp.two_streams())[0],
        step_of(insert_offloads(pp.gpipe(2, 4)), None, there)[0],
    ]
    for step in steps:  # traced first: the sanitizer asks each tensor where its memory is
        step()
    torch.cuda.synchronize()
    enable_cuda_sanitizer()
    for step in steps:
        step()
    return len(steps)


def leaves(rank: int, device: torch.device) -> float:
    """Take a step over a transport that nobody closes."""
    return step_of(pp.one_f_one_b(2, 4), pp.P2P(timeout=30), device)[0]()[0].item()


def agrees(rank: int, device: torch.device, name: str, overlapped: str | None = None) -> float:
    """Take two steps, and compare them with the model in one process on the CPU."""
    with pp.P2P(timeout=30) as transport:
        pairs = overlapped and getattr(pp, overlapped)()
        step, wanted = step_of(getattr(pp, name)(2, 4), transport, device, overlapped=pairs)
        losses = [require_right(step(), wanted) for _ in range(3)]
        assert same_bits(losses[2], losses[1])
    return losses[1].item()


def require_right(found: Any, wanted: Any) -> torch.Tensor:
    """Compare what a step gives with the model in one process; returns the loss."""
    (mine, trees), (loss, grads) = found, wanted
    torch.testing.assert_close(mine.cpu(), loss, rtol=1e-9, atol=0)
    for s, tree in trees.items():
        for leaf, gradient in tree.items():
            torch.testing.assert_close(gradient.cpu(), grads[s][leaf], rtol=1e-9, atol=1e-12)
    return mine


def refused(rank: int, device: torch.device) -> str:
    """Return the error of a step that cannot be."""
    try:
        with pp.P2P(timeout=20) as transport:
            step_of(pp.one_f_one_b(2, 4), transport, device)[0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


def survives(rank: int, device: torch.device, how: str) -> str:
    """Take a step, one in which rank 0 fails, and two that are right where both survive; return the error."""
    armed = threading.Event()

    def fails(params: Any, x: torch.Tensor) -> torch.Tensor:
        if armed.is_set() and rank == 0:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "runs out of memory":
                x = torch.empty(2**50, device=device)
            if how == "reads out of bounds":
                return dense(params, x + x[torch.tensor([99], device=device)])
            raise ArithmeticError("on purpose")
        return dense(params, x)

    slow = armed if rank == 1 and "posts" in how else threading.Event()
    # Messages through mapped memory post no receive.
    transport = pp.P2P(timeout=30, mapped="posts" not in how)
    with transport, posting_slowly(slow, device), busy_noted(device):
        step, wanted = step_of(pp.one_f_one_b(2, 4), transport, device, fails, pp.engines.eager)
        step()
        armed.set()
        try:
            step()
        except pp.PipelineError as error:
            armed.clear()
            assert "rank 0" in str(error), error
            if how not in ("killed", "reads out of bounds"):
                for _ in range(2):
                    require_right(step(), wanted)
            return str(error)
    raise AssertionError("nothing has failed")


@contextmanager
def posting_slowly(armed: threading.Event, device: torch.device) -> Iterator[None]:
    """Be long in the middle of posting a message while ``armed``, so that the other rank fails meanwhile."""
    kind = getattr(dist, "ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo")
    real = kind.recv

    def recv(*arguments: Any) -> Any:
        time.sleep(0.3 * armed.is_set())
        work = real(*arguments)
        time.sleep(0.3 * armed.is_set())
        return work

    with mock.patch.object(kind, "recv", recv):
        yield


@contextmanager
def busy_noted(device: torch.device) -> Iterator[None]:
    """Add to an error how long the GPU was busy on end: as that of a rank that waits for another."""
    ended, longest = threading.Event(), [0.0]

    def watch() -> None:
        idle = time.monotonic()
        while device.type == "cuda" and not ended.wait(0.2):
            if torch.cuda.default_stream(device).query():  # raises where the device has failed
                idle = time.monotonic()
            longest[0] = max(longest[0], time.monotonic() - idle)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        error.add_note(f"busy for {longest[0]:.0f} s on end, CUDA_DEVICE_MAX_CONNECTIONS={queues}")
        raise
    finally:
        ended.set()
        watcher.join()


def counts_waits(rank: int, device: torch.device) -> int:
    with pp.P2P(timeout=30) as transport:
        return host_waits(lambda: step_of(pp.one_f_one_b(2, 4), transport, device)[0])


def trains(rank: int, device: torch.device) -> list[Any]:
    """Train over a pipeline of two, and over two data ranks with everything whole and in shards.

    Returns metrics and parameters as numbers: the memory of tensors would go with this process.
    """
    found = [train(rank, 2, device.type, shape, shard, pp.one_f_one_b) for shape, shard in TRAINED]
    return [(metrics, [leaf.tolist() for leaf in optree.tree_leaves(params)]) for metrics, params in found]


def exchanges(rank: int, device: torch.device) -> list[bool]:
    """Exchange tokens between experts, in turn and beside compute; says whether the bits are the same."""
    alone, *others = (experts.step(rank, 2, how) for how in (None, pp.interleaved(), pp.two_streams()))
    return [same_bits(alone, other) for other in others]


def attends(rank: int, device: torch.device, shard: str) -> float:
    """Train with sequences cut over the ranks; returns how far that is from one process."""
    return context.trained(rank, 2, (1, 2), ("cp",), "1f1b", shard, context.alone(1), device)


def in_processes(
    job: Callable[..., Any],
    backend: str,
    kind: str,
    *args: Any,
    seconds: float,
    environment: dict[str, str] | None = None,
    exits: bool = False,
) -> list[Any]:
    """Run ``job(rank, device, *args)`` in two processes. Returns the answers, None of one that is gone.

    Where ``exits``, returns how the processes exit instead, by themselves.

    Raises AssertionError with the traceback of each rank that raises, and the number of each that is late.
    """
    context, port = forked(), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    settings = environment or {}
    workers = [
        context.Process(target=_rank, args=(rank, port, backend, kind, settings, pipes[rank][1], job, args))
        for rank in range(2)
    ]
    answers, failures = [], []
    try:
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()
        end = time.monotonic() + seconds
        for rank, (ours, _) in enumerate(pipes):
            if ours.poll(max(0.0, end - time.monotonic())):
                try:
                    answer, failure = ours.recv()
                except EOFError:
                    answer, failure = None, None
            else:
                answer, failure = None, f"has not answered in {seconds:g} s"
            answers.append(answer)
            failures += [] if failure is None else [f"rank {rank}: {failure}"]
        assert not failures, "\n".join(failures)
        if exits:
            for worker in workers:
                worker.join(max(0.0, end - time.monotonic()))
            answers = [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return answers


def _rank(
    rank: int, port: int, backend: str, kind: str, settings: dict[str, str], end: Any, job: Any, args: Any
) -> None:
    os.environ |= {name: value.format(rank=rank) for name, value in settings.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    try:
        if kind == "cuda":
            torch.cuda.set_device(device)
        group = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        dist.init_process_group(group, rank=rank, world_size=2)
        end.send((job(rank, device, *args), None))
    except BaseException:
        end.send((None, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

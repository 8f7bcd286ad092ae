"""Programs that make every call by which the package orders operations, in one process and over NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import Op, insert_offloads
from tests.models import dense, problem, squared
from tests.simulated import names, nccl
from tests.simulated.groups import in_threads, simulated_nccl
from tests.simulated.test_experts import step as exchanging
from tests.simulated.test_pipelines import steps
from tests.simulated.test_training import overlapped, run_kind, train

_PAUSE = 0.1  # seconds of an operator that is slow


def in_process(devices: tuple[int, ...], schedule: pp.Schedule, record: bool = False, **options: Any) -> Any:
    """Two steps in one process, ranks on devices in turn; the second is recorded, or not."""
    params, inputs, targets = problem(schedule)
    where = {s: torch.device("cuda", devices[schedule.placement[s] % len(devices)]) for s in params}
    held = {s: {k: v.to(where[s]) for k, v in tree.items()} for s, tree in params.items()}
    step = pp.value_and_grad([dense] * len(params), squared, schedule, **options)
    step(held, inputs, targets)
    result = step.record(held, inputs, targets)[0] if record else step(held, inputs, targets)
    return optree.tree_map(torch.Tensor.cpu, result)


def threads(function: Callable[..., Any], *arguments: Any, size: int = 2) -> Callable[[], Any]:
    def run() -> Any:
        with simulated_nccl():
            return in_threads(size, function, *arguments, backend="cpu:gloo,cuda:nccl")

    return run


@torch.library.custom_op("simulated::late", mutates_args=())
def late(x: torch.Tensor) -> torch.Tensor:
    time.sleep(_PAUSE)
    return x.clone()


late.register_fake(torch.empty_like)
late.register_autograd(lambda ctx, g: g)


def recorded_after_work() -> bool:
    """Record a step while one device has still to do something: tell whether stages follow one another."""

    def first(params: Any, x: torch.Tensor) -> torch.Tensor:
        return late(dense(params, x))

    schedule = pp.gpipe(2, 2)
    params, x, y = problem(schedule)
    held = {s: {"w": params[s]["w"].to(torch.device("cuda", s))} for s in range(2)}
    step = pp.value_and_grad([first, dense], squared, schedule)
    step(held, x, y)
    gpu, end = names.device(), time.monotonic() + 6 * _PAUSE
    gpu.issue(gpu.stream(1, 0), "work", lambda: None, ready=lambda: time.monotonic() > end)
    _, timeline = step.record(held, x, y)
    ends = [
        {i.microbatch: end for i, end in zip(schedule.instructions(rank), timeline.ends[rank], strict=True)
         if i.op is Op.F}
        for schedule in [timeline.schedule] for rank in range(2)
    ]  # fmt: skip
    return all(ends[0][m] <= ends[1][m] for m in range(2))


def pair_that_fails() -> None:
    """Let the forward of a pair raise, and then use memory anew."""

    def fail() -> None:
        raise KeyError("the forward fails")

    residuals = torch.ones(4, device="cuda") * 2
    with pytest.raises(KeyError):
        pp.two_streams()(fail, (), lambda r: r + 1, (residuals,))
    del residuals
    torch.empty(4, device="cuda")


def first_message_that_fails() -> bool:
    """Tell whether no stage has computed when the first message between two ranks fails."""

    def fails(number: int, sent: str, wanted: str) -> None:
        raise RuntimeError("the first message fails")

    with (
        mock.patch.object(nccl, "_require_same_form", fails),
        pytest.raises((pp.PipelineError, RuntimeError)),
    ):
        threads(steps, pp.one_f_one_b(2, 4), {})()
    return not any(what.startswith("tanh") for what in names.device().issued)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "two streams": lambda: in_process((0,), pp.dualpipev(2, 4), overlapped=pp.two_streams()),
    "offload": lambda: in_process((0,), insert_offloads(pp.gpipe(2, 4))),
    "offload on two": lambda: in_process((0, 1), insert_offloads(pp.zb_h1(2, 4), lookahead=0)),
    "recorded": lambda: in_process((0, 1), pp.one_f_one_b(2, 4), record=True),
    "1f1b": threads(steps, pp.one_f_one_b(2, 4), {}),
    "dualpipe": threads(steps, pp.dualpipe(2, 4), {}),
    "dualpipev, two streams": threads(overlapped, "cuda", "two_streams"),
    "dualpipev, interleaved": threads(overlapped, "cuda", "interleaved"),
    "ties": threads(run_kind, "cuda", "ties"),
    "optimizer cut": threads(train, "cuda", (1, 2), "optimizer", pp.one_f_one_b),
    "params cut": threads(train, "cuda", (1, 2), "params", pp.one_f_one_b),
    "experts": threads(exchanging, pp.interleaved()),
}
"""Steps without a fault."""

FAILING: dict[str, Callable[[], Any]] = {
    "recorded after work": recorded_after_work,
    "a pair that fails": pair_that_fails,
    "a first message that fails": first_message_that_fails,
}
"""Programs in which something is late, or fails."""

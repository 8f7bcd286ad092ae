"""All ranks in one process: for tests, notebooks, one GPU, and torch.func transforms from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from .buffers import Buffers
from .errors import PipelineError, reason_of
from .transport import Call, Failure, Link, LossPart, Transfer


class InProcess:
    """The transport of a pipeline whose ranks all live in this process.

    A program runs the steps of all ranks in one order in which everything that a step consumes has been
    produced before, so no step ever waits: a message is an entry of the buffers that its consumer takes
    out, moved to the consumer's device where that differs. Threads may use one at the same time.
    """

    generation = 0

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def register_step(self) -> int:
        return 0

    def connect(self, links: Iterable[Link]) -> None:
        pass

    def all_gather(self, text: str) -> list[str]:
        return [text]

    def send_text(self, rank: int, peer: int, text: str) -> None:
        raise AssertionError("one process tells itself nothing")

    def recv_text(self, rank: int, peer: int) -> str:
        raise AssertionError("one process tells itself nothing")

    def begin(self, call: str, key: str | None, source: int) -> str:
        assert key is not None  # one process holds the first stage, and so the batch
        return key

    def end(self, losses: Mapping[int, torch.Tensor], parts: Mapping[int, LossPart]) -> torch.Tensor | None:
        if not losses:
            return None
        device = next(iter(losses.values())).device
        return torch.cat([losses[stage].to(device) for stage in sorted(losses)]).sum(0)

    def fail(self, failure: Failure) -> BaseException:
        if failure.instruction is None:
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, reason_of(failure))

    def post(self, rank: int, batch: Sequence[Transfer]) -> Call | None:
        return None

    def wait_recv(self, rank: int, transfer: Transfer) -> Call | None:
        tag, device = transfer.tag, transfer.device
        if device.type == "cpu" or torch.cuda.device_count() < 2:
            return None

        def move(buffers: Buffers) -> None:
            buffers.values[tag] = tuple(t.to(device, non_blocking=True) for t in buffers.values[tag])

        return move

    def wait_send(self, rank: int, transfer: Transfer) -> Call | None:
        return None

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

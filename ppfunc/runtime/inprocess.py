"""All ranks in one process: for tests, notebooks, one GPU, and torch.func transforms from outside."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import torch

from ppfunc.stage import LeafSignature

from .errors import PipelineError
from .transport import Failure, Route, Thunk, Transfer, Values


class InProcess:
    """The transport of a pipeline whose ranks all live in this process and this thread.

    The interpreter runs the steps of all ranks in one order in which everything that a step
    consumes has been produced before, so no step ever waits: a message is an entry of a
    dictionary that its consumer takes out, moved to the consumer's device where that differs.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._texts: dict[tuple[int, int], deque[str]] = defaultdict(deque)

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def connect(self, routes: Iterable[Route]) -> None:
        pass

    def enroll(self) -> int:
        return 0

    def share(self, text: str) -> list[str]:
        return [text]

    def begin(self, call: str, key: str | None) -> str:
        assert key is not None  # one process holds the first stage, and so the batch
        return key

    def end(self) -> None:
        pass

    def tell(self, rank: int, peer: int, text: str) -> None:
        self._texts[rank, peer].append(text)

    def hear(self, rank: int, peer: int) -> str:
        return self._texts[peer, rank].popleft()

    def post(self, rank: int, batch: Sequence[Transfer], values: Values) -> Thunk | None:
        return None

    def arrive(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        tag, device = transfer.tag, transfer.device
        if device.type == "cpu" or torch.cuda.device_count() < 2:
            return None

        def arrive() -> None:
            values[tag] = tuple(t.to(device, non_blocking=True) for t in values[tag])

        return arrive

    def release(self, rank: int, transfer: Transfer, values: Values) -> Thunk | None:
        return None

    def spread(
        self, owner: int, tensors: tuple[torch.Tensor, ...], leaves: tuple[LeafSignature, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        return tensors

    def fail(self, failure: Failure) -> BaseException:
        self._texts.clear()
        if failure.instruction is None:
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, failure.reason)

"""All ranks in one process: for tests, notebooks, one GPU, and torch.func transforms from outside."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppfunc.stage.device import available

from ..agreement.comparison import LaidOut
from ..errors import AgreementError, Failure, PipelineError
from ..execution.buffers import Buffers, Compared, moved
from .collective import Among, Collective
from .grid import Axes, ShardWhat
from .protocols import Call, LossPart, Mode, Route, Transfer, sum_up


class InProcess:
    """Carries messages of a pipeline whose ranks all live in this process and this thread.

    The calls of all ranks run in one order in which everything that a call consumes has been produced before,
    so none ever waits: a message is an entry of ``buffers.values``, moved to the consumer's device where that
    differs. It owns nothing, so steps may share it, also between threads.
    """

    generation, has_peers, compares_layouts, mixes_batches = 0, False, False, False
    mesh: DeviceMesh | None = None
    axes, device = Axes(), torch.device("cpu")
    shard: ShardWhat = "none"

    def __repr__(self) -> str:
        return "InProcess()"

    def local_ranks(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def register_step(self) -> int:
        return 0

    def making_step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def all_gather(self, text: str) -> list[str]:
        return [text]

    def send_text(self, peer: int, text: str) -> None:
        raise AssertionError("ranks of one process need no texts")

    def recv_text(self, peer: int) -> str:
        raise AssertionError("ranks of one process need no texts")

    def require_same(
        self, facts: str, among: Literal["world", "peers", "data"] | tuple[str, ...] = "world"
    ) -> None:
        pass

    def begin(self, call: str, key: str | None, source: int, common: str = "") -> str:
        assert key is not None  # one process holds the first stage, and so the batch
        return key

    def ready(self, layouts: LaidOut) -> None:
        pass

    def rest(self) -> None:
        pass

    def end(
        self,
        losses: Mapping[int, torch.Tensor],
        parts: Mapping[int, LossPart],
        mode: Mode = "mixed",
        compared: Sequence[Compared] = (),
    ) -> torch.Tensor | None:
        for values, require in compared:
            require(values)
        last = losses[max(parts)].device if parts else None
        return sum_up([losses[stage].to(last) for stage in sorted(parts)], parts) if parts else None

    def hold_interrupts(self, later: bool = False) -> AbstractContextManager[object]:
        """Delay nothing: interrupts act at once, since a step that they end leaves no peer behind."""
        return nullcontext()

    def lose_step(self) -> None:
        pass

    def fail(self, failure: Failure) -> BaseException:
        if failure.instruction is None or isinstance(failure.cause, AgreementError):
            return failure.cause
        return PipelineError(failure.rank, failure.position, failure.instruction, failure.reason)

    def connect(self, routes: Iterable[Route], devices: Iterable[torch.device]) -> None:
        pass

    def collective(self, among: Among) -> Collective:
        return Collective()

    def post(self, batch: Sequence[Transfer]) -> Call | None:
        return None

    def wait_recv(self, transfer: Transfer) -> Call | None:
        tag, device = transfer.tag, transfer.device
        if not available():
            return None

        def move(buffers: Buffers) -> None:
            buffers.values[tag] = moved(buffers.values[tag], device)

        return move

    def wait_send(self, transfer: Transfer) -> Call | None:
        return None

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

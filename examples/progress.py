"""What a run says as it goes: a bar, a line of JSON per step, scalars for TensorBoard."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from threading import RLock
from typing import Any

import torch
from tqdm import tqdm

MOST_SKIPPED = 10
PRODUCT = 1024  # rows of the matrices by which the speed of a device is measured


class Log:
    """Writes a line of JSON per entry to a file, at once, and its numbers to TensorBoard.

    Args:
        file: begun anew, or gone on with after the entries of the first ``steps`` steps.
        tensorboard: folder of its event files.
    """

    def __init__(self, file: Path | None, tensorboard: Path | None, steps: int) -> None:
        self.file, self.writer = file, None
        if file is not None:
            before = file.read_text(encoding="utf-8").splitlines() if steps and file.exists() else []
            lines = [line + "\n" for line in before if json.loads(line)["step"] <= steps]
            file.write_text("".join(lines), encoding="utf-8")
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(tensorboard))

    def __bool__(self) -> bool:
        return self.file is not None or self.writer is not None

    def write(self, step: int, **numbers: float | None) -> None:
        """Write the numbers of a step; what is not finite is null in JSON, which has no word for it."""
        if self.file is not None:
            finite = {k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": step, **finite}) + "\n")
        if self.writer is not None:
            for name, value in numbers.items():
                if value is not None:
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()


class Progress:
    """A progress bar with the loss and the speed, what it has seen, and a log.

    Args:
        options: those of the command line.
        losses: of the steps before.
        shown: this process has the bar.
        log: where every step is written.
        mfu: that of a step that takes a second; None without a log.
    """

    def __init__(self, options: Any, losses: list[float], shown: bool, log: Log, mfu: float | None) -> None:
        self.losses = losses
        self.log = log
        self.mfu = mfu
        self.skipped = 0  # steps in a row
        self.seconds: list[float] = []
        self.tokens = options.batch * options.context
        tqdm.set_lock(RLock())  # one process writes; the lock for several would outlive an interrupt
        self.bar = tqdm(
            range(len(losses), options.steps),
            initial=len(losses),
            total=options.steps,
            unit="step",
            disable=not shown,
            dynamic_ncols=True,
        )

    def __iter__(self) -> Iterator[int]:
        for n in self.bar:
            self.start = time.perf_counter()
            yield n

    def note(self, metrics: Any) -> None:
        """The end of a step."""
        loss = metrics.loss.item()  # waits for the device
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(loss)
        self.skipped = self.skipped + 1 if metrics.skipped else 0
        if self.log:
            self.log.write(
                len(self.losses),
                loss=loss,
                learning_rate=metrics.lr.item(),
                grad_norm=metrics.grad_norm.item(),
                tokens_per_second=self.tokens / self.seconds[-1],
                mfu=None if self.mfu is None else self.mfu / self.seconds[-1],
                memory=peak_memory(),
                skipped=metrics.skipped.item(),
            )
        if self.skipped == MOST_SKIPPED and not self.bar.disable:
            advice = (
                f"Loss or gradients were not finite in {self.skipped} steps in a row, which updated nothing."
                " Lower --lr, or --clip."
            )
            self.bar.write(advice, file=sys.stderr)
        usual = median(self.seconds[-20:])
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, {self.tokens / usual:,.0f} tokens/s, step {1e3 * usual:.0f} ms", refresh=False
        )


def peak_memory() -> int:
    """The most memory that this process has had so far, in bytes: of its GPU, or of its host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of this device in a product of matrices, the best of some."""
    a = torch.randn(PRODUCT, PRODUCT, device=device, dtype=dtype)
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * PRODUCT**3 / best

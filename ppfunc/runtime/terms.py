"""Name what the ranks compare where a step begins: the call, and the shapes of its batch."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, Self

import torch

from ppfunc.schedule import Schedule

from .arguments import StepArguments
from .form import StepForm


class BatchShapes(NamedTuple):
    """The shapes of a batch: all that ranks which are not given it have to know, and equal where it is of the same form.

    Args:
        microbatches: their number.
        shapes: of those that differ, for people; may be cut short.
        digest: of the signatures of all.
        rows: of a microbatch, where the inputs came as a whole batch; None where they came as Microbatches.
    """

    microbatches: int
    shapes: str
    digest: str
    rows: int | None

    def __str__(self) -> str:
        whole = "as Microbatches" if self.rows is None else f"with {self.rows} rows each"
        return f"{self.microbatches} microbatches of {self.shapes.replace(';', ',')} ({self.digest[:8]}) {whole}"

    @classmethod
    def of(cls, form: StepForm) -> Self:
        """Those of a batch that this process was given."""
        inputs = form.inputs or ()
        index = {signature: n for n, signature in enumerate(dict.fromkeys(inputs))}
        shown = ", ".join(map(str, index))
        text = "\n".join([*(s.to_json() for s in index), *(str(index[s]) for s in inputs)])
        return cls(len(inputs), shown if len(shown) <= 60 else f"{shown[:57]}...", _digest(text), form.rows)


@lru_cache(maxsize=64)
def write_shapes(shapes: BatchShapes, run_before: bool) -> str:
    """The shapes of a batch, and whether the ranks have agreed on them before: a line for people, and JSON for :func:`read_shapes`."""
    known = "run before" if run_before else "not run before"
    return f"{shapes}, {known}\n{json.dumps({**shapes._asdict(), 'run_before': run_before})}"


@lru_cache(maxsize=64)
def read_shapes(text: str) -> tuple[BatchShapes, bool]:
    """Read what :func:`write_shapes` wrote.

    >>> shapes = BatchShapes(4, "float32[2,3]", "0123", rows=2)
    >>> read_shapes(write_shapes(shapes, True)) == (shapes, True)
    True
    """
    fields = json.loads(text.partition("\n")[2])
    run_before = fields.pop("run_before")
    return BatchShapes(**fields), run_before


def call_terms(schedule: Schedule, passes: Sequence[StepArguments]) -> str:
    """The schedule, the weights of the microbatches of all passes, and the seed."""
    weights = "1/m each"
    if given := [part.loss_weights for part in passes if part.loss_weights is not None]:
        every = torch.cat(given).tolist()
        weights = f"{reprlib.repr(every)} ({_digest(repr(every))})"
        if left_out := sum(len(part.left_out) for part in passes):  # less, where a rank has them on its device
            weights += f", {left_out} left out"
    name = schedule.name[:60].replace(";", ",").encode(errors="backslashreplace").decode()  # what separates terms, or cannot be sent
    return f"schedule {name} of {schedule.microbatches} microbatches ({schedule.digest[:8]}); loss weights {weights}; seed {passes[0].seed}"


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

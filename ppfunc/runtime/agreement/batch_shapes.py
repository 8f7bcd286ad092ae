"""Describe the shapes of a batch to ranks that are not given it."""

import json
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, Self

from ..call.forms import StepForm


class BatchShapes(NamedTuple):
    """Describe the shapes of a batch to ranks that are not given it; equal for batches of one form.

    Args:
        text: number and shapes of the microbatches, cut short, and a digest of their signatures.
        rows: of a microbatch of a whole batch; None if the inputs came as Microbatches.
    """

    text: str
    rows: int | None

    @classmethod
    def of(cls, form: StepForm) -> Self:
        """Describe a batch that this process was given."""
        inputs = form.inputs or ()
        index = {signature: n for n, signature in enumerate(dict.fromkeys(inputs))}
        shown = ", ".join(map(str, index)).replace(";", ",")
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        bits = digest("\n".join([*(s.to_json() for s in index), *(str(index[s]) for s in inputs)]))
        whole = "as Microbatches" if form.rows is None else f"with {form.rows} rows each"
        return cls(f"{len(inputs)} microbatches of {shown} ({bits}) {whole}", form.rows)


@lru_cache(maxsize=64)
def write_shapes(shapes: BatchShapes, run_before: bool) -> str:
    """Write the shapes of a batch, and whether the ranks have agreed on them before.

    The text is a line for people, then JSON for :func:`read_shapes`.
    """
    return f"{shapes.text}, {'' if run_before else 'not '}run before\n{json.dumps([shapes, run_before])}"


@lru_cache(maxsize=64)
def read_shapes(text: str) -> tuple[BatchShapes, bool]:
    """Read the text of :func:`write_shapes`.

    >>> shapes = BatchShapes("4 microbatches of float32[2,3]", rows=2)
    >>> read_shapes(write_shapes(shapes, True)) == (shapes, True)
    True
    """
    shapes, run_before = json.loads(text.partition("\n")[2])
    return BatchShapes(*shapes), run_before


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a hash."""
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

"""Describe, as texts, what ranks compare when a step begins: the same on every rank that was given the same."""

from __future__ import annotations

import re
import reprlib
from hashlib import sha256

from ppfunc.schedule import Schedule

from .arguments import StepArguments, StepForm


def call_terms(schedule: Schedule, arguments: StepArguments) -> str:
    """The schedule, the weights of the microbatches and the seed."""
    weights = "1/m each"
    if arguments.loss_weights is not None:
        given = arguments.loss_weights.tolist()
        weights = f"{reprlib.repr(given)} ({_digest(repr(given))})"
    named = f"{_plain(schedule.name[:60])} of {schedule.microbatches} microbatches ({schedule.digest[:8]})"
    return f"schedule {named}; loss weights {weights}; seed {arguments.seed}"


def batch_name(form: StepForm) -> str:
    """The form of a batch, with the rows of a microbatch where it was given whole."""
    inputs = form.inputs or ()
    index = {signature: n for n, signature in enumerate(dict.fromkeys(inputs))}
    text = "\n".join([*(s.to_json() for s in index), *(str(index[s]) for s in inputs)])
    shown = _plain(", ".join(map(str, index)))
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    given = "as Microbatches" if form.rows is None else f"with {form.rows} rows each"
    return f"{len(inputs)} microbatches of {shown} ({_digest(text)}) {given}"


def rows_of(name: str) -> int | None:
    """The rows of a microbatch, of the name of a batch.

    >>> rows_of("4 microbatches of float32[2,3] (0123) with 2 rows each"), rows_of("4 microbatches of ... as Microbatches")
    (2, None)
    """
    found = re.search(r" with (\d+) rows each$", name)
    return int(found[1]) if found else None


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _plain(text: str) -> str:
    """A text without what separates terms, and without characters that cannot be sent."""
    return text.replace(";", ",").encode(errors="backslashreplace").decode()

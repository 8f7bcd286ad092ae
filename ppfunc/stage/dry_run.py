"""Run a stage program once, to find out whether it can be differentiated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .abstract import DATA_DEPENDENT, Outline, data_dependence, without_values
from .errors import StageError
from .example import Example, stand_ins
from .program import FlatProgram


def require_gradient(
    flat: FlatProgram, known: Outline, seen: Example, example: tuple[Any, ...], *, name: str, by: str, instead: str
) -> Outline:
    """Run forward and backward once: without values if the outline is known and no value is asked for, else on zeros.

    Args:
        flat: the program.
        known: the outline of the stage.
        seen, example: its example.
        name: of the stage.
        by: what differentiates it.
        instead: the advice if that refuses.

    Returns:
        The outline; no longer known where the stage asked for a value and may take another path than the one seen.

    Raises:
        StageError: it refuses.
    """
    with torch.no_grad(), without_values() if known.known else nullcontext():
        try:
            outputs, residuals = flat.forward(*(seen.make() if known.known else stand_ins(example, seen.device)))
            gy = tuple(torch.ones_like(t) for t, leaf in zip(outputs, known.y.leaves, strict=False) if leaf.grad)
            flat.backward(residuals, gy)
            return known
        except StageError:
            raise
        except Exception as error:
            if not (known.known and isinstance(error, DATA_DEPENDENT)):
                first = (str(error).splitlines() or [""])[0]
                reason = f"it runs, but {by} cannot differentiate it ({type(error).__name__}: {first})"
                raise StageError(name, reason, instead) from error
            refusal = data_dependence(error), "use the functional engine"
    # Libraries that look for fake tensors, to ask them for no values, do not see them within a transform.
    return require_gradient(flat, known._replace(refusal=refusal), seen, example, name=name, by=by, instead=instead)

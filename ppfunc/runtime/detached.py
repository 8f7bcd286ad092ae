"""Warn of a stage that does not train."""

from __future__ import annotations

from ppfunc.stage.errors import warn
from ppfunc.stage.module import frozen_in

from .lowered import LoweredStage
from .ties import leaf_names


def warn_of_detached(low: LoweredStage) -> None:
    """Warn of a stage whose loss, or whose output, passes no gradient on to what it was made of, which then does not train."""
    frozen = frozen_in(low.function.fn)
    trained = any(leaf.grad and name not in frozen for name, leaf in zip(leaf_names(low.params), low.params.leaves, strict=True))
    passes = (low.loss is not None and low.loss.leaves[0].grad) or any(edge.carrying for edge in low.sinks)
    if passes or not (trained or any(edge.carrying for edge in low.sources)):
        return
    warn(
        f"stage {low.model}: its {'output' if low.sinks else 'loss'} passes no gradient on, so that neither its parameters nor the stages "
        "before it train; it was made by detach(), under no_grad() or of integers: "
        "remove that; where it is meant, call requires_grad_(False) on the module"
    )

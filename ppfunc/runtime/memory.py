"""The memory of a bound program: what its thunks read and write."""

from __future__ import annotations

from dataclasses import dataclass, field

from .calls import Leaves
from .gradients import Gradients
from .transport import Values

Key = tuple[int, int]  # (stage, microbatch)


@dataclass
class Memory:
    """What a bound program reads and writes while it runs; all of it belongs to one step.

    Args:
        params: leaves of the parameters, by stage.
        constants: leaves that are not differentiated (targets, side inputs), by (stage, microbatch).
        state: leaves of the state, by stage; each forward takes it and puts the new one there.
        weights: cotangent of the loss, by (stage, microbatch).
        values: messages on their way between stages.
        residuals: what a backward needs of its forward, and a weight gradient of its input gradient, by (stage, microbatch).
        kept: outputs that belong to the caller, by (stage, microbatch).
        gradients: parameter gradients so far, by stage.
        seed: ``(seed, step)`` of the randomness, None where the caller gave none.
    """

    params: dict[int, Leaves] = field(default_factory=dict)
    constants: dict[Key, Leaves] = field(default_factory=dict)
    state: dict[int, Leaves] = field(default_factory=dict)
    weights: dict[Key, Leaves] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    residuals: dict[Key, tuple] = field(default_factory=dict)
    kept: dict[Key, Leaves] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    seed: tuple[int, int] | None = None

    def clear(self) -> None:
        """Let go of everything that belongs to one step."""
        parts = (self.params, self.constants, self.state, self.weights, self.values, self.residuals, self.kept)
        for part in parts:
            part.clear()
        for gradients in self.gradients.values():
            gradients.clear()

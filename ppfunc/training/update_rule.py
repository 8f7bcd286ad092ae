"""Say how gradients become new parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Literal, NamedTuple

import torch

from ppfunc.stage import Stage
from ppfunc.stage.module import frozen_in

from .precision import LossScale, Precision
from .protocols import Optimizer, text_of
from .ranks import ShardWhat

OnNonfinite = Literal["skip", "raise", "ignore"]


class UpdateRule(NamedTuple):
    """How gradients become new parameters.

    Args:
        optimizer: runs stage by stage.
        clip: largest norm of all gradients together.
        norm_type: p of the norm.
        scale: of the loss.
        precision: the dtypes.
        on_nonfinite: what to do where loss or norm are not finite.
        shard: whether each data rank keeps, and updates, a part of the optimizer's state, or also of the parameters.
    """

    optimizer: Optimizer
    clip: float
    norm_type: float
    scale: LossScale | None
    precision: Precision
    on_nonfinite: OnNonfinite
    shard: ShardWhat

    @property
    def options_text(self) -> str:
        """The options that all ranks have to agree on."""
        dtypes = "/".join(str(dtype) for dtype in (self.precision.compute, self.precision.reduce, self.precision.master))
        scaled = "a scaled loss" if self.scale else "no scale"
        return f"clip {self.clip} of norm {self.norm_type}, {scaled}, {dtypes}, {self.on_nonfinite} what is not finite, shard {self.shard}"

    @property
    def numbers_text(self) -> tuple[str, str]:
        """The numbers of the optimizer and of the scale."""
        return f"optimizer {text_of(self.optimizer)}", f"scale {'none' if self.scale is None else self.scale.text}"

    @property
    def needs_all(self) -> bool:
        """Whether an update needs the gradients of all stages."""
        return not (self.clip == inf and self.scale is None and self.on_nonfinite == "ignore")


def frozen_check(stages: Sequence[Stage | None], optimizer: Optimizer) -> Callable[[], None]:
    """Make the check that raises where modules have frozen parameters, and the optimizer changes what has a gradient of zeros."""

    @cache
    def moves() -> bool:
        params = {"p": torch.ones(2)}
        state = optimizer.init(params)
        for _ in range(3):  # a rate may be 0 at first
            params, state = optimizer.update({"p": torch.zeros(2)}, state, params)
            if not torch.equal(params["p"], torch.ones(2)):
                return True
        return False

    def check() -> None:
        frozen = [name for stage in stages if stage is not None for name in frozen_in(stage)]
        if frozen and moves():
            raise ValueError(
                f"optimizer: it changes parameters whose gradient is zero, as weight decay does, and {frozen[0]} is frozen; "
                "take one that does not (weight_decay=0), or let the parameter require a gradient"
            )

    return check

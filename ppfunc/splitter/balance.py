"""Choose where to cut a model so that its stages cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from ppfunc.parallel.partition import Partition

from .call import CallForm
from .trace import LeafForm

Balance = Literal["flops", "time"]


def choose(
    model: nn.Module, form: CallForm, inputs: Sequence[LeafForm], device: torch.device, at: int | Partition, balance: Balance
) -> list[str]:
    raise NotImplementedError

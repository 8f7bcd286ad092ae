"""What torch remembers of evaluations without values is bounded, however many shapes there are."""

from __future__ import annotations

import torch

from ppfunc.stage._torch import FakeTensorMode
from ppfunc.stage.abstract import evaluation


def test_what_torch_remembers_of_shapes_is_bounded(monkeypatch):
    monkeypatch.setattr(evaluation, "_REMEMBERED", 40)
    sizes = []
    for n in range(100):
        with evaluation.without_values():
            torch.ones(n + 1).sin().cos()
        sizes.append(len(FakeTensorMode.cache))
    assert 20 < max(sizes[50:]) < 50

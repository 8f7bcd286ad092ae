"""Models split by the names of their modules: the stages in turn are the whole model."""

from __future__ import annotations

import pytest
import torch

import ppfunc as pp
from tests.splitter import modules as m

ZOO = [
    m.Plain,
    m.NoGradOverACut,
    m.Detached,
    m.InPlaceThroughAView,
    m.InPlaceAcrossACut,
    m.MaskFilledInPlace,
    m.MaskFilledByFloats,
    m.Reused,
    m.Tied,
    m.Frozen,
    m.BatchNorms,
    m.BufferAssignedAnew,
    m.BufferReadLater,
    m.Autocast,
    m.OwnBackward,
    m.OwnBackwardOfTwoResults,
    m.ChunkOverACut,
    m.Recurrent,
    m.Encoder,
    m.Norms,
    m.HiddenTensor,
    m.Dropouts,
    m.NumbersInTheCode,
    m.VmapInside,
    m.ShapesOfFloats,
    m.EarlyResult,
    m.ClassOfOutputs,
]


def made(kind, **kwargs):
    torch.manual_seed(0)
    model = kind(**kwargs)
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.double()
    model.double()
    if isinstance(model, m.Autocast):
        model.b.float()
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("at", [["b"], ["c"], ["b", "c"]], ids=lambda at: "".join(at))
@pytest.mark.parametrize("kind", ZOO, ids=lambda kind: kind.__name__)
def test_stages_in_turn_are_the_whole_model(kind, at, training):
    model = made(kind).train(training)
    parts = pp.split(model, m.rows(), at=at)
    m.require_equal(model, parts, m.rows())
    m.require_equal(model, parts, m.rows(7))

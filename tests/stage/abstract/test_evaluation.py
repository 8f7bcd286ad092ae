"""Evaluation without values: torch remembers the form of a result for equal arguments alone, and of few."""

import torch

from ppfunc.stage._torch import FakeTensorMode
from ppfunc.stage.abstract import evaluation
from ppfunc.stage.abstract.evaluation import Evaluation


def arguments():
    """Make arguments of which any two differ in one property that a result shows."""
    x = torch.ones(4, 6)
    yield x
    yield torch.ones(4, 7)
    yield torch.ones(6, 4).t()
    yield x.long()
    yield x.to(torch.complex64)
    yield x.to(torch.complex64).conj()
    yield x.to("meta")
    yield torch.ones(5, 6)[1:]
    yield torch.ones(5, 6)[:4]


CALLS = {
    "int": lambda x: x + 1,
    "float": lambda x: x + 1.0,
    "bool": lambda x: x + True,
    "view": lambda x: x[1:],
    "offset": lambda x: x[:, 1:],
    "negative": lambda x: x.conj().imag if x.is_complex() else x.neg(),
    "list": lambda x: torch.cat([x, x[:1]]),
    "sizes": lambda x: x.new_empty([2, 3]),
    "dtype": lambda x: x.to(dtype=torch.complex128),
    "several": lambda x: x.split([1, 3])[1],
    "none": lambda x: x.sum(None, dtype=None),
}


def shown(t):
    """Return what is to be seen of a tensor."""
    bits = t.is_conj(), t.is_neg(), t.requires_grad, t.is_inference()
    storage = t.untyped_storage().nbytes()
    return t.dtype, t.device, t.shape, t.stride(), t.storage_offset(), storage, *bits


def test_results_without_values_have_the_form_of_those_with_values():
    expected = [shown(call(x)) for x in arguments() for call in CALLS.values()]
    Evaluation.cache_clear()
    for _ in range(2):  # computed, and remembered
        with Evaluation() as mode, torch.enable_grad():
            mode.cache_crosscheck_enabled = True
            assert [shown(call(x)) for x in arguments() for call in CALLS.values()] == expected
    assert Evaluation.cache_info().hits > len(expected)


def test_what_torch_remembers_of_shapes_is_bounded(monkeypatch):
    monkeypatch.setattr(evaluation, "_REMEMBERED", 40)
    sizes = []
    for n in range(100):
        with evaluation.without_values():
            torch.ones(n + 1).sin().cos()
        sizes.append(len(FakeTensorMode.cache))
    assert 20 < max(sizes[50:]) < 50

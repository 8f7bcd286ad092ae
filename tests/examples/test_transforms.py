"""Every example of a transform agrees with the direct computation, and says so."""

import importlib
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["jvp", "hessian_vector", "per_sample", "ensemble", "outside", "saliency"])
def test_example_agrees_with_the_whole_model(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    error = importlib.import_module(name).main()
    torch.set_num_threads(threads)
    assert error < 1e-10
    assert f"{error:.1e}" in capsys.readouterr().out.splitlines()[-1] or name == "outside"

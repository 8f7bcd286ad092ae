"""The Python of the README runs, in order, in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

README = Path(__file__).parent.parent / "README.md"
LIBRARY = re.compile(r"# pip install (\w+)\n")  # at the beginning of a block that uses a library which ppfunc does not need


class Scores(NamedTuple):
    logits: torch.Tensor


class TiedModel(nn.Module):
    """In the form of a GPT-2 of transformers: names of modules, the head tied to the embedding, a class of outputs."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        width, words = config["n_embd"], config["vocab_size"]
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(words, width), "h": nn.ModuleList(nn.Linear(width, width) for _ in range(config["n_layer"]))}
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: torch.Tensor) -> Scores:
        x = self.transformer["wte"](tokens)
        for layer in self.transformer["h"]:
            x = x + layer(x).tanh()
        return Scores(self.lm_head(x))


def apply_updates(params: Any, updates: Any, inplace: bool) -> Any:
    assert not inplace
    return {s: {name: p + updates[s][name] for name, p in tree.items()} for s, tree in params.items()}


class Descent(NamedTuple):
    """In the form of an optimizer of TorchOpt."""

    lr: float

    def init(self, params: Any) -> None:
        return None

    def update(self, grads: Any, state: None, params: Any) -> tuple[Any, None]:
        return {s: {name: -self.lr * g for name, g in tree.items()} for s, tree in grads.items()}, None


# What stands for a library of the README that is not installed.
STAND_INS: dict[str, dict[str, Any]] = {
    "transformers": {"GPT2Config": dict, "GPT2LMHeadModel": TiedModel},
    "torchopt": {"adam": Descent, "apply_updates": apply_updates},
}


@pytest.fixture
def library(monkeypatch):
    """Have a library, or its stand-in, ready to be imported."""

    def provide(name: str) -> None:
        try:
            __import__(name)
        except ImportError:
            stand_in = ModuleType(name)
            vars(stand_in).update(STAND_INS[name])
            monkeypatch.setitem(sys.modules, name, stand_in)

    return provide


def test_its_python_runs_from_top_to_bottom(capsys, library, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # files are written
    text = README.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "readme"}
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        block = found[1]
        if "init_process_group" in block or "init_device_mesh" in block:  # those are for one process per rank
            continue
        if outside := LIBRARY.match(block):
            library(outside[1])
        line = text.count("\n", 0, found.start(1))
        exec(compile("\n" * line + block, str(README), "exec"), names)
    shown = capsys.readouterr().out
    for words in ("last_first: proved", "peak activations", "program", "def backward_weight"):
        assert words in shown
    split, model = names["split"], names["model"]
    assert split.params[3]["7.bias"].data_ptr() == model[7].bias.data_ptr()  # trained in place by torch's optimizer
    assert {"test_last_first", "moe", "parts", "rates", "moments", "costs", "program"} <= names.keys()

"""The Python of the README runs, in order, in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

from ppfunc.stage.tree import tree_map

README = Path(__file__).parent.parent / "README.md"
SCRIPT = re.compile(
    r"# torchrun --nproc-per-node (\d) (\w+)\.py\n"
)  # at the beginning of one for several processes
LIBRARY = re.compile(
    r"# pip install (\w+)\n"
)  # at the beginning of a block that uses a library which ppfunc does not need


class Scores(NamedTuple):
    logits: torch.Tensor


class TiedModel(nn.Module):
    """In the form of a GPT-2 of transformers: names of modules, the head tied to the embedding, a class of
    outputs.
    """

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        width, words = config["n_embd"], config["vocab_size"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "h": nn.ModuleList(nn.Linear(width, width) for _ in range(config["n_layer"])),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: torch.Tensor) -> Scores:
        x = self.transformer["wte"](tokens)
        for layer in self.transformer["h"]:
            x = x + layer(x).tanh()
        return Scores(self.lm_head(x))


class Descent(NamedTuple):
    """In the form of an optimizer of TorchOpt, which returns differences."""

    lr: float

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(
        self, grads: Any, state: tuple[()], *, params: Any = None, inplace: bool = True
    ) -> tuple[Any, tuple[()]]:
        assert not inplace
        return tree_map(lambda g: -self.lr * g, grads), state


# What stands for a library of the README that is not installed.
STAND_INS: dict[str, dict[str, Any]] = {
    "transformers": {"GPT2Config": dict, "GPT2LMHeadModel": TiedModel},
    "torchopt": {"adam": Descent},
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


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def running(rank: int, size: int, script: str, definitions: list[str]) -> float:
    """Run a block in a process of a group that is there already, after the blocks that define what it uses;
    returns its loss.
    """
    names: dict[str, Any] = {"__name__": script}
    torch.manual_seed(0)
    with MonkeyPatch.context() as patches:
        for name in ("init_process_group", "destroy_process_group"):
            patches.setattr(torch.distributed, name, lambda *args: None)
        for block in [block for block in blocks() if any(text in block for text in definitions)] + [script]:
            exec(compile(block, "README.md", "exec"), names)
    return float(names["metrics"].loss if "metrics" in names else names["loss"])


DEFINITIONS = {
    "pipeline": ["def stage(params, x):"],
    "split": ["def stage(params, x):", "split = pp.split(model, inputs"],
    "mesh": [],
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_its_scripts_run_in_as_many_processes_as_they_say(request, name):
    ((size, script),) = [
        (int(found[1]), block) for block in blocks() if (found := SCRIPT.match(block)) and found[2] == name
    ]
    losses = request.getfixturevalue({4: "four", 8: "eight"}[size])(running, script, DEFINITIONS[name])
    assert len(set(losses)) == 1 and losses[0] > 0


FORKS = """
import os, sys, torch.distributed, ppfunc.pipeline
ranks = []
for rank in range(4):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ["RANK"] = str(rank)
        break
else:
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def test_a_script_ends_well(tmp_path, free_port):
    """Nothing is left behind that ends a process of its own accord, with another code than 0."""
    pipeline = next(block for block in blocks() if (found := SCRIPT.match(block)) and found[2] == "pipeline")
    defined = next(block for block in blocks() if "def stage(params, x):" in block)
    (tmp_path / "pipeline.py").write_text(f"{FORKS}\n{defined}\n{pipeline}", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(README.parent), os.environ.get("PYTHONPATH")]))
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "pipeline.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_its_python_runs_from_top_to_bottom(capsys, library, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # files are written
    text = README.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "readme"}
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        block = found[1]
        if SCRIPT.match(block):  # those are for one process per rank
            continue
        if outside := LIBRARY.match(block):
            library(outside[1])
        line = text.count("\n", 0, found.start(1))
        exec(compile("\n" * line + block, str(README), "exec"), names)
    shown = capsys.readouterr().out
    for words in ("last_first: proved", "peak activations", "program", "def backward_weight"):
        assert words in shown
    split, model = names["split"], names["model"]
    assert (
        split.params[3]["7.bias"].data_ptr() == model[7].bias.data_ptr()
    )  # trained in place by torch's optimizer
    assert {
        "test_last_first",
        "moe",
        "parts",
        "rates",
        "trainer",
        "other",
        "costs",
        "program",
    } <= names.keys()

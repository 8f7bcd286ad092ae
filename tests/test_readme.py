"""The Python of the README runs, in order, in one process."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from pytest import MonkeyPatch
from torch import nn

import ppfunc as pp
from ppfunc.schedule import to_svg

README = Path(__file__).parent.parent / "README.md"
SCRIPT = re.compile(r"# .*torchrun --nproc-per-node (\d) (\w+)\.py")  # at its beginning
LIBRARY = re.compile(r"# .*pip install (\w+)\n")  # at the beginning of a block that uses it


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


# What stands for a library of the README that is not installed.
STAND_INS: dict[str, dict[str, Any]] = {
    "transformers": {"GPT2Config": dict, "GPT2LMHeadModel": TiedModel},
}


def provide(name: str, patches: MonkeyPatch) -> None:
    """Have a library, or its stand-in, ready to be imported."""
    try:
        __import__(name)
    except ImportError:
        stand_in = ModuleType(name)
        vars(stand_in).update(STAND_INS[name])
        patches.setitem(sys.modules, name, stand_in)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def running(rank: int, size: int, script: str) -> float:
    """Run a script in a process of a group that is there already; returns its loss."""
    names: dict[str, Any] = {"__name__": script}
    with MonkeyPatch.context() as patches:
        provide("transformers", patches)
        for name in ("init_process_group", "destroy_process_group"):
            patches.setattr(torch.distributed, name, lambda *args: None)
        patches.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
        exec(compile(script, "README.md", "exec"), names)
    return float(names["metrics"].loss)


def test_its_script_runs_in_as_many_processes_as_it_says(request):
    ((size, script),) = [(int(found[1]), block) for block in blocks() if (found := SCRIPT.match(block))]
    assert size == 4
    losses = request.getfixturevalue("four")(running, script)
    assert len(set(losses)) == 1 and losses[0] > 0


FORKS = """
import os, sys, torch._dynamo, torch.distributed, torch.export
import ppfunc.splitter.splitting, ppfunc.steps, ppfunc.training.trainer
ranks = []
for rank in range(4):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ["RANK"] = str(rank)
        break
else:
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def test_a_script_ends_well(tmp_path, store_port):
    """Nothing is left behind that ends a process of its own accord, with another code than 0."""
    script = next(block for block in blocks() if SCRIPT.match(block))
    if importlib.util.find_spec("transformers") is None:
        source = "from typing import NamedTuple\nimport torch\nfrom torch import nn\n"
        source += f"{inspect.getsource(Scores)}\n{inspect.getsource(TiedModel)}\n"
        source += "GPT2Config, GPT2LMHeadModel = dict, TiedModel\n"
        (tmp_path / "transformers.py").write_text(source, encoding="utf-8")
    (tmp_path / "train.py").write_text(f"{FORKS}\n{script}", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(README.parent), os.environ.get("PYTHONPATH")]))
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1"}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_its_python_runs_from_top_to_bottom(capsys, monkeypatch):
    text = README.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "readme"}
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        block = found[1]
        if outside := LIBRARY.match(block):
            provide(outside[1], monkeypatch)
        line = text.count("\n", 0, found.start(1))
        exec(compile("\n" * line + block, str(README), "exec"), names)
    shown = capsys.readouterr().out
    assert "zb_h1: makespan" in shown and "peak activations" in shown
    losses = [float(line.split()[0]) for line in shown.splitlines()[:5]]
    assert losses == sorted(losses, reverse=True)
    split, model, state = names["split"], names["model"], names["state"]
    assert len(split.tied) == 1  # the embedding is the head
    split.put_back(state.params, state=state.stage_state)  # as the text says
    trained = [leaf for params in state.params.values() for leaf in params.values()]
    assert len(trained) > 4 and all(
        any(torch.equal(leaf, parameter) for parameter in model.parameters()) for leaf in trained
    )


def test_it_is_short_and_what_it_names_is_there():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 220
    for row in re.findall(r"^\| (`examples/.*?) \|", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            assert (README.parent / "examples" / name.removeprefix("examples/")).is_file(), name
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) >= 2
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)


def test_its_picture_is_what_the_command_draws(tmp_path):
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README.read_text(encoding="utf-8")):
        schedule = pp.zbv(ranks=4, microbatches=8)
        assert (README.parent / picture).read_text(encoding="utf-8") == to_svg(schedule)

"""The example writes what the model alone writes, in one process and in several."""

import importlib
import subprocess
import sys

import pytest
import torch

from tests.examples.test_train_gpt import EXAMPLES

SMALL = "--width 16 --layers 3 --texts 3 --prompt 5 --length 6 --steps 4".split()


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_all_ranks_in_this_process_write_what_the_model_alone_writes(temperature, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    importlib.import_module("generate").main([*SMALL, "--in-process", "--temperature", temperature])
    torch.set_num_threads(threads)
    *texts, told = capsys.readouterr().out.splitlines()
    assert len(texts) == 3 and told.endswith("; the same as the model alone writes")


def test_processes_write_what_the_model_alone_writes():
    command = [sys.executable, str(EXAMPLES / "generate.py"), *SMALL, "--stages", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    *texts, told = done.stdout.splitlines()
    assert len(texts) == 3 and told.endswith("; the same as the model alone writes")

"""The types of the front door, as mypy reads them in the script of a user."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# As --strict, for the two scripts alone: with the options of the package, what mypy knows of torch already is
# used again.
STRICT = (
    "# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls,"
    " disallow-untyped-decorators, disallow-incomplete-defs, warn-return-any"
)
USE = """
import torch
import ppfunc as pp
from ppfunc.schedule import to_grid

def stage(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ params["w"]

def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()

schedule: pp.Schedule = pp.one_f_one_b(ranks=4, microbatches=8)
step = pp.value_and_grad([stage] * 4, loss_fn, schedule, pp.InProcess(), engine=pp.engines.graph)
loss, grads = step({}, torch.ones(8, 2), None)
grid: str = to_grid(schedule) + pp.schedule.to_csv(schedule)
stages: list[pp.stage.Stage] = [stage]
loss_function: pp.stage.Loss = loss_fn
engines: list[pp.stage.Engine] = [pp.engines.graph, pp.engines.functional, pp.engines.eager, pp.engines.graph(remat="full")]
optimizer: pp.optim.Optimizer = pp.optim.sgd(lr=0.1)
placement: tuple[int, ...] = pp.parallel.loop(4)

def carry(transport: pp.runtime.Transport) -> None: ...
carry(pp.InProcess())
pp.testing.schedules()
pp.optim.adamw(lr=0.1)
"""  # noqa: E501
MISUSE = """
import ppfunc as pp
from ppfunc import no_such_name  # attr-defined

pp.no_such_name  # attr-defined
pp.schedule.no_such_name  # attr-defined
pp.parallel.no_such_name  # attr-defined
pp.one_f_one_b(ranks="four", microbatches=8)  # arg-type
pp.one_f_one_b(ranks=4, microbatch=8)  # call-arg
pp.value_and_grad([], None, pp.gpipe(2, 2))  # arg-type
pp.optim.sgd(lr="fast")  # arg-type
number: int = pp.gpipe(2, 2)  # assignment
"""


@pytest.mark.slow
def test_use_is_accepted_and_misuse_is_found(tmp_path):
    for name, text in (("use.py", USE), ("misuse.py", MISUSE)):
        (tmp_path / name).write_text(STRICT + text)
    command = [sys.executable, "-m", "mypy", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    # Where mypy knows a file by its text already, it gives the path that the file had then.
    found = re.findall(r"^(?:.*/)?((?:mis)?use\.py:\d+): error: .* \[(.*)\]$", done.stdout, re.MULTILINE)
    expected = [
        (f"misuse.py:{n}", line.split("# ")[1])
        for n, line in enumerate(MISUSE.splitlines(), 1)
        if "# " in line
    ]
    assert found == expected

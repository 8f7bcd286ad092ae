"""The command: tune."""

import json
import sys

TUNED = """
import torch
import ppfunc as pp

def arguments():
    model, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8))), torch.randn(16, 8)
    return {"model": model, "args": x, "loss_fn": lambda y, t: (y - t).square().mean(), "targets": x,
            "optimizer": pp.optim.sgd(0.1), "speeds": (1e9, 1e9), "schedules": ["1f1b"], "remat": ["none"],
            "ranks": 8}

def number():
    return 3

def unknown():
    return {"model": 1}
"""


def test_rows_come_from_a_file_of_the_user(run, tmp_path, monkeypatch):
    file, picture = tmp_path / "model.py", tmp_path / "rows.svg"
    file.write_text(TUNED)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "train_beside.py").write_text("from model import arguments\n")
    options = "--ranks", 2, "--batch", 4, "--effort", 0
    code, out, err = run("tune", f"{file}:arguments", *options, "--json", "--out", picture)
    rows = json.loads(out)["rows"]
    assert json.loads(out)["memory"] is None and "make" not in rows[0]
    assert (code, err) == (0, "") and rows[0]["fits"] and picture.read_text().startswith("<svg")
    code, out, _ = run("tune", f"{tmp_path}/train_beside.py:arguments", *options, "--memory", 10, "--top", 1)
    assert code == 1 and "needs" in out
    code, _, err = run("tune", f"{file}:argument", "--ranks", 2)
    assert code == 2 and f"{file} has no function 'argument'; did you mean 'arguments'?" in err
    code, _, err = run("tune", "arguments", "--ranks", 2)
    assert code == 2 and "expected FILE:FUNCTION, such as train.py:arguments, got 'arguments'" in err
    for function, message in (
        ("number", "returned 3, expected the arguments of"),
        ("unknown", "tune() missing 2 required positional arguments: 'args' and 'loss_fn'; it takes model,"),
    ):
        code, _, err = run("tune", f"{file}:{function}", "--ranks", 2)
        assert code == 2 and message in err
    for name, message in (("rows.png", "expected a name that ends in .svg"), ("no/rows.svg", "no directory")):
        code, _, err = run("tune", f"{file}:arguments", *options, "--out", tmp_path / name)
        assert code == 2 and message in err

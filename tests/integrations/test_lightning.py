"""The page on Lightning, as a script in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWS = """
import json
if int(__import__("os").environ["RANK"]) < 2:
    again = Plain.load_from_checkpoint("runs/1/epoch=1.ckpt", model=make_model())
    pairs = zip(again.parameters(), plain.parameters(), strict=True)
    found = [losses, theirs, max((a - b).abs().max().item() for a, b in pairs)]
    print(f"\\n{json.dumps(found)}\\n", end="", flush=True)  # at once: ranks share the file
"""


@pytest.mark.slow
def test_two_processes_train_as_the_module_without_a_pipeline(tmp_path):
    """The losses on every rank, and the whole model in the checkpoint of each."""
    pytest.importorskip("lightning")
    cells = json.loads((ROOT / "examples" / "from_lightning.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    classes, last = "\n".join(code[:3]), "".join(cells[-1]["source"])
    script = tmp_path / "train.py"
    script.write_text(classes + "\n" + last.partition("```python\n")[2].partition("```")[0] + SHOWS)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, cwd=tmp_path, timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(rows) == 2
    for losses, theirs, distance in rows:
        assert len(losses) == 6
        assert losses == pytest.approx(theirs, rel=1e-6)
        assert distance < 1e-6
    assert (tmp_path / "runs" / "0" / "lightning_logs").exists()
    assert not (tmp_path / "runs" / "1" / "lightning_logs").exists()

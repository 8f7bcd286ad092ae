"""The Python of the README runs, in order, in one process."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_its_python_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) > 3
    names: dict[str, object] = {}
    for block in blocks:
        if "init_process_group" not in block:  # that is for one process per rank
            exec(compile(block, str(README), "exec"), names)
    assert "program" in capsys.readouterr().out

"""A room imports only from the floors under it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "ppfunc"
FLOORS = {"schedule": 1, "parallel": 1, "stage": 2, "runtime": 3, "training": 4}
FRONT = 5
OUTSIDE = {
    1: set(),
    2: {"torch", "optree", "einops", "networkx"},
    3: {"torch", "optree", "einops"},
    4: {"torch", "optree", "einops", "safetensors"},
    5: {"torch", "optree", "einops", "safetensors", "hypothesis"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The absolute names of the modules that a file imports, at any depth, inside functions too."""
    package = ("ppfunc", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def floor(parts: tuple[str, ...]) -> int:
    return FLOORS.get(parts[0], FRONT) if parts else FRONT


def faults(path: Path) -> list[str]:
    own = floor(path.relative_to(ROOT).parts[:-1])
    found = []
    for name in imported(path):
        head, *rest = name.split(".")
        if head == "ppfunc":
            if rest and rest[0] in FLOORS and floor(tuple(rest)) > own:
                found.append(f"imports {name} from a floor above")
            if rest and rest[0] not in FLOORS and own < FRONT:
                found.append(f"imports {name} from the front door")
        elif head not in sys.stdlib_module_names and head not in OUTSIDE[own]:
            found.append(f"imports {name}, which does not belong on floor {own}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_respect_the_floors(path):
    assert faults(path) == []


def test_a_fault_would_be_seen(tmp_path, monkeypatch):
    (tmp_path / "schedule").mkdir()
    file = tmp_path / "schedule" / "bad.py"
    file.write_text("import torch\nfrom ..stage import graph\ndef f():\n    import ppfunc.runtime.p2p\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(faults(file)) >= 3


def test_schedules_load_without_torch_and_quickly():
    code = (
        "import sys, time; start = time.perf_counter(); import ppfunc.schedule, ppfunc.parallel; "
        "print(time.perf_counter() - start); sys.exit('torch' in sys.modules or 'optree' in sys.modules)"
    )
    seconds = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    assert min(seconds) < 0.1


def test_every_name_of_the_front_door_exists():
    import ppfunc

    for name in ppfunc.__all__:
        assert getattr(ppfunc, name) is not None
    with pytest.raises(AttributeError, match="one_f_one_b"):
        ppfunc.no_such_name  # noqa: B018

"""Private names of torch: in one module per package, ``_torch.py``, and all of them in this torch."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppfunc

ROOT = Path(ppfunc.__file__).parent
HOMES = sorted(ROOT.rglob("_torch.py"))
OTHERS = [path for home in HOMES for path in sorted(home.parent.rglob("*.py")) if path != home]
PRIVATE = re.compile(r"\btorch\.(_(?!_)|utils\._\w+|fx\.experimental)|\._(schema|op|version)\b")


def imported() -> list[str]:
    """The names that the modules ``_torch.py`` import from torch."""
    nodes = [
        n for home in HOMES for n in ast.walk(ast.parse(home.read_text())) if isinstance(n, ast.ImportFrom)
    ]
    return [
        f"{n.module}.{alias.name}"
        for n in nodes
        for alias in n.names
        if n.module and n.module.startswith("torch")
    ]


def attributes() -> list[str]:
    """The private attributes of torch that they name."""
    nodes = [
        n for home in HOMES for n in ast.walk(ast.parse(home.read_text())) if isinstance(n, ast.Attribute)
    ]
    return sorted({text for text in map(ast.unparse, nodes) if text.startswith("torch._")})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, as inductor is imported
def test_imported_names_and_attributes_are_there():
    used = [*imported(), *attributes()]
    used += ["torch.ops.aten.add.Tensor._schema", "torch.ops.aten.add.Tensor._op", "torch.Tensor._version"]
    assert [name for name in used if not there(name)] == [], f"not in torch {torch.__version__}"


@pytest.mark.parametrize(("version", "warned"), [("2.15.9", 0), ("2.16.0a0+git1", 1), ("3.0", 1)])
def test_a_newer_torch_than_was_tested_warns_once(version, warned):
    """Not of schedules, which need none."""
    code = (
        f"import torch, warnings; torch.__version__ = {version!r}\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import ppfunc.schedule\n"
        "    print(len(caught))\n"
        "    import ppfunc; ppfunc.value_and_grad, ppfunc.Trainer, ppfunc.split, ppfunc.P2P\n"
        f"    print(sum('torch {version} is newer than 2.15' in str(w.message) for w in caught))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.stdout.split() == ["0", str(warned)], run.stderr


def there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_no_other_module_names_them():
    named = {}
    for path in OTHERS:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = [ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)]
        used += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
        named[path] = [u for u in used if PRIVATE.search(u)]
    assert {path: found for path, found in named.items() if found} == {}


ACCELERATORS = re.compile(r"\btorch\.(cuda|accelerator|get_device_module|(Stream|Event)\()")


def test_accelerators_are_behind_one_module():
    assert [path for path in ROOT.rglob("*.py") if ACCELERATORS.search(path.read_text())] == [
        ROOT / "stage" / "device.py"
    ]

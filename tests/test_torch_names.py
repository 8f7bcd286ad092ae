"""Private names of torch: in one module per package, ``_torch.py``, and all of them in this torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import ppfunc

ROOT = Path(ppfunc.__file__).parent
HOMES = sorted(ROOT.rglob("_torch.py"))
OTHERS = [path for home in HOMES for path in sorted(home.parent.rglob("*.py")) if path != home]
PRIVATE = re.compile(r"\btorch\.(_(?!_)|utils\._\w+|fx\.experimental)|\._(schema|op|version)\b")


def imported() -> list[tuple[str, str]]:
    """The names that the modules ``_torch.py`` import from torch, each with its module."""
    nodes = [
        n for home in HOMES for n in ast.walk(ast.parse(home.read_text())) if isinstance(n, ast.ImportFrom)
    ]
    return [
        (n.module, alias.name)
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
@pytest.mark.parametrize(("module", "name"), imported())
def test_an_imported_name_is_there(module, name):
    assert hasattr(__import__(module, fromlist=[name]), name), (
        f"torch {torch.__version__} has no {module}.{name}"
    )


@pytest.mark.parametrize("path", attributes())
def test_an_attribute_is_there(path):
    value = torch
    for name in path.split(".")[1:]:
        assert hasattr(value, name), f"torch {torch.__version__} has no {path}"
        value = getattr(value, name)


def test_the_attributes_of_operators_and_tensors_are_there():
    operator = torch.ops.aten.add.Tensor
    for value, name in ((operator, "_schema"), (operator, "_op"), (torch.ones(()), "_version")):
        assert hasattr(value, name), f"torch {torch.__version__} has no {type(value).__name__}.{name}"


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_module_names_them(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = [ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)]
    used += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    assert [u for u in used if PRIVATE.search(u)] == []


ACCELERATORS = re.compile(r"\btorch\.(cuda|accelerator|get_device_module|(Stream|Event)\()")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_accelerators_are_behind_one_module(path):
    named = [line for line in path.read_text().splitlines() if ACCELERATORS.search(line)]
    assert bool(named) == (path == ROOT / "stage" / "device.py"), named

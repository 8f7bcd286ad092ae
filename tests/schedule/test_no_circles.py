"""No module of the package imports itself, by whatever way around."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import ppfunc

ROOT = Path(ppfunc.__file__).parent


def graph(root: Path) -> dict[str, set[str]]:
    """For every module the modules that it imports, inside functions too. Names loaded by a lazy table are
    strings, not imports.
    """
    files = {_name(root, path): path for path in root.rglob("*.py")}
    return {name: {found for found in _imports(name, path) if found in files} for name, path in files.items()}


def _name(root: Path, path: Path) -> str:
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: Path) -> set[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    root = path.parents[len(package) - 1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [
                    *(package[: len(package) - node.level + 1] if node.level else ()),
                    *filter(None, [node.module]),
                ]
            )
            found |= {_module(root, base, alias.name) for alias in node.names}
    return found


def _module(root: Path, base: str, name: str) -> str:
    """The module that ``from base import name`` reads: the submodule where there is one, else ``base``."""
    path = root.joinpath(*base.split(".")[1:], name)
    return f"{base}.{name}" if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else base


def circle(root: Path) -> list[str]:
    """The modules of one circle, none where there is none."""
    try:
        TopologicalSorter(graph(root)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself():
    assert circle(ROOT) == []


def test_a_circle_would_be_seen(tmp_path):
    root = tmp_path / "pack"
    (root / "room").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "room" / "__init__.py").write_text("from .one import x")
    (root / "room" / "one.py").write_text("def f():\n    from ..two import y\n")
    (root / "two.py").write_text("from pack import room")
    assert {*circle(root)} == {"pack.room", "pack.room.one", "pack.two"}

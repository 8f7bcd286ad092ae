"""A name of a class or of a type stands for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import ppfunc.schedule

ROOT = Path(ppfunc.schedule.__file__).parent


def types(root: Path) -> dict[str, list[str]]:
    """For every class and every capitalised type alias of the modules under ``root``, the modules that define
    it.
    """
    found = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = (
                [node.name]
                if isinstance(node, ast.ClassDef)
                else [t.id for t in targets if isinstance(t, ast.Name)]
            )
            for name in names:
                if name.strip("_")[:1].isupper() and not name.isupper():
                    found[name.strip("_")].append(str(path.relative_to(root)))
    return found


def test_no_two_types_have_one_name():
    assert {name: files for name, files in types(ROOT).items() if len(files) > 1} == {}


def test_a_second_one_would_be_seen(tmp_path):
    (tmp_path / "one.py").write_text("class Step: ...\nLIMIT = 1\n")
    (tmp_path / "two.py").write_text("_Step = tuple[int, ...]\nLIMIT = 2\n")
    assert types(tmp_path) == {"Step": ["one.py", "two.py"]}

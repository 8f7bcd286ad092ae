"""The form of the package: who imports whom, what loads when, one name for one thing."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "ppfunc"
FLOORS = {
    "_lazy": 0,
    "_checks": 0,
    "_logs": 0,
    "schedule": 1,
    "parallel": 1,
    "stage": 2,
    "splitter": 3,
    "runtime": 4,
    "steps": 4,
    "vocabulary": 4,
    "training": 5,
}
FRONT = 6
OUTSIDE: dict[int, set[str]] = {
    0: set(),
    1: set(),
    2: {"torch", "optree", "einops"},
    3: {"torch", "optree", "safetensors"},
    4: {"torch", "optree", "einops"},
    5: {"torch", "optree", "einops", "safetensors"},
    6: {"torch", "optree", "einops", "safetensors", "hypothesis"},
}
EXTRAS = {"accelerate", "torchtitan", "transformers"}  # of `ppfunc.integrations` alone
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
    own = floor(path.relative_to(ROOT).with_suffix("").parts)
    outside = OUTSIDE[own] | (EXTRAS if room(path) == ("integrations",) else set())
    found = []
    for name in imported(path):
        head, *rest = name.split(".")
        if head == "ppfunc":
            if rest and rest[0] in FLOORS and floor(tuple(rest)) > own:
                found.append(f"imports {name} from a floor above")
            if rest and rest[0] not in FLOORS and own < FRONT:
                found.append(f"imports {name} from the front door")
        elif head not in sys.stdlib_module_names and head not in outside:
            found.append(f"imports {name}, which does not belong on floor {own}")
    return found


def test_imports_respect_the_floors():
    assert {path: found for path in FILES if (found := faults(path))} == {}


def test_no_two_packages_need_each_other():
    packages = set(FLOORS)
    needs = {
        (path.relative_to(ROOT).parts[0], name.split(".")[1])
        for path in FILES
        for name in imported(path)
        if name.startswith("ppfunc.")
    }
    pairs = {(a, b) for a, b in needs if a in packages and b in packages and a != b}
    assert not {(a, b) for a, b in pairs if (b, a) in pairs}
    assert ("schedule", "parallel") in pairs


def room(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts[:-1]


def needed_rooms(root: Path) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Which folder imports from which, by the files that do; a face has no functions."""
    files = {".".join(("ppfunc", *p.relative_to(root).with_suffix("").parts)): p for p in root.rglob("*.py")}
    return {
        (room(path), room(files[name]))
        for path in files.values()
        if path.name != "__init__.py" or "\ndef " in path.read_text()
        for name in imported(path)
        if name in files and room(path) and room(files[name])
    }


def test_every_room_stands_on_a_floor():
    """No two folders import from each other, below the front door."""
    needs = needed_rooms(ROOT)
    assert (("runtime",), ("runtime", "running")) in needs
    assert not {(a, b) for a, b in needs if a != b and (b, a) in needs}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for a, b in needs:
        if a != b:
            graph.setdefault(a, set()).add(b)
    assert [*TopologicalSorter(graph).static_order()]  # raises where some need each other in a circle


def test_a_fault_would_be_seen(tmp_path, monkeypatch):
    (tmp_path / "schedule").mkdir()
    file = tmp_path / "schedule" / "bad.py"
    file.write_text(
        "import torch\nfrom ..stage import graph\ndef f():\n    import ppfunc.runtime.transport.p2p\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(faults(file)) >= 3


def loaded_by(before, code):
    """Return the modules that code loads after other code; they are the same at any load, times are not."""
    text = f"import sys; {before}; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )
    return set(done.stdout.split())


def test_schedules_load_without_torch_and_little_else():
    loaded = loaded_by("pass", "import ppfunc.schedule, ppfunc.parallel; ppfunc.schedule.one_f_one_b")
    assert not loaded & {"torch", "optree", "einops", "numpy"}
    assert len(loaded) < 130, sorted(loaded)


def test_a_step_function_loads_what_runs_it_when_it_is_made():
    """Asking for it cost a sixth more than importing torch, by 124 modules, among them all that traces."""
    loaded = loaded_by("import torch", "import ppfunc; ppfunc.value_and_grad, ppfunc.engines.graph")
    own = {name for name in loaded if name.startswith("ppfunc")}
    late = {
        "ppfunc.stage.engines.tracing",
        "ppfunc.runtime.running.compile",
        "ppfunc.runtime.transport.p2p",
    }
    assert not loaded & (late | {"torch._dynamo", "statistics"})
    assert len(own) <= 70, sorted(own)


def test_every_name_of_the_front_door_exists():
    import ppfunc

    for name in dir(ppfunc):
        assert getattr(ppfunc, name) is not None
    assert set(ppfunc.__all__) >= {build.__name__ for build in ppfunc.schedule.BUILDERS.values()}


LAZY = ["", "schedule", "parallel", "runtime", "stage", "splitter", "training.optim"]


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_names_that_are_loaded(package):
    """Under ``if TYPE_CHECKING`` stand imports of single names, each exported as itself, and nothing else."""
    module = importlib.import_module(f"ppfunc.{package}".rstrip("."))
    (block,) = (
        n
        for n in ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text()).body
        if isinstance(n, ast.If)
    )
    statements = [n for n in block.body if isinstance(n, ast.ImportFrom) and n.level == 1]
    assert statements == block.body
    aliases = [alias for n in statements for alias in n.names]
    assert all(alias.name == alias.asname for alias in aliases)
    assert {alias.name for n in statements if n.module for alias in n.names} == set(module.__all__)
    assert dir(module) == sorted(alias.name for alias in aliases)


@pytest.mark.parametrize("package", ["", "schedule", "parallel"])
def test_no_name_is_hidden_by_a_module(package):
    module = importlib.import_module(f"ppfunc.{package}".rstrip("."))
    for path in (ROOT / package).glob("*.py"):
        importlib.import_module(
            f"{module.__name__}.{path.stem}".removesuffix(".__init__").removesuffix(".__main__")
        )
    hidden = {name for name in module.__all__ if inspect.ismodule(getattr(module, name))}
    assert hidden == (
        {"checkpoint", "collectives", "engines", "optim"} if not package else set()
    )  # namespaces


def test_an_unknown_name_is_answered_with_the_nearest():
    import ppfunc

    with pytest.raises(
        AttributeError, match="module 'ppfunc' has no attribute 'one_f1b'; did you mean 'one_f_one_b'"
    ):
        ppfunc.one_f1b  # noqa: B018
    with pytest.raises(
        AttributeError, match="no attribute 'interleave_1f1b'; did you mean 'interleaved_1f1b'"
    ):
        ppfunc.interleave_1f1b  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'dualpipev'"):
        ppfunc.DualPipeV  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyz'; dir\(ppfunc.schedule\) lists its names"):
        ppfunc.schedule.xyz  # noqa: B018


def test_submodules_are_attributes_and_load_when_they_are_used():
    code = (
        "import sys, ppfunc as pp; pp.schedule.one_f_one_b; pp.testing.schedules; pp.parallel.loop; "
        "assert 'torch' not in sys.modules; pp.optim.sgd; pp.runtime; pp.stage"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def definitions(path: Path) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in definitions(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


# Ruff's D401 knows verbs; these words it lets pass in places.
NO_VERBS = {"A", "An", "That", "The", "Those", "What", "Whether", "Which"}


def test_docstrings_of_functions_begin_with_a_verb():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in definitions(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (ast.get_docstring(node) or "-").split()[0] in NO_VERBS
    ]
    assert found == []


def test_every_module_is_imported_or_exported():
    used = {"ppfunc", "ppfunc.cli", "ppfunc.__main__"}  # by users, and by the entries of the command
    for name in (name for path in FILES for name in imported(path)):
        used |= {name, name.rpartition(".")[0]}  # importing a module imports its package
    modules = {dotted(path) for path in FILES if room(path) != ("integrations",)}  # imported by users
    assert modules - used == set()


def test_a_directory_holds_at_most_twenty_modules():
    rooms = {path.parent for path in FILES}
    crowded = {str(room.relative_to(ROOT)): n for room in rooms if (n := len([*room.glob("*.py")])) > 20}
    assert crowded == {}


def dotted(path: Path) -> str:
    return ".".join(("ppfunc", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_no_module_imports_itself_by_others():
    """Packages are left out: their names load when they are first used."""
    modules = {dotted(path): path for path in FILES if path.name != "__init__.py"}
    imports = {
        name: {other for other in imported(path) if other in modules} for name, path in modules.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError with the modules of a circle


def test_a_trainer_is_imported_without_sympy():
    """DTensor was imported with checkpoints and the trainer, and brought sympy along: half a second."""
    code = (
        "import sys; import ppfunc; ppfunc.Trainer, ppfunc.checkpoint.save; sys.exit('sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=True)

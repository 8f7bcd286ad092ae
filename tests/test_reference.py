"""The pages of the reference: every public name has one, and reads as its source does."""

import inspect
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

import ppfunc as pp
from ppfunc._logs import ROOMS

pytest.importorskip("sphinx")
SOURCE = Path(pp.__file__).parents[1] / ".docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Build the pages from a copy, since stubs of names are written beside the source."""
    folder = tmp_path_factory.mktemp("reference")
    for file in SOURCE.rglob("*"):
        if file.is_file() and "names" not in file.parts:
            copy = folder / "source" / file.relative_to(SOURCE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "text"]
    built = run([*command, folder / "source", folder / "out"], capture_output=True, text=True)
    assert not built.returncode, built.stderr
    files = [*(folder / "out" / "names").glob("*.txt"), folder / "out" / "index.txt"]
    return {page.stem: page.read_text() for page in files}


def test_every_public_name_has_one_page(pages):
    spaces = {"": pp} | {f"{name}.": getattr(pp, name) for name in dir(pp)}
    names = [
        (space, name)
        for space, module in spaces.items()
        if inspect.ismodule(module)
        for name in getattr(module, "__all__", ())
        if not inspect.ismodule(getattr(module, name))
    ]
    assert len(names) > 200
    assert not [
        name for space, name in names if len({f"ppfunc.{space}{name}", f"ppfunc.{name}"} & pages.keys()) != 1
    ]


def test_signatures_are_those_of_the_source(pages):
    assert not [name for name, page in pages.items() if " at 0x" in page or "Alias for field" in page]
    page = pages["ppfunc.value_and_grad"]
    assert "engine: Engine | Sequence[Engine] = graph," in page
    assert "memory_analysis" in pages["ppfunc.runtime.LoweredFunction"]  # of a base class
    assert "compile() -> CompiledFunction" in pages["ppfunc.runtime.LoweredFunction"]
    assert "to_svg()" in (page := pages["ppfunc.runtime.Memories"]) and "setdefault" not in page
    assert "Built-in immutable sequence" not in pages["ppfunc.parallel.Placement"]


def test_variables_of_the_environment_are_on_the_first_page(pages):
    files = Path(pp.__file__).parent.rglob("*.py")
    used = {name for file in files for name in re.findall(r'environ.*?"(PPFUNC_\w+)"', file.read_text())}
    assert used == {"PPFUNC_CACHE", "PPFUNC_FLIGHT", "PPFUNC_LOGS", "PPFUNC_NATIVE"}
    assert not [name for name in used if name not in pages["index"]]
    assert all(room in pages["index"] for room in ROOMS)

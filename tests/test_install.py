"""An editable install is a path that editors and type checkers follow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"


def test_an_editable_install_is_a_path_and_typed(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    project = tmp_path / "project"
    (project / "ppfunc").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "ppfunc/__init__.py", "ppfunc/py.typed"):
        shutil.copy(ROOT / name, project / name)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=project, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    with ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        (path,) = (name for name in wheel.namelist() if ".dist-info/" not in name)  # and no finder
        assert path.endswith(".pth")
        folder = Path(wheel.read(path).decode().strip())
    assert folder.samefile(project) and (folder / "ppfunc" / "py.typed").exists()

"""Run the command in this process."""

import pytest

from ppfunc.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command: exit code, standard output, standard error."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return call

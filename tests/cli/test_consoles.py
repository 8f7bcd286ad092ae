"""The commands of the README print what stands there."""

import re
import shlex
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_commands_of_the_readme_print_what_stands_there(run):
    consoles = re.findall(r"^```console\n\$ ppfunc (.*)\n((?:.*\n)*?)```$", README.read_text(), re.MULTILINE)
    assert len(consoles) >= 2
    for words, printed in consoles:
        code, out, err = run(*shlex.split(words))
        assert (code, [line.rstrip() for line in out.splitlines()], err) == (0, printed.splitlines(), ""), (
            words
        )

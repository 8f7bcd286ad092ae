"""Docstrings name things: their first sentences, and the first words of their entries, are no pronouns."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ppfunc as pp

ROOT = Path(pp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Words that stand for a noun, which the reader has to look for; before a noun, "one" is a number.
AFTER_ONE = (
    "of|that|which|who|with|in|for|from|to|and|or|is|per|by|at|whose|as|on|where|are|has|may|more|less"
)
PRONOUN = re.compile(
    rf"\b(that of|those|ones|none|what|so many|so much|anew|the others?|one(?=[.,;:)]| ({AFTER_ONE})\b|$))",
    re.I,
)
NO_NOUN = {
    *"of in by for from at on with to as that those what which where how one none it its so per".split()
}


def pronouns(text: str) -> Iterator[str]:
    """Yield the first sentence of a docstring, and its entries, that begin with or have a word for a noun."""
    paragraph = re.sub("`[^`]*`", "``", " ".join(text.split("\n\n")[0].split()))
    sentence = re.split(r"(?<=[.:])\s", paragraph)[0]
    if PRONOUN.search(sentence):
        yield sentence
    for block in re.findall(r"(?:Args|Attributes|Fields):\n((?: {4}.*\n?|\n)+)", text):
        for name, entry in re.findall(r"^ {4}(\w[\w, ]*): (.*)", block, re.MULTILINE):
            if entry.split()[0].strip(",;:.").lower() in NO_NOUN:
                yield f"{name}: {entry}"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_docstrings_name_things(file):
    nodes = ast.walk(ast.parse(file.read_text()))
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    wrong = [w for node in documented for w in pronouns(ast.get_docstring(node) or "")]
    assert not wrong


def test_pronouns_are_found():
    assert [*pronouns("Return those of a rank, one of each.")] and [*pronouns("Return one.")]
    assert not [*pronouns("Return one stage. It may be one of those.")]
    assert [*pronouns("Make it.\n\nArgs:\n    name: of the stage.\n    size: bytes.\n")] == [
        "name: of the stage."
    ]

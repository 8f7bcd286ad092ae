"""Every notebook runs from top to bottom, and what it shows is what its values show today."""

from __future__ import annotations

import ast
import json
import warnings
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
BEFORE_2_12 = {  # by notebook: what torch 2.11 cannot do
    "from_torch": "the side of torch loses its connection",
    "training": "mse_loss has no backward for bfloat16 beside float32",
}
LIBRARIES = {  # by notebook: one that it shows beside, and that may be missing
    "from_huggingface": "accelerate",
    "from_lightning": "lightning",
}
KINDS = {"tour": {"Schedule", "Certificate", "Timeline", "Costs", "Tensor"}}


class Ran(NamedTuple):
    """A cell that ran: what it printed, and the value that it ends with."""

    cell: dict[str, Any]
    printed: str
    value: Any


class Printer:
    def __init__(self):
        self.stack, self.parts = [0], []
        self.text = self.parts.append


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run(cell: dict[str, Any], names: dict[str, Any], place: str) -> Ran:
    """Run a cell as a notebook does."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, place, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), place, "eval"), names)
    return Ran(cell, printed.getvalue(), value)


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


@pytest.fixture(scope="module")
def ran(notebook):
    if torch.__version__ < "2.12" and notebook.stem in BEFORE_2_12:
        pytest.skip(BEFORE_2_12[notebook.stem])
    threads, names = torch.get_num_threads(), {"__name__": notebook.stem}
    with torch.random.fork_rng(), warnings.catch_warnings():
        if notebook.stem in LIBRARIES:
            pytest.importorskip(LIBRARIES[notebook.stem])
            warnings.simplefilter("ignore")  # those of the library
        yield [run(cell, names, f"{notebook.name} {n}") for n, cell in enumerate(cells_of(notebook), 1)]
    torch.set_num_threads(threads)


def shown(value: Any) -> dict[str, str]:
    """The forms in which IPython shows a value."""
    if value is None:
        return {}
    printer = Printer()
    value._repr_pretty_(printer, False) if hasattr(value, "_repr_pretty_") else printer.text(repr(value))
    picture = value._repr_svg_() if hasattr(value, "_repr_svg_") else None
    return {"text/plain": "".join(printer.parts)} | ({} if picture is None else {"image/svg+xml": picture})


def stored(cell: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [output for output in cell["outputs"] if output["output_type"] == kind]


def test_every_cell_shows_what_is_stored(notebook, ran):
    kinds = []
    for cell, printed, value in ran:
        forms = shown(value)
        results = [output["data"] for output in stored(cell, "execute_result")]
        assert [data.keys() for data in results] == ([forms.keys()] if forms else []), cell["source"]
        text = "".join(chain.from_iterable(output["text"] for output in stored(cell, "stream")))
        assert bool(printed) == bool(text), cell["source"]
        if any("speeds=" in line for line in cell["source"]):
            assert printed == text  # nothing of it was measured
        assert not stored(cell, "error")
        if "image/svg+xml" in forms:
            old, new = (
                ElementTree.fromstring(text)
                for text in ("".join(results[0]["image/svg+xml"]), forms["image/svg+xml"])
            )
            assert old.attrib == new.attrib and old[0].text == new[0].text
        kinds.append(type(value).__name__)
    assert KINDS.get(notebook.stem, set()) <= set(kinds)


def test_the_text_that_does_not_depend_on_the_machine_is_stored_as_it_is(ran):
    """Run them again where it has changed: jupyter nbconvert --to notebook --execute --inplace
    examples/*.ipynb
    """
    for cell, _, value in ran:
        if type(value).__name__ in ("Schedule", "Certificate"):
            (output,) = stored(cell, "execute_result")
            assert "".join(output["data"]["text/plain"]) == shown(value)["text/plain"]


def test_it_reads_well_on_a_page(notebook):
    cells = cells_of(notebook)
    assert notebook.stat().st_size < 300_000
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(len(line.rstrip()) <= 120 for cell in cells for line in cell["source"])


def test_the_side_of_jax_gives_the_same():
    jax = pytest.importorskip("jax")
    (notebook,) = (path for path in NOTEBOOKS if path.stem == "from_jax")
    ours: dict[str, Any] = {"__name__": "ours"}
    run(cells_of(notebook)[0], ours, "from_jax 1")
    trees = [{name: jax.numpy.array(p.numpy()) for name, p in ours["params"][s].items()} for s in range(4)]
    theirs = {"jax": jax, "jnp": jax.numpy, "params": trees} | {
        name: jax.numpy.array(ours[name].numpy()) for name in "xy"
    }
    text = "\n".join("".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"])
    exec(text.partition("```python\n")[2].partition("```")[0], theirs)
    assert float(theirs["value"]) == pytest.approx(ours["result"].loss.item(), rel=1e-6)
    assert float(theirs["aux"]["error"]) == pytest.approx(ours["result"].aux.loss["error"].max().item())
    for s, tree in enumerate(theirs["grads"]):
        for name, gradient in tree.items():
            torch.testing.assert_close(torch.tensor(gradient.tolist()), ours["result"].grads[s][name])

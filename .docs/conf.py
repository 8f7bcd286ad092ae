"""The pages of the reference: ``sphinx-build .docs out/reference``."""

import ast
import inspect
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import ppfunc

project = "ppfunc"
release = ppfunc.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
templates_path = ["templates"]
exclude_patterns = ["templates"]
autodoc_member_order = "bysource"
add_module_names = False
toc_object_entries = False
python_maximum_signature_line_length = 88
html_theme = "furo"
html_title = f"ppfunc {release}"
html_show_copyright = False

# A name has one page, where it is typed, which is not always the file that has it.
spaces = {"ppfunc": ppfunc}
for (
    space
) in "schedule parallel stage engines collectives splitter runtime training optim checkpoint testing".split():
    sys.modules[f"ppfunc.{space}"] = spaces[f"ppfunc.{space}"] = getattr(ppfunc, space)
autosummary_context = {
    "names": {
        space: [
            name
            for name in module.__all__
            if f"ppfunc.{name}" not in spaces and (module is ppfunc or name not in ppfunc.__all__)
        ]
        for space, module in spaces.items()
    }
}
autosummary_context["names"]["ppfunc.integrations"] = ["transformers.PipelineTrainer", "torchtitan.pipelined"]
autodoc_mock_imports = ["transformers", "accelerate"]  # pages need none of the libraries
# Aliases of types, and other values, are described by the text below them.
described = {
    ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]): inspect.cleandoc(
        text.value.value
    )
    for file in Path(ppfunc.__file__).parent.rglob("*.py")
    for node, text in pairwise(ast.parse(file.read_text()).body)
    if isinstance(node, ast.Assign | ast.AnnAssign)
    and isinstance(text, ast.Expr)
    and isinstance(text.value, ast.Constant)
}


def as_written(app, what, name, obj, options, signature, returns):
    """Give a signature the words of its source: ``engine=graph`` and ``Stages``, no address."""
    function = vars(obj).get("__init__") if inspect.isclass(obj) else inspect.unwrap(obj)
    if not inspect.isfunction(function):
        return signature, returns
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):  # dataclasses and tuples write some of their methods
        return signature, returns
    arguments = node.args
    if what in ("method", "class"):
        del (arguments.posonlyargs or arguments.args)[:1]  # self
    for written in ast.walk(node):  # names of types that stand in quotes
        if isinstance(written, ast.arg) and isinstance(written.annotation, ast.Constant):
            written.annotation = ast.Name(str(written.annotation.value))
    if isinstance(node.returns, ast.Constant):
        node.returns = ast.Name(str(node.returns.value))
    returned = ast.unparse(node.returns) if node.returns and what != "class" else None
    return f"({ast.unparse(arguments)})", returned


def describe(app, what, name, obj, options, lines):
    """Describe a value by the text below its assignment, not by the docstring of its type."""
    if what == "data":
        lines[:] = described[name.split(".")[-1]].splitlines()


def skip(app, what, name, obj, skipped, options):
    """Leave out the fields of a named tuple: its arguments are the same."""
    return skipped or (inspect.getdoc(obj) or "").startswith("Alias for field number")


def setup(app):
    app.connect("autodoc-process-signature", as_written)
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-skip-member", skip)

"""Every engine on every kind of stage: the gradients of ``torch.func.grad``, the same bits from all
engines.
"""

from __future__ import annotations

import optree
import pytest
import torch

from ppfunc.stage import eager, functional, graph, outline
from ppfunc.stage.tree import tree_flatten

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing depends on")  # the cases are of every kind
ENGINES = {"graph": graph, "functional": functional, "eager": eager}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_gradients_are_those_of_torch_func_and_of_all_engines_to_the_bit(engine, case, run, expected):
    program, other = (make(case.fn, case.args, has_aux=case.has_aux) for make in (engine, functional))
    result = run(program, case)
    result.close_to(expected(case), case.tolerance or 2e-2)
    assert result == run(program, case, apart=True) == run(other, case)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_what_comes_out(engine, case, run):
    """What the signature tells, contiguous and detached; strides at the boundary change no bit."""
    program = engine(case.fn, case.args, has_aux=case.has_aux)
    out, residuals = program.forward(*case.args)
    y = out[0] if case.has_aux else out
    leaves, treedef = tree_flatten(y)
    assert treedef == program.y.treedef
    assert [(tuple(t.shape), t.dtype) for t in leaves] == [(s.shape, s.dtype) for s in program.y.leaves]
    if not case.has_aux:
        assert outline(case.fn, case.args).y == program.y
    _, gx = program.backward(residuals, optree.tree_map(torch.ones_like, y))
    for leaf in optree.tree_leaves((out, gx)):
        assert leaf.is_contiguous() and not leaf.is_conj() and not leaf.requires_grad
    packed = case._replace(
        args=(case.args[0], *optree.tree_map(lambda t: t.resolve_conj().contiguous(), case.args[1:]))
    )
    assert run(program, packed) == run(program, case)

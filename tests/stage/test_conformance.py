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
def test_gradients_are_those_of_torch_func(engine, case, run, expected):
    program = engine(case.fn, case.args, has_aux=case.has_aux)
    want = expected(case)
    tolerance = case.tolerance or 2e-2
    run(program, case).close_to(want, tolerance)
    run(program, case, apart=True).close_to(want, tolerance)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_engines_agree_bitwise(engine, case, run):
    reference = run(functional(case.fn, case.args, has_aux=case.has_aux), case)
    program = engine(case.fn, case.args, has_aux=case.has_aux)
    assert run(program, case) == reference
    assert run(program, case, apart=True) == reference


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_signature_tells_what_comes_out(engine, case):
    program = engine(case.fn, case.args, has_aux=case.has_aux)
    out, _ = program.forward(*case.args)
    y = out[0] if case.has_aux else out
    leaves, treedef = tree_flatten(y)
    assert treedef == program.y.treedef
    assert [(tuple(t.shape), t.dtype) for t in leaves] == [(s.shape, s.dtype) for s in program.y.leaves]
    if not case.has_aux:
        assert outline(case.fn, case.args).y == program.y


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_outputs_are_contiguous_and_detached(engine, case):
    program = engine(case.fn, case.args, has_aux=case.has_aux)
    out, residuals = program.forward(*case.args)
    gy = optree.tree_map(torch.ones_like, out[0] if case.has_aux else out)
    _, gx = program.backward(residuals, gy)
    for leaf in optree.tree_leaves((out, gx)):
        assert leaf.is_contiguous() and not leaf.is_conj() and not leaf.requires_grad


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_strides_at_the_boundary_change_no_bit(engine, case, run):
    program = engine(case.fn, case.args, has_aux=case.has_aux)
    packed = case._replace(
        args=(case.args[0], *optree.tree_map(lambda t: t.resolve_conj().contiguous(), case.args[1:]))
    )
    assert run(program, packed) == run(program, case)

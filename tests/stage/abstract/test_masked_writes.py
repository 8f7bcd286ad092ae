"""Writes under masks, of values that have a gradient: how many there are, the values tell."""

from __future__ import annotations

import pytest
import torch

import ppfunc as pp
from ppfunc.stage import StageError
from tests.stage.conftest import every, running, through

X = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) / 7
ROWS = torch.tensor([[True, False, True], [False, False, True]])
LAST = torch.tensor([True, False, False, True])


def item(key):
    def write(x, mask, values):
        x = x.clone()
        x[key(mask)] = values
        return x

    return write


CASES = {
    "rows": (item(lambda m: m), ROWS, (3, 4)),
    "a tuple": (item(lambda m: (m,)), ROWS, (3, 4)),
    "elements": (item(lambda m: m), X > 1.4, (14,)),
    "after a slice": (item(lambda m: (slice(None), slice(1, None), m)), LAST, (2, 2, 2)),
    "after an ellipsis": (item(lambda m: (..., m)), LAST, (2, 3, 2)),
    "before an ellipsis": (item(lambda m: (m, ...)), ROWS, (3, 4)),
    "before a slice": (item(lambda m: (m, slice(0, 2))), ROWS, (3, 2)),
    "one row for all": (item(lambda m: m), ROWS, (4,)),
    "one row for all, as a row": (item(lambda m: m), ROWS, (1, 4)),
    "one number for all": (item(lambda m: (..., m)), LAST, ()),
    "out of place": (lambda x, m, v: torch.index_put(x, (m,), v), ROWS, (3, 4)),
    "added": (lambda x, m, v: x.clone().index_put_((m,), v, True), ROWS, (3, 4)),
    "one added to all": (lambda x, m, v: x.index_put((m,), v, True), ROWS, (4,)),
}


@every
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name, engine):
    write, mask, shape = CASES[name]
    values = torch.randn(shape, dtype=torch.float64)

    def stage(params, x):
        return write(params["x"] * 2, x, params["v"].sin())

    params = {"x": X, "v": values}
    y, grads, _ = through(engine(stage, (params, mask)), params, mask, gy=X.clone())
    leaves = {name: t.clone().requires_grad_() for name, t in params.items()}
    want = stage(leaves, mask)
    wanted = torch.autograd.grad((want * X).sum(), [*leaves.values()])
    assert torch.equal(y, want)
    for got, expected in zip(grads.values(), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


@every
def test_another_number_of_elements_raises(engine):
    def stage(v, mask):
        h = torch.zeros(2, 3, 4, dtype=torch.float64)
        h[mask] = v
        return h

    v = torch.ones(3, 4, dtype=torch.float64)
    program = engine(stage, (v, ROWS))
    for other in (~ROWS & LAST[:3], torch.ones_like(ROWS)):
        with pytest.raises(RuntimeError, match="a mask has not the 3 true elements|shape mismatch"):
            program.forward(v, other)


def test_a_row_that_no_engine_traces_still_names_another():
    with pytest.raises(StageError, match="functional engine"):
        pp.engines.graph(lambda v, mask: v[mask], (torch.ones(2, 3), ROWS))


@running
def test_a_stage_that_needs_values_is_tried_on_the_batch(engine):
    """On zeros, no row is chosen, and the features do not fit."""

    def stage(params, x):
        ids, features = x
        rows = (ids == 7).nonzero()[:, 0]
        h = params[ids]
        return h.index_copy(0, rows, features * 2)

    ids, features = torch.tensor([7, 1, 2, 7]), torch.ones(4, 3)
    table = torch.ones(8, 3)
    loss_fn = lambda y, t: ((y - t) ** 2)[t > 1].sum()  # noqa: E731
    step = pp.value_and_grad([stage], loss_fn, pp.gpipe(1, 2), engine=engine)
    inputs = pp.Microbatches([(ids, features[:2]), (ids, features[2:])])
    loss, grads = step({0: table}, inputs, pp.Microbatches([torch.full((4, 3), 3.0)] * 2))
    assert loss == 2 * 3 * 1 + 2 * 3 * 4
    assert grads[0][1].tolist() == grads[0][2].tolist() == [-4] * 3 and not grads[0][7].any()

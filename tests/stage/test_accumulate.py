"""Programs that add their gradients up while they run: the same gradients, each once, and the memory of a
few.
"""

from __future__ import annotations

import pytest
import torch

from ppfunc.stage import graph
from ppfunc.stage.engines.tracing import emit
from ppfunc.stage.tree import tree_leaves
from tests.live import Live

LAYERS, WIDTH = 6, 64
SIZE = 4 * WIDTH * WIDTH  # bytes of the weight of a layer


class Given:
    """Keeps what it is given, by number and microbatch."""

    def __init__(self):
        self.parts, self.gradients = [], {}

    def add(self, gradients, numbers, microbatch):
        self.parts.append(numbers)
        assert not self.gradients.keys() & set(numbers)
        self.gradients |= {n: (g, microbatch) for n, g in zip(numbers, gradients, strict=True)}


def chain(params, x):
    for w, b in params:
        x = torch.tanh(x @ w + b)
    return x


def chained(rows=2):
    generator = torch.Generator().manual_seed(0)
    params = [
        (torch.randn(WIDTH, WIDTH, generator=generator), torch.randn(WIDTH, generator=generator))
        for _ in range(LAYERS)
    ]
    return params, torch.randn(rows, WIDTH, generator=generator)


def cotangents(program):
    generator = torch.Generator().manual_seed(1)
    made = (
        torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        for leaf in program.y.leaves
        if leaf.grad
    )
    return tuple(made)


@pytest.fixture
def together(monkeypatch):
    """Set how many bytes of gradients are added up together."""
    return lambda size: monkeypatch.setattr(emit, "_TOGETHER", size)


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@torch.no_grad()
def test_the_gradients_are_those_of_the_program_each_given_once(case, together):
    together(1)
    flat = (program := graph(case.fn, case.args, has_aux=case.has_aux)).flat
    params, x, *extras = (tuple(t.detach() for t in tree_leaves(tree)) for tree in case.args)
    residuals, gy = flat.forward(params, x, sum(extras, ()))[1], cotangents(program)
    wanted, gx = flat.backward(residuals, gy)
    rest = flat.backward_input(residuals, gy)[1]
    for function, arguments, others in (
        (flat.backward, (residuals, gy), gx),
        (flat.backward_weight, (rest,), None),
    ):
        if (changed := function.accumulating) is None:
            continue  # few gradients, or those of operators that run before
        given = Given()
        made = changed(*arguments, (given, 5))
        for one, other in zip(made or (), others or (), strict=True):
            assert one is other is None or torch.equal(one, other)
        assert len(given.parts) > 1
        assert given.gradients.keys() == {n for n, g in enumerate(wanted) if g is not None}
        for n, (gradient, microbatch) in given.gradients.items():
            assert (
                microbatch == 5
                and gradient.dtype == wanted[n].dtype
                and gradient.stride() == wanted[n].stride()
            )
            assert torch.equal(gradient, wanted[n])


class Dropped:
    def add(self, gradients, numbers, microbatch):
        pass


@pytest.mark.parametrize("size, layers", [(1, 1), (SIZE, 1), (2 * SIZE, 2), (3 * SIZE, 3)])
@torch.no_grad()
def test_gradients_are_freed_as_soon_as_they_are_added_up(size, layers, together):
    """At most so many layers' gradients live, and what one more operator makes."""
    together(size)
    params, x = chained()
    flat = graph(chain, (params, x)).flat
    leaves = tuple(tree_leaves(params))
    few = 16 * x.nbytes
    for program, apart in ((flat.backward, False), (flat.backward_weight, True)):
        residuals = flat.forward(leaves, (x,), ())[1]
        rest = flat.backward_input(residuals, (x,))[1]
        with Live() as live:
            kept = program(*((rest,) if apart else (residuals, (x,))))
        assert live.most >= LAYERS * SIZE
        del kept
        with Live() as live:
            program.accumulating(*((rest,) if apart else (residuals, (x,))), (Dropped(), 0))
        assert layers * SIZE <= live.most <= layers * SIZE + few


@torch.no_grad()
def test_the_function_itself_frees_residuals_after_their_last_use(together):
    """Seen at the last operator. In a call of the object, Python keeps the arguments to the end."""
    together(1)
    params, x = chained(rows=256)
    flat = graph(chain, (params, x)).flat
    leaves, each = tuple(tree_leaves(params)), x.nbytes
    changed = flat.backward.accumulating
    slots, given = [], (Dropped(), 0)
    for run, kept, returned in (
        (lambda: flat.backward(slots.pop(), (torch.ones_like(x),)), LAYERS, True),
        (lambda: flat.backward.function(slots.pop(), (torch.ones_like(x),)), 0, True),
        (lambda: changed(slots.pop(), (torch.ones_like(x),), given), LAYERS, False),
        (lambda: changed.function(slots.pop(), (torch.ones_like(x),), given), 0, False),
    ):
        with Live() as live:
            slots.append(flat.forward(leaves, (x,), ())[1])
            assert LAYERS * each <= live.now < (LAYERS + 1) * each
            run()
        gradients = returned * LAYERS * SIZE
        assert kept * each <= live.after["mm"] - gradients <= (kept + 4) * each


def test_few_gradients_and_compiled_programs_are_left_as_they_are(together):
    params, x = chained()
    assert graph(chain, (params, x)).flat.backward.accumulating is None
    together(1)
    assert graph(chain, (params, x), compile=True).flat.backward.accumulating is None
    assert graph(chain, (params[:1], x)).flat.backward.accumulating.recipe.title.endswith(
        "backward_accumulating"
    )


def test_a_changed_program_is_made_once(together):
    together(1)
    backward = graph(chain, chained()).flat.backward
    assert backward.accumulating is backward.accumulating


@torch.no_grad()
def test_a_deep_stage(together):
    """Thousands of operators between two residuals."""
    together(1)

    def deep(params, x):
        for _ in range(1500):
            x = x + params[0]
        return x * params[1]

    params, x = (torch.ones(2), torch.ones(2)), torch.ones(2)
    flat = graph(deep, (params, x)).flat
    given = Given()
    flat.backward.accumulating(flat.forward(params, (x,), ())[1], (x,), (given, 0))
    assert given.gradients[0][0].tolist() == [1500.0] * 2

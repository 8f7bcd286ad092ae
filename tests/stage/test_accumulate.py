"""Programs that add their gradients up while they run: the same gradients, each once, and the memory of a
few.
"""

from __future__ import annotations

import pytest
import torch

import ppfunc as pp
from ppfunc.stage import graph
from ppfunc.stage._torch import storage
from ppfunc.stage.engines.tracing import cut
from ppfunc.stage.tree import tree_leaves
from tests.live import Live

LAYERS, WIDTH = 6, 64
SIZE = 4 * WIDTH * WIDTH  # bytes of the weight of a layer


class Given:
    """Keeps what it is given, by number and microbatch."""

    def __init__(self):
        self.parts, self.gradients = [], {}

    def add(self, gradients, numbers, microbatch, fresh):
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
    return lambda size: monkeypatch.setattr(cut, "_TOGETHER", size)


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
        made = changed(*arguments, (given, 5, None))
        for one, other in zip(made or (), others or (), strict=True):
            assert one is other is None or torch.equal(one, other)
        assert given.gradients.keys() == {n for n, g in enumerate(wanted) if g is not None}
        for n, (gradient, microbatch) in given.gradients.items():
            assert (
                microbatch == 5
                and gradient.dtype == wanted[n].dtype
                and gradient.stride() == wanted[n].stride()
            )
            assert torch.equal(gradient, wanted[n])


class Dropped:
    def add(self, gradients, numbers, microbatch, fresh):
        pass


@pytest.mark.parametrize("size", [1, 3 * SIZE])
@torch.no_grad()
def test_gradients_are_freed_as_soon_as_they_are_added_up(size, together):
    """That of a layer lives, and what one more operator makes, where more would be the most at once."""
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
            program.accumulating(*((rest,) if apart else (residuals, (x,))), (Dropped(), 0, None))
        assert SIZE <= live.most <= SIZE + few


@pytest.mark.parametrize("rows", [2, 128, 512])
@torch.no_grad()
def test_gradients_wait_for_each_other_where_that_needs_no_more_memory(rows, together):
    """The more a backward frees of what its forward has kept, the fewer additions are made."""
    params, x = chained(rows)
    leaves, gy, counts, most = tuple(tree_leaves(params)), (torch.ones_like(x),), [], []
    for size in (1, 2**20):
        together(size)
        flat, slots = graph(chain, (params, x)).flat, []
        with Live() as live:
            slots.append(flat.forward(leaves, (x,), ())[1])
            if flat.backward.accumulating is None:
                flat.backward.function(slots.pop(), gy)
            else:
                flat.backward.accumulating.function(slots.pop(), gy, (Dropped(), 0, None))
        counts.append(len(flat.backward.additions))
        most.append(live.most)
    assert most[0] == most[1]
    assert counts[0] >= LAYERS and counts[1] == {2: LAYERS + 1, 128: 2, 512: 2}[rows], counts


@torch.no_grad()
def test_the_function_itself_frees_residuals_after_their_last_use(together):
    """Seen at the last operator. In a call of the object, Python keeps the arguments to the end."""
    together(1)
    params, x = chained(rows=256)
    flat = graph(chain, (params, x)).flat
    leaves, each = tuple(tree_leaves(params)), x.nbytes
    changed = flat.backward.accumulating
    slots, given = [], (Dropped(), 0, None)
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
    params, x = chained(rows=512)
    waves = graph(lambda w, x: (x @ w).sin().sin(), (params[0][0], x)).flat
    assert waves.backward.accumulating is None and waves.backward.fresh
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
    flat.backward.accumulating(flat.forward(params, (x,), ())[1], (x,), (given, 0, None))
    assert given.gradients[0][0].tolist() == [1500.0] * 2


def fresh_of(function):
    return {n for addition in function.additions if addition.fresh for n in addition.numbers}


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@torch.no_grad()
def test_what_is_fresh_lies_in_memory_of_its_own(case):
    """Every other tensor that there is lies elsewhere, and each element has a place of its own."""
    flat = (program := graph(case.fn, case.args, has_aux=case.has_aux)).flat
    given = tuple(tuple(t.detach() for t in tree_leaves(tree)) for tree in case.args)
    gy = cotangents(program)
    for apart in (False, True):
        outputs, residuals = flat.forward(*given[:2], sum(given[2:], ()))
        if apart:
            gx, rest = flat.backward_input(residuals, gy)
            gradients = flat.backward_weight(rest)
        else:
            (gradients, gx), rest = flat.backward(residuals, gy), ()
        others = tree_leaves((given, outputs, residuals, gy, gx, rest))
        fresh = fresh_of(flat.backward_weight if apart else flat.backward)
        for n in fresh:
            others_here = [*others, *(g for k, g in enumerate(gradients) if k != n)]
            assert storage(gradients[n]) not in {storage(t) for t in others_here if t is not None}
            assert gradients[n].untyped_storage().nbytes() == gradients[n].nbytes
            gradients[n].zero_()
            assert gradients[n].count_nonzero() == 0 and gradients[n].add_(1).eq(1).all()


def mixed(params, x):
    a, b, c, d, e, f, g, h, i, j = params
    y = torch.tanh(x @ a + b) @ (d + e) + torch.cat([h, i]) * x + f.sum(0) + g.t() + j.expand(4, 4)
    return y.contiguous() + c


def test_which_gradients_are_fresh():
    """Of a product and of sums over rows; not y's own, the same twice, one element for all, halves of one,
    views of y's; nor what is the gradient of x, too.
    """
    sizes = {"b": (4,), "f": (3, 4), "h": (2, 4), "i": (2, 4), "j": (4, 1)}
    params = [torch.randn(sizes.get(name, (4, 4))) for name in "abcdefghij"]
    flat = graph(mixed, (params, torch.randn(4, 4))).flat
    assert {"abcdefghij"[n] for n in fresh_of(flat.backward)} == {"a", "b", "j"}
    assert not flat.backward.fresh
    flat = graph(lambda k, x: torch.tanh(x + k), (torch.randn(4, 4), torch.randn(4, 4))).flat
    assert not fresh_of(flat.backward)
    flat = graph(lambda k, x: x @ k, (torch.randn(4, 4), torch.randn(4, 4))).flat
    assert flat.backward.fresh
    assert not graph(
        lambda k, x: x @ k, (torch.randn(4, 4), torch.randn(4, 4)), compile=True
    ).flat.backward.fresh


def test_both_biases_of_a_recurrent_layer_have_one_gradient():
    stage, params, _ = pp.stage_from_module(torch.nn.LSTM(4, 4))
    flat = graph(lambda p, x: stage(p, x)[0], (params, torch.randn(3, 2, 4))).flat
    assert not any("bias" in name for n, name in enumerate(sorted(params)) if n in fresh_of(flat.backward))

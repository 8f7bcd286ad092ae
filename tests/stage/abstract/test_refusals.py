"""Stages that an engine cannot serve: the message names the stage, the reason and what to use instead."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from ppfunc.stage import Signature, StageError, eager, functional, graph, outline
from tests.models import all_gather

ENGINES = [graph, functional, eager]


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.exp()

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g * a.exp()


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 1

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


def hooked(w, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return (x @ w).sin()


def cautious(w, x):
    """Asks for a value, though not where it sees that there is none: a transform hides that from it."""
    if not isinstance(x, FakeTensor) and x.sum() < -9:
        return x * 2
    return x @ w


compiled = torch.compile(lambda w, x: (x @ w).sin(), backend="eager")

WITH = {
    "checkpoint": (
        lambda w, x: checkpoint(lambda a: (a @ w).sin() @ w, x, use_reentrant=False),
        {graph, eager},
    ),
    "checkpointed dropout": (
        lambda w, x: checkpoint(lambda a: F.dropout(a @ w, 0.5), x, use_reentrant=False),
        {eager},
    ),
    "reentrant checkpoint": (lambda w, x: checkpoint(lambda a: (a @ w).sin(), x, use_reentrant=True), set()),
    "old autograd.Function": (lambda w, x: OldStyle.apply(x @ w), {graph, eager}),
    "random backward": (lambda w, x: NoisyBackward.apply(x @ w), {eager}),
    "saved tensor hooks": (hooked, {graph, eager}),
    "compiled": (lambda w, x: compiled(w, x), {graph, functional, eager}),
    "branch on a value": (lambda w, x: x @ w if x.sum() > -9 else x * 2, {functional, eager}),
    "branch on a value, unless there is none": (cautious, {graph, functional, eager}),
    "shape of a value": (lambda w, x: w * x[x > 0].sum(), {functional, eager}),
}


@pytest.fixture
def args():
    torch.manual_seed(0)
    return torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("kind", WITH)
@pytest.mark.filterwarnings("ignore:.*Converting a tensor")
def test_who_serves_what(engine, kind, args):
    fn, servers = WITH[kind]

    def gradients():
        program = engine(fn, args, name="stage 3")
        torch.manual_seed(1)
        y, residuals = program.forward(*args)
        return y, *program.backward(residuals, torch.ones_like(y))

    if engine not in servers:
        with pytest.raises(StageError, match=r"^stage 3: .* Instead: .*\.$") as refused:
            gradients()
        named = {other for other in ENGINES if f"use the {other.__name__} engine" in refused.value.instead}
        assert named <= servers or named == {eager}  # the last resort, which then says what to rewrite
        assert named or not servers
        return
    w, x = (t.clone().requires_grad_() for t in args)
    torch.manual_seed(1)
    y = fn(w, x)
    want = (y.detach(), *torch.autograd.grad(y, (w, x), torch.ones_like(y)))
    torch.testing.assert_close(gradients(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_a_stage_is_given_the_part_of_its_rank_and_gradients_are_dtensors(engine, tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        w, x = (distribute_tensor(t, mesh, [Replicate()]) for t in (torch.randn(3, 3), torch.randn(2, 3)))

        def stage(w, x):
            assert type(w) is not type(x_given) is not type(x)
            return x @ w

        x_given = x
        program = engine(stage, (w, x))
        y, residuals = program.forward(w, x)
        gw, gx = program.backward(residuals, torch.ones_like(y))
        assert type(y) is torch.Tensor and gw.placements == gx.placements == (Replicate(),)
        torch.testing.assert_close(gw.full_tensor(), x.full_tensor().T @ torch.ones(2, 3))
    finally:
        destroy_process_group()


def writes(w, x):
    w["a"].add_(1)
    return x


def writes_input(w, x):
    return x.mul_(2)


def writes_container(w, x):
    w["a"] = w["a"] * 2
    return x * w["a"]


IMPURE = {
    "parameter": (writes, r"stage 1: it is not pure: it writes into its argument params\['a'\]"),
    "input": (writes_input, "it writes into its argument x"),
    "container": (writes_container, "it replaces entries of its argument params"),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("kind", IMPURE)
def test_visible_impurity(engine, kind):
    fn, message = IMPURE[kind]
    with pytest.raises(StageError, match=message):
        engine(fn, ({"a": torch.ones(2)}, torch.ones(2)), name="stage 1")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_captured_tensors(engine):
    constant, weight, state = torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.zeros(2)
    x = (torch.ones(2), torch.ones(2))
    engine(lambda w, x: x * constant * weight.detach(), x)
    with pytest.raises(
        StageError, match=r"reads a tensor of shape \(2,\) .* requires a gradient, which would be lost"
    ):
        engine(lambda w, x: x * weight, x)
    with pytest.raises(StageError, match="it writes into a tensor"):
        engine(lambda w, x: x * state.add_(1), x)


def test_abstract_evaluation_names_the_functional_engine():
    reason, mend = outline(lambda w, x: x if x.sum() > 0 else w, (torch.ones(2), torch.ones(2))).untraced
    assert "values" in reason and "use the functional engine" in mend


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_an_error_of_the_stage_says_where_it_was_raised_and_what_it_was_given(engine):
    def fn(w, x):
        raise KeyError("mine")

    line = fn.__code__.co_firstlineno + 1
    with pytest.raises(StageError) as caught:
        engine(fn, ({"a": torch.ones(3, 2)}, torch.ones(2)), name="stage 5")
    given = "it was given params = {'a': float32[3,2]}, x = float32[2]"
    assert str(caught.value) == f"stage 5: it raised KeyError at {__file__}:{line}: 'mine'; {given}."
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_the_line_of_an_error_is_that_of_the_stage_and_not_of_a_library(engine):
    def fn(w, x):
        return F.linear(x, w)

    place, given = (
        f"{__file__}:{fn.__code__.co_firstlineno + 1}",
        r"params = float32\[3,2\], x = float32\[5\]",
    )
    with pytest.raises(StageError, match=rf"it raised RuntimeError at {place}: .*; it was given {given}\.$"):
        engine(fn, (torch.ones(3, 2), torch.ones(5)))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_an_error_of_a_stage_with_deep_and_large_arguments_is_short(engine):
    deep = torch.ones(2)
    for _ in range(900):
        deep = [deep]

    def fn(w, x):
        raise KeyError("mine")

    with pytest.raises(StageError, match="it raised KeyError .*: 'mine'; it was given params = ") as caught:
        engine(fn, (deep, [torch.ones(2) for _ in range(1000)]), name="stage 5")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("engine", [functional, eager], ids=lambda e: e.__name__)
def test_an_error_of_a_running_stage_has_a_note_with_its_line_and_shapes(engine):
    def fn(w, x):
        if x.sum() > 0:
            raise KeyError("mine")
        return x * w

    program = engine(fn, (torch.ones(2), torch.zeros(2)), name="stage 5")
    with pytest.raises(KeyError) as caught:
        program.forward(torch.ones(2), torch.ones(2))
    (note,) = caught.value.__notes__
    assert (
        note == f"raised in stage 5 at {__file__}:{fn.__code__.co_firstlineno + 2}, which was given params ="
        " float32[2], x = float32[2]"
    )


def _raising(number, error):
    calls = []

    def fn(w, x):
        calls.append(number)
        if len(calls) == number:
            raise error
        return x * w

    return fn, f"{__file__}:{fn.__code__.co_firstlineno + 3}"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine")], ids=lambda e: type(e).__name__)
def test_an_error_of_the_second_call_alone_is_not_blamed_on_the_derivative(engine, error):
    fn, place = _raising(2, error)
    name = type(error).__name__
    with pytest.raises(
        StageError, match=f"^the stage: it ran before, and then raised {name}: mine at {place}.$"
    ):
        engine(fn, (torch.ones(2), torch.zeros(2)))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_an_error_of_the_first_call_alone_is_raised(engine):
    """The eager and the functional engine took it for a refusal of tensors without values, and went on."""
    fn, place = _raising(1, ValueError("mine"))
    with pytest.raises(StageError, match=f"^the stage: it raised ValueError at {place}: mine; it was given"):
        engine(fn, (torch.ones(2), torch.zeros(2)))


def test_a_refusal_of_an_operator_that_a_stage_raises_anew_keeps_its_mend():
    """It was taken for an error of the stage's own, with nothing to do about it."""

    def fn(w, x):
        try:
            return OldStyle.apply(w * x)
        except RuntimeError as error:
            raise ValueError("anew") from error

    arguments = (torch.ones(2), torch.zeros(2))
    with pytest.raises(StageError, match=r"differentiate it \(ValueError: anew\). Instead: use the eager"):
        functional(fn, arguments)
    eager(fn, arguments)


@pytest.mark.parametrize("engine", [functional, eager], ids=lambda e: e.__name__)
@pytest.mark.filterwarnings("ignore:.*Converting a tensor")
def test_an_output_shape_that_depends_on_values_is_refused_when_it_changes(engine):
    program = engine(
        lambda w, x: (x[x > 0] if (x > 0).any() else x) * w, (torch.ones(()), torch.zeros(3)), name="stage 2"
    )
    with pytest.raises(StageError, match="stage 2: its output depends on values"):
        program.forward(torch.ones(()), torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_arguments_are_checked_against_the_example(engine):
    w, x = torch.ones(2), torch.ones(3, 2)
    program = engine(lambda w, x, c: x * w * c, (w, x, x))
    for args, message in [
        ((w, torch.ones(4, 2), x), r"x: got float32\[4,2\], expected float32\[3,2\]"),
        ((w.double(), x, x), "params: got float64"),
        ((w, x), "got 0 arguments after x, expected 1"),
        (([w], x, x), "params: got the structure"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            program.forward(*args)
    y, residuals = program.forward(w, x, x)
    with pytest.raises(ValueError, match="gy: got the structure"):
        program.backward(residuals, (y,))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_signatures_serve_as_examples(engine, args):
    whole = engine(lambda w, x: (x @ w).sin(), args)
    told = engine(lambda w, x: (x @ w).sin(), tuple(map(Signature.of, args)))
    assert whole.y == told.y
    assert torch.equal(whole.forward(*args)[0], told.forward(*args)[0])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_inputs_without_wanted_gradient_get_none(engine, args):
    program = engine(lambda w, x: (x @ w).sin(), (args[0], Signature.of(args[1]).without_grad()))
    _, residuals = program.flat.forward((args[0],), (args[1],), ())
    gw, gx = program.flat.backward(residuals, (torch.ones(2, 3, dtype=torch.float64),))
    assert gx == () and gw[0].shape == (3, 3)


def test_options_of_the_graph_engine_have_names():
    for wrong in ("full", True):
        with pytest.raises(TypeError, match=r"its options have names, as in graph\(remat='full'\)"):
            graph(wrong)


def test_flags_of_the_graph_engine_are_true_or_false():
    with pytest.raises(TypeError, match="dynamic: got 'yes', expected True or False"):
        graph(dynamic="yes")


def test_numpy_goes_to_eager():
    def counted(w, x):
        return x @ w * float(x.detach().numpy().shape[0])

    for engine in (graph, functional):
        with pytest.raises(StageError, match="use the eager engine"):
            engine(counted, (torch.randn(3, 3), torch.randn(2, 3)))
    eager(counted, (torch.randn(3, 3), torch.randn(2, 3)))


def test_a_run_on_zeros_is_told():
    def careful(w, x):
        if (x == 0).all():
            raise ArithmeticError("nothing but zeros")
        return x @ w

    with pytest.raises(StageError, match="nothing but zeros; it was given .*, and zeros where no batch"):
        functional(careful, (torch.randn(3, 3), torch.randn(2, 3)))


NOT_DENSE = {
    "sparse": (
        lambda w, x: (x @ w).to_sparse(),
        "got a sparse_coo tensor, expected a dense one; carry its to_dense",
    ),
    "jagged": (
        lambda w, x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        "got a nested tensor, .* padded",
    ),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_only_dense_tensors_cross_a_boundary(engine, kind):
    fn, message = NOT_DENSE[kind]
    with pytest.raises(
        (TypeError, StageError), match=message if engine is eager or kind == "sparse" else "stage 1"
    ):
        engine(fn, (torch.ones(2, 2), torch.ones(2, 2)), name="stage 1")
    with pytest.raises(TypeError, match=message):
        engine(lambda w, x: x @ w, (torch.ones(2, 2), fn(torch.ones(2, 2), torch.ones(2, 2))), name="stage 1")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_within_a_stage_are_for_the_eager_engine():
    def fn(w, x):
        return torch.nested.to_padded_tensor(torch.nested.nested_tensor([x, x[:1]]), 0.0)[0] @ w

    example = (torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(StageError, match="is not known without values .* Instead: use the eager engine"):
        graph(fn, example)
    program = eager(fn, example)
    y, residuals = program.forward(*example)
    gw, _ = program.backward(residuals, torch.ones_like(y))
    assert torch.equal(gw, torch.full((2, 2), 2.0))


@pytest.fixture
def table():
    """A helper that keeps what it makes."""

    @functools.lru_cache
    def lower(n):
        return torch.ones(n, n, dtype=torch.float64).tril()

    return lower


KEEPING = {
    "cache": lambda table: lambda w, x: table(3) @ w * x.sum(),
    "cache that is returned": lambda table: lambda w, x: table(3),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("kind", KEEPING)
def test_a_stage_that_reads_a_tensor_of_an_evaluation_that_is_over_is_refused(engine, kind, table, args):
    message = (
        r"^stage 2: it reads a tensor without values \(float64\[.,3\]\), .* Instead: recompute it in each"
        r" call; if it is a cache"
    )
    with pytest.raises(StageError, match=message):
        engine(KEEPING[kind](table), args, name="stage 2")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("read", [False, True])
def test_a_stage_that_keeps_a_tensor_is_refused(engine, read, args):
    """It has none without values to give, and no later step renews it."""
    kept = {}

    def fn(w, x):
        kept.setdefault("y", []).append((x @ w).detach())
        return kept["y"][0] if read else x @ w

    with pytest.raises(StageError, match=r"stage 2: it leaves a tensor in kept\['y'\]\[0\], which no later"):
        engine(fn, args, name="stage 2")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_a_cache_left_by_an_evaluation_is_not_read_and_one_with_values_is(engine, table, args):
    def fn(w, x):
        return x @ w @ table(3)

    def asks(w, x):
        y = x @ w @ table(3)
        return y if y.sum() > -99 else x

    outline(fn, args)
    for stage in (fn, asks, lambda w, x: table(3)):
        with pytest.raises(
            StageError,
            match=r"stage 2.* it reads a tensor without values \(float64\[3,3\]\), left by an earlier",
        ):
            engine(stage, args, name="stage 2")
    table.cache_clear()
    with pytest.raises(StageError, match=r"stage 2.* it reads a tensor without values"):
        engine(asks, args, name="stage 2")  # which fills the cache before it asks for a value
    table.cache_clear()
    want = fn(*args)
    assert torch.equal(engine(fn, args).forward(*args)[0], want)


@pytest.mark.parametrize("engine", [functional, eager], ids=lambda e: e.__name__)
def test_a_program_that_runs_does_not_read_a_cache_without_values(engine, table, args):
    def fn(w, x):
        return x @ w @ table(3)

    fn(*args)
    program = engine(fn, args, name="stage 2")
    table.cache_clear()
    outline(fn, args)
    with pytest.raises(StageError, match=r"stage 2: it reads a tensor without values \(float64\[3,3\]\)"):
        program.forward(*args)


def test_a_cycle_within_a_call_is_let_go_of(args):
    def fn(w, x):
        cycle = [x @ w]
        cycle.append(cycle)
        return cycle[0] * 2

    for engine in ENGINES:
        engine(fn, args)


OWN = torch.Generator()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_a_stage_hands_no_generator_to_an_operator(engine, args):
    def made(w, x):
        return x @ w + torch.rand(2, 3, generator=torch.Generator().manual_seed(3), dtype=x.dtype)

    stages = (
        lambda w, x: x @ w + torch.rand(2, 3, generator=OWN),
        lambda w, x: x @ w * torch.empty(2, 3).normal_(generator=OWN) + float(x.sum()),
        lambda w, x: x @ w + torch.rand(2, 3, generator=torch.default_generator),
        made,
    )
    for fn in stages:
        with pytest.raises(
            StageError,
            match=(
                r"stage 2: it passes its own torch.Generator .*, called at .*test_refusals.py:\d+;.*"
                " Instead: leave the generator out"
            ),
        ):
            engine(fn, args, name="stage 2")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sparse_gradient_is_refused_by_name(engine):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    with pytest.raises(
        StageError,
        match=r"stage 2: the gradient of params\['weight'\] is a sparse_coo tensor.*leave out sparse=True",
    ):
        engine(
            lambda p, x: torch.func.functional_call(embedding, p, (x,)),
            (dict(embedding.named_parameters()), torch.arange(3)),
            name="stage 2",
        )


def test_a_sparse_tensor_made_in_the_forward_is_not_kept_by_the_graph_engine(args):
    def fn(w, x):
        return (torch.sparse.mm((w > 0).to(w.dtype).to_sparse(), x.T @ x) @ w).sum(0)

    w, x = (t.clone().requires_grad_() for t in args)
    want = torch.autograd.grad(fn(w, x).sum(), (w, x))
    with pytest.raises(
        StageError,
        match="stage 2: its backward needs a sparse tensor .* Instead: use graph.*full.*the functional",
    ):
        graph(fn, args, name="stage 2")
    for engine in (graph(remat="full"), functional, eager):
        y, residuals = (program := engine(fn, args)).forward(*args)
        torch.testing.assert_close(
            program.backward(residuals, torch.ones_like(y)), want, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    "engine", [*ENGINES, graph(remat="full")], ids=["graph", "functional", "eager", "remat"]
)
def test_a_sparse_constant(engine, args):
    sparse = torch.tensor(
        [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 4.0, 0.0]], dtype=torch.float64
    ).to_sparse()

    def fn(w, x):
        return torch.sparse.mm(sparse, w @ x.T) + sparse.to_dense() @ w @ x.T

    w, x = (t.clone().requires_grad_() for t in args)
    y, residuals = (program := engine(fn, args)).forward(*args)
    want = torch.autograd.grad(fn(w, x).sum(), (w, x))
    torch.testing.assert_close(program.backward(residuals, torch.ones_like(y)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_refusal_for_values_says_where_they_were_asked_for(args):
    def within(w, x):
        return x @ w if torch.func.vmap(lambda a: a.sum())(x)[0] > -9 else x

    def looking(w, x):
        return w * x[x > 0].sum()

    for fn, operator in [(within, "_local_scalar_dense.default"), (looking, "nonzero.default")]:
        line = fn.__code__.co_firstlineno + 1
        with pytest.raises(StageError, match=rf"\(operator aten.{operator}, called at {__file__}:{line}\)"):
            graph(fn, args)
    with pytest.raises(
        StageError, match=rf"its operator aten.\S+, called at {__file__}:\d+, returns is not known"
    ):
        graph(
            lambda w, x: torch.nested.to_padded_tensor(torch.nested.nested_tensor([x, x[:1]]), 0.0)[0] @ w,
            args,
        )


@pytest.mark.parametrize("engine", [functional, eager], ids=lambda e: e.__name__)
def test_a_stage_that_seeds_is_served_where_it_runs_and_refused_where_it_is_traced(engine):
    def fn(w, x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x @ w + torch.rand_like(x)

    example = (torch.ones(2, 2), torch.ones(2, 2))
    before = torch.get_rng_state()
    with pytest.raises(
        StageError, match="it seeds the generator that it draws from.*Instead: use the functional engine"
    ):
        graph(fn, example)
    program = engine(fn, example)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(program.forward(*example)[0], fn(*example))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_a_write_into_a_tensor_from_elsewhere_by_out_is_seen(engine):
    kept = torch.zeros(2)

    def fn(w, x):
        torch.add(kept, x.detach().sum(0), out=kept)
        return x @ w + kept

    with pytest.raises(StageError, match="it is not pure: it writes into a tensor of shape"):
        engine(fn, (torch.ones(2, 2), torch.ones(2, 2)))
    assert torch.equal(kept, torch.zeros(2))


def test_anomalies_are_looked_for_in_a_run_and_not_in_a_trace():
    with torch.autograd.set_detect_anomaly(True):
        graph(lambda w, x: (x @ w).sin(), (torch.ones(2, 2), torch.ones(2, 2)))


@pytest.mark.parametrize("kept", ["as it is", "as a view"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_result_of_a_functional_collective_is_waited_for(kept, tmp_path):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def fn(w, x):
            y = all_gather(x @ w, 0, dist.group.WORLD)
            return (y if kept == "as it is" else y.view(-1)), {
                "aux": collectives.all_reduce(x.detach(), "sum", dist.group.WORLD)
            }

        args = torch.ones(2, 2), torch.ones(3, 2)
        assert isinstance(fn(*args)[1]["aux"], collectives.AsyncCollectiveTensor)
        program = eager(fn, args, has_aux=True)
        (y, aux), residuals = program.forward(*args)
        assert type(y) is type(aux["aux"]) is torch.Tensor
        gw, _ = program.backward(residuals, torch.ones_like(y))
        assert torch.equal(y.flatten(), torch.full((6,), 2.0)) and torch.equal(gw, torch.full((2, 2), 3.0))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_a_collective_that_one_rank_calls_otherwise_is_refused_on_all(name, engine, tmp_path):
    """torch.func refuses lists of tensors: the rank that has one failed, and those that wait for it hung."""
    import torch.distributed as dist

    def fn(w, x):
        part = torch.zeros_like(x)
        if name == "scatter":
            dist.scatter(part, [x.detach()], src=0)
        else:
            dist.gather(x.detach(), [part], dst=0)
        return x @ w + part

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(
            StageError,
            match=rf"c10d.{name}_.default, called at {__file__}:\d+, in which one rank.*use ppfunc",
        ):
            engine(fn, (torch.ones(2, 2), torch.ones(2, 2)), name="stage 3")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((torch.matmul,), {}, "matmul.*and no example"),
        ((), {"example": (torch.ones(1), torch.ones(1))}, "missing .* argument 'fn'"),
        ((), {"has_aux": True}, "missing .* argument 'fn' and 'example'"),
        ((), {"name": "first"}, "missing .* argument 'fn' and 'example'"),
        ((), {"device": "cpu", "remat": "full"}, "missing .* argument 'fn' and 'example'"),
    ],
)
def test_options_of_a_call_are_not_taken_for_those_of_an_engine(args, options, words):
    with pytest.raises(TypeError, match=words):
        graph(*args, **options)


def test_an_extra_for_a_stage_that_takes_none_says_what_to_leave_out():
    mend = "takes 2 positional .* extra 0 = .* leave it out of extras= and state= of the step"
    with pytest.raises(StageError, match=mend):
        outline(lambda w, x: w * x, (torch.ones(2), torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prototype_that_maps_is_refused_with_what_to_write(engine):
    def stage(w, x):
        return torch._higher_order_ops.map(lambda row: row * w, x)

    with pytest.raises(StageError, match=r"the higher-order operator map .*; write torch\.func\.vmap\(f\)"):
        engine(stage, (torch.ones(2), torch.ones(3, 2)))

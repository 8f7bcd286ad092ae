"""Stages that an engine cannot serve: the message names the stage, the reason and what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ppfunc.stage import Signature, StageError, eager, functional, graph, outline
from tests.models import all_gather
from tests.stage.conftest import ENGINES, by_autograd, every, running, through

ONES, SQUARES = (torch.ones(2), torch.ones(2)), (torch.ones(2, 2), torch.ones(2, 2))


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


def padded(w, x):
    return torch.nested.to_padded_tensor(torch.nested.nested_tensor([x, x[:1]]), 0.0)[0] @ w


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
    "numpy": (lambda w, x: x @ w * float(x.detach().numpy().shape[0]), {eager}),
    "nested tensors": (padded, {eager}),
}


@pytest.fixture
def args():
    torch.manual_seed(0)
    return torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)


@every
@pytest.mark.parametrize("kind", WITH)
@pytest.mark.filterwarnings("ignore:.*Converting a tensor", "ignore:The PyTorch API of nested tensors")
def test_who_serves_what(engine, kind, args):
    fn, servers = WITH[kind]

    def gradients():
        program = engine(fn, args, name="stage 3")
        torch.manual_seed(1)
        return through(program, *args)

    if engine not in servers:
        with pytest.raises(StageError, match=r"^stage 3: .* Instead: .*\.$") as refused:
            gradients()
        named = {other for other in ENGINES if f"use the {other.__name__} engine" in refused.value.instead}
        assert named <= servers or named == {eager}  # the last resort, which then says what to rewrite
        assert named or not servers
        return
    torch.manual_seed(1)
    want = by_autograd(fn, *args)
    torch.testing.assert_close(gradients(), want, rtol=1e-12, atol=1e-12)


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every
def test_a_stage_is_given_the_part_of_its_rank_and_gradients_are_dtensors(engine, group):
    mesh = init_device_mesh("cpu", (1,))
    w, x = (distribute_tensor(t, mesh, [Replicate()]) for t in (torch.randn(3, 3), torch.randn(2, 3)))

    def stage(w, x):
        assert type(w) is not type(x_given) is not type(x)
        return x @ w

    x_given = x
    y, gw, gx = through(engine(stage, (w, x)), w, x)
    assert type(y) is torch.Tensor and gw.placements == gx.placements == (Replicate(),)
    torch.testing.assert_close(gw.full_tensor(), x.full_tensor().T @ torch.ones(2, 3))


# -- what a stage raises


def replaces(w, x):
    w["a"] = w["a"] * 2
    return x * w["a"]


OWN = torch.Generator()


def draws(w, x):
    return x @ w + torch.rand(2, 2, generator=torch.Generator().manual_seed(3))


EMBEDDING = torch.nn.Embedding(5, 2, sparse=True)
GENERATOR = (
    r"it passes its own torch.Generator .*, called at .*test_refusals.py:\d+;.* Instead: leave the generator"
)
# A stage, its arguments, and what each engine says of it.
REFUSED = {
    "container": (
        replaces,
        ({"a": torch.ones(2)}, torch.ones(2)),
        "it replaces entries of its argument params",
    ),
    "generator": (lambda w, x: x @ w + torch.rand(2, 2, generator=OWN), SQUARES, GENERATOR),
    "generator after a look": (
        lambda w, x: x @ w * torch.empty(2, 2).normal_(generator=OWN) + float(x.sum()),
        SQUARES,
        GENERATOR,
    ),
    "default generator": (
        lambda w, x: x @ w + torch.rand(2, 2, generator=torch.default_generator),
        SQUARES,
        GENERATOR,
    ),
    "new generator": (draws, SQUARES, GENERATOR),
    "sparse gradient": (
        lambda p, x: torch.func.functional_call(EMBEDDING, p, (x,)),
        (dict(EMBEDDING.named_parameters()), torch.arange(3)),
        r"the gradient of params\['weight'\] is a sparse_coo tensor.*leave out sparse=True",
    ),
    "map": (
        lambda w, x: torch._higher_order_ops.map(lambda row: row * w, x),
        (torch.ones(2), torch.ones(3, 2)),
        r"the higher-order operator map .*; write torch\.func\.vmap\(f\)",
    ),
    "line of a library": (
        lambda w, x: F.linear(x, w),
        (torch.ones(3, 2), torch.ones(5)),
        rf"it raised RuntimeError at {__file__}:\d+: .*given params = float32\[3,2\], x = float32.5.\.$",
    ),
}


@every
@pytest.mark.parametrize("kind", REFUSED)
def test_every_engine_says_what_is_wrong(engine, kind):
    fn, args, message = REFUSED[kind]
    with pytest.raises(StageError, match=f"^stage 2: .*{message}"):
        engine(fn, args, name="stage 2")


@every
def test_a_captured_tensor_with_a_gradient_may_be_detached(engine):
    constant, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    engine(lambda w, x: x * constant * weight.detach(), ONES)


def raising(w, x):
    raise KeyError("mine")


@every
def test_an_error_of_the_stage_says_where_it_was_raised_and_what_it_was_given(engine):
    line = raising.__code__.co_firstlineno + 1
    with pytest.raises(StageError) as caught:
        engine(raising, ({"a": torch.ones(3, 2)}, torch.ones(2)), name="stage 5")
    given = "it was given params = {'a': float32[3,2]}, x = float32[2]"
    assert str(caught.value) == f"stage 5: it raised KeyError at {__file__}:{line}: 'mine'; {given}."
    assert isinstance(caught.value.__cause__, KeyError)
    deep = torch.ones(2)
    for _ in range(900):
        deep = [deep]
    with pytest.raises(StageError, match="it raised KeyError .*: 'mine'; it was given params = ") as caught:
        engine(raising, (deep, [torch.ones(2) for _ in range(1000)]), name="stage 5")
    assert len(str(caught.value)) < 2000


@running
def test_an_error_of_a_running_stage_has_a_note_with_its_line_and_shapes(engine):
    program = engine(
        lambda w, x: raising(w, x) if x.sum() > 0 else x * w, (torch.ones(2), torch.zeros(2)), name="stage 5"
    )
    with pytest.raises(KeyError) as caught:
        program.forward(*ONES)
    (note,) = caught.value.__notes__
    place = f"raised in stage 5 at {__file__}:{raising.__code__.co_firstlineno + 1}"
    assert note == f"{place}, which was given params = float32[2], x = float32[2]"


@every
@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("number", [1, 2])
def test_an_error_of_one_call_alone_is_raised(engine, error, number):
    """Of the first it is no refusal of tensors without values, of the second none of the derivative."""
    calls, name = [], type(error).__name__

    def fn(w, x):
        calls.append(number)
        if len(calls) == number:
            raise error
        return x * w

    place = f"{__file__}:{fn.__code__.co_firstlineno + 3}"
    said = [
        f"it raised {name} at {place}: mine; it was given",
        f"it ran before, and then raised {name}: mine at {place}.$",
    ]
    with pytest.raises(StageError, match=f"^the stage: {said[number - 1]}"):
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


def test_a_run_on_zeros_is_told():
    def careful(w, x):
        if (x == 0).all():
            raise ArithmeticError("nothing but zeros")
        return x @ w

    with pytest.raises(StageError, match="nothing but zeros; it was given .*, and zeros where no batch"):
        functional(careful, SQUARES)


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
    message = (
        rf"its operator aten.\S+, called at {__file__}:\d+, returns is not known without values .* eager"
    )
    with pytest.raises(StageError, match=message):
        graph(padded, args)


def test_an_extra_for_a_stage_that_takes_none_says_what_to_leave_out():
    mend = "takes 2 positional .* extra 0 = .* leave it out of extras= and state= of the step"
    with pytest.raises(StageError, match=mend):
        outline(lambda w, x: w * x, (*ONES, torch.ones(2)))


# -- what a program is given


@running
@pytest.mark.filterwarnings("ignore:.*Converting a tensor")
def test_an_output_shape_that_depends_on_values_is_refused_when_it_changes(engine):
    program = engine(
        lambda w, x: (x[x > 0] if (x > 0).any() else x) * w, (torch.ones(()), torch.zeros(3)), name="stage 2"
    )
    with pytest.raises(StageError, match="stage 2: its output depends on values"):
        program.forward(torch.ones(()), torch.tensor([1.0, -1.0, 1.0]))


@every
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


@every
def test_signatures_serve_as_examples(engine, args):
    whole = engine(lambda w, x: (x @ w).sin(), args)
    told = engine(lambda w, x: (x @ w).sin(), tuple(map(Signature.of, args)))
    assert whole.y == told.y
    assert torch.equal(whole.forward(*args)[0], told.forward(*args)[0])


@every
def test_inputs_without_wanted_gradient_get_none(engine, args):
    program = engine(lambda w, x: (x @ w).sin(), (args[0], Signature.of(args[1]).without_grad()))
    _, residuals = program.flat.forward((args[0],), (args[1],), ())
    gw, gx = program.flat.backward(residuals, (torch.ones(2, 3, dtype=torch.float64),))
    assert gx == () and gw[0].shape == (3, 3)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        (("full",), {}, r"its options have names, as in graph\(remat='full'\)"),
        ((True,), {}, r"its options have names, as in graph\(remat='full'\)"),
        ((), {"dynamic": "yes"}, "dynamic: got 'yes', expected True or False"),
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


@every
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_only_dense_tensors_cross_a_boundary(engine, kind):
    fn, message = NOT_DENSE[kind]
    said = message if engine is eager or kind == "sparse" else "stage 1"
    with pytest.raises((TypeError, StageError), match=said):
        engine(fn, SQUARES, name="stage 1")
    with pytest.raises(TypeError, match=message):
        engine(lambda w, x: x @ w, (torch.ones(2, 2), fn(*SQUARES)), name="stage 1")


def test_a_sparse_tensor_made_in_the_forward_is_not_kept_by_the_graph_engine(args):
    def fn(w, x):
        return (torch.sparse.mm((w > 0).to(w.dtype).to_sparse(), x.T @ x) @ w).sum(0)

    said = "stage 2: its backward needs a sparse tensor .* Instead: use graph.*full.*the functional"
    with pytest.raises(StageError, match=said):
        graph(fn, args, name="stage 2")
    for engine in (graph(remat="full"), functional, eager):
        torch.testing.assert_close(
            through(engine(fn, args), *args), by_autograd(fn, *args), rtol=1e-12, atol=1e-12
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

    torch.testing.assert_close(
        through(engine(fn, args), *args), by_autograd(fn, *args), rtol=1e-12, atol=1e-12
    )


# -- tensors of an evaluation that is over


@pytest.fixture
def table():
    """A helper that keeps what it makes."""

    @functools.lru_cache
    def lower(n):
        return torch.ones(n, n, dtype=torch.float64).tril()

    return lower


STALE = r"stage 2.* it reads a tensor without values \(float64\[.,3\]\), "


@every
def test_a_cache_left_by_an_evaluation_is_not_read_and_one_with_values_is(engine, table, args):
    def fn(w, x):
        return x @ w @ table(3)

    def asks(w, x):
        y = x @ w @ table(3)
        return y if y.sum() > -99 else x

    for cleared in (True, False):
        for stage in (fn, asks, lambda w, x: table(3), lambda w, x: table(3) @ w * x.sum()):
            table.cache_clear()  # it is filled by the stage, or before
            if not cleared:
                outline(fn, args)
            with pytest.raises(StageError, match=STALE):
                engine(stage, args, name="stage 2")
    table.cache_clear()
    want = fn(*args)
    program = engine(fn, args, name="stage 2")
    assert torch.equal(program.forward(*args)[0], want)
    if engine is not graph:
        table.cache_clear()
        outline(fn, args)
        with pytest.raises(
            StageError,
            match=f"{STALE}left by an earlier.*Instead: recompute it in each call; if it is a cache",
        ):
            program.forward(*args)


@every
@pytest.mark.parametrize("read", [False, True])
def test_a_stage_that_keeps_a_tensor_is_refused(engine, read, args):
    """It has none without values to give, and no later step renews it."""
    kept = {}

    def fn(w, x):
        kept.setdefault("y", []).append((x @ w).detach())
        return kept["y"][0] if read else x @ w

    with pytest.raises(StageError, match=r"stage 2: it leaves a tensor in kept\['y'\]\[0\], which no later"):
        engine(fn, args, name="stage 2")


@every
def test_a_cycle_within_a_call_is_let_go_of(engine, args):
    def fn(w, x):
        cycle = [x @ w]
        cycle.append(cycle)
        return cycle[0] * 2

    engine(fn, args)


@running
def test_a_stage_that_seeds_is_served_where_it_runs_and_refused_where_it_is_traced(engine):
    def fn(w, x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x @ w + torch.rand_like(x)

    before = torch.get_rng_state()
    said = "it seeds the generator that it draws from.*Instead: use the functional engine"
    with pytest.raises(StageError, match=said):
        graph(fn, SQUARES)
    program = engine(fn, SQUARES)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(program.forward(*SQUARES)[0], fn(*SQUARES))


def test_anomalies_are_looked_for_in_a_run_and_not_in_a_trace():
    with torch.autograd.set_detect_anomaly(True):
        graph(lambda w, x: (x @ w).sin(), SQUARES)


# -- collectives


@pytest.mark.parametrize("kept", ["as it is", "as a view"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_result_of_a_functional_collective_is_waited_for(kept, group):
    def fn(w, x):
        y = all_gather(x @ w, 0, dist.group.WORLD)
        aux = {"aux": collectives.all_reduce(x.detach(), "sum", dist.group.WORLD)}
        return (y if kept == "as it is" else y.view(-1)), aux

    args = torch.ones(2, 2), torch.ones(3, 2)
    assert isinstance(fn(*args)[1]["aux"], collectives.AsyncCollectiveTensor)
    program = eager(fn, args, has_aux=True)
    (y, aux), residuals = program.forward(*args)
    assert type(y) is type(aux["aux"]) is torch.Tensor
    gw, _ = program.backward(residuals, torch.ones_like(y))
    assert torch.equal(y.flatten(), torch.full((6,), 2.0)) and torch.equal(gw, torch.full((2, 2), 3.0))


@every
@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_a_collective_that_one_rank_calls_otherwise_is_refused_on_all(name, engine, group):
    """torch.func refuses lists of tensors: the rank that has one failed, and those that wait for it hung."""

    def fn(w, x):
        part = torch.zeros_like(x)
        if name == "scatter":
            dist.scatter(part, [x.detach()], src=0)
        else:
            dist.gather(x.detach(), [part], dst=0)
        return x @ w + part

    said = rf"c10d.{name}_.default, called at {__file__}:\d+, in which one rank.*use ppfunc"
    with pytest.raises(StageError, match=said):
        engine(fn, SQUARES, name="stage 3")

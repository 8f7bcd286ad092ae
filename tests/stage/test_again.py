"""What the backward computes again: the same bits in any stage and schedule, a block at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import ppfunc as pp
from ppfunc.schedule import remove_tail
from ppfunc.stage import StageError, graph, stage_from_module
from ppfunc.stage.engines.tracing.graph import base, is_of_forward
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.testing import schedules
from tests.builders import BUILDERS
from tests.conftest import few
from tests.models import attention_block, attention_params, normal, same_bits, squared
from tests.stage.conftest import by_autograd, through
from tests.storages import LiveStorages, kept_bytes

D = 8
LINEAR = torch.ops.aten.linear.default
REMATS = ["cheap", "full", lambda op, _: "gelu" in str(op) or "mul" in str(op)]
TRAINING = [name for name, build in BUILDERS.items() if not build(2, 4).forward_only]


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@pytest.mark.parametrize("apart", [False, True])
def test_computing_again_changes_no_bit_of_any_kind_of_stage(case, run, apart):
    options = {"has_aux": case.has_aux}
    again = run(graph(remat="full")(case.fn, case.args, **options), case, apart)
    assert again == run(graph(case.fn, case.args, **options), case)


def halves(a, b):
    """Several results, views of one storage, and a maximum whose places are kept."""
    left, right = (a + b).chunk(2, dim=-1)
    return torch.cat((left * right.amax(-1, keepdim=True), right.cummax(-1).values), -1)


OPERATORS = [
    lambda w, a, b: a @ w,
    lambda w, a, b: F.linear(a, w, b[0]),
    lambda w, a, b: F.gelu(a) + b,
    lambda w, a, b: F.layer_norm(a * b, (D,), w[0]),
    lambda w, a, b: F.dropout(a, 0.5) + b,
    lambda w, a, b: (a @ b.T).softmax(-1) @ (b * w[1]),
    lambda w, a, b: F.silu(a).mul_(b) * w[2],
    lambda w, a, b: halves(a, b),
    lambda w, a, b: a.T.reshape(b.shape).tanh().exp2() * w.diagonal(),
]


@st.composite
def stages(draw):
    """A stage of random operators on any of the values before, beside which a product is most of the work."""
    step = st.tuples(st.integers(0, len(OPERATORS) - 1), st.integers(1, 4), st.integers(1, 6))
    steps = draw(st.lists(step, min_size=1, max_size=8))
    params = {"w": [normal(D, D, seed=n) / 3 for n in range(len(steps))], "up": normal(D, 4096) / 64}

    def stage(params, x):
        values = [x + x @ params["up"] @ params["up"].T]
        for w, (which, a, b) in zip(params["w"], steps, strict=True):
            values.append(OPERATORS[which](w, values[-min(a, len(values))], values[-min(b, len(values))]))
        return (values[-1] + values[len(values) // 2]) * params["w"][0][0]

    return stage, params


@pytest.mark.filterwarnings("ignore:.*nothing depends on")
@few(12)
@given(stages(), st.sampled_from(REMATS), schedules(TRAINING, max_ranks=3, max_microbatches=4, max_chunks=2))
def test_computing_again_changes_no_bit_under_any_schedule(case, remat, schedule):
    (stage, params), schedule = case, remove_tail(schedule)
    count = len(set(schedule.model_stages))
    inputs, targets = (normal(schedule.microbatches * 3, D, seed=n) for n in (1, 2))

    def results(engine):
        step = pp.value_and_grad([stage] * count, squared, schedule, engine=engine)
        copies = {n: tree_map(torch.clone, params) for n in range(count)}
        return step(copies, inputs, targets, seed=(1, 2))

    assert same_bits(results(graph(remat=remat)), results(graph))


# What is cheap, by default.


class Layer(nn.Module):
    """A residual layer of a transformer of today, with a dropout: [b, t, d] to the same."""

    def __init__(self, d):
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.RMSNorm(d),
            *(nn.Linear(d, 4 * d) for _ in range(2)),
            None,
        )
        self.down = nn.Linear(4 * d, d)

    def forward(self, x):
        h = self.norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), 0.1)


def encoder(d):
    return nn.TransformerEncoderLayer(d, 4, 4 * d, 0.0, F.gelu, batch_first=True, norm_first=True)


def program_of(make, d, **options):
    """A program of a module of two layers, and its arguments."""
    fn, params, _ = stage_from_module(nn.Sequential(make(d), make(d)))
    args = params, torch.randn(2, 64, d)
    return graph(fn, args, **options), args


def saved_by_autograd(make, d):
    """The bytes that torch keeps for a backward, without parameters."""
    module, sizes = nn.Sequential(make(d), make(d)), {}

    def pack(t):
        sizes[t.untyped_storage()._cdata] = t.untyped_storage()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
        y = module(torch.randn(2, 64, d, requires_grad=True))
    mine = {p.untyped_storage()._cdata for p in module.parameters()}
    assert y.requires_grad
    return sum(storage.nbytes() for key, storage in sizes.items() if key not in mine)


def rest_bytes(rest, params):
    """The bytes of the storages that I hands on to W."""
    mine = {p.untyped_storage()._cdata for p in tree_leaves(params)}
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(rest)}
    return sum(size for key, size in sizes.items() if key not in mine)


@pytest.mark.parametrize("make, d, share", [(encoder, 256, 0.75), (Layer, 512, 0.65)])
def test_by_default_less_is_kept_than_by_autograd(make, d, share):
    program, args = program_of(make, d)
    plain, _ = program_of(make, d, remat="none")
    assert kept_bytes(program, *args) <= share * saved_by_autograd(make, d)
    results, handed = [], []
    for each in (program, plain):
        torch.manual_seed(1)
        y, kept = each.forward(*args)
        state = torch.get_rng_state()
        gx, rest = each.backward_input(kept, torch.ones_like(y))
        handed.append(rest_bytes(rest, args[0]))
        results.append((y, each.backward(kept, torch.ones_like(y)), gx, each.backward_weight(rest)))
        assert torch.equal(state, torch.get_rng_state())
    assert same_bits(*results) and handed[0] <= handed[1]


def test_nothing_is_computed_again_beside_little_work():
    args = torch.randn(8), torch.randn(4, 8)
    program, plain = (graph(lambda w, x: F.gelu(x * w).exp() @ w, args, remat=r) for r in ("cheap", "none"))
    assert program.flat.backward.__doc__ == plain.flat.backward.__doc__


# By place.


def repeated(program):
    """The names of the modules whose operators a backward calls again."""
    body = program.flat.backward.recipe.block.body
    named = [n.meta["module"] for n in body if is_of_forward(n) and n.meta["module"] and base(n) is None]
    return {place.name for place in named}


@pytest.mark.parametrize(
    "remat, names",
    [
        ({"*": "none"}, set()),
        ({"*.norm": "full"}, {"0.norm", "1.norm"}),
        ({"*.down|*.gate": "full", "?": "none"}, set()),  # what leaves a module is kept
        ({"0": "none", "?": "full"}, {"1", "1.norm", "1.gate", "1.up"}),
        ({"1.up": "none", "*": "full"}, {"0", "1", "0.norm", "0.gate", "0.up", "1.norm", "1.gate"}),
        ({"?": lambda op, _: op is LINEAR}, {"0.gate", "0.up", "1.gate", "1.up"}),
        ({"?": lambda op, n: op is LINEAR and n == 1}, {"0.up", "1.up"}),  # the second in each
    ],
)  # fmt: skip
def test_modules_that_patterns_name_are_computed_again(remat, names):
    program, args = program_of(Layer, 32, remat=remat)
    assert repeated(program) == names
    results = []
    for each in (program, program_of(Layer, 32)[0]):
        torch.manual_seed(1)
        y, kept = each.forward(*args)
        gx, rest = each.backward_input(kept, y)
        results.append((y, gx, each.backward(kept, y), each.backward_weight(rest)))
    assert same_bits(*results)


class Steps(nn.Module):
    """Layers that write in place, of which a split has several in a stage."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        for layer in self.h:
            x = F.gelu(layer(x)).mul_(2).tanh()
        return x


def test_names_of_a_split_are_those_of_its_model():
    split = pp.split(Steps(), normal(4, D).float(), at=2)
    args = split.params[1], split.stages[0](split.params[0], normal(4, D).float())

    def all_but_gelu(operator, number):
        return "gelu" not in str(operator)

    assert repeated(graph(split.stages[1], args, remat={"h.3": all_but_gelu})) == {"h.3"}
    assert repeated(graph(split.stages[1], args, remat={"h.?": "full"})) == set()  # what leaves them is kept
    with pytest.raises(
        StageError, match=r"got 'layers\.\*', expected names of modules: h\.0, h\.1, .*Instead"
    ):
        graph(split.stages[1], args, remat={"h.*|layers.*": "full"})
    for one_argument in (lambda operator: True, {"h.*": lambda operator: True}):
        with pytest.raises(ValueError, match=r"does not take two arguments, expected \(operator, number\)"):
            graph(remat=one_argument)
    with pytest.raises(ValueError, match=r"remat\['h\.\*'\]: got 7, expected"):
        graph(split.stages[1], args, remat={"h.*": 7})


def test_each_stage_has_an_engine_of_its_own():
    stage, params, x = wide(1)
    schedule, engines = pp.one_f_one_b(4, 2), [graph, graph(remat="none"), graph(remat="full"), graph]
    step = pp.value_and_grad([stage] * 4, squared, schedule, engine=engines)
    lowered = step.lower(dict.fromkeys(range(4), params), x, x)
    sizes = lowered.costs().activation
    assert sizes[1] > 3 * sizes[2]
    with pytest.raises(ValueError, match="got 1 engines, expected one, or 4, one per stage"):
        pp.value_and_grad([stage] * 4, squared, schedule, engine=[graph])


def test_parameters_name_places_where_a_stage_calls_no_module():
    stage, params, x = wide(4)
    tree = {"h": dict(enumerate(params))}
    sizes = [
        kept_bytes(graph(lambda p, x: stage(p["h"].values(), x), (tree, x), remat=remat), tree, x)
        for remat in ("none", {"h.1|h.3": "full"}, {"h.?": "full"}, {"h.*": "full"})
    ]
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3] == 4 * x.nbytes
    with pytest.raises(StageError, match=r"got 'layers', expected names of parameters: h, h\.0, .*Instead"):
        graph(lambda p, x: stage(p["h"].values(), x), (tree, x), remat={"layers": "full"})


# Memory.


def wide(blocks):
    """A stage of blocks whose activations outweigh its parameters, in float32."""
    params = [attention_params(16, seed=n, dtype=torch.float32) for n in range(blocks)]

    def stage(params, x):
        for p in params:
            x = attention_block(p, x)
        return x

    return stage, params, torch.randn(4, 128, 16)


def backward_of(blocks, remat):
    """The bytes that a forward keeps, and the most that a whole backward makes beside its gradients."""
    stage, params, x = wide(blocks)
    program = graph(stage, (params, x), remat=remat)
    with torch.no_grad():
        kept = [program.flat.forward(tuple(tree_leaves(params)), (x,), ())[1]]
        with LiveStorages() as counted:
            results = program.flat.backward.function(kept.pop(), (torch.ones_like(x),))
    return kept_bytes(program, params, x), counted.peak - sum(t.nbytes for t in tree_leaves(results))


def test_a_backward_computes_again_one_block_at_a_time():
    (one, _), (kept, most) = backward_of(1, "none"), backward_of(4, "full")
    activation = wide(1)[2].nbytes
    assert one > 11 * activation
    assert kept == 4 * activation
    assert most < 1.6 * one


def test_deep_stages_keep_less_than_each_block():
    (kept, most), (plain, _) = backward_of(16, "full"), backward_of(16, "none")
    assert kept <= 8 * wide(1)[2].nbytes and kept + most < 0.3 * plain


def handed_on(remat):
    """The bytes that I hands on to W, and the most in W."""
    stage, params, x = wide(2)
    program = graph(stage, (params, x), remat=remat)
    leaves, gy = tuple(tree_leaves(params)), torch.ones_like(x)
    with torch.no_grad():
        kept = [program.flat.forward(leaves, (x,), ())[1]]
        rest = [program.flat.backward_input.function(kept.pop(), (gy,))[1]]
        storages = {t.untyped_storage()._cdata: t.nbytes for t in rest[0] if not any(t is p for p in leaves)}
        with LiveStorages() as counted:
            program.flat.backward_weight.function(rest.pop())
    return sum(storages.values()), counted.peak


def test_a_weight_gradient_computes_again_instead_of_holding():
    (plain, _), (full, most) = handed_on("none"), handed_on("full")
    assert full <= 0.5 * plain
    assert full + most < plain


def test_long_chains_are_cut_as_well():
    def chain(w, x):
        for _ in range(600):
            x = (x * w).sin()
        return x

    args = (torch.ones(4), torch.randn(2, 4))
    program = graph(chain, args, remat="full")
    assert kept_bytes(program, *args) < 600 * args[1].nbytes / 10
    torch.testing.assert_close(through(program, *args), by_autograd(chain, *args))

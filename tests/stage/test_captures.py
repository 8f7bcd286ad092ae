"""What functions read beside their arguments: a step computes with the values of its beginning, or refuses.

The table is (what is read) x (engine) x (form of the stages) x (what changes between steps), each step beside
plain torch on the whole model. Random models with attributes, captures and hooks that change do the same;
``--large`` has 300 of them.
"""

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import importlib
import itertools
import logging
import operator
import random
import sys
import textwrap
import weakref
from contextlib import nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace

import numpy
import optree
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ppfunc as pp
from ppfunc.runtime import AgreementError
from ppfunc.splitter import cut
from ppfunc.stage import StageError, functional, graph
from ppfunc.stage.abstract.captures import Watch, ambient, changes
from tests.stage.conftest import ENGINES, every

pytestmark = pytest.mark.filterwarnings("ignore:value_and_grad has been traced")
WIDTH = 4
SCALE = 2.0  # a global that stages read


class Settings:
    factor = 1.5


def helper(x):
    return x * SCALE


class Twice(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Part(nn.Module):
    """Reads an attribute of each kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.drop, self.flag, self.scale = nn.Dropout(0.0), True, 1.0
        self.config = SimpleNamespace(k=1.0, nested={"power": [1.0]})
        self.act = torch.tanh
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.float64))
        self.table = torch.ones(WIDTH, dtype=torch.float64)  # a tensor that is no buffer

    def forward(self, x):
        y = self.act(self.linear(x) * self.scale) * self.mask * self.config.k * self.table
        y = y + getattr(self, "shift", 0.0) if self.flag else -y
        return y * self.config.nested["power"][0]


def change_global(model, factor):
    global SCALE
    SCALE *= factor


def change_hook(model, factor):
    model[0].linear.register_forward_hook(lambda m, args, y: y * factor)


CHANGES = {
    "float": lambda model, v: setattr(model[0], "scale", v),
    "flag": lambda model, v: setattr(model[0], "flag", not model[0].flag),
    "new attribute": lambda model, v: setattr(model[0], "shift", v),
    "config": lambda model, v: setattr(model[0].config, "k", v),
    "entry": lambda model, v: model[0].config.nested["power"].__setitem__(0, v),
    "buffer replaced": lambda model, v: setattr(model[0], "mask", model[0].mask * v),
    "buffer written": lambda model, v: model[0].mask.mul_(v),
    "tensor replaced": lambda model, v: setattr(model[0], "table", model[0].table + v),
    "tensor written": lambda model, v: model[0].table.add_(v),
    "activation": lambda model, v: setattr(model[0], "act", lambda x: x * v),
    "class": lambda model, v: setattr(Settings, "factor", v),
    "global": change_global,
    "hook": change_hook,
}


def squared(y, t):
    return ((y - t) ** 2).mean()


def squared_and_settings(y, t):
    return squared(helper(y), t) * Settings.factor


GIVEN = {0: torch.ones(2)}, torch.ones(2, 2), torch.zeros(2, 2)


def step_of(stage, **options):
    """A step of one stage: where that is ``p * x * number``, the loss of what is ``GIVEN`` is its square."""
    return pp.value_and_grad([stage], squared, pp.gpipe(1, 1), **options)


def made():
    return nn.Sequential(Part(), Part())


def pipeline(model, form):
    """Make stages of a model: a split, stages of its modules, or functions that call it."""
    if form == "split":
        split = pp.split(model, torch.zeros(2, WIDTH, dtype=torch.float64), at=["1"])
        return split, split.params
    stages = [pp.stage_from_module(part, constants=True) for part in model]
    functions = [stage.fn for stage in stages]
    if form == "function":
        functions = [lambda p, x, part=part: torch.func.functional_call(part, p, (x,)) for part in model]
    return functions, {n: stage.params for n, stage in enumerate(stages)}


def batch(rows):
    return pp.Microbatches([torch.randn(n, WIDTH, dtype=torch.float64) for n in rows])


def reference(model, loss, inputs, targets):
    """Compute loss and gradients of the whole model, by names within it."""
    model.zero_grad()
    total = sum(loss(model(x), t) for x, t in zip(inputs, targets, strict=True)) / len(inputs)
    total.backward()
    return total.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def require_same(step, model, loss, params, form, rows):
    inputs, targets = batch(rows), batch(rows)
    want, want_grads = reference(model, loss, inputs, targets)
    got, grads = step(params, inputs, targets, loss_weights=[0.5, 0.5])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for stage, tree in grads.items():
        for name, gradient in tree.items():
            full = name if form == "split" else f"{stage}.{name}"
            torch.testing.assert_close(gradient, want_grads[full], rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def restored():
    global SCALE
    before = SCALE, Settings.factor
    yield
    SCALE, Settings.factor = before


@every
@pytest.mark.parametrize("form", ["split", "module", "function"])
def test_each_step_has_the_values_of_its_beginning(engine, form):
    """Forms of inputs that were traced before the change meet others in one step."""
    model = made()
    stages, params = pipeline(model, form)
    step = pp.value_and_grad(stages, squared_and_settings, pp.gpipe(2, 2), engine=engine)
    require_same(step, model, squared_and_settings, params, form, [3, 3])
    for number, (name, change) in enumerate(CHANGES.items()):
        change(model, 0.5 + number / 8)
        with torch.random.fork_rng():
            require_same(step, model, squared_and_settings, params, form, [3, 5 if number % 4 == 0 else 3])
        assert name  # in the traceback
    misses = step.cache_info().misses
    require_same(step, model, squared_and_settings, params, form, [3, 3])
    assert step.cache_info().misses <= misses + 1


def test_what_changes_beside_the_values_that_are_read_does_not_count():
    """A global with the name of a key, a logger that is used, and the order in a set of another process."""
    logger = logging.getLogger("ppfunc.tests.captures")

    def stage(p, x):
        logger.debug("it is called")
        return p["WIDE"] * x * getattr(logger, "no" + "thing", 1.0)

    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 1))
    for number in range(3):
        globals()["WIDE"] = torch.ones(1 + number)
        logger.isEnabledFor(number), logging.getLogger(f"ppfunc.tests.captures.{number}")
        step({0: {"WIDE": torch.ones(2)}}, torch.ones(2, 2), torch.ones(2, 2))
    assert step.cache_info().misses == 1
    names = {f"name {n}" for n in range(20)}
    state = Watch(functools.partial(helper, names)).state()
    assert [state.values[f".args[0][{n}]"][1] for n in range(20)] == sorted(map(repr, names))


PACKAGE = {
    "__init__": "",
    "config": "FACTOR = 2.0",
    "stages": """
        def relative(p, x):
            from .config import FACTOR
            return p * x * FACTOR

        def attribute(p, x):
            from . import config
            return p * x * config.FACTOR

        def by_text(p, x):
            import importlib
            return p * x * importlib.import_module("ppfunc_tests_package.config").FACTOR

        def by_its_name(p, x):
            import sys
            return p * x * getattr(sys.modules[__name__], "OWN")

        OWN = 2.0
    """,
}


@pytest.mark.parametrize("name", ["relative", "attribute", "by_text", "by_its_name"])
def test_modules_that_a_stage_imports_count(name, tmp_path, monkeypatch):
    (tmp_path / "ppfunc_tests_package").mkdir()
    for file, text in PACKAGE.items():
        (tmp_path / "ppfunc_tests_package" / f"{file}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    stages, config = (importlib.import_module(f"ppfunc_tests_package.{m}") for m in ("stages", "config"))
    step = step_of(getattr(stages, name))
    assert step(*GIVEN)[0] == step(*GIVEN)[0] == 4
    config.FACTOR = stages.OWN = 3.0
    assert step(*GIVEN)[0] == step(*GIVEN)[0] == 9
    assert step.cache_info().misses == 2
    for each in [m for m in sys.modules if m.startswith("ppfunc_tests_package")]:
        del sys.modules[each]


def test_tensors_that_are_replaced_are_not_kept():
    held = SimpleNamespace(table=torch.ones(2))
    step, kept = step_of(lambda p, x: p * x * held.table, engine=functional), []
    for n in range(4):
        kept.append(weakref.ref(held.table))
        assert step(*GIVEN)[0] == (n + 1) ** 2
        held.table = torch.full((2,), n + 2.0)
    step(*GIVEN)
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_code_that_is_replaced_counts_and_modules_that_it_imports(monkeypatch):
    """Notebooks that reload modules replace the code of functions."""
    config = ModuleType("ppfunc_tests_config")
    monkeypatch.setitem(sys.modules, config.__name__, config)
    config.__file__, config.FACTOR = __file__, 3.0

    def first(p, x):
        return p * x

    def second(p, x):
        from ppfunc_tests_config import FACTOR

        return p * x * FACTOR

    step = step_of(first)
    assert step(*GIVEN)[0] == 1
    first.__code__ = second.__code__
    assert step(*GIVEN)[0] == 9
    config.FACTOR = 2.0
    assert step(*GIVEN)[0] == 4


INSTALLED = """
import logging
from torch import nn, zeros

class Makes(dict):
    def __getitem__(self, key):
        return nn.Linear(2, 2)

logger, makes, FACTOR, OTHERS = logging.getLogger(__name__), Makes(a=1), 2.0, {"registry": [3.0]}

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.act, self.made, self.is_causal = {"k": 1.0}, makes["a"], makes, True

    def helper(self, x):
        logger.warning, OTHERS, makes, self.made
        return self.act(scaled(x, self.config))

    def forward(self, x):
        self.is_causal = True
        return self.helper(x) if self.is_causal else x

def scaled(x, config):
    return x * config["k"] * FACTOR
"""


def test_of_installed_packages_functions_and_plain_values_count(tmp_path, monkeypatch):
    """Libraries of models lead from each class to all of them; some of their dictionaries make modules."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "ppfunc_tests_installed.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    package = importlib.import_module("ppfunc_tests_installed")
    model, x = nn.Sequential(package.Base(), nn.Linear(2, 2)), torch.ones(4, 2)
    watch = Watch(model)
    paths = [*watch.state().values]
    assert (
        watch.state()
        and watch._look.unchanged()
        and not any("OTHERS" in path or "logger" in path for path in paths)
    )
    for form in ("split", "modules"):
        if form == "split":
            split = pp.split(model, x[:2], at=["1"])
            step, params = pp.value_and_grad(split, squared, pp.gpipe(2, 2)), split.params
        else:
            stages = [pp.stage_from_module(part) for part in model]
            step = pp.value_and_grad([stage.fn for stage in stages], squared, pp.gpipe(2, 2))
            params = {n: stage.params for n, stage in enumerate(stages)}
        for change in (lambda: None, lambda: None, lambda: setattr(package, "FACTOR", package.FACTOR + 1)):
            change()
            assert abs(step(params, x, x)[0] - squared(model(x), x)) < 1e-6
        assert step.cache_info().misses == 2


def test_a_stage_that_reads_the_shape_of_a_tensor_is_served():
    """Its module keeps an attribute of this name."""

    class Keeps(nn.Linear):
        def forward(self, x):
            self.shape = x.shape
            return super().forward(x)

    stage = pp.stage_from_module(Keeps(WIDTH, WIDTH))
    step = step_of(lambda p, x: stage.fn(p, x).view(x.shape))
    assert step({0: stage.params}, torch.ones(2, WIDTH), torch.ones(2, WIDTH))[0].isfinite()


def test_a_split_is_traced_once_for_its_own_inputs(monkeypatch):
    traces, trace = [], cut.trace
    monkeypatch.setattr(cut, "trace", lambda *args: traces.append(args) or trace(*args))
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    split = pp.split(made(), x[:2], at=["1"])
    pp.value_and_grad(split, squared, pp.gpipe(2, 2))(split.params, x, x)
    assert not traces  # the split has made its own


def test_getattr_of_a_constant_names_one_attribute():
    """Of names that code puts together all attributes count."""

    class Holder:
        def __init__(self):
            self.factor, self.history, self.rows = 2.0, [], [*range(300_000)]

        def named(self, p, x):
            return p * x * getattr(self, "factor", 1.0)

        def computed(self, p, x):
            return p * x * getattr(self, f"fac{'tor'}")

    step = step_of((holder := Holder()).named)
    for n in range(3):
        holder.history.append(n)
        assert step(*GIVEN)[0] == 4
    assert step.cache_info().misses == 1
    holder.rows.clear()
    step = step_of(holder.computed)
    for factor in (2.0, 3.0):
        holder.factor = factor
        assert step(*GIVEN)[0] == factor**2


@every
def test_hooks_of_all_modules_count(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    split = pp.split(model, x[:2], at=["1"])
    step = pp.value_and_grad(split, squared, pp.gpipe(2, 2), engine=engine)
    target, register = torch.zeros(4, 1, dtype=torch.float64), nn.modules.module.register_module_forward_hook
    for hooked in (False, True, False):
        with register(lambda module, args, y: 2 * y) if hooked else nullcontext():
            want = squared(model(x), target).detach()
            torch.testing.assert_close(step(split.params, x, target)[0], want)


@every
def test_modes_count_once(engine):
    """A function mode was seen by the trace, and by the program again."""
    step = pp.value_and_grad([lambda p, x: torch.tanh(p * x)], squared, pp.gpipe(1, 2), engine=engine)
    x, w = torch.randn(4, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    for mode in (nullcontext(), Twice(), nullcontext(), Twice()):
        with mode:
            got, _ = step({0: w}, x, x)
            want = squared(torch.tanh(w * x), x)
        torch.testing.assert_close(got, want)
    assert step.cache_info().misses == 2
    before, outside = ambient(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if outside is torch.float32 else torch.float32)
        assert ambient() != before
    finally:
        torch.set_default_dtype(outside)


def test_a_split_has_the_same_bits_after_hvp():
    """It was traced under the mode of the products."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    grads = []
    for products in (True, False):
        split = pp.split(model, x[:2], at=["2"])
        if products:
            pp.hvp(split, squared, pp.gpipe(2, 2))(split.params, split.params, x, x)
        grads.append(pp.value_and_grad(split, squared, pp.gpipe(2, 2))(split.params, x, x)[1])
    one, other = grads
    assert all(torch.equal(one[s][name], other[s][name]) for s in one for name in one[s])


# -- what is refused

LOG_T = torch.zeros((), dtype=torch.float64, requires_grad=True)
HISTORY = {"leaf": lambda: LOG_T, "history": lambda: LOG_T.exp(), "view": lambda: LOG_T.view(1)}


@every
@pytest.mark.parametrize("kind", HISTORY)
@pytest.mark.parametrize("place", ["stage", "loss", "attribute"])
def test_a_gradient_that_would_be_lost_is_refused(engine, kind, place):
    captured, part = HISTORY[kind](), Part()
    stage = pp.stage_from_module(part, constants=True)
    fn, loss, who = stage.fn, squared, "stage 0: .*pass it in params"
    if place == "stage":
        fn = lambda p, x: stage.fn(p, x) * captured  # noqa: E731
    elif place == "loss":
        loss = lambda y, t: squared(y / captured, t)  # noqa: E731
        who = r"the loss: .*return.* Output\(y, loss=\.\.\.\)"
    else:
        part.table = captured
    step = pp.value_and_grad([fn], loss, pp.gpipe(1, 2), engine=engine)
    with pytest.raises(StageError, match=who.replace("return.*", ".*")):
        step({0: stage.params}, *[torch.ones(4, WIDTH, dtype=torch.float64)] * 2)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.auxiliary = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), 0.0
        self.every = []

    def forward(self, x):
        y = self.linear(x)
        self.auxiliary = (y**2).mean()
        self.every.append(self.auxiliary)
        return self.changed(y)

    def changed(self, y):
        return y + 0 * self.auxiliary  # within the call

    def penalty(self):
        return self.auxiliary


KEPT = {}
COUNTS = [0]


def keeps(y):
    KEPT["y"] = y.detach()
    return y


def counts(y):
    COUNTS[0] += 1
    return y * COUNTS[0]


LEAVE = {"a tensor in KEPT": keeps, r"COUNTS\[0\] from": counts}


@every
@pytest.mark.parametrize("what", LEAVE)
@pytest.mark.parametrize("place", ["stage", "loss", "hook", "split"])
def test_what_a_stage_leaves_behind_is_refused(engine, what, place):
    KEPT.clear()
    leaves, model, loss, x = LEAVE[what], made(), squared, torch.ones(4, WIDTH, dtype=torch.float64)
    if place == "loss":
        loss = lambda y, t: squared(leaves(y), t)  # noqa: E731
    elif place != "stage":
        model[0].register_forward_hook(lambda module, args, y: leaves(y))
    with pytest.raises(StageError, match=what):
        stages, params = pipeline(model, "split" if place == "split" else "module")
        if place == "stage":
            first = stages[0]
            stages[0] = lambda p, x: leaves(first(p, x))
        pp.value_and_grad(stages, loss, pp.gpipe(2, 2), engine=engine)(params, x, x)


READS_OF_A_CALL = {
    "an attribute": lambda model: model.auxiliary,
    "a list": lambda model: sum(model.every),
    "a method": lambda model: model.penalty(),
}


@every
@pytest.mark.parametrize("what", READS_OF_A_CALL)
@pytest.mark.parametrize("form", ["split", "module"])
def test_a_loss_that_reads_what_a_call_sets_is_refused(engine, what, form):
    model, x = nn.Sequential(Auxiliary(), Part()), torch.ones(4, WIDTH, dtype=torch.float64)
    stages, params = pipeline(model, form)
    loss = lambda y, t: squared(y, t) + READS_OF_A_CALL[what](model[0])  # noqa: E731
    step = pp.value_and_grad(stages, loss, pp.gpipe(2, 2), engine=engine)
    with pytest.raises(
        StageError, match="the loss: it reads the attribute (auxiliary|every), which a module"
    ):
        step(params, x, x)


@pytest.mark.parametrize("name", ["auxiliary", "every"])
def test_a_call_by_hand_leaves_a_tensor(name):
    """The stage reads what its own call has set, which no later step sets."""
    model, x = Auxiliary(), torch.ones(4, WIDTH, dtype=torch.float64)

    def stage(p, x):
        y = torch.func.functional_call(model, p, (x,))
        return y + (model.auxiliary if name == "auxiliary" else model.every[-1])

    params = {n: p.detach() for n, p in model.named_parameters()}
    with pytest.raises(StageError, match=r"stage 0: it leaves a tensor in model\.(auxiliary|every\[0\])"):
        pp.value_and_grad([stage], squared, pp.gpipe(1, 2))({0: params}, x, x)


def reads_what_is_refused():
    """Return stages that a program cannot follow, with the error that names it."""
    counter, entries, table = itertools.count(1), iter([1.0, 2.0, 3.0]), torch.ones(2, dtype=torch.float64)
    name, phase = "SCALE", SimpleNamespace(name="first")

    def turns(p, x):
        phase.name = "second" if phase.name == "first" else "first"
        return p * x * len(phase.name)

    return {
        "a count": (lambda p, x: p * x * next(counter), ValueError, "read counter, a count"),
        "an iterator": (lambda p, x: p * x * next(entries), ValueError, "read entries, a list_iterator"),
        "globals": (lambda p, x: p * x * globals()[name], ValueError, r"calls globals\(\)"),
        "eval": (lambda p, x: p * x * eval(name), ValueError, r"calls eval\(\)"),
        "a text": (turns, StageError, "it changes phase.name from 'first'"),
        "numbers": (lambda p, x: p * x * table.tolist()[0], StageError, r"Tensor\.tolist"),
        "an array": (lambda p, x: p * x * float(table.numpy()[0]), StageError, r"Tensor\.numpy"),
        "an array by numpy": (
            lambda p, x: p * x * float(numpy.asarray(table)[0]), StageError, r"Tensor\.__array__"
        ),
        "an input by dlpack": (
            lambda p, x: p * x * float(numpy.from_dlpack(x)[0, 0]), StageError, r"Tensor\.__dlpack__"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", reads_what_is_refused())
def test_what_no_program_can_follow_is_refused(kind):
    stage, error, text = reads_what_is_refused()[kind]
    with pytest.raises(error, match=text):
        step_of(stage)(*GIVEN)


def test_numbers_of_a_tensor_are_read_anew_by_the_functional_engine():
    table = torch.ones(2, dtype=torch.float64)

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * table.tolist()[0]

    step = step_of(lambda p, x: p * x * table.tolist()[0], engine=functional)
    assert step(*GIVEN)[0] == 1
    table.fill_(2.0)
    assert step(*GIVEN)[0] == 4
    with pytest.raises(StageError, match=r"Tensor\.tolist"):
        pp.split(nn.Sequential(Scaled(2, 2), nn.Linear(2, 2)), torch.ones(2, 2), at=["1"])


# -- ranks


def changed_on(rank, size, name, form, alike):
    """Change a value on one rank, or on all."""
    torch.manual_seed(0)
    model = made()
    stages, params = pipeline(model, form)
    with pp.P2P() as transport:
        step = pp.value_and_grad(stages, squared, pp.gpipe(2, 2), transport)
        mine, x = {rank: params[rank]}, torch.ones(4, WIDTH, dtype=torch.float64)
        losses = [step(mine, x, x)[0].item()]
        if alike or rank == 0:
            CHANGES[name](model, 0.5)
        try:
            losses.append(step(mine, x, x)[0].item())
        except AgreementError as error:
            return str(error)
        model[0].scale = 1.0
        losses.append(step(mine, x, x)[0].item())
        want = [reference(model, squared, x.chunk(2), x.chunk(2))[0].item()]
        assert losses[0] == losses[2] and abs(losses[2] - want[0]) < 1e-12
        return losses


def test_ranks_that_change_a_value_unlike_each_other_raise(two):
    texts = two(changed_on, "float", "split", False)
    assert all("scale = 0.5" in text and "the model reads" in text for text in texts), texts
    one, other = two(changed_on, "float", "split", True)
    assert one == other and one[0] != one[1]


# -- what is found


def test_what_is_watched():
    """Values count, equal ones are the same; attributes that no code names do not count."""
    config = SimpleNamespace(k=1.0, unread=0)
    numbers = {"a": [1, 2]}

    @functools.lru_cache
    def cached(x):
        return x * SCALE

    class Callable:
        size = 1

        def __call__(self, x):
            return self.times(x) * self.size

        def times(self, x):
            return x * config.k + numbers["a"][0]

    watch = Watch(functools.partial(lambda f, x, *, by=2: cached(f(x)) * by, Callable()))
    first = watch.state()
    config.unread += 1
    numbers["a"] = [1, 2]
    assert watch.state() is first
    for change, back, text in (
        (lambda: setattr(config, "k", 2.0), lambda: setattr(config, "k", 1.0), "config.k = 2.0"),
        (lambda: numbers["a"].append(3), lambda: numbers["a"].pop(), "numbers['a'][2] = 3"),
        (lambda: setattr(Callable, "size", 2), lambda: setattr(Callable, "size", 1), "args[0].size = 2"),
        (lambda: change_global(None, 2), lambda: change_global(None, 0.5), "SCALE = 4.0"),
        (lambda: setattr(config, "k", True), lambda: setattr(config, "k", 1.0), "config.k = True"),
    ):
        change()
        assert changes(first, watch.state()) == [text]
        back()
        assert watch.state() is first


# -- random models


def test_random_models_with_values_that_change(pytestconfig):
    for seed in range(300 if pytestconfig.getoption("--large") else 4):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        form, engine = draw.choice(["split", "module", "function"]), draw.choice(ENGINES)
        model = nn.Sequential(*(Part() for _ in range(2)))
        loss = draw.choice([squared, squared_and_settings])
        stages, params = pipeline(model, form)
        step = pp.value_and_grad(stages, loss, pp.gpipe(2, 2), engine=engine)
        for _ in range(4):
            require_same(step, model, loss, params, form, draw.choices([2, 3], k=2))
            for name in draw.sample(sorted(CHANGES), draw.randint(0, 2)):
                CHANGES[name](draw.choice([model, model[::-1]]), draw.choice([0.5, 1.0, 1.5]))


def test_random_functions_with_values_that_change(pytestconfig):
    """Each step has the loss and the gradient of the Python that it was made of, or is refused."""
    for seed in range(500 if pytestconfig.getoption("--large") else 10):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        kinds = {name: each for name, each in reads_each_kind().items() if "context" not in name}
        names = draw.sample(sorted(kinds), draw.randint(1, 4))
        parts = [kinds[name] for name in names]
        engine, ranks = draw.choice([graph, graph, *ENGINES]), draw.randint(1, 2)

        def stage(p, x, parts=parts):
            for part, _ in parts:
                x = torch.tanh(part(p, x))
            return x

        step = pp.value_and_grad([stage] * ranks, squared, pp.gpipe(ranks, 2), engine=engine)
        for _ in range(draw.randint(3, 5)):
            w = torch.rand((), dtype=torch.float64, requires_grad=True)
            x, t = torch.randn(2, 4, 3, dtype=torch.float64)
            got, grads = step({n: w.detach().clone() for n in range(ranks)}, x, t)
            want = 0.0
            for a, b in zip(x.chunk(2), t.chunk(2), strict=True):
                y = stage(w, stage(w, a)) if ranks == 2 else stage(w, a)
                want = want + squared(y, b) / 2
            want.backward()
            torch.testing.assert_close(
                (got, sum(grads.values())), (want.detach(), w.grad), msg=f"{seed} {names}"
            )
            for _, change in draw.sample(parts, draw.randint(0, len(parts))):
                change()


def test_of_packages_code_alone_is_followed():
    """A stage with an assertion refers to pytest's functions, and these to all of its session."""

    def stage(p, x):
        assert x.numel() and optree.tree_leaves(p), "nothing is given"
        return p * x

    watch = Watch(stage)
    watch.state()
    found = watch.found.values()
    assert len(found) < 20_000 and not any(isinstance(value, pytest.Session) for _, value in found)


def test_more_than_can_be_compared_is_refused(monkeypatch):
    monkeypatch.setattr("ppfunc.stage.abstract.captures._MOST_VALUES", 100)
    rows = [[n] for n in range(200)]
    with pytest.raises(ValueError, match=r"refer to more than 100 values, such as rows\[.*as arguments"):
        Watch(lambda p, x: p * x * len(rows)).state()


class Factors:
    first = 2.0


class Level(enum.Enum):
    LOW = 1


class Slotted:
    __slots__ = ("__factor", "other")

    def __init__(self):
        self.__factor = 2.0

    def __call__(self):
        return self.__factor

    def change(self):
        self.__factor = 5.0


@dataclasses.dataclass
class Setting:
    factor: float = 2.0


class Named:
    """Reads its attributes by texts."""

    def __init__(self):
        self.name, self.factor = "factor", 2.0

    def stage(self, p, x):
        return p * x * getattr(self, self.name)


class Answers:
    def __init__(self):
        self.table = {"factor": 2.0}

    def __getattr__(self, name):
        return self.table[name]


VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)


def attributes_of_subclasses():
    """Return objects that are more than plain values, entries or numbers."""
    kinds = {base: type("Own", (base,), {}) for base in (dict, list, set, float, str, collections.UserDict)}
    held = {kind.__name__: own() for kind, own in kinds.items()}
    held |= {"enum": Level.LOW, "object": SimpleNamespace(), "class": type("Own", (), {})}
    for each in held.values():
        each.factor = 2.0
    return {
        f"attribute of {name}": (
            lambda p, x, each=each: p * x * each.factor, lambda each=each: setattr(each, "factor", 5.0)
        )
        for name, each in held.items()
    }  # fmt: skip


def entries_of_containers():
    """Return containers of each kind, with an entry that changes."""
    table = {"factor": 2.0}
    held = {
        "a large list": [2.0] * 20_000,
        "a large dict": dict.fromkeys(range(20_000), 2.0),
        "a deque": collections.deque([2.0]),
        "an array": array.array("d", [2.0]),
        "an array of numpy": numpy.array([2.0, 1.0])[::-1][1:],
        "a user's dict": collections.UserDict({0: 2.0}),
        "a chain of maps": collections.ChainMap({}, {0: 2.0}),
    }
    cases = {
        name: (
            lambda p, x, each=each: p * x * float(each[0]), lambda each=each: operator.setitem(each, 0, 5.0)
        )
        for name, each in held.items()
    }  # fmt: skip
    proxy, get = MappingProxyType(table), table.get
    return cases | {
        "a proxy": (lambda p, x: p * x * proxy["factor"], lambda: table.update(factor=5.0)),
        "a method in C": (lambda p, x: p * x * get("factor"), lambda: table.update(factor=5.0)),
    }


def reads_by_texts():
    """Return code that names what it reads by texts."""
    held, setting, named = SimpleNamespace(factor=2.0, inner=SimpleNamespace(factor=2.0)), Setting(), Named()
    own, name, get = type("Own", (), {"factor": 2.0}), "factor", operator.attrgetter("fac" + "tor")
    call = operator.methodcaller("__getattribute__", "factor")

    def by_pattern(p, x):
        match held:
            case SimpleNamespace(factor=factor):
                return p * x * factor

    def by_position(p, x):
        match setting:
            case Setting(factor):
                return p * x * factor

    def by_fields(p, x):
        return functools.reduce(operator.mul, dataclasses.asdict(setting).values(), p * x)

    def by_names(p, x):
        return functools.reduce(operator.mul, vars(setting).values(), p * x)

    def change():
        for each in (held, held.inner, setting, own, named):
            each.factor = 5.0

    inner = operator.attrgetter
    return {
        "attrgetter": (lambda p, x: p * x * get(held), change),
        "attrgetter of two names": (lambda p, x: p * x * inner("inner.factor")(held), change),
        "methodcaller": (lambda p, x: p * x * call(held), change),
        "getattr of a class": (lambda p, x: p * x * getattr(own, name), change),
        "getattr in a method": (named.stage, change),
        "pattern": (by_pattern, change),
        "pattern by position": (by_position, change),
        "asdict": (by_fields, change),
        "vars": (by_names, change),
    }


def kept_elsewhere():
    """Return what holds a value in another way."""
    slotted, held = Slotted(), Named()
    made, ordered = collections.defaultdict(lambda: 2.0), collections.OrderedDict(a=2.0, b=3.0)
    pairs, method = {(0, 1): 0, (0, 2): 0}, [(2.0).__mul__]

    def body(p, x):
        class Local:
            factor = SCALE

        return p * x * Local.factor

    def in_order(p, x):
        for value in ordered.values():
            x = x * p * value + value
        return x

    def another_pair():
        pairs.clear()
        pairs.update({(0, 1): 0, (0, 5): 0})

    weak, by_key = weakref.ref(held), weakref.WeakKeyDictionary({held: 2.0})
    weak_set = weakref.WeakSet([held])
    meta = type("Meta", (type,), {"inner": 2.0, "factor": property(lambda cls: cls.inner)})
    of_meta, answers = meta("OfMeta", (), {}), Answers()

    return {
        "a weak reference": (lambda p, x: p * x * weak().factor, lambda: setattr(held, "factor", 5.0)),
        "a weak key": (lambda p, x: p * x * by_key[held], lambda: by_key.update({held: 5.0})),
        "a weak set": (
            lambda p, x: p * x * sum(e.factor for e in weak_set), lambda: setattr(held, "factor", 5.0)
        ),
        "a metaclass": (lambda p, x: p * x * of_meta.factor, lambda: setattr(meta, "inner", 5.0)),
        "a table behind __getattr__": (
            lambda p, x: p * x * answers.factor, lambda: answers.table.update(factor=5.0)
        ),
        "slots": (lambda p, x: p * x * slotted(), slotted.change),
        "another __dict__": (
            lambda p, x: p * x * held.factor, lambda: setattr(held, "__dict__", {"factor": 5.0})
        ),
        "a variable of a context": (lambda p, x: p * x * VARIABLE.get(), lambda: VARIABLE.set(5.0)),
        "a default": (
            lambda p, x: p * x * made.default_factory(), lambda: setattr(made, "default_factory", lambda: 5.0)
        ),
        "the body of a class": (body, lambda: change_global(None, 2.5)),
        "an order": (in_order, lambda: ordered.move_to_end("a")),
        "keys": (lambda p, x: p * x * sum(b for _, b in pairs), another_pair),
        "another method in C": (
            lambda p, x: p * x * method[0](3.0), lambda: operator.setitem(method, 0, (2.0).__add__)
        ),
    }  # fmt: skip


def reads_each_kind():
    """Return stages and what changes the value that each reads."""
    functions, pairs = [torch.relu], {(0, 1): 2.0, (1, 0): 3.0}
    ordered, noted = {"a": 2.0, "b": 3.0}, {"scale": 2.0, "last": None}

    def in_order(p, x):
        for value in ordered.values():
            x = x * p * value + value
        return x

    def notes(p, x):
        noted["last"] = x.shape
        return p * x * noted["scale"]

    return {
        "function in C": (lambda p, x: functions[0](p * x), lambda: functions.__setitem__(0, torch.tanh)),
        "keys of pairs": (
            lambda p, x: p * x * pairs[0, 1] + pairs[1, 0],
            lambda: pairs.update({(1, 0): 5.0}),
        ),
        "order": (in_order, lambda: ordered.update(a=ordered.pop("a"))),
        "entry beside a note": (notes, lambda: noted.update(scale=5.0)),
        "class": (lambda p, x: p * x * Factors.first, lambda: setattr(Factors, "first", 5.0)),
        **attributes_of_subclasses(), **entries_of_containers(), **reads_by_texts(), **kept_elsewhere(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", reads_each_kind())
def test_values_of_every_kind_are_those_of_the_beginning(kind, monkeypatch):
    """No step is traced anew where none has changed."""
    monkeypatch.setattr(Factors, "first", 2.0)
    VARIABLE.set(2.0)
    stage, change = reads_each_kind()[kind]
    step = pp.value_and_grad([stage], squared, pp.gpipe(1, 2))
    w, x = torch.full((), 0.5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for n in range(4):
        if n == 2:
            change()
        want = sum(squared(stage(w, part), 0 * part) / 2 for part in x.chunk(2))
        torch.testing.assert_close(step({0: w}, x, 0 * x)[0], want, rtol=1e-12, atol=1e-12)
    assert step.cache_info().misses == 2


def test_a_class_of_torch_is_known_by_identity():
    """Its own method for references to its objects is not called for a reference to the class."""
    held = {"kind": torch.UntypedStorage, "factor": 2.0}

    def stage(p, x):
        return p * x * held["factor"] if held["kind"] is not None else x

    step = step_of(stage)
    assert step(*GIVEN)[0] == 4
    held["factor"] = 3.0
    assert step(*GIVEN)[0] == 9

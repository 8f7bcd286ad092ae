"""Models split by the names of their modules: the stages in turn are the whole model."""

from __future__ import annotations

import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ppfunc as pp
from ppfunc.parallel.partition import Partition
from ppfunc.stage import StageError
from ppfunc.stage.process import process_lock
from tests.covering import pairwise
from tests.splitter import modules as m


def made(kind, **kwargs):
    torch.manual_seed(0)
    model = kind(**kwargs)
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.double()
    model.double()
    if isinstance(model, m.Autocast):
        model.b.float()
    return model


WRITTEN_ACROSS_B = m.InPlaceThroughAView, m.InPlaceAcrossACut, m.FilledInTwoStages


@pytest.mark.parametrize("kind, at, training", pairwise(m.ZOO, ("b", "c", "bc"), (True, False)))
def test_stages_in_turn_are_the_whole_model(kind, at, training):
    model = made(kind).train(training)
    if kind in WRITTEN_ACROSS_B and "b" in at:
        with pytest.raises(
            StageError,
            match=r"its stage 1 writes into memory that stage 0 has made, called at .*modules.py:\d+\."
            r" Instead: cut elsewhere, ppfunc.split\(model, args, at=names\)",
        ):
            pp.split(model, m.rows(), at=list(at))
        return
    parts = pp.split(model, m.rows(), at=list(at))
    m.require_equal(model, parts, m.rows())
    m.require_equal(model, parts, m.rows(7))


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 11, shape)


def translation(rows: int = 2, time: int = 5) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, time, dtype=torch.int64)
    mask[0, -1] = 0
    return {"ids": ids(rows, time), "decoder_ids": ids(rows, time + 1), "mask": mask}


CUTS = {
    "names": ["encoder.1", "decoder.0", "decoder.1"],
    "inside a layer": ["encoder.1.linear1", "decoder.0.multihead_attn", "decoder.1.norm2"],
    "number": 4,
    "partition": Partition((0, 1, 3, 4)),
}


@pytest.mark.parametrize("cut", CUTS)
def test_an_encoder_and_decoder_with_tied_embeddings(cut):
    at, training = CUTS[cut], cut in ("names", "partition")
    model = made(m.EncoderDecoder).train(training)
    parts = pp.split(model, kwargs=translation(), at=at)
    for inputs in (translation(), translation(3, 4), translation(1, 7)):
        m.require_equal(model, parts, inputs)
    assert "embed.weight" in parts.tied and not parts.unused
    stages = [{n for n in tree} for tree in parts.params.values()]
    assert set().union(*stages) == {name for name, _ in model.named_parameters()}
    assert parts.tied == {
        name: tuple((s, name) for s, names in enumerate(stages) if name in names)
        for name in (n for n, _ in model.named_parameters())
        if sum(name in names for names in stages) > 1
    }


@cache
def split_encoder_decoder():
    """One split for every schedule, which then share what is traced."""
    model = made(m.EncoderDecoder).eval()
    return model, pp.split(model, kwargs=translation(), at=["encoder.1", "decoder.0", "decoder.1"])


def scalar_beside_targets(y, targets):
    return m.scalar(y) + 0 * targets.sum()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "build, engine",
    [(pp.dualpipev, pp.engines.graph), (pp.zbv, pp.engines.functional), (pp.one_f_one_b, pp.engines.eager)],
)
def test_schedules_give_the_gradients_of_the_whole_model(build, engine):
    model, parts = split_encoder_decoder()
    schedule = build(4, 4) if build is pp.one_f_one_b else build(2, 4)
    step = pp.value_and_grad(parts, scalar_beside_targets, schedule, engine=engine)
    for length in (5, 3):
        inputs = translation(8, length)
        loss, grads = step(parts.params, inputs, torch.zeros(8))
        each = [m.whole(model, {k: v[2 * i : 2 * i + 2] for k, v in inputs.items()}) for i in range(4)]
        torch.testing.assert_close(loss, sum(m.scalar(result).detach() for _, _, result in each) / 4)
        for name, grad in (item for tree in grads.values() for item in tree.items()):
            torch.testing.assert_close(
                grad, sum(want[name] for want, _, _ in each) / 4, rtol=1e-12, atol=1e-12
            )


def test_strides_are_those_of_the_whole_model_though_messages_are_contiguous():
    model = made(m.StridesOfATranspose)
    x = m.rows(6)
    parts = pp.split(model, x[:3], at=["b", "c"])
    step = pp.value_and_grad(
        parts.stages, lambda y, t: (y * t).sum(), pp.with_skips(pp.gpipe(3, 2), parts.skips)
    )
    loss, _ = step(parts.params, x, x)
    torch.testing.assert_close(loss, sum((model(half) * half).sum().detach() for half in x.chunk(2)) / 2)


def test_a_state_goes_through_a_step_and_into_the_model():
    model = made(m.BatchNorms)
    parts = pp.split(model, m.rows(), at=["b", "c"])
    assert list(parts.state) == [0, 1]
    step = pp.value_and_grad(parts.stages, lambda y, t: (y * t).sum(), pp.one_f_one_b(3, 2), has_aux=True)
    x = m.rows(8)
    result = step(parts.params, x, x, state=parts.state)
    aux = result.aux
    parts.put_back(parts.params, state=aux.state)
    assert model.first.num_batches_tracked == 2
    reference = made(m.BatchNorms)
    with torch.no_grad():
        for half in x.chunk(2):
            reference(half)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-12)


def test_a_split_in_evaluation_has_no_state_and_training_it_is_refused():
    model = made(m.BatchNorms).eval()
    parts = pp.split(model, m.rows(), at=["b"])
    assert parts.state == {}
    m.require_equal(model, parts, m.rows())
    model.train()
    with pytest.raises(
        StageError,
        match=(
            "stage 0: it writes into the buffer first.num_batches_tracked .* split with inputs of this form,"
            " in this mode"
        ),
    ):
        m.in_turn(parts, m.rows())


def test_classes_of_outputs_come_to_the_loss_and_to_the_caller():
    model = made(m.ClassOfOutputs)
    x = m.rows(4)
    parts = pp.split(model, (x[:2],), {"offset": x[:2], "twice": True, "scale": None}, at=["b", "c"])

    def loss(y, t):
        assert type(y) is m.Answer
        with pytest.raises(AttributeError, match="returned a Cache, which a split does not keep; got a"):
            y.cache.tensor  # noqa: B018
        return (y.logits * t).sum()

    step = pp.value_and_grad(parts.stages, loss, pp.with_skips(pp.one_f_one_b(3, 2), parts.skips))
    value, _ = step(parts.params, (x, {"offset": x}), x)
    want = model(x, offset=x, twice=True).logits
    torch.testing.assert_close(value, (want * x).sum() / 2)
    run = pp.evaluate(parts.stages, None, pp.with_skips(pp.gpipe(3, 2), parts.skips), return_outputs=True)
    torch.testing.assert_close(run(parts.params, (x, {"offset": x})).logits, want)


def test_inputs_have_the_form_of_the_arguments():
    model = made(m.ClassOfOutputs)
    x = m.rows()
    want = model(x).logits
    for args, kwargs, given in (
        (x, None, x),
        ((x,), None, (x,)),
        ({"x": x}, None, {"x": x}),
        ((), {"x": x}, {"x": x}),
        ((x,), {"scale": 3}, (x,)),
    ):
        parts = pp.split(model, args, kwargs, at=["b"])
        assert torch.equal(m.in_turn(parts, given)[0].logits, want)
    parts = pp.split(model, {"x": x, "offset": x}, at=["b"])
    for wrong in (x, (x, x)):
        with pytest.raises(ValueError, match=r"inputs: got .*, expected \{'x': tensor, 'offset': tensor\}"):
            m.in_turn(parts, wrong)
    for wrong in ({"x": x, "offest": x}, {"x": x, "offset": (x,)}):
        with pytest.raises(
            StageError,
            match=r"where the split had {'x': float\d+\[.*\], 'offset': float\d+\[.*\]}, it r",
        ):
            m.in_turn(parts, wrong)
    assert torch.equal(m.in_turn(parts, {"x": x})[0].logits, want)
    assert torch.equal(m.in_turn(parts, {"x": x, "offset": None})[0].logits, want)


def test_masks_and_tables_never_cross():
    model = made(m.Decoder, layers=4)
    inputs = {"ids": ids(2, 6), "mask": torch.ones(2, 6, dtype=torch.int64)}
    parts = pp.split(model, {"ids": inputs["ids"]}, at=4)
    assert parts.skips == ()
    assert m.in_turn(parts, {"ids": inputs["ids"]})[2] == [(2, 6, m.D)] * 3
    parts = pp.split(model, inputs, at=4)
    assert parts.skips == ((0, 2), (0, 3))  # the mask of integers
    assert sorted(m.in_turn(parts, inputs)[2]) == [(2, 6)] * 3 + [(2, 6, m.D)] * 3
    m.require_equal(model, parts, inputs)


def test_a_number_of_stages_is_balanced():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 48), nn.Linear(48, 8))
    parts = pp.split(model, torch.zeros(2, 8), at=3)
    assert parts.at == ("5", "7") or parts.at == ("6", "7")
    assert pp.split(model, torch.zeros(2, 8), at=1).at == ()
    wide = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 512), nn.Linear(512, 8))
    assert pp.split(wide, torch.zeros(2, 8), at=2).at == ("4",)  # by products: elements alone would say 3
    assert pp.split(model, torch.zeros(2, 8), at=Partition((0, 2, 8))).at == ("2",)
    assert pp.split(made(m.Plain), m.rows(), at=3).at == ("b", "c")  # no containers: any module


def test_a_model_without_so_many_layers_is_refused():
    with pytest.raises(ValueError, match="at: got 5 stages, the model calls 3 modules"):
        pp.split(made(m.Plain), m.rows(), at=5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(ValueError, match=r"got a partition of 4 layers; the model has 3 \(0 to 2\)"):
        pp.split(model, torch.zeros(2, 4), at=Partition((0, 2, 4)))
    with pytest.raises(ValueError, match="at: got True"):
        pp.split(model, torch.zeros(2, 4), at=True)


def test_names_that_cannot_be_cut_at_are_refused():
    model = made(m.Frozen)
    for at, message in (
        (["bb"], "at: got 'bb', which is no module of the model; the nearest are b"),
        (["5"], "at: got '5', which is no module of the model; its outermost modules are a, b, c"),
        (["unused"], "the module unused is not called"),
        (["c", "b"], r"expected the order in which they are called, \['b', 'c'\]"),
        (["b", "b"], "expected each module once"),
        (["a"], "the module a begins at the first operator of the model"),
        ("b", "expected a list of names"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            pp.split(model, m.rows(), at=at)
    nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Identity()), nn.Identity())
    with pytest.raises(ValueError, match="the module 1.0 begins at the same operator as 1"):
        pp.split(nested, torch.zeros(2, 4), at=["1", "1.0"])
    with pytest.raises(ValueError, match="the module 2 is not called, or calls no operator"):
        pp.split(nested, torch.zeros(2, 4), at=["2"])


@pytest.mark.parametrize("kind", [m.WritesItsInput, m.AddsToItsIntegers])
@pytest.mark.parametrize("at", [["b"], ["c"], ["b", "c"]], ids=lambda at: "".join(at))
def test_a_model_that_writes_into_its_input_is_right_and_leaves_that_of_the_step(kind, at):
    model = made(kind)
    x = m.rows(6) if kind is m.WritesItsInput else torch.randint(5, (6, m.D))
    parts, before = pp.split(model, x[:2].clone(), at=at), x.clone()
    step = pp.value_and_grad(parts, lambda y, t: m.scalar(y) + 0 * t.sum(), pp.gpipe(len(at) + 1, 1))
    loss, grads = step(parts.params, x, m.rows(6))
    assert torch.equal(x, before)
    want, _, result = m.whole(model, x.clone())
    torch.testing.assert_close(loss, m.scalar(result).detach())
    torch.testing.assert_close(m.added_up(grads), want, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_inputs_are_those_of_functions_and_kernels_that_see_them_alone():
    class OnTheInput(m.Base):
        def forward(self, x):
            return self.c(self.b(self.a(m.Tripled.apply(x, 3.0))))

    class FrozenEncoder(m.Encoder):
        def forward(self, x):
            return super().forward(x * 1)[:, 0]

    for kind in (OnTheInput, FrozenEncoder):
        model = made(kind).eval()
        if kind is FrozenEncoder:
            model.a.requires_grad_(False)
            model.b.requires_grad_(False)
        x = m.rows(3)
        parts = pp.split(model, x, at=["b", "c"])
        step = pp.value_and_grad(parts, lambda y, t: m.scalar(y) + 0 * t.sum(), pp.gpipe(3, 1), argnums=1)
        moving = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(m.scalar(model(moving)), moving)
        torch.testing.assert_close(step(parts.params, x, x)[1], want, rtol=1e-12, atol=1e-12)


def test_masks_of_the_form_of_an_activation_do_not_cross():
    parts = pp.split(made(m.MasksOfTheFormOfActivations), m.rows(), at=["b", "c"])
    assert parts.skips == () and m.in_turn(parts, m.rows(5))[2] == [(5, m.D)] * 2


def test_numbers_of_the_model_are_those_of_the_moment_in_which_a_step_is_made():
    class Scaled(m.Base):
        def __init__(self):
            super().__init__()
            self.factor, self.config = 2.0, SimpleNamespace(twice=False)

        def forward(self, x):
            return self.c(self.b(self.a(x))) * self.factor * (2 if self.config.twice else 1)

    model, x = made(Scaled), m.rows()
    parts = pp.split(model, x, at=["b"])
    outputs = [m.in_turn(parts, x)[0]]
    model.factor = 3.0
    outputs.append(m.in_turn(parts, x)[0])
    model.config.twice = True
    outputs.append(m.in_turn(parts, x)[0])
    torch.testing.assert_close(outputs[1], outputs[0] * 1.5)
    torch.testing.assert_close(outputs[2], outputs[0] * 3)


def test_parameters_that_share_memory_and_are_not_one_are_refused():
    model = made(m.Plain)
    model.c.weight = nn.Parameter(model.a.weight.data)
    with pytest.raises(
        ValueError, match="a.weight and c.weight are two parameters that share memory; tie them as one"
    ):
        pp.split(model, m.rows(), at=["b"])
    both = torch.randn(2 * m.D, m.D, dtype=torch.float64)
    model.a.weight, model.c.weight = (nn.Parameter(part) for part in both.chunk(2))
    m.require_equal(model, pp.split(model, m.rows(), at=["b"]), m.rows())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of scripts
def test_modules_that_cannot_be_traced_are_refused_by_name():
    for wrap, message in (
        (torch.jit.script, "cannot be traced; give the module from before"),
        (torch.compile, "is compiled; give the"),
    ):
        model = made(m.Plain)
        model.b = wrap(model.b)
        with pytest.raises(TypeError, match=f"b: got .*Module, which {message}"):
            pp.split(model, m.rows(), at=["c"])
    model = made(m.Plain)
    model.b.compile()
    with pytest.raises(TypeError, match="b: got Linear, which is compiled"):
        pp.split(model, m.rows(), at=["c"])


@pytest.mark.parametrize(
    "what, name", [("module", "backward_hook"), ("module", "backward_pre_hook"), ("parameter", "hook"),
                   ("parameter", "post_accumulate_grad_hook")]
)  # fmt: skip
def test_backward_hooks_are_refused(what, name):
    model = made(m.Plain)
    owner, prefix = (model.b, "register_full_") if what == "module" else (model.b.weight, "register_")
    getattr(owner, prefix + name)(print)
    with pytest.raises(StageError, match=f"its {what} b.* has a backward hook, which no stage would call"):
        pp.split(model, m.rows(), at=["b"])


class TwoCalls(m.Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(m.D)

    def forward(self, x):
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


class DependsOnValues(m.Base):
    def forward(self, x):
        h = self.a(x)
        return self.c(h) if h.sum() > 0 else self.b(h)


class LooksAtAMaskThatItFills(m.Base):
    def forward(self, x):
        mask = torch.ones(m.D, dtype=x.dtype)
        view = mask[1:]
        view[0] = x[0, 0]
        return self.c(self.b(self.a(x)) * mask) if mask.sum().item() > 0 else self.a(x)


class LooksAtNoise(m.Base):
    def forward(self, x):
        return self.c(self.b(self.a(x))) * torch.ones(m.D, dtype=x.dtype).bernoulli().nonzero().shape[0]


class LooksAtATensorOfItsOwn(m.Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x):
        return self.c(self.b(self.a(x))) * self.scale.item()


class WritesAParameter(m.Base):
    def forward(self, x):
        with torch.no_grad():
            self.b.weight.mul_(0.5)
        return self.c(self.b(self.a(x)))


class HiddenParameter(m.Base):
    def __init__(self):
        super().__init__()
        self.hidden = [torch.ones(m.D, dtype=torch.float64, requires_grad=True)]

    def forward(self, x):
        return self.c(self.b(self.a(x)) * self.hidden[0])


class Seeds(m.Base):
    def forward(self, x):
        h = self.a(x)
        torch.manual_seed(0)
        return self.c(self.b(h))


class DrawsByPython(m.Base):
    def forward(self, x):
        return self.c(self.b(self.a(x)) * (2 if random.random() < 0.5 else 1))


class HooksAGradient(m.Base):
    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda g: 2 * g)
        return self.c(self.b(h))


class DerivesInside(m.Base):
    def forward(self, x):
        h = self.a(x)
        (slope,) = torch.autograd.grad(self.b(h).square().sum(), h, create_graph=True)
        return self.c(slope)


class Data(m.Base):
    def forward(self, x):
        return self.c(self.b(self.a(x)).data)


class EarlyOnTheInput(m.Base):
    def forward(self, x):
        return self.c(self.b(self.a(early(x, 3.0))))


class StridedInTwoStages(m.Base):
    def forward(self, x):
        h = self.a(x)
        h += self.b(x)
        return self.c(h.as_strided(h.shape, h.stride()))


early = m.Tripled.apply


class EarlyReference(m.Base):
    def forward(self, x):
        return self.c(self.b(early(self.a(x), 3.0)))


class Raises(m.Base):
    def forward(self, x):
        return self.c(self.b(self.a(x)) @ x)


CALLED = r", called at .*test_split.py:\d+"
ON_VALUES = rf"its control flow or its shapes depend on the values of tensors \(operator .*{CALLED}\), or it "
EARLY = f"its autograd.Function Tripled is called by a reference taken earlier{CALLED}"
MADE_ELSEWHERE = rf"it reads a tensor of shape \(\d, 4\) that no operator seen here has made{CALLED}.*"
CHANGED = (
    (torch, "manual_seed"), (torch.random, "manual_seed"), (torch.Tensor, "register_hook"),
    (torch.autograd.Function, "apply"), (torch.distributions.Distribution, "_validate_args"),
)  # fmt: skip
REFUSED = {
    TwoCalls: "its buffer norm.num_batches_tracked is written in the stages 0, 1",
    DependsOnValues: ON_VALUES,
    LooksAtAMaskThatItFills: ON_VALUES,
    LooksAtNoise: ON_VALUES,
    LooksAtATensorOfItsOwn: ON_VALUES,
    WritesAParameter: f"it writes into its parameter b.weight{CALLED}",
    HiddenParameter: rf"a tensor of shape \(4,\) that requires a gradient and is no parameter{CALLED}",
    Seeds: f"it seeds the default random generator{CALLED}",
    DrawsByPython: "it draws from the generator of random, ",
    HooksAGradient: rf"it puts a hook onto the gradient of a tensor \(register_hook\){CALLED}",
    DerivesInside: f"{MADE_ELSEWHERE}torch.func",
    Data: f"{MADE_ELSEWHERE}take detach",
    StridedInTwoStages: f"its stage 1 writes into memory that stage 0 has made{CALLED}",
    EarlyOnTheInput: EARLY,
    EarlyReference: EARLY,
    Raises: "it raised RuntimeError at .*test_split.py:.* when it was called without values: ",
}


@pytest.mark.parametrize("kind, message", REFUSED.items())
def test_models_that_cannot_be_split_are_refused_by_name(kind, message):
    model = made(kind)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.default_generator.get_state()
    functions = [vars(owner)[name] for owner, name in CHANGED]
    with pytest.raises(StageError, match=message):
        pp.split(model, torch.zeros(3, m.D, dtype=torch.float64), at=["b"])
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.equal(generator, torch.default_generator.get_state())
    assert [vars(owner)[name] for owner, name in CHANGED] == functions


def test_a_parameter_that_another_mode_reads_is_refused_by_name():
    class InTraining(m.Base):
        def forward(self, x):
            h = self.b(self.a(x))
            return self.c(h) if self.training else h * 2 + self.a(h)

    model = made(InTraining).eval()
    parts = pp.split(model, m.rows(), at=["b"])
    assert set(parts.unused) == {"c.weight", "c.bias"}
    model.train()
    with pytest.raises(
        StageError, match="stage 1: it reads the parameter c.weight .* and did not at the split"
    ):
        m.in_turn(parts, m.rows())


def test_values_that_another_shape_needs_are_refused_by_name():
    class ByLength(m.Base):
        def forward(self, x):
            h = self.a(x)
            g = self.c(self.b(h).relu())
            return g + h if x.shape[0] > 5 else g

    model = made(ByLength)
    parts = pp.split(model, m.rows(2), at=["b", "c"])
    assert parts.skips == ()
    with pytest.raises(
        StageError,
        match=(
            r"stage 2: it takes the value linear.* of shape \[6, 4\], called at .*modules?.*|stage 2: it"
            r" takes the value"
        ),
    ):
        m.in_turn(parts, m.rows(6))
    parts = pp.split(model, m.rows(6), at=["b", "c"])
    assert parts.skips == ((0, 2),)
    m.require_equal(model, parts, m.rows(2))  # an edge less: nothing travels on it


def test_params_of_another_form_are_refused():
    parts = pp.split(made(m.Plain), m.rows(), at=["b"])
    with pytest.raises(
        ValueError, match=r"params of stage 0 of Plain: got \['a.weight'\], expected \['a.bias', 'a.weight'\]"
    ):
        parts.stages[0]({"a.weight": parts.params[0]["a.weight"]}, m.rows())
    with pytest.raises(TypeError, match="stage 0 of the model got 1 arguments after x, expected none"):
        parts.stages[0](parts.params[0], m.rows(), {})


def test_frozen_parameters_get_zeros_and_unused_ones_are_listed():
    model = made(m.Frozen)
    parts = pp.split(model, m.rows(2), at=["b"])
    assert parts.unused == ("unused.weight", "unused.bias")
    step = pp.value_and_grad(parts.stages, lambda y, t: (y * t).sum(), pp.gpipe(2, 2))
    x = m.rows(4)
    _, grads = step(parts.params, x, x)
    assert not grads[1]["b.weight"].any() and grads[1]["b.bias"].any()


def test_the_model_is_left_as_it_was():
    model = made(m.EncoderDecoder)
    tensors = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    modules = {name: (dict(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()}
    pp.split(model, kwargs=translation(), at=3)
    assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == tensors
    assert {
        name: (dict(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()
    } == modules


def test_checkpoints_are_told_and_their_gradients_are_right():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(m.Base):
        def __init__(self, reentrant):
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x):
            return self.c(checkpoint(lambda h: self.b(h).tanh(), self.a(x), use_reentrant=self.reentrant))

    for reentrant in (True, False):
        model = made(Checkpointed, reentrant=reentrant)
        with pytest.warns(UserWarning, match="the model uses torch.utils.checkpoint"):
            parts = pp.split(model, m.rows(), at=["b", "c"])
        x = m.rows()
        want, _, _ = m.whole(made(Checkpointed, reentrant=False), x)
        step = pp.value_and_grad(parts.stages, lambda y, t: m.scalar(y) + 0 * t.sum(), pp.gpipe(3, 1))
        torch.testing.assert_close(m.added_up(step(parts.params, x, x)[1]), want, rtol=1e-12, atol=1e-12)


def test_autocast_around_a_step_is_followed():
    model = made(m.Plain).float()
    x = torch.randn(4, m.D)
    parts = pp.split(model, x[:2], at=["b", "c"])
    step = pp.evaluate(parts.stages, None, pp.gpipe(3, 2), return_outputs=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = step(parts.params, x), model(x).detach()
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, want)
    assert step(parts.params, x).dtype is torch.float32


def test_a_pipe_of_torch_is_refused():
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    model, x = made(m.Plain), m.rows(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pipelining.pipeline(model, (x,), split_spec={"b": pipelining.SplitPoint.BEGINNING})
    with pytest.raises(TypeError, match=r"model: got a Pipe .*, cut already; .* ppfunc.split\(model, "):
        pp.split(pipe, (x,), at=["b"])
    assert pp.split(model, (x,)).at == ("pipe_split() 1",)  # torch has put it there
    with pytest.raises(TypeError, match="at is missing, expected names of modules"):
        pp.split(nn.Linear(m.D, m.D), (x,))


class CutsItself(m.Base):
    def forward(self, x):
        from torch.distributed.pipelining import pipe_split

        h = self.a(x)
        pipe_split()
        h = self.b(h.tanh() + x)
        pipe_split()
        return self.c(h)


def test_a_model_may_cut_itself_by_pipe_split():
    model, x = made(CutsItself), m.rows()
    parts = pp.split(model, x)
    assert parts.at == ("pipe_split() 1", "pipe_split() 2")
    assert [sorted(tree) for tree in parts.params.values()] == [[f"{n}.bias", f"{n}.weight"] for n in "abc"]
    assert torch.equal(m.in_turn(parts, x)[0], model(x))
    other = m.rows(5)
    assert torch.equal(m.in_turn(parts, other)[0], model(other))
    assert pp.split(model, x, at=["b"]).at == ("b",)


def test_threads_split_and_run_at_the_same_time():
    def work(seed: int) -> float:
        model = m.OwnBackward().double()
        parts = pp.split(model, m.rows(2), at=["b", "c"])
        x = torch.ones(seed + 1, m.D, dtype=torch.float64)
        return float((m.in_turn(parts, x)[0] - model(x)).abs().max().detach())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(12))) == [0.0] * 12


def test_a_stage_that_is_traced_waits_for_no_thread_that_waits_for_it():
    """A step traces under the lock of the process; another thread calls a stage of the same split on inputs
    of a new form.
    """
    parts = pp.split(made(m.Plain), m.rows(2), at=["b"])
    done = []

    def run(rows: int) -> None:
        done.append(parts.stages[0](parts.params[0], m.rows(rows))[1][0].shape[0])

    other = threading.Thread(target=run, args=(5,), daemon=True)

    def under_the_lock() -> None:
        with process_lock:
            other.start()
            time.sleep(0.2)  # until the other one waits for this lock
            run(6)

    tracing = threading.Thread(target=under_the_lock, daemon=True)
    tracing.start()
    tracing.join(20)
    assert done[:1] == [6]
    other.join(20)
    assert done == [6, 5]


def test_a_hook_set_after_the_split_is_called_by_old_and_new_steps():
    model, x = made(m.Plain), m.rows(4)
    parts = pp.split(model, x[:2], at=["b", "c"])
    old = pp.evaluate(parts, None, pp.gpipe(3, 2), return_outputs=True)
    before = old(parts.params, x)
    handle = model.b.register_forward_hook(lambda module, args, y: 2 * y)
    for step in (old, pp.evaluate(parts, None, pp.gpipe(3, 2), return_outputs=True)):
        torch.testing.assert_close(step(parts.params, x), model(x))
    handle.remove()
    assert torch.equal(old(parts.params, x), before)
    model.b.forward = lambda x: 3 * x
    torch.testing.assert_close(old(parts.params, x), model(x))
    del model.b.forward
    model.a.register_full_backward_hook(lambda module, gx, gy: None)
    with pytest.raises(StageError, match="its module a has a backward hook"):
        old(parts.params, x)


def test_a_layer_added_after_the_split_asks_for_another_split():
    model, x = made(lambda: nn.Sequential(nn.Linear(m.D, m.D), nn.Linear(m.D, m.D))), m.rows(2)
    parts = pp.split(model, x, at=["1"])
    step = pp.value_and_grad(parts, lambda y, t: (y - t).square().sum(), pp.gpipe(2, 1))
    step(parts.params, x, x)
    model.append(nn.Linear(m.D, m.D, dtype=torch.float64))
    with pytest.raises(StageError, match="the parameter 2.weight for .* the modules that it has now"):
        step(parts.params, x, x)


def test_a_hook_on_the_gradient_of_a_parameter_is_refused():
    model, x = made(m.Plain), m.rows(2)
    parts = pp.split(model, x, at=["b", "c"])
    make = lambda: pp.value_and_grad(parts, lambda y, t: (y - t).square().sum(), pp.gpipe(3, 1))  # noqa: E731
    step = make()
    step(parts.params, x, x)
    handle = model.c.weight.register_hook(lambda g: 2 * g)
    for call in (make, lambda: step(parts.params, x, x)):
        with pytest.raises(ValueError, match=r"c.weight has a hook on its gradient, which no step calls"):
            call()
    handle.remove()
    step(parts.params, x, x)

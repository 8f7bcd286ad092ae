"""Casts leave what is not floating alone; loss scales move as torch's do."""

import pytest
import torch

import ppfunc as pp
from ppfunc.training import Precision, dynamic_scale, static_scale
from ppfunc.training.update.precision import cast, overflow


def test_casts():
    tree = {
        "w": torch.ones(2),
        "z": torch.ones(2, dtype=torch.complex64),
        "n": torch.arange(2),
        "b": torch.tensor(True),
        "none": None,
    }
    precision = Precision(compute=torch.bfloat16, reduce=torch.float32, master=torch.float64)
    for got, dtype in (
        (precision.to_compute(tree), torch.bfloat16),
        (precision.to_kept(tree), torch.float64),
    ):
        assert got["w"].dtype == dtype and all(got[k] is tree[k] for k in ("z", "n", "b", "none"))
    assert cast(tree, None) is tree and Precision().to_compute(tree) is tree


@pytest.mark.parametrize("bad", [torch.int32, torch.complex64, "bfloat16"])
def test_a_dtype_that_is_not_floating_is_refused(bad):
    with pytest.raises(ValueError, match="compute is .*, expected a floating dtype"):
        Precision(compute=bad)


@pytest.mark.parametrize("first", [2.0**16, 2.0**127])
def test_the_dynamic_scale_is_that_of_torch(first):
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=first, growth_factor=2.0, backoff_factor=0.5, growth_interval=3
    )
    ours = dynamic_scale(first, interval=3)
    state = ours.init("cpu")
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for bad in (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0):
        theirs.scale(torch.tensor(1.0))
        parameter.grad = torch.full((1,), float("inf") if bad else 1.0)
        theirs.step(optimizer)
        theirs.update()
        before = {k: v.clone() for k, v in state.items()}
        after = ours.update(state, torch.tensor(float(bad)))
        assert all(map(torch.equal, state.values(), before.values()))
        state = after
        assert state["scale"].item() == theirs.get_scale()


def test_a_scale_never_becomes_zero():
    ours = dynamic_scale(1.0, backoff=1e-20)
    state = ours.init(None)
    for _ in range(4):
        state = ours.update(state, torch.tensor(1.0))
    assert 0 < state["scale"].item() == torch.finfo(torch.float32).tiny


def test_a_static_scale_stays():
    ours = static_scale(3.0)
    state = ours.init("cpu")
    assert ours.update(state, torch.tensor(1.0)) is state and state["scale"].item() == 3.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: static_scale(0.0), "scale is 0.0"),
        (lambda: static_scale(float("inf")), "scale is inf"),
        (lambda: dynamic_scale(-1.0), "init is -1.0"),
        (lambda: dynamic_scale(interval=0), "interval = 0"),
        (lambda: dynamic_scale(growth=0.5), "growth is 0.5 and backoff 0.5"),
        (lambda: dynamic_scale(backoff=1.0), "growth is 2.0 and backoff 1.0"),
    ],
)
def test_scales_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_overflow_of_any_number():
    one, bad = torch.tensor(1.0), torch.tensor(float("inf"), dtype=torch.float64)
    assert [overflow(one).item(), overflow(one, bad).item(), overflow(bad / bad, one).item()] == [0, 1, 1]


@pytest.mark.parametrize(("make", "name"), [(pp.dynamic_scale, "init"), (pp.static_scale, "scale")])
def test_a_scale_that_float32_has_not_is_refused(make, name):
    text = rf"{name} is 1.39\S+e\+42, expected a number of at least 0 and less than 3.4\S+e\+38"
    with pytest.raises(ValueError, match=text):
        make(2.0**140)

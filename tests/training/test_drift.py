"""Data ranks that come apart after the first step are told so, whatever has changed on one of them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import ppfunc as pp
from ppfunc.stage.layout import local
from ppfunc.stage.tree import tree_map
from tests.models import dense, new_trainer, normal, squared

WIDTH = 6


def trainer_over(size, optimizer, **options):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    return new_trainer([dense], squared, pp.gpipe(1, 2), optimizer, mesh, axes=pp.Axes("pp", "dp"), **options)


def stepped(trainer, state, n):
    return trainer.step(state, normal(4, WIDTH, seed=n), normal(4, WIDTH, seed=9))[0]


CHANGES = {  # of the state on one rank, and what all are told
    "written": (lambda s: s.params[0]["w"].mul_(1.0001), "with the checksum"),
    "replaced": (lambda s: s._replace(params={0: {"w": s.params[0]["w"] + 1e-9}}), "with the checksum"),
    "moments": (lambda s: s.optimizer[0]["mean"]["w"].add_(1e-9), "with the checksum"),
    "memory": (
        lambda s: setattr(s.optimizer[0]["mean"]["w"], "data", normal(WIDTH, WIDTH)),
        "with the checksum",
    ),
    "scale": (lambda s: s._replace(scale={**s.scale, "scale": s.scale["scale"] / 2}), "with the scale"),
    "copied": (lambda s: tree_map(torch.clone, s), "another state"),
}


def drifting(rank, size, kind):
    """Return the steps that run with what one rank has changed after the first, and what the next says."""
    change, words = CHANGES[kind]
    precision = pp.Precision(scale=pp.dynamic_scale()) if kind == "scale" else None
    with trainer_over(size, pp.optim.adamw(0.1), precision=precision, checksum_every=3) as trainer:
        state = stepped(trainer, trainer.init({0: {"w": normal(WIDTH, WIDTH)}}), 0)
        if rank:
            changed = change(state)
            state = changed if isinstance(changed, pp.training.TrainState) else state
        for n in range(3):
            try:
                state = stepped(trainer, state, n)
            except pp.AgreementError as error:
                return n, words in str(error)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_state_that_changes_on_one_rank_is_told_at_the_next_comparison(two, kind):
    assert two(drifting, kind) == [(0 if kind == "copied" else 2, True)] * 2


def a_rate_that_drifts(rank, size):
    rate = {"lr": 0.1}
    with trainer_over(
        size,
        pp.optim.chain(
            pp.optim.clip_by_global_norm(1.0), pp.optim.by_name({"*": pp.optim.sgd(lambda n: rate["lr"])})
        ),
    ) as trainer:
        state = stepped(trainer, trainer.init({0: {"w": normal(WIDTH, WIDTH)}}), 0)
        rate["lr"] = 0.05  # on both
        state = stepped(trainer, state, 1)
        rate["lr"] = 0.05 + 0.01 * rank
        with pytest.raises(pp.AgreementError, match=r"sgd\(lr .*0\.06"):
            stepped(trainer, state, 2)
        rate["lr"] = 0.05
        stepped(trainer, state, 2)
    return True


def test_a_rate_that_changes_on_one_rank_is_told(two):
    assert two(a_rate_that_drifts) == [True, True]


def harmless(rank, size, shard):
    """Count the comparisons of states: one before the first step, then of others alone."""
    counted, own = [], pp.training.update.state.start_facts
    from ppfunc.training.update import parameter_update

    parameter_update.start_facts = lambda *args: counted.append(0) or own(*args)
    try:
        with trainer_over(size, pp.optim.adamw(0.1), shard=shard) as trainer:
            first = state = trainer.init({0: {"w": normal(WIDTH, WIDTH)}})
            for n in range(3):
                state = stepped(trainer, state, n)
            steps = len(counted)
            trainer.evaluate(state, normal(4, WIDTH), normal(4, WIDTH))
            trainer.evaluate(state, normal(4, WIDTH), normal(4, WIDTH))
            evaluated = len(counted)
            stepped(trainer, first, 0)
            copied = tree_map(torch.clone, state)
            stepped(trainer, copied, 0)
            state = stepped(trainer, copied, 0)
            stepped(trainer, state, 1)
    finally:
        parameter_update.start_facts = own
    return steps, evaluated, len(counted)


@pytest.mark.parametrize("shard", ["none", "optimizer", "params"])
def test_a_state_of_the_last_step_is_not_compared_again(two, shard):
    for counts in two(harmless, shard):
        assert counts == (1, 2, 5)


EXPERTS = ("dp", "ep"), "none", pp.Axes("pp", ("dp", "ep"), experts="ep")
HYBRID = ("out", "in"), "params", pp.Axes("pp", ("out", "in"))


def repeated(p, x):
    return torch.tanh(x @ torch.cat([p["w"]] * (WIDTH // len(p["w"]))))


def a_copy_of_a_part(rank, size, form, steps):
    """Change one rank's copy of a part that half of the ranks have: before the first step, or below the
    library; return the steps that ran, and what the next one says.
    """
    names, shard, axes = form
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", *names))
    tree = {"w": normal(WIDTH, WIDTH)}
    if axes.experts:
        tree = pp.stage.shard(tree, mesh["ep"], lambda name, leaf: [Shard(0)])
    with new_trainer(
        [repeated], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), mesh, axes=axes, shard=shard, checksum_every=2
    ) as trainer:
        state, ran = trainer.init({0: tree}), 0
        try:
            for n in range(5):
                if n == steps and rank == 3:
                    torch.from_numpy(local(state.params[0]["w"]).numpy())[0, 0] += 1e-9
                state = stepped(trainer, state, n)
                ran += 1
        except pp.AgreementError as error:
            return ran, "the parameters of stage 0 with the checksum" in str(error)
    return ran, None


@pytest.mark.parametrize("form", [EXPERTS, HYBRID], ids=["experts", "hybrid"])
@pytest.mark.parametrize("steps, ran", [(0, 0), (3, 4), (9, 5)])
def test_copies_of_parts_are_compared_along_the_axes_that_share_them(four, form, steps, ran):
    assert four(a_copy_of_a_part, form, steps) == [(ran, None if steps == 9 else True)] * 4


def test_how_often_is_a_number_of_steps():
    with pytest.raises(ValueError, match="checksum_every = 0, expected an integer of at least 1"):
        pp.Trainer([dense], squared, pp.gpipe(1, 2), pp.optim.sgd(0.1), checksum_every=0)


def test_a_leaf_of_the_last_step_that_was_resized_is_told():
    with pp.Trainer([dense], squared, pp.gpipe(1, 2), pp.optim.adamw(0.1)) as trainer:
        state = stepped(trainer, trainer.init({0: {"w": normal(WIDTH, WIDTH)}}), 0)
        kept = tree_map(torch.clone, state)
        state.optimizer[0]["mean"]["w"].resize_(2, 2)
        with pytest.raises(
            ValueError, match=r"\['mean'\]\['w'\]: got torch.float64 of shape \[2, 2\], expected"
        ):
            stepped(trainer, state, 1)
        stepped(trainer, kept, 1)

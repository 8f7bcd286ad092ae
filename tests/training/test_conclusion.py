"""What follows from the sums over all ranks."""

from math import inf, isfinite, nan

import pytest
import torch

from ppfunc.training.optim.norms import Clip
from ppfunc.training.update.parameter_update import conclude, shares

STEP = torch.tensor(7)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("most", [0.5, inf])
@pytest.mark.parametrize(
    ("loss", "sums"), [(2.0, (9.0, 16.0)), (nan, (1.0, 1.0)), (1.0, (inf, 1.0)), (inf, (0.0, 0.0))]
)
def test_an_update_is_scaled_clipped_and_left_out(loss, sums, most, scale, skips):
    of = torch.tensor([loss, *sums], dtype=torch.float64)
    after, found_inf, step, of_gradients = conclude(
        of, STEP, None if scale is None else torch.tensor(scale), Clip(most, 2.0), skips
    )
    # Of torch, whose roots are not rounded as those of ``math`` on every machine.
    norm = torch.tensor(sum(sums), dtype=torch.float64).sqrt().item() / (scale or 1.0)
    bad = not (isfinite(loss) and isfinite(norm))
    assert torch.equal(after.loss, of[0]) or bad
    assert (after.grad_norm.item(), after.scale.item()) == (norm, scale or 1.0)
    assert (found_inf.item(), after.skipped.item()) == (bad, bad and skips)
    assert step.item() == 8 - (bad and skips) and step.dtype == torch.int64
    factor = min(1.0, most / (norm + 1e-6)) / (scale or 1.0)
    assert of_gradients is None if (most, scale) == (inf, None) else bad or of_gradients.item() == factor


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
def test_shares_are_sums_of_powers_by_stage(p):
    norms = {2: torch.tensor([1.0, 2.0]), 0: torch.tensor([3.0], dtype=torch.float64)}
    losses = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([4.0])]
    of = shares(norms, losses, p, 4, torch.device("cpu"))
    wanted = [3.0, 0.0, 2.0, 0.0] if p == inf else [3.0**p, 0.0, 1 + 2.0**p, 0.0]
    assert of.dtype == torch.float64 and of.tolist() == [7.0, *wanted]
    assert shares({}, [], p, 1, torch.device("cpu")).tolist() == [0, 0]

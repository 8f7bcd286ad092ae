"""Checksums of tensors: other bits or another order give another sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from ppfunc.runtime.lowering import comparison
from ppfunc.runtime.lowering.comparison import checksum


@given(st.lists(st.integers(0, 255), max_size=70), st.data())
def test_a_bit_or_an_exchange_of_bytes_changes_the_sum(values, data):
    one = torch.tensor(values, dtype=torch.uint8)
    assert int(checksum(one)) == int(checksum(one.clone()))
    other = torch.tensor(data.draw(st.permutations(values)), dtype=torch.uint8)
    assert (int(checksum(one)) == int(checksum(other))) == torch.equal(one, other)
    if values:
        flipped = one.clone()
        flipped[data.draw(st.integers(0, len(values) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert int(checksum(one)) != int(checksum(flipped))


@pytest.mark.parametrize("distance", [1, 2, 256, 512])
def test_words_in_another_order_have_another_sum(distance):
    one = torch.zeros(1024, dtype=torch.float64)
    one[3], other = -0.0, torch.zeros(1024, dtype=torch.float64)
    other[3 + distance] = -0.0
    assert int(checksum(one)) != int(checksum(other))


def test_pieces_are_one_sum(monkeypatch):
    one = torch.randn(1001)
    whole = int(checksum(one))
    monkeypatch.setattr(comparison, "_PIECE", 7)
    assert int(checksum(one)) == whole


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(9.0)[1:],
    ],
)
def test_layouts_do_not_count(leaf):
    assert int(checksum(leaf)) == int(checksum(leaf.clone().resolve_conj()))

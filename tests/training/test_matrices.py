"""Matrices in parts over two axes are put together, each on one rank of all, and come back."""

from threading import Barrier, Thread
from types import SimpleNamespace

import torch

from ppfunc.runtime.ports.protocols import Collective
from ppfunc.stage.layout import MeshLayout
from ppfunc.training.update.ranks import Cut, CutMatrices, TrainingRanks, on_matrices
from tests.models import normal


class Threads:
    """Exchanges tensors between the threads of an axis."""

    def __init__(self, size):
        self.size, self._sent, self._barrier = size, {}, Barrier(size, timeout=20)

    def at(self, index):
        ranks = Threads.__new__(Threads)
        vars(ranks).update(vars(self), index=index)
        return ranks

    def all_to_all(self, sent, receives, sends):
        self._sent[self.index] = sent.split(sends)
        self._barrier.wait()
        parts = [self._sent[rank][self.index] for rank in range(self.size)]
        self._barrier.wait()
        assert [part.numel() for part in parts] == receives
        return torch.cat(parts), lambda: None


def test_ranks_deal_alike_where_parts_differ_in_size():
    """Of the larger matrix one tensor parallel rank has more than of the other, and one less."""
    whole = {0: normal(5, 4), 1: normal(10, 1)}
    rows, data, results = [Threads(2) for _ in range(2)], [Threads(2) for _ in range(2)], {}

    def run(t, d):
        axes = [
            CutMatrices("dp", data[t].at(d), {0: (1, 4), 1: (0, 10)}, {0: 20, 1: 10}),
            CutMatrices("tp", rows[d].at(t), {0: (0, 5)}, {0: 20}),
        ]
        mine = {0: whole[0].split(3)[t].split(2, 1)[d], 1: whole[1].split(5)[d]}
        results[t, d] = on_matrices(lambda m: m @ m.mT @ m, mine, axes)

    threads = [Thread(target=run, args=(t, d)) for t in range(2) for d in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = {n: m @ m.mT @ m for n, m in whole.items()}
    for t, d in ((t, d) for t in range(2) for d in range(2)):
        got = results[t, d]
        torch.testing.assert_close(got[0], want[0].split(3)[t].split(2, 1)[d])
        torch.testing.assert_close(got[1], want[1].split(5)[d])


def test_of_rows_that_two_axes_cut_each_joins_those_of_its_part():
    """Of five rows, the first tensor parallel rank has three, of which the first data rank has two."""
    axes = ("tp", "dp")
    cut = Cut(None, 0, None, MeshLayout(axes, (2, 2), ("S(0)", "S(0)"), (5, 4)), None, False)
    ranks = SimpleNamespace(
        cutting=dict.fromkeys(axes, Collective(2, 0)), mesh=SimpleNamespace(mesh_dim_names=axes)
    )
    joined = TrainingRanks.cut_matrices(ranks, [cut])
    assert [(one.axis, one.cuts, one.sizes) for one in joined] == [
        ("dp", {0: (0, 3)}, {0: 20}), ("tp", {0: (0, 5)}, {0: 20}),
    ]  # fmt: skip

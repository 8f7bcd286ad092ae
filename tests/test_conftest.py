"""Processes that tests share."""

from __future__ import annotations

import os
import warnings

import pytest


def answer(rank, size):
    return rank


def leave(rank, size):
    os._exit(3)


def test_a_process_that_ends_after_its_answer_is_told(fresh):
    """One that ends before it is no surprise: who asked it sees so."""
    processes = fresh(1)
    processes(answer)
    processes.workers[0].kill()
    processes.workers[0].join()
    with pytest.warns(UserWarning, match="rank 0 of 1 ended after its answer: -9"):
        assert processes(answer) == [0]
    processes.start(leave)
    assert processes.answers() == [None]
    processes.workers[0].join()
    with warnings.catch_warnings(action="error"):
        assert processes(answer) == [0]

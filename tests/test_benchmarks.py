"""Benchmarks start: they use parts of the package that have no other users."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

FOLDER = Path(__file__).parent / "benchmarks"
SMALL = ("--rounds", "1", "--steps", "1", "--blocks", "2")


def test_the_time_of_a_step(fresh, store_port):
    printed, _ = fresh(2)(run_script, store_port, FOLDER / "step_time.py", *SMALL)
    times = re.search(
        r"ppfunc (\S+) ms, torch (\S+) ms, ratio (\S+); ideal (\S+) ms, measured over ideal (\S+);"
        r" CPU of all ranks (\S+) and (\S+) ms, ratio (\S+)",
        printed,
    )
    ours, theirs, ratio, ideal, over_ideal, cpu, cpu_theirs, cpu_ratio = map(float, times.groups())
    assert ratio == pytest.approx(ours / theirs, rel=0.05)
    assert cpu_ratio == pytest.approx(cpu / cpu_theirs, rel=0.05)
    assert over_ideal == pytest.approx(ours / ideal, rel=0.05)


@pytest.mark.parametrize(
    "script, options, one, other",
    [
        ("step_time.py", (*SMALL, "--protection"), "ppfunc ", "unprotected "),
        ("experts.py", (*SMALL[:4], "--width", "8", "--tokens", "4"), "interleaved ", "in turn "),
    ],
)
def test_the_prices_of_protection_and_of_pairs(fresh, store_port, script, options, one, other):
    printed, _ = fresh(2)(run_script, store_port, FOLDER / script, *options)
    line = rf"^(.+): {one}(\S+) ms, {other}(\S+) ms, ratio (\S+)$"
    found = re.findall(line, printed, re.MULTILINE)
    assert [what for what, *_ in found] == ["step", "CPU of all ranks"]
    for _, *figures in found:
        first, second, ratio = map(float, figures)
        assert ratio == pytest.approx(first / second, rel=0.05)


def test_exchanges_that_arrive_late_are_waited_for_less_where_pairs_interleave(fresh, store_port):
    small = ("--rounds", "5", "--steps", "1", "--width", "8", "--tokens", "4", "--microbatches", "4")
    late = ("--pipeline", "1", "--delay", "20")
    printed, _ = fresh(2)(run_script, store_port, FOLDER / "experts.py", *small, *late)
    together, apart = map(
        float, re.search(r"^step: interleaved (\S+) ms, in turn (\S+) ms", printed, re.M).groups()
    )
    assert 100 < together < apart


def test_the_memory_of_a_step(fresh, store_port):
    small = ("--schedules", "1f1b", "--remats", "none", "full", "--blocks", "2", "--width", "16")
    printed, _ = fresh(2)(run_script, store_port, FOLDER / "memory.py", *small, "--microbatches", "2")
    found = re.findall(
        r"^blocks 1f1b (\w+), rank (\d): predicted \S+ MB, measured \S+, ratio (\S+?)(, torch .*)?$",
        printed,
        re.MULTILINE,
    )
    assert [row[:2] for row in found] == [("none", "0"), ("none", "1"), ("full", "0"), ("full", "1")]
    assert all(0.99 < float(ratio) < 1.01 for _, _, ratio, _ in found)
    assert all(torch for *_, torch in found)


def test_the_bytes_of_a_large_model_on_paper(monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["on_paper.py", "deepseek", "--layers", "8", "--microbatches", "2"])
    importlib.import_module("on_paper").main()
    printed = capsys.readouterr().out
    found = re.findall(r"(shards|optimizer|gradients) \S+ GB x (\S+?)[,\n]", printed)
    assert len(found) == 3 * 8
    assert all(float(ratio) == pytest.approx(1, rel=0.001) for _, ratio in found), printed


def test_without_jax_the_comparison_with_it_is_skipped_in_one_sentence(monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["beside_jax.py"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    importlib.import_module("beside_jax").main()
    assert capsys.readouterr().out.splitlines() == [
        "Skipped: JAX is missing; pip install jax, or name --sides without it."
    ]


def import_all(rank, size, names):
    sys.path.insert(0, str(FOLDER))
    for name in names:
        importlib.import_module(name)


def test_all_others_are_imported(fresh):
    names = [
        path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("split_")
    ]  # those need transformers
    assert len(names) > 5
    fresh(1)(import_all, names)

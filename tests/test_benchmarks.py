"""Benchmarks start: they use parts of the package that have no other users."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

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


def test_steps_of_slices(fresh, store_port):
    sizes = "--tokens", "16", "--width", "16", "--blocks", "2", "--rounds", "1", "--attention", "0.1"
    printed, other = fresh(2)(run_script, store_port, FOLDER / "slices.py", *sizes)
    names = ["1f1b", "zb_h1", "seq1f1b", "seq_zb"]
    assert re.findall(r"^step: (\S+) \S+ ms, 1f1b", printed, re.MULTILINE) == [*names[1:], "torch"]
    for text in (printed, other):
        line = r"^rank \d: (\S+) peak \S+, measured over predicted (\S+), span .*, gradients off by (\S+)$"
        found = re.findall(line, text, re.MULTILINE)
        assert [name for name, _, _ in found] == names and all(float(off) < 1e-5 for *_, off in found)
        assert all(0.99 < float(over) < 1.01 for _, over, _ in found)


def test_the_price_of_pairs(fresh, store_port):
    options = *SMALL[:4], "--width", "8", "--tokens", "4"
    printed, _ = fresh(2)(run_script, store_port, FOLDER / "experts.py", *options)
    line = r"^(.+): interleaved (\S+) ms, in turn (\S+) ms, ratio (\S+)$"
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


@pytest.mark.slow
def test_training_beside_what_it_replaces():
    command = [sys.executable, FOLDER / "training.py", "reduction", "--rounds", "1", "--microbatches", "1"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"^1 backwards and a sum, .* ppfunc: wall ", done.stdout, re.MULTILINE)) == 3


class Parsed(Exception):
    """Raised once a command line has been read."""


def import_all(rank, size, names):
    """Import benchmarks, and read a command line without words by the parser of each."""
    sys.path.insert(0, str(FOLDER))
    original = argparse.ArgumentParser.parse_args

    def parse(parser, *_):
        original(parser, [])
        raise Parsed

    def refuse(parser, message):
        raise ValueError(f"{parser.prog}: {message}")

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse),
        patch.object(argparse.ArgumentParser, "error", refuse),
    ):
        for name in names:
            module = importlib.import_module(name)
            with pytest.raises(Parsed):
                module.main()


def test_all_others_are_imported_and_need_no_words(fresh):
    names = [path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("split_")]
    names.remove("timing")
    assert len(names) > 5  # those that split need transformers
    fresh(1)(import_all, names)


def test_an_output_layer_in_parts(fresh, store_port):
    sizes = "--vocabulary", "64", "--width", "16", "--blocks", "2", "--tokens", "8", "--rounds", "1"
    printed, other = fresh(2)(run_script, store_port, FOLDER / "vocabulary.py", *sizes)
    assert re.search(r"^step: parts \S+ ms, layers \S+ ms, ratio", printed, re.MULTILINE)
    for text in (printed, other):
        found = re.findall(r"^rank \d: (\S+) peak .*, loss off by (\S+)$", text, re.MULTILINE)
        assert [name for name, _ in found] == ["layers", "parts"] and float(found[1][1]) < 1e-5

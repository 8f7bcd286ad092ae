"""What a machine with a GPU shows that others cannot, in stages, each a process with a limit of time.

    python -m tests.gpu --minutes 8 --output gpu.json

No stage stops the others: one that fails, hangs or is skipped prints a line that says so. Two ranks on one
GPU pass for two hosts (``NCCL_HOSTID``), so that NCCL takes them. Where packages of ppfunc are missing and
none can be installed, put a folder of ``pip install --target`` on ``PYTHONPATH``; the probe names them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from tests.gpu.stages import STAGES, Facts, Skipped

_ROOT = Path(__file__).parents[2]
_SHOWN = 300  # characters of a failure


def run_stage(name: str, seconds: float) -> Facts:
    """Run a stage in a process group of its own, which is killed at the end of its time."""
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu", "--stage", name],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = child.communicate(timeout=seconds)
        result = last_result(printed)
        if not result:
            result = {"result": "failed", "why": f"exit {child.returncode}: {errors.strip()[-_SHOWN:]}"}
    except subprocess.TimeoutExpired:
        result = {"result": "failed", "why": f"did not end in {seconds:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    return {"stage": name, **result, "seconds": round(time.monotonic() - began, 1)}


def last_result(printed: str) -> Facts:
    """Find the JSON of a stage, around which libraries may have printed; nothing where it has none."""
    for line in reversed(printed.splitlines()):
        with suppress(ValueError):
            if isinstance(result := json.loads(line), dict) and "result" in result:
                return result
    return {}


def stage_result(name: str) -> Facts:
    """Run a stage in this process."""
    try:
        return {"result": "passed", "facts": STAGES[name].run()}
    except Skipped as reason:
        return {"result": "skipped", "why": str(reason)}
    except Exception as error:
        return {
            "result": "failed",
            "why": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8, help="for all stages together; 8 unless given")
    parser.add_argument("--output", type=Path, help="a file for the results as JSON")
    parser.add_argument("--stage", choices=STAGES, help="run one stage in this process, and print its JSON")
    options = parser.parse_args(arguments)
    if options.stage:
        print(json.dumps(stage_result(options.stage), default=str))
        return 0
    end, results = time.monotonic() + 60 * options.minutes, []
    for name, stage in STAGES.items():
        left = end - time.monotonic()
        if left < 1:
            results.append({"stage": name, "result": "skipped", "why": "no time is left", "seconds": 0.0})
        else:
            results.append(run_stage(name, min(stage.seconds, left)))
        row = results[-1]
        says = row.get("why") or json.dumps(row["facts"])
        print(
            f"{name:16} {row['result']:8} {row['seconds']:6.1f} s  {' '.join(says.split())[:200]}", flush=True
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    return any(row["result"] == "failed" for row in results)


if __name__ == "__main__":
    sys.exit(main())

"""Measure the planner: bounds, gaps and bubbles, each beside its target, in CPU seconds of one core.

    python tests/benchmarks/plans.py [PART ...] [--effort N]

Without a part, all of them: bound, optimal, low, random, shares, placements, large.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from ppfunc.parallel import v_shape
from ppfunc.schedule import Costs, Plan, lower_bound, plan, simulate, zero_bubble

TABLE = Path(__file__).parents[1] / "schedule" / "optima.jsonl"
# F, I, W per rank and a message: the 1.5B model of the zero-bubble papers, in ms
SMALL = (18.522, 18.086, 9.337, 0.601)
EFFORT = [1.0]


def costs(times: tuple[float, ...], chunks: int = 1, share: float = 1) -> Costs:
    """Costs of a stage, where a rank's times are shared out evenly to its chunks."""
    f, i, w, message = times
    return Costs(f / chunks, i / chunks, w / chunks, communication=message, weight_share=share)


def timed(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    start = time.process_time()
    value = function(*args, **options)
    return value, time.process_time() - start


def show(what: str, found: str, target: str, met: bool) -> None:
    print(f"{'ok  ' if met else 'MISS'} {what:<62} {found:<36} target {target}", flush=True)


def planned(
    what: str, seconds: float, good: Callable[[Plan], bool], target: str, *args: Any, **options: Any
) -> Plan:
    """Plan, and show value, bubble and time."""
    options.setdefault("effort", EFFORT[0])
    options.setdefault("objective", "span")
    found, took = timed(plan, *args, **options)
    bubble = found.timeline.span_bubble if options["objective"] == "span" else found.timeline.bubble
    text = f"{float(found.value):.6g} gap {found.gap:.2%} bubble {float(bubble):.4f}"
    show(what, f"{text} {took:.1f} s", f"{target}, {seconds:g} s", good(found) and took <= seconds)
    return found


def bound() -> None:
    """Lower bounds: time at 64 ranks, and the stored optima."""
    for chunks in (1, 2, 4):
        took = min(
            timed(lower_bound, costs(SMALL, chunks), v_shape(64, chunks), 256, 48 * chunks)[1]
            for _ in range(5)
        )
        show(f"bound, 64 ranks, {chunks} chunks", f"{took * 1000:.1f} ms", "20 ms", took < 0.02)
    rows = [json.loads(line) for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    above = tight = 0
    for row in rows:
        problem = [row.pop(name) for name in ("placement", "microbatches", "cap", "objective")]
        optimum = row.pop("optimum")
        value = lower_bound(Costs(**row), *problem).value
        above, tight = above + (value > optimum), tight + (value == optimum)
    show(f"bound above the optimum, of {len(rows)}; equal {tight}", str(above), "0", not above)


def optimal() -> None:
    """Problems in which the bound is to be met."""
    unit, v, loop = Costs(weight_share=1), {"placement": "v"}, {"placement": "loop", "chunks": 1}
    rows: list[tuple[str, float, int, int, Costs, dict[str, Any]]] = []
    for p, caps in ((4, (4, 6, 8)), (8, (8, 10, 12, 16)), (16, (13, 16, 18, 24, 32))):
        rows += [("F = I = W, V", 1, p, 3 * p, unit, {"cap": cap} | v) for cap in caps]
    for times in ((1, 1, 1, 0), SMALL, (9, 9, 5, 1), (5, 5, 3.75, 0.4)):
        for p, m in ((4, 8), (8, 24), (16, 48)):
            caps = (p, p + p // 2, 2 * p)
            rows += [(f"F I W c {times}, loop", 1, p, m, costs(times), {"cap": cap} | loop) for cap in caps]
    for cap in (10, 12):
        rows += [("1.5B times, V", 2, 8, m, costs(SMALL, 2), {"cap": cap} | v) for m in (24, 32, 64)]
    rows += [("5 5 3.75 .4 per chunk, V", 15, 32, 128, costs((5, 5, 3.75, 0.4)), {"cap": 34} | v)]
    for what, seconds, p, m, times, options in rows:
        what = f"{what}, p {p}, cap {options['cap']}, m {m}"
        planned(what, seconds, lambda f: f.optimal, "optimal", p, m, times, **options)


def low() -> None:
    """Little memory, and an expensive head."""
    options, what = {"cap": 8, "placement": "v"}, "V, p 8, cap 8, m 24"
    good = lambda f: f.timeline.span_bubble <= 0.245  # noqa: E731
    planned(f"1.5B times, {what}", 5, good, "span bubble .245", 8, 24, costs(SMALL, 2), **options)
    f, i, w = ([0.3 * x, *[x] * 14, 2 * x] for x in (5, 5, 3.75))
    uneven = Costs(f, i, w, communication=0.4, weight_share=1)
    short = lambda f: f.value <= 883.9  # noqa: E731
    for objective in ("makespan", "span"):
        title = f"first stage x .3, last x 2, {what}, {objective}"
        planned(title, 2, short, "883.9", 8, 24, uneven, objective=objective, **options)


def random() -> None:
    """Times that differ by up to 20% from stage to stage, one stage per rank, cap p."""
    draw = Random(0)
    problems = []
    for number in range(12):
        p = (4, 8, 8, 12)[number % 4]
        base = ((1, 1, 1, 0), SMALL, (5, 5, 3.75, 0.4))[number % 3]
        times = [[x * draw.uniform(0.8, 1.2) for _ in range(p)] for x in base[:3]]
        problems.append((p, 3 * p, Costs(*times, communication=base[3], weight_share=1)))
    for objective, most in (("span", 0.011), ("makespan", 0.009)):
        gaps, worse, longest = [], 0, 0.0
        for p, m, uneven in problems:
            options = {"cap": p, "placement": "loop", "chunks": 1, "objective": objective}
            options["effort"] = EFFORT[0]
            found, took = timed(plan, p, m, uneven, **options)
            public = getattr(simulate(zero_bubble(p, m, p, uneven), uneven), objective)
            gaps.append(found.gap)
            worse, longest = worse + (found.value > public), max(longest, took)
        mean = sum(gaps) / len(gaps)
        what = f"times +-20%, {len(gaps)} problems, {objective}, longer than zero_bubble {worse}"
        met, text = (
            mean <= most and not worse and longest <= 2,
            f"mean gap {mean:.2%}, longest {longest:.1f} s",
        )
        show(what, text, f"{most:.1%}, 2 s", met)


def shares() -> None:
    """ZB-2p: cap 2p, with the share of an activation that the papers' formulas hold on to W."""
    for p, m, times, share, target in (
        (8, 32, SMALL, 0.3664, 0.0034),
        (8, 24, (29.718, 29.444, 19.927, 0.527), 0.4324, 0.0021),
        (16, 48, (11.347, 11.248, 8.132, 0.377), 0.4324, 0.0049),
    ):
        one = costs(times, share=share)
        published = 1 - m * sum(times[:3]) / simulate(zero_bubble(p, m, 2 * p, one), one).span
        what = f"share {share}, p {p}, cap {2 * p}, m {m}; zero_bubble {published:.4f}"
        good = lambda f, target=target: f.timeline.span_bubble <= 1.05 * target  # noqa: E731
        planned(what, 5, good, f"{target} + 5%", p, m, one, cap=2 * p, placement="loop", chunks=1)


def placements() -> None:
    """Any placement at equal memory: the cap is in activations of all chunks of a rank."""
    for cap, target in ((8, 0.054), (6, 0.1023), (5, 0.150), (4, 0.24)):
        good = lambda f, target=target: f.timeline.span_bubble <= target + 5e-5  # noqa: E731
        what = f"1.5B times, any placement, p 8, cap {cap}, m 24"
        found = planned(what, 3, good, str(target), 8, 24, costs(SMALL), cap=cap)
        print(f"     {found.placement}: {found.found}")


def large() -> None:
    """Many ranks; and many microbatches."""
    times, near = costs(SMALL, 2), lambda f: f.gap <= 0.01
    planned("1.5B times, V, p 64, cap 96, m 256", 35, near, "gap 1%", 64, 256, times, cap=96, placement="v")
    what, every = "1.5B times, V, p 16, cap 24, m 2000", lambda f: True
    print(f"     {planned(what, 60, every, 'none', 16, 2000, times, cap=24, placement='v').found}")


PARTS = {part.__name__: part for part in (bound, optimal, low, random, shares, placements, large)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--effort", type=float, default=1.0)
    options = parser.parse_args()
    EFFORT[0] = options.effort
    for part in options.parts or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()

r"""Schedules: instructions, builders, lowering passes, proof, simulation, formats.

>>> from ppfunc.schedule import Costs, check, one_f_one_b, simulate, to_csv, to_grid
>>> schedule = one_f_one_b(ranks=2, microbatches=3)
>>> print(schedule)
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
>>> print(to_grid(schedule), end="")
rank 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2
rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2  .
>>> check(schedule).peak_activations
(2, 1)
>>> simulate(schedule, Costs(forward=1, backward=2)).makespan
12
>>> to_csv(schedule)
'0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n'
"""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .bounds import Bound as Bound, lower_bound as lower_bound
    from .builders import (
        BUILDERS as BUILDERS,
        chimera as chimera,
        data_parallel as data_parallel,
        deepspeed_inference as deepspeed_inference,
        deepspeed_train as deepspeed_train,
        dualpipe as dualpipe,
        dualpipev as dualpipev,
        gpipe as gpipe,
        inference as inference,
        interleaved_one_f_one_b as interleaved_one_f_one_b,
        interleaved_zero_bubble as interleaved_zero_bubble,
        looped_bfs as looped_bfs,
        one_f_one_b as one_f_one_b,
        v_half as v_half,
        v_min as v_min,
        zb_h1 as zb_h1,
        zb_h2 as zb_h2,
        zbv as zbv,
        zbv_greedy as zbv_greedy,
        zero_bubble as zero_bubble,
    )
    from .check import Certificate as Certificate, check as check, is_step_atomic as is_step_atomic
    from .config import (
        build_schedule as build_schedule,
        count_microbatches as count_microbatches,
        find_builder as find_builder,
        split_points_for as split_points_for,
    )
    from .costs import Costs as Costs
    from .errors import ScheduleError as ScheduleError
    from .formats import (
        FormatError as FormatError,
        compute_only as compute_only,
        from_csv as from_csv,
        from_json as from_json,
        read_schedule as read_schedule,
        to_csv as to_csv,
        to_grid as to_grid,
        to_json as to_json,
        to_steps as to_steps,
        to_svg as to_svg,
        to_trace as to_trace,
        write_csv as write_csv,
    )
    from .instruction import Instruction as Instruction, Op as Op, overlap as overlap, parts_of as parts_of
    from .passes import (
        allocate_slots as allocate_slots,
        append_tail as append_tail,
        forward_only as forward_only,
        insert_loads as insert_loads,
        insert_offloads as insert_offloads,
        linearize as linearize,
        merge_backward as merge_backward,
        place_communication as place_communication,
        remove_communication as remove_communication,
        remove_slots as remove_slots,
        remove_tail as remove_tail,
        send_completion as send_completion,
        split_backward as split_backward,
    )
    from .planner.plan import Plan as Plan, plan as plan
    from .schedule import (
        Chain as Chain,
        Program as Program,
        Schedule as Schedule,
        Step as Step,
        elementary as elementary,
        single_chain as single_chain,
    )
    from .simulate import Timeline as Timeline, measure as measure, peak_activations as peak_activations, simulate as simulate
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "bounds": ("Bound", "lower_bound"),
            "builders": (
                "BUILDERS",
                "chimera",
                "data_parallel",
                "deepspeed_inference",
                "deepspeed_train",
                "dualpipe",
                "dualpipev",
                "gpipe",
                "inference",
                "interleaved_one_f_one_b",
                "interleaved_zero_bubble",
                "looped_bfs",
                "one_f_one_b",
                "v_half",
                "v_min",
                "zb_h1",
                "zb_h2",
                "zbv",
                "zbv_greedy",
                "zero_bubble",
            ),
            "check": ("Certificate", "check", "is_step_atomic"),
            "config": ("build_schedule", "count_microbatches", "find_builder", "split_points_for"),
            "costs": ("Costs",),
            "errors": ("ScheduleError",),
            "formats": (
                "FormatError",
                "compute_only",
                "from_csv",
                "from_json",
                "read_schedule",
                "to_csv",
                "to_grid",
                "to_json",
                "to_steps",
                "to_svg",
                "to_trace",
                "write_csv",
            ),
            "instruction": ("Instruction", "Op", "overlap", "parts_of"),
            "passes": (
                "allocate_slots",
                "append_tail",
                "forward_only",
                "insert_loads",
                "insert_offloads",
                "linearize",
                "merge_backward",
                "place_communication",
                "remove_communication",
                "remove_slots",
                "remove_tail",
                "send_completion",
                "split_backward",
            ),
            "planner.plan": ("Plan", "plan"),
            "schedule": ("Chain", "Program", "Schedule", "Step", "elementary", "single_chain"),
            "simulate": ("Timeline", "measure", "peak_activations", "simulate"),
        },
    )

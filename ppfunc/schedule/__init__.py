r"""Schedules: instructions, builders, lowering passes, proof, simulation, formats.

>>> from ppfunc.schedule import *
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

A schedule says which way microbatches go:

flow
    A set of microbatches and the stages that they go through, each after the stages that it needs. A flow is
    a chain, or has edges of its own: ``(a, b)`` where the output of ``a`` is the input of ``b``. An output
    may go to several stages, whose gradients add up; an input from several is a tuple. A stage to which no
    edge leads takes the batch, the last has the loss function. Skip connections carry other values beside
    the edges, and what leads back goes to the next slice of a sequence.
replicas
    Stages with the same parameters: copies of one stage of the model. Flows that share other stages deal
    their microbatches out to the copies; as chains side by side they are DualPipe.
message
    A value on its way to a rank: it goes there once, whatever the number of stages that take it, under the
    name of the first of them.

Text has ``0SEND_F3`` for a message along the only edge from stage 0, and ``0SEND_F3>2``, with the stage at
its other end, where there are several, or for a skip connection. CSV has no more than that, so that graphs
are refused there; JSON has all.

>>> diamond = Flow(stages=(0, 1, 2, 3), microbatches=range(1), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
>>> program = [F(0, 0), F(1, 0), B(1, 0), B(0, 0)], [F(2, 0), F(3, 0), B(3, 0), B(2, 0)]
>>> graph = Schedule("graph", (0, 0, 1, 1), (diamond,), tuple(tuple((i,) for i in rank) for rank in program))
>>> print(place_communication(graph))
0F0 0SEND_F0>2+1F0 1SEND_F0+1RECV_B0+1B0 0RECV_B0>2+0B0
2RECV_F0+2F0 3RECV_F0>1+3F0 3B0 3SEND_B0>1+2B0 2SEND_B0
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from .builders import (
        BUILDERS as BUILDERS,
        chimera as chimera,
        data_parallel as data_parallel,
        decode as decode,
        deepspeed_inference as deepspeed_inference,
        deepspeed_train as deepspeed_train,
        dualpipe as dualpipe,
        dualpipev as dualpipev,
        find_builder as find_builder,
        gpipe as gpipe,
        inference as inference,
        interleaved_1f1b as interleaved_1f1b,
        interleaved_zb as interleaved_zb,
        looped_bfs as looped_bfs,
        one_f_one_b as one_f_one_b,
        seq1f1b as seq1f1b,
        seq_zb as seq_zb,
        v_half as v_half,
        v_min as v_min,
        zb_h1 as zb_h1,
        zb_h2 as zb_h2,
        zbv as zbv,
        zbv_greedy as zbv_greedy,
        zero_bubble as zero_bubble,
    )
    from .costs import Costs as Costs
    from .errors import ScheduleError as ScheduleError
    from .formats.csv import from_csv as from_csv, to_csv as to_csv, to_torch_csv as to_torch_csv
    from .formats.files import configure as configure, read_schedule as read_schedule
    from .formats.grid import to_grid as to_grid, to_steps as to_steps
    from .formats.svg import to_svg as to_svg
    from .formats.trace import from_trace as from_trace, to_trace as to_trace
    from .instruction import (
        B as B,
        F as F,
        FormatError as FormatError,
        I as I,
        Instruction as Instruction,
        Op as Op,
        W as W,
        overlap as overlap,
        parse_instruction as parse_instruction,
        parts_of as parts_of,
    )
    from .json import from_json as from_json, to_json as to_json
    from .passes.place_communication import place_communication as place_communication
    from .passes.rewrite import (
        append_tail as append_tail,
        compute_only as compute_only,
        forward_only as forward_only,
        insert_loads as insert_loads,
        insert_offloads as insert_offloads,
        insert_recomputes as insert_recomputes,
        insert_unshards as insert_unshards,
        merge_backward as merge_backward,
        reduce_early as reduce_early,
        remove_communication as remove_communication,
        remove_slots as remove_slots,
        remove_tail as remove_tail,
        remove_unshards as remove_unshards,
        split_backward as split_backward,
        with_skips as with_skips,
    )
    from .passes.running import allocate_slots as allocate_slots
    from .planner.graph import arrange as arrange, spread as spread, with_parts as with_parts
    from .planner.overview import compare_schedules as compare_schedules, to_scatter as to_scatter
    from .planner.plan import Plan as Plan, plan as plan
    from .planner.problem import lower_bound as lower_bound
    from .proof.certificate import check as check
    from .proof.timeline import (
        Timeline as Timeline,
        peak_activations as peak_activations,
        simulate as simulate,
    )
    from .schedule import Flow as Flow, Schedule as Schedule, Step as Step, single_chain as single_chain
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "builders": (
                "BUILDERS chimera data_parallel decode deepspeed_inference deepspeed_train dualpipe dualpipev"
                " find_builder gpipe inference interleaved_1f1b interleaved_zb looped_bfs one_f_one_b"
                " seq1f1b seq_zb v_half v_min zb_h1 zb_h2 zbv zbv_greedy zero_bubble"
            ),
            "costs": "Costs",
            "errors": "ScheduleError",
            "formats.csv": "from_csv to_csv to_torch_csv",
            "formats.files": "configure read_schedule",
            "formats.grid": "to_grid to_steps",
            "formats.svg": "to_svg",
            "formats.trace": "from_trace to_trace",
            "instruction": "B F FormatError I Instruction Op W overlap parse_instruction parts_of",
            "json": "from_json to_json",
            "passes.place_communication": "place_communication",
            "passes.rewrite": (
                "append_tail compute_only forward_only insert_loads insert_offloads insert_recomputes"
                " insert_unshards merge_backward reduce_early remove_communication remove_slots remove_tail"
                " remove_unshards split_backward with_skips"
            ),
            "passes.running": "allocate_slots",
            "planner.graph": "arrange spread with_parts",
            "planner.problem": "lower_bound",
            "planner.overview": "compare_schedules to_scatter",
            "planner.plan": "Plan plan",
            "proof.certificate": "check",
            "proof.timeline": "Timeline peak_activations simulate",
            "schedule": "Flow Schedule Step single_chain",
        },
    )

from . import formats as formats  # gives pictures to the classes of values

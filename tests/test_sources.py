"""Every row of the five sources has a test that shows it, every defect of theirs one that shows the right.

The sources are A: DeepSpeed's schedules, B: its topology and grid, C: torchtitan's helpers of pipelines,
D: DualPipe, E: ColossalAI's pipeline. Tests that no room has stand below the table.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ppfunc as pp
from ppfunc.parallel import Topology, default_grid, partition_balanced, prime_factors
from ppfunc.schedule import (
    BUILDERS,
    F,
    Op,
    ScheduleError,
    allocate_slots,
    append_tail,
    check,
    deepspeed_train,
    find_builder,
    forward_only,
    gpipe,
    insert_loads,
    one_f_one_b,
    peak_activations,
    place_communication,
    single_chain,
    to_steps,
)
from tests import models
from tests.models import dense, normal, same_bits, squared

ROOT = Path(__file__).parent
ROWS = {"A": 22, "B": 22, "C": 9, "D": 27, "E": 22}
DEFECTS = {"A": 4, "B": 5, "C": 6, "D": 8, "E": 8}

# row: what it is about: tests, of tests/ or of this file
TABLE = """
A1: stages before and after: test_a_schedule_is_a_value
A2: a barrier between any two steps: schedule/test_builders_deepspeed.py::test_every_step_is_atomic_and_no_buffer_is_overwritten
A3: as many buffers as microbatches: test_a_schedule_without_a_bound_has_a_buffer_for_each_microbatch
A4: first and last stages, valid numbers: test_a_schedule_is_a_value
A5: the buffer of a microbatch: schedule/test_builders_deepspeed.py::test_the_training_stream test_a_schedule_is_a_value
A6: iteration: test_a_schedule_is_a_value
A7: inference: schedule/test_builders_deepspeed.py::test_the_inference_stream
A8: order in a step of inference: schedule/test_builders_deepspeed.py::test_the_inference_stream
A9: inference of one stage: schedule/test_builders_deepspeed.py::test_the_inference_stream
A10: training in 2(M+S-1) steps: test_steps_and_bubble_of_training
A11: parities: schedule/test_builders_deepspeed.py::test_the_training_stream
A12: both orders of messages: schedule/test_builders_deepspeed.py::test_the_training_stream
A13: each with its buffers: schedule/test_builders_deepspeed.py::test_the_buffers_that_each_order_needs schedule/test_builders_deepspeed.py::test_the_source_order_with_the_buffers_of_head_overwrites_an_input
A14: loads: schedule/test_builders_deepspeed.py::test_the_training_stream
A15: compute of valid microbatches: schedule/test_builders_deepspeed.py::test_the_training_stream
A16: the end of a batch: schedule/test_builders_deepspeed.py::test_the_last_step_reduces_on_every_stage_even_where_it_is_empty_otherwise
A17: the microbatch before: schedule/test_builders_deepspeed.py::test_the_training_stream
A18: data parallelism: schedule/test_builders_deepspeed.py::test_gradient_accumulation
A19: instructions: test_instructions_are_values schedule/test_formats_pictures.py::test_steps_are_deepspeeds_words
A20: all of them: test_every_instruction_of_deepspeed_has_its_word
A21: contracts: test_the_update_follows_both_sums schedule/test_queues.py::test_wrong_schedules_are_refused test_steps.py::test_unused_and_frozen_parameters_and_stages_without_any
A22: errors: schedule/test_builders.py::test_counts_are_whole_and_positive test_a_schedule_is_a_value
A defect 1: a buffer too many: schedule/test_passes.py::test_as_many_slots_as_deepspeed_has_or_fewer
A defect 2: two loops over one iterator: test_a_schedule_is_a_value
A defect 3: a variable that nothing reads: schedule/test_builders_deepspeed.py::test_the_inference_stream
A defect 4: one loss and one gradient at a time: schedule/test_universal_gradients.py::test_gradients_are_those_of_the_sequential_model
B1: ranks of a grid: parallel/test_topology.py::test_ranks_and_coordinates_agree_with_a_table
B2: the rank at a coordinate: parallel/test_topology.py::test_ranks_and_coordinates_agree_with_a_table parallel/test_topology.py::test_errors_say_what_was_got_and_what_is_valid
B3: names of axes: parallel/test_topology.py::test_an_axis_that_is_missing_has_no_size_and_no_groups
B4: text of a rank: parallel/test_topology.py::test_text_of_a_rank_and_its_options
B5: the size of an axis: parallel/test_topology.py::test_an_axis_that_is_missing_has_no_size_and_no_groups
B6: the coordinate of a rank: parallel/test_topology.py::test_ranks_and_coordinates_agree_with_a_table parallel/test_topology.py::test_errors_say_what_was_got_and_what_is_valid
B7: groups along an axis: parallel/test_topology.py::test_groups_agree_with_a_table parallel/test_topology.py::test_an_axis_that_is_missing_has_no_size_and_no_groups
B8: ranks that match: parallel/test_topology.py::test_filters_agree_with_a_table
B9: ranks at an index: parallel/test_topology.py::test_filters_agree_with_a_table parallel/test_topology.py::test_errors_say_what_was_got_and_what_is_valid
B10: number of ranks, and text: parallel/test_topology.py::test_text_round_trip
B11: prime factors: parallel/test_topology.py::test_the_default_grid_deals_prime_factors_in_turn parallel/test_topology.py::test_errors_say_what_was_got_and_what_is_valid
B12: pipe and data: test_the_two_layouts
B13: pipe, model and data: test_the_two_layouts
B14: a grid of processes: test_a_grid_of_processes
B15: the grid by default: parallel/test_topology.py::test_default_grid
B16: sizes of the grid: test_the_two_layouts
B17: a grid of as many ranks as there are: test_a_grid_of_processes
B18: groups in one order: parallel/test_topology.py::test_groups_of_a_cube test_a_grid_of_processes
B19: pairs of neighbours: parallel/test_topology.py::test_neighbours_of_five_stages_and_two_replicas parallel/test_topology.py::test_groups_agree_with_a_table
B20: the rank of another stage: parallel/test_topology.py::test_a_rank_moved_along_axes parallel/test_topology.py::test_groups_agree_with_a_table
B21: ranks, sizes and groups of a process: test_a_grid_of_processes
B22: their later names: test_a_grid_of_processes
B defect 1: a wrong coordinate is a NameError: parallel/test_topology.py::test_errors_say_what_was_got_and_what_is_valid
B defect 2: a wrong example of neighbours: parallel/test_topology.py::test_neighbours_of_five_stages_and_two_replicas
B defect 3: a grid without pipe or data: parallel/test_topology.py::test_groups_agree_with_a_table test_the_two_layouts
B defect 4: a default that changes, and prints: test_topologies_print_nothing_and_share_no_default
B defect 5: a variable of a loop bound again: parallel/test_topology.py::test_groups_agree_with_a_table
C1: names of split points: parallel/test_partition.py::test_names_of_split_points
C2: stages of a rank by default: parallel/test_partition.py::test_number_of_stages
C3: layers of a stage: parallel/test_partition.py::test_number_of_stages
C4: more stages than layers: parallel/test_partition.py::test_number_of_stages
C5: weights of the ends: parallel/test_partition.py::test_effective_loads_are_even_and_the_ends_lightest parallel/test_partition.py::test_heavy_ends_take_as_little_as_they_can parallel/test_partition.py::test_sizes
C6: a schedule by name or file: schedule/test_configuration.py::test_a_name_in_any_spelling schedule/test_configuration.py::test_a_file_of_an_order_of_ones_own schedule/test_configuration.py::test_what_is_refused
C7: microbatches and their warning: schedule/test_configuration.py::test_what_is_refused schedule/test_configuration.py::test_fewer_microbatches_than_stages_are_warned_of_where_it_is_called
C8: stages of a rank: parallel/test_topology.py::test_stages_of_each_rank
C9: what is logged: test_a_schedule_says_what_it_is
C defect 1: three stages, and one: parallel/test_partition.py::test_sizes
C defect 2: uneven stages: parallel/test_partition.py::test_sizes parallel/test_partition.py::test_effective_loads_are_even_and_the_ends_lightest
C defect 3: empty stages: parallel/test_partition.py::test_sizes parallel/test_partition.py::test_empty_stages_have_to_be_asked_for
C defect 4: an error in the error: schedule/test_configuration.py::test_what_is_refused
C defect 5: None for an unknown style: parallel/test_topology.py::test_errors_say_what_was_got_and_what_is_valid
C defect 6: an assertion that is always true: schedule/test_configuration.py::test_a_file_that_is_no_schedule_is_told_as_such
D1: two stages of each rank: schedule/test_builders_dualpipe.py::test_the_two_chains_are_copies_of_each_other
D2: any device, stages without parameters: test_dualpipe_of_stages_without_parameters
D3: an overlapped pair where there is a function: test_stage_kinds.py::test_an_overlapped_function_of_the_callers
D4: ranks in another order: test_a_pipeline_over_ranks_in_another_order
D5: first, last and middle ranks: schedule/test_builders_dualpipe.py::test_dualpipe
D6: two directions, mirrored: test_ranks_of_dualpipe_are_mirrored
D7: first and last stages of both directions: schedule/test_builders_dualpipe.py::test_the_two_chains_are_copies_of_each_other runtime/test_p2p.py::test_four_processes_give_the_bits_of_one
D8: a step with inputs and targets at the ends: runtime/test_p2p.py::test_four_processes_give_the_bits_of_one
D9: what is demanded: schedule/test_builders_dualpipe.py::test_what_does_not_fit_is_refused test_a_step_without_a_loss_is_refused
D10: forward only: test_dualpipe_without_a_backward
D11: the batch in parts: runtime/test_arguments.py::test_a_whole_batch_is_cut_into_views runtime/test_p2p.py::test_four_processes_give_the_bits_of_one
D12: labels of the other end: test_bugs.py::test_outputs_and_input_gradients_come_in_the_order_of_the_batch test_sums_and_losses_of_microbatches
D13: losses of microbatches, sums of gradients: test_sums_and_losses_of_microbatches
D14: outputs: test_bugs.py::test_outputs_and_input_gradients_come_in_the_order_of_the_batch
D15: outputs and inputs of any form: test_steps.py::test_trees_integers_masks_and_none_pass_the_boundaries
D16: memory is freed: runtime/test_execute.py::test_what_is_consumed_is_gone_from_the_buffers test_a_stage_may_return_a_view
D17: gradients that are none: test_steps.py::test_unused_and_frozen_parameters_and_stages_without_any
D18: weight gradients later: runtime/test_execute.py::test_residuals_are_used_once_by_their_only_owner_and_dropped schedule/test_builders_dualpipe.py::test_dualpipe
D19: where backwards are cut: schedule/test_builders_dualpipe.py::test_dualpipe
D20: eight phases: schedule/test_builders_dualpipe.py::test_dualpipe
D21: ranks in the middle: schedule/test_builders_dualpipe.py::test_dualpipe
D22: receives are posted before: schedule/test_place_communication.py::test_receives_are_posted_early_as_far_as_the_order_of_the_pair_lets_them
D23: messages in batches: schedule/test_place_communication.py::test_any_placement_and_any_order_is_proved schedule/test_send_completion.py::test_a_send_is_waited_for_as_soon_as_the_peer_has_shown_that_it_received_it
D24: shapes of messages: runtime/test_p2p.py::test_shapes_may_change_from_step_to_step_and_within_a_step test_steps.py::test_low_and_mixed_precision
D25: the contract of an overlapped pair: test_stage_kinds.py::test_an_overlapped_function_of_the_callers
D26: gradients of both copies: test_steps.py::test_a_bidirectional_schedule_takes_each_stage_of_the_model_once runtime/test_p2p.py::test_four_processes_give_the_bits_of_one
D27: DualPipeV: schedule/test_builders_dualpipe.py::test_dualpipev schedule/test_universal_gradients.py::test_gradients_are_those_of_the_sequential_model
D defect 1: no gradient at all raises: test_a_boundary_without_gradients
D defect 2: a gradient that is None hangs: test_a_boundary_without_gradients
D defect 3: a None among the shapes: test_steps.py::test_trees_integers_masks_and_none_pass_the_boundaries
D defect 4: a batch that does not divide: runtime/test_arguments.py::test_a_batch_that_does_not_fit_is_refused_by_the_path_of_its_leaf
D defect 5: a default that changes: test_no_default_of_a_function_can_change
D defect 6: sums, and copies that part, in silence: test_steps.py::test_a_bidirectional_schedule_takes_each_stage_of_the_model_once runtime/test_replicas.py::test_replicas_with_other_parameters_are_told_on_every_rank_and_the_next_step_is_right
D defect 7: one store for a process: test_bugs.py::test_one_step_function_in_two_threads
D defect 8: no CPU: runtime/test_p2p.py::test_four_processes_give_the_bits_of_one
E1: groups of a replica: parallel/test_topology.py::test_replicas_are_contiguous_where_data_is_outermost
E2: no groups of neighbours: runtime/test_p2p.py::test_a_pipeline_over_part_of_the_ranks
E3: an overflow anywhere: training/trainer/test_agreement.py::test_an_overflow_of_one_rank_of_any_axis_skips_the_update_on_all
E4: an overflow on several devices: training/trainer/test_agreement.py::test_an_overflow_of_one_rank_of_any_axis_skips_the_update_on_all training/trainer/test_agreement.py::test_a_failure_in_one_pipeline_fails_all_and_an_overflow_skips_all
E5: partitions and counts of parameters: test_layers_are_cut_by_counts_of_parameters
E6: equal numbers of layers: parallel/test_partition.py::test_uniform_chunks parallel/test_partition.py::test_empty_stages_have_to_be_asked_for
E7: balanced weights: parallel/test_partition.py::test_optimal_for_any_weights parallel/test_partition.py::test_balanced_chunks_have_the_least_maximum test_layers_are_cut_by_counts_of_parameters
E8: a model of layers: test_layers_are_cut_by_counts_of_parameters stage/test_layers.py::test_stages_one_after_the_other_are_the_layers
E9: gradients of shared modules: runtime/test_ties.py::test_in_four_processes
E10: what is shared: runtime/test_ties.py::test_what_cannot_be_tied_is_refused_by_name runtime/test_ties.py::test_ranks_tie_the_same
E11: found by itself: splitter/test_split.py::test_an_encoder_and_decoder_with_tied_embeddings
E12: a microbatch on the device: runtime/test_execute.py::test_a_microbatch_is_brought_to_the_device_alone
E13: forms of data and labels: test_dictionaries_of_data_and_labels splitter/test_split.py::test_inputs_have_the_form_of_the_arguments
E14: shapes are told: runtime/test_p2p.py::test_shapes_may_change_from_step_to_step_and_within_a_step
E15: 1F1B: schedule/test_builders.py::test_one_f_one_b_with_fewer_microbatches_than_ranks test_steps.py::test_evaluation_returns_loss_and_outputs test_results.py::test_results_are_those_of_the_model_in_one_piece
E16: a loss, or forward only: test_a_step_without_a_loss_is_refused
E17: a batch that does not divide: runtime/test_arguments.py::test_a_batch_that_does_not_fit_is_refused_by_the_path_of_its_leaf
E18: interleaved: schedule/test_builders.py::test_interleaved_1f1b_is_megatrons schedule/test_builders.py::test_as_many_microbatches_as_ranks_are_never_more_than_all_forwards_of_warm_up
E19: sharded parameters: training/trainer/test_grids.py::test_grids_train_as_one_process
E20: accumulation: training/test_buckets.py::test_sums_over_microbatches
E21: clipping: training/test_norms.py::test_clipping_is_that_of_torch training/test_norms.py::test_parts_combine_to_the_norm_of_the_whole training/trainer/test_grids.py::test_grids_train_as_one_process
E22: messages together, no waits for the device: schedule/test_place_communication.py::test_the_picture_of_one_f_one_b simulated/test_host_waits.py::test_a_step_between_ranks_waits_at_its_end_alone
E defect 1: outputs of interleaved stages: test_dictionaries_of_data_and_labels
E defect 2: buffers of another dtype: test_all_warm_up_in_half_precision
E defect 3: shared by ranks but the first: test_a_parameter_of_any_two_stages_is_tied
E defect 4: norms of other orders: training/test_norms.py::test_clipping_is_that_of_torch
E defect 5: a type that is compared with a text: training/test_optimizers.py::test_mixed_dtypes_and_integer_leaves
E defect 6: shared parameters counted twice: training/trainer/test_one_process.py::test_a_parameter_of_several_places_counts_once_in_the_norm
E defect 7: labels in a dictionary: test_dictionaries_of_data_and_labels
E defect 8: a shared parameter without a gradient: test_a_tied_place_without_a_gradient
"""  # noqa: E501


def table() -> dict[str, list[tuple[str, str]]]:
    """Each row with its tests, as (file, name)."""
    rows = {}
    for line in TABLE.strip().splitlines():
        row, _, tests = line.split(": ", 2)
        tests = [test if "::" in test else f"{Path(__file__).name}::{test}" for test in tests.split()]
        assert row not in rows, row
        rows[row] = [tuple(test.split("::")) for test in tests]
    return rows


def collected(path: Path) -> Counter[str]:
    """The functions at the top of a file that pytest takes for tests, and that are not skipped always."""
    return Counter(
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(
            "mark.skip(" in ast.unparse(d) or "mark.large" in ast.unparse(d) for d in node.decorator_list
        )
    )


def faults(rows: dict[str, list[tuple[str, str]]]) -> list[str]:
    """What is wrong with a table of rows."""
    expected = [f"{s}{n}" for s, count in ROWS.items() for n in range(1, count + 1)]
    expected += [f"{s} defect {n}" for s, count in DEFECTS.items() for n in range(1, count + 1)]
    found = [f"{row} has no test" for row in expected if not rows.get(row)]
    found += [f"{row} is no row" for row in rows if row not in expected]
    tests = {test for named in rows.values() for test in named}
    files = {file: collected(ROOT / file) if (ROOT / file).is_file() else {} for file, _ in tests}
    return found + [
        f"{file}::{name} is no test" for file, name in sorted(tests) if files[file].get(name) != 1
    ]


def test_every_row_has_a_test():
    assert faults(table()) == []


def test_a_row_without_a_test_would_be_seen():
    rows = table()
    del rows["C7"]
    rows["E9"] = []
    rows["B defect 9"] = rows["A1"]
    rows["D3"] = [("test_sources.py", "test_that_is_gone"), ("gone.py", "test_every_row_has_a_test")]
    assert faults(rows) == [
        "C7 has no test",
        "E9 has no test",
        "B defect 9 is no row",
        "gone.py::test_every_row_has_a_test is no test",
        "test_sources.py::test_that_is_gone is no test",
    ]


@pytest.mark.slow
def test_pytest_collects_them():
    named = sorted({f"tests/{file}::{name}" for tests in table().values() for file, name in tests})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# A: schedules of DeepSpeed


def test_a_schedule_is_a_value():
    schedule = deepspeed_train(4, 8)
    assert (schedule.stages, schedule.ranks, schedule.microbatches) == (4, 4, 8)
    assert [schedule.stages_of(r) for r in range(4)] == [(0,), (1,), (2,), (3,)]
    (chain,) = schedule.flows
    assert [*pairwise(chain.stages)] == [(0, 1), (1, 2), (2, 3)] and list(chain.microbatches) == [*range(8)]
    # Two loops over the steps of one rank do not disturb each other.
    program = schedule.programs[1]
    assert [one is other for one, other in zip(program, program, strict=True)] == [True] * len(program)
    assert len([0 for _ in program for _ in program]) == len(program) ** 2
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"rank: got {rank}, expected a number from 0 to 3"):
            schedule.stages_of(rank)
    for instruction in (F(4, 0), F(0, 8)):
        with pytest.raises(ScheduleError):
            check(single_chain("wrong", range(4), 8, [[instruction], [], [], []]))


def test_a_schedule_without_a_bound_has_a_buffer_for_each_microbatch():
    for m in (1, 2, 5):
        lowered = allocate_slots(insert_loads(place_communication(gpipe(3, m))))
        assert check(lowered).slots[0] == m
    for schedule in (gpipe(3, 5), one_f_one_b(3, 5), BUILDERS["zb_h1"](3, 5)):
        assert max(check(allocate_slots(place_communication(schedule))).slots) <= 2 * 5


def test_steps_and_bubble_of_training():
    for stages, m in ((1, 1), (2, 3), (4, 8), (5, 4)):
        for order in ("source", "head"):
            schedule = deepspeed_train(stages, m, order)
            assert {len(program) for program in schedule.programs} == {2 * (m + stages - 1)}
            timeline = pp.simulate(schedule)
            assert timeline.bubble == pytest.approx((stages - 1) / (m + stages - 1))


def test_instructions_are_values():
    one, other = F(1, 2), F(1, 2)
    assert one == other and hash(one) == hash(other) and one != F(1, 3)
    assert (str(one), one.op, one.stage, one.microbatch) == ("1F2", Op.F, 1, 2)
    with pytest.raises(AttributeError):
        one.stage = 0


def test_every_instruction_of_deepspeed_has_its_word():
    words = {word.split("(")[0] for word in to_steps(deepspeed_train(3, 2)).replace("\n", " ").split()}
    assert words - {"rank", "0", "1", "2", "-"} == {
        *("OptimizerStep", "ReduceGrads", "ReduceTiedGrads", "LoadMicroBatch", "ForwardPass"),
        *("BackwardPass", "SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
    }


def test_the_update_follows_both_sums():
    tail = [i.op for i in append_tail(one_f_one_b(2, 2), tied=True).instructions(1)][-3:]
    assert tail == [Op.REDUCE_TIED, Op.REDUCE_GRAD, Op.STEP]
    early = append_tail(one_f_one_b(1, 1)).programs[0]
    moved = [[i for step in early for i in step if i.op is not Op.REDUCE_GRAD]]
    moved[0] += [i for step in early for i in step if i.op is Op.REDUCE_GRAD]
    with pytest.raises(ScheduleError):
        check(single_chain("wrong", [0], 1, moved))


# B: topologies and grids of DeepSpeed


def test_the_two_layouts():
    two = Topology.of(pipe=2, data=3)
    assert two.axes == ("pipe", "data") and two.rank(pipe=1, data=0) == 3
    three = Topology.of(pipe=2, data=3, model=4)
    assert three.axes == ("pipe", "data", "model") and three.rank(pipe=0, data=1, model=0) == 4
    assert [max(t.axis_size("model"), 1) for t in (two, three)] == [1, 4]
    assert prime_factors(12) == (2, 2, 3) and default_grid(12) == Topology.of(pipe=6, data=2)
    # A grid without a pipeline, or without data ranks, answers as well.
    assert list(Topology.of(data=3).groups("pipe")) == []
    assert Topology.of(pipe=3).group_of(1, "pipe") == (0, 1, 2)


def test_topologies_print_nothing_and_share_no_default(capsys):
    omitted = ["data"]
    assert Topology.of(pipe=2, data=2).rank_repr(3, omit_axes=omitted) == "pipe_01"
    omitted.append("pipe")
    assert Topology.of(pipe=2, data=2, model=2).rank_repr(3) == "model_01"
    default_grid(8)
    assert capsys.readouterr() == ("", "")


def grid_of_processes(rank, size):
    """A topology, torch's mesh of the same axes, and groups of several axes."""
    topology = Topology.of(pipe=2, data=1, model=2)
    assert topology.world_size == dist.get_world_size()
    mesh = init_device_mesh("cpu", topology.sizes, mesh_dim_names=topology.axes)
    place = topology.coordinate(rank)
    for axis in topology.axes:
        group = mesh[axis].get_group()
        members = topology.group_of(rank, axis)
        assert tuple(dist.get_process_group_ranks(group)) == members
        assert (
            dist.get_rank(group) == mesh.get_local_rank(axis) == getattr(place, axis) == members.index(rank)
        )
        assert mesh[axis].size() == dist.get_world_size(group) == topology.axis_size(axis)
    mine, groups = dist.new_subgroups_by_enumeration([*topology.groups("pipe", "model")])
    assert tuple(dist.get_process_group_ranks(mine)) == topology.group_of(rank, "pipe", "model")
    assert len(groups) == topology.axis_size("data")
    overflow = torch.tensor([float(rank == 2)])
    dist.all_reduce(overflow, dist.ReduceOp.MAX, mine)
    assert overflow == 1
    with pytest.raises((RuntimeError, ValueError)):
        init_device_mesh("cpu", (3, 2), mesh_dim_names=("pipe", "data"))
    return topology.moved(rank, pipe=1 - place.pipe)


def test_a_grid_of_processes(four):
    assert four(grid_of_processes) == [2, 3, 0, 1]


# C: helpers of torchtitan


def test_a_schedule_says_what_it_is():
    """What torchtitan logs: the schedule that runs, its stages and microbatches, and where a model is cut."""
    schedule = pp.schedule.configure("Interleaved1F1B", ranks=2, batch_size=8)
    assert repr(schedule).startswith("Schedule('interleaved_1f1b', ranks=2, stages=4, microbatches=8,")
    split = pp.split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.zeros(2, 4), at=4)
    assert split.at == ("1", "2", "3")


# D: DualPipe


def test_ranks_of_dualpipe_are_mirrored():
    """Rank r does with one direction what rank P-1-r does with the other."""
    schedule = pp.dualpipe(4, 12)
    mirrored = {s: s + 4 if s < 4 else s - 4 for s in range(8)}

    def instructions(rank, mirror):
        for i in schedule.instructions(rank):
            for part in i.parts or (i,):
                there = mirrored[part.stage] if mirror else part.stage
                yield i.op, part.op, there, (part.microbatch + 6) % 12 if mirror else part.microbatch

    for rank in range(4):
        assert [*instructions(rank, True)] == [*instructions(3 - rank, False)]


def identity(params, x):
    return x


def test_dualpipe_of_stages_without_parameters():
    params, inputs, targets = models.problem(pp.dualpipe(2, 4))
    params[1] = {}
    loss, grads = pp.value_and_grad([dense, identity], squared, pp.dualpipe(2, 4))(params, inputs, targets)
    batches = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    want, wanted = models.reference([dense, identity], squared, params, batches)
    torch.testing.assert_close((loss, grads), (want, wanted))


def another_order(rank, size):
    """The pipeline goes over ranks 2, 0, 3, 1, as its axis of a mesh says."""
    order = [2, 0, 3, 1]
    schedule = pp.one_f_one_b(4, 4)
    params, inputs, targets = models.problem(schedule)
    stage = order.index(rank)
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("pp",))
    with pp.P2P(mesh=mesh, timeout=30) as transport:
        step = pp.value_and_grad([dense] * 4, squared, schedule, transport)
        loss, grads = step({stage: params[stage]}, inputs, targets)
    want, wanted = pp.value_and_grad([dense] * 4, squared, schedule)(params, inputs, targets)
    assert torch.equal(loss, want) and same_bits(grads[stage], wanted[stage])


def test_a_pipeline_over_ranks_in_another_order(four):
    four(another_order)


def test_dualpipe_without_a_backward():
    """The forwards of the same schedule; without a loss, outputs."""
    schedule = pp.dualpipe(2, 6)
    forwards = [i for i in schedule.instructions(0) for i in (i.parts or (i,)) if i.op is Op.F]
    only = forward_only(schedule)
    assert [*only.instructions(0)] == forwards
    params, inputs, targets = models.problem(schedule)
    judged = pp.evaluate([dense] * 2, squared, schedule, return_outputs=True)(params, inputs, targets)
    want, _ = pp.value_and_grad([dense] * 2, squared, schedule)(params, inputs, targets)
    assert torch.equal(judged.loss, want)
    outputs = pp.evaluate([dense] * 2, None, schedule, return_outputs=True)(params, inputs)
    assert torch.equal(outputs, judged.outputs)
    torch.testing.assert_close(outputs, dense(params[1], dense(params[0], inputs)))


def test_sums_and_losses_of_microbatches():
    """Losses come in the order of the batch, whichever end had them; weights of one make sums."""
    schedule = pp.dualpipe(2, 4)
    params, inputs, targets = models.problem(schedule)
    options = {"return_losses": True, "loss_weights": [1.0] * 4}
    result = pp.value_and_grad([dense] * 2, squared, schedule, **options)(params, inputs, targets)
    batches = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    want, wanted = models.reference([dense] * 2, squared, params, batches, [1.0] * 4)
    torch.testing.assert_close((result.loss, result.grads), (want, wanted))
    each = [squared(dense(params[1], dense(params[0], x)), y) for x, y in batches]
    torch.testing.assert_close(result.losses, torch.stack(each))


def turned(params, x):
    return (x @ params["w"]).view(2, -1, 4).transpose(1, 2).reshape(-1, 4)[:, :4]


def test_a_stage_may_return_a_view():
    params, inputs, targets = models.problem(pp.dualpipe(2, 4), b=4)
    stages = [turned, lambda p, x: turned(p, x).expand(1, -1, -1)[0]]
    batches = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    found = pp.value_and_grad(stages, squared, pp.dualpipe(2, 4))(params, inputs, targets)
    torch.testing.assert_close(tuple(found), models.reference(stages, squared, params, batches))


def apart(params, x):
    return x.detach() @ params["w"]


def no_gradient(rank, size):
    """Nothing comes back to the first stage: no rank waits for it."""
    schedule = pp.dualpipe(2, 4)
    params, inputs, targets = models.problem(schedule)
    with warnings.catch_warnings(), pp.P2P(timeout=30) as transport:
        warnings.simplefilter("ignore")
        loss, grads = pp.value_and_grad([dense, apart], squared, schedule, transport)(params, inputs, targets)
    batches = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    want, wanted = models.reference([dense, apart], squared, params, batches)
    torch.testing.assert_close((loss, grads), (want, wanted))
    assert not grads[0]["w"].any()


def test_a_boundary_without_gradients(two):
    two(no_gradient)


def test_no_default_of_a_function_can_change():
    made = [getattr(space, name) for space in (pp, pp.schedule, pp.parallel) for name in space.__all__]
    functions = [f for f in made if inspect.isfunction(f)]
    functions += [m for c in made if inspect.isclass(c) for m in vars(c).values() if inspect.isfunction(m)]
    assert len(functions) > 200
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            assert not isinstance(parameter.default, list | dict | set), (function, parameter)


# E: pipelines of ColossalAI


def test_layers_are_cut_by_counts_of_parameters():
    """A layer without parameters counts as one; frozen parameters count nothing."""
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 32), nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 4)]
    layers[0].weight.requires_grad_(False)
    counts = [sum(p.numel() for p in layer.parameters() if p.requires_grad) or 1 for layer in layers]
    assert counts == [4, 1, 160, 132, 1, 20]
    partition = partition_balanced(counts, 2)
    assert partition.loads(counts) == (165, 153)
    x = normal(3, 4, dtype=torch.float32)
    split = pp.split(nn.Sequential(*layers), x, at=partition)
    assert split.at == ("3",)


def test_dictionaries_of_data_and_labels():
    """Interleaved stages return outputs, and the loss takes labels by their names."""

    def first(params, batch):
        return {"h": torch.tanh(batch["x"] @ params["w"]), "mask": batch["mask"]}

    def last(params, batch):
        return (batch["h"] * batch["mask"]) @ params["w"]

    def criterion(y, *, targets, weights):
        return ((y - targets).square() * weights).mean()

    params, x, y = models.problem(4, 4)
    inputs = {"x": x, "mask": torch.ones(12, 1, dtype=torch.bool)}
    labels = {"targets": y, "weights": torch.full((12, 1), 2.0, dtype=torch.float64)}
    stages = [first, lambda p, b: first(p, b | {"x": b["h"]}), lambda p, b: first(p, b | {"x": b["h"]}), last]
    schedule = pp.interleaved_1f1b(2, 4)
    step = pp.value_and_grad(stages, lambda y, t: criterion(y, **t), schedule, return_outputs=True)
    result = step(params, inputs, labels)
    want = x
    for s in range(3):
        want = torch.tanh(want @ params[s]["w"])
    torch.testing.assert_close(result.outputs, want @ params[3]["w"])
    torch.testing.assert_close(result.loss, 2 * squared(result.outputs, y))


def test_a_step_without_a_loss_is_refused():
    for schedule in (pp.one_f_one_b(2, 2), pp.dualpipe(2, 4)):
        with pytest.raises((TypeError, ValueError), match="loss_fn"):
            pp.value_and_grad([dense] * 2, None, schedule)
        with pytest.raises(ValueError, match="return_outputs"):
            pp.evaluate([dense] * 2, None, schedule)


def test_all_warm_up_in_half_precision():
    schedule = find_builder("interleaved_1f1b")(2, 2)
    assert peak_activations(schedule)[0] == 4
    params, inputs, targets = models.problem(schedule, dtype=torch.bfloat16)
    loss, grads = pp.value_and_grad([dense] * 4, squared, schedule)(params, inputs, targets)
    step = pp.value_and_grad([dense] * 4, squared, schedule)
    messages = sum(len(i.op.value) == 6 for r in range(2) for i in step.schedule.instructions(r))
    text = step.lower(params, inputs, targets).as_text()
    assert text.count(f"({3 * 4 * torch.bfloat16.itemsize} B)") == messages == 2 * 2 * 3 * 2
    assert {grads[s]["w"].dtype for s in grads} == {torch.bfloat16} and loss.isfinite()


@pytest.mark.parametrize("places", [(1, 3), (2, 3), (0, 3)])
def test_a_parameter_of_any_two_stages_is_tied(places):
    params, inputs, targets = models.problem(4)
    params[places[1]]["w"] = params[places[0]]["w"].clone()
    step = pp.value_and_grad(
        [dense] * 4, squared, pp.one_f_one_b(4, 4), tied={"shared": [(s, "w") for s in places]}
    )
    _, grads = step(params, inputs, targets)
    batches = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    _, wanted = models.reference([dense] * 4, squared, params, batches)
    both = wanted[places[0]]["w"] + wanted[places[1]]["w"]
    for s in places:
        torch.testing.assert_close(grads[s]["w"], both)


def half_used(rank, size):
    """One place of a tied parameter has no gradient: no rank waits for it."""
    params, inputs, targets = models.problem(2)
    params[1] = {"w": params[0]["w"].clone(), "v": normal(4, 4)}
    with warnings.catch_warnings(), pp.P2P(timeout=30) as transport:
        warnings.simplefilter("ignore")
        step = pp.value_and_grad(
            [dense, lambda p, x: x @ p["v"]],
            squared,
            pp.one_f_one_b(2, 4),
            transport,
            tied={"shared": [(0, "w"), (1, "w")]},
        )
        _, grads = step({rank: params[rank]}, inputs, targets)
    batches = [*zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    _, wanted = models.reference([dense, lambda p, x: x @ p["v"]], squared, params, batches)
    torch.testing.assert_close(grads[rank]["w"], wanted[0]["w"])


def test_a_tied_place_without_a_gradient(two):
    two(half_used)

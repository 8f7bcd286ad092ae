"""DeepSpeed's streams, instruction by instruction, against a second derivation of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppfunc.schedule import data_parallel, deepspeed_inference, deepspeed_train
from ppfunc.schedule.errors import ScheduleError
from ppfunc.schedule.proof.certificate import check

COUNTS = [(s, m) for s in range(1, 9) for m in (*range(1, 14), 24)]


def train_steps(stages: int, microbatches: int, stage: int, head: bool) -> list[list[str]]:
    """The four cases of parity written out one by one, the rest in the order of the original."""
    buffers = max(2, min(stages - stage + (0 if head else 1), microbatches))
    steps, before = [], -1
    for step in range(2 * (microbatches + stages - 1)):
        match step % 2, stage % 2:
            case 0, 0:
                now, forward = step // 2 - stage // 2, True
            case 1, 1:
                now, forward = (step - 1) // 2 - stage // 2, True
            case 0, 1:
                now, forward = step // 2 - stages + (stage + 1) // 2, False
            case _:
                now, forward = (step - 1) // 2 - stages + 1 + stage // 2, False
        valid, was_valid = 0 <= now < microbatches, 0 <= before < microbatches
        take, give = [], []
        if forward and stage > 0:
            take += [f"RECV_F{now}@{now % buffers}"] if valid else []
            give += [f"SEND_B{before}@{before % buffers}"] if was_valid else []
        if not forward and stage + 1 < stages:
            take += [f"RECV_B{now}@{now % buffers}"] if valid else []
            give += [f"SEND_F{before}@{before % buffers}"] if was_valid else []
        line = take + give if forward != head else give + take
        if valid and forward and stage in (0, stages - 1):
            line.append(f"LOAD{now}@{now % buffers}")
        if valid:
            line.append(f"{'F' if forward else 'B'}{now}@{now % buffers}")
        steps.append(line)
        before = now
    steps[-1] += ["REDUCE_TIED", "REDUCE_GRAD", "STEP"]
    return steps


def inference_steps(stages: int, microbatches: int, stage: int) -> list[list[str]]:
    """Load, then the messages, even stages sending first, then the forward; sends one step late."""
    steps = []
    for step in range(microbatches + stages - 1):
        now, line = step - stage, []
        into, out = (step % 2, (step + 1) % 2) if stage % 2 == 0 else ((step + 1) % 2, step % 2)
        valid, was_valid = 0 <= now < microbatches, 0 <= now - 1 < microbatches
        if valid and stage in (0, stages - 1):
            line.append(f"LOAD{now}@{into}")
        give = [f"SEND_F{now - 1}@{out}"] if was_valid and stage + 1 < stages else []
        take = [f"RECV_F{now}@{into}"] if valid and stage > 0 else []
        line += give + take if stage % 2 == 0 else take + give
        steps.append(line + ([f"F{now}@{into}"] if valid else []))
    return steps


def text(program, stage):
    """The steps of a program as lists of text, every instruction checked to be of the stage."""
    assert all(i.stage == stage for step in program for i in step)
    return [[str(i).removeprefix(str(stage)) for i in step] for step in program]


@pytest.mark.parametrize("order", ["source", "head"])
def test_the_training_stream(order):
    for stages, microbatches in COUNTS:
        schedule = deepspeed_train(stages, microbatches, order)
        for stage, program in enumerate(schedule.programs):
            assert text(program, stage) == train_steps(stages, microbatches, stage, order == "head"), (
                stages,
                microbatches,
            )


def test_the_inference_stream():
    for stages, microbatches in COUNTS:
        schedule = deepspeed_inference(stages, microbatches)
        for stage, program in enumerate(schedule.programs):
            assert text(program, stage) == inference_steps(stages, microbatches, stage), (
                stages,
                microbatches,
            )


def test_the_buffers_that_each_order_needs():
    """One more buffer where the activation is received before the gradient is sent."""
    used = {
        order: [
            len({i.slot for i in deepspeed_train(4, 8, order).instructions(r) if i.slot is not None})
            for r in range(4)
        ]
        for order in ("source", "head")
    }
    assert used == {"source": [5, 4, 3, 2], "head": [4, 3, 2, 2]}


def test_the_last_step_reduces_on_every_stage_even_where_it_is_empty_otherwise():
    lasts = [" ".join(map(str, program[-1])) for program in deepspeed_train(3, 2).programs]
    assert lasts == [
        "0RECV_B1@1 0B1@1 0REDUCE_TIED 0REDUCE_GRAD 0STEP",
        "1SEND_B1@1 1REDUCE_TIED 1REDUCE_GRAD 1STEP",
        "2REDUCE_TIED 2REDUCE_GRAD 2STEP",
    ]


def test_gradient_accumulation():
    (program,) = data_parallel(1, 3).programs
    assert text(program, 0) == [
        ["LOAD0@0", "F0@0", "B0@0"],
        ["LOAD1@0", "F1@0", "B1@0"],
        ["LOAD2@0", "F2@0", "B2@0", "REDUCE_GRAD", "STEP"],
    ]


def test_another_order_is_refused():
    with pytest.raises(ValueError, match=r"order = 'tail', expected 'source' or 'head'"):
        deepspeed_train(2, 2, "tail")


@pytest.mark.parametrize(
    "build", [deepspeed_inference, deepspeed_train, lambda s, m: deepspeed_train(s, m, "head")]
)
def test_every_step_is_atomic_and_no_buffer_is_overwritten(build):
    """A barrier may stand between any two steps, and the buffers are enough."""
    for stages in range(1, 9):
        for microbatches in (1, 2, 3, 7, 12):
            assert check(build(stages, microbatches)).step_atomic
            check(build(stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), [(3, 3), (4, 8), (8, 16)])
def test_the_source_order_with_the_buffers_of_head_overwrites_an_input(stages, microbatches):
    """The two differences between the orders belong together."""
    source = deepspeed_train(stages, microbatches, "source")

    def with_fewer(stage, i):
        return (
            i if i.slot is None else i._replace(slot=i.microbatch % max(2, min(stages - stage, microbatches)))
        )

    programs = tuple(
        tuple(tuple(with_fewer(r, i) for i in step) for step in program)
        for r, program in enumerate(source.programs)
    )
    with pytest.raises(ScheduleError, match="slot"):
        check(replace(source, programs=programs))

"""Ranks in processes joined by gloo: the same bits as in one process, step after step."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from unittest.mock import patch

import optree
import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from ppfunc.runtime.control.links import Rendezvous
from ppfunc.runtime.transport import p2p
from ppfunc.schedule import chimera, remove_tail
from tests.builders import BUILDERS
from tests.clock import busy
from tests.models import dense, squared, traced_once

D = 4
ROWS = 3  # of a microbatch
# A name, then how a schedule is built for so many ranks.
SCHEDULES = {
    name: lambda ranks, build=build: remove_tail(build(ranks, 2 * ranks)) for name, build in BUILDERS.items()
} | {
    "1f1b of an odd number": lambda ranks: pp.one_f_one_b(ranks, 5),
    "fewer microbatches than ranks": lambda ranks: pp.one_f_one_b(ranks, 1),
    "zbv of more": lambda ranks: pp.zbv(ranks, 2 * ranks + 3),
    "dualpipe of more": lambda ranks: pp.dualpipe(ranks, 2 * ranks + 2),
    "chimera": lambda ranks: chimera(ranks, 2 * ranks),
}


def stage(params, x):
    hidden = torch.tanh(x["h"] @ params["w"]) * x["mask"][:, None]
    return {
        "h": hidden,
        "mask": x["mask"],
        "empty": x["h"][:0],
        "z": torch.complex(hidden, hidden),
        "half": hidden.bfloat16(),
    }


def loss_fn(y, target):
    return (y["h"] - target).square().mean() + y["z"].abs().sum() / 100 + y["half"].float().sum() / 100


def problem(schedule):
    """Parameters by stage of the model, and a whole batch."""
    generator = torch.Generator().manual_seed(0)
    stages, rows = max(schedule.model_stages) + 1, ROWS * schedule.microbatches
    params = {s: {"w": torch.randn(D, D, generator=generator)} for s in range(stages)}
    inputs = {
        "h": torch.randn(rows, D, generator=generator),
        "mask": torch.tensor([True, False, True] * schedule.microbatches),
    }
    return params, inputs, torch.randn(rows, D, generator=generator)


def held_by(schedule, rank, trees):
    """Of trees by stage of the model, those that a rank holds."""
    return {s: trees[s] for s in schedule.model_stages_of(rank)}


def runs(schedule, rank, end):
    """Whether a rank runs a first stage (0) or a last one (-1)."""
    return any(schedule.placement[chain.stages[end]] == rank for chain in schedule.flows)


def microbatches_of(schedule, rank, end):
    """Those whose chain begins (0) or ends (-1) on a rank."""
    chains = [chain for chain in schedule.flows if schedule.placement[chain.stages[end]] == rank]
    return [m for chain in chains for m in chain.microbatches]


# Evaluated too, as are those that only go forward: one chain, one with both ends on a rank, and two.
EVALUATED = "1f1b of an odd number", "zbv", "chimera"


def alone(name, ranks):
    """What an evaluation and a step give in one process."""
    schedule = SCHEDULES[name](ranks)
    if not schedule.forward_only and name not in EVALUATED:
        return None, None, *gradients_alone(name, ranks)
    params, inputs, targets = problem(schedule)
    stages = [stage] * len(params)
    judged = pp.evaluate(stages, loss_fn, schedule, return_outputs=True)(
        params, pp.microbatch(inputs, schedule.microbatches), targets
    )
    wanted = (None,) * 3 if schedule.forward_only else gradients_alone(name, ranks)
    return judged.loss, judged.outputs, *wanted


def gradients_alone(name, ranks):
    params, inputs, targets = problem(schedule := SCHEDULES[name](ranks))
    step = pp.value_and_grad([stage] * len(params), loss_fn, schedule, engine=traced_once, argnums=(0, 1))
    result = step(params, inputs, targets)
    return result.loss, result.grads, result.input_grads


def compare(rank, ranks, name, judged_loss, judged_outputs, loss, grads, moved, mapped=True):
    """Three steps and an evaluation, as in one process. A process is given what it needs: its stages, and the
    batch where it enters or is judged.
    """
    schedule = SCHEDULES[name](ranks)
    params, inputs, targets = problem(schedule)
    held, first, last = held_by(schedule, rank, params), runs(schedule, rank, 0), runs(schedule, rank, -1)
    own_stages = [stage if s in held else None for s in params]
    own_inputs, own_targets = inputs if first else None, targets if last else None
    cut = pp.microbatch(inputs, schedule.microbatches)  # not all outputs have the rows of a whole batch
    with pp.P2P(timeout=30, mapped=mapped) as transport:
        options = {"transport": transport, "engine": traced_once}
        judge = pp.evaluate(own_stages, loss_fn, schedule, return_outputs=True, **options)
        if not schedule.forward_only:
            step = pp.value_and_grad(own_stages, loss_fn, schedule, argnums=(0, 1), **options)
        for _ in range(3):
            if judged_loss is not None:
                judged = judge(held, cut if first else None, own_targets)
                outputs = judged.outputs
                assert torch.equal(judged.loss, judged_loss)
                assert (outputs is None) != last
            if judged_loss is not None and last:
                here = microbatches_of(schedule, rank, -1)
                same = [
                    optree.tree_map(torch.equal, y, judged_outputs[m])
                    for y, m in zip(outputs, here, strict=True)
                ]
                assert same == [dict.fromkeys(judged_outputs[0], True)] * len(here)
            if not schedule.forward_only:
                result = step(held, own_inputs, own_targets)
                own, moves = result.grads, result.input_grads
                assert torch.equal(result.loss, loss)
                assert own.keys() == held.keys()
                for s in held:
                    assert torch.equal(own[s]["w"], grads[s]["w"]), s
                assert (moves is None) != first
            if not schedule.forward_only and first:  # the rows of its own chains
                rows, here = pp.microbatch(moved, schedule.microbatches), microbatches_of(schedule, rank, 0)
                wanted = pp.Microbatches(rows[m] for m in here).join()
                assert all(torch.equal(moves[key], wanted[key]) for key in ("h", "mask"))
                assert moves["h"].abs().sum() > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_processes_give_the_bits_of_one(four, name):
    four(compare, name, *alone(name, 4))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_messages_over_gloo_give_the_bits_of_one(four, name):
    four(compare, name, *alone(name, 4), False)


def change_shapes(rank, ranks):
    schedule = pp.one_f_one_b(ranks, 4)
    params, _, _ = problem(schedule)
    alone = pp.value_and_grad([stage] * ranks, loss_fn, schedule, argnums=(0, 1))
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport, argnums=(0, 1))
        for sizes in ([3] * 4, [2, 3, 2, 5], [6] * 4, [3] * 4, [2, 3, 2, 5]):
            generator = torch.Generator().manual_seed(sum(sizes))
            hidden, targets = (
                pp.Microbatches([torch.randn(n, D, generator=generator) for n in sizes]) for _ in range(2)
            )
            inputs = hidden.map(lambda h: {"h": h, "mask": torch.ones(len(h), dtype=torch.bool)})
            result = step(
                {rank: params[rank]}, inputs if rank == 0 else None, targets if rank == ranks - 1 else None
            )
            loss, grads, moved = result.loss, result.grads, result.input_grads
            result = alone(params, inputs, targets)
            want, wanted, all_moved = result.loss, result.grads, result.input_grads
            assert torch.equal(loss, want)
            assert torch.equal(grads[rank]["w"], wanted[rank]["w"])
            assert (moved is None) == (rank > 0)
            if rank == 0:
                assert all(torch.equal(a["h"], b["h"]) for a, b in zip(moved, all_moved, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_shapes_may_change_from_step_to_step_and_within_a_step(request, ranks):
    request.getfixturevalue({2: "two", 4: "four"}[ranks])(change_shapes)


def outputs_elsewhere(rank, ranks, name):
    """The rank that has the outputs was not given the inputs, and gives back what they were: a whole batch or
    microbatches.
    """
    schedule = SCHEDULES[name](ranks)
    params, inputs, _ = problem(schedule)
    params = {s: tree["w"] for s, tree in params.items()}
    held = held_by(schedule, rank, params)
    m, first, last = schedule.microbatches, runs(schedule, rank, 0), runs(schedule, rank, -1)
    stages = [lambda w, x: torch.tanh(x @ w)] * len(params)
    alone = pp.evaluate(stages, None, schedule, return_outputs=True)
    with pp.P2P(timeout=30) as transport:
        judge = pp.evaluate(
            [fn if s in held else None for s, fn in enumerate(stages)],
            None,
            schedule,
            transport,
            return_outputs=True,
        )
        for batch in (inputs["h"], pp.microbatch(inputs["h"], m), inputs["h"]):
            wanted, outputs = alone(params, batch), judge(held, batch if first else None)
            assert type(outputs) is (type(wanted) if last else type(None))
            if last:
                here = microbatches_of(schedule, rank, -1)
                wanted = wanted if isinstance(batch, pp.Microbatches) else pp.microbatch(wanted, m)
                outputs = outputs if isinstance(batch, pp.Microbatches) else pp.microbatch(outputs, len(here))
                assert all(torch.equal(y, wanted[n]) for y, n in zip(outputs, here, strict=True))


@pytest.mark.parametrize("name, ranks", [("gpipe", 2), ("zbv", 4), ("dualpipe", 4), ("data_parallel", 2)])
def test_outputs_are_on_the_last_rank_where_only_the_first_was_given_the_inputs(request, ranks, name):
    request.getfixturevalue({2: "two", 4: "four"}[ranks])(outputs_elsewhere, name)


def replicated_over_chains(rank, ranks):
    schedule = pp.dualpipe(ranks, 8)
    params, inputs, targets = problem(schedule)
    stages = [lambda p, x: stage(p, {"h": x[0] + x[1], "mask": x[2]}), *[stage] * (len(params) - 1)]
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad(stages, loss_fn, schedule, transport, argnums=1)
        batch = inputs["h"], pp.replicated(torch.zeros(D)), inputs["mask"]
        for call in (step.lower, step):  # before anything runs
            with pytest.raises(
                (ValueError, pp.PipelineError), match=r"none has the whole gradient of x; take"
            ):
                call(params, batch, targets)


def test_the_gradient_of_what_chains_of_several_processes_share_is_refused(two):
    two(replicated_over_chains)


def many_steps(rank, ranks, steps):
    """Memory, threads and descriptors before and after."""
    schedule = pp.one_f_one_b(ranks, 2)
    params, inputs, targets = problem(schedule)
    transport = pp.P2P(timeout=30)
    step = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport)

    def run(n):
        for _ in range(n):
            step({rank: params[rank]}, inputs, targets)

    def look():
        gc.collect()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        objects = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        return (
            resident,
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            objects,
        )

    run(200)
    before = look()
    run(steps)
    after = look()
    transport.close()
    return before, after


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind(two):
    for before, after in two(many_steps, 1000, timeout=180):
        assert after[0] - before[0] < 4 << 20  # allocators breathe; a page leaked per step would be more
        # What earlier transports of these processes had open may be closed meanwhile.
        assert all(now <= then for now, then in zip(after[1:], before[1:], strict=True)), (before, after)


def many_transports(rank, ranks, transports):
    """Threads and descriptors after so many transports, each of which ran steps and failed once."""
    schedule = pp.one_f_one_b(ranks, 4)
    params, inputs, targets = problem(schedule)

    def look():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def run(n):
        for _ in range(n):
            with pp.P2P(timeout=30) as transport:
                step = pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport, engine=traced_once)
                step({rank: params[rank]}, inputs, targets)
                with pytest.raises((ValueError, pp.PipelineError)):
                    step({} if rank else {rank: params[rank]}, inputs, targets)
                step({rank: params[rank]}, inputs, targets)
        dist.barrier()

    run(3)
    before = look()
    run(transports)
    after, end = look(), time.monotonic() + 5
    while any(now > then for now, then in zip(after, before, strict=True)) and time.monotonic() < end:
        time.sleep(0.05)  # threads that have ended may still be counted, more so on a busy machine
        after = look()
    return before, after


def test_a_closed_transport_leaves_no_thread_and_no_descriptor(two):
    for before, after in two(many_transports, 10):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def sub_group(rank, ranks):
    """A pipeline over ranks 1 and 3 of four, in reverse."""
    group = dist.new_group([3, 1])
    if rank in (1, 3):
        place = dist.get_rank(group)
        schedule = pp.gpipe(2, 3)
        params, inputs, targets = problem(schedule)
        with pp.P2P(group, timeout=30) as transport:
            loss, _ = pp.value_and_grad([stage] * 2, loss_fn, schedule, transport, engine=traced_once)(
                {place: params[place]}, inputs, targets
            )
        assert torch.equal(
            loss, pp.value_and_grad([stage] * 2, loss_fn, schedule)(params, inputs, targets)[0]
        )


def test_a_pipeline_over_part_of_the_ranks(four):
    four(sub_group)


def outside(rank, ranks):
    """Groups and meshes of rank 0 alone. What each rank is told."""
    from torch.distributed.device_mesh import DeviceMesh

    group, dimensions = dist.new_group([0]), DeviceMesh("cpu", [0], mesh_dim_names=("pp",))
    told = []
    for make in (lambda: pp.P2P(group), lambda: pp.P2P(mesh=dimensions)):
        try:
            make().close()
            told.append("made")
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_a_rank_outside_of_a_group_or_a_mesh_is_told(two):
    inside, told = two(outside)
    assert inside == ["made"] * 2
    for text, what in zip(told, ("process group", "mesh"), strict=True):
        assert text == f"P2P got a {what} of which this process is not a member; call it on its ranks only"


def dropped(params, x):
    return torch.nn.functional.dropout(x @ params["w"], 0.5)


def randomness(rank, ranks):
    schedule = pp.one_f_one_b(ranks, 4)
    params, inputs, targets = problem(schedule)
    arguments = inputs["h"], targets
    alone = pp.value_and_grad([dropped] * ranks, squared, schedule)(params, *arguments, seed=(3, 4))
    with pp.P2P(timeout=30) as transport:
        step = pp.value_and_grad([dropped] * ranks, squared, schedule, transport)
        loss, grads = step({rank: params[rank]}, *arguments, seed=(3, 4))
    assert torch.equal(loss, alone[0])
    assert optree.tree_all(optree.tree_map(torch.equal, grads[rank], alone[1][rank]))


def test_random_stages_draw_the_same_in_any_process(two):
    two(randomness)


def in_a_circle(rank, ranks):
    """A stage raises an error that is a cause of its own cause."""

    def raises(params, x):
        first, second = ValueError("first"), KeyError("second")
        first.__cause__, second.__context__ = second, first
        raise first

    schedule = pp.one_f_one_b(ranks, 2)
    params, inputs, targets = problem(schedule)
    with pp.P2P(timeout=20) as transport:
        step = pp.value_and_grad([raises] * ranks, loss_fn, schedule, transport, engine=pp.engines.functional)
        with pytest.raises((pp.PipelineError, pp.StageError), match="first"):
            step(held_by(schedule, rank, params), inputs, targets)


def test_an_error_whose_causes_go_in_a_circle(two):
    two(in_a_circle)


def skipping(rank, ranks, builder, source, destination, kind):
    """A skip connection over processes against the same in one; the skip has no gradient, or another
    shape.
    """
    schedule = pp.with_skips(BUILDERS[builder](ranks, 2 * ranks), [(source, destination)])
    carried = {"no gradient": lambda y: y.detach(), "another shape": lambda y: y[:1].sum(1)}[kind]

    def middle(p, x):
        return torch.tanh(x @ p)

    def first(p, x):
        y = middle(p, x)
        return pp.Output(y, skips={destination: carried(y)})

    def last(p, received):
        return middle(p, received.x + received.skips[source].sum())

    stages = [
        {source: first, destination: last}.get(s, middle) for s in range(max(schedule.model_stages) + 1)
    ]
    generator = torch.Generator().manual_seed(0)
    params = {s: torch.randn(D, D, generator=generator) for s in range(len(stages))}
    inputs, targets = (torch.randn(2 * schedule.microbatches, D, generator=generator) for _ in range(2))
    held = held_by(schedule, rank, params)
    with pp.P2P(timeout=20) as transport:
        own = [fn if s in held else None for s, fn in enumerate(stages)]
        loss, grads = pp.value_and_grad(own, squared, schedule, transport)(held, inputs, targets)
    want, wanted = pp.value_and_grad(stages, squared, schedule)(params, inputs, targets)
    assert torch.equal(loss, want)
    assert all(torch.equal(grads[s], wanted[s]) for s in held)


@pytest.mark.parametrize("kind", ["no gradient", "another shape"])
@pytest.mark.parametrize(
    ("builder", "source", "destination"),
    [
        (
            "zbv",
            1,
            3,
        ),  # the source and the stage before the destination are on one rank, which tells of the source first
        ("interleaved_zb", 0, 3),  # both ranks tell each other at once
        ("looped_bfs", 0, 3),
    ],
)
def test_skip_connections_of_any_route(two, builder, source, destination, kind):
    two(skipping, builder, source, destination, kind)


@pytest.mark.parametrize("kind", ["no gradient", "another shape"])
@pytest.mark.parametrize(
    ("builder", "source", "destination"), [("1f1b", 0, 2), ("1f1b", 1, 3), ("zbv", 2, 7), ("dualpipe", 0, 3)]
)
def test_skip_connections_over_four_processes(four, builder, source, destination, kind):
    four(skipping, builder, source, destination, kind)


def used_and_fresh(rank, ranks):
    schedule = pp.gpipe(ranks, 5)
    params, inputs, targets = problem(schedule)
    arguments = {rank: params[rank]}, inputs, targets
    with pp.P2P(timeout=20) as transport:
        used, fresh = (pp.value_and_grad([stage] * ranks, loss_fn, schedule, transport) for _ in range(2))
        wanted, _ = used(*arguments)
        with pytest.raises(pp.AgreementError, match="the same step function"):
            (fresh if rank else used)(*arguments)
        assert torch.equal(used(*arguments)[0], wanted)


def test_a_used_step_against_a_fresh_one_is_told(two):
    two(used_and_fresh)


def transform_with_wrong_arguments(rank, ranks):
    """What is wrong with the arguments of one rank is told to the other, and the next call is right."""
    schedule = pp.gpipe(ranks, 4)
    stages = [lambda w, x: w * x] * ranks
    params, x = {rank: torch.tensor(2.0 + rank)}, torch.ones(4, 2)
    made = {"hvp": pp.hvp, "jvp": pp.jvp}
    with pp.P2P(timeout=20) as transport:
        steps = {name: make(stages, squared, schedule, transport) for name, make in made.items()}
        for name, step in steps.items():
            step(params, {rank: None}, x, x)
            with pytest.raises((ValueError, pp.PipelineError), match="tangents: got the stages"):
                step(params, {} if rank else {0: None}, x, x)
            still = step(params, {rank: None}, x, x)
            moved = step(params, {rank: torch.ones(()) if rank else None}, x, x)  # other leaves move
            if name != "jvp":
                still, moved = ((r.loss, r.slope) for r in (still, moved))
            assert torch.equal(still[0], moved[0])
            assert still[1] == 0 != moved[1]
        with pytest.raises((pp.AgreementError, pp.PipelineError), match="hvp.*jvp|jvp.*hvp"):
            steps["jvp" if rank else "hvp"](params, {rank: None}, x, x)


def test_wrong_arguments_of_a_transform_are_told(two):
    two(transform_with_wrong_arguments)


def interrupted_while_connecting(rank, ranks, mapped):
    """An interrupt when the peer has this rank's address already and connects to it, or has its end."""
    params, inputs, targets = problem(pp.gpipe(ranks, 4))
    start = time.perf_counter()
    name = "open_mapped" if mapped else "receive_address"
    with pp.P2P(timeout=30, mapped=mapped) as transport:
        step = pp.value_and_grad([stage] * ranks, loss_fn, pp.gpipe(ranks, 4), transport)
        agree = getattr(p2p, name)

        def interrupting(*args):
            agree(*args)
            time.sleep(0.5)
            raise KeyboardInterrupt

        with patch.object(p2p, name, interrupting if rank == 0 else agree):
            try:
                step({rank: params[rank]}, inputs, targets)
            except BaseException as error:
                raised = type(error).__name__
        step({rank: params[rank]}, inputs, targets)
        return raised, time.perf_counter() - start


@pytest.mark.parametrize("mapped", [True, False])
def test_an_interrupt_while_connecting_is_heard_by_the_peer(two, mapped):
    names, seconds = zip(*two(interrupted_while_connecting, mapped), strict=True)
    assert names == ("KeyboardInterrupt", "PipelineError")
    assert max(seconds) < 15 * busy()


def test_another_backend_is_refused_in_one_sentence():
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(ValueError, match=r"backend 'fake', which lacks messages; make one with"):
            pp.P2P(timeout=5)
    finally:
        dist.destroy_process_group()


class Written(dist.ProcessGroup):
    """A backend written in Python, as torch lets one be: a group that is its own backend, over gloo."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors, options):
        return self.gloo.allreduce(tensors, options)

    def alltoall_base(self, *args):
        return self.gloo.alltoall_base(*args)

    def _allgather_base(self, *args):
        return self.gloo._allgather_base(*args)

    def getBackendName(self):
        return "written"


class WithMessages(Written):
    def send(self, tensors, to, tag):
        return self.gloo.send(tensors, to, tag)

    def recv(self, tensors, of, tag):
        return self.gloo.recv(tensors, of, tag)


MADE = {"options": 0, "old": 0, "written": 0}  # how many communicators


def by_options(given, options):
    MADE["options"] += 1
    assert len(given.global_ranks_in_group) in (0, given.group_size)
    return dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)


def by_arguments(store, rank, size, timeout):
    MADE["old"] += 1
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def in_python(store, rank, size, timeout):
    MADE["written"] += 1
    return WithMessages(store, rank, size, timeout)


VENDORS = {"options": by_options, "old": by_arguments, "written": in_python, "without": Written}


def group_of(vendor):
    name = f"vendor_{vendor}"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, VENDORS[vendor], vendor == "options", devices=["cpu"])
    return dist.new_group(backend=name)


def over_a_vendors(rank, ranks, vendor, name, wanted, all_grads):
    schedule, group = SCHEDULES[name](ranks), group_of(vendor)
    params, inputs, targets = problem(schedule)
    before = MADE[vendor]
    with pp.P2P(group, timeout=30, mapped=False) as transport:
        assert transport.backend == f"vendor_{vendor}"
        stages = [stage] * len(params)
        step = pp.value_and_grad(stages, loss_fn, schedule, transport, engine=traced_once)
        loss, grads = step(held_by(schedule, rank, params), inputs, targets)
        made = MADE[vendor] - before
    assert torch.equal(loss, wanted)
    assert all(torch.equal(grads[s]["w"], all_grads[s]["w"]) for s in grads)
    return made


@pytest.mark.parametrize("vendor", MADE)
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_vendors_backend_carries_messages_and_sums(two, name, vendor):
    """``dualpipe`` has replicas, whose gradients are summed."""
    assert min(two(over_a_vendors, vendor, name, *gradients_alone(name, 2)[:2])) >= 2


def without_messages(rank, ranks):
    with pytest.raises(ValueError, match="backend 'vendor_without', which lacks send, recv; make one with"):
        pp.P2P(group_of("without"), timeout=5)


def test_a_vendors_backend_without_messages_is_refused(two):
    two(without_messages)


def destroy_the_group(rank, size):
    """Whether the peer lives, asked by a thread that has not seen yet that all has ended."""
    group = dist.new_group(backend="gloo")
    rendezvous = Rendezvous("test", group, 20.0)
    dist.destroy_process_group(group)
    lives = rendezvous.alive(1 - rank)
    dist.barrier()
    return lives


def test_ranks_that_still_meet_do_without_the_group(two):
    """The thread that looks after those that have not come printed a traceback where the group ended after a
    failed first step.
    """
    assert two(destroy_the_group) == [True, True]


def lowers_without_values(rank, ranks):
    from torch._subclasses import FakeTensorMode

    params = {rank: {"w": torch.ones(4, 4)}}
    with pp.P2P(timeout=60) as transport, FakeTensorMode(allow_non_fake_inputs=True):
        step = pp.value_and_grad([dense] * ranks, squared, pp.one_f_one_b(ranks, 2), transport)
        return len(step.lower(params, torch.ones(4, 4), torch.ones(4, 4)).as_text())


def test_a_step_is_lowered_under_a_mode_of_tensors_without_values(two):
    assert all(length > 100 for length in two(lowers_without_values))

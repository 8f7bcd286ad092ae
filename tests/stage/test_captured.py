"""Programs recorded in slots: on the CPU with a stand-in for CUDA graphs, on CUDA with the real ones."""

from __future__ import annotations

import gc
from functools import partial
from typing import ClassVar

import optree
import pytest
import torch

import ppfunc as pp
from ppfunc.stage import FlatProgram, Signature, outline as outline_of
from ppfunc.stage.engines.captured import captured
from ppfunc.stage.program import Example, stage_program
from tests import models
from tests.models import affine, same_bits, squared

M, D = 4, 5
SCHEDULES = {
    "gpipe": lambda: pp.gpipe(2, M),
    "1f1b": lambda: pp.one_f_one_b(2, M),
    "interleaved_zb": lambda: pp.interleaved_zb(2, M),
    "zbv": lambda: pp.zbv(2, M),
    "dualpipev": lambda: pp.dualpipev(2, M),
    "dualpipe": lambda: pp.dualpipe(2, M),
}


class Recorder:
    """Does what a CUDA graph does: the results of a replay are where those of the recording were.

    What is not being replayed is poisoned, as other work between two replays would do.
    """

    made: ClassVar[list[Recorder]] = []

    def __init__(self, device):
        assert device == torch.device("cpu")
        self.records = self.replays = 0
        Recorder.made.append(self)

    def __call__(self, run, unrecorded):
        self.records += 1
        unrecorded()
        results = run()
        static = [t for t in optree.tree_leaves(results) if isinstance(t, torch.Tensor)]
        own = [t for t in static if t._base is None]
        for t in own:
            if t.is_floating_point() and not any(t is s for s in self.arguments(run)):
                t.fill_(float("nan"))

        def replay():
            self.replays += 1
            now = [t for t in optree.tree_leaves(run()) if isinstance(t, torch.Tensor)]
            for old, new in zip(static, now, strict=True):
                if old is not new:
                    old.copy_(new)

        return results, replay

    @staticmethod
    def arguments(run):
        return optree.tree_leaves(run.args)


@pytest.fixture(autouse=True)
def no_recorders():
    Recorder.made.clear()


def in_slots(fn, example, *, has_aux=False, name="the stage", device=None, outline=None):
    """Return the graph engine, its programs recorded by the stand-in."""
    plain, seen = (
        pp.engines.graph(fn, example, has_aux=has_aux, name=name, device=device),
        Example.of(example, device),
    )
    known = outline or outline_of(fn, example, has_aux=has_aux, name=name)
    flat = captured(plain.flat, seen, plain.y, Recorder)
    return stage_program(flat, seen, known, has_aux=has_aux, residual_bytes=plain.residual_bytes)


problem = partial(models.problem, d=D, leaves="wb")


def test_its_memory_is_not_counted_as_if_it_was_not_captured():
    (params, inputs, targets), schedule = problem(2, 4), pp.zb_h1(2, 4)
    lowered = pp.value_and_grad([affine] * 2, squared, schedule, engine=in_slots).lower(
        params, inputs, targets
    )
    with pytest.raises(pp.StageError, match="CUDA graphs keep their memory"):
        lowered.memory_analysis()
    assert not Recorder.made


def test_what_runs_outside_of_a_graph_gets_residuals_from_outside():
    """An operator may keep in a graph what cannot be read outside of one, such as the seed of a dropout."""
    recording = []

    def record(run, unrecorded):
        unrecorded()
        recording.append(True)
        results = run()
        recording.clear()
        return results, lambda: None

    def forward(params, x, extras):
        return x, (torch.tensor(bool(recording)),)

    def pull(residuals, gy=()):
        assert residuals[0].item() == bool(recording)
        return (params[0],), residuals

    params, x = (torch.zeros(2),), torch.zeros(3)
    example = Example.of((params, x))
    flat = FlatProgram(forward, lambda *given: (params, (x,)), pull, lambda rest: pull(rest)[0])
    flat = captured(flat, example, Signature.of(x), lambda device: record)
    _, residuals = flat.forward(params, (x,), ())
    flat.backward(residuals, (x,))
    _, rest = flat.backward_input(residuals, (x,))
    flat.backward_weight(rest)


@pytest.mark.parametrize("name", SCHEDULES)
def test_slots_give_the_same_bits_in_every_step(name):
    schedule = SCHEDULES[name]()
    stages = [affine] * len(set(schedule.model_stages))
    params, inputs, targets = problem(len(stages), schedule.microbatches)
    recorded = pp.value_and_grad(stages, squared, schedule, engine=in_slots)
    plain = pp.value_and_grad(stages, squared, schedule)
    kept = []
    for step in range(3):
        kept.append((recorded(params, inputs, targets), plain(params, inputs, targets)))
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, kept[-1][1][1])
        inputs = inputs.roll(step + 1, 0)
    for mine, wanted in kept:  # what earlier steps returned is left alone by later ones
        assert same_bits(mine, wanted)


def test_as_many_slots_as_microbatches_in_flight():
    """Each is recorded once, and replayed in every step."""
    stages = 2
    params, inputs, targets = problem(stages, 8)
    schedule = pp.one_f_one_b(2, 8)
    step = pp.value_and_grad([affine, lambda p, x: affine(p, x) * 2], squared, schedule, engine=in_slots)
    for _ in range(3):
        step(params, inputs, targets)
    assert len(Recorder.made) == 2 + 1
    assert [r.records for r in Recorder.made] == [2, 2, 2]
    assert sum(r.replays for r in Recorder.made) == 3 * 2 * 8 * 2


def test_stages_that_share_a_program_have_copies_of_their_parameters():
    """The backward of one reads its own, whatever the other has done in between."""
    program = in_slots(affine, (problem(1)[0][0], torch.zeros(3, D, dtype=torch.float64)))
    plain = pp.engines.graph(affine, (problem(1)[0][0], torch.zeros(3, D, dtype=torch.float64)))
    a, b = problem(2)[0].values()
    x = problem(1)[1][:3]
    _, of_a = program.forward(a, x)
    _, of_b = program.forward(b, x)
    _, again = program.forward(a, x)
    gy = torch.ones(3, D, dtype=torch.float64)
    for residuals, params in ((of_a, a), (of_b, b), (again, a)):
        _, expected = plain.forward(params, x)
        assert same_bits(program.backward(residuals, gy), plain.backward(expected, gy))


def test_parameters_written_over_in_place_are_read_anew():
    program = in_slots(affine, (problem(1)[0][0], torch.zeros(3, D, dtype=torch.float64)))
    leaves = tuple(problem(1)[0][0][k] for k in "wb")
    x = problem(1)[1][:3]
    with torch.no_grad():
        first, _ = program.flat.forward(leaves, (x,), ())
        leaves[0].mul_(2)
        second, _ = program.flat.forward(leaves, (x,), ())
    torch.testing.assert_close(first[0], torch.tanh(x @ (leaves[0] / 2) + leaves[1]))
    torch.testing.assert_close(second[0], torch.tanh(x @ leaves[0] + leaves[1]))


def test_a_slot_is_free_when_nothing_refers_to_its_residuals():
    program = in_slots(affine, (problem(1)[0][0], torch.zeros(3, D, dtype=torch.float64)))
    params, inputs, _ = problem(1)
    for x in inputs.chunk(M):
        program.forward(params[0], x)  # as a pipeline that only runs forward
    assert len(Recorder.made) == 1
    kept = [program.forward(params[0], x)[1] for x in inputs.chunk(M)]
    gc.collect()
    assert len(Recorder.made) == M
    del kept


def test_parameters_are_not_kept_alive():
    import weakref

    program = in_slots(affine, (problem(1)[0][0], torch.zeros(3, D, dtype=torch.float64)))
    params, inputs, _ = problem(1)
    seen = weakref.ref(params[0]["w"])
    program.forward(params[0], inputs[:3])
    del params
    gc.collect()
    assert seen() is None


def test_refused_under_a_transform_from_outside():
    program = in_slots(affine, (problem(1)[0][0], torch.zeros(3, D, dtype=torch.float64)))
    params, inputs, _ = problem(1)
    with pytest.raises(RuntimeError, match=r"under a torch\.func transform.*functional engine"):
        torch.func.vmap(lambda x: program.forward(params[0], x)[0])(inputs.view(M, 3, D))


def test_refused_on_the_cpu():
    with pytest.raises(
        pp.StageError, match=r"^stage 3: it computes on the device cpu.*leave out cuda_graphs=True"
    ):
        pp.engines.graph(affine, (problem(1)[0][0], torch.zeros(3, D)), name="stage 3", cuda_graphs=True)


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiler)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_cuda_graphs(name, compiled):
    schedule = SCHEDULES[name]()
    stages = [affine] * len(set(schedule.model_stages))
    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(len(stages), schedule.microbatches))
    recorded = pp.value_and_grad(
        stages, squared, schedule, engine=pp.engines.graph(cuda_graphs=True, compile=compiled)
    )
    plain = pp.value_and_grad(stages, squared, schedule, engine=pp.engines.graph(compile=compiled))
    for _ in range(3):
        mine, wanted = recorded(params, inputs, targets), plain(params, inputs, targets)
        assert same_bits(mine, wanted)
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, wanted[1])


@pytest.mark.cuda
def test_cuda_graphs_draw_what_programs_draw():
    def drops(params, x):
        return torch.nn.functional.dropout(affine(params, x), 0.5)

    params, inputs, targets = optree.tree_map(lambda t: t.cuda(), problem(2))
    steps = [
        pp.value_and_grad([drops] * 2, squared, pp.one_f_one_b(2, M), engine=e)
        for e in (pp.engines.graph(cuda_graphs=True), pp.engines.graph)
    ]
    for n in range(3):
        mine, wanted = (step(params, inputs, targets, seed=(0, n)) for step in steps)
        assert same_bits(mine, wanted)

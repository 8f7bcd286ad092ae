"""Values that lead back from the last stage to the first: a model reads what it has written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ppfunc as pp
from ppfunc.schedule import (
    Instruction,
    Op,
    ScheduleError,
    check,
    decode,
    from_json,
    inference,
    place_communication,
    seq1f1b,
    to_json,
)
from tests.models import same_bits

SEQUENCES, ROWS, PROMPT, TOKENS, WORDS, WIDTH = 3, 2, 4, 5, 23, 8


def normal(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def params_of(stages):
    params = {s: {"w": normal(WIDTH, WIDTH, seed=s)} for s in range(stages)}
    params[0]["words"] = normal(WORDS, WIDTH, seed=77)
    params[stages - 1]["head"] = normal(WIDTH, WORDS, seed=78)
    return params


PROMPTS = torch.randint(WORDS, (SEQUENCES * ROWS, PROMPT), generator=torch.Generator().manual_seed(5))
NOISE = torch.rand(
    SEQUENCES * ROWS, TOKENS, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(6)
)


def layer(w, x, past):
    """Attend to all tokens so far by a cache that grows."""
    seen = x if past is None else torch.cat([past, x], 1)
    mask = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool).tril(seen.shape[1] - x.shape[1])
    scores = (x @ w @ seen.mT).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ seen + x, seen


def sampled(logits, noise):
    return (logits[:, -1:] - (-noise[:, None].log()).log()).argmax(-1)


def stages_of(count):
    def stage(s):
        def fn(params, x, carry, noise=None):
            if s == 0:
                words, fed = x
                x = params["words"][words if fed[count - 1] is None else fed[count - 1]]
            y, seen = layer(params["w"], x, carry)
            if s < count - 1:
                return pp.Output(y, carry=seen)
            word = sampled(y @ params["head"], noise)
            return pp.Output(word, carry=seen, skips={0: word})

        return fn

    return [stage(s) for s in range(count)]


def alone(count):
    """The words of the model in one piece, which reads all of a sequence anew for each word."""
    params, words = params_of(count), PROMPTS
    for token in range(TOKENS):
        y = params[0]["words"][words]
        for s in range(count):
            y, _ = layer(params[s]["w"], y, None)
        words = torch.cat([words, sampled(y @ params[count - 1]["head"], NOISE[:, token])], 1)
    return words[:, PROMPT:]


def generated(count, transport=None, ranks=None, schedule=None, engine=None):
    schedule = decode(count, SEQUENCES, TOKENS) if schedule is None else schedule
    params = params_of(count)
    here = range(count) if ranks is None else ranks
    prompts = [(p, *[()] * (TOKENS - 1)) for p in PROMPTS.chunk(SEQUENCES)]
    noise = pp.Microbatches(n for rows in NOISE.chunk(SEQUENCES) for n in rows.unbind(1))
    run = pp.evaluate(
        stages_of(count),
        None,
        schedule,
        transport,
        return_outputs=True,
        **({"engine": engine} if engine else {}),
    )
    words = run(
        {s: params[s] for s in here},
        pp.Microbatches(p for row in prompts for p in row) if 0 in here else None,
        extras={count - 1: noise} if count - 1 in here else None,
    )
    if words is None:
        return None
    rows = [torch.cat(words.trees[n * TOKENS : (n + 1) * TOKENS], 1) for n in range(SEQUENCES)]
    return torch.cat(rows)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("engine", [pp.engines.graph, pp.engines.functional, pp.engines.eager])
def test_a_pipeline_writes_what_the_model_alone_writes(count, engine):
    wanted = alone(count)
    assert len(set(wanted.flatten().tolist())) > WORDS / 3  # not one word again and again
    assert same_bits(generated(count, engine=engine), wanted)


def test_a_skip_leads_back_from_any_stage_to_any_before_it():
    """Here from stage 2 to stage 1, under a schedule that was written to a file and read."""

    def first(params, x, carry):
        return pp.Output(x, carry=())

    def second(params, x, carry):
        x, fed = x
        return pp.Output(x if fed[2] is None else x + fed[2], carry=())

    def third(params, x, carry):
        return pp.Output(2 * x, carry=(), skips={1: 2 * x})

    base = replace(decode(3, 1, 4), skips=())
    schedule = from_json(to_json(pp.with_skips(base, [(2, 1)])))
    run = pp.evaluate([first, second, third], None, schedule, return_outputs=True)
    found = run({s: {} for s in range(3)}, pp.microbatch(torch.ones(1, 4), 1, slices=4))
    assert found.join(axis=1).flatten().tolist() == [2, 6, 14, 30]


def by_process(rank, size):
    with pp.P2P() as transport:
        return generated(size, transport, [rank])


def test_processes_write_the_same(two):
    assert same_bits(two(by_process)[1], alone(2))


def test_no_rank_waits_where_sequences_are_enough():
    for ranks in range(2, 6):
        timeline = pp.simulate(decode(ranks, 6, 4))
        assert timeline.makespan == 24 + ranks - 1 and timeline.span_bubble == 0
    assert pp.simulate(decode(4, 2, 3)).makespan == 2 * 4 + 4 + 1  # two of four ranks wait for words


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: pp.with_skips(seq1f1b(3, 2, 2), [(2, 0)]), "seq1f1b has a backward"),
        (lambda: pp.with_skips(inference(3, 2), [(2, 0)]), "inference has no slices"),
        (lambda: pp.with_skips(decode(3, 2, 2), [(1, 1)]), "another one between them"),
    ],
)
def test_what_cannot_lead_back_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()


def test_a_stage_that_sends_nothing_back_is_refused():
    def silent(params, x, carry):
        return pp.Output(x if isinstance(x, torch.Tensor) else x[0], carry=())

    run = pp.evaluate([silent] * 2, None, decode(2, 2, 2), return_outputs=True)
    with pytest.raises(
        pp.StageError, match=r"returns skip connections to the stages \[\], the schedule has them"
    ):
        run({s: {} for s in range(2)}, pp.Microbatches(torch.ones(1, 1) for _ in range(4)))


def test_the_last_slice_sends_nothing_back():
    lowered = place_communication(decode(2, 2, 2))
    zero, one = lowered.programs
    more = (Instruction(Op.RECV_F, 0, 3, 1),), (Instruction(Op.SEND_F, 1, 3, 0),)
    with pytest.raises(ScheduleError, match="the last slice of its sequence"):
        check(replace(lowered, programs=((*zero, more[0]), (*one, more[1]))))


def test_values_that_lead_back_take_no_time_within_a_process():
    """A value is there once it has been computed, however late its reader has its turn."""

    def first(params, given, carry):
        x, fed = given
        return pp.Output(x if fed[1] is None else x + fed[1], carry=())

    def last(params, x, carry):
        return pp.Output(x, carry=(), skips={0: x})

    run = pp.evaluate([first, last], None, decode(2, 6, 4), return_outputs=True)
    params: dict = {0: (), 1: ()}
    _, timeline = run.record(params, pp.microbatch(torch.ones(6, 4), 6, slices=4))
    costs = timeline.costs()
    assert [costs.of("communication", s) for s in (0, 1)] == [0, 0]

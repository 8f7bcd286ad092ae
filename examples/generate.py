"""Write text with a pipeline: many texts at once, so that no rank waits for the byte that it needs.

    python examples/generate.py                            # 4 stages in 4 processes, 8 texts
    python examples/generate.py --in-process               # the same in one process: the same bytes
    python examples/generate.py --temperature 0            # the likeliest byte each time
    torchrun --nproc-per-node 4 examples/generate.py       # the first, started by torchrun

A small GPT is trained for some steps, then writes: a sequence is a text, its slices are the bytes written.
A stage carries the keys and values of its blocks from slice to slice, and what the last stage writes leads
back to the first. The bytes are those that the model writes alone, without a pipeline and without a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import corpus
import gpt
import launch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ppfunc as pp
from ppfunc.schedule import simulate


class Cache(NamedTuple):
    """The carry of a stage: the number of bytes read of each text, and the keys and values of its blocks.

    Args:
        read: int64[].
        blocks: of each block its keys and values, float[b, heads, context, e] each; 0 where nothing was read.
    """

    read: Tensor
    blocks: list[tuple[Tensor, Tensor]]

    @classmethod
    def empty(cls, config: gpt.Config, texts: int, blocks: int) -> Cache:
        shape = texts, config.heads, config.context, config.width // config.heads
        return cls(torch.tensor(0), [(torch.zeros(shape), torch.zeros(shape)) for _ in range(blocks)])


class Attention:
    """Attends to the bytes of a cache and to new ones, and keeps their keys and values."""

    def __init__(self, positions: Tensor, past: tuple[Tensor, Tensor]) -> None:
        self.positions, self.cache = positions, past

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (
            old.index_copy(2, self.positions, new) for old, new in zip(self.cache, (k, v), strict=True)
        )
        self.cache = keys, values
        seen = torch.arange(keys.shape[2]) <= self.positions[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def writing_stage(run: Sequence[int], stages: int, options: argparse.Namespace) -> Any:
    """A stage of a pipeline of so many stages that writes.

    Args:
        run: numbers of its layers in the model, of which 0 embeds, and the last gives scores.
    """
    config = configuration(options)
    model = gpt.layers(config)
    blocks = [n for n in run if 0 < n <= config.layers]

    def write(
        params: list[gpt.Params], x: Any, cache: Cache | None, noise: Tensor | None = None
    ) -> pp.Output:
        if run[0] == 0:
            prompt, fed = x
            x = prompt if fed[stages - 1] is None else fed[stages - 1]
        cache = Cache.empty(config, len(x), len(blocks)) if cache is None else cache
        positions = cache.read + torch.arange(x.shape[1])
        attentions = [Attention(positions, past) for past in cache.blocks]
        more: dict[int, Any] = {0: positions, **dict(zip(blocks, attentions, strict=True))}
        for n, p in zip(run, params, strict=True):
            x = model[n].apply(p, x, more[n]) if n in more else model[n].apply(p, x[:, -1:])
        carry = Cache(cache.read + len(positions), [attention.cache for attention in attentions])
        if noise is None:
            return pp.Output(x, carry=carry)
        byte = drawn(x, noise, options.temperature)
        return pp.Output(byte, carry=carry, skips={0: byte})

    return write


def drawn(scores: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Draw bytes int64[b, 1] from scores float[b, 1, v] by noise float[b, v], as Gumbel does."""
    return (scores + temperature * noise[:, None]).argmax(-1)


def configuration(options: argparse.Namespace) -> gpt.Config:
    return gpt.Config(options.width, options.layers, context=options.prompt + options.length)


def trained(runs: list[list[int]], options: argparse.Namespace, place: launch.Place) -> dict[int, Any]:
    """The parameters of the stages of this process after some steps of training."""
    model, schedule = gpt.layers(configuration(options)), pp.one_f_one_b(len(runs), 4)
    stages = [gpt.stage([model[n] for n in run]) for run in runs]
    trainer = pp.Trainer(stages, gpt.cross_entropy, schedule, pp.optim.adamw(3e-3), place.transport)
    state = trainer.init({s: gpt.initialise(model, runs[s], options.seed) for s in place.held(schedule)})
    text, length = corpus.load().train, options.prompt + options.length
    for n in range(options.steps):
        state, _ = trainer.step(state, *corpus.training_batch(text, 16, length, options.seed, n))
    return dict(state.params)


def alone(params: list[gpt.Params], prompts: Tensor, noise: Tensor, options: argparse.Namespace) -> Tensor:
    """What the model in one piece writes, which reads all of a text anew for each byte."""
    model, texts = gpt.stage(gpt.layers(configuration(options))), prompts
    for n in range(options.length):
        byte = drawn(model(params, texts)[:, -1:], noise[:, n], options.temperature)
        texts = torch.cat([texts, byte], 1)
    return texts[:, options.prompt :]


def write(options: argparse.Namespace, place: launch.Place) -> None:
    """The whole job, as every process runs it."""
    layers = range(options.layers + 2)
    bounds = [round(n * len(layers) / options.stages) for n in range(options.stages + 1)]
    runs = [list(layers[a:b]) for a, b in pairwise(bounds)]
    params = trained(runs, options, place)

    text = corpus.load().validation
    prompts = corpus.windows(text, 1000 * torch.arange(options.texts), options.prompt).inputs
    generator = torch.Generator().manual_seed(options.seed)
    noise = -(-torch.rand(options.texts, options.length, 256, generator=generator).log()).log()

    schedule = pp.decode(options.stages, options.texts, options.length)
    stages = [writing_stage(run, options.stages, options) for run in runs]
    pipeline = pp.evaluate(stages, None, schedule, place.transport, return_outputs=True)
    # The first slice of a text is its prompt; the others are given nothing, and read what was written.
    slices = pp.Microbatches(x for p in prompts.split(1) for x in (p, *[()] * (options.length - 1)))
    draws = pp.Microbatches(n for each in noise.split(1) for n in each.unbind(1))
    last = options.stages - 1
    written, timeline = pipeline.record(
        params, slices if 0 in params else None, extras={last: draws} if last in params else None
    )
    whole = [params] if place.mesh is None else [{} for _ in runs]
    if place.mesh is not None:
        dist.all_gather_object(whole, params)
    if last not in params:
        return
    bytes_ = torch.cat(written.trees, 1).view(options.texts, options.length)
    every = {s: layers for held in whole for s, layers in held.items()}
    same = torch.equal(bytes_, alone([p for s in sorted(every) for p in every[s]], prompts, noise, options))
    paper = simulate(schedule, timeline.costs())
    for row in torch.cat([prompts, bytes_], 1).tolist():
        print(repr(bytes(row).decode("utf-8", "replace")))
    print(
        f"{bytes_.numel() / timeline.makespan:,.0f} bytes a second; ranks are idle {timeline.bubble:.0%} of"
        f" the time, {paper.bubble:.0%} on paper; {'the same as' if same else 'OTHER THAN'} the model alone"
        " writes"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=launch.processes_given() or 4, help="one on each rank")
    parser.add_argument("--texts", type=int, default=8, help="texts that are written at once")
    parser.add_argument("--prompt", type=int, default=32, help="bytes that a text begins with")
    parser.add_argument("--length", type=int, default=64, help="bytes that are written of each text")
    parser.add_argument("--temperature", type=float, default=gpt.TEMPERATURE, help="0 for the likeliest byte")
    parser.add_argument("--steps", type=int, default=150, help="steps of training")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-process", action="store_true", help="run all ranks in this process")
    options = parser.parse_args(arguments)
    if options.stages < 2:
        parser.error("--stages: expected at least 2; --in-process runs them in one process")
    launch.run(write, options, (options.stages, 1, 1), options.in_process)


if __name__ == "__main__":
    main()

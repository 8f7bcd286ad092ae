"""Train the architectures of `split_zoo` in bfloat16 by three ways, and compare each with plain torch.

    python tests/benchmarks/split_precision.py [NAMES] [--wider] [--limit SECONDS]

``compute``: parameters in float32, cast for the step. ``autocast``: the step under ``torch.autocast``.
``masters``: the model itself in bfloat16. For each, the greatest difference of a gradient to plain torch's in
the same precision, in training with dropout under the same random numbers, by the greatest of its parameter;
and how far both are from float64 by the same measure. The loss counts as one more gradient. ``--wider`` takes
the architectures of `split_wider`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from split_models import SEED, seeded_where_stages_begin
from split_wider import WIDER
from split_zoo import EXPERTS, MODELS, Architecture, bare, deep
from torch import Tensor, nn

import ppfunc as pp

HALF, M = torch.bfloat16, 2
NOT_OF_TRANSFORMERS = {"nn.Transformer", "unet", "lstm"}
AS_SHIPPED = {"experts_implementation": "grouped_mm"}

MORE: dict[str, Architecture] = {
    "mistral": deep("MistralForCausalLM"),
    "smollm3": deep("SmolLM3ForCausalLM"),
    "granite": deep("GraniteForCausalLM"),
    "olmo": deep("OlmoForCausalLM"),
    "olmo3": deep("Olmo3ForCausalLM"),
    "starcoder2": deep("Starcoder2ForCausalLM"),
    "gemma": deep("GemmaForCausalLM"),
    "helium": deep("HeliumForCausalLM"),
    "ernie": deep("Ernie4_5ForCausalLM"),
    "exaone4": deep("Exaone4ForCausalLM"),
    "arcee": deep("ArceeForCausalLM"),
    "seed_oss": deep("SeedOssForCausalLM"),
    "cohere2": deep("Cohere2ForCausalLM"),
    "diffllama": deep("DiffLlamaForCausalLM", attention_dropout=0.0),
    "glm": deep("GlmForCausalLM"),
    "bitnet": deep("BitNetForCausalLM"),
    "apertus": deep("ApertusForCausalLM"),
    "mixtral_as_shipped": deep("MixtralForCausalLM", **AS_SHIPPED),
    "qwen3_moe_as_shipped": deep("Qwen3MoeForCausalLM", **AS_SHIPPED),
    "glm4_moe": deep("Glm4MoeForCausalLM", **AS_SHIPPED),
    "dots1": deep("Dots1ForCausalLM", num_key_value_heads=4, **AS_SHIPPED),
    "ernie_moe": deep("Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, **EXPERTS),
    "gpt_bigcode": deep("GPTBigCodeForCausalLM", "transformer.h"),
    "xglm": deep("XGLMForCausalLM", "model.layers", num_layers=4),
    "rwkv": deep("RwkvForCausalLM", "rwkv.blocks", bare, attention_hidden_size=32),
}
ARCHITECTURES = {n: a for n, a in MODELS.items() if n not in NOT_OF_TRANSFORMERS} | MORE | WIDER


class Refused(Exception):
    """Raised where plain torch does not run the model in this precision."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def floats(output: Any) -> list[Tensor]:
    found = output.values() if isinstance(output, dict) else output
    return [
        t if t.dtype == torch.float64 else t.float()
        for t in found
        if isinstance(t, Tensor) and t.is_floating_point() and t.ndim
    ]


def loss_fn(output: Any, _: Any = None) -> Tensor:
    weighted = (t * torch.linspace(-1, 1, t.shape[-1], dtype=t.dtype) for t in floats(output))
    return sum((t.square().mean() for t in weighted), torch.zeros(()))


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name][0]().train()
    with torch.no_grad():
        for p in model.parameters():  # so that no bias is zero
            p += 0.05 * torch.randn_like(p)
    return model


def half(tree: Any) -> Any:
    return {key: t.to(HALF) if t.is_floating_point() else t for key, t in tree.items()}


def rows_of(inputs: dict[str, Tensor], microbatch: int) -> dict[str, Tensor]:
    return {key: t.chunk(M)[microbatch] for key, t in inputs.items()}


def whole(
    model: nn.Module, at: tuple[str, ...], inputs: dict[str, Tensor], dtype: Any, context: Any
) -> dict[str, Tensor]:
    """Loss and gradients of the whole model in plain torch, summed in float32 at least."""
    total: dict[str, Tensor] = {"": torch.zeros(())}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for i in range(M):
        params = {n: p.detach().to(dtype or p.dtype) for n, p in model.named_parameters()}
        params = {n: t.requires_grad_(model.get_parameter(n).requires_grad) for n, t in params.items()}
        with context(), seeded_where_stages_begin(model, at, i):
            output = torch.func.functional_call(model, params, kwargs=rows_of(inputs, i))
            loss = loss_fn(output) / M
        loss.backward()
        total[""] = total[""] + loss.detach()
        for n, p in params.items():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            total[n] = total.get(n, 0) + (grad if grad.dtype == torch.float64 else grad.float())
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
    return total


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The greatest difference of a gradient by the greatest of its parameter, or a thousandth of all."""
    least = max(float(g.abs().max()) for g in want.values() if g.numel()) / 1000
    return max(
        float((g.double() - want[n].double()).abs().max()) / max(least, float(want[n].abs().max()))
        for n, g in got.items()
        if g.numel()
    )


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", HALF)


def by(way: str, name: str) -> tuple[float, float, float]:
    """How far the stages are from plain torch, and both from float64."""
    model, (_, make, at) = made(name), ARCHITECTURES[name]
    torch.manual_seed(1)
    inputs = {key: t.float() if t.is_floating_point() else t for key, t in make(2 * M, 10).items()}
    single = inputs
    double = {key: t.double() if t.is_floating_point() else t for key, t in inputs.items()}
    exact = whole(made(name).double(), tuple(at), double, None, nullcontext)
    if exact[""].isnan():  # a mask of float32's least value, in float64
        exact = whole(made(name), tuple(at), single, None, nullcontext)
    if way != "autocast":
        inputs = half(inputs)
    model = model.to(HALF) if way == "masters" else model
    dtype, context = (HALF if way == "compute" else None), (autocast if way == "autocast" else nullcontext)
    try:
        want = whole(model, tuple(at), inputs, dtype, context)
    except RuntimeError as error:
        raise Refused(str(error)) from error
    example = {key: t.float() if t.is_floating_point() else t for key, t in rows_of(inputs, 0).items()}
    parts = pp.split(model, kwargs=half(example) if way == "masters" else example, at=at)
    params = {s: half(of) if way == "compute" else of for s, of in parts.params.items()}
    step = pp.value_and_grad(
        parts, loss_fn, pp.one_f_one_b(len(parts.stages), M), has_aux=True, sum_dtype=torch.float32
    )
    with context():
        results = step(params, inputs, torch.zeros(2 * M), state=parts.state, seed=SEED)
    got = {"": results.loss, **{n: g for of in results.grads.values() for n, g in of.items()}}
    return apart(got, want), apart(got, exact), apart(want, exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of models; all by default")
    parser.add_argument("--wider", action="store_true", help="the models of split_wider alone")
    parser.add_argument("--limit", type=int, default=600, help="seconds for each model and way")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = []
    for name in options.names or (WIDER if options.wider else ARCHITECTURES):
        shown = []
        for way in ("compute", "autocast", "masters"):
            bad = False
            try:
                with within(options.limit):
                    error, far, of_torch = by(way, name)
                shown.append(f"{way} {error:.1e}, from float64 {far:.1e}, torch {of_torch:.1e}")
                bad = not far <= 1.05 * of_torch
            except Refused as error:  # a buffer in float32, such as statistics, beside weights in bfloat16
                shown.append(f"{way} refused by plain torch: {str(error)[:100]}")
            except Exception as error:
                shown.append(f"{way} {type(error).__name__}: {str(error)[:400]}")
                bad = True
                if options.names:
                    traceback.print_exc()
            failed += [f"{name} by {way}"] if bad else []
        print(f"{name:20} {'; '.join(shown)}", flush=True)
    print(f"{len(failed)} failed: {', '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""Split the architectures of Hugging Face's transformers, tiny and random, and print how well it goes.

    python tests/benchmarks/split_models.py [NAMES]

For each: the greatest error of a gradient when the stages run in turn under the same random numbers (training, with dropout)
and in evaluation, at the shape of the split and at two others; the same under schedules (in evaluation, over microbatches);
seconds of a split; the skip connections.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as tf
from torch import nn

import ppfunc as pp
from ppfunc.splitter import Split, split
from ppfunc.stage.output import Output, Received

WIDTH, HEADS, LAYERS, WORDS = 32, 4, 4, 64
TEXT = dict(hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=LAYERS, intermediate_size=64, vocab_size=WORDS)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
KV = dict(num_key_value_heads=2)


def ids(rows: int, time: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, time, dtype=torch.int64)
    mask[0, -2:] = 0
    return {"input_ids": torch.randint(3, WORDS, (rows, time)), "attention_mask": mask}


def both(rows: int, time: int) -> dict[str, torch.Tensor]:
    return {**ids(rows, time), "decoder_input_ids": torch.randint(3, WORDS, (rows, time + 1))}


def pixels(size: int = 32) -> Callable[[int, int], dict[str, torch.Tensor]]:
    return lambda rows, time: {"pixel_values": torch.randn(rows, 3, size, size, dtype=torch.float64)}


def audio(rows: int, time: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(rows, 16, 40, dtype=torch.float64),
        "decoder_input_ids": torch.randint(3, WORDS, (rows, time)),
    }


def pairs(rows: int, time: int) -> dict[str, torch.Tensor]:
    return {**ids(rows, time), **pixels()(rows, time)}


def layers(prefix: str, *numbers: int) -> list[str]:
    return [f"{prefix}.{n}" for n in numbers]


def text(name: str, prefix: str = "model.layers", **more: Any) -> tuple[Callable[[], nn.Module], Any, list[str]]:
    """A model of one tower, by the name of its class for language modelling."""
    kind = getattr(tf, name)
    return lambda: kind(kind.config_class(**{**TEXT, **TOKENS, **more})), ids, layers(prefix, 1, 2, 3)


def clip() -> nn.Module:
    tower = dict(hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=64)
    return tf.CLIPModel(
        tf.CLIPConfig(
            text_config=dict(**tower, vocab_size=WORDS, **TOKENS, max_position_embeddings=32, attention_dropout=0.1),
            vision_config=dict(**tower, image_size=32, patch_size=8, attention_dropout=0.1),
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "gpt2": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=4, n_embd=WIDTH, n_head=HEADS, vocab_size=WORDS, bos_token_id=1, eos_token_id=2)),
        ids,
        layers("transformer.h", 1, 2, 3),
    ),
    "llama": text("LlamaForCausalLM", attention_dropout=0.1, **KV),
    "bert": text("BertForMaskedLM", "bert.encoder.layer"),
    "vit": (
        lambda: tf.ViTForImageClassification(
            tf.ViTConfig(**{k: v for k, v in TEXT.items() if k != "vocab_size"}, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
        ),
        pixels(),
        [],
    ),
    "t5": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=HEADS, vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0
            )
        ),
        both,
        ["encoder.block.1", "decoder", "decoder.block.1"],
    ),
    "mixtral": text(
        "MixtralForCausalLM", attention_dropout=0.1, num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm", **KV
    ),
    "whisper": (
        lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                d_model=WIDTH,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=HEADS,
                decoder_attention_heads=HEADS,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                vocab_size=WORDS,
                num_mel_bins=16,
                max_source_positions=20,
                max_target_positions=32,
                dropout=0.1,
                decoder_start_token_id=1,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                **TOKENS,
            )
        ),
        audio,
        ["model.encoder.layers.1", "model.decoder", "model.decoder.layers.1"],
    ),
    "bart": (
        lambda: tf.BartForConditionalGeneration(
            tf.BartConfig(
                d_model=WIDTH,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=HEADS,
                decoder_attention_heads=HEADS,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                vocab_size=WORDS,
                max_position_embeddings=64,
                decoder_start_token_id=2,
                forced_eos_token_id=None,
                **TOKENS,
            )
        ),
        both,
        ["model.encoder.layers.1", "model.decoder", "model.decoder.layers.1"],
    ),
    "deberta": text(
        "DebertaV2ForMaskedLM", "deberta.encoder.layer", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "mamba": (
        lambda: tf.MambaForCausalLM(
            tf.MambaConfig(hidden_size=WIDTH, num_hidden_layers=4, vocab_size=WORDS, state_size=4, use_mambapy=False, **TOKENS)
        ),
        lambda rows, time: {"input_ids": ids(rows, time)["input_ids"]},
        layers("backbone.layers", 1, 2, 3),
    ),
    "clip": (clip, pairs, ["vision_model.encoder.layers.1", "text_model", "text_model.encoder.layers.1"]),
    "swin": (
        lambda: tf.SwinForImageClassification(
            tf.SwinConfig(
                image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, hidden_dropout_prob=0.1
            )
        ),
        pixels(),
        ["swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1", "swin.encoder.layers.1.blocks.1"],
    ),
    "qwen3": text("Qwen3ForCausalLM", head_dim=8, attention_dropout=0.1, **KV),
    "gemma2": text("Gemma2ForCausalLM", head_dim=8, sliding_window=4, attention_dropout=0.1, **KV),
    "gemma3": text("Gemma3ForCausalLM", head_dim=8, sliding_window=4, attention_dropout=0.1, **KV),
    "olmo2": text("Olmo2ForCausalLM", **KV),
    "phi3": text("Phi3ForCausalLM", **KV),
    "neox": text("GPTNeoXForCausalLM", "gpt_neox.layers", hidden_dropout=0.1),
    "opt": (
        lambda: tf.OPTForCausalLM(
            tf.OPTConfig(
                hidden_size=WIDTH,
                ffn_dim=64,
                num_hidden_layers=4,
                num_attention_heads=HEADS,
                vocab_size=WORDS,
                max_position_embeddings=64,
                word_embed_proj_dim=WIDTH,
                **TOKENS,
            )
        ),
        ids,
        layers("model.decoder.layers", 1, 2, 3),
    ),
    "bloom": (
        lambda: tf.BloomForCausalLM(
            tf.BloomConfig(hidden_size=WIDTH, n_layer=4, n_head=HEADS, vocab_size=WORDS, hidden_dropout=0.1, **TOKENS)
        ),
        ids,
        layers("transformer.h", 1, 2, 3),
    ),
    "roberta": text("RobertaForMaskedLM", "roberta.encoder.layer", max_position_embeddings=64),
    "albert": (
        lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(**TEXT, embedding_size=16, num_hidden_groups=4, hidden_dropout_prob=0.1)),
        ids,
        layers("albert.encoder.albert_layer_groups", 1, 2, 3),
    ),
    "falcon": text("FalconForCausalLM", "transformer.h", attention_dropout=0.1),
    "electra": text("ElectraForMaskedLM", "electra.encoder.layer", embedding_size=16),
    "resnet": (
        lambda: tf.ResNetForImageClassification(
            tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 2, 1], layer_type="basic")
        ),
        pixels(),
        ["resnet.encoder.stages.1", "resnet.encoder.stages.1.layers.1", "resnet.encoder.stages.2"],
    ),
    "convnext": (
        lambda: tf.ConvNextForImageClassification(tf.ConvNextConfig(hidden_sizes=[8, 16, 16], depths=[1, 2, 1], num_stages=3)),
        pixels(),
        ["convnext.encoder.stages.1", "convnext.encoder.stages.2"],
    ),
    "wav2vec2": (
        lambda: tf.Wav2Vec2ForCTC(
            tf.Wav2Vec2Config(
                **TEXT,
                conv_dim=(16, 16),
                conv_stride=(4, 2),
                conv_kernel=(8, 4),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                layerdrop=0.0,
                mask_time_prob=0.0,
                apply_spec_augment=False,
                pad_token_id=0,
            )
        ),
        lambda rows, time: {"input_values": torch.randn(rows, 40 * time, dtype=torch.float64)},
        layers("wav2vec2.encoder.layers", 1, 2, 3),
    ),
    "mpt": (
        lambda: tf.MptForCausalLM(tf.MptConfig(d_model=WIDTH, n_heads=HEADS, n_layers=4, vocab_size=WORDS, max_seq_len=64)),
        ids,
        layers("transformer.blocks", 1, 2, 3),
    ),
    "distilbert": (
        lambda: tf.DistilBertForMaskedLM(tf.DistilBertConfig(dim=WIDTH, hidden_dim=64, n_heads=HEADS, n_layers=4, vocab_size=WORDS)),
        ids,
        layers("distilbert.transformer.layer", 1, 2, 3),
    ),
    "segformer": (
        lambda: tf.SegformerForImageClassification(
            tf.SegformerConfig(
                hidden_sizes=[8, 16],
                num_encoder_blocks=2,
                depths=[1, 1],
                sr_ratios=[2, 1],
                patch_sizes=[7, 3],
                strides=[4, 2],
                num_attention_heads=[1, 2],
                mlp_ratios=[2, 2],
            )
        ),
        pixels(),
        ["segformer.stages.1"],
    ),
}


def main_tensor(output: Any) -> torch.Tensor:
    """A scalar of what a model returns."""
    found = output.values() if isinstance(output, Mapping) else output
    tensors = [t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim]
    return sum(((t * torch.arange(1, t.shape[-1] + 1)).square().mean() for t in tensors), torch.zeros((), dtype=torch.float64))


def in_turn(parts: Split, inputs: Any) -> tuple[Any, dict[int, Any], dict[int, Any]]:
    """The result, the parameters, and the state, of the stages called one after the other."""
    params = {s: {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tree.items()} for s, tree in parts.params.items()}
    x, skips, state = inputs, {}, {}
    for stage, fn in enumerate(parts.stages):
        into = {a: skips[a, b] for a, b in parts.skips if b == stage}
        out = fn(params[stage], Received(x, into) if into else x, *([parts.state[stage]] if stage in parts.state else []))
        if isinstance(out, Output):
            skips |= {(stage, b): tree for b, tree in (out.skips or {}).items()}
            state |= {stage: out.state} if out.state is not None else {}
            out = out.y
        x = out
    return x, params, state


def gradients(parts: Split, grads: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The gradients of all stages by name, those of tied parameters summed."""
    total: dict[str, torch.Tensor] = {}
    for tree in grads.values():
        for name, grad in tree.items():
            total[name] = total[name] + grad if name in total else grad
    return total


def worst(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    return max((float((got[n] - want[n]).abs().max()) for n in want), default=0.0)


def whole(model: nn.Module, inputs: Any, seed: int) -> dict[str, torch.Tensor]:
    """Gradients of the whole model; its buffers are as before."""
    torch.manual_seed(seed)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(main_tensor(model(**inputs)), list(params.values()), allow_unused=True)
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
    return {n: g for n, g in zip(params, found, strict=True) if g is not None}


def turn_error(model: nn.Module, parts: Split, inputs: Any) -> float:
    want = whole(model, inputs, 7)
    torch.manual_seed(7)
    output, params, _ = in_turn(parts, inputs)
    leaves = [t for tree in params.values() for t in tree.values()]
    found = iter(torch.autograd.grad(main_tensor(output), leaves, allow_unused=True))
    grads = {s: {n: g if (g := next(found)) is not None else torch.zeros_like(t) for n, t in tree.items()} for s, tree in params.items()}
    total = gradients(parts, grads)
    return worst(total, {n: want.get(n, torch.zeros_like(total[n])) for n in total} | want)


def step_error(model: nn.Module, parts: Split, inputs: Any, schedule: Any, m: int) -> float:
    """The error of a step over microbatches; with a state, none (it passes from one to the next)."""
    step = pp.value_and_grad(parts, lambda y, _: main_tensor(y), schedule, has_aux=True)
    rows = next(iter(inputs.values())).shape[0]
    _, grads = step(parts.params, inputs, torch.zeros(rows), state=parts.state, seed=(0, 0))
    each = [whole(model, {k: v[i * rows // m : (i + 1) * rows // m] for k, v in inputs.items()}, 0) for i in range(m)]
    total = {name: grad for tree in grads.values() for name, grad in tree.items()}  # each place has the sum
    want = {n: sum(e[n] for e in each) / m for n in each[0]}
    return worst(total, {n: want.get(n, torch.zeros_like(total[n])) for n in total} | want)


def run(name: str, number: int | None, schedules: bool) -> str:
    torch.manual_seed(0)
    make, inputs, at = MODELS[name]
    model = make().double()
    cuts: Any = number or at
    if not at and not number:
        cuts = [n for n, _ in model.named_modules() if n.endswith((".layer.1", ".layer.2", ".layers.1", ".layers.2"))][:3]
    errors = {}
    for mode in (False, True):
        model.train(mode)
        example = inputs(2, 10)
        start = time.process_time()
        parts = split(model, kwargs=example, at=cuts)
        seconds = time.process_time() - start
        key = "train" if mode else "eval"
        errors[key] = turn_error(model, parts, example)
        errors[f"{key} others"] = max(turn_error(model, parts, inputs(3, 7)), turn_error(model, parts, inputs(1, 12)))
    model.eval()
    parts = split(model, kwargs=inputs(2, 10), at=cuts)
    if schedules:
        stages = len(parts.stages)
        errors["1f1b"] = step_error(model, parts, inputs(8, 10), pp.one_f_one_b(stages, 4), 4)
        if stages % 2 == 0:
            errors["zbv"] = step_error(model, parts, inputs(8, 10), pp.zbv(stages // 2, 4), 4)
            errors["dualpipev"] = step_error(model, parts, inputs(8, 10), pp.dualpipev(stages // 2, 4), 4)
    sizes = [sum(t.numel() for t in tree.values()) for tree in parts.params.values()]
    shown = "  ".join(f"{k} {v:.0e}" for k, v in errors.items())
    return f"{shown}  split {seconds:.2f} s  skips {list(parts.skips)}  tied {len(parts.tied)}  unused {len(parts.unused)}  params {sizes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of models; all by default")
    parser.add_argument("--number", type=int, help="number of stages, balanced, instead of the names of modules")
    parser.add_argument("--schedules", action="store_true", help="run 1F1B, zbv and dualpipev too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = 0
    for name in options.names or MODELS:
        try:
            print(f"{name:12}", run(name, options.number, options.schedules), flush=True)
        except Exception as error:
            failed += 1
            print(f"{name:12} {type(error).__name__}: {str(error)[:600]}", flush=True)
            if options.names:
                traceback.print_exc()
    sys.exit(failed)


if __name__ == "__main__":
    main()

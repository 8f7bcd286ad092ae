"""Architectures of Hugging Face's transformers, tiny and random, and some of torch: how each is made, called
and cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

Inputs = Callable[[int, int], dict[str, Tensor]]
Architecture = tuple[Callable[[], nn.Module], Inputs, list[str]]
"""Makes the model; makes its keyword arguments for so many rows of such a length; the modules that begin its
stages.
"""

WORDS = 64
# Configurations name the same things in many ways: of these, one gets those that it knows.
TINY: dict[str, Any] = (
    dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embedding_size"], 32)
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4)
    | dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4)
    | dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers"], 4)
    | dict.fromkeys(["num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"], 2)
    | dict.fromkeys(
        ["intermediate_size", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"], 64
    )
    | dict.fromkeys(
        [
            "head_dim",
            "d_kv",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "rotary_dim",
            "state_size",
        ],
        8,
    )
    | dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8)
    | dict.fromkeys(
        ["linear_num_key_heads", "linear_num_value_heads", "num_key_value_heads", "num_experts_per_tok"], 2
    )
    | dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16)
    | dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts", "sliding_window"], 4)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "image_size"], 32)
    | dict.fromkeys(
        [
            "vocab_size",
            "max_position_embeddings",
            "n_positions",
            "max_target_positions",
            "max_source_positions",
        ],
        WORDS,
    )
    | dict.fromkeys(["attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"], 0.1)
    | dict.fromkeys(["layerdrop", "encoder_layerdrop", "decoder_layerdrop"], 0.0)
    | {"patch_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
)
EXPERTS = {"experts_implementation": "batched_mm"}


def ids(rows: int, time: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, time, dtype=torch.int64)
    mask[::2, -2:] = 0  # in every microbatch: transformers drops a mask of ones, but not while it is traced
    return {"input_ids": torch.randint(3, WORDS, (rows, time)), "attention_mask": mask}


def bare(rows: int, time: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (rows, time))}


def both(rows: int, time: int) -> dict[str, Tensor]:
    return {**ids(rows, time), "decoder_input_ids": torch.randint(3, WORDS, (rows, time + 1))}


def floats(**shapes: tuple[int, ...]) -> Inputs:
    return lambda rows, time: {
        name: torch.randn(rows, *shape, dtype=torch.float64) for name, shape in shapes.items()
    }


def series(width: int, *names: str) -> Inputs:
    return lambda rows, time: {name: torch.randn(rows, time, width, dtype=torch.float64) for name in names}


def joined(*inputs: Inputs) -> Inputs:
    return lambda rows, time: {name: value for each in inputs for name, value in each(rows, time).items()}


def sound(rows: int, time: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(rows, 40 * time, dtype=torch.float64)}


PIXELS = floats(pixel_values=(3, 32, 32))


def tiny(name: str, inputs: Inputs, at: list[str], **more: Any) -> Architecture:
    """A model of transformers by the name of its class."""
    kind = getattr(tf, name)
    known = {*inspect.signature(kind.config_class.__init__).parameters, *vars(kind.config_class())}
    settings = {
        key: value
        for key, value in (TINY | more).items()
        if (key in known or key in more) and value is not ...
    }
    return lambda: kind(kind.config_class(**settings)), inputs, at


def deep(name: str, prefix: str = "model.layers", inputs: Inputs = ids, **more: Any) -> Architecture:
    """One with four layers of one kind."""
    return tiny(name, inputs, [f"{prefix}.{n}" for n in (1, 2, 3)], **more)


def paired(name: str, encoder: str, decoder: str, inputs: Inputs = both, **more: Any) -> Architecture:
    """One with an encoder and a decoder of two layers each."""
    return tiny(name, inputs, [f"{encoder}.1", f"{decoder}.0", f"{decoder}.1"], **more)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> tuple[Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        return (self.t(src, tgt, tgt_mask=mask, tgt_is_causal=True),)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                nn.BatchNorm2d(after),
                nn.SiLU(inplace=True),
                nn.Dropout2d(0.1),
            )

        self.down = nn.ModuleList([block(3, 8), block(8, 16)])
        self.mid = block(16, 16)
        self.up = nn.ModuleList([block(32, 8), block(16, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor]:
        x, kept = pixel_values, []
        for block in self.down:
            kept.append(x := block(x))
            x = F.max_pool2d(x, 2)
        x = self.mid(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return (self.out(x),)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)
        self.b = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.c = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.c(self.b(self.a(x)[0])[0]),)


TOWER = dict(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, attention_dropout=0.1
)
READER = TOWER | dict(
    vocab_size=WORDS, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2
)
VIEWER = TOWER | dict(image_size=32, patch_size=8)
TOWERS = ["vision_model.encoder.layers.1", "text_model", "text_model.encoder.layers.1"]
LISTENER = dict(
    conv_dim=(16, 16),
    conv_stride=(4, 2),
    conv_kernel=(8, 4),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
)
LISTENER |= dict(num_conv_pos_embedding_groups=2, mask_time_prob=0.0, apply_spec_augment=False)
TWICE = ["model.encoder.layers", "model.decoder.layers"]
BLOCKS = ["encoder.block", "decoder.block"]

CAUSAL = (
    "Llama Qwen2 Qwen3 Gemma2 Gemma3 Phi3 Olmo2 Glm4 Cohere Lfm2 StableLm Phi Nemotron Persimmon"
    " Doge Ministral3 ModernBertDecoder NanoChat OlmoHybrid Qwen3_5 VaultGemma Mistral SmolLM3"
    " Granite Olmo Olmo3 Starcoder2 Gemma Helium Ernie4_5 Exaone4 Arcee SeedOss Cohere2 Glm BitNet"
    " Apertus"
)
WITH_EXPERTS = (
    "Mixtral Qwen3Moe Qwen3Next GptOss GraniteMoe Olmoe Qwen2Moe FlexOlmo HunYuanMoEV1 MiniMaxM2"
    " Phimoe Qwen3_5Moe"
)
MASKED = {
    "Bert": "bert",
    "Roberta": "roberta",
    "MPNet": "mpnet",
    "ConvBert": "convbert",
    "LayoutLM": "layoutlm",
    "MegatronBert": "bert",
    "RemBert": "rembert",
    "RobertaPreLayerNorm": "roberta_prelayernorm",
    "Deberta": "deberta",
    "MobileBert": "mobilebert",
    "Nystromformer": "nystromformer",
}
MODELS: dict[str, Architecture] = {
    **{name.lower(): deep(f"{name}ForCausalLM") for name in CAUSAL.split()},
    **{name.lower(): deep(f"{name}ForCausalLM", **EXPERTS) for name in WITH_EXPERTS.split()},
    **{
        f"{name.lower()}_as_shipped": deep(f"{name}ForCausalLM", experts_implementation="grouped_mm")
        for name in ["Mixtral", "Qwen3Moe", "Glm4Moe"]
    },
    **{
        name.lower(): deep(f"{name}ForCausalLM", "transformer.h")
        for name in ["Bloom", "Falcon", "CodeGen", "GPTBigCode"]
    },
    **{name.lower(): deep(f"{name}ForMaskedLM", f"{at}.encoder.layer") for name, at in MASKED.items()},
    **{
        name.lower(): paired(f"{name}ForConditionalGeneration", *TWICE)
        for name in ["MBart", "M2M100", "Pegasus", "Blenderbot"]
    },
    **{name.lower(): paired(f"{name}ForConditionalGeneration", *BLOCKS) for name in ["T5", "UMT5", "MT5"]},
    "gpt2": deep("GPT2LMHeadModel", "transformer.h"),
    "vit": deep("ViTForImageClassification", "vit.layers", PIXELS),
    "whisper": paired(
        "WhisperForConditionalGeneration",
        *TWICE,
        joined(
            floats(input_features=(16, 40)),
            lambda rows, time: {"decoder_input_ids": bare(rows, time)["input_ids"]},
        ),
        num_mel_bins=16,
        max_source_positions=20,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "bart": paired("BartForConditionalGeneration", *TWICE, forced_eos_token_id=None),
    "deberta_v2": deep(
        "DebertaV2ForMaskedLM",
        "deberta.encoder.layer",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
    ),
    "mamba": deep("MambaForCausalLM", "backbone.layers", bare, use_mambapy=False),
    "clip": (
        lambda: tf.CLIPModel(tf.CLIPConfig(text_config=READER, vision_config=VIEWER)),
        joined(ids, PIXELS),
        TOWERS,
    ),
    "swin": tiny(
        "SwinForImageClassification",
        PIXELS,
        ["swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1", "swin.encoder.layers.1.blocks.1"],
        **dict(patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    ),
    "deepseek_v3": deep("DeepseekV3ForCausalLM", first_k_dense_replace=1, num_key_value_heads=4, **EXPERTS),
    "llama4": deep("Llama4ForCausalLM", intermediate_size_mlp=64, **EXPERTS),
    "neox": deep("GPTNeoXForCausalLM", "gpt_neox.layers"),
    "gpt_neo": deep(
        "GPTNeoForCausalLM",
        "transformer.h",
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        num_layers=4,
    ),
    "gptj": deep("GPTJForCausalLM", "transformer.h", bare),
    "opt": deep("OPTForCausalLM", "model.decoder.layers", word_embed_proj_dim=32),
    "mpt": deep("MptForCausalLM", "transformer.blocks", max_seq_len=WORDS),
    "mamba2": deep(
        "Mamba2ForCausalLM", "backbone.layers", bare, num_heads=8, n_groups=1, chunk_size=4, expand=2
    ),
    "recurrent_gemma": deep("RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=4),
    "jamba": deep(
        "JambaForCausalLM",
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        **EXPERTS,
    ),
    "minimax": deep("MiniMaxForCausalLM", block_size=4, **EXPERTS),
    "biogpt": deep("BioGptForCausalLM", "biogpt.layers"),
    "ctrl": deep("CTRLLMHeadModel", "transformer.h", dff=64),
    "xlnet": deep("XLNetLMHeadModel", "transformer.layer", d_head=8, d_inner=64),
    "zamba2": deep(
        "Zamba2ForCausalLM",
        inputs=bare,
        **dict(
            layers_block_type=["mamba", "hybrid"] * 2,
            hybrid_layer_ids=[1, 3],
            n_mamba_heads=8,
            mamba_d_state=8,
            mamba_ngroups=1,
        ),
        **dict(
            chunk_size=4,
            use_mamba_kernels=False,
            attention_hidden_size=64,
            attention_head_dim=16,
            mamba_headdim=8,
        ),
        **dict(adapter_rank=4, num_mem_blocks=1),
    ),
    "modernbert": deep("ModernBertForMaskedLM", global_attn_every_n_layers=2, local_attention=4),
    "distilbert": deep("DistilBertForMaskedLM", "distilbert.transformer.layer"),
    "electra": deep("ElectraForMaskedLM", "electra.encoder.layer", embedding_size=16),
    "albert": deep(
        "AlbertForMaskedLM", "albert.encoder.albert_layer_groups", embedding_size=16, num_hidden_groups=4
    ),
    "fnet": deep("FNetForMaskedLM", "fnet.encoder.layer", bare),
    "esm": deep("EsmForMaskedLM", "esm.encoder.layer", mask_token_id=3),
    "bigbird": deep("BigBirdForMaskedLM", "bert.encoder.layer", attention_type="original_full"),
    "roformer": deep("RoFormerForMaskedLM", "roformer.encoder.layer", embedding_size=32),
    "longt5": paired("LongT5ForConditionalGeneration", *BLOCKS, local_radius=2),
    "switch": paired("SwitchTransformersForConditionalGeneration", *BLOCKS, **EXPERTS),
    "dinov2": deep("Dinov2ForImageClassification", "dinov2.encoder.layer", PIXELS),
    "beit": deep(
        "BeitForImageClassification",
        "beit.layers",
        PIXELS,
        drop_path_rate=0.0,
        use_relative_position_bias=True,
    ),
    "resnet": tiny(
        "ResNetForImageClassification",
        PIXELS,
        ["resnet.encoder.stages.1", "resnet.encoder.stages.1.layers.1", "resnet.encoder.stages.2"],
        **dict(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 2, 1], layer_type="basic"),
    ),
    "convnext": tiny(
        "ConvNextForImageClassification",
        PIXELS,
        ["convnext.encoder.stages.1", "convnext.encoder.stages.1.layers.1", "convnext.encoder.stages.2"],
        **dict(
            patch_size=4, hidden_sizes=[8, 16, 16], depths=[1, 2, 1], num_stages=3, layer_scale_init_value=1.0
        ),
    ),
    "segformer": tiny(
        "SegformerForImageClassification",
        PIXELS,
        ["segformer.stages.1"],
        **dict(
            hidden_sizes=[8, 16],
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
        ),
        **dict(num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_hidden_layers=..., patch_size=...),
    ),
    "vit_mae": tiny(
        "ViTMAEForPreTraining",
        PIXELS,
        ["vit.layers.2", "decoder", "decoder.decoder_layers.1"],
        **dict(
            decoder_hidden_size=32,
            decoder_num_attention_heads=4,
            decoder_num_hidden_layers=2,
            decoder_intermediate_size=64,
        ),
    ),
    "wav2vec2": deep("Wav2Vec2ForCTC", "wav2vec2.encoder.layers", sound, **LISTENER),
    "wavlm": deep("WavLMForCTC", "wavlm.encoder.layers", sound, **LISTENER),
    "siglip": (
        lambda: tf.SiglipModel(tf.SiglipConfig(text_config=READER, vision_config=VIEWER)),
        joined(ids, PIXELS),
        TOWERS,
    ),
    "blip": (
        lambda: tf.BlipForConditionalGeneration(
            tf.BlipConfig(
                text_config=READER | dict(encoder_hidden_size=32, projection_dim=32), vision_config=VIEWER
            )
        ),
        joined(ids, PIXELS),
        ["vision_model.encoder.layers.1", "text_decoder", "text_decoder.bert.encoder.layer.1"],
    ),
    "patchtst": deep(
        "PatchTSTForPrediction",
        "model.encoder.layers",
        floats(past_values=(32, 3)),
        **dict(
            num_input_channels=3,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            prediction_length=4,
            patch_size=...,
        ),
    ),
    "nn.Transformer": (
        Seq2Seq,
        series(16, "src", "tgt"),
        ["t.encoder.layers.1", "t.decoder", "t.decoder.layers.1"],
    ),
    "unet": (UNet, PIXELS, ["down.1", "mid", "up.1"]),
    "lstm": (Recurrent, series(8, "x"), ["b"]),
    "afmoe": deep("AfmoeForCausalLM", num_dense_layers=1, **EXPERTS),
    "aria_text": deep(
        "AriaTextForCausalLM", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, **EXPERTS
    ),
    "bamba": deep(
        "BambaForCausalLM",
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=4,
        inputs=bare,
    ),
    "deepseek_v2": deep("DeepseekV2ForCausalLM", first_k_dense_replace=1, num_key_value_heads=4, **EXPERTS),
    "falcon_h1": deep(
        "FalconH1ForCausalLM",
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=4,
        inputs=bare,
    ),
    "falcon_mamba": deep("FalconMambaForCausalLM", "backbone.layers", bare),
    "glm4_moe_lite": deep("Glm4MoeLiteForCausalLM", num_key_value_heads=4, **EXPERTS),
    "granite_moe_hybrid": deep(
        "GraniteMoeHybridForCausalLM",
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=4,
        inputs=bare,
        **EXPERTS,
    ),
    "jetmoe": deep("JetMoeForCausalLM", kv_channels=8, **EXPERTS),
    "nemotron_h": deep(
        "NemotronHForCausalLM",
        inputs=bare,
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=4,
        moe_shared_expert_intermediate_size=32,
        **EXPERTS,
    ),
    "eurobert": deep("EuroBertForMaskedLM"),
    "nomic": deep("NomicBertForMaskedLM", "nomic_bert.layers"),
    "squeezebert": deep("SqueezeBertForMaskedLM", "transformer.encoder.layers"),
    "marian": paired("MarianMTModel", *TWICE),
    "prophetnet": paired(
        "ProphetNetForConditionalGeneration", "prophetnet.encoder.layers", "prophetnet.decoder.layers"
    ),
    "led": paired("LEDForConditionalGeneration", "led.encoder.layers", "led.decoder.layers"),
    "nllb_moe": paired("NllbMoeForConditionalGeneration", *TWICE, **EXPERTS),
    "deit": deep("DeiTForImageClassification", "deit.layers", PIXELS),
    "hubert": deep("HubertForCTC", "hubert.encoder.layers", sound, **LISTENER),
    "conformer": deep("Wav2Vec2ConformerForCTC", "wav2vec2_conformer.encoder.layers", sound, **LISTENER),
    "diffllama": deep("DiffLlamaForCausalLM", attention_dropout=0.0),
    "dots1": deep("Dots1ForCausalLM", num_key_value_heads=4, experts_implementation="grouped_mm"),
    "ernie_moe": deep("Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, **EXPERTS),
    "xglm": deep("XGLMForCausalLM", "model.layers", num_layers=4),
    "rwkv": deep("RwkvForCausalLM", "rwkv.blocks", bare, attention_hidden_size=32),
}

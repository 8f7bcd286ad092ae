"""Train the small Llama of torchtitan on CPUs, by its own pipeline or by ppfunc; print losses as JSON.

Run by torchrun. torchtitan asks for an accelerator, its data and a compiled attention: here are a CPU in its
place, random tokens, and attention without a mask. The rest is its own Trainer.
"""

import argparse
import json
import math
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

KNOWN = {
    "get_device_name": "cpu",
    "get_device_properties": types.SimpleNamespace(total_memory=1 << 34),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "current_device": 0,
}


class Cpu(types.ModuleType):
    """The CPU, with the memory of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        if name in KNOWN:
            return lambda *args, **kwargs: KNOWN[name]
        return getattr(torch.cpu, name)


def divide(module: FSDPModule, factor: float, own: Any = FSDPModule.set_gradient_divide_factor) -> None:
    own(module, factor)
    module.set_force_sum_reduction_for_comms(True)  # gloo does not scale and sum at once


FSDPModule.set_gradient_divide_factor = divide
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: Cpu("cpu")

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import ppfunc as pp  # noqa: E402
from ppfunc.integrations import torchtitan as titan  # noqa: E402

SEQUENCE = 32
DEFAULTS = {"ranks": 2, "rows": 8, "steps": 20, "accumulate": 1, "replicate": 1, "shard": 1}


class Tokens(BaseDataLoader):
    """Random tokens, the same on every rank of a pipeline."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Config, *, local_batch_size: int, dp_rank: int, **others: Any) -> None:
        self.rows, self.seen, self.dp_rank = local_batch_size, 0, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.seen += 1
            generator = torch.Generator().manual_seed(self.seen + 1000 * self.dp_rank)
            tokens = torch.randint(200, (self.rows, SEQUENCE + 1), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[:, : self.seen % 5] = -100  # other numbers of labels in other microbatches
            positions = torch.arange(SEQUENCE).expand(self.rows, -1).clone()
            yield {"input": tokens[:, :-1], "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *args: Any) -> list[int]:
        return []

    def decode(self, *args: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def schedule_of(name: str, ranks: int, microbatches: int) -> pp.Schedule:
    if name == "planned":
        return pp.plan(ranks, microbatches, pp.Costs(), placement="v", cap=ranks).schedule
    return getattr(pp, name)(ranks=ranks, microbatches=microbatches)


def config_of(options: argparse.Namespace) -> Trainer.Config:
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    rows = options.rows
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.tokenizer, config.dataloader = Tokenizer.Config(), Tokens.Config()
    config.dump_folder = options.folder
    recompute = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    config.activation_checkpoint = recompute[options.recompute]
    config.training = TrainingConfig(
        local_batch_size=rows,
        global_batch_size=rows * options.accumulate * options.replicate * options.shard,
        seq_len=SEQUENCE,
        steps=options.steps,
        mixed_precision_param=options.compute,
        disable_cuda_graphs=True,
    )
    config.parallelism = ParallelismConfig(
        pipeline_parallel_degree=options.ranks,
        pipeline_parallel_schedule=options.cut,
        data_parallel_replicate_degree=options.replicate,
        data_parallel_shard_degree=options.shard,
    )
    config.checkpoint = CheckpointManager.Config(
        enable=options.save, interval=options.steps // 2, last_save_model_only=False
    )
    config.validator.enable = options.validate
    config.validator.freq, config.validator.steps, config.validator.dataloader = 5, 2, Tokens.Config()
    if options.schedule != "own":
        schedule = schedule_of(options.schedule, options.ranks, rows)
        config.model_spec = titan.pipelined(config.model_spec, schedule)
    return config


def fill(model: torch.nn.Module) -> None:
    """Draw parameters by their names, so that they are the same however the model is cut."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            own = name.replace("_checkpoint_wrapped_module.", "")
            generator = torch.Generator().manual_seed(zlib.crc32(own.encode()))
            drawn = torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[1])
            if isinstance(p, DTensor):
                drawn = distribute_tensor(drawn, p.device_mesh, p.placements)
            with torch.no_grad():
                p.copy_(drawn)


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="own")
    parser.add_argument("--cut", default="1F1B")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--recompute", default="none")
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("save", "validate"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    trainer = config_of(options).build()
    for part in trainer.model_parts:
        fill(part)
    logged, validated = [], []
    processor = trainer.metrics_processor
    processor.log = lambda step, loss, most, norm, **others: logged.append((step, loss, norm))
    processor.log_validation = lambda loss, step: validated.append((step, loss))
    trainer.train()
    trainer.close()
    parameters = [pair for part in trainer.model_parts for pair in part.named_parameters()]
    report = {
        "last": trainer.pp_has_last_stage,
        "logged": logged,
        "validated": validated,
        "sums": {name: whole(p.detach()).double().sum().item() for name, p in parameters},
    }
    print(f"\n{json.dumps(report)}\n", end="", flush=True)  # at once: ranks share the file
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

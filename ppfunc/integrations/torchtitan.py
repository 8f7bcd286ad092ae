"""Train a model of torchtitan by a schedule of ppfunc, in torchtitan's own trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ppfunc._checks import naming_arguments, require_type
from ppfunc.runtime import P2P, Microbatches
from ppfunc.schedule import Schedule
from ppfunc.schedule.errors import require_schedule
from ppfunc.stage import Engine, graph, stage_from_module
from ppfunc.steps import evaluate, value_and_grad


@naming_arguments
def pipelined(spec: Any, schedule: Schedule, *, engine: Engine = graph) -> Any:
    """Replace the pipeline of a model of torchtitan by a schedule; its trainer is used as it is.

    torchtitan cuts the model as before, by ``parallelism.pipeline_parallel_schedule`` and the options beside
    it: ``"1F1B"`` for one stage per rank, ``"Interleaved1F1B"`` for stages dealt in turn, ``"ZBVZeroBubble"``
    for stages in a V. Its optimizers, clipping, metrics, validation and checkpoints work on the parts of the
    model, whose ``.grad`` a step fills, adding to gradients that are there.

    What composes: data parallel ranks, whose parameters are DTensors of the placements that FSDP gives them,
    gathered when a step begins, with gradients reduced when it ends, one collective per parameter; activation
    checkpointing; ``mixed_precision_param``, with gradients summed in float32; gradient accumulation; labels
    to ignore; frozen parameters. The model's ``parallelize_fn`` is not called: tensor, context and expert
    parallel ranks, ``torch.compile``, offloading to the host, and losses that hold the output layer are
    refused by name, and so are models that write into buffers, as experts do that count their tokens.

    Args:
        spec: ModelSpec of torchtitan, such as ``config.model_spec``.
        schedule: program of every rank, of as many microbatches as a local batch has.
        engine: engine that differentiates a stage; ``graph(compile=True)`` compiles by inductor.

    Returns:
        The ModelSpec with another ``pipelining_fn``.

    Raises:
        TypeError: the model of ``spec`` has no pipeline.
        ScheduleError: ``schedule`` is no Schedule.
        ValueError: when the trainer is made: an option that is not honoured, or a schedule for other ranks,
            stages or microbatches.

    References:
        https://github.com/pytorch/torchtitan, release 0.3.0.
    """
    require_schedule(schedule)
    require_type(
        "spec", getattr(spec, "pipelining_fn", spec), Callable,
        "a ModelSpec of torchtitan with a pipelining_fn, such as config.model_spec",
    )  # fmt: skip
    return replace(spec, pipelining_fn=partial(_pipelining, spec.pipelining_fn, schedule, engine))


def _pipelining(
    cut: Callable[..., Any], schedule: Schedule, engine: Engine, model: nn.Module, *, ac_config: Any,
    dump_folder: str, parallelize_fn: object, **options: Any,
) -> tuple["TitanPipeline", list[nn.Module], bool, bool]:  # fmt: skip
    """Cut a model by a function of torchtitan, and run its parts by a schedule of ppfunc."""
    _require_honoured(schedule, **options)
    dims, functions = options["parallel_dims"], []

    def prepare(part: nn.Module, **others: object) -> nn.Module:
        if ac_config is not None:
            ac_config.build(dump_folder=dump_folder).apply(part)
        functions.append(stage_from_module(part, constants=True).fn)
        if dims.dp_replicate * dims.dp_shard > 1:
            _distribute(part, dims.get_activated_mesh(["dp_replicate", "dp_shard", "fsdp"]))
        return part

    _, parts, *ends = cut(
        model, ac_config=ac_config, dump_folder=dump_folder, parallelize_fn=prepare, **options
    )
    pipe, compute = dims.get_mesh("pp"), getattr(torch, options["training"].mixed_precision_param)
    held = sorted(schedule.stages_of(pipe.get_local_rank()))
    pipeline = TitanPipeline(
        dict(zip(held, parts, strict=True)), dict(zip(held, functions, strict=True)), options["loss_fn"],
        schedule, pipe.get_group(), engine, compute,
    )  # fmt: skip
    return pipeline, parts, *ends


def _distribute(part: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters of a part along their first axis over data ranks; replicas hold the same shards."""
    placements = [Replicate() if name == "dp_replicate" else Shard(0) for name in mesh.mesh_dim_names or ()]
    for module in part.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(
                module,
                name,
                nn.Parameter(
                    distribute_tensor(p.detach(), mesh, placements, src_data_rank=None), p.requires_grad
                ),
            )


def _require_honoured(
    schedule: Schedule, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any,
    loss_fn: Any, **others: object,
) -> None:  # fmt: skip
    """Raise for an option that the pipeline does not honour, and for a schedule that does not fit."""
    dims, p, leave = parallel_dims, parallelism, "leave it out, or take torchtitan's own pipelining_fn"
    for name, got, honoured, mend in (
        ("parallelism.tensor_parallel_degree", dims.tp, [1], leave),
        ("parallelism.context_parallel_degree", dims.cp, [1], leave),
        ("parallelism.expert_parallel_degree", dims.ep, [1], leave),
        ("parallelism.pipeline_parallel_schedule_csv", p.pipeline_parallel_schedule_csv, ["", None], leave),
        ("parallelism.fsdp_reshard_after_forward", p.fsdp_reshard_after_forward, ["default", "never"], leave),
        ("parallelism.enable_fsdp_symm_mem", p.enable_fsdp_symm_mem, [False], leave),
        ("parallelism.spmd_backend", p.spmd_backend, ["partial_dtensor", "spmd_types"], leave),
        ("compile.enable", compile_config.enable, [False], "pass engine=ppfunc.engines.graph(compile=True)"),
        ("training.enable_cpu_offload", training.enable_cpu_offload, [False], "leave it out"),
        (
            "loss that holds the output layer",
            hasattr(loss_fn, "set_lm_head"),
            [False],
            "take config.loss = config.loss.loss_fn",
        ),
    ):
        if got not in honoured:
            raise ValueError(f"{name}: got {got!r}, which ppfunc's pipeline does not honour; {mend}")
    name, count = p.pipeline_parallel_schedule, len(schedule.placement)
    cut = tuple(
        min(s, count - 1 - s) if name.lower() in ("zbvzerobubble", "dualpipev") else s % dims.pp
        for s in range(count)
    )
    expected = dims.pp, training.local_batch_size // p.pipeline_parallel_microbatch_size, cut, False
    if (schedule.ranks, schedule.microbatches, schedule.placement, bool(schedule.replicas)) != expected:
        raise ValueError(
            f"schedule: got {schedule.name!r} of {schedule.ranks} ranks and {schedule.microbatches}"
            f" microbatches, expected pipeline_parallel_degree={dims.pp} ranks and {expected[1]}"
            " microbatches, local_batch_size over pipeline_parallel_microbatch_size; its stages are on ranks"
            f" {list(schedule.placement)}; torchtitan cuts the model for {name!r}, {list(cut)}: set"
            " parallelism.pipeline_parallel_schedule to 'ZBVZeroBubble' for a V, to '1F1B' or"
            " 'Interleaved1F1B' for stages dealt in turn"
        )


class TitanPipeline:
    """Runs the steps of torchtitan's trainer: its ``pp_schedule``.

    Args:
        parts: ``{stage: module}``, the parts of the model on this rank, whose gradients a step fills.
        stages: ``{stage: fn}``, the functions of the parts.
        loss_fn: ``loss_fn(prediction, labels, **loss_kwargs) -> (loss, metrics)``.
        schedule: program of every rank.
        group: process group of the ranks of the pipeline.
        engine: engine that differentiates a stage.
        compute: dtype in which stages compute.
    """

    def __init__(
        self, parts: Mapping[int, nn.Module], stages: Mapping[int, Callable[..., Any]],
        loss_fn: Callable[..., Any], schedule: Schedule, group: torch.distributed.ProcessGroup,
        engine: Engine, compute: torch.dtype,
    ) -> None:  # fmt: skip
        everywhere = [stages.get(stage) for stage in range(len(schedule.placement))]
        shared: dict[str, Any] = {
            "loss_fn": lambda y, target: loss_fn(y, target[0], **target[1])[0],
            "schedule": schedule, "transport": P2P(group), "engine": engine, "return_losses": True,
            "loss_weights": [1.0] * schedule.microbatches,  # a loss is divided by all labels of the step
        }  # fmt: skip
        # Made with the first step: parameters may be frozen after the cut.
        self._training = cache(
            partial(
                value_and_grad,
                everywhere,
                sum_dtype=None if compute == torch.float32 else torch.float32,
                **shared,
            )
        )
        self._evaluation = cache(partial(evaluate, everywhere, **shared))
        self._parts, self._compute = parts, compute

    def step(self, *, return_outputs: bool = False, **batch: Any) -> None:
        """Run one forward and backward of all microbatches, and add gradients to ``.grad`` of the parts.

        Args:
            return_outputs: False.
            batch: the microbatches. ``arg_mbs``, positional arguments of the first stage, None elsewhere;
                ``kwarg_mbs``, keyword arguments of every stage; ``target_mbs``, labels, None where the last
                stage is not; ``losses``, a list to which the rank of the last stage appends the loss of each
                microbatch; ``loss_kwargs``, keyword arguments of the loss function.

        Raises:
            ValueError: outputs are asked for.
            PipelineError, AgreementError, StageError: as :func:`ppfunc.value_and_grad`.
        """
        if return_outputs:
            raise ValueError("return_outputs: got True, and the pipeline returns no outputs; pass False")
        result = self._run(self._training, **batch)
        for stage, part in self._parts.items():
            for name, p in part.named_parameters():
                if p.requires_grad:
                    gradient = _reduced(result.grads[stage][name], p)
                    p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def eval(self, **batch: Any) -> None:
        """Run the forward of all microbatches. Arguments and errors as of :meth:`step`."""
        self._run(self._evaluation, **batch)

    def _run(
        self, make: Callable[[], Callable[..., Any]], *, arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[dict[str, Any]], target_mbs: Sequence[Any] | None,
        losses: list[Tensor] | None = None, loss_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        params = {
            stage: {name: _gathered(p.detach(), self._compute) for name, p in part.named_parameters()}
            for stage, part in self._parts.items()
        }
        inputs, given = None if arg_mbs is None else Microbatches(arg_mbs), dict(loss_kwargs or {})
        targets = None if target_mbs is None else Microbatches([(labels, given) for labels in target_mbs])
        extras = {stage: Microbatches(kwarg_mbs) for stage in self._parts} if any(kwarg_mbs) else None
        with torch.enable_grad():
            result = make()(params, inputs, targets, extras=extras)
        if losses is not None:
            losses.extend(result.losses)
        return result


def _gathered(p: Tensor, compute: torch.dtype) -> Tensor:
    """Return a whole parameter, in the dtype of the stages."""
    p = p.to(compute) if p.is_floating_point() else p
    return p.full_tensor() if isinstance(p, DTensor) else p


def _reduced(gradient: Tensor, p: Tensor) -> Tensor:
    """Return the sum of a gradient over the data ranks, cut as its parameter is, in its dtype."""
    if isinstance(p, DTensor):
        gradient = DTensor.from_local(gradient, p.device_mesh, [Partial()] * p.device_mesh.ndim).redistribute(
            placements=p.placements
        )
    return gradient.to(p.dtype)

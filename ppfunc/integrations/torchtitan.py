"""Train a model of torchtitan by a schedule of ppfunc, in torchtitan's own trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ppfunc._checks import naming_arguments, shown
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
    refused by name.

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
    if not callable(getattr(spec, "pipelining_fn", None)):
        raise TypeError(
            f"spec: got {shown(spec)}, expected a ModelSpec of torchtitan with a pipelining_fn, such as"
            " config.model_spec"
        )
    return replace(spec, pipelining_fn=partial(_pipelining, spec.pipelining_fn, schedule, engine))


def _pipelining(
    cut: Callable[..., Any],
    schedule: Schedule,
    engine: Engine,
    model: nn.Module,
    *,
    ac_config: Any,
    dump_folder: str,
    parallelize_fn: object,
    **options: Any,
) -> tuple["TitanPipeline", list[nn.Module], bool, bool]:
    """Cut a model by a function of torchtitan, and run its parts by a schedule of ppfunc."""

    _require_honoured(schedule, **options)
    dims, training = options["parallel_dims"], options["training"]
    several = dims.dp_replicate * dims.dp_shard > 1
    mesh = dims.get_activated_mesh(["dp_replicate", "dp_shard", "fsdp"]) if several else None
    functions = []

    def prepare(part: nn.Module, **others: object) -> nn.Module:
        if ac_config is not None:
            ac_config.build(dump_folder=dump_folder).apply(part)
        functions.append(stage_from_module(part, constants=True).fn)
        if mesh is not None:
            _distribute(part, mesh)
        return part

    _, parts, *ends = cut(
        model, ac_config=ac_config, dump_folder=dump_folder, parallelize_fn=prepare, **options
    )
    pipe = dims.get_mesh("pp")
    held = sorted(schedule.stages_of(pipe.get_local_rank()))
    pipeline = TitanPipeline(
        dict(zip(held, parts, strict=True)),
        dict(zip(held, functions, strict=True)),
        options["loss_fn"],
        schedule,
        pipe.get_group(),
        engine,
        getattr(torch, training.mixed_precision_param),
    )
    return pipeline, parts, *ends


def _distribute(part: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters of a part along their first axis over data ranks; replicas hold the same shards."""
    placements = [Replicate() if name == "dp_replicate" else Shard(0) for name in mesh.mesh_dim_names or ()]
    for module in part.modules():
        for name, p in module.named_parameters(recurse=False):
            shard = distribute_tensor(p.detach(), mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shard, p.requires_grad))


def _require_honoured(
    schedule: Schedule, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any,
    loss_fn: Any, **others: object,
) -> None:  # fmt: skip
    """Raise for an option that the pipeline does not honour, and for a schedule that does not fit."""
    refused = {
        "tensor_parallel_degree": parallel_dims.tp > 1,
        "context_parallel_degree": parallel_dims.cp > 1,
        "expert_parallel_degree": parallel_dims.ep > 1,
        "pipeline_parallel_schedule_csv": bool(parallelism.pipeline_parallel_schedule_csv),
        "fsdp_reshard_after_forward": parallelism.fsdp_reshard_after_forward == "always",
        "enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
        "spmd_backend": parallelism.spmd_backend == "full_dtensor",
    }
    for name in (name for name, given in refused.items() if given):
        raise ValueError(
            f"parallelism.{name}: got {shown(getattr(parallelism, name))}, which ppfunc's pipeline does not"
            " honour; leave it out, or take torchtitan's own pipelining_fn"
        )
    for name, given, mend in (
        ("compile.enable", compile_config.enable, "pass engine=ppfunc.engines.graph(compile=True)"),
        ("training.enable_cpu_offload", training.enable_cpu_offload, "leave it out"),
        (
            f"loss {type(loss_fn).__name__}, which holds the output layer",
            hasattr(loss_fn, "set_lm_head"),
            "take config.loss = config.loss.loss_fn",
        ),
    ):
        if given:
            raise ValueError(f"{name}: got what ppfunc's pipeline does not honour; {mend}")
    name, count = parallelism.pipeline_parallel_schedule, len(schedule.placement)
    turned = name.lower() in ("zbvzerobubble", "dualpipev")
    cut = tuple(min(s, count - 1 - s) if turned else s % parallel_dims.pp for s in range(count))
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if schedule.microbatches != microbatches or schedule.ranks != parallel_dims.pp:
        raise ValueError(
            f"schedule: got {schedule.name!r} of {schedule.ranks} ranks and {schedule.microbatches}"
            f" microbatches, expected pipeline_parallel_degree={parallel_dims.pp} ranks and {microbatches}"
            " microbatches, local_batch_size over pipeline_parallel_microbatch_size"
        )
    if schedule.placement != cut or schedule.replicas:
        raise ValueError(
            f"schedule: got {schedule.name!r} with stages on ranks {list(schedule.placement)}; torchtitan"
            f" cuts the model for {name!r}, {list(cut)}: set parallelism.pipeline_parallel_schedule to"
            " 'ZBVZeroBubble' for a V, to '1F1B' or 'Interleaved1F1B' for stages dealt in turn"
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
        self._parts, self._compute = parts, compute
        self._make = partial(_functions, stages, loss_fn, schedule, group, engine, compute)
        self._made: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[dict[str, Any]],
        target_mbs: Sequence[Any] | None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Run one forward and backward of all microbatches, and add gradients to ``.grad`` of the parts.

        Args:
            arg_mbs: positional arguments of the first stage, by microbatch; None elsewhere.
            kwarg_mbs: keyword arguments of every stage, by microbatch.
            target_mbs: labels, by microbatch; None where the last stage is not.
            losses: list to which the rank of the last stage appends the loss of each microbatch.
            loss_kwargs: keyword arguments of the loss function.
            return_outputs: False.

        Raises:
            ValueError: outputs are asked for.
            PipelineError, AgreementError, StageError: as :func:`ppfunc.value_and_grad`.
        """
        if return_outputs:
            raise ValueError("return_outputs: got True, and the pipeline returns no outputs; pass False")
        result = self._run(0, arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs)
        for stage, part in self._parts.items():
            for name, p in part.named_parameters():
                if p.requires_grad:
                    gradient = _reduced(result.grads[stage][name], p)
                    p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[dict[str, Any]],
        target_mbs: Sequence[Any] | None,
        losses: list[Tensor] | None = None,
    ) -> None:
        """Run the forward of all microbatches. Arguments and errors as of :meth:`step`."""
        self._run(1, arg_mbs, kwarg_mbs, target_mbs, losses, None)

    def _run(
        self, which: int, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: list[Tensor] | None,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:  # fmt: skip
        if self._made is None:  # parameters may be frozen after the cut
            self._made = self._make()
        params = {
            stage: {name: _gathered(p.detach(), self._compute) for name, p in part.named_parameters()}
            for stage, part in self._parts.items()
        }
        inputs = None if arg_mbs is None else Microbatches(arg_mbs)
        given = {} if loss_kwargs is None else dict(loss_kwargs)
        targets = None if target_mbs is None else Microbatches([(labels, given) for labels in target_mbs])
        extras = {stage: Microbatches(kwarg_mbs) for stage in self._parts} if any(kwarg_mbs) else None
        with torch.enable_grad():
            result = self._made[which](params, inputs, targets, extras=extras)
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
        apart = [Partial()] * p.device_mesh.ndim
        gradient = DTensor.from_local(gradient, p.device_mesh, apart).redistribute(placements=p.placements)
    return gradient.to(p.dtype)


def _functions(
    stages: Mapping[int, Callable[..., Any]], loss_fn: Callable[..., Any], schedule: Schedule,
    group: torch.distributed.ProcessGroup, engine: Engine, compute: torch.dtype,
) -> tuple[Callable[..., Any], Callable[..., Any]]:  # fmt: skip
    """Make the functions of a training step and an evaluation."""

    def loss(prediction: Any, target: tuple[Any, dict[str, Any]]) -> Tensor:
        labels, given = target
        return loss_fn(prediction, labels, **given)[0]

    everywhere = [stages.get(s) for s in range(len(schedule.placement))]
    weights = [1.0] * schedule.microbatches  # the loss is divided by the number of labels of all of them
    transport = P2P(group)
    training = value_and_grad(
        everywhere, loss, schedule, transport, engine=engine, return_losses=True, loss_weights=weights,
        sum_dtype=torch.float32 if compute != torch.float32 else None,
    )  # fmt: skip
    evaluation = evaluate(
        everywhere, loss, schedule, transport, engine=engine, return_losses=True, loss_weights=weights
    )
    return training, evaluation

"""Train models of Hugging Face in a pipeline, by the ``Trainer`` that their users have."""

import json
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppfunc._checks import require_counts, require_type
from ppfunc.runtime import P2P, InProcess, Microbatches, StepResult, Transport
from ppfunc.runtime.values.errors import Failure
from ppfunc.schedule import F, Schedule, find_builder, remove_tail, single_chain
from ppfunc.schedule.errors import require_schedule
from ppfunc.splitter import Split, split
from ppfunc.stage import Engine, Signature, graph
from ppfunc.stage.abstract.captures import named_in
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.steps import evaluate, value_and_grad

# Arguments with the values that a pipeline honours, and what to do instead of others.
_HONOURED: dict[str, tuple[Sequence[Any], str]] = {
    "fsdp": ((None, False, "", []), "leave it out, stages share out the parameters"),
    "deepspeed": ((None,), "leave it out, stages share out the parameters"),
    "parallelism_config": ((None,), "leave it out"),
    "torch_compile": ((None, False), "pass engine=ppfunc.engines.graph(compile=True) to the trainer"),
    "use_liger_kernel": ((False,), "leave it out"),
    "fp16": ((False,), "take bf16=True"),
    "fp16_full_eval": ((False,), "leave it out"),
    "bf16_full_eval": ((False,), "take bf16=True, which evaluates in bfloat16 too"),
    "activation_checkpointing_kwargs": ((None, {}), "pass engine=ppfunc.engines.graph(remat=...)"),
    "auto_find_batch_size": ((False,), "choose per_device_train_batch_size"),
    "torch_empty_cache_steps": ((None,), "leave it out"),
    "debug": (("", []), "leave it out"),
    "enable_jit_checkpoint": ((False,), "leave it out"),
    "save_on_each_node": ((False,), "take an output_dir that all nodes see"),
    "ddp_find_unused_parameters": ((None,), "leave it out"),
    "ddp_bucket_cap_mb": ((None,), "leave it out"),
    "ddp_broadcast_buffers": ((None,), "leave it out"),
    "ddp_static_graph": ((None,), "leave it out"),
    "optim": (  # they update each parameter by its own gradient and state, and skip those without a gradient
        (
            "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_bnb_8bit",
            "lion_32bit", "lion_8bit", "ademamix", "stable_adamw", "grokadamw", "schedule_free_adamw",
            "schedule_free_sgd", "schedule_free_radam",
        ),
        "take another, such as 'adamw_torch', or pass optimizers= to the trainer",
    ),
    "n_gpu": ((0, 1), "run torchrun with a process for each GPU, or set CUDA_VISIBLE_DEVICES"),
}  # fmt: skip


@dataclass(frozen=True)
class _Hidden:
    """Holds a trainer. Steps look at all that a model refers to, and would read its data and its logs."""

    trainer: "PipelineTrainer"


class _Losses(nn.Module):
    """Returns the loss that a trainer computes of its model, and the outputs: a module to cut into stages."""

    def __init__(self, trainer: "PipelineTrainer", with_loss: bool, with_outputs: bool) -> None:
        super().__init__()
        self.model, self.config = trainer.model, getattr(trainer.model, "config", None)
        self.hidden, self.with_loss, self.with_outputs = _Hidden(trainer), with_loss, with_outputs

    def look(self) -> None:
        """Show steps the attributes of the trainer that a user's loss names: a trace has their values."""
        trainer, kinds = self.hidden.trainer, type(self.hidden.trainer).__mro__[::-1]
        users = kinds[kinds.index(PipelineTrainer) + 1 :]
        known = {name: each for kind in users for name, each in vars(kind).items()} | vars(trainer)
        names = ["compute_loss", "compute_loss_func"]
        for name in names:  # and what their code names in turn
            known[name] = getattr(known.get(name), "__func__", known.get(name))
            if code := getattr(known[name], "__code__", None):
                names += named_in(code) & known.keys() - {*names}
        self.read = {name: known[name] for name in names}

    def forward(self, **inputs: Any) -> Any:
        trainer, items = self.hidden.trainer, inputs.pop("num_items_in_batch", None)
        with trainer.compute_loss_context_manager():
            if not self.with_loss:
                loss, outputs = torch.zeros((), device=trainer.args.device), self.model(**inputs)
            elif self.with_outputs:
                loss, outputs = trainer.compute_loss(
                    self.model, inputs, return_outputs=True, num_items_in_batch=items
                )
            else:  # as in training: a loss of the user may know of no outputs
                loss, outputs = trainer.compute_loss(self.model, inputs, num_items_in_batch=items), ()
        return loss, _tensors(outputs)


def _tensors(outputs: Any) -> Any:
    """Keep the tensors among outputs, in dictionaries and tuples, with () in place of anything else."""
    return tree_map(
        lambda x: x if isinstance(x, Tensor) else _tensors(x) if isinstance(x, Mapping) else (),
        {**outputs} if isinstance(outputs, Mapping) else outputs,
    )


class PipelineTrainer(transformers.Trainer):
    """Train as ``transformers.Trainer`` does, in stages: in one process, or in several by ``torchrun``.

    Equivalent to: ``transformers.Trainer(*args, **kwargs)`` in one process, in whatever number of processes.
    Losses, gradients and checkpoints are the same, but for rounding and the numbers that dropout draws. Each
    of the ``gradient_accumulation_steps`` batches of a step is a microbatch of the pipeline, and has inputs
    of the same names. A batch of an evaluation is one microbatch: ranks take turns. What ``compute_loss``
    does, of this class or of a subclass, is traced as a part of the stages.

    All ranks make the same model (seed before one with random parameters), call ``train``, ``evaluate``,
    ``predict`` and ``save_model``, and read the same data: Accelerate is told of one process. While
    ``train()`` runs, the model of a process has the parameters of its own stages, and NaN for others. It is
    whole in checkpoints, and on every rank when ``train()`` has ended.

    Args:
        args, kwargs: arguments of ``transformers.Trainer``. What no pipeline honours of
            ``TrainingArguments`` is refused by name.
        schedule: name of a schedule, such as ``"1f1b"`` or ``"zbv"``; a function
            ``(ranks, microbatches) -> Schedule``; or a :class:`ppfunc.Schedule`.
        stages: number of stages of the model, an int. By default as many as the schedule has on all
            processes; in one process, where they take turns, a number of your choice.
        engine: engine of the stages, see :func:`ppfunc.value_and_grad`. By default ``graph``, which
            computes activations again where the arguments ask for ``activation_checkpointing``.

    Raises:
        ValueError: an argument asks for what no pipeline honours, or the schedule does not fit the processes.
        TypeError: a subclass has a ``training_step`` or ``prediction_step`` that does not call this class's.
    """

    def __init__(
        self,
        *args: Any,
        schedule: str | Schedule | Callable[[int, int], Schedule] = "1f1b",
        stages: int | None = None,
        engine: Engine | None = None,
        **kwargs: Any,
    ) -> None:
        require_type(
            "schedule", schedule, str | Schedule | Callable,
            "a name such as '1f1b', a function (ranks, microbatches) -> Schedule, or a Schedule",
        )  # fmt: skip
        require_counts(stages=1 if stages is None else stages)
        self._given = find_builder(schedule) if isinstance(schedule, str) else schedule
        self._stages, self._engine = stages, engine
        self._splits, self._steps = dict[Any, tuple[_Losses, Split]](), dict[Any, tuple[Any, Schedule]]()
        self._tensors, self._homes = dict[str, Tensor](), dict[Tensor, int]()  # with the first of its ranks
        self._whole = True
        super().__init__(*args, **kwargs)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError("optimizers: got LBFGS, which computes losses of its own; take another")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. What is raised here is told to the other ranks, whose errors name it."""
        self._make_whole()
        self._batches, self._weights = list[dict[str, Any]](), list[float]()  # of a step that is not whole
        try:
            return super().train(*args, **kwargs)
        except Exception as error:
            raise self._transport.fail(Failure(self._rank, None, None, error)) from error.__cause__

    # -- one process for Accelerate, which would wrap the model, and give each rank other batches

    def create_accelerator_and_postprocess(self) -> None:
        self._require_honoured()  # asks for GPUs, which makes the process group
        self._world, self._rank = (
            (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        )
        first = self._schedule(ranks=self._world if self._world > 1 else self._stages or 1)
        stages = len({*first.model_stages})  # a builder may have several on a rank
        fit = max(1, first.ranks * (self._stages or stages) // stages)
        schedule = first if self._world > 1 else self._schedule(ranks=fit)
        count = len({*schedule.model_stages})
        if self._stages not in (None, count) or (self._world > 1 and schedule.ranks != self._world):
            raise ValueError(
                f"stages: got {self._stages} in {self._world} processes, expected {count}, which"
                f" {schedule.name} has on {schedule.ranks} ranks; leave stages out, or run torchrun"
                f" --nproc-per-node {fit}"
            )
        self._stages, self._ranks = count, schedule.ranks
        if self._world > 1:
            vars(self.args.distributed_state).update(num_processes=1, distributed_type=DistributedType.NO)
        self._transport: Transport = P2P() if self._world > 1 else InProcess()
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = self._world == 1
        self.accelerator.clip_grad_norm_ = self._clip

    def _require_honoured(self) -> None:
        args: Any = self.args
        for name, (honoured, mend) in _HONOURED.items():
            if (got := getattr(args, name)) not in honoured:
                raise ValueError(
                    f"TrainingArguments: {name}={getattr(got, 'value', got)!r} is not for a pipeline; {mend}"
                )
        for name in ("training_step", "prediction_step"):
            method = getattr(type(self), name)
            if method is not getattr(PipelineTrainer, name) and name not in named_in(method.__code__):
                raise TypeError(
                    f"{type(self).__name__}.{name} does not call super().{name}, which runs the stages; call"
                    " it, or override compute_loss"
                )
        if args.activation_checkpointing:
            self._engine, args.activation_checkpointing = self._engine or graph(remat="full"), False

    def _schedule(self, microbatches: int | None = None, ranks: int | None = None) -> Schedule:
        """Make the schedule of a step."""
        given, wanted = self._given, microbatches or self.args.gradient_accumulation_steps
        meaning = "(processes are its ranks, gradient_accumulation_steps its microbatches)"
        try:
            built = given if isinstance(given, Schedule) else given(ranks or self._ranks, wanted)
        except ValueError as error:
            raise ValueError(f"schedule: {error} {meaning}") from error
        require_schedule(built)
        schedule = remove_tail(built)
        if schedule.forward_only or schedule.slices or schedule.microbatches != wanted:
            raise ValueError(
                f"schedule: {schedule.name} does not train {wanted} microbatches of whole rows: it has"
                f" {schedule.microbatches}{' of slices' * bool(schedule.slices)}"
                f"{', without backwards' * schedule.forward_only} {meaning}"
            )
        return schedule

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self._world == 1:  # else each rank moves its stages there, when they are known
            super()._move_model_to_device(model, device)

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their norm over all ranks. A parameter of several ranks counts once."""
        parameters = [p for p in parameters if p.grad is not None]
        norm = get_total_norm(
            [p.grad for p in parameters if self._homes.get(p, self._rank) == self._rank], norm_type
        ).to(self.args.device)
        if self._world > 1:
            dist.all_gather(norms := [torch.empty_like(norm) for _ in range(self._world)], norm)
            norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # -- steps

    def _with_loss(self, compute_loss: Callable[..., Any]) -> Any:
        """Return the ``Trainer`` that this is, with another loss."""
        twin: Any = copy(self)
        twin.compute_loss = compute_loss
        return super(PipelineTrainer, twin)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a microbatch. With the last of a step, run all, and set the gradients of this rank.

        Returns:
            The loss of the step with its last microbatch, 0 before.
        """

        def keep(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            self._batches.append({**inputs, "num_items_in_batch": num_items_in_batch})
            return torch.ones((), dtype=torch.float64, requires_grad=True)

        weight = self._with_loss(keep).training_step(model, inputs, num_items_in_batch)
        self._weights.append(weight.item())  # as Trainer scales a loss
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, weights = self._batches, self._weights
        self._batches, self._weights = [], []
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                "model: got frozen parameters alone, expected some to train; call requires_grad_()"
            )
        result = self._run(batches, weights, with_loss=True, with_outputs=False)
        for name, gradient in ChainMap(*result.grads.values()).items():
            if self._tensors[name].requires_grad:
                self._tensors[name].grad = gradient
        for name, value in ChainMap(*(result.aux.state or {}).values()).items():
            self._tensors[name].copy_(value)
        return result.loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Run a batch as one microbatch. Every rank gets the loss, and the outputs of the model."""

        def predict(
            model: Any,
            inputs: Any,
            return_outputs: bool = True,
            num_items_in_batch: Any = None,
            with_loss: bool = True,
        ) -> Any:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
            result = self._run([inputs], [], with_loss, not prediction_loss_only)
            outputs = tree_map(lambda leaf: leaf[0], result.aux.loss)
            if self._world > 1 and not prediction_loss_only:
                outputs = self._share(outputs, self._forward().placement[-1], self.args.device)
            return result.loss, {} if prediction_loss_only else outputs

        return self._with_loss(predict).prediction_step(
            lambda **inputs: predict(None, inputs, with_loss=False)[1],
            inputs,
            prediction_loss_only,
            ignore_keys,
        )

    def _run(
        self, batches: list[dict[str, Any]], weights: list[float], with_loss: bool, with_outputs: bool
    ) -> StepResult:
        """Run microbatches through the stages: with weights, also the backward.

        A schedule has as many microbatches in every step. In place of those that the last step of an epoch
        lacks is its last microbatch again, with weight 0; a model with a state takes a schedule of its own.
        """
        if some := {name for batch in batches for name in batch if not all(name in each for each in batches)}:
            raise ValueError(
                f"batches of a step: got {', '.join(sorted(some))} in some alone, expected inputs of the same"
                " names in each; have the data collator give them, such as a mask of ones"
            )
        trained = [p.requires_grad for p in self.model.parameters()]
        kind = self.model, with_loss, with_outputs, *sorted(batches[0]), *trained
        losses, parts = self._splits.get(kind) or (_Losses(self, with_loss, with_outputs), None)
        losses.look()
        if parts is None:  # the model is cut at the same modules each time
            at: Any = next((parts.at for _, parts in self._splits.values()), self._stages)
            parts = split(losses, batches[0], at=at)
            self._splits[kind] = losses, parts
            self._tensors = dict([*losses.named_parameters(), *losses.named_buffers()])
        count = len(weights) if parts.state else max(len(weights), self.args.gradient_accumulation_steps)
        key = kind, count if weights else 0
        if key not in self._steps:
            schedule = self._schedule(count) if weights else self._forward()
            step = (value_and_grad if weights else evaluate)(
                parts, lambda loss, _: loss, schedule, self._transport, engine=self._engine or graph,
                has_aux=True,
            )  # fmt: skip
            self._steps[key] = step, schedule
        step, schedule = self._steps[key]
        if weights and self._whole and self._world > 1:
            self._hold(parts, schedule)
        mine = schedule.model_stages_of(self._rank) if self._world > 1 else range(len(parts.stages))
        params = {
            s: {name: self._tensors[name].detach().to(self.args.device) for name in parts.params[s]}
            for s in mine
        }
        state = {s: {name: self._tensors[name] for name in parts.state[s]} for s in mine if s in parts.state}
        missing = schedule.microbatches - len(batches)
        return step(
            params, Microbatches(batches + batches[-1:] * missing),
            loss_weights=(weights or [1.0]) + [0.0] * missing,
            seed=(self.args.seed, self.state.global_step), state=state or None,
        )  # fmt: skip

    def _forward(self) -> Schedule:
        placement = self._schedule().placement[: self._stages]
        programs = [[F(s, 0) for s, at in enumerate(placement) if at == rank] for rank in range(self._ranks)]
        return single_chain("evaluation", placement, 1, programs)

    # -- the whole model, and the whole state of its optimizer

    def _share(self, tree: Any, home: int, device: Any = "cpu") -> Any:
        """Return the tree of tensors of one rank on all ranks, on a device."""
        text = Signature.of(tree).to_json() if self._rank == home else ""
        form = Signature.from_json(self._transport.all_gather(text)[home])
        leaves = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in form.leaves]
        for n, leaf in enumerate(tree_leaves(tree) if self._rank == home else leaves):
            here = leaf.to(self.args.device).contiguous()
            dist.broadcast(here, home)
            leaves[n] = here.to(device)
        return form.unflatten(leaves)

    def _hold(self, parts: Split, schedule: Schedule) -> None:
        """Keep the parameters of this rank's stages on its device, and NaN in place of others."""
        places = [
            (self._tensors[name], rank)
            for stage, rank in zip(schedule.model_stages, schedule.placement, strict=True)
            for name in (*parts.params[stage], *parts.state.get(stage, ()))
        ]
        self._homes, self._whole, moved = dict(reversed(places)), False, False
        held = {tensor for tensor, rank in places if rank == self._rank}
        for tensor in self._homes:
            if tensor in held:
                moved |= tensor.device != self.args.device
                tensor.data = tensor.data.to(self.args.device)
            elif tensor.is_floating_point():
                tensor.data = tensor.data.new_full((), float("nan")).expand(tensor.shape)
                self.optimizer.state.pop(tensor, None)
        if moved:  # torch knows which state moves with its parameter
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _make_whole(self) -> None:
        """Give every rank the parameters of all others."""
        for home in range(0 if self._whole else self._world):
            tensors = [tensor for tensor, at in self._homes.items() if at == home]
            values = self._share([tensor.detach() for tensor in tensors], home)
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data = value.to(tensor.device)
        self._whole = True
        self._transport.all_gather("")  # rank 0 may write a checkpoint still

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, from rank 0, when all ranks have called this."""
        self._make_whole()
        before = {**(config := vars(getattr(self.model, "config", nn.Module())))}
        super().save_model(output_dir, _internal_call)
        config.update(before)  # where rank 0 alone notes the dtype that it saves
        self._transport.all_gather("")  # other ranks may read what rank 0 has written

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of all ranks, as one process does."""
        state = self.optimizer.state
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        mine = {n: state[p] for n, p in enumerate(order) if p in state and self._homes.get(p) == self._rank}
        tensors, numbers = (
            {n: {k: v for k, v in e.items() if isinstance(v, Tensor) is kind} for n, e in mine.items()}
            for kind in (True, False)
        )
        plain = [json.loads(text) for text in self._transport.all_gather(json.dumps(numbers))]
        for home in range(1, self._world):
            others = self._share(tensors, home).items()
            state.update((order[n], e | plain[home][str(n)]) for n, e in others if self._rank == 0)
        super()._save_optimizer_and_scheduler(output_dir)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._make_whole()
        return super()._finalize_training(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to search."""
        raise NotImplementedError("hyperparameter_search is not for a pipeline; take transformers.Trainer")

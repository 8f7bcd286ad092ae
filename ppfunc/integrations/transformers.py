"""Train models of Hugging Face in a pipeline, by the ``Trainer`` that their users have."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppfunc._checks import require_counts, shown
from ppfunc.runtime import P2P, InProcess, Microbatches, StepResult, Transport
from ppfunc.schedule import F, Schedule, find_builder, remove_tail, single_chain
from ppfunc.schedule.errors import require_schedule
from ppfunc.splitter import Split, split
from ppfunc.stage import Engine, Signature, graph
from ppfunc.stage.abstract.captures import named_in
from ppfunc.stage.tree import tree_leaves, tree_map
from ppfunc.steps import evaluate, value_and_grad

# Arguments that no pipeline honours: the values that ask for nothing, and what to do instead.
_REFUSED: dict[str, tuple[Sequence[Any], str]] = {
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
}
# Optimizers that update each parameter by its own gradient and state, and skip those without a gradient.
_OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_bnb_8bit",
    "lion_32bit", "lion_8bit", "ademamix", "stable_adamw", "grokadamw", "schedule_free_adamw",
    "schedule_free_sgd", "schedule_free_radam",
)  # fmt: skip


class _Hidden:
    """Holds a trainer. Steps look at all that a model refers to, and would read its data and its logs."""

    def __init__(self, trainer: "PipelineTrainer") -> None:
        self.trainer = trainer


class _Losses(nn.Module):
    """Returns the loss that a trainer computes of its model, and the outputs: a module to cut into stages."""

    def __init__(self, trainer: "PipelineTrainer", with_loss: bool, with_outputs: bool) -> None:
        super().__init__()
        self.model, self.config = trainer.model, getattr(trainer.model, "config", None)
        self.hidden, self.with_loss, self.with_outputs = _Hidden(trainer), with_loss, with_outputs
        kinds = type(trainer).__mro__
        users = kinds[: kinds.index(PipelineTrainer)]
        methods = {name: method for kind in reversed(users) for name, method in vars(kind).items()}
        self.names = ["compute_loss"] if users else []
        for name in self.names:  # and what their code names in turn
            if code := getattr(methods.get(name), "__code__", None):
                self.names += named_in(code) - {*self.names}
        self.read = {name: methods[name] for name in self.names if name in methods}
        self.look()

    def look(self) -> None:
        """Show steps the attributes of the trainer that its user's code names: a trace has their values."""
        of, names = vars(self.hidden.trainer), {"compute_loss_func", *self.names} - {"compute_loss"}
        self.read |= {name: of[name] for name in names & of.keys()}

    def forward(self, **inputs: Any) -> Any:
        trainer, items = self.hidden.trainer, inputs.pop("num_items_in_batch", None)
        if not self.with_loss:
            outputs = _tensors(self.model(**inputs))
            return tree_leaves(outputs)[0].new_zeros(()).float(), outputs
        compute: Any = type(trainer).compute_loss
        if not self.with_outputs:  # as in training: a loss of the user may know of no outputs
            return compute(trainer, self.model, inputs, num_items_in_batch=items), ()
        loss, outputs = compute(trainer, self.model, inputs, return_outputs=True, num_items_in_batch=items)
        return loss, _tensors(outputs)


def _tensors(outputs: Any) -> Any:
    """Keep the tensors among outputs, in dictionaries and tuples, with () in place of anything else."""
    if isinstance(outputs, Mapping):
        return {name: _tensors(value) for name, value in outputs.items() if value is not None}
    if isinstance(outputs, list | tuple):
        return tuple(_tensors(value) for value in outputs if value is not None)
    return outputs if isinstance(outputs, Tensor) else ()


class PipelineTrainer(transformers.Trainer):
    """Train as ``transformers.Trainer`` does, in stages: in one process, or in several by ``torchrun``.

    Equivalent to: ``transformers.Trainer(*args, **kwargs)`` in one process, in whatever number of processes.
    Losses, gradients and checkpoints are the same, but for rounding and the numbers that dropout draws. Each
    of the ``gradient_accumulation_steps`` batches of a step is a microbatch of the pipeline. What
    ``compute_loss`` does, of this class or of a subclass, is traced as a part of the stages.

    All ranks call ``train``, ``evaluate``, ``predict`` and ``save_model``, and read the same data: Accelerate
    is told of one process. While ``train()`` runs, the model of a process has the parameters of its own
    stages, and NaN for others. It is whole in checkpoints, and on every rank when ``train()`` has ended.

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
        if not (isinstance(schedule, str | Schedule) or callable(schedule)):
            raise TypeError(
                f"schedule: got {shown(schedule)}, expected a name such as '1f1b', a function (ranks,"
                " microbatches) -> Schedule, or a Schedule"
            )
        if stages is not None:
            require_counts(stages=stages)
        self._given = find_builder(schedule) if isinstance(schedule, str) else schedule
        self._stages, self._engine = stages, engine
        self._batches: list[tuple[dict[str, Any], float]] = []
        self._splits: dict[Any, tuple[_Losses, Split]] = {}
        self._steps: dict[Any, tuple[Any, Schedule]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._homes: dict[str, int] = {}  # the first rank that holds a parameter, or a buffer
        self._held: set[str] = set()
        self._whole = True
        super().__init__(*args, **kwargs)

    # -- one process for Accelerate, which would wrap the model, and give each rank other batches

    def create_accelerator_and_postprocess(self) -> None:
        self._require_honoured()
        self._device = self.args.device  # makes the process group
        many = dist.is_initialized() and dist.get_world_size() > 1
        self._world, self._rank = (dist.get_world_size(), dist.get_rank()) if many else (1, 0)
        schedule = self._schedule(ranks=self._world if many else self._stages or 1)
        if not many and self._stages:  # of builders with several stages on a rank
            schedule = self._schedule(ranks=max(1, schedule.ranks * self._stages // _stages_of(schedule)))
        count = _stages_of(schedule)
        if self._stages not in (None, count) or (many and schedule.ranks != self._world):
            fit = max(1, schedule.ranks * (self._stages or count) // count)
            raise ValueError(
                f"stages: got {self._stages} in {self._world} processes, expected {count}, which"
                f" {schedule.name} has on {schedule.ranks} ranks; leave stages out, or run torchrun"
                f" --nproc-per-node {fit}"
            )
        self._stages, self._ranks = count, schedule.ranks
        if many:
            state: Any = self.args.distributed_state
            state.num_processes, state.distributed_type = 1, DistributedType.NO
        self._transport: Transport = P2P() if many else InProcess()
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = not many
        self.accelerator.clip_grad_norm_ = self._clip

    def _require_honoured(self) -> None:
        args: Any = self.args
        for name, (nothing, mend) in _REFUSED.items():
            if (got := getattr(args, name)) not in nothing:
                raise ValueError(f"TrainingArguments: {name}={got!r} is not for a pipeline; {mend}")
        if (optim := str(getattr(args.optim, "value", args.optim))) not in _OPTIMIZERS:
            raise ValueError(
                f"TrainingArguments: optim={optim!r} is not for a pipeline; take one of"
                f" {', '.join(_OPTIMIZERS)}, or pass optimizers= to the trainer"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"this process sees {args.n_gpu} GPUs, expected 1; run torchrun --nproc-per-node"
                f" {args.n_gpu}, or set CUDA_VISIBLE_DEVICES"
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
        others = {self._tensors[name] for name, home in self._homes.items() if home != self._rank}
        norm = get_total_norm([p.grad for p in parameters if p not in others], norm_type).to(self._device)
        if self._world > 1:
            norms = [torch.empty_like(norm) for _ in range(self._world)]
            dist.all_gather(norms, norm)
            norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # -- steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a microbatch. With the last of a step, run all, and set the gradients of this rank.

        Returns:
            The loss of the step with its last microbatch, 0 before.
        """
        self.model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        weight = 1.0 if scaled else 1 / self.current_gradient_accumulation_steps
        self._batches.append((self._inputs(inputs, num_items_in_batch), weight))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self._device)
        batches, self._batches = self._batches, []
        parts = self._cut(batches[0][0], with_loss=True, with_outputs=False)
        if not any(tensor.requires_grad for tensor in self._tensors.values()):
            raise ValueError(
                "model: got frozen parameters alone, expected some to train; call requires_grad_()"
            )
        result = self._run(parts, batches, train=True)
        for name, gradient in _entries(result.grads):
            if self._tensors[name].requires_grad:
                self._tensors[name].grad = gradient
        for name, value in _entries(result.aux.state or {}):
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
            loss: bool = True,
        ) -> Any:
            inputs = self._inputs(inputs, num_items_in_batch)
            parts = self._cut(inputs, loss, not prediction_loss_only)
            result = self._run(parts, [(inputs, 1.0)], train=False)
            if prediction_loss_only:
                return result.loss, {}
            last = self._forward().placement[-1] if self._world > 1 else 0
            outputs = tree_map(lambda leaf: leaf[0], result.aux.loss) if last == self._rank else None
            return result.loss, self._share(outputs, last, self._device)

        def forward(**inputs: Any) -> Any:
            return {} if prediction_loss_only else predict(None, inputs, loss=False)[1]

        self.__dict__["compute_loss"] = predict  # which the method of transformers calls
        try:
            return super().prediction_step(forward, inputs, prediction_loss_only, ignore_keys)
        finally:
            del self.__dict__["compute_loss"]

    def _inputs(self, inputs: Any, items: Any) -> dict[str, Any]:
        inputs = {**self._prepare_inputs(inputs)}
        return inputs if items is None else inputs | {"num_items_in_batch": torch.as_tensor(items)}

    def _cut(self, inputs: dict[str, Any], with_loss: bool, with_outputs: bool) -> Split:
        """Cut the model for inputs of these names, at the same modules each time."""
        key = self.model, with_loss, with_outputs, frozenset(inputs)
        if key not in self._splits:
            at: Any = next((parts.at for _, parts in self._splits.values()), self._stages)
            model = _Losses(self, with_loss, with_outputs)
            self._tensors = dict([*model.named_parameters(), *model.named_buffers()])
            self._splits[key] = model, split(model, inputs, at=at)
        self._splits[key][0].look()
        return self._splits[key][1]

    def _run(self, parts: Split, batches: list[tuple[dict[str, Any], float]], train: bool) -> StepResult:
        """Run microbatches, with their weights, through the stages."""
        key = id(parts), train and len(batches)
        if key not in self._steps:
            make: Any = value_and_grad if train else evaluate
            schedule = self._fitted(parts, len(batches)) if train else self._forward()
            engine = self._engine or graph
            step = make(
                parts, lambda result, _: result, schedule, self._transport, engine=engine, has_aux=True
            )
            self._steps[key] = step, schedule
        step, schedule = self._steps[key]
        if train and self._whole and self._world > 1:
            self._hold(parts, schedule)
        mine = schedule.model_stages_of(self._rank) if self._world > 1 else range(len(parts.stages))
        params = {s: {name: self._tensors[name].detach() for name in parts.params[s]} for s in mine}
        state = {s: {name: self._tensors[name] for name in parts.state[s]} for s in mine if s in parts.state}
        inputs, weights = [batch for batch, _ in batches], [weight for _, weight in batches]
        missing = schedule.microbatches - len(inputs)
        return step(
            params, Microbatches(inputs + inputs[-1:] * missing), loss_weights=weights + [0.0] * missing,
            seed=(self.args.seed, self.state.global_step), state=state or None,
        )  # fmt: skip

    def _fitted(self, parts: Split, microbatches: int) -> Schedule:
        """Make the schedule of a step: the last of an epoch has fewer microbatches."""
        try:
            return self._schedule(microbatches)
        except ValueError:
            if parts.state or microbatches > self.args.gradient_accumulation_steps:
                raise
            return self._schedule()  # what is missing is the last microbatch again, with weight 0

    def _forward(self) -> Schedule:
        placement = self._schedule().placement[: self._stages]
        programs = [[F(s, 0) for s, at in enumerate(placement) if at == rank] for rank in range(self._ranks)]
        return single_chain("evaluation", placement, 1, programs)

    # -- the whole model, and the whole state of its optimizer

    def _share(self, tree: Any, home: int, device: Any = "cpu") -> Any:
        """Return the tree of tensors of one rank on all ranks, on a device."""
        if self._world == 1:
            return tree
        text = Signature.of(tree).to_json() if self._rank == home else ""
        form = Signature.from_json(self._transport.all_gather(text)[home])
        empty = (torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in form.leaves)
        leaves = tree_leaves(tree) if self._rank == home else [*empty]
        for n, leaf in enumerate(leaves):
            here = leaf.to(self._device).contiguous()
            dist.broadcast(here, home)
            leaves[n] = here.to(device)
        return form.unflatten(leaves)

    def _hold(self, parts: Split, schedule: Schedule) -> None:
        """Keep the parameters of this rank's stages on its device, and NaN in place of others."""
        places = [
            (name, rank)
            for stage, rank in zip(schedule.model_stages, schedule.placement, strict=True)
            for name in (*parts.params[stage], *parts.state.get(stage, ()))
        ]
        self._homes = dict(reversed(places))  # the first rank of several
        self._held = {name for name, rank in places if rank == self._rank}
        self._whole, moved = False, False
        for name in self._homes:
            tensor = self._tensors[name]
            if name in self._held:
                moved |= tensor.device != self._device
                tensor.data = tensor.data.to(self._device)
            elif tensor.is_floating_point():
                tensor.data = tensor.data.new_full((), float("nan")).expand(tensor.shape)
                self.optimizer.state.pop(tensor, None)
        if moved:  # torch knows which state moves with its parameter
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _make_whole(self) -> None:
        """Give every rank the parameters of all others."""
        for home in range(0 if self._whole else self._world):
            names = [name for name, at in self._homes.items() if at == home]
            values = self._share({name: self._tensors[name].detach() for name in names}, home)
            for name, value in values.items():
                if name not in self._held:
                    self._tensors[name].data = value
        self._whole = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, from rank 0, when all ranks have called this."""
        self._make_whole()
        config = vars(getattr(self.model, "config", nn.Module()))
        before = {**config}
        super().save_model(output_dir, _internal_call)
        config.clear()  # saving notes the dtype in it, on rank 0 alone: ranks would read unlike values
        config.update(before)
        self._transport.all_gather("")  # other ranks may read what rank 0 has written

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of all ranks, as one process does."""
        state, homes = self.optimizer.state, {self._tensors[name]: home for name, home in self._homes.items()}
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        mine = {n: state[p] for n, p in enumerate(order) if p in state and homes.get(p) == self._rank}
        numbers = {n: {k: v for k, v in e.items() if not isinstance(v, Tensor)} for n, e in mine.items()}
        tensors = {n: {k: v for k, v in e.items() if isinstance(v, Tensor)} for n, e in mine.items()}
        texts = self._transport.all_gather(json.dumps(numbers))
        for home in range(1, self._world):
            others, plain = self._share(tensors, home), json.loads(texts[home])
            for n, entry in others.items() if self._rank == 0 else ():
                state[order[n]] = entry | plain[str(n)]
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._make_whole()
        self._transport.all_gather("")  # rank 0 may write it still
        super()._load_from_checkpoint(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._make_whole()
        return super()._finalize_training(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to search."""
        raise NotImplementedError("hyperparameter_search is not for a pipeline; take transformers.Trainer")


def _entries(trees: Mapping[int, Mapping[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [entry for tree in trees.values() for entry in tree.items()]


def _stages_of(schedule: Schedule) -> int:
    return len({*schedule.model_stages})

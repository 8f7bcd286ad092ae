"""List the names that other libraries use, with what to write in ppfunc instead."""

_STEP = "step = pp.value_and_grad(split, loss_fn, schedule), then loss, grads = step(params, inputs, targets)"
_CALL = "call it: loss, grads = step(params, inputs, targets)"
_STAGES = "pp.split(model, args, at=[names of modules]) cuts a model; functions are stages as they are"
_SCHEDULE = "pp.{}(ranks, microbatches) makes a schedule, a value that knows no stages"
_TRAIN = "one call does it all: state, metrics = trainer.step(state, inputs, targets)"
_EVALUATE = "loss = trainer.evaluate(state, inputs, targets)"
_MODE = "model.train() and model.eval() of the model that was split act on its splits, too"
_MOVE = "move the model before it is split, or values: optree.tree_map(lambda t: t.to(device), split.params)"
_SAVE = "pp.checkpoint.save(folder, state), pp.checkpoint.load(folder, like=state)"
_NO_GRAD = "nothing: a step returns its gradients, new ones in every call; no tensor has a .grad"
_BATCH = "nothing: the batch is what a step gets, and the microbatches of the schedule cut it"
_TO_MODEL = "split.put_back(state.params, state=state.stage_state) writes what was trained into the model"
_RANKS = "processes come with the transport, pp.P2P(group) or pp.P2P(mesh=mesh, axes=axes)"
_PURE = "params, state = optimizer.update(grads, state, params) returns new values; gradients are values too"
_RATE = "a rate is a part of the optimizer: pp.optim.adamw(pp.optim.warmup_cosine(1e-3, 100, 1000))"
_CLIP = "optimizer=pp.optim.chain(pp.optim.clip_by_global_norm(1.0), optimizer)"
_CLIP_ALL = f"{_CLIP} of a trainer, by the norm of all stages; pp.optim.global_norm(grads) of these alone"
_EVALUATION = "pp.evaluate(split, loss_fn, schedule) makes a step without backwards"
_LOADER = "inputs, targets = pp.Microbatches.from_iterator(iter(loader), microbatches).unzip()"
_SEED = "seed=(seed, step) of a step sets the numbers that stages draw by torch"
_MESH = "mesh=init_device_mesh(...) of torch, with an axis for each, and pp.P2P(mesh=mesh, axes=axes)"
_PRECISION = "precision=pp.Precision(compute=torch.bfloat16)"
_SHARD = 'transport=pp.P2P(mesh=mesh, axes=axes, shard="params"), with one axis for data'
_REMAT = 'engine=pp.engines.graph(remat="full") of a step or a trainer'
_TRAINER = "pp.Trainer(split, loss_fn, schedule, optimizer, transport)"
_OVERLAP = "stages are functions of yours, and overlapped=function, where the step is made, runs OVERLAP_F_B"
_WEIGHTS = "nothing: the backward returns gradients of weights, and W of a schedule computes them"
_SHAPES = "nothing: every step reads the shapes from its inputs"
_CALLED = "a dictionary of the model's arguments as args of split, or inputs of a step: {name: tensor}"
_EXPORT = (
    "split.put_back(state.params, state=state.stage_state), then generate and save_pretrained of the model"
)

_BY_MEND: dict[str, dict[str, str]] = {
    "ppfunc": {
        _SCHEDULE.format("gpipe"): "ScheduleGPipe",
        _SCHEDULE.format("one_f_one_b"): (
            "Schedule1F1B PipeDreamFlush Std1F1B Eager1F1B TrainSchedule"
            " forward_backward_pipelining_without_interleaving"
        ),
        _SCHEDULE.format("interleaved_1f1b"): (
            "ScheduleInterleaved1F1B Interleaved1F1B forward_backward_pipelining_with_interleaving"
        ),
        _SCHEDULE.format("looped_bfs"): "ScheduleLoopedBFS",
        _SCHEDULE.format("interleaved_zb"): "ScheduleInterleavedZeroBubble",
        _SCHEDULE.format("zb_h1"): "zero_bubble_h1 ZBH1 ScheduleZBH1",
        _SCHEDULE.format("zbv"): "ScheduleZBVZeroBubble",
        _SCHEDULE.format("dualpipev"): "ScheduleDualPipeV",
        _STEP: "get_forward_backward_func train_batch vjp grad",
        _STAGES: (
            "PipelineStage build_stage Pipe SplitPoint PipelineModule LayerSpec TiedLayerSpec pipeline"
            " pipeline_yield pipeline_enter_stage"
        ),
        "pp.split(model, args) cuts a model where it calls torch's pipe_split()": "pipe_split",
        "pp.schedule.find_builder(name), or pp.{name of the schedule}": "get_schedule_class",
        _TRAINER: "initialize DeepSpeedEngine train_step make_train_step prepare Accelerator LightningModule",
        _CLIP_ALL: (
            "clip_grad_norm_ clip_grad_norm clip_grads_with_norm_ clip_grad_value_ get_total_norm clip"
            " get_grad_norm get_global_grad_norm"
        ),
        _SAVE: "save_checkpoint load_checkpoint save_state load_state",
        _SHARD: "zero ZeroRedundancyOptimizer DistributedOptimizer FullyShardedDataParallel fully_shard FSDP",
        _LOADER: "DataLoader RepeatingLoader",
        _MESH: "Mesh make_mesh init_device_mesh DistributedDataParallel DDP",
        "pp.parallel.Topology.of(pipe=..., data=..., model=...) makes a topology": (
            "PipeModelDataParallelTopology PipeDataParallelTopology ProcessTopology PipelineParallelGrid"
        ),
        f"{_TRAINER}; its arguments are there and in the optimizer": "TrainingArguments TrainerArguments",
        _RANKS: "initialize_model_parallel get_pipeline_model_parallel_rank pmap shard_map",
        "torch.func.vmap goes round a step in one process; pp.ensemble trains several": "vmap",
        "steps compile themselves by form; pp.engines.graph(compile=True) adds inductor": "jit",
        "pp.parallel.partition_balanced(weights, stages)": (
            "partition_by_weights partition_by_parameters partition_by_time partition_min_range"
        ),
        _REMAT: "remat checkpoint_policies",
        "a loop in a stage is Python's, and one over stages is the schedule's": "scan",
        "optree.tree_map(function, tree)": "tree_map tree tree_util",
        _SEED: "random PRNGKey manual_seed seed_everything set_seed",
        "stages are functions of tensors, written with torch": "numpy nn",
        "pp.collectives has psum and others for stages": "lax",
        "pp.optim.adamw(lr, weight_decay=0.0) makes one": "adam Adam",
        "pp.optim.sgd(lr) makes one": "SGD",
        "pp.optim.warmup_cosine(peak, warmup, steps), or a function of the step": (
            "cosine_decay_schedule warmup_cosine_decay_schedule get_cosine_schedule_with_warmup"
        ),
        "the microbatches of a step are added up; a schedule of more does it": "MultiSteps accumulate",
        _PURE: "apply_updates",
        _RATE: "lr_scheduler inject_hyperparams",
        "mask= of pp.optim.adamw(lr) says which leaves decay; trainable= of a trainer, which train": "masked",
        f"{_RANKS}; {_TRAINER}": "parallel_state mpu ModelParallelConfig TransformerConfig",
    },
    "module": {
        f"{_REMAT} recomputes in the backward; {_SAVE} are for files": "checkpoint",
        "pp.one_f_one_b(ranks, microbatches) makes one": "schedule",
        "pp.optim.adamw(lr) makes one": "optim",
    },
    "missing": {
        f"{_SCHEDULE.format('gpipe')}; pp.schedule.single_chain(...) makes one of programs": "programs",
        "the stages first: (split, loss_fn, pp.one_f_one_b(ranks, microbatches))": "schedule",
        "like=state, a state of the same form, such as trainer.init(params)": "like",
        "the state or the parameters first, then the batch, (state, inputs, targets)": "inputs",
        "what trainer.init or trainer.step has returned, save(folder, state)": "state",
        "the rate first, such as 1e-3, or pp.optim.warmup_cosine(1e-3, 100, 1000)": "lr",
    },
    "Timeline": {
        "text = pp.schedule.to_trace(schedule, timeline), or to_svg for a picture": (
            "save export_chrome_trace to_json plot show draw to_svg svg"
        ),
    },
    "Schedule": {
        _STEP: "step train_batch",
        _EVALUATION: "eval eval_batch",
        "schedule.microbatches": "n_microbatches num_microbatches",
        "pp.simulate(schedule) has it": "bubble makespan span idle timeline",
        "pp.schedule.to_svg(schedule) returns the text of a picture": "to_svg svg plot draw save",
        _OVERLAP: "register_custom_function",
    },
    "Split": {
        "split.params, {stage: {name: tensor}}": "parameters named_parameters",
        "split.state, {stage: {name: tensor}}": "buffers named_buffers",
        _MOVE: "to cuda cpu half bfloat16 float double",
        _MODE: "train eval",
        "pp.evaluate(split, None, schedule, return_outputs=True) makes a step that runs it": "forward",
        f"split.stages has the functions; {_STEP}": "build_stage get_stage_module submod_0 split_gm",
        "len(split.stages)": "num_stages",
        "split.load(state_dict) returns a split with these weights": "load_state_dict",
        _EXPORT: "generate save_pretrained push_to_hub",
        _REMAT: "gradient_checkpointing_enable",
        "model.requires_grad_(False), before a step or trainer is made, or trainable= of it": (
            "requires_grad_ freeze"
        ),
    },
    "StepFunction": {
        _CALL: "step train_batch run backward",
        "step.lower(params, inputs, targets)": "trace",
        "engine=pp.engines.graph(compile=True), where it is made": "compile",
        _EVALUATION: "eval eval_batch",
        _OVERLAP: "register_custom_function",
        _NO_GRAD: "zero_grad",
    },
    "Trainer": {
        _TRAIN: "train_batch forward backward fit training_step zero_grad optimizer_step run",
        f"{_TRAIN}; {_MODE}": "train",
        _CLIP: "clip_grad_norm_ clip_grad_norm clip_gradients",
        f"{_LOADER}, for trainer.step": "set_dataloader set_dataiterator train_dataloader set_batch_fn",
        "metrics, the second result of trainer.step, has loss, grad_norm, lr and others": (
            "get_global_grad_norm logged_metrics callback_metrics log metrics loss_scale"
        ),
        _BATCH: "no_sync accumulate",
        _EVALUATE: "eval eval_batch validate predict",
        "state.params, {stage: tree}, of the state that init and step return": "parameters named_parameters",
        f"the state is the value that init and step return; {_SAVE}": "state_dict",
        _SAVE: "save load save_checkpoint load_checkpoint save_model load_state_dict",
        _TO_MODEL: "model module",
        "state.optimizer is its state": "optimizer",
        "state.step is the number of steps": "global_steps",
        "split.state_dict(state.params, state.stage_state)": "module_state_dict",
        "schedule.model_stages_of(rank) are the stages of a rank": "is_first_stage is_last_stage",
        f"metrics.lr; {_RATE}": "lr_scheduler scheduler get_last_lr get_lr",
    },
    "Optimizer": {
        _PURE: "step zero_grad apply_updates param_groups",
        "its state is the value that init and update return": "state_dict load_state_dict",
    },
    "Metrics": {"metrics.loss is the loss": "item backward detach"},
    "TrainState": {
        "state.params, {stage: tree}": "parameters model",
        "state.stage_state, {stage: tree}": "state buffers batch_stats",
        "state._replace(params=...) returns another state": "replace apply_gradients",
    },
    "value": {
        "take its .submod, a torch.nn.Module": "PipelineStage _PipelineStage",
        "take its .module": "DataParallel",
        _RATE: "LambdaLR StepLR CosineAnnealingLR OneCycleLR LinearLR SequentialLR",
        "pp.optim.adamw(lr) makes one": "AdamW",
        "pp.dynamic_scale() makes one": "GradScaler",
        "take dict(it)": "BatchEncoding BatchFeature UserDict",
        "take the state that its init and step return": "Trainer",
    },
    "()": {
        "microbatches": (
            "n_microbatches num_microbatches gradient_accumulation_steps micro_batches gradient_accumulation"
            " accumulate_grad_batches"
        ),
        "ranks": "num_ranks world_size pipeline_model_parallel_size num_stages pp_size pp",
        "chunks": (
            "virtual_pipeline_model_parallel_size n_chunks num_model_chunks virtual_stages"
            " num_layers_per_virtual_pipeline_stage"
        ),
        "targets": "target labels",
        "return_losses=True where the step is made": "losses",
        "a loss_fn that returns (loss, aux), and find aux in metrics.aux": "has_aux",
        "at=[names of modules], or at=4 for stages of like size": (
            "split_spec split_policy partition_method balance"
        ),
        "args=(tensor, ...) and kwargs={name: tensor}": "mb_args mb_kwargs example_args",
        "lr": "learning_rate rate",
        "cap": "memory memory_limit max_memory",
        _NO_GRAD: "retain_graph create_graph",
        f"{_PRECISION[:-1]}, scale=pp.dynamic_scale())": "scaler grad_scaler",
        _BATCH: (
            "train_micro_batch_size_per_gpu train_batch_size per_device_train_batch_size batch_size"
            " global_batch_size"
        ),
        f"stages and loss_fn; {_STEP}": "forward_step_func forward_step",
        "donate=True of pp.optim.adamw(lr)": "donate_argnums",
        "state = pp.checkpoint.load(folder, like=state) before the first step": "resume_from_checkpoint",
        "a loop of your own round state, metrics = trainer.step(state, inputs, targets)": (
            "callbacks max_steps num_train_epochs epochs"
        ),
        f"{_EVALUATE}, has_aux=True for metrics of the loss function": "compute_metrics",
        "model.to(device) before it is split": "device_map",
        "init_process_group(backend) of torch.distributed before it, and tensors on the device": (
            "backend device"
        ),
        f"one call for the whole model: {_STAGES}": "stage_index",
        _CLIP: "max_grad_norm clip gradient_clipping grad_clip clip_grad_norm",
        _PRECISION: "fp16 bf16 dtype amp mixed_precision",
        _SHARD: "shard zero_stage zero_optimization fsdp",
        _REMAT: (
            "activation_checkpoint_interval gradient_checkpointing activation_checkpointing remat"
            " recompute_granularity recompute"
        ),
        _EVALUATION: "forward_only",
        "return_outputs=True where the step is made": "collect_non_loss_data",
        "nothing: the model's first and last modules are in its first and last stage": (
            "pre_process post_process"
        ),
        "nothing: what nobody reads is freed, and messages overlap with compute": (
            "deallocate_pipeline_outputs overlap_p2p_comm batch_p2p_comm"
        ),
        "nothing: numbers, texts and flags among the inputs are constants, each traced once": (
            "static_argnums static_argnames"
        ),
        _MESH: (
            "tensor_model_parallel_size tensor_parallel_size data_parallel_size context_parallel_size tp dp"
        ),
        _WEIGHTS: "dw_builder",
        _SHAPES: "input_args output_args tensor_shape seq_length micro_batch_size variable_seq_lengths",
        "loss_weights=[1.0] * microbatches for a sum; they are 1/m each by default": "scale_grads",
        "its options as arguments": "config config_params args training_args",
        "batches as arguments of trainer.step": "train_dataset eval_dataset training_data dataloader",
        _RATE: "lr_scheduler scheduler",
        f"stages; {_STAGES}": "model module net",
        _CALLED: "input_ids attention_mask inputs_embeds",
        "seed=(seed, step)": "rng key rngs generator",
        "loss_fn": "loss criterion loss_func",
        f"transport; {_RANKS}": "group process_group mesh devices",
    },
    "--": {  # options of a command
        "format": "json csv svg trace",
        "ranks": "stages",
        "microbatches": "mb",
    },
    "split": {
        "at=4 for as many stages, or at=[names of modules]": "num_stages n_stages stages split_points",
    },
    "adamw": {
        "betas": "b1 b2 beta1 beta2",
    },
    "warmup_cosine": {
        "peak": "peak_value lr max_lr",
        "warmup": "warmup_steps num_warmup_steps",
        "steps": "decay_steps total_steps num_training_steps",
        "end": "end_value eta_min",
        "nothing: the rate rises from 0": "init_value",
    },
    "home": {  # of arguments that other functions take
        "ranks and microbatches where the schedule is made, pp.one_f_one_b(ranks, microbatches)": (
            "microbatches ranks"
        ),
        "chunks of a schedule that has them, such as pp.looped_bfs(ranks, microbatches, chunks)": "chunks",
        "options of an optimizer where it is made, pp.optim.adamw(lr)": "lr weight_decay betas momentum",
        "seed=(seed, step) where the step is called": "seed",
        _TRAINER: "optimizer precision",
        _STEP: "loss_fn stages",
    },
}

OLD_WORDS = {
    owner: {name: mend for mend, names in by_mend.items() for name in names.split()}
    for owner, by_mend in _BY_MEND.items()
}
"""What to write, by the name of a class, of the package, of a function for its arguments, ``()`` for those of
all, ``--`` for options or ``home`` for arguments of other functions, and by the old name.
"""

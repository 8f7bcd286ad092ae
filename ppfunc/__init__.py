"""ppfunc: pipeline parallelism for PyTorch with pure stages and schedules as values.

Glossary, the same words in the API, in errors and in pictures:

======================  ==========================================================================================
stage                   a pure function ``fn(params, x) -> y``: one part of the model
split                   a model cut into stages by the names of its modules, with parameters, skips and tied names
tied                    parameters of several stages that are one, with one gradient
rank                    one worker of the pipeline, which holds stages: a process, or with ``InProcess`` a part of one
chunk                   one of the stages of a rank that holds several
microbatch              a part of the batch, which goes through the stages by itself
chain                   a path of stages that some microbatches take; bidirectional schedules have two
replica                 one of several places of the same parameters: stages of two chains, or data parallel ranks
placement               the rank of each stage
partition               the layers of each stage
instruction             one thing that a rank does, such as ``2F0``: the forward of stage 2 for microbatch 0
step, of a program      instructions whose messages are posted together
program, of a rank      its steps, in order
schedule                an immutable value: the program of every rank, with placement and chains
step function           a function that ``value_and_grad`` or a sibling returns; one call is one training step
engine                  a function that differentiates a stage: ``graph``, ``functional`` or ``eager``
stage program           the functions that an engine makes of a stage: its forward, its backward, and that in two parts
residuals               the tensors that the forward of a stage keeps for its backward
signature               structure, shapes and dtypes of a tree of tensors, without values
layout                  how the leaf of a signature lies over the ranks of a mesh, as placements: that of a DTensor
collective              a function over the ranks of an axis that stages may call: ``psum``, ``pvary``, ``all_gather``, ...
edge                    two stages, the first of which sends activations to the second
skip                    an edge between stages that are not neighbours
transport               an object that carries messages between ranks: ``InProcess``, ``P2P`` or ``runtime.Simulated``
lower                   make values from stages, schedule and signatures: signatures of all edges, bytes of all buffers
compile                 make stage programs, and one flat list of calls, from what was lowered
execute                 make these calls, with the tensors of one training step
extras                  inputs of a stage beside ``x`` that get no gradient, such as masks
state                   a tree that a stage reads, and returns anew, in every training step, such as running statistics
metrics                 tensors that a stage returns for the caller, beside ``y``
loss weights            the weight of each microbatch in the loss, ``1/m`` each by default
trainer                 a function of state and batch to the next state, with what it needs; ``train_step`` makes one
data rank               one of several pipelines that hold the same parameters and run other batches
model rank              one of several ranks that compute parts of the same stage, on the same batch
shard                   the part of a tensor that a rank keeps
checkpoint              a folder with the state of a step, which is there as a whole or not at all
bubble                  the share of a training step in which ranks wait
======================  ==========================================================================================
"""

from typing import TYPE_CHECKING

from ._lazy import attach

if TYPE_CHECKING:
    from . import (
        parallel as parallel,
        runtime as runtime,
        schedule as schedule,
        splitter as splitter,
        stage as stage,
        testing as testing,
        training as training,
    )
    from .measurement import measure as measure
    from .pipeline import evaluate as evaluate, value_and_grad as value_and_grad
    from .runtime import (
        P2P as P2P,
        AgreementError as AgreementError,
        Aux as Aux,
        Axes as Axes,
        InProcess as InProcess,
        Lowered as Lowered,
        Microbatches as Microbatches,
        PipelineError as PipelineError,
        StepFunction as StepFunction,
        Transport as Transport,
        interleaved as interleaved,
        microbatch as microbatch,
        two_streams as two_streams,
    )
    from .sample_gradients import per_sample_grad as per_sample_grad
    from .schedule import (
        Bound as Bound,
        Certificate as Certificate,
        Costs as Costs,
        Instruction as Instruction,
        Op as Op,
        Plan as Plan,
        Schedule as Schedule,
        ScheduleError as ScheduleError,
        check as check,
        chimera as chimera,
        compare as compare,
        compare_schedules as compare_schedules,
        data_parallel as data_parallel,
        deepspeed_inference as deepspeed_inference,
        deepspeed_train as deepspeed_train,
        dualpipe as dualpipe,
        dualpipev as dualpipev,
        gpipe as gpipe,
        inference as inference,
        interleaved_one_f_one_b as interleaved_one_f_one_b,
        interleaved_zero_bubble as interleaved_zero_bubble,
        looped_bfs as looped_bfs,
        lower_bound as lower_bound,
        one_f_one_b as one_f_one_b,
        plan as plan,
        simulate as simulate,
        v_half as v_half,
        v_min as v_min,
        with_skips as with_skips,
        zb_h1 as zb_h1,
        zb_h2 as zb_h2,
        zbv as zbv,
        zbv_greedy as zbv_greedy,
        zero_bubble as zero_bubble,
    )
    from .splitter import Split as Split, split as split
    from .stage import (
        StageError as StageError,
        eager as eager,
        functional as functional,
        graph as graph,
        split_sequential as split_sequential,
        stage_from_module as stage_from_module,
    )
    from .stage.collectives import (
        all_gather as all_gather,
        all_to_all as all_to_all,
        psum as psum,
        psum_scatter as psum_scatter,
        pvary as pvary,
    )
    from .stage.layers import params_of_stages as params_of_stages, stages_from_layers as stages_from_layers
    from .stage.layout import with_layouts as with_layouts
    from .stage.output import Output as Output, Received as Received
    from .stage.program import Engine as Engine, Loss as Loss, Stage as Stage
    from .stage.transforms import clipped_sum as clipped_sum, dual as dual, ensemble as ensemble, square_norms as square_norms
    from .trainer import Metrics as Metrics, Trainer as Trainer, TrainState as TrainState
    from .training import (
        LossScale as LossScale,
        Optimizer as Optimizer,
        Precision as Precision,
        adamw as adamw,
        chain as chain,
        clip_by_global_norm as clip_by_global_norm,
        constant as constant,
        dynamic_scale as dynamic_scale,
        from_updates as from_updates,
        linear as linear,
        materialize as materialize,
        parallelize as parallelize,
        sgd as sgd,
        shard as shard,
        static_scale as static_scale,
        warmup_cosine as warmup_cosine,
    )
    from .training.checkpoint import (
        CheckpointError as CheckpointError,
        export as export,
        latest as latest,
        load as load,
        save as save,
        save_async as save_async,
    )
    from .training_step import train_step as train_step
    from .transforms import gnvp as gnvp, hvp as hvp, jvp as jvp
else:
    __getattr__, __dir__, __all__ = attach(__name__)

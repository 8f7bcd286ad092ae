"""ppfunc: pipeline parallelism for PyTorch with pure stages and schedules as values.

Glossary, the same words in the API, in errors and in pictures:

======================  ====================================================================================
stage                   a pure function ``fn(params, x) -> y``: one part of the model
split                   a model cut into stages by the names of its modules, with its skips and tied names
tied                    parameters of several stages that are one, with one gradient
rank                    a worker of the pipeline that holds stages: a process, or a part of it (``InProcess``)
chunk                   one of the stages of a rank that holds several
microbatch              a part of the batch, which goes through the stages by itself
sequence, slice         some rows of the batch, and a part of their tokens, which is a microbatch
carry                   a tree that a stage hands from a slice to the next, with its gradient: ``carry`` of
                        ``jax.lax.scan``, whose ``xs`` are slices; ``carry=`` of a step is its ``init``
flow                    stages that some microbatches go through, and their edges, ``schedule.Flow``: a chain,
                        or a graph; bidirectional schedules have two
parts                   stages with some rows of an output layer each: ``vocabulary_parallel``
replica                 one of several places of the same parameters: copies of a stage, or data ranks
placement               the rank of each stage
partition               the layers of each stage
instruction             one thing that a rank does, such as ``2F0``: the forward of stage 2 for microbatch 0
step, of a program      instructions whose messages are posted together
program, of a rank      its steps, in order
schedule                an immutable value: the program of every rank, with placement and flows
step function           a function that ``value_and_grad`` or a sibling returns; one call is one training step
engine                  a function that differentiates a stage: ``graph``, ``functional`` or ``eager``;
                        ``graph(dynamic=True)`` traces a stage once for all sizes of its inputs
stage program           the functions that an engine makes of a stage: forward, backward, its two parts
residuals               the tensors that the forward of a stage keeps for its backward; computed again by
                        ``graph(remat=...)``, ``schedule.insert_recomputes`` or a plan with costs of it
signature               structure, shapes and dtypes of a tree of tensors, without values
layout                  the placements of a leaf over the ranks of a mesh: those of a DTensor
collective              a function over the ranks of an axis that stages may call: ``collectives.psum``, ...
edge                    two stages, the output of the first of which is an input of the second
Hessian                 ``hvp`` multiplies it with a vector: forward mode, ``jvp``, over the gradient
skip                    two stages, the first of which gives the second a value of its own beside the edges;
                        one that leads back, to the next slice
transport               an object that carries messages between ranks: ``InProcess``, ``P2P``
lower                   turn stages, schedule and signatures into values: all edges, the bytes of all buffers
compile                 make stage programs, and one flat list of calls, from what was lowered
execute                 make these calls, with the tensors of one training step
extras                  inputs of a stage beside ``x`` that get no gradient, such as masks
state                   a tree that a stage reads and returns anew in every step, such as running statistics
metrics                 tensors that a stage returns for the caller, beside ``y``
aux                     a tree of tensors that the loss function returns for the caller, beside the loss
loss weights            the weight of each microbatch in the loss, ``1/m`` each by default
trainer                 steps from state and batch to the next state: ``Trainer``
data rank               one of several pipelines that hold the same parameters and run other batches
model rank              one of several ranks that compute parts of the same stage, on the same batch
shard                   the part of a tensor that a rank keeps
checkpoint              a folder with the state of a step, which is there as a whole or not at all
bubble                  the share of a training step in which ranks wait
======================  ====================================================================================
"""

from typing import TYPE_CHECKING

from ._lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import (
        integrations as integrations,
        parallel as parallel,
        runtime as runtime,
        schedule as schedule,
        splitter as splitter,
        stage as stage,
        testing as testing,
        training as training,
        transforms as transforms,
        vocabulary as vocabulary,
    )
    from .measurement import measure as measure
    from .runtime import (
        P2P as P2P,
        AgreementError as AgreementError,
        Axes as Axes,
        InProcess as InProcess,
        Microbatches as Microbatches,
        OnPaper as OnPaper,
        PipelineError as PipelineError,
        interleaved as interleaved,
        microbatch as microbatch,
        replicated as replicated,
        two_streams as two_streams,
    )
    from .schedule import (
        Costs as Costs,
        Schedule as Schedule,
        ScheduleError as ScheduleError,
        arrange as arrange,
        check as check,
        chimera as chimera,
        data_parallel as data_parallel,
        decode as decode,
        deepspeed_inference as deepspeed_inference,
        deepspeed_train as deepspeed_train,
        dualpipe as dualpipe,
        dualpipev as dualpipev,
        gpipe as gpipe,
        inference as inference,
        interleaved_1f1b as interleaved_1f1b,
        interleaved_zb as interleaved_zb,
        looped_bfs as looped_bfs,
        one_f_one_b as one_f_one_b,
        plan as plan,
        seq1f1b as seq1f1b,
        seq_zb as seq_zb,
        simulate as simulate,
        spread as spread,
        v_half as v_half,
        v_min as v_min,
        with_parts as with_parts,
        with_skips as with_skips,
        zb_h1 as zb_h1,
        zb_h2 as zb_h2,
        zbv as zbv,
        zbv_greedy as zbv_greedy,
        zero_bubble as zero_bubble,
    )
    from .splitter import Split as Split, materialize as materialize, split as split
    from .stage import (
        StageError as StageError,
        collectives as collectives,
        engines as engines,
        stage_from_module as stage_from_module,
        stages_from_layers as stages_from_layers,
    )
    from .stage.attention import carried_attention as carried_attention
    from .stage.collectives import context_attention as context_attention
    from .stage.layout import with_layouts as with_layouts
    from .stage.modules import parallelize as parallelize
    from .stage.program import Output as Output, Received as Received
    from .stage.transforms import ensemble as ensemble
    from .steps import eval_shape as eval_shape, evaluate as evaluate, value_and_grad as value_and_grad
    from .training import (
        Precision as Precision,
        Trainer as Trainer,
        TrainState as TrainState,
        checkpoint as checkpoint,
        dynamic_scale as dynamic_scale,
        optim as optim,
        static_scale as static_scale,
    )
    from .transforms import (
        hvp as hvp,
        jvp as jvp,
        per_sample_grad as per_sample_grad,
    )
    from .tuning.tune import tune as tune
    from .vocabulary import (
        vocabulary_cross_entropy as vocabulary_cross_entropy,
        vocabulary_parallel as vocabulary_parallel,
    )
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "": (
                "integrations parallel runtime schedule splitter stage testing training transforms vocabulary"
            ),
            "measurement": "measure",
            "runtime": (
                "P2P AgreementError Axes InProcess Microbatches OnPaper PipelineError"
                " interleaved microbatch replicated two_streams"
            ),
            "schedule": (
                "Costs Schedule ScheduleError arrange check chimera data_parallel decode deepspeed_inference"
                " deepspeed_train dualpipe dualpipev gpipe inference interleaved_1f1b interleaved_zb"
                " looped_bfs one_f_one_b plan seq1f1b seq_zb simulate spread v_half v_min with_parts"
                " with_skips zb_h1 zb_h2 zbv zbv_greedy zero_bubble"
            ),
            "splitter": "Split materialize split",
            "stage": "StageError collectives engines stage_from_module stages_from_layers",
            "stage.attention": "carried_attention",
            "stage.collectives": "context_attention",
            "stage.layout": "with_layouts",
            "stage.modules": "parallelize",
            "stage.program": "Output Received",
            "stage.transforms": "ensemble",
            "steps": "eval_shape evaluate value_and_grad",
            "training": "Precision Trainer TrainState checkpoint dynamic_scale optim static_scale",
            "transforms": "hvp jvp per_sample_grad",
            "tuning.tune": "tune",
            "vocabulary": "vocabulary_cross_entropy vocabulary_parallel",
        },
    )

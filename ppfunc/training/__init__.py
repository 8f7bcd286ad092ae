"""Train with gradients: the trainer, optimizers, the update of parameters, and checkpoints::

    trainer.py    Trainer: init, step, steps, evaluate, record, lower
      update/       what lies between gradients and new parameters
        optim/        optimizers as pairs of pure functions, run stage by stage
    checkpoint/   saves and loads states

A step, from the call to the kernel::

    Trainer.step -> the step function (runtime/step), which asks TrainingUpdate.read, and calls for each
    REDUCE_GRAD  TrainingUpdate.reduce -> Reducer.launch: sums over data ranks begin
    between      TrainingUpdate.join: loss and norm of all ranks, which give the factor of the gradients
    STEP         TrainingUpdate.step -> StageUpdate -> Optimizer.update (optim/updates.py) -> kernel
"""

from typing import TYPE_CHECKING

from ppfunc._lazy import attach

if TYPE_CHECKING:
    from . import checkpoint as checkpoint, optim as optim
    from .trainer import Metrics as Metrics, Trainer as Trainer, TrainState as TrainState
    from .update.precision import (
        LossScale as LossScale,
        Precision as Precision,
        dynamic_scale as dynamic_scale,
        static_scale as static_scale,
    )
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "": "checkpoint optim",
            "trainer": "Metrics TrainState Trainer",
            "update.precision": "LossScale Precision dynamic_scale static_scale",
        },
    )

"""Update parameters within a step of training, from gradients to new parameters::

parameter_update.py  TrainingUpdate   what REDUCE_GRAD, STEP and UNSHARD do in one call of a trainer:
  reducer.py           Reducer          gradients of microbatches into buckets, summed over data ranks
  conclusion.py        conclude         from the sums over all ranks: the norm, the factor, whether to skip
                       with_norms       metrics beside loss and norm
  update_rule.py       StageUpdate      run the optimizer on a stage
  sharding.py          shard, gather    leaves in flat buffers, cut over data ranks, and gathered

``ranks.py``, ``update_rule.py`` and ``precision.py`` say what it is made of, ``train_state.py`` what it
changes, and ``initial_state.py`` makes its first. ``comparison.py`` says what data ranks compare, and when.
``stage_trees.py`` describes the trees of a state, and refuses those of another trainer. ``states.py`` brings
the states of stages together.
"""

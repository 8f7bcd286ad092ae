"""Update parameters within a step of training, from gradients to new parameters::

parameter_update.py  TrainingUpdate   one call of a trainer: its arguments, then REDUCE_GRAD, STEP and UNSHARD
                     conclude         from the sums over all ranks: the norm, the factor, whether to skip
buckets.py           Reducer          gradients of microbatches into buckets, summed over data ranks
                     shard, gather    leaves in flat buffers, cut over data ranks, and gathered
update_rule.py       UpdateRule       how gradients become new parameters, and states of stages go on
                     StageUpdate      run the optimizer on a stage
ranks.py             TrainingRanks    how parameters are cut over the ranks that train together
precision.py         Precision        dtypes, and the scale of the loss
state.py             TrainState       its trees, how a trainer reads and recognises it, what ranks compare
                     initial_state    the state before the first step
"""

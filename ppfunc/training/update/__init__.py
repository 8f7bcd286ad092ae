"""Update parameters within a step of training, from gradients to new parameters::

reducer.py           gradients of microbatches into buckets, summed over data ranks
  buckets.py           leaves laid out in flat buffers
conclusion.py        norm and loss over all ranks: the divisor, and the flag to skip
parameter_update.py  clip and unscale, run the optimizer, gather (TrainingUpdate)
  sharding.py          leaves cut over data ranks, and gathered
ranks.py, update_rule.py, precision.py are what it is made of; train_state.py and progress.py what it changes.
"""

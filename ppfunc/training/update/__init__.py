"""Update parameters within a step of training, from gradients to new parameters::

parameter_update.py  TrainingUpdate   what REDUCE_GRAD, STEP and UNSHARD do in one call of a trainer:
  reducer.py           Reducer          gradients of microbatches into buckets, summed over data ranks
    buckets.py           plan_buckets     leaves laid out in flat buffers
  update_rule.py       updated          divide by scale and clip, run the optimizer on a stage
  sharding.py          shard, gather    leaves cut over data ranks, and gathered

``ranks.py``, ``update_rule.py`` and ``precision.py`` say what it is made of, ``train_state.py`` what it
changes, and ``initial_state.py`` makes its first. ``start.py`` and ``known_states.py`` say what data ranks
compare, and when. ``state_checks.py`` refuses states of another trainer, ``elementwise.py`` optimizers of
whole leaves over shards.
"""

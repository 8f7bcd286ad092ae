"""Choose how to train a model: the grid, cuts, schedule, microbatch, rematerialisation and shards that fit::

tune.py         tune: what is searched; its rows, ranked
  candidates.py the search: best first, each candidate only as exactly as needed
  stages.py     the model in stages, whole or over the tensor ranks that the user lays it over; their seconds
                and bytes, measured here or counted over given speeds
  rows.py       Choice: grid, microbatch, rematerialisation and shards; Row and Tuning: the ranked table, its
                text, JSON and picture; Row.make is the trainer

A candidate becomes known in steps, and the next step is that of the candidate with the least seconds so far::

    group      grid, microbatch, rematerialisation, shards: the work of a rank, which no schedule beats
    schedule   lowered: too large, it is left for want of others; else its stages are timed, and it is
               simulated with their costs, sums and messages: its seconds
    row        Trainer.lower(...).memory_analysis(): its peaks; and the bound of a plan of its placement
    plan       searched under what its ranks have left for activations, then simulated like a schedule

So rows come out ranked, what cannot be among them is never traced, and an interrupt loses nothing.
"""

"""Choose how to train a model: the grid, cuts, schedule, microbatch, rematerialisation and shards that fit::

tune.py         tune: what is searched; its rows, ranked: their text, JSON and picture
                Choice: grid, microbatch, slices, rematerialisation and shards; Row.make is the trainer
                Cuts: the model in stages, whole or over the tensor ranks that the user lays it over; their
                seconds and bytes, measured here or counted over given speeds
                Configurations: the search, each candidate only as exactly as needed

A candidate becomes known in steps::

    schedule   its stages are timed, and it is simulated with their costs, sums and messages: its seconds
    row        Trainer.lower(...).memory_analysis(): its peaks; the fastest first
    plan       searched under what its ranks have left for activations, then simulated like a schedule

So rows come out ranked, the memory of what cannot be among them is never worked out, and an interrupt loses
nothing.
"""

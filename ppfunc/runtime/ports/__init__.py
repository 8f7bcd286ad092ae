"""Say what a step asks of others: messages between stages, sums among ranks, control.

::

    protocols.py     Transport    data, control and replays, as steps ask for them
    collective.py    Collective   sums and gathers among several ranks
    _torch.py        the private names of torch, and what NCCL needs
"""

"""Define the ports of a step: messages between stages, sums among ranks, control.

::

    protocols.py     Transport    data and control, as steps ask for them
                     InProcess    all ranks in one process: a message is an entry of the buffers
                     Collective   sums and gathers among several ranks
                     Axes         the pipelines around a rank, by the axes of a mesh
    _torch.py        the private names of torch, and what NCCL needs
"""

"""Trace functions as graphs of operators, change the graphs, and write them as Python functions.

`graph` and `emit` also serve `ppfunc.splitter`, which records above autograd.
"""

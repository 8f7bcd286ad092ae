"""Traces of stages: how forward and backward become one graph, and that graph becomes programs."""

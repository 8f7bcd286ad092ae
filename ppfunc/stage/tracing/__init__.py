"""Trace stages: forward and backward become one graph, and the graph becomes programs."""

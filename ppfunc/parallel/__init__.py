"""Arithmetic on ranks and layers: topologies, placements, partitions. The standard library only."""

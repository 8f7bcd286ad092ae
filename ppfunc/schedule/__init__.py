"""Schedules: instructions, builders, lowering passes, proof, simulation, formats."""

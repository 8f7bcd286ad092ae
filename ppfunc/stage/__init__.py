"""Stages: pure functions, their signatures, and the engines that differentiate them."""

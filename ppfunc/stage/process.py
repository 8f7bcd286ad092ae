"""Serialise what changes state of torch that all threads of the process share."""

from threading import RLock

process_lock = RLock()
"""Held while a stage is traced, while a module is called with other tensors than its own, and while
generators are seeded.
"""

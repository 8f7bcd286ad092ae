"""Checkpoints that are whole or not there: saved, verified and loaded by name, on any grid of ranks."""

from .api import Saving, load, save, save_async
from .errors import CheckpointError
from .model_files import export
from .verify import latest

__all__ = ["CheckpointError", "Saving", "export", "latest", "load", "save", "save_async"]

"""Save and load checkpoints that are there as a whole or not at all, by name, on any grid of ranks.

::

    save    api -> naming: a name for each leaf -> manifest: the part that each rank holds
            -> saving: the same plan on all ranks -> tensor_file: one file a rank, digests, flushed
            -> manifest: written last -> folders: the rename that makes the checkpoint appear
    load    api -> loading -> folders: the latest first -> manifest: the next one if it is refused
            -> tensor_file: the parts that this rank needs

``peers`` carries answers between ranks: a failure on one rank raises on all. ``model_files`` writes and
reads the safetensors files of a model under its own names; ``dcp`` the folders of
``torch.distributed.checkpoint``, without running the pickles in them.
"""

from .api import Saving, load, save, save_async
from .dcp import from_dcp, to_dcp
from .errors import CheckpointError
from .folders import latest
from .model_files import export

__all__ = [
    "CheckpointError",
    "Saving",
    "export",
    "from_dcp",
    "latest",
    "load",
    "save",
    "save_async",
    "to_dcp",
]

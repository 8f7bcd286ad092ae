"""Save and load checkpoints that are there as a whole or not at all, by name, on any grid of ranks.

::

    naming    a name for each leaf, whatever the stages
    peers     what ranks tell each other: a failure on one rank raises on all
    storage   parts of tensors in safetensors files, their digests, the manifest
    saving    one plan on all ranks, files, and the rename that makes a folder appear
    loading   the latest good checkpoint, into the layouts of ranks that may be others
    foreign   folders of Hugging Face, and of torch.distributed.checkpoint without running their pickles
"""

from .foreign import export, to_dcp
from .loading import from_dcp, latest, load
from .peers import CheckpointError
from .saving import save, save_async

__all__ = [
    "CheckpointError",
    "export",
    "from_dcp",
    "latest",
    "load",
    "save",
    "save_async",
    "to_dcp",
]

"""Run pipelines within the trainers of other libraries. Nothing of these is imported before its module is.

======================================  ============================================================
``ppfunc.integrations.transformers``    ``PipelineTrainer``, a ``Trainer`` of Hugging Face
``ppfunc.integrations.torchtitan``      an object for ``pipelining_fn`` of torchtitan
======================================  ============================================================
"""

from ppfunc._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"": "torchtitan transformers"})

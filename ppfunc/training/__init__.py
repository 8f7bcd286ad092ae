"""Train with gradients: optimizers, precision, norms, reductions over ranks, sharded state; pure functions of trees of tensors."""

from .buckets import Bucket, LeafPlace, plan_buckets, views
from .gradient_transforms import chain, clip_by_global_norm, from_updates
from .materialize import materialize
from .norms import clip_coefficient, global_norm, leaf_sums, norm_of, norm_sum
from .optimizers import adamw, sgd
from .parallelize import parallelize, shard
from .precision import LossScale, Precision, cast, dynamic_scale, overflow, static_scale
from .protocols import Clip, Optimizer, Ranks, ShardOf, Transform, accepting_scale
from .rates import constant, linear, warmup_cosine

__all__ = [
    "Bucket",
    "Clip",
    "LeafPlace",
    "LossScale",
    "Optimizer",
    "Precision",
    "Ranks",
    "ShardOf",
    "Transform",
    "accepting_scale",
    "adamw",
    "cast",
    "chain",
    "clip_by_global_norm",
    "clip_coefficient",
    "constant",
    "dynamic_scale",
    "from_updates",
    "global_norm",
    "leaf_sums",
    "linear",
    "materialize",
    "norm_of",
    "norm_sum",
    "overflow",
    "parallelize",
    "plan_buckets",
    "sgd",
    "shard",
    "static_scale",
    "views",
    "warmup_cosine",
]

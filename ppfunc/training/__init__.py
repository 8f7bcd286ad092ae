"""Train with gradients: optimizers, precision, norms, reductions over ranks, sharded state; pure functions of trees of tensors."""

from .buckets import Bucket, LeafPlace, plan_buckets, views
from .norms import clip_coefficient, global_norm, leaf_sums, norm_of, norm_sum
from .optimizers import adamw, sgd
from .precision import LossScale, Precision, cast, dynamic_scale, overflow, static_scale
from .protocols import Clip, Optimizer, Transform, accepting_scale
from .rates import constant, linear, warmup_cosine
from .reducer import Reducer
from .sharding import Pending, gather, reduce_shards, shard, shard_dim, shard_dims
from .updates import chain, clip_by_global_norm, from_updates

__all__ = [
    "Bucket",
    "Clip",
    "LeafPlace",
    "LossScale",
    "Optimizer",
    "Pending",
    "Precision",
    "Reducer",
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
    "gather",
    "global_norm",
    "leaf_sums",
    "linear",
    "norm_of",
    "norm_sum",
    "overflow",
    "plan_buckets",
    "reduce_shards",
    "sgd",
    "shard",
    "shard_dim",
    "shard_dims",
    "static_scale",
    "views",
    "warmup_cosine",
]

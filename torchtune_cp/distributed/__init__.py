"""Meshes, sharding and context parallelism."""

from torchtune_cp.distributed.context_parallel import (
    ContextParallelOptions,
    context_parallel,
    unshard,
)
from torchtune_cp.distributed.parallel_dims import Meshes, ParallelDims

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {"tensor_parallel_plan": ("tensor_parallel.tensor_parallel_plan",)}

__all__ = ["ContextParallelOptions", "Meshes", "ParallelDims", "context_parallel", "unshard"]

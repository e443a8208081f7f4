"""Meshes, sharding and context parallelism."""

from torchtune_cp.distributed.context_parallel import context_parallel, unshard
from torchtune_cp.distributed.parallel_dims import Meshes, ParallelDims

__all__ = ["Meshes", "ParallelDims", "context_parallel", "unshard"]

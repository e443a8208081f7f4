"""What meshes, process groups and sharding use of torch and torch has not made public.

Each use names the versions it was checked with.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

# 2.13.0: clears what DTensor remembers of earlier operators, in Python and in C++.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

# 2.13.0: the offset of this rank's shard for any placement, FSDP2's strided one included.
from torch.distributed.tensor._utils import (  # isort: skip
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten a mesh into one dimension with its own process group (`DeviceMesh._flatten`, 2.13.0).

    Args:
        mesh: A (slice of a) device mesh.
        name: The flattened dimension's name.
    """
    return mesh if mesh.ndim == 1 and mesh.mesh_dim_names == (name,) else mesh._flatten(name)


def set_default_group_timeout(timeout: timedelta) -> None:
    """Give every process group made from now on this time-out unless it names its own.

    A device mesh makes its groups with torch's defaults and takes no time-out (2.13.0: the two names
    below are what `distributed_c10d` reads when a group is made).

    Args:
        timeout: Of a collective.
    """
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout


def forget_earlier_meshes() -> None:
    """Clear the cache whose keys are meshes, for a process that closed one process group and opened another.

    Meshes of the same ranks and names are equal, so the cache would hand out the earlier one, whose
    groups are closed.
    """
    _clear_sharding_prop_cache()

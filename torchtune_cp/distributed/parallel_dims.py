"""The degrees of parallelism and the one device mesh made of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtune_cp.config import degrees_problem
from torchtune_cp.distributed.torch_private import (
    flatten_mesh,
    forget_earlier_meshes,
)
from torchtune_cp.errors import UserError

#: Outermost first: replicas talk once a step, tensor-parallel ranks several times a layer.
MESH_DIM_NAMES = ("dp_replicate", "dp_shard", "cp", "tp")

_CONFIG_KEYS = {
    "dp_replicate": "data_parallel_replicate_dim",
    "dp_shard": "data_parallel_shard_dim",
    "cp": "context_parallel_dim",
    "tp": "tensor_parallel_dim",
}


@dataclass
class ParallelDims:
    """How many ranks work along each dimension; their product is the world size.

    Attributes:
        dp_replicate: Copies of the whole sharded model (HSDP's outer dimension).
        dp_shard: Ranks over which FSDP2 shards parameters and that read different samples;
            -1 takes whatever the world size leaves.
        cp: Ranks that share every sequence. Parameters are sharded over `dp_shard x cp`.
        tp: Ranks that share every weight matrix.
        world_size: Number of processes.

    Raises:
        UserError: A degree below 1 (or -1 elsewhere than in `dp_shard`), or a product that is not
            the world size; the message names every degree and the world size.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    world_size: int

    def __post_init__(self) -> None:
        """Infer `dp_shard` when it is -1, then check the product."""
        problems = [
            f"{_CONFIG_KEYS[name]}={getattr(self, name)}"
            for name in MESH_DIM_NAMES
            if getattr(self, name) < 1 and not (name == "dp_shard" and self.dp_shard == -1)
        ]
        if problems:
            raise UserError(
                f"{', '.join(problems)}: every degree of parallelism is at least 1"
                " (data_parallel_shard_dim may be -1: what the world size leaves)"
            )
        degrees = {_CONFIG_KEYS[name]: getattr(self, name) for name in MESH_DIM_NAMES}
        problem = degrees_problem(degrees, self.world_size)
        if problem is not None:
            raise UserError(problem)
        if self.dp_shard == -1:
            self.dp_shard = self.world_size // (self.dp_replicate * self.cp * self.tp)

    def describe(self) -> str:
        """Name every degree by its config key."""
        return " x ".join(f"{_CONFIG_KEYS[n]}={getattr(self, n)}" for n in MESH_DIM_NAMES)

    @property
    def dp(self) -> int:
        """Groups of ranks that read different samples: `dp_replicate x dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def min_seq_len_divisor(self) -> int:
        """What a sequence is padded to a multiple of.

        Head-tail balance gives each of the `cp` ranks two chunks, and sequence-parallel norms cut
        what a rank holds over the `tp` ranks once more.
        """
        return (2 * self.cp if self.cp > 1 else 1) * self.tp

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Build the device mesh `(dp_replicate, dp_shard, cp, tp)`; all four dimensions are always there.

        Args:
            device_type: `"cpu"` or `"cuda"`.

        Returns:
            The four-dimensional mesh over all ranks; `Meshes` names its parts by use.
        """
        shape = tuple(getattr(self, name) for name in MESH_DIM_NAMES)
        return init_device_mesh(device_type, shape, mesh_dim_names=MESH_DIM_NAMES)


@dataclass(frozen=True)
class Meshes:
    """The device mesh and its parts, named by what they are used for.

    Attributes:
        world: All four dimensions.
        dp: Ranks reading different samples, flattened: data loading.
        cp: Ranks sharing a sequence.
        loss: Everybody whose token losses add up, flattened: `dp_replicate x dp_shard x cp`.
        fsdp: What `fully_shard` takes: `dp_shard x cp` flattened, or with replicas the
            two-dimensional `(dp_replicate, dp_shard x cp)`.
        tp: Ranks sharing a weight matrix.
    """

    world: DeviceMesh
    dp: DeviceMesh
    cp: DeviceMesh
    loss: DeviceMesh
    fsdp: DeviceMesh
    tp: DeviceMesh

    @classmethod
    def build(cls, dims: ParallelDims, device_type: str, *, shard: bool = True) -> Meshes:
        """Build the mesh of `dims` and every sub-mesh; all ranks must call it.

        Args:
            dims: The degrees.
            device_type: `"cpu"` or `"cuda"`.
            shard: False keeps all weights whole on every rank (what `DistributedDataParallel` does):
                `fsdp` then has groups of one to shard over, and gradients are all-reduced over
                `dp x cp`.
        """
        forget_earlier_meshes()
        world = dims.build_mesh(device_type)
        dp = flatten_mesh(world["dp_replicate", "dp_shard"], "dp")
        loss = flatten_mesh(world["dp_replicate", "dp_shard", "cp"], "loss")
        if dims.dp_replicate > 1 or not shard:
            # FSDP2 reads a two-dimensional mesh as (replicate, shard). Slicing a flattened dimension
            # out of the root mesh is deprecated, so this view has its own mesh over the same ranks.
            sharing = dims.dp_shard * dims.cp if shard else 1
            copies = dims.dp * dims.cp // sharing
            weights = init_device_mesh(
                device_type,
                (copies, sharing, dims.tp),
                mesh_dim_names=("dp_replicate", "fsdp", "tp"),
            )
            # A parameter lies on both: FSDP puts them together to one mesh, so they share a root.
            fsdp, tp = weights["dp_replicate", "fsdp"], weights["tp"]
        else:
            fsdp, tp = flatten_mesh(world["dp_shard", "cp"], "fsdp"), world["tp"]
        return cls(world=world, dp=dp, cp=world["cp"], loss=loss, fsdp=fsdp, tp=tp)

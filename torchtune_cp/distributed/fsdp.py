"""Shards a model over the mesh with FSDP2, and fills the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from torchtune_cp.config import module_problems
from torchtune_cp.distributed.torch_private import (
    compute_local_shape_and_global_offset,
)
from torchtune_cp.errors import UserError

if TYPE_CHECKING:
    from torchtune_cp.models import LanguageModel


class ReadsSlices(Protocol):
    """Where weights come from: hands out any slice of a parameter by name."""

    def read(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slice of parameter `name` that starts at `offsets`, on the CPU."""
        ...


def precision_policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Say in which precision a model computes; its shards, and the optimizer, stay in float32.

    Args:
        dtype: `torch.float32`, or `torch.bfloat16`: parameters are gathered and used in bfloat16,
            gradients are reduced in float32.
    """
    if dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def shard_model(
    model: LanguageModel,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    custom_sharded_layers: list[str] | None = None,
    offload: bool = False,
) -> None:
    """Shard parameters over `mesh`, in place: one group per layer, embedding and head apart.

    Args:
        model: A language model with `tok_embeddings`, `layers`, `norm` and `output`; may be on the
            meta device.
        mesh: `dp_shard x cp` flattened, or `(dp_replicate, dp_shard x cp)`. Context-parallel ranks
            hold different slices of a sequence and thus add up gradients like data-parallel ones.
        dtype: See `precision_policy`.
        reshard_after_forward: Free a layer's gathered parameters after its forward pass and gather
            them again in backward.
        custom_sharded_layers: Names of further modules that get a group of their own.
        offload: Keep the shards and their gradients in host memory: a layer's shards are copied to the
            device to be gathered, its reduced gradients copied back, and the optimizer steps on the
            CPU. The model must then be materialized on the CPU.

    Raises:
        UserError: `custom_sharded_layers` names a module that the model does not have.
    """
    policy = precision_policy(dtype)
    # Pinned memory, for copies that run beside the computation, is of use (and there) on a GPU only.
    placement = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def shard(modules: nn.Module | list[nn.Module], reshard: bool) -> None:
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            offload_policy=placement if offload else OffloadPolicy(),
        )

    named = dict(model.named_modules())
    for problem in module_problems(custom_sharded_layers or [], named):
        raise UserError(problem)
    have_a_group = [*model.layers, model.tok_embeddings, model.norm, model.output]
    # What lies deepest comes first: a group takes the parameters that no group below it has taken.
    for name in sorted(custom_sharded_layers or [], key=lambda name: -name.count(".")):
        module = named[name]
        if not any(module is other for other in have_a_group) and list(module.parameters()):
            shard(module, reshard_after_forward)
    for layer in model.layers:
        shard(layer, reshard_after_forward)
    if not model.config.tie_word_embeddings:
        shard(model.tok_embeddings, reshard_after_forward)
        # The head's backward follows its forward at once: freeing it in between would gain nothing.
        shard([model.norm, model.output], False)
    # Tied weights stay in the root group, which is gathered from the embedding to the loss.
    shard(model, False)


def materialize(model: nn.Module, source: ReadsSlices, device: torch.device) -> None:
    """Allocate a meta-device model and read into each rank's shards what belongs there.

    Args:
        model: A model without buffers, sharded or not.
        source: The weights; asked for this rank's slices only.
        device: Where the shards live: the CPU for a model that was sharded with `offload`.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                shape, offsets = compute_local_shape_and_global_offset(
                    param.shape, param.device_mesh, param.placements
                )
                local = param.to_local()
            else:
                shape, offsets, local = tuple(param.shape), (0,) * param.ndim, param
            if local.numel():
                local.copy_(source.read(name, tuple(offsets), tuple(shape)))


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Say whether the next backward pass adds gradients up over the ranks (FSDP2 modules only).

    Args:
        model: From `shard_model`.
        on: False for all micro-batches of a step but the last: their gradients then stay, unsharded,
            on the rank that made them.
    """
    assert isinstance(model, FSDPModule), "set_gradient_sync needs a sharded model"
    model.set_requires_gradient_sync(on)

"""All private torch functions that the planner uses.

Training does not need any of it: what training needs is in
`torchtune_cp.distributed.context_parallel.torch_private`. Each use names the versions it was
checked with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

# 2.13.0, in this order: tensors with shapes but no memory; the two classes whose methods are wrapped
# below; what sees every operator below autograd, and what switches all of that off for a while.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave all active modes for a while (2.13.0)."""
    disabled: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return disabled


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Generator[None, None, None]:
    """Join a process group of any size without other processes (2.13.0).

    Collectives return at once and leave their outputs as they are.

    Args:
        rank: Which of the ranks this process plays.
        world_size: Ranks of the group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def unseen_sharding_propagation() -> Generator[None, None, None]:
    """Keep the shape computations of DTensor's dispatcher out of all active modes (2.13.0).

    To learn the global shape of a result, DTensor runs the operator on tensors of the global shape, in
    the fake mode that is active. A mode that counts memory or arithmetic would take those for real.
    """
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: Any, op_schema: Any) -> Any:
        with _disable_current_modes():
            return original(self, op_schema)

    with _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
        yield


@contextlib.contextmanager
def uncached(mode: FakeTensorMode) -> Generator[None, None, None]:
    """Disable a fake mode's cache for the operators inside (2.13.0)."""
    with _replaced(mode, "cache_enabled", False):
        yield


@contextlib.contextmanager
def real_meshes() -> Generator[None, None, None]:
    """Keep the tensors of ranks inside device meshes real in any active mode (2.13.0)."""
    initialise, mesh = DeviceMesh.__init__, DeviceMesh.mesh
    assert isinstance(mesh, property)
    get_mesh: Any = mesh.fget

    def real_init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            initialise(self, *args, **kwargs)

    def real_mesh(self: Any) -> torch.Tensor:
        with _disable_current_modes():
            ranks: torch.Tensor = get_mesh(self)
            return ranks

    with (
        _replaced(DeviceMesh, "__init__", real_init),
        _replaced(DeviceMesh, "mesh", property(real_mesh)),
    ):
        yield


@contextlib.contextmanager
def watching_fsdp(
    around: Callable[[str], contextlib.AbstractContextManager[None]],
    see_gradient: Callable[[torch.Tensor], None],
) -> Generator[None, None, None]:
    """Say when FSDP gathers parameters or reduces gradients (`FSDPParamGroup`, 2.13.0).

    Args:
        around: Called with `"gather"` or `"reduce"`; the context encloses what FSDP does.
        see_gradient: Called with each gradient of a gathered parameter before it is reduced.
    """

    def wrapped(name: str, kind: str) -> contextlib.AbstractContextManager[None]:
        original = getattr(FSDPParamGroup, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kind == "reduce":
                for fsdp_param in self.fsdp_params:
                    parameter = getattr(fsdp_param, "_unsharded_param", None)
                    for gradient in (
                        None if parameter is None else parameter.grad,
                        fsdp_param.unsharded_accumulated_grad,
                    ):
                        if gradient is not None:
                            see_gradient(gradient)
            with around(kind):
                return original(self, *args, **kwargs)

        return _replaced(FSDPParamGroup, name, method)

    with (
        wrapped("unshard", "gather"),
        wrapped("wait_for_unshard", "gather"),
        wrapped("post_backward", "reduce"),
    ):
        yield


@contextlib.contextmanager
def offloading_copies(
    on_host: Callable[[bool], contextlib.AbstractContextManager[None]],
) -> Generator[None, None, None]:
    """Let FSDP's offloading copy, although host and device are the same memory (`FSDPParam`, 2.13.0).

    It moves shards and gradients by `.to(device)`, which on a CPU does nothing. Here shards are copied
    to be gathered, and reduced gradients are copied away, as from and to a GPU.

    Args:
        on_host: Encloses the allocation of a gradient; receives whether torch uses pinned memory for it.
    """
    inputs, to_sharded, reduce = (
        FSDPParam.all_gather_inputs,
        FSDPParam.to_sharded_dtensor,
        FSDPParamGroup.post_backward,
    )
    assert isinstance(inputs, property)
    get_inputs: Any = inputs.fget
    reducing = False

    def all_gather_inputs(self: Any) -> Any:
        own_way = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        if not self.offload_to_cpu or own_way or self.sharded_state != ShardedState.SHARDED:
            return get_inputs(self)
        shard = self._sharded_param_data
        self._sharded_param_data = shard.clone()
        try:
            return get_inputs(self)
        finally:
            self._sharded_param_data = shard

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> Any:
        if reducing and self.offload_to_cpu:
            # With a hook that reads the gradient immediately, torch waits for a copy to ordinary memory.
            hooked = bool(getattr(self.sharded_param, "_post_accumulate_grad_hooks", None))
            with torch.no_grad():
                with on_host(not hooked):
                    host = torch.empty_like(tensor)
                tensor = host.copy_(tensor)
        return to_sharded(self, tensor)

    def post_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal reducing
        reducing = True
        try:
            return reduce(self, *args, **kwargs)
        finally:
            reducing = False

    with (
        _replaced(FSDPParam, "all_gather_inputs", property(all_gather_inputs)),
        _replaced(FSDPParam, "to_sharded_dtensor", to_sharded_dtensor),
        _replaced(FSDPParamGroup, "post_backward", post_backward),
    ):
        yield


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will get (2.13.0)."""
    return int(torch._C._autograd._get_sequence_nr())


def backward_node() -> tuple[str, int] | None:
    """Name and sequence number of the autograd node that is being evaluated, None outside (2.13.0)."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know by this name (2.13.0)."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]

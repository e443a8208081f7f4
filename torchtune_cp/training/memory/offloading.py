"""Moves the tensors saved for backward to host memory, and back one layer ahead of their use.

torch's `save_on_cpu` cannot be used: under context parallelism attention saves DTensors, which it
mixes up with tensors, and it copies gathered parameters, a quarter of all saved bytes, for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchtune_cp.training.memory import host as host_memory
from torchtune_cp.training.memory.host import HostBytes

if TYPE_CHECKING:
    from torchtune_cp.models import LanguageModel

#: Smaller tensors stay on the device: starting a copy costs more than they take.
MIN_BYTES = 1024


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; only called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has_storage(local: Tensor) -> bool:
    """Whether a tensor is a plain one; other kinds have no storage of their own to copy."""
    return host_memory.is_plain(local)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class _HostCopy:
    """The bytes of one storage in host memory, and for a while on the device again.

    Whole storages move, not tensors: what several saved tensors share (the input of the q, k and v
    projections, views with their strides) is moved once and comes back shared, as it was.

    Attributes:
        host: The bytes; pinned when the device is not the CPU itself.
        device: They on the device again, from the fetch until the last use.
        uses: How many saved tensors have not been handed to backward yet.
    """

    def __init__(self, host: HostBytes) -> None:
        self.host = host
        self.device: Tensor | None = None
        self.uses = 0


@dataclass(eq=False)
class _LayerPass:
    """What one layer's forward pass left for its backward pass.

    Attributes:
        previous: The layer before it in the same forward pass, whose backward comes next.
        moves: Whether anything of this layer moves.
        stays: Storages that exist anyway, so that moving them would free nothing.
        copies: What moved, by storage and version; only saved tensors keep a copy alive.
        copied: When the last copy to the host is done.
        fetched: When the last copy back is done; None before the fetch.
        in_use: Device tensors that the copying stream may still be reading or writing: their memory
            must not be given to others.
    """

    previous: _LayerPass | None
    moves: bool
    stays: set[StorageWeakRef]
    copied: Any
    copies: dict[tuple[StorageWeakRef, int], weakref.ref[_HostCopy]] = field(default_factory=dict)
    fetched: Any = None
    in_use: list[Tensor] = field(default_factory=list)

    def alive(self) -> list[_HostCopy]:
        """The copies that backward still needs."""
        return [copy for ref in self.copies.values() if (copy := ref()) is not None]


@dataclass(eq=False)
class _Saved:
    """What autograd holds in place of a tensor.

    Attributes:
        layer: Where it was saved.
        tensor: The tensor itself where it stays on the device.
        copy: Else the storage's bytes, and the tensor's layout in them.
        spec: For a DTensor: mesh, placements, global shape and stride.
    """

    layer: _LayerPass
    tensor: Tensor | None = None
    copy: _HostCopy | None = None
    dtype: torch.dtype | None = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    spec: tuple[Any, ...] | None = None


class ActivationOffload:
    """Saved-tensor hooks around layers that keep what backward needs in host memory.

    Copies run on a separate stream, so that they overlap with computation: those of a layer's
    activations with the next layer's forward pass (whose end waits for them, and only then is the
    device memory given back), those back to the device with the backward pass of the layer behind.
    Tensors that exist anyway stay: parameters, their views, and what several layers share. So does
    all of the last layer, whose backward comes immediately.

    On the CPU the same code runs with the streams and events of `torch.cpu`, which do nothing, and
    copies into separate tensors.

    Attributes:
        moved_bytes: All bytes that were copied to the host so far.
        fetched_bytes: All bytes that were copied back.
        host_bytes: Bytes that are on the host now.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        """Prepare; nothing moves before a layer runs inside `layer`.

        Args:
            device: Where the model computes.
            min_bytes: Storages smaller than this stay on the device.
        """
        self.moved_bytes = 0
        self.fetched_bytes = 0
        self.host_bytes = 0
        self._device = device
        self._min_bytes = min_bytes
        self._backend = torch.get_device_module(device)
        self._copy_stream = self._backend.Stream()
        self._last: _LayerPass | None = None

    @contextmanager
    def layer(
        self, parameters: Iterable[Tensor], shared: Any, *, first: bool, last: bool
    ) -> Generator[None, None, None]:
        """Enclose the forward pass of one layer.

        Args:
            parameters: The layer's parameters as they are now, gathered.
            shared: Arguments of the layer that other layers get as well (in tuples, lists or dicts).
            first: Whether a forward pass begins with this layer.
            last: Whether it ends with it: then nothing moves.
        """
        with torch.no_grad():
            locals_ = [_local(tensor) for tensor in (*parameters, *_tensors(shared))]
            stays = {StorageWeakRef(t.untyped_storage()) for t in locals_ if _has_storage(t)}
        this = _LayerPass(
            previous=None if first else self._last,
            moves=not last,
            stays=stays,
            copied=self._backend.Event(),
        )
        self._last = None if last else this
        with saved_tensors_hooks(lambda tensor: self._pack(this, tensor), self._unpack):
            yield
        this.copied.record(self._copy_stream)
        if this.previous is not None:
            # Only now may the memory of the previous layer's activations be used for others.
            self._backend.current_stream().wait_event(this.previous.copied)
            this.previous.in_use.clear()

    @torch.no_grad()
    def _pack(self, layer: _LayerPass, tensor: Tensor) -> _Saved:
        local = _local(tensor)
        if not (layer.moves and _has_storage(local) and local.device.type == self._device.type):
            # detach(), because a saved output that refers to itself would never be freed.
            return _Saved(layer, tensor=tensor.detach())
        storage = local.untyped_storage()
        key = StorageWeakRef(storage)
        if storage.nbytes() < self._min_bytes or key in layer.stays:
            return _Saved(layer, tensor=tensor.detach())
        # The version, because a storage that was written to in between is another content.
        reference = layer.copies.get((key, local._version))
        copy = None if reference is None else reference()
        if copy is None:
            copy = self._to_host(layer, storage)
            layer.copies[key, local._version] = weakref.ref(copy)
        copy.uses += 1
        spec = None
        if isinstance(tensor, DTensor):
            spec = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return _Saved(
            layer,
            copy=copy,
            dtype=local.dtype,
            size=tuple(local.shape),
            stride=local.stride(),
            offset=int(local.storage_offset()),
            spec=spec,
        )

    def _to_host(self, layer: _LayerPass, storage: torch.UntypedStorage) -> _HostCopy:
        source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        host = HostBytes(source.numel(), self._device)
        self._copy_stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._copy_stream):
            host.fill(source)
        layer.in_use.append(source)
        copy = _HostCopy(host)
        self.moved_bytes += host.num_bytes
        self.host_bytes += host.num_bytes
        weakref.finalize(copy, self._freed, host.num_bytes)
        return copy

    def _freed(self, count: int) -> None:
        self.host_bytes -= count

    def _fetch(self, layer: _LayerPass, copies: list[_HostCopy]) -> None:
        """Start to bring copies back to the device."""
        stream = self._backend.current_stream()
        # Allocated on the computing stream, for it uses and frees them; what it still does with that
        # memory from an earlier use comes first.
        for copy in copies:
            copy.device = torch.empty(copy.host.num_bytes, dtype=torch.uint8, device=self._device)
            layer.in_use.append(copy.device)
        self._copy_stream.wait_stream(stream)
        with self._backend.stream(self._copy_stream):
            for copy in copies:
                assert copy.device is not None
                copy.host.copy_to(copy.device)
                self.fetched_bytes += copy.host.num_bytes
        layer.fetched = self._backend.Event()
        layer.fetched.record(self._copy_stream)

    @torch.no_grad()
    def _unpack(self, saved: _Saved) -> Tensor:
        layer = saved.layer
        if layer.fetched is None:
            self._fetch(layer, layer.alive())
        if layer.previous is not None and layer.previous.fetched is None:
            self._fetch(layer.previous, layer.previous.alive())
        if saved.copy is None:
            assert saved.tensor is not None
            return saved.tensor
        copy = saved.copy
        if copy.device is None:  # backward runs a second time over this graph
            self._fetch(layer, [copy])
        assert copy.device is not None
        assert saved.dtype is not None
        self._backend.current_stream().wait_event(layer.fetched)
        layer.in_use.clear()
        flat = copy.device
        usable = flat.numel() // saved.dtype.itemsize * saved.dtype.itemsize
        local = flat[:usable].view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        copy.uses -= 1
        if copy.uses <= 0:
            copy.device = None  # from here on backward alone keeps it alive
        if saved.spec is None:
            return local
        mesh, placements, shape, stride = saved.spec
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _offloaded(
    forward: Callable[..., Any], layer: nn.Module, offload: ActivationOffload, **place: bool
) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(x, *args, **kwargs)
        with offload.layer(layer.parameters(), (args, kwargs), **place):
            return forward(x, *args, **kwargs)

    return run


def apply_activation_offloading(
    model: LanguageModel, device: torch.device, min_bytes: int = MIN_BYTES
) -> ActivationOffload:
    """Keep what the layers save for backward in host memory between forward and backward.

    With activation checkpointing (applied before) those are the inputs of the layers; without it, all
    activations. Wraps each layer's `forward`: call it after checkpointing and compilation, before
    sharding.

    Args:
        model: A model with `layers`, each called with its input first.
        device: Where the model computes; the CPU will do.
        min_bytes: Storages smaller than this stay on the device.

    Returns:
        The object behind the hooks; it counts the bytes that move.
    """
    offload = ActivationOffload(device, min_bytes)
    count = len(model.layers)
    for index, layer in enumerate(model.layers):
        layer.forward = _offloaded(
            layer.forward, layer, offload, first=index == 0, last=index == count - 1
        )
    return offload

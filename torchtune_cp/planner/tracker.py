"""Records a step operator by operator: live bytes, their device, operations, and communication."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_cp.planner import arithmetic, communication, methods
from torchtune_cp.planner.arithmetic import BACKWARD_PER_PAIR, FORWARD_PER_PAIR
from torchtune_cp.planner.torch_private import (
    TorchDispatchMode,
    backward_node,
    next_sequence_number,
)
from torchtune_cp.planner.trace import CATEGORIES, Location, Trace, Transfer, rounded_when_pinned

_INDEX = {name: i for i, name in enumerate(CATEGORIES)}
aten = torch.ops.aten
_SCALAR = aten._local_scalar_dense.default
_SET_STORAGE = aten.set_.source_Storage
#: What reads and writes nothing although its result is no view to the dispatcher.
_TOUCH_NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten._unsafe_view,
}
#: Operators that use only the shape of their arguments.
_FILL = {aten.new_full, aten.new_zeros, aten.new_ones, aten.zeros_like, aten.full_like}
#: What copies between two memories; within one it moves bytes as any other operator does.
_COPIES = (aten.copy_.default, aten.clone.default)

#: Extra bytes that an operator takes from the allocator while it runs, beyond its result.
Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]


def _layer_and_path(name: str) -> tuple[int, str]:
    head, _, rest = name.partition(".")
    index, _, path = rest.partition(".")
    return (int(index), path) if head == "layers" and index.isdigit() else (-1, name)


class _Storage:
    """One storage: its size, where it was allocated and, later, where it was freed."""

    __slots__ = ("born", "category", "dead", "made_in", "on_host", "pinned", "ref", "size")

    def __init__(self, size: int, born: int, location: Location, category: str | None):
        self.size = size
        self.born = born
        self.dead = -1
        self.made_in = location
        self.category = category
        self.on_host = False
        self.pinned = False
        self.ref: Any = None


class StepTracker(TorchDispatchMode):
    """Records every operator of a step on local tensors.

    Put it inside the fake mode; enter it before the model is built, so that it knows every storage, and
    call `start` before the step.

    Where an operator belongs is found by hooks on modules in forward, and in backward by the number of
    the autograd node, which records during which module's forward the node was made.

    What bytes are is decided when the step is over: what forward made and backward still had is an
    activation, what died before is working space.

    Args:
        mesh_of: Name of the mesh dimension of a process group, given also the activity.
        workspace: See `Workspace`.
        uncached: Encloses operators that take a storage itself, which the fake mode's cache would keep.
        separate_host: Whether host memory is another memory than the device's.
    """

    def __init__(
        self,
        mesh_of: Callable[[torch.distributed.ProcessGroup, str], str],
        workspace: Workspace = lambda *_: 0,
        *,
        uncached: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        separate_host: bool = False,
    ) -> None:
        super().__init__()
        self._mesh_of = mesh_of
        self._workspace = workspace
        self._uncached = uncached
        self._separate_host = separate_host
        self._storages: dict[int, _Storage] = {}
        self._all: list[_Storage] = []
        self._recording = False
        self._op = 0
        self._ops_location: list[int] = []
        self._extra: dict[int, int] = {}
        self._events: list[tuple[int, _Storage, int]] = []
        self._location_ids: dict[Location, int] = {}
        # Where we are.
        self.phase = "count"
        self._modules: list[tuple[int, str]] = []
        self._activities: list[str] = []
        self._layer = -1
        self._activity_made_in = ""
        self._boundaries: list[int] = [0]
        self._made_in: list[tuple[int, str, str]] = [(-1, "", "")]
        self._host: list[bool] = []  # whether pinned, of each enclosing on_host
        self._inside = 0
        self._times = 1
        # Sums.
        self._transfers: dict[Transfer, list[float]] = {}
        self._flops: dict[tuple[str, bool], float] = {}
        self._moved = 0.0
        self._host_moved = 0.0
        self._copied = 0.0

    # --- where ------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Follow which module's forward runs."""
        for name, module in model.named_modules():
            if not name:
                continue
            where = _layer_and_path(name)
            module.register_forward_pre_hook(lambda *_, where=where: self._enter_module(where))
            module.register_forward_hook(lambda *_: self._leave_module(), always_call=True)

    def _enter_module(self, where: tuple[int, str]) -> None:
        self._modules.append(where)
        if self.phase in ("count", "norm") and backward_node() is None:
            self.phase = "forward"
        self._mark()

    def _leave_module(self) -> None:
        self._modules.pop()
        self._mark()

    def _mark(self) -> None:
        layer, path = self._modules[-1] if self._modules else (-1, "")
        activity = self._activities[-1] if self._activities else ""
        self._boundaries.append(next_sequence_number())
        self._made_in.append((layer, path, activity))

    @contextlib.contextmanager
    def doing(self, activity: str) -> Generator[None, None, None]:
        """Enclose an activity; see `Location`.

        Args:
            activity: Its name.
        """
        self._activities.append(activity)
        self._mark()
        try:
            yield
        finally:
            self._activities.pop()
            self._mark()

    @contextlib.contextmanager
    def on_host(self, *, pinned: bool) -> Generator[None, None, None]:
        """Enclose work in host memory.

        Args:
            pinned: Whether what is allocated is pinned.
        """
        self._host.append(pinned)
        try:
            yield
        finally:
            self._host.pop()

    @contextlib.contextmanager
    def repeated(self, times: int) -> Generator[None, None, None]:
        """Enclose what a step repeats identically, and what is run here once.

        What is computed, moved and sent counts so often. Bytes are there once: nothing of one time may
        live on during the next.

        Args:
            times: How often.
        """
        self._times *= times
        try:
            yield
        finally:
            self._times //= times

    def _location(self) -> Location:
        activity = self._activities[-1] if self._activities else ""
        node = backward_node()
        if node is None:
            layer, path = self._modules[-1] if self._modules else (-1, "")
            if activity == "gather":
                return Location("forward", *self._near(layer, path), activity)
            if activity == "reduce":  # the last ones, when autograd is done
                return Location("backward", -1, "", activity)
            if self.phase == "forward":
                layer, path = self._near(layer, path)
            return Location(self.phase, layer, path, activity)
        self.phase = "norm"  # what comes when no node is left
        if activity in ("gather", "reduce"):
            return Location("backward", *self._near(-1, ""), activity)
        if self._modules:
            return Location("backward", *self._near(*self._modules[-1]), activity, True)
        name, number = node
        if not name.endswith("AccumulateGrad"):
            at = bisect_right(self._boundaries, number) - 1
            layer, path, self._activity_made_in = self._made_in[at]
            return Location(
                "backward", *self._near(layer, path), activity or self._activity_made_in
            )
        return Location("backward", *self._near(-1, ""), activity or self._activity_made_in)

    def _near(self, layer: int, path: str) -> tuple[int, str]:
        """What runs between modules (FSDP's hooks, checkpointing) belongs to the layer before."""
        if layer == -1 and not path:
            return self._layer, ""
        self._layer = layer
        return layer, path

    # --- what -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor's dispatcher then runs the operator on local tensors
        kwargs = kwargs or {}
        if func is _SCALAR:
            # Nobody knows the values of fake tensors. Counts and norms are 1, masks are true.
            return _some_value(args[0].dtype)
        if func.namespace in ("profiler", "prim"):  # "prim": a fake tensor is asked for its device
            return func(*args, **kwargs)
        if func.namespace == methods.NAMESPACE:
            return self._look_inside(func._overloadpacket.__name__, args, kwargs)
        if func is _SET_STORAGE:
            with self._uncached():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        location = self._location() if self._recording else _BEFORE
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._see(tensor.untyped_storage(), location)
        if self._recording:
            self._record(func, args, kwargs, out, location)
            self._op += 1
        return out

    def _look_inside(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what an operator of this project consists of; its arithmetic is that of the mask."""
        # Of each operator: what a pair costs, and where its query and its mask stand in the arguments.
        counted = {
            "attention": (FORWARD_PER_PAIR, 0, 3),
            "attention_backward": (BACKWARD_PER_PAIR, 1, 7),
        }
        self._inside += 1
        try:
            with self, self.doing("attention"):
                if self._recording and name in counted:
                    per_pair, query, mask = counted[name]
                    _, heads, _, width = args[query].shape
                    # Attention forward in backward is recomputation, even outside of any module.
                    recomputed = name == "attention" and backward_node() is not None
                    key = name, self._location().again or recomputed
                    pairs = methods.pairs_of_this_rank(*args[mask : mask + 3])
                    number = per_pair * heads * width * pairs
                    self._flops[key] = self._flops.get(key, 0.0) + float(number * self._times)
                return methods.BODIES[name](*args, **kwargs)
        finally:
            self._inside -= 1

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, location: Location
    ) -> None:
        self._ops_location.append(self._location_ids.setdefault(location, len(self._location_ids)))
        if func.namespace in communication.NAMESPACES:
            sent = communication.sent(func, args)
            if sent is not None and sent.group.size() > 1:
                key = Transfer(
                    sent.kind, self._mesh_of(sent.group, location.activity), location.phase
                )
                total = self._transfers.setdefault(key, [0.0, 0.0])
                total[0] += sent.bytes * self._times
                total[1] += self._times
            return
        extra = self._workspace(func, args, kwargs)
        if extra:
            self._extra[self._op] = extra
        counted = arithmetic.flops(func, args, kwargs, out)
        if counted is not None:
            kind, number = counted
            if not self._inside:
                which = kind, location.again
                self._flops[which] = self._flops.get(which, 0.0) + number * self._times
        elif func in _COPIES and (bytes_copied := self._crossing(func, args, out)):
            self._copied += bytes_copied * self._times
        elif not func.is_view and func._overloadpacket not in _TOUCH_NOTHING:
            read = 0 if func._overloadpacket in _FILL else _touched(args)
            touched = (read + _touched(out)) * self._times
            if self._host or (location.phase in ("norm", "update") and self._all_on_host(args)):
                self._host_moved += touched
            else:
                self._moved += touched

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        known = self._storages.get(id(tensor.untyped_storage()))
        return known is not None and known.on_host

    def _all_on_host(self, values: Any) -> bool:
        if not self._separate_host:
            return False
        tensors = [tensor for tensor in _flat(values) if tensor.numel() > 1]
        return bool(tensors) and all(map(self._is_on_host, tensors))

    def _crossing(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Bytes that a copy moves from one memory into the other."""
        if not self._separate_host:
            return 0
        target, source = (args[0], args[1]) if func is aten.copy_.default else (out, args[0])
        crosses = self._is_on_host(target) != self._is_on_host(source)
        return _touched(target) if crosses else 0

    def _see(self, storage: torch.UntypedStorage, location: Location) -> None:
        key = id(storage)
        known = self._storages.get(key)
        if known is not None:
            self._resized(known, storage.nbytes())
            return
        category = None
        if location.activity == "gather":
            category = "gathered"
        elif location.activity == "reduce":
            category = "gradients"
        elif location.phase in ("norm", "update", "finish"):
            category = "optimizer"
        known = _Storage(storage.nbytes(), self._op, location, category)
        known.on_host, known.pinned = bool(self._host), bool(self._host and self._host[-1])
        self._storages[key] = known
        self._all.append(known)
        known.ref = weakref.ref(storage, partial(self._freed, key))
        self._happened(known, known.size)

    def _happened(self, storage: _Storage, delta: int) -> None:
        if self._recording and delta:
            self._events.append((self._op, storage, delta))

    def _resized(self, storage: _Storage, size: int) -> None:
        if size != storage.size:
            delta, storage.size = size - storage.size, size
            self._happened(storage, delta)

    def _freed(self, key: int, _: Any) -> None:
        storage = self._storages.pop(key)
        storage.dead = self._op
        self._happened(storage, -storage.size)

    @contextlib.contextmanager
    def seeing_resizes(self) -> Generator[None, None, None]:
        """Notice storages that are resized without an operator, as FSDP does with gathered parameters."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            known = self._storages.get(id(storage))
            if known is not None:
                self._resized(known, storage.nbytes())
            return result

        storage_type: Any = torch.UntypedStorage
        storage_type.resize_ = resize_
        try:
            yield
        finally:
            storage_type.resize_ = original

    def name(
        self, tensor: torch.Tensor, category: str, *, on_host: bool = False, pinned: bool = False
    ) -> None:
        """Say what a tensor's storage is.

        Args:
            tensor: Of a DTensor, the local part counts.
            category: One of `CATEGORIES`.
            on_host: Whether it is on the host.
            pinned: Whether its memory there is pinned.
        """
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        known = self._storages.get(id(local.untyped_storage()))
        if known is not None:
            known.category = category
            known.on_host = known.on_host or on_host
            known.pinned = known.pinned or pinned

    # --- when -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record: what lives now is there when the step begins."""
        self._recording = True
        self._op = 0
        self._all = list(self._storages.values())
        for storage in self._all:
            storage.category = storage.category or "batch"
            self._events.append((0, storage, storage.size))
        self._ops_location.append(self._location_ids.setdefault(_BEFORE, 0))
        self._op = 1

    def stop(self, *, shards_on_host: bool = False) -> Trace:
        """End the step.

        Args:
            shards_on_host: Whether the optimizer steps on the host.
        """
        self._recording = False
        self._ops_location.append(self._ops_location[-1])  # for what died last
        ops = self._op + 1
        locations = list(self._location_ids)
        device = np.zeros((ops, len(CATEGORIES)), dtype=np.int64)
        host = np.zeros(ops, dtype=np.int64)
        pageable = np.zeros(ops, dtype=np.int64)
        pinned: dict[int, np.ndarray] = {}
        phase_of = [locations[i].phase for i in self._ops_location]
        for op, storage, delta in self._events:
            category = storage.category or _category(storage, phase_of)
            on_host = storage.on_host or (shards_on_host and category == "optimizer")
            if not (on_host and self._separate_host):
                device[op, _INDEX[category]] += delta
                continue
            host[op] += delta
            if storage.pinned:
                size = rounded_when_pinned(abs(delta))
                pinned.setdefault(size, np.zeros(ops, dtype=np.int64))[op] += np.sign(delta)
            else:
                pageable[op] += delta
        device = device.cumsum(axis=0)
        for op, extra in self._extra.items():
            device[op, _INDEX["attention"]] += extra
        return Trace(
            locations=locations,
            location=np.array(self._ops_location),
            device=device,
            host=host.cumsum(),
            transfers={k: (v[0], v[1]) for k, v in self._transfers.items()},
            flops=dict(self._flops),
            moved=self._moved,
            host_moved=self._host_moved,
            copied=self._copied,
            pageable=int(pageable.cumsum().max()),
            pinned={size: float(counts.cumsum().max()) for size, counts in pinned.items()},
        )


_BEFORE = Location("count", -1, "", "")


def _category(storage: _Storage, phase_of: list[str]) -> str:
    location = storage.made_in
    if location.activity == "loss":
        return "loss"
    died_in = phase_of[storage.dead] if storage.dead >= 0 else "finish"
    if location.phase == "forward" and died_in != "forward":
        return "activations"
    if location.phase == "count":
        return "batch"
    return "attention" if location.activity == "attention" else "working"


def _some_value(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _flat(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _flat(value)


def _touched(values: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in _flat(values))

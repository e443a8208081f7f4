"""The optimizer on the host: its state is there, and it steps there while backward runs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune_cp.training.memory import host as host_memory
from torchtune_cp.training.optim_in_bwd import OptimizerInBackward, step_alone


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind and settings without parameters, state and hooks of its own."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    # A schedule replaces the method on the instance, bound to the instance.
    twin.__dict__.pop("step", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = []
    return twin


class OptimizerOnHost(OptimizerInBackward):
    """Makes an ordinary optimizer step on the host, one parameter at a time, during backward.

    As soon as a parameter's gradient is complete (FSDP2 has added it up), it and the parameter are copied
    to host memory and the gradient is freed; a thread steps this parameter there and sends its new value
    back, while backward runs. Nothing reads a parameter's shard between its gradient and the next
    forward pass, so the new value may come at any time. `optimizer.step()` waits for what is not done.

    On the device there is no optimizer state at all (ZeRO-Offload, arXiv 2101.06840, but without its
    delayed update: the step is the ordinary one). With `fsdp_cpu_offload` parameters and gradients are
    on the host already and are stepped where they are.

    The optimizer stays the object it was, as with `OptimizerInBackward`: groups, state, state dict.
    """

    key = "optimizer_on_host"

    def __init__(
        self, optimizer: Optimizer, device: torch.device, *, shards_on_host: bool = False
    ) -> None:
        """Hook every parameter of the optimizer.

        Args:
            optimizer: Holds the parameters as they are trained (after sharding).
            device: Where the model computes; the CPU will do.
            shards_on_host: Whether `fsdp_cpu_offload` keeps parameters and gradients on the host.

        Raises:
            UserError: An optimizer that has no parameter groups of its own.
        """
        super().__init__(optimizer)
        self._device = device
        self._shards_on_host = shards_on_host
        self._backend = torch.get_device_module(device)
        self._copy_stream = self._backend.Stream()
        self._twin = _twin_of(optimizer)
        # One thread: steps are bound by memory bandwidth, and each uses all cores that torch may use.
        self._thread = host_memory.host_thread()
        self._pending: list[Future[None]] = []
        self._other_hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.wait()),
            # Loading puts the state where the parameters are.
            optimizer.register_load_state_dict_post_hook(_state_to_host),
        ]

    @torch.no_grad()
    def _update(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        on_host = parameter
        if not self._shards_on_host:
            # In the stream in which the gradient was made: its memory is free for others after the copy.
            on_host = self._to_host(parameter)
            gradient = self._to_host(gradient)
        arrived = self._backend.Event()
        arrived.record(self._backend.current_stream())
        # Groups as they are now: a schedule changes them after the step.
        groups = [{**group, "params": []} for group in self.optimizer.param_groups]
        state = self.optimizer.state[parameter]
        self._pending.append(
            self._thread.submit(
                self._step, index, groups, state, parameter, on_host, gradient, arrived
            )
        )

    def _free_last_buffer(self, gradient: Tensor) -> None:
        # A gradient on the host is no view of FSDP's buffer, and the thread may still be reading the last.
        if not self._shards_on_host:
            super()._free_last_buffer(gradient)

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = host_memory.empty_like_on_host(tensor.detach(), self._device)
        _local(host).copy_(_local(tensor), non_blocking=True)
        return host

    @torch.no_grad()
    def _step(
        self,
        index: int,
        groups: list[dict[str, Any]],
        state: dict[str, Any],
        parameter: Tensor,
        on_host: Tensor,
        gradient: Tensor,
        arrived: Any,
    ) -> None:
        """Step one parameter; runs in the thread."""
        arrived.synchronize()
        stepped = on_host.detach()  # shares the memory; a gradient of its own
        stepped.grad = gradient
        self._twin.param_groups = groups
        # The very dict that the optimizer keeps for the parameter: what the step puts in is there.
        self._twin.state = defaultdict(dict, {stepped: state})
        step_alone(self._twin, index, stepped, key=self.key)
        self._twin.state = defaultdict(dict)
        if on_host is not parameter:
            with self._backend.stream(self._copy_stream):
                _local(parameter).copy_(_local(on_host), non_blocking=True)

    def wait(self) -> None:
        """Wait until all gradients of the last backward pass have been used.

        What the device does next comes after the new parameters have arrived.

        Raises:
            UserError: The optimizer cannot be stepped one parameter at a time.
        """
        pending, self._pending = self._pending, []
        for step in pending:
            step.result()
        self._backend.current_stream().wait_stream(self._copy_stream)

    def remove(self) -> None:
        """Take the hooks away: the optimizer is an ordinary one again, its state on the host."""
        self.wait()
        super().remove()
        for hook in self._other_hooks:
            hook.remove()
        self._thread.shutdown()


def _state_to_host(optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        for name, value in values.items():
            if isinstance(value, Tensor) and _local(value).device.type != "cpu":
                values[name] = value.to("cpu")

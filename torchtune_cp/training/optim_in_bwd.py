"""The optimizer in backward: each parameter is updated, and its gradient freed, as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune_cp.errors import UserError


class GradientNorm:
    """Adds up the 2-norm of a gradient whose parts never exist together.

    Each rank keeps one number per parameter and communicates with the others once, in `total`. A part
    that several ranks hold a copy of (replicas, or a parameter that is not sharded) counts once.
    """

    def __init__(self) -> None:
        # Key: the mesh, and those of its dimensions over which the gradients are sharded.
        self._norms: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}

    def add(self, gradient: Tensor) -> None:
        """Take in one parameter's gradient; it may be freed afterwards.

        Args:
            gradient: Sharded (DTensor, already reduced) or whole.
        """
        key, local = None, gradient
        if isinstance(gradient, DTensor):
            assert not any(p.is_partial() for p in gradient.placements), "not reduced yet"
            sharded = [i for i, p in enumerate(gradient.placements) if not p.is_replicate()]
            key, local = (gradient.device_mesh, tuple(sharded)), gradient.to_local()
        norm = torch.linalg.vector_norm(local.detach(), dtype=torch.float32)
        self._norms.setdefault(key, []).append(norm)

    def total(self) -> Tensor:
        """Combine what all ranks have added since the last call; every rank must call it.

        Returns:
            The norm over all parameters and ranks, a float32 scalar, the same on every rank.
        """
        total: Tensor | None = None
        for key, norms in self._norms.items():
            square = torch.stack(norms).to(torch.float64).square().sum()
            if key is not None:
                mesh, dims = key
                square = square.to(mesh.device_type)  # offloaded gradients are on the host
                for dim in dims:
                    dist.all_reduce(square, group=mesh.get_group(dim))
            total = square if total is None else total + square.to(total.device)
        self._norms.clear()
        return torch.zeros(()) if total is None else total.sqrt().to(torch.float32)


def gradient_norm(model: nn.Module) -> Tensor:
    """The 2-norm of all gradients over all ranks, in float32.

    Parameters may be sharded over different meshes, or over different dimensions of one (a norm's scale
    under tensor parallelism is whole where a matrix is cut): each counts once.

    Args:
        model: After backward; parameters may be sharded (DTensor).

    Returns:
        A scalar tensor, the same on every rank.
    """
    norm = GradientNorm()
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm.add(parameter.grad)
    return norm.total()


def step_alone(optimizer: Optimizer, index: int, parameter: Tensor, *, key: str) -> None:
    """Take an optimizer's step for one of its parameters.

    Args:
        optimizer: Its groups are as they were afterwards.
        index: Of the parameter's group. Not the group itself: loading a state dict makes new ones.
        parameter: With a gradient.
        key: The config key that asks for this, for the message.

    Raises:
        UserError: The optimizer keeps something for all of its parameters together.
    """
    groups = optimizer.param_groups
    group = groups[index]
    alone = {**group, "params": [parameter]}
    optimizer.param_groups = [alone]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    for name, value in alone.items():
        # Such a value must change once per step, not once per parameter.
        if name != "params" and value is not group.get(name):
            raise UserError(
                f"{key}=true: {type(optimizer).__name__} keeps '{name}' for all of its parameters"
                f" together and cannot be stepped one at a time; set {key}=false"
            )


class OptimizerInBackward:
    """Makes an ordinary optimizer step inside backward, one parameter at a time.

    As soon as a parameter's gradient is complete (FSDP2 has added it up over shards and replicas), the
    optimizer steps this parameter alone and the gradient is freed. So at most the gradients of one
    FSDP group (of two, with replicas) exist, not those of the whole model.

    The optimizer stays the object it was: its parameter groups (a schedule sets their rates as usual),
    its state and its state dict are those of a run that steps after backward. `step()` and
    `zero_grad()` after backward find no gradient and do nothing, so a training loop is the same
    with and without. What needs all gradients at once cannot work: clipping, accumulation.

    Attributes:
        optimizer: The optimizer that steps.
    """

    #: The config key that asks for it, for messages.
    key = "optimizer_in_bwd"

    def __init__(self, optimizer: Optimizer) -> None:
        """Hook every parameter of the optimizer.

        Args:
            optimizer: Holds the parameters as they are trained (after sharding).

        Raises:
            UserError: An optimizer that has no parameter groups of its own.
        """
        if not isinstance(vars(optimizer).get("param_groups"), list):
            raise UserError(
                f"{self.key}=true: {type(optimizer).__name__} wraps another optimizer and cannot be"
                f" stepped one parameter at a time; set {self.key}=false or name the optimizer itself"
            )
        self.optimizer = optimizer
        self._norm = GradientNorm()
        self._last_buffer: Callable[[], torch.UntypedStorage | None] = lambda: None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._step_one, index))
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def _step_one(self, index: int, parameter: Tensor) -> None:
        """Step one parameter.

        Args:
            index: Of its group. Not the group itself: loading a state dict makes new ones.
            parameter: Its `grad` is complete.
        """
        assert parameter.grad is not None
        self._norm.add(parameter.grad)
        self._free_last_buffer(parameter.grad)
        self._update(index, parameter)
        parameter.grad = None

    def _update(self, index: int, parameter: Tensor) -> None:
        """Take the optimizer's step for one parameter; arguments as of `_step_one`."""
        step_alone(self.optimizer, index, parameter, key=self.key)

    def _free_last_buffer(self, gradient: Tensor) -> None:
        """Free the gradients of the FSDP group before this one, if torch still holds them.

        FSDP reduces a group's gradients in one buffer and returns views of it. With replicas it
        keeps a reference to every group's buffer until backward ends (torch 2.13,
        `FSDPParamGroup._all_reduce_state`), lest another stream reuses the memory too early, and
        freeing the views would free nothing. Its content is not needed again: groups come one after
        the other, so when the next one's first gradient arrives the last one's have all been used.
        """
        if not isinstance(gradient, DTensor):
            return
        local = gradient.to_local()
        buffer, last = local.untyped_storage(), self._last_buffer()
        if last is not None and last is not buffer:
            last.resize_(0)
        if any(p.is_replicate() for p in gradient.placements):
            if local.is_cuda:
                # The step runs on another stream than the one that the buffer came from.
                local.record_stream(torch.cuda.current_stream(local.device))
            self._last_buffer = weakref.ref(buffer)

    def gradient_norm(self) -> Tensor:
        """The 2-norm of the gradient of the last backward pass; every rank must call it, once.

        Returns:
            A float32 scalar, the same on every rank.
        """
        return self._norm.total()

    def remove(self) -> None:
        """Take the hooks away: the optimizer is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

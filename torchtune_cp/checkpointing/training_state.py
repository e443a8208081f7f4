"""The state of a run at a step boundary, split into tensors and plain JSON, and restored from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtune_cp.checkpointing.plain_json import from_plain_like, to_plain
from torchtune_cp.checkpointing.rng_state import get_rng_state, set_rng_state
from torchtune_cp.errors import UserError

#: Fills tensors in place with what a checkpoint holds under their names.
LoadTensors = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class TrainingState:
    """The live objects that a checkpoint keeps; place in the data and step count come with each save.

    Attributes:
        model: Sharded; its wrappers (compilation, activation checkpointing) do not show in names.
        optimizer: The one that steps, also inside backward.
        scheduler: Stepped once per optimizer step, or None.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of this rank, not copied: what is written in place changes the run.

        Returns:
            `model.<name>` and `optimizer.state.<name>.<key>`, sharded as the run shards them
            (DTensor) or whole and the same on every rank; `rng.<rank>.<generator>`, this rank's
            alone; `rank.<rank>.optimizer...`, this rank's parts of packed optimizer states.
        """
        tensors = dict(self._model_tensors())
        if self.optimizer.state:
            for name, value in self._optimizer_values(get_optimizer_state_dict):
                if isinstance(value, Tensor):
                    tensors.update(_without_wrappers(name, value))
        rank = _rank()
        tensors.update({f"rng.{rank}.{name}": rng for name, rng in get_rng_state().items()})
        return tensors

    def record(self) -> dict[str, Any]:
        """What is not a tensor, as plain JSON."""
        groups: list[dict[str, Any]] = []
        values: dict[str, Any] = {}
        packed = False
        if self.optimizer.state:
            for name, value in self._optimizer_values(get_optimizer_state_dict):
                if isinstance(value, Tensor):
                    packed = packed or name not in _without_wrappers(name, value)
                else:
                    values[name] = to_plain(value)
        for group in self.optimizer.param_groups:
            groups.append({key: to_plain(v) for key, v in group.items() if key != "params"})
        return {
            "optimizer": {
                "class": _class_name(self.optimizer),
                "has_state": bool(self.optimizer.state),
                "packed_per_rank": packed,
                "values": values,
                "param_groups": groups,
            },
            "scheduler": self._scheduler_state(),
            "rng": sorted(get_rng_state()),
        }

    def restore(
        self,
        record: Mapping[str, Any],
        load: LoadTensors,
        *,
        step: int,
        saved_world_size: int,
        same_mesh: bool,
        same_hyperparameters: bool,
    ) -> None:
        """Restore the state of the checkpoint; collective, every rank must call it.

        Args:
            record: `record` of the checkpoint.
            load: Reads the checkpoint's tensors.
            step: Optimizer steps done when it was taken.
            saved_world_size: Ranks that took it: a rank beyond keeps its own random numbers.
            same_mesh: Whether every rank holds the same parts now.
            same_hyperparameters: True takes the rates and settings of the optimizer and the state of
                the schedule from the checkpoint. False keeps those of this run's config, with its
                schedule moved on to `step`.

        Raises:
            UserError: The checkpoint is of another optimizer, or of another mesh although the
                optimizer's state cannot be resharded.
        """
        saved = record["optimizer"]
        if saved["class"] != _class_name(self.optimizer):
            raise UserError(
                f"optimizer: the checkpoint is of a {saved['class']}, this run has a"
                f" {_class_name(self.optimizer)}; use the same, or start from the weights alone"
                " (resume_from_checkpoint=<the run's final folder>)"
            )
        if saved["packed_per_rank"] and not same_mesh:
            raise UserError(
                f"optimizer: {saved['class']} packs its state per rank, so this checkpoint can"
                " be resumed on the mesh that it was saved on only"
            )
        tensors = dict(self._model_tensors())
        state: dict[str, Any] = {}
        if saved["has_state"]:
            # Reading a new optimizer's state creates it: one step with rate and gradients of 0.
            state = get_optimizer_state_dict(self.model, self.optimizer)
            for name, value in self._optimizer_values(lambda *_: state):
                if isinstance(value, Tensor):
                    tensors.update(_without_wrappers(name, value))
        rank, generators = _rank(), {}
        if rank < saved_world_size:
            now = get_rng_state()
            generators = {name: now[name] for name in record["rng"] if name in now}
        tensors.update({f"rng.{rank}.{name}": rng for name, rng in generators.items()})
        load(tensors)
        set_rng_state(generators)
        if saved["has_state"]:
            for fqn, values in state["state"].items():
                for key in values:
                    name = f"optimizer.state.{fqn}.{key}"
                    if name in saved["values"]:
                        values[key] = from_plain_like(saved["values"][name], values[key], name)
            set_optimizer_state_dict(self.model, self.optimizer, state)
        if same_hyperparameters:
            groups = self.optimizer.param_groups
            if len(groups) != len(saved["param_groups"]):
                raise UserError(
                    f"checkpoint.json: optimizer.param_groups are {len(saved['param_groups'])}, this run"
                    f" has {len(groups)}"
                )
            for group, kept in zip(groups, saved["param_groups"], strict=True):
                name = "optimizer.param_groups"
                _check_names(kept, "lr", {"params"}, name)
                group.update(from_plain_like(kept, group, name))
        self._restore_schedule(record["scheduler"] if same_hyperparameters else None, step)

    def _restore_schedule(self, saved: dict[str, Any] | None, step: int) -> None:
        if self.scheduler is None:
            return
        if saved is not None:
            now = self.scheduler.state_dict()
            _check_names(saved, "last_epoch", set(dir(self.scheduler)) - set(now), "scheduler")
            self.scheduler.load_state_dict(from_plain_like(saved, now, "scheduler"))
            return
        # A rate is a function of the number of steps: they are counted again, without training.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(step):
                self.scheduler.step()

    def _scheduler_state(self) -> Any:
        if self.scheduler is None:
            return None
        try:
            return to_plain(self.scheduler.state_dict())
        except TypeError:
            return (
                None  # a schedule of the user's with objects in its state: counted again on resume
            )

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # First of all: it makes FSDP put the shards back where a forward pass left whole weights.
        for name, value in get_model_state_dict(self.model).items():
            assert isinstance(value, Tensor), name
            yield from _without_wrappers(f"model.{name}", value).items()

    def _optimizer_values(self, get: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
        for fqn, values in get(self.model, self.optimizer)["state"].items():
            for key, value in values.items():
                yield f"optimizer.state.{fqn}.{key}", value


def _without_wrappers(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return what holds a tensor's bytes, sharing its memory, by the name to save it under.

    float8 training wraps a weight in a tensor subclass of the same shape and type: the weight itself
    comes back, sharded as before. Optimizers of 8 or 4 bits keep several packed tensors whose layout
    depends on the shard: they are returned as parts of this rank only.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "__tensor_flatten__"):
        return {name: value.detach()}
    parts = {part: getattr(local, part) for part in local.__tensor_flatten__()[0]}
    whole = [
        part for part in parts.values() if part.shape == local.shape and part.dtype == local.dtype
    ]
    if len(whole) != 1:
        return {f"rank.{_rank()}.{name}.{part}": inner for part, inner in parts.items()}
    if not isinstance(value, DTensor):
        return {name: whole[0].detach()}
    sharded = DTensor.from_local(
        whole[0].detach(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return {name: sharded}


def _check_names(saved: Mapping[str, Any], needed: str, foreign: set[str], where: str) -> None:
    """Refuse a state without its most important value, or with names that are no state."""
    wrong = sorted(foreign & saved.keys())
    if wrong or needed not in saved:
        what = f"sets {', '.join(wrong)}, which is no state" if wrong else f"has no {needed}"
        raise UserError(f"checkpoint.json: {where} {what}")


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

"""Runs the recipe's own step as one rank of any mesh, on tensors without memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune_cp.config import FullFinetuneConfig, instantiate
from torchtune_cp.distributed import ContextParallelOptions, Meshes
from torchtune_cp.errors import UserError
from torchtune_cp.models.transformer import TransformerDecoder
from torchtune_cp.planner.cuda_shapes import (
    attention_inside,
    flash_attention_workspace,
    gpu_operators,
)
from torchtune_cp.planner.methods import options_of_plan
from torchtune_cp.planner.profile import Profile, deeper, layers_to_trace, whole
from torchtune_cp.planner.torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_process_group,
    offloading_copies,
    real_meshes,
    uncached,
    unseen_sharding_propagation,
    watching_fsdp,
)
from torchtune_cp.planner.trace import Trace, rounded_when_pinned
from torchtune_cp.planner.tracker import StepTracker
from torchtune_cp.training.memory import tiling
from torchtune_cp.training.memory.host import HostMemory, host_memory_from
from torchtune_cp.training.nonfinite import step_totals
from torchtune_cp.training.setup import build_model, build_optimizer, parallel_dims
from torchtune_cp.training.step import causal_lm_step

_CPU = torch.device("cpu")


class _NoWeights:
    """Stands where a run has its checkpointer: shapes are all that a plan needs."""

    def keep_stored_output(self, model: nn.Module) -> None:
        """What a folder stores is not known."""

    def source(self, model: nn.Module, seed: int) -> _NoWeights:
        return self

    def read(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape)


def _mesh_names(meshes: Meshes) -> Callable[[dist.ProcessGroup, str], str]:
    """Name process groups by the mesh dimension they belong to.

    Dimensions of the same ranks may share a group: FSDP's operations then distinguish them.
    """
    fsdp = {
        meshes.fsdp.get_group(i).group_name: name
        for i, name in enumerate(meshes.fsdp.mesh_dim_names or ())
    }
    names = {
        mesh.get_group().group_name: name
        for name, mesh in (
            ("loss", meshes.loss),
            ("dp", meshes.dp),
            ("tp", meshes.tp),
            ("cp", meshes.cp),
        )
        if mesh.size() > 1
    }

    def name(group: dist.ProcessGroup, activity: str) -> str:
        first, second = (fsdp, names) if activity in ("gather", "reduce") else (names, fsdp)
        key = group.group_name
        return first.get(key) or second.get(key) or "world"

    return name


def _make_state(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer create its state, by a step with gradients of zero."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _step_as_on_gpu(optimizer: Optimizer) -> None:
    """Let an optimizer update all parameters at once, as it does on a GPU by default.

    It then makes intermediates of the size of all parameters together. On a CPU its default is one
    parameter after the other.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _batch(cfg: FullFinetuneConfig, seq_len: int) -> dict[str, Tensor]:
    shape = (cfg.batch_size, seq_len)
    return {
        name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels", "input_pos")
    }


class SeenHostMemory(HostMemory):
    """Encloses what memory options allocate and do on the host, and does it at once, in no thread.

    Args:
        on_host: Makes the enclosing context; receives whether its allocations are pinned.
    """

    plain_tensors = (*HostMemory.plain_tensors, FakeTensor)

    def __init__(self, on_host: Callable[[bool], contextlib.AbstractContextManager[None]]) -> None:
        self._on_host = on_host

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        """See `HostMemory`."""
        with self._on_host(True):
            return super().empty(num_bytes, device)

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See `HostMemory`."""
        with self._on_host(True):
            return super().empty_like(tensor, device)

    def thread(self) -> Executor:
        """Tensors without memory belong to one thread: work on the host is done where it is given."""
        return _AtOnce(self._on_host)


class _AtOnce(Executor):
    def __init__(self, on_host: Callable[[bool], contextlib.AbstractContextManager[None]]) -> None:
        self._on_host = on_host

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._on_host(False):
            future.set_result(fn(*args, **kwargs))
        return future


@contextlib.contextmanager
def _each_kind_of_tile(tracker: StepTracker) -> Generator[None, None, None]:
    """Let loops over tiles do the first, one of the equal ones in between for all of them, and the last.

    The first is apart because sums begin with it. The time of a plan is then independent of the number of
    tiles.
    """

    def few(num_tokens: int, size: int) -> Iterator[slice]:
        whole = num_tokens // size
        if whole < 3:
            yield from tiling.every_tile(num_tokens, size)
            return
        yield slice(0, size)
        with tracker.repeated(whole - 1):
            yield slice(size, 2 * size)
        if num_tokens % size:
            yield slice(whole * size, num_tokens)

    with tiling.tiles_from(few):
        yield


def simulate(
    cfg: FullFinetuneConfig,
    *,
    rank: int,
    world_size: int,
    seq_len: int,
    gpu: bool,
    separate_host: bool | None = None,
    num_layers: int | None = None,
    every_tile: bool = False,
) -> Trace:
    """Run one optimizer step of the recipe as one rank sees it, without its memory and its peers.

    Everything is built by the recipe's own functions and the step is the recipe's. The optimizer's state
    exists when the step begins, as it does in every step but the first.

    Args:
        cfg: The run's config.
        rank: The rank to play.
        world_size: Ranks of the run.
        seq_len: Tokens of each sequence, before padding.
        gpu: Whether operators are those of a GPU.
        separate_host: Whether host memory is another memory; None for as it is with `gpu`.
        num_layers: Layers of the model to keep, None for all.
        every_tile: Run every turn of the loops over tiles of the sequence, not one for all equal ones.

    Returns:
        The step's trace.
    """
    cfg = dataclasses.replace(cfg, device="cpu", compile=False)
    separate_host = gpu if separate_host is None else separate_host
    offloads_shards = cfg.fsdp_cpu_offload and separate_host
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_process_group(rank, world_size))
        stack.enter_context(real_meshes())
        dims = parallel_dims(cfg)
        meshes = Meshes.build(dims, "cpu")
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # layouts of documents are real
        tracker = StepTracker(
            _mesh_names(meshes),
            flash_attention_workspace,
            uncached=lambda: uncached(mode),
            separate_host=separate_host,
        )
        if gpu:
            stack.enter_context(gpu_operators())
        stack.enter_context(attention_inside(lambda: tracker.doing("attention")))
        stack.enter_context(unseen_sharding_propagation())
        memory = SeenHostMemory(lambda pinned: tracker.on_host(pinned=pinned))
        stack.enter_context(host_memory_from(memory))
        if not every_tile:
            stack.enter_context(_each_kind_of_tile(tracker))
        stack.enter_context(
            watching_fsdp(tracker.doing, lambda gradient: tracker.name(gradient, "gradients"))
        )
        if offloads_shards:
            stack.enter_context(offloading_copies(lambda pinned: tracker.on_host(pinned=pinned)))
        stack.enter_context(tracker.seeing_resizes())
        stack.enter_context(mode)
        stack.enter_context(tracker)

        no_weights: Any = _NoWeights()
        model = build_model(cfg, no_weights, meshes, _CPU, seed=0, num_layers=num_layers)
        optimizer, _, gradient_norm = build_optimizer(cfg, model, total_steps=2)
        if gpu:
            _step_as_on_gpu(optimizer)
        _make_state(optimizer, model)
        gradient_norm()
        loss_fn = instantiate(cfg.loss)

        def loss_inside(*args: Any, **kwargs: Any) -> Tensor:
            with tracker.doing("loss"):
                loss: Tensor = loss_fn(*args, **kwargs)
                return loss

        model.train()
        tracker.watch(model)
        for parameter in model.parameters():
            tracker.name(parameter, "parameters", on_host=offloads_shards, pinned=offloads_shards)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    tracker.name(
                        value, "optimizer", on_host=offloads_shards or cfg.optimizer_on_host
                    )
        options = ContextParallelOptions.of_run(cfg, model.config, dims.min_seq_len_divisor)
        train = causal_lm_step(
            cfg,
            model,
            optimizer,
            gradient_norm,
            loss_inside,
            meshes=meshes,
            dims=dims,
            device=_CPU,
            options=options_of_plan(cfg, options, gpu=gpu),
        )
        batches = [_batch(cfg, seq_len) for _ in range(cfg.gradient_accumulation_steps)]
        train.finish()  # what the step before would have left, such as float8's scales
        tracker.start()
        gradients = train.backward(batches)
        step_totals(meshes, gradients.losses, gradients.norm, _CPU)
        tracker.phase = "update"
        train.update(gradients.norm)
        tracker.phase = "finish"
        train.finish()
        trace = tracker.stop(shards_on_host=offloads_shards)
        if cfg.optimizer_on_host and separate_host:
            trace.backlog = sum(
                _waiting_bytes(parameter, shards_on_host=offloads_shards)
                for parameter in model.parameters()
            )
        return trace


def _waiting_bytes(parameter: Tensor, *, shards_on_host: bool) -> int:
    """What a parameter takes on the host while it waits for its step there.

    Its gradient and, where the shard is on the device, a copy of the shard, both in pinned memory.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    count = local.numel() * local.itemsize
    return count if shards_on_host else 2 * rounded_when_pinned(count)


def checkpointing_period(cfg: FullFinetuneConfig) -> int:
    """After how many layers a model repeats itself: N where only every N-th is checkpointed."""
    option = str(cfg.ac_option)
    if cfg.ac_mode == "selective" and option.isdigit() and not cfg.enable_activation_checkpointing:
        return int(option)
    return 1


def number_of_layers(cfg: FullFinetuneConfig) -> int:
    """Layers of the model that a config names; nothing is allocated.

    Raises:
        UserError: It names no decoder.
    """
    with torch.device("meta"):
        model = instantiate(cfg.model)
    if not isinstance(model, TransformerDecoder):
        raise UserError(
            f"model._component_={cfg.model['_component_']} builds a {type(model).__name__};"
            " a plan is made for the decoders of torchtune_cp.models"
        )
    return model.config.num_layers


def rank_profile(
    cfg: FullFinetuneConfig,
    *,
    rank: int,
    world_size: int,
    seq_len: int,
    gpu: bool,
    separate_host: bool | None = None,
    exact: bool = False,
) -> Profile:
    """The step of the whole model as one rank sees it.

    Args:
        cfg: The run's config.
        rank: The rank to play.
        world_size: Ranks of the run.
        seq_len: Tokens of each sequence, before padding.
        gpu: Whether operators are those of a GPU.
        separate_host: Whether host memory is another memory; None for as it is with `gpu`.
        exact: Run all layers and all tiles rather than extrapolate from a few.
    """
    play = partial(
        simulate,
        cfg,
        rank=rank,
        world_size=world_size,
        seq_len=seq_len,
        gpu=gpu,
        separate_host=separate_host,
        every_tile=exact,
    )
    num_layers = number_of_layers(cfg)
    depths = layers_to_trace(num_layers, checkpointing_period(cfg))
    # A layer with a separate group is not like the others.
    singled_out = any(name.startswith("layers.") for name in cfg.custom_sharded_layers or [])
    if exact or depths is None or singled_out:
        return whole(play())
    few, more = (play(num_layers=depth) for depth in depths)
    return deeper(few, more, depths, num_layers)

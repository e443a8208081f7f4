"""A step that really runs on gloo ranks, its storages and what it sends counted as it goes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_cp.checkpointing import FullModelHFCheckpointer
from torchtune_cp.config import instantiate, to_typed
from torchtune_cp.distributed import Meshes
from torchtune_cp.planner.methods import BODIES, packs_documents
from torchtune_cp.planner.simulate import SeenHostMemory
from torchtune_cp.planner.torch_private import offloading_copies
from torchtune_cp.training import setup
from torchtune_cp.training.memory.host import host_memory_from
from torchtune_cp.training.nonfinite import step_totals
from torchtune_cp.training.step import causal_lm_step


class Watch(TorchDispatchMode):
    """Looks at every storage that any operator has returned, after every operator.

    Sizes are read anew each time: FSDP frees gathered parameters by resizing their storages, which no
    operator shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._on_host: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._host = 0
        self.peak = 0
        self.most_elsewhere = 0
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace == "torchtune_cp":
            with self:  # an operator of the project's own: look at what it consists of
                return BODIES[func._overloadpacket.__name__](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, AsyncCollectiveTensor):
                tensor = tensor.elem  # the wrapper's own storage has a size but no memory
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if self._host and storage not in self._alive:
                    self._on_host[storage] = None
                self._alive[storage] = None
        elsewhere = _bytes(self._on_host)
        self.peak = max(self.peak, self.live() - elsewhere)
        self.most_elsewhere = max(self.most_elsewhere, elsewhere)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._overloadpacket.__name__, args)
        return out

    def live(self) -> int:
        """Bytes of all storages that are alive."""
        return _bytes(self._alive)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Enclose work in host memory: what is allocated in it does not count as the device's."""
        self._host += 1
        try:
            yield
        finally:
            self._host -= 1

    def mark_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say of tensors that exist already that they are in host memory."""
        with torch.no_grad():
            for tensor in tensors:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self._on_host[local.untyped_storage()] = None

    def _count(self, name: str, args: Any) -> None:
        """Add up what leaves this rank: everything that another rank gets from it."""
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return

        def group(given: Any) -> dist.ProcessGroup:
            if isinstance(given, str):
                return dist.distributed_c10d._resolve_process_group(given)
            return dist.ProcessGroup.unbox(given)

        def nbytes(tensor: torch.Tensor) -> int:
            return tensor.numel() * tensor.element_size()

        if name == "_allgather_base_":
            whole, part = nbytes(args[0]), nbytes(args[1])
            assert whole == part * group(args[2]).size()
            kind, sent = "all_gather", whole - part
        elif name == "all_gather_into_tensor":
            kind, sent = "all_gather", (args[1] - 1) * nbytes(args[0])
        elif name == "_reduce_scatter_base_":
            kind, sent = "reduce_scatter", nbytes(args[1]) - nbytes(args[0])
        elif name == "reduce_scatter_tensor":
            kind, sent = "reduce_scatter", nbytes(args[0]) * (args[2] - 1) / args[2]
        elif name in ("allreduce_", "all_reduce"):
            tensors = args[0] if name == "allreduce_" else [args[0]]
            size = group(args[1] if name == "allreduce_" else args[2]).size()
            kind, sent = "all_reduce", 2 * sum(map(nbytes, tensors)) * (size - 1) / size
        elif name == "alltoall_base_":
            _, tensor, ranks, _, sizes = args[:5]
            members = group(ranks)
            mine = sizes[members.rank()] if sizes else tensor.numel() // members.size()
            kind, sent = "all_to_all", (tensor.numel() - mine) * tensor.element_size()
        elif name == "all_to_all_single":
            tensor, _, splits, ranks = args
            members = group(ranks)
            mine = splits[members.rank()] if splits else tensor.size(0) // members.size()
            row = math.prod(tensor.shape[1:]) * tensor.element_size()
            kind, sent = "all_to_all", (tensor.size(0) - mine) * row
        else:
            raise AssertionError(f"a collective that this counter does not know: {name}")
        self.sent[kind] = self.sent.get(kind, 0) + sent


def _bytes(storages: Iterable[Any]) -> int:
    return sum(storage.nbytes() for storage in list(storages))


def measured_steps(trees: list[Any], seq_len: int) -> list[dict[str, Any]]:
    """Make two steps of each config on this rank; what the second one took."""
    return [_measured(to_typed(tree, world_size=dist.get_world_size()), seq_len) for tree in trees]


def _measured(cfg: Any, seq_len: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(Watch())
        stack.enter_context(host_memory_from(SeenHostMemory(lambda _: watch.on_host())))
        if cfg.fsdp_cpu_offload:
            # Between host and device FSDP copies by `.to(device)`, which does nothing where both are one.
            stack.enter_context(offloading_copies(lambda _: watch.on_host()))
        step = recipe_step(
            cfg,
            torch.device("cpu"),
            FullModelHFCheckpointer(checkpoint_dir=None),
            with_shards=watch.on_host if cfg.fsdp_cpu_offload else contextlib.nullcontext,
            made=lambda model: (
                watch.mark_on_host(model.parameters()) if cfg.fsdp_cpu_offload else None
            ),
        )
        step(seq_len)
        watch.sent.clear()
        before = watch.live()
        watch.peak = watch.most_elsewhere = 0
        step(seq_len)
        return {
            "peak": watch.peak,
            "before": before,
            "sent": dict(watch.sent),
            "host": watch.most_elsewhere,
        }


def recipe_step(
    cfg: Any,
    device: torch.device,
    checkpointer: Any,
    *,
    with_shards: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    made: Callable[[Any], None] = lambda _: None,
) -> Callable[[int], None]:
    """Build model, optimizer and step as `full_finetune_distributed` does.

    Args:
        cfg: The run's config.
        device: Where the model computes.
        checkpointer: Gives the weights.
        with_shards: Encloses what is done where the shards are.
        made: Called with the model as soon as it has weights.

    Returns:
        Makes an optimizer step on synthetic sequences of this number of tokens.
    """
    dims = setup.parallel_dims(cfg)
    meshes = Meshes.build(dims, device.type)
    model = setup.build_model(cfg, checkpointer, meshes, device, 0)
    made(model)
    optimizer, _, norm = setup.build_optimizer(cfg, model, 2)

    def gradient_norm() -> torch.Tensor:
        with with_shards():
            total: torch.Tensor = norm()
            return total

    train = causal_lm_step(
        cfg,
        model,
        optimizer,
        gradient_norm,
        instantiate(cfg.loss),
        meshes=meshes,
        dims=dims,
        device=device,
    )
    model.train()

    def step(seq_len: int) -> None:
        gradients = train.backward(_batches(cfg, seq_len, model.config.vocab_size))
        step_totals(meshes, gradients.losses, gradients.norm, device)
        with with_shards():
            train.update(gradients.norm)
        train.finish()

    return step


def _batches(cfg: Any, seq_len: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    batches = []
    for i in range(cfg.gradient_accumulation_steps):
        tokens = (torch.arange(cfg.batch_size * seq_len).view(cfg.batch_size, -1) + i) % vocab_size
        positions = torch.arange(seq_len).expand_as(tokens).contiguous()
        batch = {"tokens": tokens, "labels": tokens.clone(), "input_pos": positions}
        if packs_documents(cfg):
            batch["seq_lens"] = torch.full((cfg.batch_size, 1), seq_len)
        batches.append(batch)
    return batches

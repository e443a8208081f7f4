"""What the benchmarks share: the model, persistent contenders, and result files that say where from."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RESULTS = Path(__file__).parent / "results"

#: The model that all figures here are for.
MODEL = {
    "vocab_size": 8192,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "embed_dim": 256,
    "intermediate_dim": 1024,
    "max_seq_len": 65536,
}


def real_tokens(seq_len: int) -> torch.Tensor:
    """Bytes of the standard library's own sources, in pairs modulo the vocabulary, [1, seq_len]."""
    import typing

    data = b"".join(p.read_bytes() for p in sorted(Path(typing.__file__).parent.glob("*.py")))
    pairs = torch.tensor(list(data[: 2 * seq_len])).view(-1, 2)
    return ((pairs[:, 0] * 256 + pairs[:, 1]) % MODEL["vocab_size"])[None]


def machine() -> dict[str, Any]:
    """The machine, the versions and the command, for a result file."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    import transformers

    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def write_results(name: str, results: Any) -> None:
    """Write `results/NAME.json` with the machine and the command beside the figures."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    print(f"written: {path}")


def _serve(
    rank: int, world: int, threads: int, folder: str, build: Any, args: Any, kwargs: Any, pipe: Any
) -> None:
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    step = build(*args, **kwargs)
    pipe.send("ready")
    while (command := pipe.recv()) != "stop":
        start = time.perf_counter()
        result = step(command)
        pipe.send((time.perf_counter() - start, result))
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Contender:
    """A group of processes that stays loaded and makes one step on request.

    Attributes:
        name: For the table.
        world: Number of processes.
        threads: Threads of each.
        build: Called on each process; returns the function that makes a step.
        args: Arguments of `build`.
        kwargs: Keyword arguments of `build`.
    """

    name: str
    world: int
    threads: int
    build: Callable[..., Callable[[str], Any]]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Start the processes and wait until each has built its model."""
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank, self.world, self.threads, self._folder.name, self.build, self.args,
                    self.kwargs, theirs,
                ),
                daemon=True,
            )  # fmt: skip
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def step(self, command: str = "step") -> tuple[float, list[Any]]:
        """Make one step; returns the slowest rank's seconds and each rank's result."""
        for pipe in self._pipes:
            pipe.send(command)
        answers = [pipe.recv() for pipe in self._pipes]
        return max(a[0] for a in answers), [a[1] for a in answers]

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send("stop")
        for process in self._processes:
            process.join(30)
        self._folder.cleanup()


def interleave(contenders: list[Contender], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Let the contenders make steps in turn, so that a noisy machine is noisy for all.

    Args:
        contenders: Started ones.
        rounds: Counted steps of each.
        warmup: Steps of each that are not counted.

    Returns:
        Seconds per step by contender.
    """
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    for round_number in range(warmup + rounds):
        for contender in contenders:
            took, _ = contender.step()
            if round_number >= warmup:
                seconds[contender.name].append(took)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the pairwise ratios of two interleaved series: how often faster the second is."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


# --- our own step, as the recipe makes it --------------------------------------------------------


def one_document(seq_len: int) -> dict[str, torch.Tensor]:
    """A batch of one real text of `seq_len` tokens."""
    tokens = real_tokens(seq_len)
    labels = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], dim=1)
    return {"tokens": tokens, "labels": labels, "input_pos": torch.arange(seq_len)[None]}


def our_training(
    seq_len: int,
    cp: int,
    compiled: bool = False,
    checkpointing: bool = False,
    mlp_tile_tokens: int | None = None,
    attention_head_chunks: int | None = None,
    loss: dict[str, Any] | None = None,
    by_documents: bool = False,
    make_batch: Callable[[int], dict[str, torch.Tensor]] = one_document,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer, Callable[[], None]]:
    """Build our model over `cp` ranks, its AdamW, and a function that runs forward and backward.

    `make_batch` gives the batch that all steps take, `options` are for `context_parallel`.
    """
    from functools import partial

    from torchtune_cp.checkpointing.sources import RandomSource
    from torchtune_cp.distributed import (
        ContextParallelOptions,
        Meshes,
        ParallelDims,
        context_parallel,
    )
    from torchtune_cp.distributed.context_parallel.heads import HeadChunks
    from torchtune_cp.distributed.fsdp import materialize, shard_model
    from torchtune_cp.models.init import init_tensor_
    from torchtune_cp.models.llama3 import llama3
    from torchtune_cp.training import LinearCrossEntropyLoss
    from torchtune_cp.training.compile import compile_layers
    from torchtune_cp.training.memory import (
        apply_activation_checkpointing,
        apply_chunked_attention,
        apply_tiled_mlp,
    )

    meshes = Meshes.build(ParallelDims(1, 1, cp, 1, cp), "cpu")
    with torch.device("meta"):
        model = llama3(**MODEL)
    if mlp_tile_tokens is not None:
        apply_tiled_mlp(model, mlp_tile_tokens)
    if attention_head_chunks is not None:
        sizes = model.config
        chunks = HeadChunks.of(attention_head_chunks, sizes.num_heads, sizes.num_kv_heads)
        apply_chunked_attention(model, chunks, mlp_tile_tokens)
        by_documents = True
    if checkpointing:
        apply_activation_checkpointing(model)
    if compiled:
        compile_layers(model)
    shard_model(model, meshes.fsdp)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    init = lambda name, tensor, g: init_tensor_(name, tensor, g, model.config)  # noqa: E731
    materialize(model, RandomSource(0, shapes, init), torch.device("cpu"))
    loss_fn = LinearCrossEntropyLoss(**(loss or {"num_output_chunks": 16}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rarer = ContextParallelOptions(by_documents=by_documents)
    batch = make_batch(seq_len)
    scale = cp / int((batch["labels"] != -100).sum())

    def forward_backward() -> None:
        with context_parallel(meshes.cp, batch, options=rarer, **options) as local:
            head = partial(loss_fn, labels=local["labels"])
            loss = model(local["tokens"], local["input_pos"], output_fn=head)
            (loss * scale).backward()

    return model, optimizer, forward_backward


def build_ours(seq_len: int, cp: int, *settings: bool, **options: Any) -> Callable[[str], Any]:
    """Build a training step (forward, backward, AdamW) of our model over `cp` ranks.

    Further arguments are those of `our_training`.

    The returned function takes `"step"` (returns this process's peak resident bytes) or
    `"activations"` (returns the peak bytes of tensors that were allocated during the step).
    """
    from benchmarks.live_storage import LiveStorage
    from torchtune_cp.metrics import peak_memory_bytes

    _, optimizer, forward_backward = our_training(seq_len, cp, *settings, **options)

    def step(command: str) -> Any:
        result = None
        if command == "activations":
            with LiveStorage() as live:
                forward_backward()
            result = live.peak
        else:
            forward_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result if command == "activations" else peak_memory_bytes("cpu")

    return step


def llama_config(sizes: dict[str, int], **other: Any) -> Any:
    """Transformers' config of an untied llama with a benchmark's sizes (this project's names)."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["embed_dim"],
        intermediate_size=sizes["intermediate_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        max_position_embeddings=sizes["max_seq_len"],
        tie_word_embeddings=False,
        **other,
    )


def build_transformers(seq_len: int) -> Callable[[str], Any]:
    """Build a training step of transformers' model of the same sizes in a plain loop."""
    from transformers import LlamaForCausalLM

    from torchtune_cp.metrics import peak_memory_bytes

    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(MODEL, attn_implementation="sdpa", use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = real_tokens(seq_len)

    def step(command: str) -> Any:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return peak_memory_bytes("cpu")

    return step

"""What the tests of resuming share: a small AdamW run with shuffled data, and ways to look at checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from tests.distributed.fixtures import VOCAB, Samples, recipe_config, run_recipe
from torchtune_cp.checkpointing import FullModelHFCheckpointer
from torchtune_cp.checkpointing.rank_sync import RankSync
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.checkpointing.training_state_store import load_tensors, stored_tensors
from torchtune_cp.config import to_typed
from torchtune_cp.distributed import Meshes
from torchtune_cp.metrics import read_metrics
from torchtune_cp.training.progress import TrainingProgress
from torchtune_cp.training.resume import open_checkpoints, restore, run_record
from torchtune_cp.training.setup import build_loader, build_model, build_optimizer, parallel_dims

SAMPLES = 17
#: Fields of a line that are the same when a run is repeated.
EXACT = ("step", "epoch", "loss", "grad_norm", "lr", "tokens", "val_loss", "val_tokens")
#: Meshes of 4, 2 and 1 processes; all take 4 samples a step.
MESHES: dict[str, dict[str, int]] = {
    "dp2_cp2": {"context_parallel_dim": 2, "batch_size": 2},
    "dp4": {"batch_size": 1},
    "tp2_cp2": {"tensor_parallel_dim": 2, "context_parallel_dim": 2, "batch_size": 4},
    "replicate2_cp2": {
        "data_parallel_replicate_dim": 2,
        "context_parallel_dim": 2,
        "batch_size": 2,
    },
    "cp2": {"context_parallel_dim": 2, "batch_size": 4},
    "single": {"batch_size": 4},
}
_READ: list[int] = []


class _Recorded(Samples):
    def __getitem__(self, index: int) -> dict[str, list[int]]:
        _READ.append(index)
        return super().__getitem__(index)


def recorded_samples(tokenizer: Any = None) -> Samples:
    """Samples of 13 to 45 tokens, each with another number of them; what is read is recorded."""
    g = torch.Generator().manual_seed(3)
    samples = []
    for i in range(SAMPLES):
        tokens = torch.randint(0, VOCAB, (13 + 2 * i,), generator=g).tolist()
        samples.append({"tokens": tokens, "labels": tokens})
    return _Recorded(samples)


def adamw_config(output_dir: Path, mesh: str = "single", **overrides: Any) -> Any:
    """Two epochs of 4 steps of 4 shuffled samples, AdamW, a cosine, a 2-layer llama."""
    settings: dict[str, Any] = {
        "model": {
            "_component_": "torchtune_cp.models.llama3.llama3",
            "vocab_size": VOCAB,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "embed_dim": 32,
            "max_seq_len": 128,
        },
        "checkpointer": {"checkpoint_dir": None},
        "dataset": {"_component_": "tests.distributed.resume_runs.recorded_samples"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-3},
        "lr_scheduler": {
            "_component_": "torchtune_cp.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "epochs": 2,
        "shuffle": True,
        "save_every_epoch": False,
        "clip_grad_norm": 1.0,
        **MESHES[mesh],
    }
    return recipe_config(None, output_dir, **{**settings, **overrides})


def run_all(cfgs: list[Any]) -> list[list[int]]:
    """Run the recipe once per config; return the samples that this rank has read in each run."""
    read = []
    for cfg in cfgs:
        _READ.clear()
        run_recipe([cfg])
        read.append(list(_READ))
    return read


def run_all_with_messages(cfgs: list[Any]) -> list[list[str]]:
    """Run the recipe once per config; return the log lines of each, with the error it ended in."""
    messages: list[list[str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages[-1].append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("torchtune_cp").addHandler(Keep())
    for cfg in cfgs:
        messages.append([])
        try:
            run_recipe([cfg])
        except Exception as error:  # noqa: BLE001 - returned to the test
            messages[-1].append(f"{type(error).__name__} {error}")
    return messages


def lines(output_dir: Path, after: int = -1) -> list[dict[str, Any]]:
    """The repeatable fields of ``metrics.jsonl``, of the steps after ``after``."""
    return [
        {name: line[name] for name in EXACT if name in line}
        for line in read_metrics(output_dir / "metrics.jsonl")
        if line["step"] > after
    ]


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, without those of the random generators."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in stored_tensors(checkpoint).items()
        if not name.startswith("rng.")
    }
    load_tensors(checkpoint, tensors, RankSync())
    return tensors


def load_and_save_again(cfg: Any) -> None:
    """Set a run up from its checkpoint, as the recipe does, and save it again without a step."""
    os.environ["TUNE_ALLOW_COMPONENTS"] = "tests"
    typed = to_typed(cfg)
    dims = parallel_dims(typed)
    meshes = Meshes.build(dims, "cpu")
    checkpoints, found = open_checkpoints(typed)
    weights = FullModelHFCheckpointer(None)
    model = build_model(typed, weights, meshes, torch.device("cpu"), 0, found)
    loader = build_loader(typed, typed.dataset, None, meshes, seed=0)
    progress = TrainingProgress.start(typed, loader, found)
    optimizer, scheduler, _ = build_optimizer(typed, model, progress.total_steps)
    state, run = TrainingState(model, optimizer, scheduler), run_record(typed, dims, 0)
    restore(found, checkpoints, state, progress, run)
    checkpoints.save(
        state, step=progress.step, record=run | progress.record() | {"nonfinite_steps": 0}
    )
    checkpoints.close()

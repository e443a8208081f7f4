"""The shared fixture: a 2-layer llama of transformers, and samples whose labels lie unevenly."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf

from torchtune_cp.distributed import Meshes, ParallelDims
from torchtune_cp.errors import UserError

VOCAB, DIM = 64, 32


def save_llama(folder: Path, tie: bool = False) -> None:
    """Write a random 2-layer llama (dim 32, 4 heads, 2 KV heads, vocab 64, fp32)."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import: not on the ranks

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Samples:
    """A map-style dataset of given samples; what the recipe's data stage would yield."""

    def __init__(self, samples: list[dict[str, list[int]]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.samples[index]


def uneven_samples(tokenizer: Any = None) -> Samples:
    """Six samples: lengths 1 to 128 that no mesh divides, label counts from 0 to 100.

    Among them: labels at the borders of the slices only (positions 7, 8, 15 of 16 and their like), on
    the first 10 of 128 tokens only (so that most ranks hold no label), and none at all.
    """
    g = torch.Generator().manual_seed(1)

    def sample(length: int, labelled: list[int]) -> dict[str, list[int]]:
        tokens = torch.randint(0, VOCAB, (length,), generator=g).tolist()
        return {
            "tokens": tokens,
            "labels": [t if i in labelled else -100 for i, t in enumerate(tokens)],
        }

    return Samples(
        [
            sample(128, list(range(10))),
            sample(16, [4, 8, 12]),
            sample(101, list(range(101))),
            sample(40, []),
            sample(7, list(range(7))),
            sample(1, [0]),
        ]
    )


def one_unlabelled_micro_batch(tokenizer: Any = None) -> Samples:
    """The uneven samples in an order in which the second pair has no label at all."""
    samples = uneven_samples().samples
    return Samples([samples[i] for i in (0, 1, 3, 5, 2, 4)])


def long_sample(tokenizer: Any = None) -> Samples:
    """One sample of 2,999 tokens (a prime, so that no mesh divides it), all of them labelled."""
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (2999,), generator=g).tolist()
    return Samples([{"tokens": tokens, "labels": tokens}])


def numbered_samples(tokenizer: Any = None, *, count: int = 7, length: int = 24) -> Samples:
    """Samples of one length, each made of its own number: what a rank has read can be told."""
    return Samples([{"tokens": [i] * length, "labels": [i] * length} for i in range(count)])


class _RaisesOnRankOne(Samples):
    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == 2 and os.environ["RANK"] == "1":
            raise UserError(f"sample {index} cannot be read")
        return super().__getitem__(index)


def raises_on_rank_one(tokenizer: Any = None) -> Samples:
    """Eight samples, of which rank 1 alone cannot read the third."""
    return _RaisesOnRankOne(numbered_samples(count=8).samples)


def reference_step(
    folder: Path, samples: Samples, lr: float, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """One SGD step of a plain single-process loop, sample by sample, with transformers' model.

    In bfloat16 the model computes in it, gradients add up in float32 and the step is taken on float32
    weights.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {name: torch.zeros_like(p) for name, p in before.items()}
    model.to(dtype)
    count = sum(label != -100 for s in samples.samples for label in s["labels"][1:])
    total = 0.0
    for s in samples.samples:
        tokens = torch.tensor([s["tokens"]])
        labels = torch.tensor(s["labels"][1:], dtype=torch.int64)
        logits = model(tokens).logits[0, :-1].float()
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / count
        loss.backward()
        total += loss.item()
        for name, p in model.named_parameters():
            grads[name] += p.grad
            p.grad = None
    norm = torch.nn.utils.get_total_norm(grads.values()).item()
    after = {name: p - lr * grads[name] for name, p in before.items()}
    return {"loss": total, "grad_norm": norm, "tokens": count, "before": before, "after": after}


def recipe_config(folder: Path | None, output_dir: Path, **overrides: Any) -> Any:
    """The config of a one-step SGD run on the fixture, with ``overrides`` on top."""
    base = {
        "output_dir": str(output_dir),
        "device": "cpu",
        "dtype": "fp32",
        "seed": 0,
        "shuffle": False,
        "epochs": 1,
        "save_every_epoch": False,
        "model": {
            "_component_": "torchtune_cp.models.auto_model",
            "checkpoint_dir": str(folder),
        },
        "checkpointer": {
            "_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder),
        },
        "tokenizer": {"_component_": "torchtune_cp.data.byte_tokenizer"},
        "dataset": {"_component_": "tests.distributed.fixtures.uneven_samples"},
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0},
        "loss": {
            "_component_": "torchtune_cp.training.loss.LinearCrossEntropyLoss",
            "num_output_chunks": 2,
        },
    }
    if "_component_" in overrides.get("model", {}):
        base["model"] = {}
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(overrides))


@functools.cache
def _keep_group_and_meshes() -> None:
    """Let the runs of this process share its process group, and those with the same degrees their meshes.

    A recipe has a process for itself, and a third of a tiny run's time goes into what torch works out once
    for each mesh. Runs still share nothing else: models, optimizers and loaders are built anew.
    """
    build = Meshes.build.__func__  # type: ignore[attr-defined]
    built: dict[Any, Meshes] = {}

    def build_once(
        cls: type[Meshes], dims: ParallelDims, device_type: str, *, shard: bool = True
    ) -> Meshes:
        key = (dataclasses.astuple(dims), device_type, shard)
        if key not in built:
            built[key] = build(cls, dims, device_type, shard=shard)
        return built[key]

    Meshes.build = classmethod(build_once)  # type: ignore[method-assign, assignment]
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)


def run_recipe(cfgs: list[Any], name: str = "full_finetune_distributed") -> None:
    """Run a recipe on this rank once per config, all in the rank's process group."""
    from torchtune_cp import config
    from torchtune_cp.config import to_typed

    os.environ["TUNE_ALLOW_COMPONENTS"] = "tests"
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    recipe = importlib.import_module(name)
    schema = {"esm2_mlm_distributed": config.MaskedLMConfig}.get(name, config.FullFinetuneConfig)
    _keep_group_and_meshes()
    for cfg in cfgs:
        recipe.main.__wrapped__(to_typed(cfg, schema))

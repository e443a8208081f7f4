"""A small ESM-2 of transformers, proteins of awkward lengths, and a plain loop over them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.distributed.fixtures import Samples, recipe_config
from torchtune_cp.data import esm_tokenizer, mlm_masking

LENGTHS = (41, 7, 130, 8, 3, 64)


def save_esm2(folder: Path) -> None:
    """Write a random 2-layer ESM-2 (dim 32, 4 heads, fp32) with weights large enough to matter."""
    from transformers import EsmConfig, EsmForMaskedLM  # slow to import: not on the ranks

    torch.manual_seed(0)
    config = EsmConfig(
        vocab_size=33,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        mask_token_id=32,
        pad_token_id=1,
        position_embedding_type="rotary",
        token_dropout=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        emb_layer_norm_before=False,
        layer_norm_eps=1e-5,
        initializer_range=0.2,
    )
    EsmForMaskedLM(config).save_pretrained(folder)


def proteins(tokenizer: Any = None) -> Samples:
    """Six random proteins whose lengths no mesh divides."""
    g = torch.Generator().manual_seed(1)
    samples = []
    for length in LENGTHS:
        residues = torch.randint(4, 24, (length - 2,), generator=g).tolist()
        samples.append({"tokens": [0, *residues, 2]})
    return Samples([{**s, "labels": s["tokens"]} for s in samples])


def reference_step(folder: Path, lr: float, epoch: int = 0) -> dict[str, Any]:
    """One SGD step of transformers' model on each protein by itself, no padding, no packing."""
    from transformers import EsmForMaskedLM

    model = EsmForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    masking = mlm_masking(esm_tokenizer(), seed=0)
    masked = [
        masking(sample["tokens"], sample_id=i, epoch=epoch)
        for i, sample in enumerate(proteins().samples)
    ]
    count = sum(int((labels != -100).sum()) for _, labels in masked)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    total, right = 0.0, 0
    for tokens, labels in masked:
        ids, wanted = torch.from_numpy(tokens)[None], torch.from_numpy(labels)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        loss = F.cross_entropy(logits, wanted, reduction="sum", ignore_index=-100) / count
        loss.backward()
        total += loss.item()
        right += int(((logits.argmax(-1) == wanted) & (wanted != -100)).sum())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    after = {name: p - lr * gradients[name] for name, p in before.items() if name in gradients}
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    return {
        "loss": total,
        "grad_norm": norm,
        "tokens": count,
        "accuracy": right / count,
        "before": before,
        "after": after,
    }


def esm2_config(folder: Path | None, output_dir: Path, **overrides: Any) -> Any:
    """The config of a one-step SGD run on the fixture, with ``overrides`` on top."""
    return recipe_config(
        folder,
        output_dir,
        **{
            "tokenizer": {"_component_": "torchtune_cp.data.esm_tokenizer"},
            "dataset": {"_component_": "tests.distributed.esm2_fixtures.proteins"},
            **overrides,
        },
    )

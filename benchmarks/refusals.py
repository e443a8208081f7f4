"""The refused combinations of options, as docs/composability.md lists them.

Each line is made by the rules themselves (`torchtune_cp.config.combinations`) from an example that
breaks one; a test sees to it that no rule is without an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_cp.config.combinations import (
    combination_problems,
    degrees_problem,
    tensor_parallel_problems,
)

#: One example for every sentence that a rule can say.
EXAMPLES: tuple[Mapping[str, Any], ...] = (
    {"sequence_format": "thd", "collate_fn": "torchtune_cp.data.collate.other"},
    {"sequence_format": "thd", "enable_fp8_training": True},
    {"sequence_format": "thd", "attention_head_chunks": 2},
    {"sequence_format": "thd", "tensor_parallel_dim": 2},
    {"sequence_format": "bshd", "token_micro_batch_size": 4096},
    {"sequence_format": "thd", "token_micro_batch_size": 4096, "batch_size": 2},
    {"data_parallel": "ddp", "fsdp_cpu_offload": True},
    {"data_parallel": "ddp", "custom_sharded_layers": ["output"]},
    {"data_parallel": "ddp", "data_parallel_shard_dim": 2},
    {"sequence_format": "thd", "dataset": {"packed": True}},
    {"dataset_val": {"streaming": True}},
    {"dataset": {"streaming": True}, "max_steps_per_epoch": 10},
    {
        "sequence_format": "thd",
        "dataset": [{"streaming": True}, {"streaming": False}],
        "max_steps_per_epoch": 10,
    },
    {"sequence_format": "thd", "dataset": {"streaming": True}, "max_steps_per_epoch": None},
    {
        "sequence_format": "thd",
        "dataset": {"streaming": True},
        "max_steps_per_epoch": 10,
        "num_workers": 2,
    },
    {"run_val_every_n_steps": 5, "dataset_val": None},
    {"keep_best": True, "run_val_every_n_steps": None},
    {"loss": {"ignore_index": -1}},
    {"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": 2},
    {"ac_mode": "selective", "ac_option": None},
    {"ac_mode": "selective", "ac_option": "attention"},
    {
        "ac_mode": "selective",
        "ac_option": "op_kv",
        "context_parallel_rotate_method": "alltoall",
    },
    {"ac_mode": "selective", "ac_option": "op_kv", "compile": True},
    {"context_parallel_ulysses_dim": 2, "context_parallel_method": "ring"},
    {
        "context_parallel_ulysses_dim": 2,
        "context_parallel_method": "ulysses",
        "context_parallel_dim": 3,
    },
    {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2},
    {"optimizer_in_bwd": True, "clip_grad_norm": 1.0},
    {"optimizer_in_bwd": True, "on_nonfinite": "skip"},
    {"optimizer_in_bwd": True, "optimizer_on_host": True},
    {"optimizer_on_host": True, "gradient_accumulation_steps": 2},
    {"optimizer_on_host": True, "clip_grad_norm": 1.0},
    {"optimizer_on_host": True, "on_nonfinite": "skip"},
    {"mlp_tile_tokens": 4096, "custom_sharded_layers": ["layers.0.mlp"]},
    {"attention_head_chunks": 2, "tensor_parallel_dim": 2},
    {"attention_head_chunks": 2, "enable_fp8_training": True},
    {"attention_head_chunks": 2, "ac_mode": "selective", "ac_option": "op"},
    {"attention_head_chunks": 2, "custom_sharded_layers": ["layers.0.attn"]},
    {"enable_fp8_training": True, "tensor_parallel_dim": 2, "compile": True},
    {"tensor_parallel_dim": 2, "compile": True, "ac_mode": "selective", "ac_option": "op"},
    {
        "tensor_parallel_dim": 2,
        "context_parallel_dim": 2,
        "compile": True,
        "enable_activation_checkpointing": True,
    },
    {
        "enable_fp8_training": True,
        "fp8_recipe_name": "rowwise",
        "device": "cuda",
        "dtype": "fp32",
    },
)

#: A run of the wrong size, and a model that cannot be cut: they depend on more than the config.
_DEGREES = {
    "data_parallel_replicate_dim": 1,
    "data_parallel_shard_dim": 2,
    "context_parallel_dim": 2,
    "tensor_parallel_dim": 1,
}
_SIZES = {"num_heads": 32, "num_kv_heads": 2, "intermediate_dim": 4096, "vocab_size": 32000}


def _spelt(values: Mapping[str, Any], prefix: str = "") -> str:
    parts = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            parts.append(_spelt(value, f"{prefix}{key}."))
        else:
            spelt = {"True": "true", "False": "false", "None": "null"}.get(str(value), value)
            parts.append(f"`{prefix}{key}: {spelt}`")
    return ", ".join(parts)


def refusals() -> list[tuple[str, str]]:
    """What is refused: an example, and what the rules say about it."""
    lines = []
    for values in EXAMPLES:
        problems = combination_problems(values)
        if problems:
            lines.append((_spelt(values), "; ".join(problems)))
    eight = degrees_problem(_DEGREES, 8)
    assert eight is not None
    lines.append(("a product of degrees that is not the number of processes", eight))
    (heads,) = tensor_parallel_problems(_SIZES, 4)
    lines.append(("`tensor_parallel_dim: 4`, a model with 2 KV heads", heads))
    return lines


def render_refusals() -> str:
    """Lay out the refused combinations as Markdown."""
    lines = ["| together | refused with |", "| --- | --- |"]
    lines += [
        f"| {example} | {problems.replace('|', chr(92) + '|')} |"
        for example, problems in refusals()
    ]
    return "\n".join([*lines, ""])

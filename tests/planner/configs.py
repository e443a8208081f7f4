"""The small config that the planner's tests vary."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

SEQ_LEN = 1024

FULL = {"enable_activation_checkpointing": True}
BY_OP = {"ac_mode": "selective", "ac_option": "op"}
OFFLOAD = {"enable_activation_offloading": True}

_BASE = {
    "output_dir": "/nowhere",
    "device": "cpu",
    "dtype": "bf16",
    "model": {
        "_component_": "torchtune_cp.models.llama3.llama3",
        "vocab_size": 512,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "embed_dim": 128,
        "intermediate_dim": 384,
        "max_seq_len": SEQ_LEN,
    },
    "checkpointer": {"_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer"},
    "tokenizer": {"_component_": "torchtune_cp.data.byte_tokenizer"},
    "dataset": {"_component_": "torchtune_cp.datasets.text_folder_dataset", "path": None},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "fused": True},
}


def small_config(**overrides: Any) -> Any:
    """A decoder of four narrow layers on the CPU, with overrides merged in."""
    return OmegaConf.merge(OmegaConf.create(_BASE), OmegaConf.create(overrides))

"""A small config and the options with which predictions are compared with real steps."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

SEQ_LEN = 1024

FULL = {"enable_activation_checkpointing": True}
BY_OP = {"ac_mode": "selective", "ac_option": "op"}
OFFLOAD = {"enable_activation_offloading": True}
TILES = {"mlp_tile_tokens": 64}
CHUNKS = {"attention_head_chunks": 2}
PACKED = {"dataset": {"packed": True}}
ALL_ON_HOST = {"fsdp_cpu_offload": True, "optimizer_on_host": True}
REUSE = {
    "loss": {
        "_component_": "torchtune_cp.training.loss.LinearCrossEntropyLoss",
        "reuse_hidden": True,
    }
}
#: The loss is the peak then, as it is in a long sequence with a large vocabulary.
ONE_LOSS_CHUNK = {
    "loss": {
        "_component_": "torchtune_cp.training.loss.LinearCrossEntropyLoss",
        "num_output_chunks": 1,
        "max_chunk_tokens": 4096,
    }
}

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


#: Options on two ranks and on four; the first of each are in the default suite.
TWO = {
    "cp2_full_offload": {"context_parallel_dim": 2} | FULL | OFFLOAD,
    "cp2_op_accumulate": {"context_parallel_dim": 2, "gradient_accumulation_steps": 2} | BY_OP,
}
FOUR = {
    "hsdp_cp2_clip": {
        "context_parallel_dim": 2,
        "data_parallel_replicate_dim": 2,
        "clip_grad_norm": 1.0,
    },
    "tp2_cp2": {"context_parallel_dim": 2, "tensor_parallel_dim": 2},
}
MORE_OF_TWO = {
    "cp2_in_backward_fp32": {"context_parallel_dim": 2, "optimizer_in_bwd": True, "dtype": "fp32"},
    "cp1": {"context_parallel_dim": 1},
    "cp2": {"context_parallel_dim": 2},
    "cp2_full": {"context_parallel_dim": 2} | FULL,
    "cp2_every_second": {"context_parallel_dim": 2, "ac_mode": "selective", "ac_option": "2"},
    "cp2_op_kv": {"context_parallel_dim": 2, "ac_mode": "selective", "ac_option": "op_kv"},
    "cp2_offload_alltoall": {
        "context_parallel_dim": 2,
        "context_parallel_rotate_method": "alltoall",
    }
    | OFFLOAD,
    "cp2_alltoall": {"context_parallel_dim": 2, "context_parallel_rotate_method": "alltoall"},
    "cp2_tiles_ulysses": {"context_parallel_dim": 2, "context_parallel_method": "ulysses"}
    | FULL
    | TILES,
    "cp2_kv_allgather": {"context_parallel_dim": 2, "context_parallel_method": "allgather"} | FULL,
    "cp2_ulysses": {"context_parallel_dim": 2, "context_parallel_method": "ulysses"} | BY_OP,
    "cp2_packed": {"context_parallel_dim": 2} | FULL | PACKED,
    "cp1_packed": {"context_parallel_dim": 1} | BY_OP | PACKED,
    "cp2_own_groups": {
        "context_parallel_dim": 2,
        "custom_sharded_layers": ["tok_embeddings", "output", "layers.1.mlp"],
    }
    | FULL,
    "cp2_kept_gathered": {"context_parallel_dim": 2, "fsdp_reshard_after_forward": False} | FULL,
    "cp2_float8": {
        "context_parallel_dim": 2,
        "enable_fp8_training": True,
        "fp8_emulate": True,
    }
    | FULL,
    "cp2_tiles": {"context_parallel_dim": 2} | FULL | TILES,
    "cp2_tiles_kept": {"context_parallel_dim": 2} | TILES,
    "cp2_tiles_chunks": {"context_parallel_dim": 2} | FULL | TILES | CHUNKS,
    "cp2_tiles_chunks_alltoall": {
        "context_parallel_dim": 2,
        "context_parallel_rotate_method": "alltoall",
    }
    | FULL
    | TILES
    | CHUNKS,
    "cp2_tiles_chunks_ulysses": {"context_parallel_dim": 2, "context_parallel_method": "ulysses"}
    | FULL
    | TILES
    | CHUNKS,
    "cp2_full_host_optimizer": {"context_parallel_dim": 2, "optimizer_on_host": True} | FULL,
    "cp2_full_shards_on_host": {"context_parallel_dim": 2, "fsdp_cpu_offload": True} | FULL,
    "cp2_full_all_on_host": {"context_parallel_dim": 2} | FULL | ALL_ON_HOST,
    "cp2_one_loss_chunk": {"context_parallel_dim": 2, "batch_size": 4}
    | FULL
    | TILES
    | CHUNKS
    | ONE_LOSS_CHUNK,
    "cp2_one_loss_chunk_reuse": {"context_parallel_dim": 2, "batch_size": 4}
    | FULL
    | TILES
    | CHUNKS
    | {"loss": ONE_LOSS_CHUNK["loss"] | REUSE["loss"]},
    "cp2_all_levers": {"context_parallel_dim": 2, "optimizer_in_bwd": True}
    | FULL
    | OFFLOAD
    | TILES
    | CHUNKS
    | REUSE,
    "cp2_plain_adamw": {"context_parallel_dim": 2, "optimizer": {"fused": False}} | FULL,
}
MORE_OF_FOUR = {
    "cp4_full": {"context_parallel_dim": 4} | FULL,
    "dp2_cp2": {"context_parallel_dim": 2},
    "dp2_cp2_full_offload": {"context_parallel_dim": 2, "batch_size": 2} | FULL | OFFLOAD,
    "cp4_rings_of_ulysses": {
        "context_parallel_dim": 4,
        "context_parallel_method": "ulysses",
        "context_parallel_ulysses_dim": 2,
        "context_parallel_rotate_method": "alltoall",
    }
    | FULL,
    "hsdp_cp2_in_backward": {
        "context_parallel_dim": 2,
        "data_parallel_replicate_dim": 2,
        "optimizer_in_bwd": True,
    },
    "hsdp_cp2_full": {"context_parallel_dim": 2, "data_parallel_replicate_dim": 2} | FULL,
    "hsdp_cp2_full_all_on_host": {
        "context_parallel_dim": 2,
        "data_parallel_replicate_dim": 2,
    }
    | FULL
    | ALL_ON_HOST,
}

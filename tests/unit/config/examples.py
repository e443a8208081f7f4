"""Configs that several tests start from."""

from pathlib import Path
from typing import Any

import yaml

#: A config as torchtune's users have it: torchtune's names and keys only, everything spelt out.
TORCHTUNE_STYLE = """\
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/model/tokenizer.json
  max_seq_len: null
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: False
seed: null
shuffle: True
model:
  _component_: torchtune.models.llama3.llama3_8b
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/model
  checkpoint_files:
    filename_format: model-{}-of-{}.safetensors
    max_filename: "00004"
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
batch_size: 2
epochs: 3
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
  fused: True
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: null
gradient_accumulation_steps: 1
optimizer_in_bwd: False
clip_grad_norm: null
compile: False
tensor_parallel_dim: 1
tensor_parallel_plan: null
data_parallel_shard_dim: -1
data_parallel_replicate_dim: 1
context_parallel_dim: 1
device: cuda
enable_activation_checkpointing: True
enable_activation_offloading: False
custom_sharded_layers: ['tok_embeddings', 'output']
fsdp_cpu_offload: False
dtype: bf16
enable_fp8_training: False
fp8_recipe_name: tensorwise
cudnn_deterministic_mode: null
collate_fn: torchtune.data.padded_collate_sft
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
output_dir: /tmp/torchtune/out
log_every_n_steps: 1
log_peak_memory_stats: True
log_level: INFO
run_val_every_n_steps: null
save_every_n_steps: null
enable_async_checkpointing: False
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
  output_dir: ${output_dir}/profiling_outputs
  cpu: True
  cuda: True
  profile_memory: False
  with_stack: False
  record_shapes: True
  with_flops: False
  wait_steps: 5
  warmup_steps: 3
  active_steps: 2
  num_cycles: 1
"""


def minimal() -> dict[str, Any]:
    """Return the keys without a default, and nothing else."""
    return {
        "output_dir": "/tmp/out",
        "model": {"_component_": "torchtune_cp.models.llama3.llama3_8b"},
        "tokenizer": {"_component_": "torchtune_cp.data.byte_tokenizer"},
        "checkpointer": {"_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer"},
        "dataset": {"_component_": "torchtune_cp.datasets.text_folder_dataset"},
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    }


def write(path: Path, config: dict[str, Any]) -> Path:
    """Write a config and return its path."""
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path

"""The recipe through the real command line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.forked import forked_tune
from tests.wandb_records import items, wandb_records
from torchtune_cp.metrics import read_metrics

ROOT = Path(__file__).parents[2]

#: A small config under the name of the mission's command, with torchtune's component names.
LLAMA3_8B_FULL = """
output_dir: {out}
tokenizer:
  _component_: torchtune_cp.data.byte_tokenizer
  max_seq_len: 128
dataset:
  _component_: torchtune_cp.datasets.text_folder_dataset
  glob: abc.py
seed: 0
shuffle: True
model:
  _component_: torchtune.models.llama3.llama3
  vocab_size: 272
  num_layers: 1
  num_heads: 4
  num_kv_heads: 2
  embed_dim: 32
  max_seq_len: 128
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: null
  output_dir: ${{output_dir}}
  model_type: LLAMA3
resume_from_checkpoint: False
batch_size: 1
epochs: 1
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-3
  fused: True
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
max_steps_per_epoch: 3
gradient_accumulation_steps: 1
clip_grad_norm: null
compile: False
device: cpu
enable_activation_checkpointing: True
enable_activation_offloading: False
fsdp_cpu_offload: False
dtype: fp32
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
"""

#: The mission's command, word for word.
COMMAND = """
tune run --nproc_per_node 8 full_finetune_distributed --config llama3/8B_full \
    context_parallel_dim=4 \
    metric_logger=torchtune.training.metric_logging.WandBLogger \
    metric_logger.project=context-parallel metric_logger.name=llama3-8b-cp4-dp2
"""


@pytest.mark.distributed
def test_the_missions_command_runs_word_for_word_and_logs_to_wandb(tmp_path):
    (tmp_path / "llama3").mkdir()
    out = tmp_path / "out"
    (tmp_path / "llama3" / "8B_full.yaml").write_text(LLAMA3_8B_FULL.format(out=out))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    tune, *argv = shlex.split(COMMAND)
    assert tune == "tune"
    done = forked_tune(argv, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["context_parallel_dim"] == 4
    (log,) = (out / "logs").glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(log)
    run = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("context-parallel", "llama3-8b-cp4-dp2")
    history = [items(r.history.item) for r in records if r.WhichOneof("record_type") == "history"]
    logged = [row for row in history if "loss" in row]
    for key in ("loss", "lr", "grad_norm", "tokens_per_second"):
        assert [row[key] for row in logged] == pytest.approx([line[key] for line in lines]), key
    assert all(row["peak_memory_resident"] > 0 for row in logged)
    assert {path.name for path in (out / "final").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    # Eight ranks, one voice.
    assert done.stderr.count("step 3/3") == 1


@pytest.mark.distributed
def test_a_dataset_that_raises_on_one_rank_ends_all_with_its_error(tmp_path):
    config = yaml.safe_load(LLAMA3_8B_FULL.format(out=tmp_path / "out"))
    config["dataset"] = {"_component_": "tests.distributed.fixtures.raises_on_rank_one"}
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(config))
    command = (
        "run --nproc_per_node 4 full_finetune_distributed --config broken.yaml"
        " context_parallel_dim=2"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torchtune_cp", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "TUNE_ALLOW_COMPONENTS": "tests", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "sample 2 cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "final").exists()


def test_the_same_seed_and_mesh_give_the_same_numbers(tmp_path):
    runs = []
    for name in ("a", "b"):
        command = "run full_finetune_distributed --config tiny/llama_cpu max_steps_per_epoch=3"
        done = forked_tune([*command.split(), f"output_dir={tmp_path / name}"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        runs.append([(x.get("loss"), x.get("grad_norm"), x.get("val_loss")) for x in lines])
    assert runs[0] == runs[1]

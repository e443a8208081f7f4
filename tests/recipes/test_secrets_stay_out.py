"""Planted secrets are looked for in everything that a run writes and says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.forked import forked_tune

ROOT = Path(__file__).parents[2]
PLANTED = {
    "environment": "hf_PlantedInTheEnvironment123",
    "wandb key": "0123456789abcdef0123456789abcdef01234567",
    "config": "planted-in-the-config",
    "command line": "planted-on-the-command-line",
    "url": "planted-in-a-url",
}
#: Variables whose names say nothing, put in through ${oc.env:...}.
INNOCENT = {
    "OPENAI_KEY": "planted-by-openai",
    "GITHUB_PAT": "planted-by-github",
    "PGPASSWORD": "planted-by-postgres",
    "MY_THING": "planted+of/my%own\\'",
    "MY_PIN": "73519284",
}
PLANTED |= INNOCENT
COMMAND = [
    *("run", "full_finetune_distributed", "--config", "tiny/llama_cpu"),
    *(
        "max_steps_per_epoch=2",
        "dataset_val=null",
        "run_val_every_n_steps=null",
        "save_every_n_steps=1",
    ),
    "metric_logger=torchtune_cp.metrics.WandBLogger",
    f"metric_logger.notes=data from https://user:{PLANTED['url']}@host/x",
    f"hf_token={PLANTED['command line']}",  # a key of the user's own, for it is referred to
    "metric_logger.tags=['${hf_token}']",
    f"api_key={PLANTED['config']}",
    "metric_logger.job_type=${api_key}",
    "metric_logger.name=${oc.env:OPENAI_KEY}",
    "metric_logger.group=of-${oc.env:GITHUB_PAT}",
    "metric_logger.config={thing: '${mine.thing}', pin: '${oc.decode:${oc.env:MY_PIN}}', x: [1]}",
    "mine={thing: '${oc.env:MY_THING}', both: '${oc.env:HOME}/${oc.env:PGPASSWORD}'}",
    "metric_logger.config.both=${mine.both}",
]


def _tune(*argv: str, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **INNOCENT,
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": PLANTED["wandb key"],
        "HF_TOKEN": PLANTED["environment"],
        "HUGGING_FACE_HUB_TOKEN": PLANTED["environment"],
    }
    return forked_tune([*argv, f"output_dir={out}"], env=environment, cwd=out.parent)


def _found(text: bytes) -> list[str]:
    return [name for name, secret in PLANTED.items() if secret.encode() in text]


@pytest.mark.distributed
def test_no_file_and_no_line_of_a_run_holds_a_secret(tmp_path):
    done = _tune(*COMMAND, out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert _found((done.stdout + done.stderr).encode()) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {
        path.name: _found(path.read_bytes()) for path in files if _found(path.read_bytes())
    } == {}
    assert _found("\n".join(map(str, tmp_path.rglob("*"))).encode()) == []
    for path in files:
        if path.name in ("config.yaml", "checkpoint.json", "torchtune_config.yaml"):
            assert path.stat().st_mode & 0o077 == 0, path
    names = {path.name for path in files}
    assert {"config.yaml", "metrics.jsonl", "torchtune_config.yaml"} <= names
    assert any(name.endswith(".wandb") for name in names)
    assert any(path.name == "checkpoint.json" for path in files)
    config = (tmp_path / "out" / "config.yaml").read_text()
    assert "https://***@host/x" in config
    assert "${oc.env:OPENAI_KEY}" in config


@pytest.mark.parametrize("debug", ["0", "1"])
def test_no_error_line_or_traceback_holds_a_secret(tmp_path, monkeypatch, debug):
    monkeypatch.setenv("TUNE_TRACEBACK", debug)
    secret = PLANTED["command line"]
    done = _tune(
        *COMMAND,
        f"batch_size={{api_key: {secret}}}",
        f"seed=https://user:{PLANTED['url']}@host",
        f"log_every_n_steps={PLANTED['environment']}",
        out=tmp_path / "out",
    )
    assert done.returncode == 2
    assert "batch_size: expected an integer, got {'api_key': '***'}" in done.stderr
    assert ("Traceback" in done.stderr) == (debug == "1")
    assert _found((done.stdout + done.stderr).encode()) == []

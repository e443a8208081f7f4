"""What the loggers write is read back with each tool's own format; secrets never get there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests.wandb_records import items, wandb_records
from torchtune_cp.errors import UserError
from torchtune_cp.metrics import (
    DiskLogger,
    MetricsFile,
    StdoutLogger,
    TensorBoardLogger,
    WandBLogger,
)
from torchtune_cp.metrics.run_notes import RunNotes

CONFIG = OmegaConf.create(
    {
        "output_dir": "/tmp/run",
        "log_dir": "${output_dir}/logs",
        "optimizer": {"lr": 2e-5},
        "hub": {"hf_token": "hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaa", "api_key": "0123456789"},
    }
)
STEPS = [(1, 2.5, 1e-4), (2, 2.25, 2e-4), (3, 2.125, 3e-4)]


def _log_three_steps(logger) -> None:
    logger.log_config(CONFIG)
    for step, loss, lr in STEPS:
        logger.log_dict({"loss": torch.tensor(loss), "lr": lr}, step)
    logger.log("val_loss", torch.tensor([2.0]), 3)
    logger.close()


def test_stdout_logger_writes_one_line_a_step(capsys):
    _log_three_steps(StdoutLogger())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Step 1 | loss:2.5 lr:0.0001"
    assert lines[3] == "Step 3 | val_loss:2.0"
    assert len(lines) == 4


def test_disk_logger_appends_and_flushes_every_step(tmp_path):
    logger = DiskLogger(tmp_path / "logs", filename="log.txt")
    logger.log("loss", 1.5, 1)
    assert logger.path_to_log_file() == tmp_path / "logs" / "log.txt"
    assert logger.path_to_log_file().read_text() == "Step 1 | loss:1.5\n"  # before close()
    logger.close()
    _log_three_steps(DiskLogger(tmp_path / "logs", filename="log.txt"))
    lines = (tmp_path / "logs" / "log.txt").read_text().splitlines()
    assert lines[0] == "Step 1 | loss:1.5"
    assert lines[-1] == "Step 3 | val_loss:2.0"
    _check_config(yaml.safe_load((tmp_path / "logs" / "log.config.yaml").read_text()))


def test_disk_logger_writes_json_objects_on_demand(tmp_path):
    logger = DiskLogger(tmp_path, output_fmt="jsonl")
    _log_three_steps(logger)
    path = logger.path_to_log_file()
    assert path.suffix == ".jsonl"
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    assert objects == [
        *({"step": step, "loss": loss, "lr": lr} for step, loss, lr in STEPS),
        {"step": 3, "val_loss": 2.0},
    ]
    with pytest.raises(UserError, match=r"metric_logger\.output_fmt='json'; allowed: txt, jsonl"):
        DiskLogger(tmp_path, output_fmt="json")


def test_disk_logger_names_its_file_by_itself_and_says_when_it_cannot_write(tmp_path):
    logger = DiskLogger(str(tmp_path))
    logger.close()
    assert logger.path_to_log_file().name.startswith("log_")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metric_logger\.log_dir"):
        DiskLogger(tmp_path / "file" / "logs")


def _check_config(config: dict) -> None:
    assert config["log_dir"] == "/tmp/run/logs"
    assert config["optimizer"]["lr"] == 2e-5
    assert config["hub"] == {"hf_token": "***", "api_key": "***"}


def test_tensorboard_reads_every_value_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(log_dir=tmp_path, organize_logs=True)
    _log_three_steps(logger)
    (run,) = tmp_path.iterdir()
    events = EventAccumulator(str(run))
    events.Reload()
    tensors = {
        tag: [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors(tag)]
        for tag in ("loss", "lr", "val_loss")
    }
    assert tensors["loss"] == [(step, loss) for step, loss, _ in STEPS]
    assert tensors["lr"] == [(step, pytest.approx(lr)) for step, _, lr in STEPS]
    assert tensors["val_loss"] == [(3, 2.0)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    _check_config(yaml.safe_load(text))
    assert "hf_aaaa" not in text


def test_tensorboard_can_write_without_a_folder_of_its_own(tmp_path):
    TensorBoardLogger(str(tmp_path), organize_logs=False).close()
    assert any(path.name.startswith("events.out") for path in tmp_path.iterdir())


@pytest.mark.parametrize("logger", [StdoutLogger, DiskLogger, TensorBoardLogger])
def test_keys_of_other_loggers_pass_and_misspelt_ones_do_not(logger, tmp_path):
    """`metric_logger=X` on the command line keeps the sub-keys that another logger had."""
    own = {} if logger is StdoutLogger else {"log_dir": tmp_path}
    logger(**own, project="p", name="n", organize_logs=False).close()
    with pytest.raises(UserError, match=r"metric_logger\.projct .*did you mean project"):
        logger(**own, projct="p")


def test_tensorboard_continues_the_same_run_and_shows_every_step_once(tmp_path):
    # The one behind TensorBoard's pages; the older one drops nothing of new-style scalars.
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):  # it crashed after step 3
        notes = RunNotes(tmp_path, resume_step)
        logger = TensorBoardLogger(tmp_path / "logs", run_notes=notes)
        for step in steps:
            logger.log("loss", float(step), step)
        logger.close()
    (run,) = (tmp_path / "logs").iterdir()
    events = EventAccumulator(str(run))
    events.Reload()
    assert [event.step for event in events.Tensors("loss")] == [1, 2, 3, 4]
    # A new run in the same output_dir is another one.
    logger = TensorBoardLogger(tmp_path / "logs", run_notes=RunNotes(tmp_path / "other"))
    logger.close()


# --- Weights & Biases: in processes of their own, as its state is global --------------------------

_RUN_WANDB = """
import sys
from omegaconf import OmegaConf
from tests.unit.metrics.test_loggers import _log_three_steps
from torchtune_cp.metrics import WandBLogger
logger = WandBLogger(
    project="context-parallel", name="cp2", group="g", log_dir=sys.argv[1] + "/logs", filename="x"
)
_log_three_steps(logger)
"""


def _python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    root = Path(__file__).resolve().parents[3]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**cleared, "PYTHONPATH": str(root), "WANDB_SILENT": "true", **environment},
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_wandb_writes_an_offline_run_with_every_value_and_the_config(tmp_path):
    done = _python(_RUN_WANDB, str(tmp_path), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "logs" / "wandb").glob("offline-run-*")
    (log,) = run.glob("*.wandb")
    records = wandb_records(log)
    history = [items(r.history.item) for r in records if r.WhichOneof("record_type") == "history"]
    logged = [(row["global_step"], row["loss"], row["lr"]) for row in history if "loss" in row]
    assert logged == STEPS
    assert [(row["global_step"], row["val_loss"]) for row in history if "val_loss" in row] == [
        (3, 2.0)
    ]
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (runs[0].project, runs[0].display_name, runs[0].run_group) == (
        "context-parallel",
        "cp2",
        "g",
    )
    updates = [items(r.config.update) for r in records if r.WhichOneof("record_type") == "config"]
    merged = {key: value for update in updates for key, value in update.items()}
    _check_config(merged)
    _check_config(yaml.safe_load((run / "files" / "torchtune_config.yaml").read_text()))
    assert b"hf_aaaa" not in log.read_bytes()


_RESUME_WANDB = """
import sys
from torchtune_cp.metrics import WandBLogger
from torchtune_cp.metrics.run_notes import RunNotes
folder, resume_step, steps = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
notes = RunNotes(folder, resume_step)
logger = WandBLogger(project="p", log_dir=folder, run_notes=notes, **eval(sys.argv[4]))
for step in steps:
    logger.log_dict({"loss": step}, step)
logger.close()
"""


def _offline_runs(folder: Path) -> list[tuple[str, list[int]]]:
    """Run id and logged steps of each start, in order."""
    runs = []
    for log in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        records = wandb_records(log)
        history = [
            items(r.history.item) for r in records if r.WhichOneof("record_type") == "history"
        ]
        (run,) = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
        runs.append((run, [row["global_step"] for row in history if "loss" in row]))
    return runs


def test_wandb_continues_the_same_run_and_logs_no_step_twice(tmp_path):
    metrics = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": float(step)})
    metrics.write({"step": 4, "val_loss": 1.0})
    metrics.close()
    own = "dict(id='mine', resume='allow')"
    for resume_step, steps, choice in (
        ("None", "(1, 2, 3)", "{}"),
        ("2", "(3, 4)", "{}"),  # it crashed after step 3, and the checkpoint was of step 2
        ("2", "(3, 4)", own),
        ("None", "(1,)", "{}"),
    ):
        done = _python(
            _RESUME_WANDB, str(tmp_path), resume_step, steps, choice, WANDB_MODE="offline"
        )
        assert done.returncode == 0, done.stderr
    (first, logged), (second, continued), (mine, all_of_them), (other, _) = _offline_runs(tmp_path)
    assert first == second
    assert (logged, continued) == ([1, 2, 3], [4])
    assert (mine, all_of_them) == ("mine", [3, 4])  # the user's own choice of a run wins
    assert other not in (first, mine)


def test_wandb_without_a_key_ends_with_one_clear_line(tmp_path):
    code = (
        "import sys\nfrom torchtune_cp.errors import UserError\nfrom torchtune_cp.metrics import "
        "WandBLogger\ntry:\n    WandBLogger(project='p', log_dir=sys.argv[1])\nexcept UserError "
        "as error:\n    print('REFUSED', error)\n"
    )
    done = _python(code, str(tmp_path), HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert "wandb login" in line
    assert "WANDB_MODE=offline" in line


def test_wandb_disabled_logs_nothing_and_does_not_fail(tmp_path):
    done = _python(_RUN_WANDB, str(tmp_path), WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "logs").rglob("*.wandb"))


def test_wandb_refuses_a_misspelt_key_before_it_starts_a_run(tmp_path):
    with pytest.raises(UserError, match=r"metric_logger\.entitty .*did you mean entity"):
        WandBLogger(project="p", log_dir=tmp_path, entitty="e")
    assert not list(tmp_path.iterdir())


def test_a_missing_wandb_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        WandBLogger()

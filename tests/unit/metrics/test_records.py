"""The metrics file, the progress display, the timer and the memory figures."""

import io
import json
import subprocess
import sys

import pytest
import torch

from torchtune_cp.errors import UserError
from torchtune_cp.metrics import MetricsFile, Progress, StepTimer, read_metrics


def _write(folder, steps, **arguments):
    file = MetricsFile(folder, **arguments)
    for step in steps:
        file.write({"step": step, "loss": torch.tensor(2.0) / step})
    file.close()


def test_every_line_is_complete_json_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "new" / "folder")
    file.write({"step": 1, "loss": torch.tensor(1.5), "lr": 1e-3})
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.5, "lr": 1e-3}
    ]
    file.close()


def test_the_lines_carry_the_agreed_fields(tmp_path):
    file = MetricsFile(tmp_path)
    file.write_validation(step=0, val_loss=3.0, val_tokens=10)
    file.write_step(
        step=1,
        epoch=0,
        loss=2.0,
        grad_norm=torch.tensor(0.5),
        lr=1e-3,
        tokens=100,
        tokens_per_second=50.0,
        step_time_s=2.0,
        peak_memory_bytes=1 << 30,
        attention_imbalance=1.25,
    )
    file.close()
    validation, step = read_metrics(file.path)
    assert list(validation) == ["step", "val_loss", "val_tokens"]
    assert list(step) == [
        *("step", "epoch", "loss", "grad_norm", "lr", "tokens"),
        *("tokens_per_second", "step_time_s", "peak_memory_bytes", "attention_imbalance"),
    ]


def test_nan_and_infinity_are_null_so_that_every_json_reader_takes_the_line(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"step": 1, "loss": float("nan"), "grad_norm": torch.tensor(float("inf"))})
    file.close()
    line = file.path.read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


def test_a_new_run_starts_the_file_anew_and_a_resumed_one_keeps_what_came_before(tmp_path):
    _write(tmp_path, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn by a crash
    _write(tmp_path, [4, 5], resume_step=3)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    _write(tmp_path, [1])
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_output_dir_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output_dir"):
        MetricsFile(tmp_path / "file")


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_progress_is_whole_lines_with_loss_rate_and_time_left():
    out, clock = io.StringIO(), _Clock()
    progress = Progress(4, stream=out, clock=clock)
    for step in (1, 2, 3, 4):
        clock.now += 45
        progress.update(step, 2.5 - step / 8, 1234.5)
    progress.note("saved")
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[1] == "step 2/4  loss 2.2500  1,234 tokens/s  elapsed 1:30  left 1:30"
    assert lines[3].endswith("left 0:00")
    assert lines[4] == "saved"
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_progress_of_a_resumed_run_estimates_from_its_own_steps_and_skips_lines_as_told():
    out, clock = io.StringIO(), _Clock()
    progress = Progress(100, stream=out, initial=90, every=5, clock=clock)
    for step in range(91, 101):
        clock.now += 60
        progress.update(step, 1.0, 10.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 95/100")
    assert lines[0].endswith("left 5:00")


def test_on_a_terminal_progress_is_one_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress(2, stream=out)
    progress.update(1, 2.5, 1000.0)
    progress.update(2, 2.25, 1000.0)
    progress.close()
    assert "\r" in out.getvalue()
    assert "loss 2.2500, 1,000 tokens/s" in out.getvalue()
    assert "2/2" in out.getvalue()


def test_other_ranks_print_nothing(capsys):
    progress = Progress(2, enabled=False)
    progress.update(1, 2.5, 1000.0)
    progress.note("saved")
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_the_timer_counts_only_between_start_and_stop():
    clock = _Clock()
    timer = StepTimer(clock=clock)
    for pause, seconds in ((100, 2), (7, 4)):
        clock.now += pause
        timer.start()
        clock.now += seconds
        assert timer.stop() == seconds


def test_peak_memory_on_the_cpu_is_the_resident_set_and_grows_with_use():
    # In a process of its own: the peak of this one may have been reached by any other test.
    code = (
        "import torch\n"
        "from torchtune_cp.metrics import memory_stats, peak_memory_bytes\n"
        "before = peak_memory_bytes('cpu')\n"
        "held = torch.ones(before // 4)\n"
        "after = peak_memory_bytes(torch.device('cpu'))\n"
        "assert 1.5 * before < after < 3 * before, (before, after)\n"
        "assert memory_stats('cpu') == {'peak_memory_resident': peak_memory_bytes('cpu')}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

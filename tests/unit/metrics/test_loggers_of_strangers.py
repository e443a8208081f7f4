"""A logger of a stranger's config writes into its folder only, and sends a user's key nowhere."""

from pathlib import Path

import pytest

from torchtune_cp.cli.main import main
from torchtune_cp.errors import UserError
from torchtune_cp.metrics import DiskLogger, WandBLogger

WANDB = "metric_logger={_component_: torchtune_cp.metrics.WandBLogger, settings: %s}"


@pytest.mark.parametrize(
    "settings",
    [
        "{base_url: x}",
        "{BASE_URL: x}",
        "{api_key: x}",
        "{https_proxy: x}",
        "{identity_token_file: x}",
        "{x_executable: x}",
        "{root_dir: /}",
        "{quiet: true, host: {base_url: x}}",
        "[base_url, x]",
        '\'{"base_url": "x"}\'',
    ],
)
def test_settings_that_send_read_or_run_are_refused_before_the_start(
    settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "tiny/llama_cpu", WANDB % settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: metric_logger.settings")


def test_harmless_settings_and_those_of_ones_own_code_pass(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    assert main(["validate", "tiny/llama_cpu", WANDB % "{quiet: true, init_timeout: 5}"]) == 0
    for settings in ({"quiet": True}, wandb.Settings(base_url="http://127.0.0.1:9")):
        WandBLogger(settings=settings, mode="disabled", log_dir=tmp_path).close()
    with pytest.raises(
        UserError, match=r"metric_logger.settings.base_url: a config does not choose"
    ):
        WandBLogger(settings={"base_url": "http://127.0.0.1:9"}, mode="disabled")


@pytest.mark.parametrize("name", ["../x.txt", "/tmp/x.txt", "..", ".", "a/b.txt", "a\\b", " "])
def test_a_log_file_lies_in_its_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"metric_logger.filename: .* is not the name of a file"):
        DiskLogger(log_dir=tmp_path / "logs", filename=name)
    assert list(tmp_path.iterdir()) == []
    assert main(["validate", "tiny/llama_cpu", f"metric_logger.filename='{name}'"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: metric_logger.filename: ")

"""A logger of a stranger's config writes into its folder only, and sends a user's key nowhere."""

from pathlib import Path

import pytest

from torchtune_cp.cli.main import main
from torchtune_cp.config import load
from torchtune_cp.config.schema import to_typed
from torchtune_cp.errors import UserError
from torchtune_cp.metrics import DiskLogger, TensorBoardLogger, WandBLogger

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
        UserError, match=r"metric_logger.settings.base_url: it cannot be set in a config"
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


@pytest.mark.parametrize("logger", [DiskLogger, TensorBoardLogger])
def test_what_the_environment_put_in_stands_in_no_log_and_the_files_are_private(
    logger: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_THING", "planted-by-a-variable")
    monkeypatch.setenv("MY_PIN", "73519284")
    overrides = ["metric_logger.notes=x ${oc.env:MY_THING}", "seed=${oc.decode:${oc.env:MY_PIN}}"]
    used = logger(log_dir=tmp_path)
    used.log_config(to_typed(load("tiny/llama_cpu", overrides)))
    used.log("loss", 2.5, 1)
    used.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(
        planted in path.read_bytes()
        for path in files
        for planted in (b"planted-by-a-variable", b"73519284")
    )
    with_config = [path for path in files if b"${oc.env:MY_THING}" in path.read_bytes()]
    assert with_config
    assert all(path.stat().st_mode & 0o077 == 0 for path in with_config)

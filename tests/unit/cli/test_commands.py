"""``tune ls | cat | cp | validate | download``, in this process."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from torchtune_cp import __version__
from torchtune_cp.cli.main import main
from torchtune_cp.cli.recipe import SHIPPED_CONFIG_CLASSES, Recipe
from torchtune_cp.config.locate import config_names, configs_dir, recipe_names, recipes_dir


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must be refused with exit code 2; return its one line."""
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_ls_lists_every_recipe_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["RECIPE", "CONFIG"]
    assert {row.split()[-1] for row in rows} >= set(config_names())
    assert {row.split()[0] for row in rows} >= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_of_a_shipped_recipe_takes_the_configs_that_the_table_says(
    name: str, tmp_path: Path
) -> None:
    shipped = Recipe(recipes_dir() / f"{name}.py")
    copy = Recipe(tmp_path / f"{name}.py")
    copy.path.write_text(shipped.path.read_text())
    assert copy.config_class() is SHIPPED_CONFIG_CLASSES[name] is shipped.config_class()


def test_cat_prints_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["cat", "llama3/8B_full"]) == 0
    assert capsys.readouterr().out == (configs_dir() / "llama3/8B_full.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    mine.write_text("a: 1\n")
    assert main(["cat", str(mine)]) == 0
    assert capsys.readouterr().out == "a: 1\n"


def test_cat_of_a_recipe_or_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a recipe" in refused(capsys, "cat", "full_finetune_distributed")
    assert "did you mean llama3/8B_full?" in refused(capsys, "cat", "llama3/8b_ful")


def test_cp_copies_recipes_and_configs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = (recipes_dir() / "full_finetune_distributed.py").read_text()
    assert main(["cp", "full_finetune_distributed", "."]) == 0
    assert "Copied file to" in capsys.readouterr().out
    assert (tmp_path / "full_finetune_distributed.py").read_text() == recipe
    assert main(["cp", "tiny/llama_cpu", "mine"]) == 0
    assert (tmp_path / "mine.yaml").read_text() == (
        configs_dir() / "tiny/llama_cpu.yaml"
    ).read_text()
    assert main(["cp", "tiny/llama_cpu", "v1.2"]) == 0
    assert (tmp_path / "v1.2.yaml").is_file()


def test_cp_overwrites_unless_told_not_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("kept: 1\n")
    assert main(["cp", "tiny/llama_cpu", str(mine), "--no-clobber"]) == 0
    assert "not overwriting" in capsys.readouterr().out
    assert main(["cp", "-n", "tiny/llama_cpu", str(mine)]) == 0
    assert mine.read_text() == "kept: 1\n"
    assert main(["cp", "tiny/llama_cpu", str(mine)]) == 0
    assert mine.read_text() != "kept: 1\n"


def test_cp_makes_folders_only_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "a" / "b" / "mine.yaml"
    assert "--make-parents" in refused(capsys, "cp", "tiny/llama_cpu", str(target))
    assert not target.parent.exists()
    assert main(["cp", "tiny/llama_cpu", str(target), "--make-parents"]) == 0
    assert target.is_file()


def test_cp_of_a_misspelt_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "cp", "full_finetune_distribute", ".")
    assert "did you mean full_finetune_distributed?" in line


def test_validate_accepts_what_is_right_with_its_overrides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["validate", "tiny/llama_cpu"]) == 0
    assert "well-formed" in capsys.readouterr().out
    assert main(["validate", "tiny/llama_cpu", "--batch_size", "3", "~lr_scheduler"]) == 0


def test_validate_prints_each_problem_on_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        (configs_dir() / "tiny/llama_cpu.yaml").read_text() + "context_paralel_dim: 2\nepohcs: 3\n"
    )
    assert main(["validate", str(path), "batch_size=0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: context_paralel_dim: unknown key; did you mean context_parallel_dim?",
        "error: epohcs: unknown key; did you mean epochs?",
        "error: batch_size: must be at least 1, got 0",
    ]
    line = refused(capsys, "validate", "tiny/llama_cpu", "optimizer.lrr=1")
    assert "did you mean lr?" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["no_such_command"],
        ["ls", "extra"],
        ["cp", "one_argument"],
        ["cp", "tiny/llama_cpu", "x", "--no-such-option"],
        ["--log-level", "CHATTY", "ls"],
    ],
)
def test_a_bad_command_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert "--help" in refused(capsys, *argv)


def test_tune_alone_prints_its_help_as_torchtune_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "validate" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert "--nproc_per_node" in text
    assert "--config" in text


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_traceback_is_shown_only_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    command = ["validate", "nowhere"]
    assert main(command) == 2
    assert "Traceback" not in capsys.readouterr().err
    if how == "variable":
        monkeypatch.setenv("TUNE_TRACEBACK", "1")
    assert main((["--log-level", "DEBUG"] if how == "option" else []) + command) == 2
    assert "Traceback" in capsys.readouterr().err


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a snapshot needs: one repository of small files."""

    files: ClassVar = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"pickle",
    }
    commit = "a" * 40

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith(("/api/models/me/gone", "/me/gone")):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/me/gated"):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": "b" * 40}
                for n, c in self.files.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/me/model"):
            info = {
                "id": "me/model",
                "sha": self.commit,
                "siblings": [{"rfilename": name} for name in self.files],
            }
            self._answer(200, json.dumps(info).encode())
        elif name in self.files:
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": self.commit}
            self._answer(200, self.files[name], headers)
        else:
            self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    _use_hub(monkeypatch, url, tmp_path)
    yield url
    server.shutdown()


def _use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)


def test_download_fetches_the_model_without_duplicate_weights(
    hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    assert main(["download", "me/model", "--output-dir", str(target)]) == 0, capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert not (target / "pytorch_model.bin").exists()
    assert str(target / "config.json") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("repo", "said"), [("me/gone", "no repository"), ("me/gated", "--hf-token")]
)
def test_download_says_why_the_hub_refuses(
    hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], repo: str, said: str
) -> None:
    assert main(["download", repo, "--output-dir", str(tmp_path / "x")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_download_without_a_network_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    assert main(["download", "me/model", "--output-dir", str(tmp_path / "x")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot download me/model from http://127.0.0.1:9")

"""Sizes that cannot be, YAML of the wrong kind, models that lie: one line with exit code 2, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from torchtune_cp.cli import run
from torchtune_cp.cli.main import main
from torchtune_cp.config.locate import find_config

TINY = find_config("tiny/llama_cpu").read_text()
RUN = ("run", "full_finetune_distributed", "--config")


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(run, "launch", launch)
    monkeypatch.setenv("TUNE_TRACEBACK", "0")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that both commands end with."""
    said = []
    for command in (("validate",), RUN):
        assert main([*command, *argv]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == ""
        assert line.startswith("error: ")
        assert line.isprintable()
        said.append(line)
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num_layers: 2", "num_layers: 1e30", "model.num_layers: expected an integer"),
        ("num_layers: 2", f"num_layers: {10**9}", "num_layers"),
        ("num_layers: 2", f"num_layers: {'9' * 5000}", "a number has more than 100 digits"),
        ("vocab_size: 272", f"vocab_size: {10**18}", "vocab_size"),
        ("max_seq_len: 1024", f"max_seq_len: {10**15}", "model.max_seq_len"),
        ("batch_size: 2", "batch_size: 1e30", "batch_size: expected an integer"),
        ("batch_size: 2", f"batch_size: {10**30}", "batch_size: must be at most"),
        ("lr: 1e-3", "lr: .nan", "optimizer.lr"),
        ("lr: 1e-3", "lr: 1e999", "optimizer.lr"),
        ("seed: 0", "seed: !!timestamp 2001-99-99", "line 10: the tag '!!timestamp'"),
        ("seed: 0", "seed: 2001-99-99", "seed: expected an integer"),
        ("seed: 0", 'seed: !!int "abc"', "line 10: the tag '!!int'"),
        ("seed: 0", "seed: !!float x", "line 10: the tag '!!float'"),
        ("seed: 0", "seed: !!python/name:os.system", "line 10: the tag"),
        ("seed: 0", f"seed: {'[' * 900}{']' * 900}", "nested more than 50 levels"),
        ("seed: 0", f"seed: {'{a: ' * 900}1{'}' * 900}", "nested more than 50 levels"),
        ("seed: 0", 'seed: 0\n"a\\nb": 1', "a key is a word on one line"),
        ("seed: 0", "seed: 0\n? [a, b]\n: 1", "a key is a word, not a list"),
        ("seed: 0", 'seed: "\\e[2J\\a"', "seed: expected an integer"),
        ("seed: 0", "seed: &a [*a]", "line 10"),
        ("seed: 0", "seed: *nothing", "line 10"),
        ("seed: 0", "seed: ${seed}", "seed"),
    ],
)
def test_a_value_that_cannot_be_is_named_by_validate_and_run(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(TINY.replace(old, new, 1))
    assert said in refused(capsys, str(path), f"output_dir={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    hidden: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(vocab_size=272, **hidden, **heads).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**30),
        *(("num_hidden_layers", value) for value in ("2", 2.5, None, [2], {"a": 2}, True, -1, 0)),
        *(("hidden_size", value) for value in (10**12, 1e30, "big", -8, 0, [[]])),
        *(("vocab_size", value) for value in (10**12, 1e30, "big", -8, 0, float("nan"))),
        *(("rope_parameters", value) for value in (3, "x", [1], {"rope_type": 3})),
        *(("model_type", value) for value in (None, 3, ["llama"], "no_such", "x" * 5000, "a\nb")),
        *(("hidden_act", value) for value in (3, None, "no_such")),
        *(("rms_norm_eps", value) for value in ("x", [1], float("nan"))),
        *(("tie_word_embeddings", value) for value in ("yes", 3, [])),
    ],
)
def test_a_value_of_a_models_config_that_cannot_be_is_named(
    key: str, value: Any, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps({**json.loads(whole), key: value}))
    try:
        line = refused(
            capsys,
            "tiny/llama_cpu",
            f"model={{_component_: torchtune_cp.models.auto_model, checkpoint_dir: {model}}}",
        )
    finally:
        (model / "config.json").write_text(whole)
    assert f"config.json: {key}" in line

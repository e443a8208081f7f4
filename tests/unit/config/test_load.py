"""YAML files and command-line overrides."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchtune_cp.config import ConfigError, load, load_argv

from .examples import write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "config.yaml",
        {
            "output_dir": "/tmp/a",
            "logs": "${output_dir}/logs",
            "batch_size": 1,
            "lr_scheduler": {"_component_": "a.b.cosine", "num_warmup_steps": 3},
            "metric_logger": {"_component_": "a.b.DiskLogger", "log_dir": "${output_dir}"},
            "checkpointer": {"_component_": "a.Check", "checkpoint_files": ["a", "b"]},
            "empty": None,
        },
    )


@pytest.mark.parametrize(
    ("tokens", "key", "value"),
    [
        (["batch_size=2"], "batch_size", 2),
        (["--batch_size", "2"], "batch_size", 2),
        (["--batch-size=2"], "batch_size", 2),
        (["lr=2e-5"], "lr", 2e-5),
        (["lr_scheduler=None"], "lr_scheduler", None),
        (["lr_scheduler=null"], "lr_scheduler", None),
        (["checkpointer.checkpoint_files.0=x"], "checkpointer.checkpoint_files", ["x", "b"]),
        (["checkpointer.checkpoint_files[1]=x"], "checkpointer.checkpoint_files", ["a", "x"]),
        (["checkpointer.checkpoint_files.2=x"], "checkpointer.checkpoint_files", ["a", "b", "x"]),
        (["checkpointer.checkpoint_files=[x, None]"], "checkpointer.checkpoint_files", ["x", None]),
        (["empty.0=x"], "empty", ["x"]),
        (["new.sub.key=true"], "new", {"sub": {"key": True}}),
        (["output_dir=/tmp/b"], "logs", "/tmp/b/logs"),
        (["batch_size=${oc.decode:'3'}"], "batch_size", 3),
        (["text=a=b"], "text", "a=b"),
        (["split=train[:5%]"], "split", "train[:5%]"),
        (["batch_size=2", "batch_size=3"], "batch_size", 3),
    ],
)
def test_an_override_sets_the_value_that_yaml_would_give(
    file: Path, tokens: list[str], key: str, value: object
) -> None:
    got = OmegaConf.select(load(file, tokens), key)
    assert (OmegaConf.to_container(got) if OmegaConf.is_config(got) else got) == value


def test_a_dotted_path_replaces_a_component_and_keeps_its_other_keys(file: Path) -> None:
    cfg = load(file, ["metric_logger=c.d.WandBLogger", "metric_logger.project=long"])
    assert cfg.metric_logger == {
        "_component_": "c.d.WandBLogger",
        "log_dir": "/tmp/a",
        "project": "long",
    }


def test_a_component_that_the_file_lacks_can_be_named_and_given_keys(file: Path) -> None:
    cfg = load(file, ["profiler=c.d.make", "profiler.enabled=true"])
    assert cfg.profiler == {"_component_": "c.d.make", "enabled": True}


def test_a_mapping_override_merges_unless_it_names_another_component(file: Path) -> None:
    cfg = load(file, ["metric_logger={name: x}"])
    assert cfg.metric_logger == {"_component_": "a.b.DiskLogger", "log_dir": "/tmp/a", "name": "x"}
    cfg = load(file, ["metric_logger={_component_: a.b.DiskLogger, name: x}"])
    assert cfg.metric_logger == {"_component_": "a.b.DiskLogger", "log_dir": "/tmp/a", "name": "x"}
    cfg = load(file, ["metric_logger={_component_: c.d.New, name: x}"])
    assert cfg.metric_logger == {"_component_": "c.d.New", "name": "x"}


def test_tilde_removes_a_key_or_a_sub_key_or_a_list_item(file: Path) -> None:
    cfg = load(
        file, ["~lr_scheduler", "~metric_logger.log_dir", "~checkpointer.checkpoint_files.0"]
    )
    assert "lr_scheduler" not in cfg
    assert cfg.metric_logger == {"_component_": "a.b.DiskLogger"}
    assert cfg.checkpointer.checkpoint_files == ["b"]


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("~lr_schedular", "did you mean lr_scheduler?"),
        ("~checkpointer.checkpoint_files.5", "no position"),
        ("~batch_size.x", "no such key"),
        ("checkpointer.checkpoint_files.7=x", "no position in a list of 2"),
        ("checkpointer.checkpoint_files.first=x", "no position"),
        ("batch_size.x=1", "which is no mapping"),
        ("batch_size", "expected key=value"),
        ("-x", "expected key=value"),
        ("=3", "expected key=value"),
        ("--batch_size", "has no value: write batch_size=VALUE"),
        ("key=[1", "cannot be read"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(file: Path, token: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        load(file, [token])
    assert said in str(caught.value)


def test_an_option_without_value_does_not_swallow_the_next_override(file: Path) -> None:
    with pytest.raises(ConfigError, match="--batch_size has no value"):
        load(file, ["--batch_size", "epochs=2"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "line 2: not valid YAML: found duplicate key"),
        ("a: [1\n", "not valid YAML"),
        ("- 1\n", "not a list"),
        ("1: a\n", "keys are strings"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_the_word_none_in_a_file_is_null(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: None\nb: [None]\n")
    assert load(path) == {"a": None, "b": [None]}


def test_a_shipped_config_loads_by_name_and_a_misspelt_one_gets_the_nearest() -> None:
    assert load("tiny/llama_cpu").device == "cpu"
    with pytest.raises(ConfigError, match="did you mean tiny/llama_cpu"):
        load("tiny/lama_cpu")
    with pytest.raises(ConfigError, match="does not exist"):
        load("nowhere/my.yaml")


def test_a_file_is_found_from_the_current_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert load_argv(["batch_size=4", "--config", "config.yaml"]).batch_size == 4
    assert load_argv(["--config=config.yaml"]).batch_size == 1


def test_a_file_of_ones_own_wins_over_the_shipped_config_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("tiny/llama_cpu").device == "cpu"
    (tmp_path / "tiny").mkdir()
    write(tmp_path / "tiny" / "llama_cpu.yaml", {"device": "mine"})
    assert load("tiny/llama_cpu").device == "mine"


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config", "a", "--config=b"]])
def test_a_command_without_exactly_one_config_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--config"):
        load_argv(argv)

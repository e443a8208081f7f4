"""A config builds components and nothing else: which names it may use where, and what building them does."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import torchtune_cp
from torchtune_cp.cli.main import main
from torchtune_cp.config import (
    ConfigError,
    MaskedLMConfig,
    allow,
    component_callable,
    get_component,
    instantiate,
)
from torchtune_cp.config.torchtune_names import ALIASES

from .examples import minimal, write

CHECKOUT = Path(__file__).resolve().parents[3]


def _components() -> dict[str, Any]:
    return {
        path: found
        for role, sources in allow.ROLES.items()
        for source in sources
        for path, found in source.components(role)
    }


def test_no_component_writes_deletes_downloads_or_executes_when_it_is_built(tmp_path: Path) -> None:
    precious = {
        "run/metrics.jsonl": '{"step": 1}\n',
        "run/config.yaml": "seed: 1\n",
        "run/final/model.safetensors": "weights",
        "logs/old.txt": "Step 1\n",
    }
    for name, text in precious.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    caches = {"HF_HOME": "cache/hf", "TUNE_CACHE_DIR": "cache/tokens", "HOME": "home"}
    done = subprocess.run(
        [sys.executable, "-B", "-m", "tests.unit.config.walk", str(tmp_path)],
        cwd=CHECKOUT,
        env={**os.environ, **{key: str(tmp_path / folder) for key, folder in caches.items()}},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {entry["path"] for entry in report} - {""} == set(_components())

    # Data sets are kept in caches, loggers write below their own folder; wandb asks git for the commit.
    own = {"dataset": ("cache",), "metric_logger": ("logs",)}
    for entry in report:
        if entry["role"] == "control":
            assert entry["did"], "the walk does not see what it looks for"
            continue
        others = {
            did
            for did in entry["did"]
            if not any(
                did.split(" ", 1)[1].startswith(str(tmp_path / folder))
                for folder in own.get(entry["role"], ())
            )
        }
        if entry["path"] == "torchtune_cp.metrics.WandBLogger":
            others -= {"subprocess.Popen git", f"os.mkdir {CHECKOUT}"}
        assert not others, (entry["path"], others)
    for name, text in precious.items():
        assert (tmp_path / name).read_text() == text, name


def test_nothing_beside_the_components_can_be_named() -> None:
    components = set(map(id, _components().values()))
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(torchtune_cp.__path__, "torchtune_cp.")
        if not found.name.endswith("__main__") and "._recipes" not in found.name
    ]
    for name in ("torch.optim", "torch.optim.lr_scheduler", "torch.nn", "torchao.optim"):
        modules.append(importlib.import_module(name))
    modules += [importlib.import_module("transformers.optimization"), torchtune_cp]
    named = 0
    for module in modules:
        for name, found in vars(module).items():
            path = f"{module.__name__}.{name}"
            component = allow.find(path, None)
            assert component is None or id(component) in components
            named += component is not None
            assert component is None or component is found, path
            defined_here = getattr(found, "__module__", None) == module.__name__
            for inner in vars(found) if isinstance(found, type) and defined_here else ():
                assert allow.find(f"{path}.{inner}", None) is None, (path, inner)
    assert named > len(components)  # where they are listed, and where they are defined


@pytest.mark.parametrize("role", allow.ROLES)
def test_each_component_may_be_named_under_its_own_key_alone(role: str) -> None:
    own = {path: role for source in allow.ROLES[role] for path, _ in source.components(role)}
    for path, found in _components().items():
        if path in own:
            assert get_component(path, f"{role}._component_") is found
        else:
            assert allow.find(path, role) is None, path


def test_an_item_of_a_list_has_the_role_of_its_key_and_a_nested_node_has_none() -> None:
    for key in ("dataset", "dataset.0", "dataset[11]", "dataset_val", "dataset_val[0]._component_"):
        assert allow.role_of(key) == "dataset"
    for key in ("_component_", "", "model.rope", "model.attn_dropout._component_", "teacher"):
        assert allow.role_of(key) is None
    cfg = OmegaConf.create({"dataset": [{"_component_": "torchtune_cp.data.byte_tokenizer"}]})
    with pytest.raises(ConfigError, match=r"dataset takes torchtune_cp\.datasets"):
        instantiate(cfg.dataset[0])


def test_every_component_key_has_a_role() -> None:
    from torchtune_cp.config.schema import _keys

    for key in _keys(MaskedLMConfig):
        if OmegaConf.is_config(key.default) or any("DictConfig" in str(k) for k in key.accepted):
            assert (allow.role_of(key.name) is None) is (key.name == "compile"), key.name


def test_a_refusal_says_what_the_key_takes_the_nearest_first() -> None:
    with pytest.raises(ConfigError) as caught:
        get_component("torchtune_cp.data.hf_tokeniser", "tokenizer._component_")
    line = str(caught.value)
    assert line.startswith(
        "tokenizer._component_: 'torchtune_cp.data.hf_tokeniser' is refused; did"
    )
    assert (
        "did you mean torchtune_cp.data.hf_tokenizer? (tokenizer takes torchtune_cp.data." in line
    )
    for path, _ in allow.ROLES["tokenizer"][0].components("tokenizer"):
        assert path in line
    assert allow.ALLOW_VARIABLE not in line  # all that this project has is listed already
    with pytest.raises(ConfigError, match=r"did you mean torchao\.optim\.AdamW8bit\? \(optimizer"):
        get_component("torchao.optim.AdamW8bits", "optimizer._component_")


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_each_torchtune_name_is_a_component(name: str) -> None:
    assert allow.find(ALIASES[name], None) is get_component(name)


INNER = {"_component_": "torchtune_cp.durable.delete_hidden", "folder": "/x"}


@pytest.mark.parametrize(
    ("node", "where"),
    [
        (
            {"_component_": "torchtune_cp.models.llama3.llama3", "attn_dropout": INNER},
            "attn_dropout",
        ),
        ({"_component_": "torchtune_cp.models.auto_model", "checkpoint_dir": [INNER]}, "_dir.0"),
        ({"_component_": "torchtune_cp.models.auto_model", "a": {"b": [{"c": INNER}]}}, "a.b.0.c"),
        (
            {
                "_component_": "torchtune_cp.models.auto_model",
                "checkpoint_dir": {"_component_": "torchtune_cp.models.llama3.llama3_8b"},
            },
            "checkpoint_dir",
        ),
    ],
)
def test_no_component_takes_a_component(node: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instantiate(OmegaConf.create({"model": node}).model)
    (line,) = [p for p in caught.value.problems if "takes no component here" in p]
    assert line.partition(":")[0].endswith(where)
    with pytest.raises(ConfigError, match="takes no component here"):
        component_callable(
            OmegaConf.create({"collate_fn": {**node, "_component_": COLLATE}}).collate_fn
        )


COLLATE = "torchtune_cp.data.collate"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"source": "evil.py"}, "'evil.py' is a script"),
        ({"source": "/tmp/x/Loader.PY"}, "is a script"),
        ({"source": "https://host/rows.json"}, "is a URL"),
        ({"source": "a/b", "trust_remote_code": True}, "code from a download is refused"),
    ],
)
def test_a_source_that_brings_code_is_refused(arguments: dict[str, Any], said: str) -> None:
    node = {"_component_": "torchtune_cp.datasets.text_completion_dataset", **arguments}
    with pytest.raises(ConfigError, match=said):
        instantiate(OmegaConf.create({"dataset": [node]}).dataset[0], None)


#: The attacks that worked, and what each was after.
ATTACKS = {
    "tokenizer": {"_component_": "torchtune_cp.durable.delete_hidden"},
    "model": {
        **{"_component_": "torchtune_cp.models.llama3.llama3", "vocab_size": 272, "num_layers": 1},
        **{"num_heads": 1, "num_kv_heads": 1, "embed_dim": 8, "max_seq_len": 8},
    },
    "metric_logger": {"_component_": "torchtune_cp.metrics.jsonl.MetricsFile"},
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path / "x"


def _attack(key: str, victim: Path) -> Path:
    node = dict(ATTACKS[key])
    if key == "model":
        node["attn_dropout"] = {**ATTACKS["tokenizer"], "folder": str(victim)}
    else:
        node["output_dir" if key == "metric_logger" else "folder"] = str(victim)
    config = {**minimal(), "device": "cpu", "output_dir": str(victim / "run"), key: node}
    return write(victim.parent / "stranger.yaml", config)


@pytest.mark.parametrize("key", ATTACKS)
@pytest.mark.parametrize(
    "command",
    [
        ["validate"],
        ["plan", "--seq-len", "8", "--config"],
        ["run", "full_finetune_distributed", "--config"],
    ],
    ids=lambda command: command[0],
)
def test_an_attack_is_one_line_with_exit_code_2_and_touches_nothing(
    command: list[str], key: str, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(_attack(key, victim))]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {key}.")
    assert captured.out == ""
    assert (victim / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert sorted(p.name for p in victim.iterdir()) == ["metrics.jsonl"]


def test_an_attack_is_refused_by_a_recipe_of_ones_own_and_by_the_shipped_one_without_tune(
    victim: Path,
) -> None:
    # In processes. What a refusal is about, and what it lists, is not imported for it.
    config = _attack("tokenizer", victim)
    mine = victim.parent / "mine.py"
    mine.write_text(
        "import sys\n"
        "from torchtune_cp import config\n"
        "@config.parse\n"
        "def main(cfg):\n"
        "    try:\n"
        "        config.instantiate({'_component_': 'antigravity.webbrowser.open'})\n"
        "    except config.ConfigError:\n"
        "        for name in ('antigravity', 'transformers', 'torchao'):\n"
        "            assert name not in sys.modules\n"
        "    config.instantiate(cfg.tokenizer)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    recipe = CHECKOUT / "recipes" / "full_finetune_distributed.py"
    for words in (
        ["-m", "torchtune_cp", "run", str(mine), "--config", str(config)],
        [str(recipe), "--config", str(config)],
    ):
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2, done.stderr
        (line,) = [text for text in done.stderr.splitlines() if "error" in text]
        assert "tokenizer._component_: 'torchtune_cp.durable.delete_hidden'" in line
        assert (victim / "metrics.jsonl").exists()


def test_a_recipe_in_the_checkout_does_not_make_the_whole_project_nameable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allow, "_trusted_folders", [])
    allow.trust_folder(CHECKOUT)
    with pytest.raises(ConfigError, match="is refused"):
        get_component("torchtune_cp.durable.delete_hidden")


def test_a_module_of_ones_own_may_hand_on_a_component_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_imports.py").write_text(
        "from torch.optim import AdamW\n"
        "from shutil import rmtree\n"
        "from torchtune_cp.durable import delete_hidden\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(allow.ALLOW_VARIABLE, "my_imports")
    assert get_component("my_imports.AdamW").__name__ == "AdamW"
    for name in ("rmtree", "delete_hidden"):
        with pytest.raises(ConfigError, match="it was defined in "):
            get_component(f"my_imports.{name}")


def test_shipped_configs_docs_and_readme_name_components_only() -> None:
    import re

    # The security page shows one name that is refused, and says so.
    attack = ("security.md", "torchtune_cp.durable.delete_hidden")
    refused = []
    pages = [CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")]
    for page in [*pages, *(CHECKOUT / "configs").rglob("*.yaml")]:
        for path in re.findall(r"_component_: (torch[\w.]*\.\w+)", page.read_text()):
            try:
                assert callable(get_component(path)), (page, path)
            except ConfigError:
                refused.append((page.name, path))
    assert refused == [attack]

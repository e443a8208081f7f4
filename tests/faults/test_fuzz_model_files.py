"""A hundred damaged files of each kind that a model comes with: refused in clear lines, or of use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import EsmConfig, LlamaConfig, Qwen3Config

from tests.faults.config_mutations import Mutator, odd_files
from tests.faults.test_fuzz_configs import complaint, time_limit
from tests.unit.data import folders
from torchtune_cp.cli.main import main
from torchtune_cp.data import hf_tokenizer
from torchtune_cp.errors import UserError

pytestmark = pytest.mark.slow

COUNT = 100
LIMIT_S = 60
CHAT = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A fox."}]


def write_model_config(folder: Path, family: str) -> None:
    """A config.json as transformers writes it, of a model that a tiny config could train."""
    sizes: dict[str, Any] = {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "vocab_size": 272},
    }
    if family == "llama":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        more = {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        LlamaConfig(
            **sizes,
            num_key_value_heads=2,
            rope_parameters={"rope_theta": 1e4, **scaling, **more},
        ).save_pretrained(folder)
    elif family == "qwen3":
        Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8).save_pretrained(folder)
    else:
        EsmConfig(**sizes, position_embedding_type="rotary").save_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3", "esm"])
def test_mutated_configs_of_models_are_refused_in_clear_lines(
    family: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_model_config(tmp_path, family)
    path = tmp_path / "config.json"
    whole = path.read_text()
    mutator = Mutator(1, odd_files(tmp_path / "odd"))
    model = f"model={{_component_: torchtune_cp.models.auto_model, checkpoint_dir: {tmp_path}}}"
    shipped = "tiny/esm2_cpu" if family == "esm" else "tiny/llama_cpu"
    refused, findings = 0, []
    for number in range(COUNT):
        path.write_bytes(mutator.mutate_json(whole))
        with time_limit(LIMIT_S):
            code = main(["validate", shipped, model])
        said = capsys.readouterr().err
        refused += code == 2
        if problem := complaint(code, said, (0, 2)):
            findings.append(f"{number}, {mutator.done}: {problem}\n{said}")
    assert findings == []
    assert refused > COUNT // 4


def use_tokenizer(folder: Path, saved: Path) -> str:
    """Do with a tokenizer folder what a run does; says how that ended."""
    try:
        with time_limit(LIMIT_S):
            tokenizer = hf_tokenizer(str(folder), max_seq_len=64)
            tokens = tokenizer.encode("The quick brown fox")
            assert all(isinstance(token, int) and token >= 0 for token in tokens)
            tokenizer.tokenize_messages(CHAT)
            tokenizer.fingerprint()
            tokenizer.save(saved)
        return "used"
    except UserError as error:
        said = str(error)
    assert "\n" not in said, said
    return "refused"


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"],
)
def test_mutated_tokenizer_files_are_refused_or_of_use(name: str, tmp_path: Path) -> None:
    fuzz_tokenizer(tmp_path, name, 2, COUNT, lambda mutator, text: mutator.mutate_json(text))


def test_mutated_chat_templates_are_refused_or_of_use(tmp_path: Path) -> None:
    fuzz_tokenizer(
        tmp_path, "chat_template.jinja", 3, COUNT, lambda mutator, text: mutator.mutate_text(text)
    )


def fuzz_tokenizer(
    base: Path, name: str, seed: int, count: int, mutate: Callable[[Mutator, str], bytes]
) -> None:
    """Use a folder over and over, one of its files damaged anew each time."""
    whole = folders.set_template(folders.byte_level_folder(base / "whole"), folders.LLAMA3)
    template = json.loads((whole / "tokenizer_config.json").read_text())["chat_template"]
    (whole / "chat_template.jinja").write_text(template.replace("%}{%", "%}\n{%"))
    special = {"content": "<|eot_id|>", "lstrip": False, "rstrip": False, "special": True}
    more = {"pad_token": "<|im_end|>", "additional_special_tokens": ["<own>"]}
    (whole / "special_tokens_map.json").write_text(json.dumps({"eos_token": special, **more}))
    size = len(json.loads((whole / "tokenizer.json").read_text())["model"]["vocab"])
    size += len(folders.SPECIALS)
    (whole / "added_tokens.json").write_text(json.dumps({"<own>": size, "added": size + 1}))
    mutator = Mutator(seed, odd_files(base / "odd"))
    outcomes = []
    for number in range(count):
        folder, saved = base / "tokenizer", base / "saved"
        for old in (folder, saved):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(whole, folder)
        (folder / name).write_bytes(mutate(mutator, (whole / name).read_text()))
        try:
            outcomes.append(use_tokenizer(folder, saved))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {number}, {mutator.done}: {error!r}") from error
    assert "refused" in outcomes

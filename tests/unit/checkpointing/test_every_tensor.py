"""Every tensor of a folder is used as transformers uses it, named as not used, or refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.unit.checkpointing import ranks
from tests.unit.checkpointing.folders import read_config, save_llama, shards
from torchtune_cp.checkpointing import FullModelHFCheckpointer, check_folder
from torchtune_cp.errors import UserError
from torchtune_cp.models import auto_model

Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ATTENTION = "model.layers.1.self_attn"
TOKENS = torch.arange(40).view(2, 20)


def _save(tensors: Tensors, path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _change(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    _save(tensors, folder / "model.safetensors")
    return folder


def _set_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**read_config(folder), **changes}))


def _loaded(folder: Path, out: Path) -> tuple[torch.nn.Module, FullModelHFCheckpointer]:
    """As a run loads it."""
    checkpointer = FullModelHFCheckpointer(str(folder), output_dir=str(out))
    model = auto_model(folder)
    checkpointer.keep_stored_output(model)
    ranks.fill(model, checkpointer)
    return model, checkpointer


def _reference(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def _assert_as_transformers(folder: Path, out: Path, tied: bool) -> None:
    """Same logits before and after saving, and the saved folder says what the model is."""
    model, checkpointer = _loaded(folder, out)
    with torch.no_grad():
        expected = _reference(folder)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)
        for parameter in model.parameters():
            parameter.add_(0.01)  # an embedding that was tied is no longer what it was
        final = checkpointer.save_final(model)
        torch.testing.assert_close(
            model(TOKENS), _reference(final)(TOKENS).logits, rtol=1e-4, atol=1e-5
        )
    assert model.config.tie_word_embeddings is tied
    assert read_config(final)["tie_word_embeddings"] is tied
    again, _ = _loaded(final, out)
    assert again.config == model.config


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("stored", ["another head", "a copy", "no head"])
def test_a_head_that_the_config_ties_is_kept_where_it_is_another(
    tmp_path, caplog, stored, max_shard_size
):
    """Case F1."""
    caplog.set_level(logging.INFO, "torchtune_cp")
    base = tmp_path / "base"
    save_llama(base, tied=stored != "another head", max_shard_size=max_shard_size)
    _set_config(base, tie_word_embeddings=True)
    if stored == "a copy":
        path = next(p for p in shards(base) if EMBEDDING in load_file(p))
        tensors = load_file(path)
        _save({**tensors, HEAD: tensors[EMBEDDING].clone()}, path)
    _assert_as_transformers(base, tmp_path, tied=stored != "another head")
    said = " ".join(caplog.messages)
    assert ("keeps it as a separate weight" in said) is (stored == "another head")
    assert ("not used, as in transformers: lm_head.weight" in said) is (stored == "a copy")


def test_a_folder_that_unties_equal_weights_stays_untied(tmp_path):
    save_llama(tmp_path / "base")
    _change(tmp_path / "base", lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    _assert_as_transformers(tmp_path / "base", tmp_path, tied=False)


def test_a_model_that_was_not_asked_to_keep_another_head_is_refused(tmp_path):
    save_llama(tmp_path)
    _set_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"not the embedding.*: lm_head\.weight"):
        FullModelHFCheckpointer(str(tmp_path)).source(auto_model(tmp_path), 0)


def test_buffers_that_are_computed_here_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torchtune_cp")
    base = tmp_path / "base"
    save_llama(base)
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in (0, 1)]
    _change(base, lambda t: t.update({name: torch.ones(4) for name in names}))
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "README.md"):
        (base / name).write_bytes(b"another set of weights")
    _assert_as_transformers(base, tmp_path, tied=False)
    said = " ".join(caplog.messages)
    assert "not used, as in transformers: model.layers.*.self_attn.rotary_emb.inv_freq (2)" in said
    assert "not read: consolidated.safetensors, model.gguf, pytorch_model.bin" in said
    assert "README" not in said


def _prefix(tensors: Tensors, old: str, new: str) -> None:
    for name in [n for n in tensors if n.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


REFUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "classification head": (
        lambda t: t.update({"score.weight": torch.ones(2, 32)}),
        "unexpected: score",
    ),
    "adapter": (
        lambda t: t.update({f"{ATTENTION}.q_proj.lora_A.weight": torch.ones(2, 32)}),
        "lora_A",
    ),
    "vision tower": (
        lambda t: t.update({"vision_tower.patch.weight": torch.ones(2, 2)}),
        "vision_tower",
    ),
    "scales": (
        lambda t: t.update({f"{ATTENTION}.q_proj.weight_scale_inv": torch.ones(1)}),
        "scale_inv",
    ),
    "one layer more": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32)}),
        r"unexpected: model\.layers\.2",
    ),
    "one layer less": (
        lambda t: _prefix(t, "model.layers.1.", "old."),
        r"missing: model\.layers\.1",
    ),
    "no prefix": (lambda t: _prefix(t, "model.", ""), "missing: model.*unexpected: "),
    "prefix twice": (
        lambda t: _prefix(t, "model.", "model.model."),
        "missing: model.*unexpected: model.m",
    ),
    "bias": (
        lambda t: t.update({f"{ATTENTION}.q_proj.bias": torch.ones(32)}),
        r"unexpected.*q_proj\.bias",
    ),
    "query norm": (
        lambda t: t.update({f"{ATTENTION}.q_norm.weight": torch.ones(8)}),
        "unexpected.*q_norm",
    ),
    "no head": (lambda t: t.pop(HEAD), r"missing: lm_head\.weight"),
    "no embedding": (lambda t: t.pop(EMBEDDING), r"missing: model\.embed_tokens\.weight"),
    "head of another shape": (
        lambda t: t.update({HEAD: torch.ones(72, 32)}),
        "other shape: lm_head",
    ),
    "head bias": (
        lambda t: t.update({"lm_head.bias": torch.ones(64)}),
        r"unexpected: lm_head\.bias",
    ),
    "fp8": (
        lambda t: t.update(
            {f"{ATTENTION}.q_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)}
        ),
        r"quantised.*q_proj\.weight \(F8_E4M3\)",
    ),
    "int8": (
        lambda t: t.update({f"{ATTENTION}.q_proj.weight": torch.ones(32, 32, dtype=torch.int8)}),
        r"quantised.*q_proj\.weight \(I8\)",
    ),
}


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_the_model_has_no_use_for_and_missing_ones_are_refused_by_name(tmp_path, tied):
    save_llama(tmp_path / "base", tied=False)
    for what, (change, says) in REFUSED.items():
        folder = tmp_path / what
        shutil.copytree(tmp_path / "base", folder)
        _set_config(folder, tie_word_embeddings=tied)
        _change(folder, change)
        if tied and what == "no head":
            _assert_as_transformers(folder, tmp_path, tied=True)
            continue
        with pytest.raises(UserError, match=says):
            _loaded(folder, tmp_path)


def _index(folder: Path) -> dict:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_files_of_two_models_are_refused_and_equal_copies_are_not(tmp_path):
    base = tmp_path / "base"
    save_llama(base, max_shard_size="40KB")
    index = _index(base)
    norm = "model.norm.weight"
    home = index["weight_map"][norm]
    other = next(path for path in shards(base) if path.name != home)
    tensors = load_file(other)
    # Twice, with the same values: as transformers, either is the one.
    _save({**tensors, norm: load_file(base / home)[norm]}, other)
    _assert_as_transformers(base, tmp_path, tied=False)
    # Twice, with others.
    _save({**tensors, norm: torch.full((32,), 7.0)}, other)
    with pytest.raises(UserError, match=rf"{norm} is in both"):
        check_folder(base)
    # In a file that is read, but not in the index: it is not passed over.
    _save({**tensors, "score.weight": torch.ones(2, 32)}, other)
    with pytest.raises(UserError, match=r"unexpected: score\.weight"):
        _loaded(base, tmp_path)
    # Placed by the index in a file that lacks it, though another has it.
    _save(tensors, other)
    index["weight_map"][norm] = other.name
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"{other.name} lacks tensor {norm}"):
        check_folder(base)


def test_one_file_beside_shards_is_refused_until_the_files_are_named(tmp_path):
    base = tmp_path / "base"
    save_llama(base, max_shard_size="40KB")
    names = [path.name for path in shards(base)]
    save_llama(tmp_path / "single")
    shutil.copy(tmp_path / "single" / "model.safetensors", base)
    with pytest.raises(UserError, match=r"two sets of weights.*checkpoint_files"):
        check_folder(base)
    check_folder(base, names)
    check_folder(base, ["model.safetensors"])


def test_an_adapters_folder_is_refused_for_what_it_is(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config\.json.*merge"):
        check_folder(tmp_path)

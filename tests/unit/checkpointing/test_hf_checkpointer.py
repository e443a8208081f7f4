"""What goes in comes out: transformers loads the saved folder with no missing key (case K23)."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.harness import run_ranks
from tests.unit.checkpointing import ranks
from tests.unit.checkpointing.folders import read_config, save_llama, shards
from torchtune_cp.checkpointing import FullModelHFCheckpointer, RandomSource, check_folder
from torchtune_cp.data import byte_tokenizer
from torchtune_cp.errors import UserError
from torchtune_cp.models import auto_model
from torchtune_cp.models.llama3 import llama3


def _load(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model


def _assert_equal(model: torch.nn.Module, reference: torch.nn.Module, plus: float = 0.0) -> None:
    got, expected = dict(model.named_parameters()), dict(reference.named_parameters())
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        torch.testing.assert_close(got[name], tensor + plus, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_transformers_loads_the_saved_folder_of_a_sharded_model(
    tmp_path, tied, dtype, max_file_bytes
):
    reference = save_llama(tmp_path / "base", tied=tied, max_shard_size="40KB", dtype=dtype)
    assert len(shards(tmp_path / "base")) >= 2
    checkpointer = FullModelHFCheckpointer(str(tmp_path / "base"), output_dir=str(tmp_path / "out"))
    model = auto_model(tmp_path / "base")  # fp32 in training, whatever the folder holds
    ranks.fill(model, checkpointer)
    folder = checkpointer.save_final(model, max_file_bytes=max_file_bytes)
    assert folder == tmp_path / "out" / "final"
    check_folder(folder)
    assert (len(shards(folder)) > 1) == (max_file_bytes < 10**9)
    _assert_equal(_load(folder), reference)
    assert read_config(folder)["dtype"] == str(dtype).removeprefix("torch.")


def test_a_changed_weight_is_saved_changed(tmp_path):
    reference = save_llama(tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(str(tmp_path / "base"), output_dir=str(tmp_path))
    model = auto_model(tmp_path / "base")
    ranks.fill(model, checkpointer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    _assert_equal(_load(checkpointer.save_final(model)), reference, plus=0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_depend_on_the_seed_and_load_in_transformers(tmp_path, tied):
    save_llama(tmp_path / "sizes", tied=tied)
    checkpointer = FullModelHFCheckpointer(None, output_dir=str(tmp_path))
    models = [auto_model(tmp_path / "sizes") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        assert isinstance(checkpointer.source(model, seed), RandomSource)
        ranks.fill(model, checkpointer, seed)
    weights = [model.layers[1].mlp.w2.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    tokens = torch.arange(20)[None]
    loaded = _load(checkpointer.save_final(models[0], dtype=torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, models[0](tokens), rtol=1e-4, atol=1e-5)


class _Tokenizer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text((self.folder / "tokenizer.json").read_text())


def test_known_files_come_along_and_no_others(tmp_path):
    base = tmp_path / "base"
    save_llama(base)
    (base / "tokenizer.json").write_text("base")
    (base / "merges.txt").write_text("base")
    (base / "README.md").write_text("results of the base model")
    (base / "consolidated.00.pth").write_text("the same weights again")
    (tmp_path / "tokenizer.json").write_text("other")
    model = auto_model(base)
    checkpointer = FullModelHFCheckpointer(str(base), output_dir=str(tmp_path))
    weights = {"model.safetensors", "config.json", "generation_config.json"}
    final = checkpointer.save_final(model)
    assert {path.name for path in final.iterdir()} == {*weights, "tokenizer.json", "merges.txt"}
    final = checkpointer.save_final(model, _Tokenizer(tmp_path))
    assert {path.name for path in final.iterdir()} == {*weights, "tokenizer.json"}
    assert (final / "tokenizer.json").read_text() == "other"


def test_a_tokenizer_made_in_memory_is_saved_with_the_model(tmp_path):
    model = llama3(272, 1, 4, 2, 32, 64)
    checkpointer = FullModelHFCheckpointer(None, output_dir=str(tmp_path))
    ranks.fill(model, checkpointer, 0)
    final = checkpointer.save_final(model, byte_tokenizer())
    loaded = AutoTokenizer.from_pretrained(final)
    assert loaded("long context")["input_ids"] == [256, *b"long context"]  # after the BOS token
    assert loaded.chat_template


def test_weights_of_another_model_are_refused_before_any_is_read(tmp_path):
    save_llama(tmp_path / "tied", tied=True)
    save_llama(tmp_path / "untied")
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        FullModelHFCheckpointer(str(tmp_path / "tied")).source(auto_model(tmp_path / "untied"), 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"checkpoint_dir": "/nowhere"}, "/nowhere"),
        ({"checkpoint_files": ["a.safetensors"]}, "checkpoint_dir"),
        ({"safe_serialization": False}, "safe_serialization"),
        ({"adapter_checkpoint": "adapter.pt"}, "adapter_checkpoint"),
        ({"recipe_checkpoint": "recipe_state.pt"}, "recipe_checkpoint"),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint"),
        ({"model_type": "GEMMA"}, "LLAMA3_2"),
    ],
)
def test_arguments_without_meaning_here_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        FullModelHFCheckpointer(**arguments)


def test_a_model_type_that_contradicts_the_folder_is_refused(tmp_path):
    save_llama(tmp_path)
    FullModelHFCheckpointer(str(tmp_path), model_type="LLAMA3")
    with pytest.raises(UserError, match="'llama'"):
        FullModelHFCheckpointer(str(tmp_path), model_type="QWEN2")


@pytest.mark.distributed
def test_two_ranks_write_sharded_models_together(tmp_path):
    references = {
        name: save_llama(tmp_path / name / "base", tied=name == "tied", max_shard_size="40KB")
        for name in ("tied", "untied")
    }
    written = run_ranks(2, ranks.save_from_ranks, [str(tmp_path / name) for name in references])
    for index, (name, reference) in enumerate(references.items()):
        _assert_equal(_load(tmp_path / name / "final"), reference)
        total = sum(p.numel() * 4 for p in reference.parameters())
        shares = [counts[index] for counts in written]
        assert sum(shares) == total
        assert max(shares) < 0.75 * total  # both did a fair part


@pytest.mark.distributed
def test_a_write_slower_than_the_process_groups_time_out_completes(tmp_path):
    """Case K24."""
    reference = save_llama(tmp_path / "base")
    times = run_ranks(2, ranks.slow_write, str(tmp_path))
    assert min(times) >= ranks.SLOW_WRITE_S  # rank 1 waited for rank 0
    _assert_equal(_load(tmp_path / "final"), reference)


@pytest.mark.distributed
def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path):
    save_llama(tmp_path / "base")
    messages = run_ranks(2, ranks.failing_write, str(tmp_path))
    assert all("No space left on device" in message for message in messages)
    assert "rank 1" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]

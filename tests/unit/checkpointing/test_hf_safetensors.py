"""Model folders are written in limited files, completely or not at all."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from torchtune_cp.checkpointing import check_folder, save_hf_folder
from torchtune_cp.checkpointing.hf_safetensors import _rounds, plan_files
from torchtune_cp.errors import UserError

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.randn(7, generator=torch.Generator().manual_seed(0)),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.5),
    "c": torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).t(),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
CONFIG = {"model_type": "llama"}


def _save(folder, **changes):
    arguments = {"config": CONFIG, "dtype": torch.float32, **changes}
    save_hf_folder(SHAPES, TENSORS.__getitem__, folder, **arguments)


def _load(folder):
    return {
        n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("max_file_bytes", [10**9, 80, 1])
@pytest.mark.parametrize("buffer_bytes", [10**9, 60, 1])
def test_the_safetensors_library_reads_back_what_was_written(
    tmp_path, dtype, max_file_bytes, buffer_bytes
):
    folder = tmp_path / "final"
    _save(folder, dtype=dtype, max_file_bytes=max_file_bytes, buffer_bytes=buffer_bytes)
    check_folder(folder)
    loaded = _load(folder)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor.to(dtype))
    assert not list(tmp_path.glob(".*"))


def test_files_keep_the_order_and_the_limit_and_are_named_as_hugging_face_names_them(tmp_path):
    _save(tmp_path / "final", max_file_bytes=80)
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in TENSORS.values())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {
        "a": first,
        "b": first,
        "empty": first,
        "scalar": first,
        "c": second,
    }
    plans = plan_files(SHAPES, torch.float32, 80)
    assert [list(plan.shapes) for plan in plans] == [["a", "b", "empty", "scalar"], ["c"]]
    assert all(plan.num_bytes <= 80 or len(plan.shapes) == 1 for plan in plans)


def test_a_model_that_fits_in_one_file_has_no_index(tmp_path):
    _save(tmp_path / "final")
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert names == {"model.safetensors", "config.json"}


def test_no_rank_collects_more_than_its_buffer_and_every_tensor_is_gathered_once():
    shapes = {f"t{i}": (i % 5 + 1,) for i in range(40)}
    plans = plan_files(shapes, torch.float32, 48)
    owners = [index % 3 for index in range(len(plans))]
    seen = []
    for taken in _rounds(plans, owners, 32):
        held = dict.fromkeys(range(3), 0)
        for index, name in taken:
            held[owners[index]] += plans[index].shapes[name][0] * 4
            seen.append((index, name))
        assert max(held.values()) <= 32
    expected = [(index, name) for index, plan in enumerate(plans) for name in plan.shapes]
    assert sorted(seen) == sorted(expected)
    for index, plan in enumerate(plans):  # a file is written from its beginning to its end
        assert [name for i, name in seen if i == index] == list(plan.shapes)


def test_the_earlier_model_is_replaced_and_nothing_of_it_is_left(tmp_path):
    _save(tmp_path / "final", max_file_bytes=1)
    _save(tmp_path / "final")
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert names == {"model.safetensors", "config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_failure_leaves_the_earlier_model_whole_and_no_litter(tmp_path):
    _save(tmp_path / "final")
    with pytest.raises(UserError, match="nowhere"):
        _save(tmp_path / "final", dtype=torch.bfloat16, extra_files=[tmp_path / "nowhere"])
    check_folder(tmp_path / "final")
    assert _load(tmp_path / "final")["a"].dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_litter_of_a_killed_save_is_cleared(tmp_path):
    (tmp_path / ".final.incomplete").mkdir()
    (tmp_path / ".final.incomplete" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".final.replaced").mkdir()
    _save(tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    from torchtune_cp.checkpointing import hf_safetensors

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_safetensors, "_write_tensor", no_space)
    with pytest.raises(UserError, match="No space left on device") as caught:
        _save(tmp_path / "final")
    assert str(tmp_path / "final") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_users_own_files_in_the_folder_stay_and_only_an_earlier_models_go(tmp_path):
    final = tmp_path / "final"
    (final / "notes").mkdir(parents=True)
    (final / "notes" / "thesis.txt").write_text("years of work")
    (final / "adapter_model.safetensors").write_text("somebody's")
    for _ in range(2):
        (final / "model-00001-of-00002.safetensors").write_text("a shard of an earlier model")
        (final / "tokenizer.model").write_text("of an earlier model")
        _save(final)
        assert {path.name for path in final.iterdir()} == {
            *("model.safetensors", "config.json", "notes", "adapter_model.safetensors")
        }
    assert (final / "notes" / "thesis.txt").read_text() == "years of work"
    # Killed between the renames, or while it moved them back: they lie in the hidden folder.
    for rest in ("before", "after"):
        final.rename(tmp_path / ".final.replaced")
        if rest == "after":
            _save(tmp_path / "new")
            (tmp_path / "new").rename(final)
        _save(final)
        assert (final / "notes" / "thesis.txt").read_text() == "years of work"
        assert [path.name for path in tmp_path.iterdir()] == ["final"]
    (final / "config.json").unlink()
    (final / "config.json").mkdir()  # no run makes such a folder: it is moved, not deleted
    _save(final)
    assert (tmp_path / "final.earlier_1" / "config.json").is_dir()


def test_a_linked_folder_is_replaced_where_it_lies(tmp_path):
    big = tmp_path / "big_disk"
    (big / "model").mkdir(parents=True)
    (tmp_path / "final").symlink_to(big / "model")
    _save(tmp_path / "final")
    _save(tmp_path / "final")
    assert (tmp_path / "final").is_symlink()
    assert [path.name for path in big.iterdir()] == ["model"]
    check_folder(tmp_path / "final")


def test_only_the_named_files_are_copied_and_become_writable(tmp_path):
    original = tmp_path / "tokenizer.json"
    original.write_text("{}")
    (tmp_path / "consolidated.00.pth").write_text("large")
    os.chmod(original, 0o444)
    _save(tmp_path / "final", extra_files=[original])
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}
    assert os.stat(tmp_path / "final" / "tokenizer.json").st_mode & 0o200


def test_integer_types_are_refused(tmp_path):
    with pytest.raises(UserError, match="int8"):
        _save(tmp_path / "final", dtype=torch.int8)

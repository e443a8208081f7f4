"""A broken download is named before anything starts (case C36)."""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.checkpointing.folders import save_llama, shards
from torchtune_cp.checkpointing.folder import check_folder, read_header, read_headers
from torchtune_cp.errors import UserError


@pytest.fixture
def folder(tmp_path):
    save_llama(tmp_path / "model", max_shard_size="40KB")
    assert len(shards(tmp_path / "model")) >= 2
    return tmp_path / "model"


def _refusal(folder, files=None) -> str:
    with pytest.raises(UserError) as caught:
        check_folder(folder, files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_folder_of_one_file_or_of_shards_passes(folder, tmp_path):
    check_folder(folder)
    check_folder(str(folder), [path.name for path in shards(folder)])
    save_llama(tmp_path / "single")
    check_folder(tmp_path / "single")


def test_a_missing_shard_is_named(folder):
    shards(folder)[1].unlink()
    assert "model-00002-of-" in _refusal(folder)


@pytest.mark.parametrize("left", [-1, -5000, 100, 8, 3, 0])
def test_a_truncated_shard_is_named_wherever_it_ends(folder, left):
    path = shards(folder)[0]
    data = path.read_bytes()
    path.write_bytes(data[:left])
    message = _refusal(folder)
    assert path.name in message
    assert "truncated" in message


def test_surplus_bytes_and_garbage_are_refused(folder):
    path = shards(folder)[0]
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    assert "accounts for only" in _refusal(folder)
    path.write_bytes(b"\xff" * len(data))
    assert "not a safetensors file" in _refusal(folder)
    path.write_bytes(data[:8] + b"?" * (len(data) - 8))
    assert "not a readable safetensors file" in _refusal(folder)


def test_a_git_lfs_pointer_is_recognised(folder):
    shards(folder)[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in _refusal(folder)


def test_an_interrupted_download_is_named_where_huggingface_hub_leaves_it(folder):
    cache = folder / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "abc.incomplete").write_bytes(b"")
    assert "abc.incomplete" in _refusal(folder)
    shards(folder)[0].unlink()
    message = _refusal(folder)  # the real damage comes first, the leftover is still named
    assert "abc.incomplete" in message
    assert "model-00001-of-" in message


def test_config_json_must_be_there_and_readable(folder):
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json" in _refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json" in _refusal(folder)
    assert "is not a folder" in _refusal(folder / "nowhere")


def test_a_tensor_that_the_index_names_must_be_in_its_file(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = shards(folder)[0].name
    content["weight_map"]["model.extra"] = first
    index.write_text(json.dumps(content))
    message = _refusal(folder)
    assert "model.extra" in message
    assert first in message


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors"]
)
def test_an_index_cannot_lead_out_of_the_folder(folder, name):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    assert "outside" in _refusal(folder)


def test_symbolic_links_into_a_blob_cache_are_followed(folder, tmp_path):
    path = shards(folder)[0]
    blob = tmp_path / "blob"
    os.replace(path, blob)
    path.symlink_to(blob)
    check_folder(folder)
    blob.unlink()
    assert path.name in _refusal(folder)


def test_pickles_are_refused_with_the_reason(folder):
    assert "pickle" in _refusal(folder, ["pytorch_model-00001-of-00002.bin"])
    assert "pickle" in _refusal(folder, ["consolidated.00.pth"])
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    assert "neither" in _refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pickle" in _refusal(folder)


def test_checkpoint_files_take_torchtunes_short_form(folder):
    count = f"{len(shards(folder)):05d}"
    pattern = "model-{}-of-{}.safetensors"
    check_folder(folder, {"filename_format": pattern, "max_filename": count})
    one_more = f"{len(shards(folder)) + 1:05d}"
    assert one_more in _refusal(folder, {"filename_format": pattern, "max_filename": one_more})
    assert "max_filename" in _refusal(folder, {"filename_format": pattern})
    assert "two {}" in _refusal(folder, {"filename_format": "model-{}", "max_filename": "00002"})


def test_a_file_named_twice_and_a_tensor_in_two_files_are_refused(folder):
    first = shards(folder)[0]
    assert "more than once" in _refusal(folder, [first.name, first.name])
    (folder / "copy.safetensors").write_bytes(first.read_bytes())
    assert "is in both" in _refusal(folder, [first.name, "copy.safetensors"])


def test_files_beside_the_index_are_not_read(folder):
    (folder / "old.safetensors").write_bytes(b"rubbish")
    check_folder(folder)


def test_headers_agree_with_the_safetensors_library(folder):
    from safetensors import safe_open

    for path in shards(folder):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            expected = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        assert {name: entry.shape for name, entry in read_header(path).items()} == expected
    assert len(read_headers(folder)) == 21


def test_the_check_itself_does_not_import_torch(folder):
    code = (
        "import sys, types\npackage = types.ModuleType('torchtune_cp.checkpointing')\nimport "
        "torchtune_cp; package.__path__ = [torchtune_cp.__path__[0] + "
        "'/checkpointing']\nsys.modules['torchtune_cp.checkpointing'] = package\nfrom "
        "torchtune_cp.checkpointing.folder import "
        f"check_folder\ncheck_folder({str(folder)!r})\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

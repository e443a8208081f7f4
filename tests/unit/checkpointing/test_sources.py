"""Weights are read slice by slice, and random ones depend on seed and name alone."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpointing.folders import save_llama, shards
from torchtune_cp.checkpointing import HFFolderSource, RandomSource
from torchtune_cp.errors import UserError


@pytest.fixture
def folder(tmp_path):
    save_llama(tmp_path / "model", max_shard_size="40KB", dtype=torch.bfloat16)
    return tmp_path / "model"


def _shapes(folder):
    return {n: tuple(t.shape) for path in shards(folder) for n, t in load_file(path).items()}


def test_every_slice_equals_that_of_the_whole_tensor(folder):
    whole = {n: t for path in shards(folder) for n, t in load_file(path).items()}
    source = HFFolderSource(folder, str)
    for name, tensor in whole.items():
        if tensor.ndim == 1:
            windows = [((3,), (5,)), ((0,), (32,)), ((32,), (0,))]
        else:
            rows, columns = tensor.shape
            windows = [((1, 0), (rows - 1, columns)), ((2, 3), (4, 5)), ((0, columns), (rows, 0))]
        for offsets, shape in windows:
            window = tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))
            got = source.read(name, offsets, shape)
            assert got.dtype == torch.bfloat16
            assert torch.equal(got, tensor[window])
    assert source.dtype == torch.bfloat16
    source.close()
    assert source.read("model.norm.weight", (0,), (1,)).numel() == 1


def test_names_are_translated(folder):
    source = HFFolderSource(folder, lambda name: f"model.{name}.weight")
    assert source.read("norm", (0,), (32,)).shape == (32,)
    with pytest.raises(UserError, match=r"model\.nothing\.weight"):
        source.read("nothing", (0,), (1,))


def test_only_the_bytes_of_the_slice_are_read(tmp_path):
    """A file of 3 GB on paper (sparse on the disk) is read within a few MB of memory."""
    import resource

    rows, columns = 1 << 20, 768
    entry = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, rows * columns * 4]}
    header = json.dumps({"big": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * columns * 4)
    source = HFFolderSource(tmp_path, str)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert source.read("big", (rows - 4, 0), (4, columns)).abs().sum() == 0
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) / 1024 < 200  # MiB, of 3072


def test_a_slice_outside_the_tensor_names_tensor_file_and_shapes(folder):
    source = HFFolderSource(folder, str)
    for offsets, shape in (((0, 0), (65, 32)), ((0,), (64,))):
        with pytest.raises(UserError, match="embed_tokens") as caught:
            source.read("model.embed_tokens.weight", offsets, shape)
        assert "[64, 32]" in str(caught.value)
        assert ".safetensors" in str(caught.value)


def test_all_differences_from_the_model_are_reported_at_once(folder):
    source = HFFolderSource(folder, str)
    shapes = _shapes(folder)
    source.check_names(shapes)
    del shapes["model.layers.0.mlp.up_proj.weight"]
    shapes["model.layers.2.new"] = (3,)
    shapes["model.norm.weight"] = (16,)
    with pytest.raises(UserError) as caught:
        source.check_names(shapes)
    message = str(caught.value)
    assert "missing: model.layers.2.new" in message
    assert "unexpected: model.layers.0.mlp.up_proj.weight" in message
    assert re.search(r"model\.norm\.weight is \[32\] in model-0.*, \[16\] in the model", message)


def test_a_stored_output_weight_of_a_tied_model_and_rotary_tables_are_tolerated(tmp_path):
    save_llama(tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, path)
    HFFolderSource(tmp_path, str).check_names(shapes)
    save_file({**tensors, "lm_head.bias": torch.ones(64)}, path)
    with pytest.raises(UserError, match=r"unexpected: lm_head\.bias"):
        HFFolderSource(tmp_path, str).check_names(shapes)


def test_an_untied_model_needs_its_output_weight(tmp_path):
    save_llama(tmp_path, tied=True)
    shapes = {**_shapes(tmp_path), "lm_head.weight": (64, 32)}
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        HFFolderSource(tmp_path, str).check_names(shapes)


def test_quantised_weights_are_refused(tmp_path):
    weight = torch.ones(8, 8).to(torch.float8_e4m3fn)
    save_file({"w": weight, "x": torch.ones(2)}, tmp_path / "model.safetensors")
    source = HFFolderSource(tmp_path, str)
    with pytest.raises(UserError, match="quantised"):
        source.check_names({"w": (8, 8), "x": (2,)})
    with pytest.raises(UserError, match="F8_E4M3"):
        source.read("w", (0, 0), (8, 8))
    assert source.dtype == torch.float32


def _normal(name, tensor, generator):
    tensor.normal_(generator=generator)


SHAPES = {"a.weight": (8, 6), "b.weight": (8, 6), "c": (5,)}


def test_random_slices_are_cut_from_one_tensor_whatever_the_order_of_reading():
    full = {
        name: RandomSource(7, SHAPES, _normal).read(name, (0,) * len(shape), shape)
        for name, shape in SHAPES.items()
    }
    source = RandomSource(7, SHAPES, _normal)
    for name in ("c", "b.weight", "a.weight", "b.weight"):
        if len(SHAPES[name]) == 2:
            assert torch.equal(source.read(name, (2, 1), (3, 4)), full[name][2:5, 1:5])
        else:
            assert torch.equal(source.read(name, (4,), (1,)), full[name][4:])


def test_random_weights_change_with_seed_and_name_and_do_not_touch_the_global_generator():
    def read(seed, name):
        return RandomSource(seed, SHAPES, _normal).read(name, (0, 0), (8, 6))

    state = torch.get_rng_state()
    first = read(1, "a.weight")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, read(1, "a.weight"))
    assert not torch.equal(first, read(2, "a.weight"))
    assert not torch.equal(first, read(1, "b.weight"))


def test_random_weights_are_the_same_in_every_process_and_release():
    # Pinned: a resumed or repeated run must start from the same model.
    value = RandomSource(0, {"w": (3,)}, _normal).read("w", (0,), (3,))
    torch.testing.assert_close(
        value, torch.tensor([-0.5176126, -0.5647592, -0.7340977]), rtol=0, atol=1e-6
    )

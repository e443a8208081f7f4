"""Two hundred mutations of a Hugging Face folder: a clear line, or the weights that are there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.checkpointing.folders import save_llama, shards
from torchtune_cp.checkpointing import HFFolderSource, check_folder
from torchtune_cp.errors import UserError
from torchtune_cp.models import auto_model

INDEX = "model.safetensors.index.json"
HOSTILE_NAMES = [
    *("../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors"),
    *("..\\secret.safetensors", "C:\\secret.safetensors", "C:secret.safetensors"),
    *("\\\\host\\share\\secret.safetensors", "//host/secret.safetensors", "\\secret.safetensors"),
    *("a\0.safetensors", "a\n.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors"),
    *("", ".", "..", "model.bin", "secret.pt", "config.json", "~/secret.safetensors"),
    *(None, 3, ["a.safetensors"], {"a": 1}, True),
]
JSON_VALUES = ["null", "[]", "{}", "3", '"x"', "[" * 100_000, '{"a":' * 5000, "{", "\ufeff{}", ""]


class _Folder:
    """A folder that each mutation damages anew, and the fingerprint of everything around it."""

    def __init__(self, base: Path) -> None:
        save_llama(base / "whole", max_shard_size="40KB")
        self.base, self.model = base, base / "model"
        whole = HFFolderSource(base / "whole", str)
        self.shapes = {name: entry.shape for name, (_, entry) in whole._tensors.items()}
        self.outside = base / "secret.safetensors"
        shutil.copy(shards(base / "whole")[0], self.outside)

    def fresh(self) -> Path:
        shutil.rmtree(self.model, ignore_errors=True)
        shutil.copytree(self.base / "whole", self.model)
        return self.model

    def around(self) -> dict[str, str]:
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.base.rglob("*")
            if path.is_file() and self.model not in path.parents
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> _Folder:
    return _Folder(tmp_path_factory.mktemp("fuzz"))


def _open(folder: _Folder) -> str:
    """Open a folder as a run does: refused with one line, or every tensor of the right shape."""
    try:
        check_folder(folder.model)
        with torch.device("meta"):
            model = auto_model(folder.model)
        source = HFFolderSource(folder.model, str)
        source.check_names({name: tuple(p.shape) for name, p in _hf_shapes(model).items()})
        for name, shape in folder.shapes.items():
            read = source.read(name, (0,) * len(shape), shape)
            assert tuple(read.shape) == shape
            assert read.dtype == torch.float32
        return "loaded"
    except UserError as error:
        text = str(error)
        assert text.isprintable(), text  # one line, nothing that a terminal would act on
        assert len(text) < 4000, text
        return "refused"


def _hf_shapes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from torchtune_cp.models.hf_names import to_hf_name

    return {to_hf_name(model.config.family, name): p for name, p in model.named_parameters()}


def _flip(path: Path, rng: random.Random, first: int, last: int) -> None:
    data = bytearray(path.read_bytes())
    place = rng.randrange(first, min(last, len(data)))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def _header_bytes(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def _flip_header(model: Path, rng: random.Random) -> None:
    path = rng.choice(shards(model))
    _flip(path, rng, 0, _header_bytes(path))


def _flip_json(model: Path, rng: random.Random) -> None:
    _flip(model / rng.choice([INDEX, "config.json"]), rng, 0, 10**6)


def _flip_body(model: Path, rng: random.Random) -> None:
    path = rng.choice(shards(model))
    _flip(path, rng, _header_bytes(path), 10**9)


def _truncate(model: Path, rng: random.Random) -> None:
    path = rng.choice([*shards(model), model / INDEX, model / "config.json"])
    os.truncate(path, rng.randrange(path.stat().st_size))


def _lengthen(model: Path, rng: random.Random) -> None:
    with rng.choice(shards(model)).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def _remove(model: Path, rng: random.Random) -> None:
    rng.choice([*shards(model), model / INDEX, model / "config.json"]).unlink()


def _foreign(model: Path, rng: random.Random) -> None:
    path = rng.choice([*shards(model), model / INDEX, model / "config.json"])
    kind = rng.randrange(5)
    path.unlink()
    if kind == 0:
        path.write_bytes(rng.randbytes(1000))
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)  # reading it would wait forever
    elif kind == 3:
        path.symlink_to(path.name)  # a loop
    else:
        path.symlink_to("/dev/zero")


def _other_shard(model: Path, rng: random.Random) -> None:
    one, other = rng.sample(shards(model), 2)
    shutil.copy(other, one)


def _rewrite_header(model: Path, rng: random.Random) -> None:
    path = rng.choice(shards(model))
    data = path.read_bytes()
    end = _header_bytes(path)
    header = json.loads(data[8:end])
    name = rng.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    rng.choice(
        [
            lambda: entry.update(shape=[-1, -len(entry["shape"])]),
            lambda: entry.update(shape=[2**62, 2**62]),
            lambda: entry.update(shape=[1e400]),
            lambda: entry.update(shape=None),
            lambda: entry.update(data_offsets=[4, 0]),
            lambda: entry.update(data_offsets=[-8, 2**70]),
            lambda: entry.update(data_offsets=["0", "4"]),
            lambda: entry.update(data_offsets=[0]),
            lambda: entry.update(dtype="I\n32"),
            lambda: entry.update(dtype=["F32"]),
            lambda: entry.update(dtype="F4"),
            lambda: entry.update(dtype="I32"),
            lambda: entry.pop("dtype"),
            lambda: header.update({name: None}),
            lambda: header.update({name + "\x1b[31m\n": header.pop(name)}),
            lambda: header.update({"x" * 5000: header.pop(name)}),
            lambda: header.update(__metadata__=[1]),
        ]
    )()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def _rewrite_json(model: Path, rng: random.Random) -> None:
    (model / rng.choice([INDEX, "config.json"])).write_text(rng.choice(JSON_VALUES))


def _hostile_index(model: Path, rng: random.Random, name: object = ...) -> None:
    content = json.loads((model / INDEX).read_text())
    tensor = rng.choice(list(content["weight_map"]))
    content["weight_map"][tensor] = rng.choice(HOSTILE_NAMES) if name is ... else name
    (model / INDEX).write_text(json.dumps(content))


def _hostile_tensor_name(model: Path, rng: random.Random) -> None:
    content = json.loads((model / INDEX).read_text())
    names = ["a\nb", "\x1b[2J", "\ud800", "x" * 10_000, "../x", ""]
    content["weight_map"][rng.choice(names)] = shards(model)[0].name
    (model / INDEX).write_text(json.dumps(content))


MUTATIONS: list[tuple[Callable[[Path, random.Random], None], int, bool]] = [
    # what, how often, whether every one must be refused
    (_flip_header, 35, False),
    (_flip_json, 30, False),
    (_flip_body, 10, False),  # cannot be seen in a foreign folder: shapes and names stay right
    (_truncate, 25, True),
    (_lengthen, 5, True),
    (_remove, 10, True),
    (_foreign, 20, True),
    (_other_shard, 5, True),
    (_rewrite_header, 30, False),
    (_rewrite_json, 15, True),
    (_hostile_tensor_name, 10, True),
]


def test_two_hundred_mutations_are_refused_in_one_line_or_load_correctly(folder):
    folder.fresh()
    assert _open(folder) == "loaded"
    around = folder.around()
    outcomes = {"loaded": 0, "refused": 0}
    for mutate, count, must_be_refused in MUTATIONS:
        for seed in range(count):
            mutate(folder.fresh(), random.Random(f"{mutate.__name__}{seed}"))
            outcome = _open(folder)
            assert outcome == "refused" or not must_be_refused, (mutate.__name__, seed)
            outcomes[outcome] += 1
    for name in HOSTILE_NAMES:
        _hostile_index(folder.fresh(), random.Random(0), name)
        assert _open(folder) == "refused", name
        outcomes["refused"] += 1
    assert folder.around() == around
    assert sum(outcomes.values()) >= 200
    assert outcomes["loaded"] >= 10  # the flipped bodies, and flips that change nothing

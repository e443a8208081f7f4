"""Damaged, foreign and hostile checkpoint folders: one clear line each, or the right values."""

import builtins
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtune_cp.checkpointing.manifest import FORMAT, FORMAT_VERSION
from torchtune_cp.checkpointing.rank_sync import RankSync
from torchtune_cp.checkpointing.training_state_store import (
    load_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from torchtune_cp.errors import UserError

COUNT = 260
MANIFEST = "checkpoint.json"


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.a": torch.randn(4, 3),
        "model.b": torch.randn(5).bfloat16(),
        "optimizer.state.a.step": torch.tensor(2.0),
    }


# --- hostile changes: the checksums are made to fit, as somebody would who means harm -------------


def _file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _sign(content: dict[str, Any], /, **more: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    whole = {"format": FORMAT, "format_version": FORMAT_VERSION, "content_sha256": digest}
    return json.dumps({**whole, "content": content} | more)


def _content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())["content"]


def _hostile_manifest(folder: Path, rng: random.Random) -> None:
    content = _content(folder)
    (name,) = content["files"]
    entry = content["files"][name]
    outside = folder.parent / "outside.safetensors"
    changes: list[Callable[[], Any]] = [
        lambda: content.update(files={str(outside): entry}),
        lambda: content.update(files={"../outside.safetensors": entry}),
        lambda: content.update(files={"..\\outside.safetensors": entry}),
        lambda: content.update(files={"sub/../../outside.safetensors": entry}),
        lambda: content.update(files={"a\nb.safetensors": entry}),
        lambda: content.update(files={"x" * 100_000 + ".safetensors": entry}),
        lambda: content.update(files={"model.pt": entry}),
        lambda: content.update(files={"": entry}),
        lambda: content.update(files={}),
        lambda: content.update(files=[name]),
        lambda: content.update(files={name: None}),
        lambda: content.update(files={name: {**entry, "num_bytes": -1}}),
        lambda: content.update(files={name: {**entry, "num_bytes": True}}),
        lambda: content.update(files={name: {**entry, "num_bytes": 10**30}}),
        lambda: content.update(files={name: {**entry, "sha256": 5}}),
        lambda: content.update(files={name: {**entry, "sha256": "0" * 64}}),
        lambda: content.update(step="3"),
        lambda: content.update(step=-3),
        lambda: content.update(step=None),
        lambda: content.update(state=[1]),
        lambda: content.pop("state"),
        lambda: content.pop("step"),
    ]
    rng.choice(changes)()
    (folder / MANIFEST).write_text(_sign(content))


def _hostile_json(folder: Path, rng: random.Random) -> None:
    content = _content(folder)
    texts = [
        "[" * 200_000,
        '{"a":' * 100_000,
        "null",
        "[]",
        '"text"',
        "9" * 10_000,
        "",
        "{}",
        json.dumps({"format": FORMAT}),
        _sign(content, format_version=FORMAT_VERSION + 1),
        _sign(content, format_version=0),
        _sign(content, format_version=True),
        _sign(content, format_version=1.0),
        _sign(content, format_version="1"),
        _sign(content, content_sha256=None),
        _sign(content, content=[content]),
        '{"format": "\\ud800", "format_version": 1}',
    ]
    (folder / MANIFEST).write_text(rng.choice(texts))


def _hostile_table(folder: Path, rng: random.Random) -> None:
    """Move shards, or describe them as what they are not, in the table of ``checkpoint.json``."""
    content = _content(folder)
    table, entry = content["tensors"], content["tensors"]["model.a"]
    shard = entry["shards"][0]

    def place(at: int, value: Any) -> None:
        shard[at] = value

    changes: list[Callable[[], Any]] = [
        lambda: place(0, "rank_00001.safetensors"),
        lambda: place(0, "../outside.safetensors"),
        lambda: place(0, None),
        lambda: place(1, [2, 0]),
        lambda: place(1, [-1, 0]),
        lambda: place(1, [0]),
        lambda: place(1, [0.0, 0]),
        lambda: place(1, None),
        lambda: place(1, [2**70, 0]),
        lambda: place(2, [3, 4]),
        lambda: place(2, [12]),
        lambda: entry.update(shape=[8, 3]),  # half of it is nowhere
        lambda: entry.update(shape=[2**60, 2**60]),
        lambda: entry.update(shape="43"),
        lambda: entry.update(shape=[12], shards=[[shard[0], [0], [12]]]),
        lambda: entry.update(dtype="I32"),
        lambda: entry.update(dtype="F4"),
        lambda: entry.update(dtype=["F32"]),
        lambda: entry.update(shards=[shard, shard]),
        lambda: entry.update(shards=[]),
        lambda: entry.update(shards={"a": 1}),
        lambda: entry.update(shards="abc"),
        lambda: table.pop("model.a"),
        lambda: table.update({"model.a": 3}),
        lambda: table.update({"model\n.c": entry}),
        lambda: content.update(tensors=[table]),
        lambda: content.pop("tensors"),
    ]
    rng.choice(changes)()
    (folder / MANIFEST).write_text(_sign(content))


def _hostile_header(folder: Path, rng: random.Random) -> None:
    """Write another header (and fitting checksums) into the shards' file."""
    path = _file(folder)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    changes: list[Callable[[], Any]] = [
        lambda: header["model.a"].update(shape=[3, 4]),
        lambda: header["model.a"].update(dtype="I32"),
        lambda: header["model.a"].update(dtype="F4"),
        lambda: header["model.a"].update(shape=[2**40, 2**40]),
        lambda: header["model.a"].update(data_offsets=[0, 2**63]),
        lambda: header["model.a"].update(data_offsets=[-8, 40]),
        lambda: header["model.a"].update(data_offsets=[48, 0]),
        lambda: header.update({"../../outside": header.pop("model.a")}),
    ]
    rng.choice(changes)()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", rng.choice([len(text)] * 9 + [2**62])) + text + body
    path.write_bytes(raw)
    content = _content(folder)
    content["files"][path.name] = {
        "num_bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    (folder / MANIFEST).write_text(_sign(content))


# --- what disks, copies and users do --------------------------------------------------------------


def _any_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def _flip_bit(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    raw = bytearray(path.read_bytes())
    # The headers too, often: they are short beside the rest.
    raw[rng.randrange(rng.choice([8, 300, len(raw)]))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def _truncate(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    os.truncate(path, rng.randrange(path.stat().st_size))


def _lengthen(folder: Path, rng: random.Random) -> None:
    with _any_file(folder, rng).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def _remove(folder: Path, rng: random.Random) -> None:
    _any_file(folder, rng).unlink()


def _replace_by_other_kind(folder: Path, rng: random.Random) -> None:
    path = _any_file(folder, rng)
    moved = folder.parent / f"moved_{path.name}"
    path.rename(moved)
    rng.choice(
        [
            lambda: path.mkdir(),
            lambda: os.mkfifo(path),  # opening it would wait for ever
            lambda: path.symlink_to(moved),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to(path.name),
        ]
    )()


class _Bomb:
    def __reduce__(self) -> Any:
        return (builtins.print, ("a pickle was opened",))


def _add_foreign(folder: Path, rng: random.Random) -> None:
    name = rng.choice(
        [".metadata", "model.pt", "extra.safetensors", "x.bin", "rank_00001.safetensors"]
    )
    (folder / name).write_bytes(rng.choice([pickle.dumps(_Bomb()), rng.randbytes(200), b""]))


def _pickle_in_place(folder: Path, rng: random.Random) -> None:
    _any_file(folder, rng).write_bytes(pickle.dumps(_Bomb()))


def _swap(folder: Path, rng: random.Random) -> None:
    """Exchange a file with that of another checkpoint, or the two files with each other."""
    other = folder.parent / "other"
    write_checkpoint(
        other, 4, {name: tensor + 1 for name, tensor in _tensors().items()}, {}, RankSync()
    )
    if rng.random() < 0.3:
        a, b = folder / MANIFEST, _file(folder)
        content = a.read_bytes()
        b.replace(a)
        b.write_bytes(content)
    else:
        path = _any_file(folder, rng)
        shutil.copyfile(other / "step_4" / path.name, path)


MUTATIONS = (
    *(_flip_bit,) * 5,
    *(_hostile_manifest,) * 3,
    *(_hostile_header,) * 2,
    *(_hostile_table,) * 4,
    *(_hostile_json,) * 2,
    _truncate,
    _lengthen,
    _remove,
    _replace_by_other_kind,
    _add_foreign,
    _pickle_in_place,
    _swap,
)


def _snapshot(root: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found


@pytest.mark.timeout(120)  # a hang is a failure
def test_damaged_and_hostile_folders_give_one_line_or_the_right_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_checkpoint(tmp_path / "good", 3, _tensors(), {"epoch": 1}, RankSync())
    truth = {name: value.clone() for name, value in _tensors().items()}
    unpickled: list[str] = []
    watching = [True]

    def watch(event: str, _: Any) -> None:
        if watching[0] and event == "pickle.find_class":
            unpickled.append(event)

    sys.addaudithook(watch)
    outcomes: Counter[str] = Counter()
    try:
        for seed in range(COUNT):
            rng = random.Random(seed)
            root = tmp_path / f"case_{seed}"
            folder = root / "step_3"
            shutil.copytree(good, folder)
            mutation = MUTATIONS[seed % len(MUTATIONS)]
            mutation(folder, rng)
            before = _snapshot(root)
            tensors = {name: torch.zeros_like(value) for name, value in truth.items()}
            where = f"seed {seed}, {mutation.__name__}"
            try:
                manifest = verify_checkpoint(folder)
                load_tensors(folder, tensors, RankSync())
            except UserError as error:
                text = str(error)
                assert "\n" not in text, (where, text)
                assert len(text) < 600, (where, text)
                assert str(folder) in text, (where, text)
                outcomes[f"{mutation.__name__} refused"] += 1
            else:
                assert manifest.step == 3, where
                for name, value in truth.items():
                    assert torch.equal(tensors[name], value), (where, name)
                outcomes[f"{mutation.__name__} loaded"] += 1
            assert _snapshot(root) == before, where
            shutil.rmtree(root)
    finally:
        watching[0] = False
    assert not unpickled
    assert capsys.readouterr().out == ""
    refused = sum(count for name, count in outcomes.items() if name.endswith("refused"))
    assert refused > 0.8 * COUNT, outcomes
    assert outcomes["_add_foreign loaded"] > 0
    assert outcomes["_add_foreign refused"] == 0
    for harmful in ("_truncate", "_lengthen", "_remove", "_replace_by_other_kind", "_swap"):
        assert outcomes[f"{harmful} loaded"] == 0, outcomes

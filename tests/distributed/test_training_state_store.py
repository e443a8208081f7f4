"""Training checkpoints written and read by real process groups, on every kind of mesh."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed.harness import run_ranks
from torchtune_cp.checkpointing import shard_files, training_state_store
from torchtune_cp.checkpointing.rank_sync import RankSync, RemoteError
from torchtune_cp.checkpointing.training_state_store import (
    list_checkpoints,
    load_tensors,
    stored_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from torchtune_cp.errors import UserError

pytestmark = pytest.mark.distributed

#: Mesh by world size: what a checkpoint is written and read on.
LAYOUTS = {
    4: ("fsdp4", "fsdp2_tp2", "hsdp2x2", "plain"),
    2: ("fsdp2", "tp2"),
    1: ("plain",),
}
STEPS_DURING_A_SAVE = 3


class Net(nn.Module):
    """Sizes that no mesh divides; ``few`` leaves a rank of four without a row."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 7)
        self.few = nn.Linear(5, 3).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def _net(layout: str, seed: int) -> Net:
    net = Net(seed)
    if layout == "plain":
        return net
    shape = {"fsdp2_tp2": (2, 2), "hsdp2x2": (2, 2)}.get(layout, (dist.get_world_size(),))
    names = {"fsdp2_tp2": ("fsdp", "tp"), "hsdp2x2": ("replicate", "fsdp"), "tp2": ("tp",)}.get(
        layout, ("fsdp",)
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
    if "fsdp" in names:
        weights = mesh if layout == "hsdp2x2" else mesh["fsdp"]
        for part in (net.few, net):
            fully_shard(part, mesh=weights)
    return net


def _tensors(net: Net) -> dict[str, torch.Tensor]:
    """Weights, a moment of each, a number of steps, and this rank's own tensor."""
    weights = {f"model.{name}": value.detach() for name, value in net.named_parameters()}
    moments = {
        f"optimizer.state.{name}.exp_avg": value.detach() * 3
        for name, value in net.named_parameters()
    }
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        **weights,
        **moments,
        "optimizer.state.up.weight.step": torch.tensor(float(net.up.weight.shape[0])),
        f"rng.{rank}.cpu": torch.full((9,), rank, dtype=torch.uint8),
    }


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _blank(tensors: dict[str, torch.Tensor]) -> None:
    """Fill with a value that no checkpoint holds."""
    for tensor in tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(77)


def _differences(folder: Path, tensors: dict[str, torch.Tensor], rank_sync: RankSync) -> list[str]:
    """Read into blank tensors; name what then differs from the net that was saved."""
    _blank(tensors)
    truth = _tensors(Net(0))
    load_tensors(folder, tensors, rank_sync)
    return [name for name, value in tensors.items() if not torch.equal(_full(value), truth[name])]


def _write_all(folder: str) -> dict[str, Any]:
    """Write with every layout of this world size, read with every one; count shards and bytes."""
    rank_sync = RankSync()
    report: dict[str, Any] = {"bytes": {}, "strided": False}
    layouts = LAYOUTS[dist.get_world_size()]
    for layout in layouts:
        tensors = _tensors(_net(layout, seed=0))
        report["strided"] |= any(
            "_StridedShard" in repr(t.placements)
            for t in tensors.values()
            if isinstance(t, DTensor)
        )
        path = write_checkpoint(Path(folder) / layout, 7, tensors, {"layout": layout}, rank_sync)
        report["bytes"][layout] = sum(
            file.num_bytes for file in verify_checkpoint(path, rank_sync).files
        )
    report["differences"] = _read_each(folder, rank_sync)
    rank_sync.close()
    return report


def _read_each(folder: str, rank_sync: RankSync) -> dict[tuple[str, str], list[str]]:
    found = {}
    for read in LAYOUTS[rank_sync.world_size]:
        tensors = _tensors(_net(read, seed=1))
        for written in LAYOUTS[4]:
            path = Path(folder) / written / "step_7"
            found[written, read] = _differences(path, tensors, rank_sync)
    return found


def _read_all(folder: str) -> dict[tuple[str, str], list[str]]:
    rank_sync = RankSync()
    found = _read_each(folder, rank_sync)
    rank_sync.close()
    return found


def test_a_checkpoint_of_any_mesh_is_read_bit_equal_on_any_other(tmp_path: Path) -> None:
    reports = run_ranks(4, _write_all, str(tmp_path))
    assert reports[0]["strided"], "FSDP over TP must give strided shards, or this proves little"
    for report in reports:
        assert report["differences"] == {
            (written, read): [] for written in LAYOUTS[4] for read in LAYOUTS[4]
        }
    # Replicas are written once: no layout takes more than headers above the tensors' own bytes.
    values = sum(t.numel() * t.element_size() for t in _tensors(Net(0)).values()) + 3 * 9
    assert all(values < size < values + 4 * 3000 for size in reports[0]["bytes"].values())
    for found in run_ranks(2, _read_all, str(tmp_path)):
        assert found == {(written, read): [] for written in LAYOUTS[4] for read in LAYOUTS[2]}
    # And here, without any process group.
    rank_sync = RankSync()
    assert _read_each(str(tmp_path), rank_sync) == {
        (written, "plain"): [] for written in LAYOUTS[4]
    }
    stored = stored_tensors(tmp_path / "fsdp4" / "step_7")
    assert [name for name in sorted(stored) if name.startswith("rng.")] == [
        f"rng.{rank}.cpu" for rank in range(4)
    ]


@contextmanager
def _patched(module: Any, name: str, value: Any, *, rank: int) -> Iterator[None]:
    original = getattr(module, name)
    if dist.get_rank() == rank:
        setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _raises(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def _digests(parent: Path) -> dict[str, str]:
    return {
        str(path.relative_to(parent)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(parent.rglob("*"))
        if path.is_file()
    }


def _caught(call: Any) -> tuple[str, str]:
    try:
        call()
    except (OSError, UserError, RemoteError, TypeError, AssertionError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _fail_in_turn(folder: str) -> dict[str, Any]:
    """Fail on one rank after the other and in every stage; return what this rank was told."""
    parent = Path(folder)
    rank_sync = RankSync()
    tensors = _tensors(_net("fsdp4", seed=0))
    write_checkpoint(parent, 1, tensors, {}, rank_sync)
    earlier = _digests(parent)

    def write(step: int, state: dict[str, Any] | None = None, **more: torch.Tensor) -> Any:
        return _caught(
            lambda: write_checkpoint(parent, step, {**tensors, **more}, state or {}, rank_sync)
        )

    told: dict[str, Any] = {}
    for rank in (0, 2):
        with _patched(shard_files, "_write", _raises, rank=rank):
            told[f"disk full on {rank}"] = write(2)
    with _patched(training_state_store, "write_text", _raises, rank=0):
        told["no description"] = write(2)
    with _patched(training_state_store, "rename_into_place", _raises, rank=0):
        told["no rename"] = write(1)
    odd = torch.zeros(3).to_sparse() if dist.get_rank() == 3 else torch.zeros(3)
    told["sparse"] = write(2, odd=odd)
    told["not plain"] = write(2, {"a": (1, 2)})
    dist.barrier()
    told["untouched"] = _digests(parent) == earlier
    told["names"] = sorted(path.name for path in parent.iterdir())

    with _patched(shard_files, "_read_slice", _raises, rank=1):
        told["read error"] = _caught(lambda: load_tensors(parent / "step_1", tensors, rank_sync))
    more = {"model.new": torch.zeros(1)} if dist.get_rank() == 2 else {}
    told["missing"] = _caught(
        lambda: load_tensors(parent / "step_1", {**tensors, **more}, rank_sync)
    )
    fewer = {name: value for name, value in tensors.items() if "exp_avg" not in name}
    told["unexpected"] = _caught(lambda: load_tensors(parent / "step_1", fewer, rank_sync))
    dist.barrier()
    if dist.get_rank() == 0:
        body = parent / "step_1" / "rank_00003.safetensors"
        damaged = bytearray(body.read_bytes())
        damaged[-1] ^= 1
        body.write_bytes(damaged)
    dist.barrier()
    told["damaged"] = _caught(lambda: verify_checkpoint(parent / "step_1", rank_sync))
    rank_sync.close()
    return told


def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing_visible(tmp_path: Path) -> None:
    told = run_ranks(4, _fail_in_turn, str(tmp_path))
    for case, failing in (
        ("disk full on 0", 0),
        ("disk full on 2", 2),
        ("no description", 0),
        ("no rename", 0),
    ):
        for rank, report in enumerate(told):
            kind, text = report[case]
            assert kind == ("OSError" if rank == failing else "RemoteError"), (case, rank, text)
            assert "No space left on device" in text
            assert rank == failing or f"rank {failing}: OSError" in text
    for rank, report in enumerate(told):
        kind, text = report["sparse"]
        assert kind == ("UserError" if rank == 3 else "RemoteError")
        assert "odd is a torch.sparse_coo tensor" in text
        assert report["not plain"][0] == ("TypeError" if rank == 0 else "RemoteError")
        assert report["untouched"]
        assert report["names"] == ["step_1"]
    for case, expected in (
        ("read error", "No space left on device"),
        ("missing", "it lacks model.new"),
        ("unexpected", "optimizer.state.down.bias.exp_avg"),
        ("damaged", "rank_00003.safetensors is damaged"),
    ):
        assert {report[case][0] for report in told} == {"UserError"}, case
        (text,) = {report[case][1] for report in told}  # the same line on every rank
        assert expected in text
        assert "\n" not in text


def _save_while_training(folder: str) -> dict[str, Any]:
    """Write in a background thread while the main thread trains with collectives of its own.

    No rank writes its bytes before its training has gone on for some steps.
    """
    rank_sync = RankSync()
    saved = _tensors(_net("fsdp2_tp2", seed=0))
    net = _net("fsdp4", seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    write = shard_files._write

    went_on = threading.Event()

    def late(*arguments: Any) -> None:
        assert went_on.wait(60), "training stands still while a checkpoint is written"
        write(*arguments)

    shard_files._write = late  # type: ignore[assignment]
    errors: list[Exception] = []

    def save() -> None:
        try:
            write_checkpoint(Path(folder), 1, saved, {}, rank_sync)
        except Exception as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    steps = during = 0
    sums_right = True
    saving = torch.ones(1)
    while saving.item():
        steps += 1
        net(torch.full((2, 6), float(dist.get_rank()))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = torch.full((1000,), float(steps))
        dist.all_reduce(total)
        sums_right &= bool((total == 4 * steps).all())
        saving.fill_(thread.is_alive())
        during += int(saving.item())
        dist.all_reduce(saving, op=dist.ReduceOp.MAX)
        if steps == STEPS_DURING_A_SAVE:
            went_on.set()
    thread.join()
    shard_files._write = write  # type: ignore[assignment]
    differences = _differences(Path(folder) / "step_1", _tensors(_net("fsdp4", seed=1)), rank_sync)
    rank_sync.close()
    return {
        "errors": [repr(error) for error in errors],
        "steps during the save": during,
        "sums right": sums_right,
        "differences": differences,
    }


def test_a_background_thread_saves_while_the_main_thread_communicates(tmp_path: Path) -> None:
    for report in run_ranks(4, _save_while_training, str(tmp_path)):
        assert report["errors"] == []
        assert report["differences"] == []
        assert report["sums right"]
        assert report["steps during the save"] >= STEPS_DURING_A_SAVE
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]

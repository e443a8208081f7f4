"""What each rank does in the tests of saving; imports little, as every rank does so anew."""

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtune_cp.checkpointing import FullModelHFCheckpointer, hf_safetensors
from torchtune_cp.errors import UserError
from torchtune_cp.models import TransformerDecoder, auto_model

GROUP_TIMEOUT_S = 5
SLOW_WRITE_S = 8.0
MAX_FILE_BYTES = 20_000


def fill(model: TransformerDecoder, checkpointer: FullModelHFCheckpointer, seed: int = 0) -> None:
    """Give a plain model its weights."""
    source = checkpointer.source(model, seed)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        parameter.data.copy_(source.read(name, (0,) * len(shape), shape))


def _sharded(base: str) -> TransformerDecoder:
    """The folder's model as FSDP2 shards it."""
    model = auto_model(base)
    fill(model, FullModelHFCheckpointer(base))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def _save(folder: str, model: TransformerDecoder) -> None:
    checkpointer = FullModelHFCheckpointer(f"{folder}/base", output_dir=folder)
    checkpointer.save_final(model, max_file_bytes=MAX_FILE_BYTES)


def save_from_ranks(folders: list[str]) -> list[int]:
    """Save the model of each folder's base/; return how many bytes this rank wrote for each."""
    counts = []
    write = hf_safetensors._write_tensor

    def counting(file, tensor):
        counts[-1] += tensor.numel() * tensor.element_size()
        write(file, tensor)

    hf_safetensors._write_tensor = counting
    for folder in folders:
        counts.append(0)
        _save(folder, _sharded(f"{folder}/base"))
    return counts


def slow_write(folder: str) -> float:
    """Save with a write on rank 0 longer than the group's time-out; return the seconds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/base/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    model = _sharded(f"{folder}/base")
    write = hf_safetensors._write_small_files

    def slow(*arguments):
        time.sleep(SLOW_WRITE_S)
        write(*arguments)

    hf_safetensors._write_small_files = slow
    started = time.monotonic()
    _save(folder, model)
    return time.monotonic() - started


def failing_write(folder: str) -> str:
    """Save while rank 1 finds its disk full; return what the rank is told."""
    model = _sharded(f"{folder}/base")
    if dist.get_rank() == 1:

        def full(*_):
            raise OSError(28, "No space left on device")

        hf_safetensors._write_tensor = full
    try:
        _save(folder, model)
    except UserError as error:
        return str(error)
    return "saved"

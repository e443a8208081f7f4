"""Reads what W&B writes in offline mode."""

import json
import struct
from pathlib import Path


def wandb_records(path: Path) -> list:
    """Read a ``.wandb`` file: W&B's header, then protobuf records in LevelDB's log format.

    The format (LevelDB's doc/log_format.md): blocks of 32 KiB; each fragment has a checksum (4
    bytes), a length (2) and a type (1 full, 2 first, 3 middle, 4 last). W&B's header takes 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    records, position, parts = [], 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if kind == 0:
            position += left
            continue
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def items(pairs) -> dict:
    """Key to value of a record's items."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in pairs}

"""Validates a checkpoint's record.

Its checksum protects against damage, not against forgery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchtune_cp.checkpointing.manifest import Manifest, shown
from torchtune_cp.checkpointing.plain_json import from_plain
from torchtune_cp.errors import UserError

_Check = Callable[[Any], bool]


def _from(low: int) -> _Check:
    return lambda value: type(value) is int and low <= value < 2**63


def _is_number(value: Any) -> bool:
    try:
        number = from_plain(value)
    except ValueError:
        return False
    return isinstance(number, (int, float)) and not isinstance(number, bool)


def _is_list_of(kind: type) -> _Check:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is(kind: type) -> _Check:
    return lambda value: isinstance(value, kind)


def _or_null(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


_MESH: dict[str, Any] = {name: _from(1) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
_LOADER: dict[str, Any] = {
    "epoch": _from(0),
    "samples_read": _from(0),
    "num_samples": _is(int),
    "seed": _is(int),
    "shuffle": _is(bool),
}
_OPTIMIZER: dict[str, Any] = {
    "class": _is(str),
    "has_state": _is(bool),
    "packed_per_rank": _is(bool),
    "values": _is(dict),
    "param_groups": _is_list_of(dict),
}
_RECORD: dict[str, Any] = {
    "seed": lambda value: _from(0)(value) and value < 2**32,
    "world_size": _from(1),
    "mesh": _MESH,
    "config": _is(dict),
    "step": _from(0),
    "epoch": _from(0),
    "step_in_epoch": _from(0),
    "total_steps": _from(0),
    "global_batch_size": _from(1),
    "loader": _LOADER,
    "nonfinite_steps": _from(0),
    "optimizer": _OPTIMIZER,
    "scheduler": _or_null(_is(dict)),
    "rng": _is_list_of(str),
    "val_loss": _or_null(_is_number),
}


def check_record(manifest: Manifest) -> None:
    """Check every value that a recipe reads from a checkpoint's state.

    What the optimizer and the schedule keep is compared with their own when it is given to them.

    Args:
        manifest: Of a checkpoint that is whole.

    Raises:
        UserError: Something is missing or of another kind; names it.
    """
    problem = next(_problems(manifest.state, _RECORD, ""), None)
    if problem is None and manifest.state["step"] != manifest.step:
        problem = f"step is {manifest.state['step']} in its state and {manifest.step} above"
    stream = manifest.state.get("loader", {}).get("stream", {}) if problem is None else {}
    if not isinstance(stream, dict) or not all(map(_from(0), stream.values())):
        problem = f"loader.stream is {shown(stream)}, which is not a valid value"
    if problem is not None:
        raise UserError(
            f"resume_from_checkpoint: cannot use checkpoint {manifest.folder}: checkpoint.json: {problem}"
        )


def _problems(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, check in wanted.items():
        if name not in found:
            yield f"{where}{name} is missing"
        elif isinstance(check, Mapping):
            if isinstance(found[name], dict):
                yield from _problems(found[name], check, f"{where}{name}.")
            else:
                yield f"{where}{name} is {shown(found[name])}, which is not a valid value"
        elif not check(found[name]):
            yield f"{where}{name} is {shown(found[name])}, which is not a valid value"

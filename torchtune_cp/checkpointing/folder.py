"""Inspects a Hugging Face model folder without loading it: its tensors, and whether it is complete.

Only headers are read and nothing here imports torch, so that the command line can refuse a broken
download before any process is started.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torchtune_cp.checkpointing.header import TensorEntry, read_header, require_word, same_bytes
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.errors import NotFoundHereError, UserError

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_config.json"

#: What a config's `checkpoint_files` may be: file names, or torchtune's short form
#: `{filename_format: "model-{}-of-{}.safetensors", max_filename: "00004"}`.
CheckpointFiles = Sequence[str] | Mapping[str, Any]

# No file system takes longer names.
_MAX_NAME = 255
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def _require_folder(checkpoint_dir: str | Path) -> Path:
    folder = expand_home(checkpoint_dir)
    if not os.path.isdir(folder):  # where it cannot be looked at, too
        raise NotFoundHereError(
            f"checkpointer.checkpoint_dir: {folder} is not a folder; give the folder of a "
            "downloaded Hugging Face model (`tune download REPO_ID`), or null to start from "
            "random weights"
        )
    return folder


def _inside(folder: Path, name: object, where: str) -> Path:
    """Join a name from outside to the folder; refuse one that leads out of it."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > _MAX_NAME:
        # Control characters and lone surrogates too: no file of a model is called so.
        raise UserError(f"{where} names {str(name)[:_MAX_NAME]!r}, which is not a file name")
    if Path(name).suffix in _PICKLE_SUFFIXES:
        raise UserError(
            f"{where} names {name}: that is a pickle, which can run any code when it is opened, "
            "and it cannot be read slice by slice; only *.safetensors is read (save_pretrained "
            "of transformers writes it)"
        )
    # Symbolic links are followed: Hugging Face's cache is made of them. The name alone must stay
    # inside.
    parts = PurePosixPath(name.replace("\\", "/"))
    # Whatever system a folder was made for: C:x.safetensors leaves it on Windows.
    if parts.is_absolute() or PureWindowsPath(name).anchor or ".." in parts.parts:
        raise UserError(f"{where} names {name}, which is outside {folder}")
    if parts.suffix != ".safetensors":
        raise UserError(f"{where} names {name}: only *.safetensors files are read")
    return folder / parts


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error


def _listed_files(checkpoint_files: CheckpointFiles) -> list[Any]:
    """Spell out `checkpoint_files`."""
    key = "checkpointer.checkpoint_files"
    if isinstance(checkpoint_files, str):
        return [checkpoint_files]
    if not isinstance(checkpoint_files, Mapping):
        return list(checkpoint_files)
    allowed = {"filename_format", "max_filename"}
    if set(checkpoint_files) != allowed:
        raise UserError(
            f"{key}: a mapping must have exactly the keys filename_format and max_filename, not "
            f"{sorted(map(str, checkpoint_files))}"
        )
    pattern = str(checkpoint_files["filename_format"])
    last = str(checkpoint_files["max_filename"])
    if not last.isdigit() or pattern.count("{}") != 2:
        raise UserError(
            f"{key}: filename_format must hold two {{}} and max_filename be a number in quotes "
            'such as "00004", '
            f"not {pattern!r} and {last!r}"
        )
    return [
        pattern.format(str(number).zfill(len(last)), last) for number in range(1, int(last) + 1)
    ]


def weight_files(
    checkpoint_dir: str | Path, checkpoint_files: CheckpointFiles | None = None
) -> tuple[list[Path], dict[str, Path] | None]:
    """Find the weight files of a folder.

    Args:
        checkpoint_dir: Folder of a Hugging Face model.
        checkpoint_files: Names to read instead of those that the folder's index gives.

    Returns:
        The files in order, and the index's tensor name to file map (None without an index).

    Raises:
        UserError: There is nothing to read, or two sets of files, or a name is refused (pickle, outside
            the folder).
    """
    folder = _require_folder(checkpoint_dir)
    if checkpoint_files:
        key = "checkpointer.checkpoint_files"
        listed = [_inside(folder, name, key) for name in _listed_files(checkpoint_files)]
        doubled = {path.name for path in listed if listed.count(path) > 1}
        if doubled:
            raise UserError(f"{key} names {', '.join(sorted(doubled))} more than once")
        return listed, None
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        content = _read_json(index)
        named = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(named, dict) or not named:
            raise UserError(f"{index} has no weight_map; download it again")
        try:
            for tensor in named:
                require_word(tensor)
        except ValueError as error:
            raise UserError(f"{index}: {error}; download it again") from error
        paths = {tensor: _inside(folder, file, str(index)) for tensor, file in named.items()}
        if single.exists() and single not in paths.values():
            raise UserError(
                f"{folder} holds two sets of weights, {SINGLE_NAME} and the files of {INDEX_NAME}: move "
                "one of them away, or name the files to read in checkpointer.checkpoint_files"
            )
        return sorted(set(paths.values())), paths
    if single.exists() or single.is_symlink():
        return [single], None
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise UserError(
            f"{folder} holds its weights as {pickles[0]}: a pickle can run any code when it is "
            "opened; only *.safetensors is read (save_pretrained of transformers writes it)"
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    raise UserError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; "
        + (
            f"it holds {', '.join(found[:5])}: name the files to read in "
            "checkpointer.checkpoint_files"
            if found
            else "download the model again"
        )
    )


def read_headers(
    checkpoint_dir: str | Path, checkpoint_files: CheckpointFiles | None = None
) -> dict[str, tuple[Path, TensorEntry]]:
    """Find every tensor of a folder: its file and its description.

    Args:
        checkpoint_dir: Folder of a Hugging Face model.
        checkpoint_files: Names to read instead of those that the folder's index gives.

    Returns:
        Tensor name to `(file, description)`.

    Raises:
        UserError: A file is missing, damaged or truncated, lacks a tensor that the index places in
            it, or two files hold the same tensor (with an index: with other values).
    """
    files, index = weight_files(checkpoint_dir, checkpoint_files)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UserError(
            f"{Path(checkpoint_dir)} lacks {', '.join(missing)}: {len(missing)} of {len(files)} "
            "weight files; run the download again"
        )
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    for path in files:
        for name, entry in read_header(path).items():
            if name not in tensors:
                tensors[name] = (path, entry)
                continue
            if index is None or not same_bytes(tensors[name], (path, entry)):
                raise UserError(
                    f"tensor {name} is in both {tensors[name][0].name} and {path.name}; "
                    "the files must be those of one model (checkpointer.checkpoint_files names them)"
                )
            if index.get(name) == path:
                tensors[name] = (path, entry)
    for name, path in (index or {}).items():
        if name not in tensors or tensors[name][0] != path:
            raise UserError(
                f"{path} lacks tensor {name}, which {INDEX_NAME} places there; download it again"
            )
    if not tensors:
        raise UserError(f"{Path(checkpoint_dir)}: the weight files hold no tensor")
    return tensors


def unread_weights(checkpoint_dir: str | Path, read: Collection[Path]) -> list[str]:
    """Names of further files that look like weights but are not read.

    Args:
        checkpoint_dir: Folder of a Hugging Face model.
        read: Those that are read.
    """
    return sorted(
        path.name
        for path in Path(checkpoint_dir).iterdir()
        if path.suffix in (".safetensors", ".gguf", *_PICKLE_SUFFIXES) and path not in read
    )


def _unfinished_downloads(folder: Path) -> list[Path]:
    # huggingface_hub keeps the pieces of a download to a folder under .cache/huggingface/download.
    cache = folder / ".cache" / "huggingface" / "download"
    return sorted([*folder.glob("*.incomplete"), *cache.rglob("*.incomplete")])


def check_folder(
    checkpoint_dir: str | Path, checkpoint_files: CheckpointFiles | None = None
) -> None:
    """Refuse a model folder whose download is not whole, naming the file; reads headers only.

    Needs neither torch nor a process group: call it before any process starts.

    Args:
        checkpoint_dir: Folder of a Hugging Face model (`config.json` and `*.safetensors`).
        checkpoint_files: Names to read instead of those that the folder's index gives: a list, or
            `{filename_format: "model-{}-of-{}.safetensors", max_filename: "00004"}`.

    Raises:
        UserError: The folder or a file is missing, truncated, damaged, a pickle, outside the
            folder, the folder is an adapter's, or a download has been interrupted.
    """
    folder = _require_folder(checkpoint_dir)
    if (folder / ADAPTER_NAME).is_file():
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER_NAME}), which is not read: merge it into the model first "
            "(merge_and_unload of peft), or move it out of the folder to leave it out"
        )
    config = folder / CONFIG_NAME
    if not config.is_file():
        raise UserError(f"{folder} has no {CONFIG_NAME}; download the model again")
    if not isinstance(_read_json(config), dict):
        raise UserError(f"{config} is not a model's config; download it again")
    unfinished = [str(path.relative_to(folder)) for path in _unfinished_downloads(folder)]
    try:
        read_headers(folder, checkpoint_files)
    except UserError as error:
        if not unfinished:
            raise
        raise UserError(f"{error} (unfinished download: {', '.join(unfinished)})") from error
    if unfinished:
        raise UserError(
            f"{folder} holds an unfinished download ({', '.join(unfinished)}): run the download "
            "again, or delete that file if the folder is complete"
        )

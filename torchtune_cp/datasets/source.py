"""Rows of local files and of the Hugging Face hub, through the `datasets` library."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torchtune_cp.errors import UserError

LOCAL_SOURCES = ("json", "text", "csv", "parquet")


class Rows(Protocol):
    """A sequence of mappings: a `datasets.Dataset`, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def load_rows(
    source: str,
    *,
    split: str | None = "train",
    max_rows: int | None = None,
    num_proc: int | None = None,
    **kwargs: Any,
) -> Rows:
    """Load a table of rows with `datasets.load_dataset`, without progress bars.

    Args:
        source: "json" (also JSON lines), "text" (one row a line, column "text"), "csv" or "parquet"
            with `data_files`: local files, no network needed. Or a folder, or a hub data set's name.
        split: Which part, in the library's notation: "train", "train[:90%]", "train[100:]", ...
        max_rows: Take only the first so many rows.
        num_proc: The most processes that the library may use; None = one.
        **kwargs: For `load_dataset`: `data_files`, `data_dir`, `name`, `revision`, ...

    Raises:
        UserError: One line with the cause, when the rows cannot be had.
    """
    if kwargs.pop("streaming", False):
        raise UserError(
            "dataset.streaming=true is for protein_dataset in esm2_mlm_distributed; here remove it: data"
            " sets that do not fit in memory are mapped from disk"
        )
    if max_rows is not None and max_rows < 1:
        raise UserError(f"dataset.max_rows must be 1 or more, not {max_rows}")
    if num_proc is not None and num_proc < 1:
        raise UserError(f"dataset.num_proc must be 1 or more, not {num_proc}")
    if num_proc is not None and num_proc > 1:
        kwargs["num_proc"] = num_proc
    rows = _load(source, split, **kwargs)
    if max_rows is not None and len(rows) > max_rows:
        rows = rows.select(range(max_rows))
    return rows


def load_streamed_rows(source: str, *, split: str, **kwargs: Any) -> Any:
    """Find a data set whose rows are read, downloaded, and unpacked as they are asked for.

    Args:
        source: As for `load_rows`, as `kwargs`.
        split: A split by its name: parts of one are not known before it was read.
        **kwargs: For `load_dataset`.

    Returns:
        A `datasets.IterableDataset`.

    Raises:
        UserError: One line with the cause, when the data set cannot be had.
    """
    if isinstance(split, str) and "[" in split:
        raise UserError(
            f"dataset.split={split!r} must be a whole split with streaming=true: where a part of it ends"
            " is not known before it was read; max_rows takes the first rows"
        )
    return _load(source, split, streaming=True, **kwargs)


def _load(source: str, split: str | None, **kwargs: Any) -> Any:
    if not isinstance(split, str):
        raise UserError(f"dataset.split must be a string such as 'train', not {split!r}")
    if source in LOCAL_SOURCES:
        if not kwargs.get("data_files") and not kwargs.get("data_dir"):
            raise UserError(
                f"dataset.source={source!r} needs dataset.data_files: the files to read"
            )
        for path in _local_paths(kwargs.get("data_files")):
            if not path.is_file():
                raise UserError(f"dataset.data_files: {str(path)!r} does not exist")

    # Imported here: it takes a second, and text_folder_dataset does without.
    import datasets

    try:
        with quiet():
            return datasets.load_dataset(source, split=split, **kwargs)
    except Exception as error:
        # The library raises many unrelated types (of its own, of pyarrow, of the network stack); all
        # mean that the data named in the config could not be read.
        raise UserError(_failure(source, split, kwargs, error)) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Neither bars nor log lines of the libraries: the error that follows says it all, once."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    bars_were_off = datasets.are_progress_bars_disabled()
    data_level, hub_level = datasets.logging.get_verbosity(), hub_logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        hub_logging.set_verbosity(hub_level)
        datasets.logging.set_verbosity(data_level)
        if not bars_were_off:
            datasets.enable_progress_bars()


def count_blank_lines(source: str, data_files: Any) -> int:
    """Blank lines in local JSON lines files, which the library passes over without a word.

    (Blank lines of "text" files are rows, and are skipped and counted as such.)
    """
    if source != "json":
        return 0
    blank = 0
    for path in _local_paths(data_files):
        if path.suffix not in (".jsonl", ".json", ".ndjson"):
            continue
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
            if not first.lstrip().startswith(b"{"):
                continue  # one JSON array, where line breaks mean nothing
            file.seek(0)
            blank += sum(not line.strip() for line in file)
    return blank


def describe_source(source: str, kwargs: Mapping[str, Any]) -> str:
    """How messages name the data: the files where there are any, else the source."""
    files = kwargs.get("data_files")
    if not files:
        return source
    if isinstance(files, str):
        return files
    paths = [str(path) for path in _flatten(files)]
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"


def _flatten(files: Any) -> Iterator[str]:
    if files is None:
        return
    if isinstance(files, str | Path):
        yield str(files)
    elif isinstance(files, Mapping):
        for value in files.values():
            yield from _flatten(value)
    elif isinstance(files, Sequence):
        for value in files:
            yield from _flatten(value)
    else:
        raise UserError(f"dataset.data_files must be a path or a list of paths, not {files!r}")


def _local_paths(files: Any) -> Iterator[Path]:
    """The plain local paths among data_files; patterns and URLs are left to the library."""
    for name in _flatten(files):
        if "://" not in name and not any(character in name for character in "*?["):
            yield Path(name)


def _failure(source: str, split: str, kwargs: Mapping[str, Any], error: Exception) -> str:
    # The library wraps the telling error ("JSON parse error: ... in row 2") in a general one.
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reasons = []
    for found in (error, cause):
        text = " ".join(str(found).split()) or type(found).__name__
        if text not in reasons:
            reasons.append(text)
    what = describe_source(source, kwargs)
    hint = (
        ""
        if source in LOCAL_SOURCES
        else " (no network? then use local files: source: json, data_files: ...)"
    )
    return f"cannot read dataset {what!r}, split {split!r}: {': '.join(reasons)}{hint}"

"""Rows of local files and of the Hugging Face hub, through the `datasets` library."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Protocol

from torchtune_cp.config.allow import source_problem
from torchtune_cp.datasets.local_paths import PLAIN_NAME, linked, local_path
from torchtune_cp.datasets.record_files import (
    FORMATS,
    RecordFile,
    RecordRows,
    WholeDocument,
    joined,
)
from torchtune_cp.errors import NotFoundHereError, UserError

LOCAL_SOURCES = (*FORMATS, "parquet", "arrow")


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
    """Load a table of rows: local files, or what `datasets.load_dataset` finds, without progress bars.

    Local JSON, text and CSV files are read record by record as rows are asked for (`RecordRows`), unless
    there are further arguments for the library.

    Args:
        source: "json" (also JSON lines), "text" (one row a line, column "text"), "csv", "parquet" or
            "arrow" with `data_files`: local files, no network needed. Or a folder, or a hub data set's name.
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
    rows = None
    if source in FORMATS and set(kwargs) == {"data_files"} and isinstance(split, str):
        rows = _record_rows(source, split, kwargs["data_files"])
    if rows is None:
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
    if (problem := source_problem(source)) is not None:
        raise UserError(f"dataset.source: {problem}")
    if source in LOCAL_SOURCES:
        if not kwargs.get("data_files") and not kwargs.get("data_dir"):
            raise UserError(
                f"dataset.source={source!r} needs dataset.data_files: the files to read"
            )
        if kwargs.get("data_files") and not kwargs.get("data_dir"):
            kwargs["data_files"] = _names_for_library(kwargs["data_files"])
    elif source.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source}"):
        # One of the library's other readers, some of which unpickle or connect to what a file names.
        raise UserError(
            f"dataset.source={source!r} is not read here; files are read as {', '.join(LOCAL_SOURCES)}"
        )

    # Imported here: it takes a second, and text_folder_dataset does without.
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # asks a server, for local files too
    try:
        with quiet():
            rows = datasets.load_dataset(source, split=split, **kwargs)
    except Exception as error:
        # The library raises many unrelated types (of its own, of pyarrow, of the network stack); all
        # mean that the data named in the config could not be read.
        raise UserError(_failure(source, split, kwargs, error)) from error
    nested = isinstance(rows, datasets.Dataset) and any(
        not isinstance(feature, datasets.Value) for feature in rows.features.values()
    )
    return rows.with_transform(_without_nulls) if nested else rows


def _without_nulls(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Rows without the nulls that a table has for keys which other rows have."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return {column: [clean(value) for value in values] for column, values in batch.items()}


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


def _names_for_library(files: Any) -> Any:
    """The same files under names that `datasets` takes for no pattern, fragment or chain of addresses."""
    if isinstance(files, Mapping):
        return {name: _names_for_library(part) for name, part in files.items()}
    names: list[str] = []
    for name in _flatten(files):
        path = local_path(name)
        if "://" in name or not path.is_file():
            local_files(name)  # refuses what does not exist
            names.append(name)
        elif PLAIN_NAME.fullmatch(name):
            names.append(name)
        else:
            names.append(str(linked(path)))
    return names


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


def local_files(files: Any) -> list[Path] | None:
    """The local files that `data_files` names; None when something else is among them.

    A name that exists is that file, whatever characters it has; else it may be a pattern.
    """
    found: list[Path] = []
    for name in _flatten(files):
        path = local_path(name)
        if path.is_file():
            found.append(path)
        elif "://" in name:
            return None
        elif has_magic(name):
            matching = [Path(p) for p in sorted(glob(str(path), recursive=True))]
            if not any(p.is_file() for p in matching):
                raise NotFoundHereError(f"dataset.data_files: no file matches {name!r}")
            found.extend(p for p in matching if p.is_file())
        else:
            raise NotFoundHereError(f"dataset.data_files: {name!r} does not exist")
    return found


def _record_rows(source: str, split: str, files: Any) -> RecordRows | None:
    """The rows of local files, read by this package; None where `datasets` has to."""
    named = files if isinstance(files, Mapping) else {"train": files}
    read: dict[str, RecordRows] = {}
    for name, part in named.items():
        paths = local_files(part)
        if paths is None:
            return None
        try:
            read[name] = RecordRows([RecordFile(path, source) for path in paths])
        except WholeDocument:
            return None
    if split in read:
        return read[split]
    from datasets import ReadInstruction

    try:
        lengths = {name: len(rows) for name, rows in read.items()}
        parts = ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError, AttributeError) as error:
        raise UserError(_failure(source, split, {"data_files": files}, error)) from error
    chosen = [read[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return chosen[0] if len(chosen) == 1 else joined(chosen)


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

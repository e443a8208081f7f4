"""Files of a folder, each one document: long texts from any source tree or collection of books."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.packed import PackedDataset, sft_or_packed
from torchtune_cp.datasets.sft import SFTDataset
from torchtune_cp.datasets.source_arguments import check_path
from torchtune_cp.datasets.text_completion import TextReader
from torchtune_cp.errors import NotFoundHereError, UserError

_EVERY_FILE = "*.py"


class FileRows:
    """Files as rows with one column, "text"; a file is read when its row is."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        """Keep the paths, which lie below `root`."""
        self._root = root
        self._files = list(files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Mapping[str, str]:
        """The file's text, without a byte order mark; UserError when it is not UTF-8, or cannot be read."""
        try:
            text = self._files[index].read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})") from error
        if "\0" in text:
            raise UserError(f"has NUL bytes, which no text has (at character {text.index(chr(0))})")
        return {"text": text}

    @property
    def nbytes(self) -> int:
        """The sizes of the files together."""
        return sum(file.stat().st_size for file in self._files)

    def fingerprint(self) -> str:
        """A hash of the files' paths below the folder and of their contents."""
        digest = hashlib.sha256()
        for index, file in enumerate(self._files):
            # Of each file its own hash: joined contents could be cut in two ways.
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{self.name_of(index)}\n{content}\n".encode())
        return digest.hexdigest()

    def name_of(self, index: int) -> str:
        """The file's path below the folder."""
        return self._files[index].relative_to(self._root).as_posix()

    def place_of(self, index: int) -> str:
        """How messages name a file."""
        return f"file {self.name_of(index)}"


def _check_arguments(arguments: Mapping[str, Any], own: frozenset[str]) -> Iterator[UserError]:
    lacking = list(check_path(arguments, own))
    yield from lacking
    glob, path = arguments.get("glob", _EVERY_FILE), arguments.get("path")
    patterns = [glob] if isinstance(glob, str) else glob
    fits = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    if fits and isinstance(path, str | None) and not lacking:
        try:
            files = sorted(_matching(_folder(path), patterns))
            if isinstance(arguments.get("split"), str):
                _select(files, arguments["split"])
        except UserError as error:
            yield type(error)(str(error).removeprefix("dataset."))


def _folder(path: str | None) -> Path:
    if path is None:
        return Path(sysconfig.get_path("stdlib"))
    folder = expand_home(path)
    if not os.path.isdir(folder):
        raise NotFoundHereError(f"dataset.path: {path!r} is not a folder")
    return folder


def _matching(root: Path, patterns: Sequence[str]) -> set[Path]:
    files: set[Path] = set()
    for pattern in patterns:
        # A name that exists is that file, whatever characters it has.
        exact = root / pattern
        try:
            if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
                raise ValueError("it leads out of the folder")
            found = (
                [exact] if os.path.isfile(exact) else [f for f in root.glob(pattern) if f.is_file()]
            )
        except (ValueError, NotImplementedError, IndexError, OSError) as error:
            raise UserError(f"dataset.glob: {pattern!r} is no pattern of files: {error}") from None
        if not found:
            raise NotFoundHereError(f"dataset.glob: no file in {root} matches {pattern!r}")
        files.update(found)
    return files


@checked_by(_check_arguments)
def text_folder_dataset(
    tokenizer: HFTokenizer,
    path: str | None = None,
    glob: str | Sequence[str] = _EVERY_FILE,
    max_seq_len: int | None = None,
    split: str = "train",
    *,
    overlong: str | None = None,
    add_eos: bool = True,
    min_tokens: int = 0,
    max_files: int | None = None,
    on_bad_row: str = "error",
    packed: bool = False,
    split_across_pack: bool = True,
    packing_strategy: str = "greedy",
    num_proc: int | None = None,
) -> SFTDataset | PackedDataset:
    """Every file of a folder as one document; needs no network and no download.

    Files come in the order of their paths below the folder, the same on every machine.

    Args:
        tokenizer: Turns text into tokens.
        path: The folder; None = the running Python's standard library.
        glob: Which files: a pattern, or a list of patterns or file names, below the folder
            ("**/*.py" looks into sub-folders). A name that exists is that file.
        max_seq_len: The longest sample in tokens; None = the tokenizer's.
        split: Part of the files, in the notation of the `datasets` library: "train", "train[:90%]",
            "train[90%:]", "train[5:]". A folder has only the split "train".
        overlong: What to do with longer files: "split" (into consecutive samples, the default: files
            are long), "truncate", "drop" or "error"; see `SFTDataset`. Packed without
            `split_across_pack`, "error" is the default.
        add_eos: End each document with the end-of-text token.
        min_tokens: Leave out files with fewer tokens.
        max_files: Use only the first so many files (of those that are long enough).
        on_bad_row: "error" or "skip", for files that are not UTF-8 text.
        packed: Put several files into each sample, up to `max_seq_len` tokens; see `PackedDataset`.
        split_across_pack: Packed: whether one may be cut where a pack ends.
        packing_strategy: Packed: "greedy" keeps the order, "best_fit" fills better; see
            `torchtune_cp.data.packing.pack_documents`.
        num_proc: The most processes that tokenise; None = one a core. Few or small files need one.

    Raises:
        UserError: When the folder does not exist, no file matches, or a file cannot be read.
    """
    options = SampleOptions.among(locals())
    root = _folder(path)
    if max_files is not None and max_files < 1:
        raise UserError(f"dataset.max_files must be 1 or more, not {max_files}")
    ordered = sorted(
        _matching(root, [glob] if isinstance(glob, str) else glob),
        key=lambda file: file.relative_to(root).as_posix(),
    )
    rows = FileRows(root, _select(ordered, split))
    return sft_or_packed(
        rows,
        TextReader(tokenizer, "text", add_eos),
        tokenizer,
        options,
        overlong_unpacked="split",
        max_rows_used=max_files,
        name=str(root),
    )


def _select(files: list[Path], split: str) -> list[Path]:
    if split == "train":
        return files
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(files)})
    except (ValueError, AssertionError, AttributeError) as error:
        raise UserError(
            f"dataset.split={split!r} cannot be used: {error}; a folder has the split 'train', "
            "parts of it are written 'train[:90%]' or 'train[5:]'"
        ) from error
    return [file for part in parts for file in files[part.from_ : part.to]]

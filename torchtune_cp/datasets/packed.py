"""Many documents in one sample: the dataset behind `packed: true`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtune_cp.config.argument_checks import no_pack_length
from torchtune_cp.data.packing import STRATEGIES, Packs, pack_documents
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.sft import (
    OVERLONG_POLICIES,
    RowReader,
    SFTDataset,
    log_data_line,
    sequence_limit,
)
from torchtune_cp.datasets.source import Rows, describe_source, load_rows
from torchtune_cp.errors import UserError

logger = logging.getLogger(__name__)


class Documents(Protocol):
    """A map-style dataset of `{"tokens", "labels"}`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class PackStats:
    """What packing made of a dataset.

    Attributes:
        packs: Number of packs.
        documents: Documents with at least one token that are in a pack.
        tokens: Their tokens.
        fill_rate: Share of `packs * max_seq_len` that is no padding.
        documents_per_pack: Pieces in the average pack.
        most_documents: Pieces in the pack with the most.
        longest: Tokens of the longest piece.
        split: Documents that were cut into several pieces.
        truncated: Documents that lost their end.
        dropped: Documents left out for being longer than a pack.
        nothing_to_train: Documents left out because truncating left nothing to train on.
    """

    packs: int
    documents: int
    tokens: int
    fill_rate: float
    documents_per_pack: float
    most_documents: int
    longest: int
    split: int
    truncated: int
    dropped: int
    nothing_to_train: int


class PackedDataset(Dataset):
    """A map-style dataset of packs: each sample is several documents one behind the other.

    A sample is `{"tokens", "labels", "seq_lens", "input_pos"}`, int64 tensors: tokens, labels (not
    shifted) and positions [n], n at most `max_seq_len`, and the lengths of the documents [documents].
    Positions restart at 0 in each document, and in each piece of one that was cut.

    Which documents share a pack depends on their lengths and order and on the arguments here; not on
    ranks, mesh or seed. An epoch's order shuffles the packs.

    Built on first use (`len`, `[]`), or ahead with `build()`.
    """

    def __init__(
        self,
        dataset: Documents | Callable[[], Documents],
        *,
        max_seq_len: int,
        strategy: str = "greedy",
        split_across_pack: bool = False,
        overlong: str | None = None,
        name: str = "the dataset",
    ) -> None:
        """Keep the settings.

        Args:
            dataset: Map-style, of `{"tokens", "labels"}`, or a function that makes it, which is called
                when its samples are needed.
            max_seq_len: The most tokens of a pack.
            strategy: `"greedy"` or `"best_fit"`, see `pack_documents`.
            split_across_pack: Whether documents may be cut; else they are kept whole.
            overlong: What to do with documents of more than `max_seq_len` tokens: "split", "truncate",
                "drop" or "error". None = "split" where documents may be cut, else "error".
            name: What messages call the data.

        Raises:
            UserError: An unknown strategy or policy, or a `max_seq_len` below 1.
        """
        if strategy not in STRATEGIES:
            raise UserError(
                f"dataset.packing_strategy={strategy!r} is not known; allowed: "
                f"{', '.join(STRATEGIES)}"
            )
        if overlong is not None and overlong not in OVERLONG_POLICIES:
            raise UserError(
                f"dataset.overlong={overlong!r} is not known; allowed: {', '.join(OVERLONG_POLICIES)}"
            )
        if max_seq_len < 1:
            raise UserError(f"dataset.max_seq_len must be 1 or more, not {max_seq_len}")
        self.max_seq_len = max_seq_len
        self._make: Callable[[], Documents] = (
            dataset if callable(dataset) else partial(_itself, dataset)
        )
        self._strategy = strategy
        self._split = split_across_pack
        self._overlong = overlong or ("split" if split_across_pack else "error")
        self._name = name
        self._built: tuple[SFTDataset, Packs, PackStats] | None = None

    def build(self) -> PackStats:
        """Tokenise and pack now, unless that has been done; logs the statistics.

        Raises:
            UserError: A malformed row, or a document that is longer than a pack, named.
        """
        return self._content()[2]

    @property
    def stats(self) -> PackStats:
        """What packing made of the dataset."""
        return self._content()[2]

    def _content(self) -> tuple[SFTDataset, Packs, PackStats]:
        if self._built is None:
            documents = self._make()
            if isinstance(documents, SFTDataset):
                log_data_line(documents.data_line())
            else:
                documents = SFTDataset(_Places(documents, self._name), _SampleReader())
            # Not kept on disk: it takes some seconds for a million documents, so that nothing of a run's
            # settings but what the tokens depend on has to be part of the key.
            self._built = (documents, *self._pack(documents))
            self._log(self._built[2])
        return self._built

    def _pack(self, documents: SFTDataset) -> tuple[Packs, PackStats]:
        limit, lengths = self.max_seq_len, documents.lengths
        if not lengths.any():
            raise UserError(f"no samples in {self._name}: {len(lengths)} documents without a token")
        long = lengths > limit
        if self._overlong == "error" and long.any():
            first = int(np.flatnonzero(long)[0])
            raise UserError(
                f"{documents.place_of(first)} has {lengths[first]} tokens, more than a pack of {limit} "
                "(max_seq_len) holds; raise it, or set split_across_pack: true, or overlong: split, "
                "truncate or drop"
            )
        kept = lengths
        if self._overlong == "truncate":
            kept = np.minimum(lengths, limit)
        elif self._overlong == "drop":
            kept = np.where(long, 0, lengths)
        idle = []
        if self._overlong == "truncate":
            # Cutting may take all that is trained on; the first label has no token before it.
            idle = [
                d
                for d in np.flatnonzero(long).tolist()
                if not (documents.read(d, 1, limit - 1)[1] != -100).any()
            ]
            kept[idle] = 0
            if not kept.any():
                raise UserError(
                    f"no samples in {self._name}: the prompts of all documents fill a pack of {limit} "
                    "tokens (max_seq_len), which leaves nothing to train on"
                )
        if not kept.any():
            raise UserError(
                f"no samples in {self._name}: all {len(lengths)} documents are longer than a pack of "
                f"{limit} tokens (max_seq_len)"
            )
        packs = pack_documents(kept, limit, strategy=self._strategy, split_across_pack=self._split)
        per_pack = np.diff(packs.bounds)
        stats = PackStats(
            packs=len(packs),
            documents=int((kept > 0).sum()),
            tokens=int(kept.sum()),
            fill_rate=float(kept.sum() / (len(packs) * limit)),
            documents_per_pack=float(per_pack.mean()),
            most_documents=int(per_pack.max()),
            longest=int(packs.length.max()),
            split=int((np.bincount(packs.document) > 1).sum()),
            truncated=int(long.sum()) if self._overlong == "truncate" else 0,
            dropped=int(long.sum()) if self._overlong == "drop" else 0,
            nothing_to_train=len(idle),
        )
        return packs, stats

    def _log(self, stats: PackStats) -> None:
        counts = {"cut": stats.split, "truncated": stats.truncated, "dropped": stats.dropped}
        counts["left out with nothing to train on"] = stats.nothing_to_train
        logger.info(
            "packed %s: %d documents in %d packs of %d tokens (%s), %.1f %% filled, %.1f documents a "
            "pack (at most %d), the longest %d tokens%s",
            self._name,
            stats.documents,
            stats.packs,
            self.max_seq_len,
            self._strategy,
            100 * stats.fill_rate,
            stats.documents_per_pack,
            stats.most_documents,
            stats.longest,
            "".join(f", {count} documents {what}" for what, count in counts.items() if count),
        )

    def __len__(self) -> int:
        """Number of packs."""
        return len(self._content()[1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Pack `index`; see the class."""
        documents, packs, _ = self._content()
        if index < 0:
            index += len(packs)
        if not 0 <= index < len(packs):
            raise IndexError(f"pack {index} of {len(packs)}")
        pieces = list(packs.pieces(index))
        read = [documents.read(*piece) for piece in pieces]
        lengths = [length for _, _, length in pieces]
        return {
            "tokens": _joined([tokens for tokens, _ in read]),
            "labels": _joined([labels for _, labels in read]),
            "seq_lens": torch.tensor(lengths),
            "input_pos": torch.cat([torch.arange(length) for length in lengths]),
        }


def _joined(parts: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _itself(dataset: Documents) -> Documents:
    return dataset


class _Places:
    """Documents as rows."""

    def __init__(self, documents: Documents, name: str) -> None:
        self._documents = documents
        self._name = name

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._documents[index]

    def place_of(self, index: int) -> str:
        place_of = getattr(self._documents, "place_of", None)
        return f"sample {index} of {self._name}" if place_of is None else str(place_of(index))


class _SampleReader:
    """Reads what is a sample already."""

    def check(self, row: Mapping[str, Any]) -> None:
        """Every document counts, one without a token too."""

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        tokens, labels = (np.asarray(row[key]).tolist() for key in ("tokens", "labels"))
        return tokens, labels


def sft_or_packed(
    rows: Rows,
    reader: RowReader,
    tokenizer: HFTokenizer,
    options: SampleOptions,
    *,
    name: str,
    overlong_unpacked: str = "truncate",
    max_rows_used: int | None = None,
    blank_lines: int = 0,
) -> SFTDataset | PackedDataset:
    """What every factory ends with: one sample a row, or packs of them.

    Args:
        rows: The data.
        reader: How to make tokens of a row.
        tokenizer: Gives the length limit where `options` has none.
        options: How rows become samples.
        name: What messages call the data.
        overlong_unpacked: `overlong` without packing, where `options` has none.
        max_rows_used: See `SFTDataset`.
        blank_lines: See `SFTDataset`.

    Raises:
        UserError: Packing without a length, or as `SFTDataset` and `PackedDataset`.
    """
    limit = sequence_limit(options.max_seq_len, tokenizer)
    documents = partial(
        SFTDataset,
        rows,
        reader,
        cached=True,
        on_bad_row=options.on_bad_row,
        min_tokens=options.min_tokens,
        num_proc=options.num_proc,
        max_rows_used=max_rows_used,
        blank_lines=blank_lines,
        name=name,
    )
    if not options.packed:
        dataset = documents(max_seq_len=limit, overlong=options.overlong or overlong_unpacked)
        log_data_line(dataset.data_line())
        return dataset
    if limit is None:
        raise UserError(no_pack_length("dataset"))
    return PackedDataset(
        documents,
        max_seq_len=limit,
        strategy=options.packing_strategy,
        split_across_pack=options.split_across_pack,
        overlong=options.overlong,
        name=name,
    )


def dataset_from_source(
    reader: RowReader,
    tokenizer: HFTokenizer,
    options: SampleOptions,
    *,
    source: str,
    split: str,
    max_rows: int | None,
    load_dataset_kwargs: Mapping[str, Any],
) -> SFTDataset | PackedDataset:
    """Load the rows of a source and make a dataset of them; see `load_rows` and `sft_or_packed`."""
    rows = load_rows(
        source, split=split, max_rows=max_rows, num_proc=options.num_proc, **load_dataset_kwargs
    )
    return sft_or_packed(
        rows,
        reader,
        tokenizer,
        options,
        name=describe_source(source, load_dataset_kwargs),
        blank_lines=getattr(rows, "blank_lines", 0),
    )

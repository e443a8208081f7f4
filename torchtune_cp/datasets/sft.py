"""The one dataset class behind all factories: rows -> token lists, with a policy for bad and long rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.record_files import broken_character
from torchtune_cp.datasets.source import Rows
from torchtune_cp.errors import UserError

logger = logging.getLogger(__name__)

OVERLONG_POLICIES = ("truncate", "split", "drop", "error")
BAD_ROW_POLICIES = ("error", "skip")

#: Parts of a data line that make it a warning.
NOTHING, NO_STOP = "nothing to train on", "no sample trains on a stop token"

IntArray = np.ndarray[Any, np.dtype[np.int32]]


class EmptyRow(Exception):
    """The row is well-formed but has no text; it is skipped and counted."""


class UnknownText(Exception):
    """The row has characters that the tokenizer does not know; it is left out and counted."""


class NothingToTrain(Exception):
    """The row has no token to train on, for the cause given; it is left out and counted."""


class RowReader(Protocol):
    """Turns one row into tokens. Both methods raise UserError for a malformed row, without naming it.

    A reader that does not train on every token says so in attributes and a method of its own:
    `trains_on_part` (true), `stop_ids` (the tokens of which one should be trained on) and `unread(row)`
    (what of a row changes nothing).
    """

    def check(self, row: Mapping[str, Any]) -> None:
        """Look at the row without tokenising it; raises EmptyRow or UnknownText to leave it out."""

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """(tokens, labels) of a row that `check` accepts, labels not shifted, -100 = not trained on.

        Raises NothingToTrain to leave it out.
        """


@dataclass(frozen=True)
class Outcome:
    """What became of one row.

    Attributes:
        tokens: Its tokens; [] where it was only checked, or is left out.
        labels: As long, see `RowReader`.
        cause: Why it gives no sample: "empty", "unknown", "nothing" (to train on), "bad" (malformed),
            or "".
        note: What is wrong with it, of the last two.
        unread: What of the row changes nothing.
    """

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    cause: str = ""
    note: str = ""
    unread: frozenset[str] = frozenset()


def outcome_of(
    reader: RowReader, read: Callable[[], Mapping[str, Any]], *, tokenize: bool = True
) -> Outcome:
    """Make a sample of a row, or say why there is none; depends on the row and the reader alone.

    Args:
        reader: How to make tokens of a row.
        read: Gives the row; may raise UserError.
        tokenize: False only checks the row.
    """
    try:
        row = read()
        reader.check(row)
        tokens, labels = reader.tokenize(row) if tokenize else ([], [])
    except EmptyRow:
        return Outcome(cause="empty")
    except UnknownText:
        return Outcome(cause="unknown")
    except NothingToTrain as found:
        return Outcome(cause="nothing", note=str(found))
    except UserError as error:
        return Outcome(cause="bad", note=str(error))
    unread = getattr(reader, "unread", None)
    return Outcome(tokens, labels, unread=frozenset() if unread is None else unread(row))


@dataclass
class DatasetStats:
    """What became of the rows.

    Attributes:
        rows: Rows looked at.
        samples: Samples that the dataset gives.
        empty_skipped: Rows without text, skipped.
        unknown_skipped: Rows with characters that the tokenizer does not know, left out because the
            config says so.
        bad_skipped: Malformed rows, skipped under `on_bad_row: skip`.
        short_skipped: Rows of fewer tokens than `min_tokens`, skipped.
        truncated: Rows cut to `max_seq_len`. Cutting happens when a sample is read, so these are the
            rows cut so far in this process; `SFTDataset.count_overlong` tells them all.
        dropped: Rows longer than `max_seq_len`, left out under `overlong: drop`.
        split: Rows longer than `max_seq_len`, made into several samples under `overlong: split`.
        nothing_to_train: Rows without a token to train on, left out, by cause; and pieces of split rows
            without one, which are kept.
        blank_lines: Blank lines in JSON lines files; they are no rows, and row numbers in messages
            do not count them.
        unknown_residues: How often each character outside a protein tokenizer's alphabet stood in the
            rows looked at.
        unknown_rows: How many of these rows had any.
    """

    rows: int = 0
    samples: int = 0
    empty_skipped: int = 0
    unknown_skipped: int = 0
    bad_skipped: int = 0
    short_skipped: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    nothing_to_train: Counter[str] = field(default_factory=Counter)
    blank_lines: int = 0
    unknown_residues: Counter[str] = field(default_factory=Counter)
    unknown_rows: int = 0

    def __add__(self, other: DatasetStats) -> DatasetStats:
        """What became of two parts of the rows."""
        return DatasetStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def describe(self) -> str:
        """The counts in words, those that are zero left out."""
        parts = [f"{self.rows} rows", f"{self.samples} samples"]
        for label, count in (
            ("empty rows skipped", self.empty_skipped),
            ("rows with unknown characters left out", self.unknown_skipped),
            ("malformed rows skipped", self.bad_skipped),
            ("short rows skipped", self.short_skipped),
            ("rows truncated", self.truncated),
            ("over-long rows dropped", self.dropped),
            ("over-long rows split", self.split),
            ("blank lines", self.blank_lines),
        ):
            if count:
                parts.append(f"{count} {label}")
        if self.nothing_to_train:
            causes = ", ".join(f"{n} {c}" for c, n in sorted(self.nothing_to_train.items()))
            parts.append(f"{self.nothing_to_train.total()} samples with {NOTHING} ({causes})")
        if self.unknown_residues:
            characters = ", ".join(f"{c} {n}" for c, n in self.unknown_residues.most_common())
            parts.append(
                f"{self.unknown_residues.total()} residues outside the alphabet in"
                f" {self.unknown_rows} rows ({characters})"
            )
        return ", ".join(parts)


class SFTDataset(Dataset):
    """A map-style dataset of `{"tokens", "labels"}`, both lists of int of the same length.

    All rows are checked when the dataset is made, so that a malformed row shows before training
    starts, not hours into it. Rows are tokenised when they are read, except where the number of
    samples depends on their lengths (`overlong` "split", "drop" or "error" with a `max_seq_len`,
    `min_tokens`, or `on_bad_row: skip`): then they are tokenised once, at the start, and kept in
    memory at 8 bytes a token at most. Where a reader trains on a part of the tokens only, rows are
    tokenised at the start as well, so that those with nothing to train on are known: they are left out
    and counted by cause.

    Over-long rows (more than `max_seq_len` tokens):
        truncate: the first `max_seq_len` tokens are kept (no end-of-text token is put at the cut: the
            text does not end there);
        split: pieces of `max_seq_len` tokens and a last one with the rest, in order (121 tokens at
            60 give 60 + 60 + 1);
        drop: left out;
        error: refused, naming the row.

    Attributes:
        stats: See `DatasetStats`.
        max_seq_len: The length limit, or None.
        overlong: What becomes of longer rows.
    """

    def __init__(
        self,
        rows: Rows,
        reader: RowReader,
        *,
        max_seq_len: int | None = None,
        overlong: str = "truncate",
        on_bad_row: str = "error",
        min_tokens: int = 0,
        max_rows_used: int | None = None,
        name: str = "the dataset",
        blank_lines: int = 0,
        partial: bool = False,
    ) -> None:
        """Check the rows and lay out the samples.

        Args:
            rows: The data.
            reader: How to make tokens of a row.
            max_seq_len: The longest sample, in tokens; None = no limit.
            overlong: "truncate", "split", "drop" or "error".
            on_bad_row: "error" or "skip", for rows with a missing, null or wrongly typed field.
            min_tokens: Rows with fewer tokens are skipped.
            max_rows_used: Stop after so many rows that gave samples.
            name: What messages call the data.
            blank_lines: Lines of the source that gave no row, for `stats`.
            partial: Whether these are some rows of more: then none need be left, and there is no warning
                about cut ones.

        Raises:
            UserError: For an unknown policy; for a malformed or over-long row under "error", naming
                the row and what is wrong with it; when no row is left that should be.
        """
        if overlong not in OVERLONG_POLICIES:
            raise UserError(
                f"dataset.overlong={overlong!r} is not known; allowed: {', '.join(OVERLONG_POLICIES)}"
            )
        if on_bad_row not in BAD_ROW_POLICIES:
            raise UserError(
                f"dataset.on_bad_row={on_bad_row!r} is not known; allowed: "
                f"{', '.join(BAD_ROW_POLICIES)}"
            )
        if max_seq_len is not None and max_seq_len < 1:
            raise UserError(f"dataset.max_seq_len must be 1 or more, not {max_seq_len}")
        self._rows = rows
        self._reader = reader
        self.max_seq_len = max_seq_len
        self.overlong = overlong
        self._on_bad_row = on_bad_row
        self._min_tokens = min_tokens
        self._name = name
        self._partial = partial
        self._truncated_rows: set[int] = set()
        self._stats = DatasetStats(blank_lines=blank_lines)
        self._first_bad = ""
        self._unread: set[str] = set()
        self._stops = False
        # One entry a sample: its row, and where in the row's tokens it begins.
        self._sample_row: list[int] = []
        self._sample_start: list[int] = []
        self._kept: dict[int, tuple[IntArray, IntArray]] = {}
        self._eager = (
            (max_seq_len is not None and overlong != "truncate")
            or on_bad_row == "skip"
            or min_tokens > 0
        )
        self._lay_out(max_rows_used)

    def _lay_out(self, max_rows_used: int | None) -> None:
        used = 0
        # Tables iterate far faster than they index. What cannot iterate (files) may fail at one row
        # and still give the next.
        in_order = iter(self._rows) if isinstance(self._rows, Iterable) else None
        for index in range(len(self._rows)):
            if max_rows_used is not None and used >= max_rows_used:
                break
            self._stats.rows += 1
            starts = self._starts(index, in_order)
            self._sample_row.extend([index] * len(starts))
            self._sample_start.extend(starts)
            used += bool(starts)
        self._stats.samples = len(self._sample_row)
        if not self._sample_row and not self._partial:
            raise UserError(f"no samples in {self._name}: {self.describe_stats()}{self._first_bad}")

    def _starts(self, index: int, in_order: Iterator[Mapping[str, Any]] | None) -> list[int]:
        """Where the samples of a row begin in its tokens; [] when the row is skipped."""
        on_part = getattr(self._reader, "trains_on_part", False)
        outcome = outcome_of(
            self._reader,
            (lambda: self._rows[index]) if in_order is None else (lambda: next(in_order)),
            tokenize=self._eager or on_part,
        )
        if outcome.cause:
            self._leave_out(index, outcome)
            return []
        self._unread |= outcome.unread
        if not self._eager and not on_part:
            return [0]
        tokens, labels = outcome.tokens, outcome.labels
        length = len(tokens)
        if length < self._min_tokens:
            self._stats.short_skipped += 1
            return []
        starts = [0]
        cut = self.max_seq_len is not None and length > self.max_seq_len
        if self.max_seq_len is not None and cut:
            if self.overlong == "error":
                raise UserError(
                    f"{self._place(index)} has {length} tokens, more than max_seq_len "
                    f"{self.max_seq_len}; raise it, or set overlong: truncate, split or drop"
                )
            if self.overlong == "drop":
                self._stats.dropped += 1
                return []
            if self.overlong == "split":
                self._stats.split += 1
                starts = list(range(0, length, self.max_seq_len))
        if on_part:
            self._stops = self._stops or not set(self._reader.stop_ids).isdisjoint(labels)  # type: ignore[attr-defined]
            # The first label of a sample has no token before it that could predict it.
            stop = length if self.max_seq_len is None else self.max_seq_len
            idle = [all(label == -100 for label in labels[s + 1 : s + stop]) for s in starts]
            if all(idle):
                why = "prompt fills max_seq_len" if cut else "a single token"
                self._stats.nothing_to_train[why] += 1
                return []
            if any(idle):
                self._stats.nothing_to_train["pieces of split rows"] += sum(idle)
            if cut and self.overlong == "truncate":
                self._note_truncated(index, length)
        if self._eager:
            token_array = np.asarray(tokens, dtype=np.int32)
            same = labels == tokens
            self._kept[index] = (
                token_array,
                token_array if same else np.asarray(labels, dtype=np.int32),
            )
        return starts

    def _leave_out(self, index: int, outcome: Outcome) -> None:
        """Count a row that gives no sample; raise UserError for a malformed one under "error"."""
        if outcome.cause == "empty":
            self._stats.empty_skipped += 1
        elif outcome.cause == "unknown":
            self._stats.unknown_skipped += 1
        elif outcome.cause == "nothing":
            self._stats.nothing_to_train[outcome.note] += 1
        elif self._on_bad_row == "skip":
            self._stats.bad_skipped += 1
            if self._stats.bad_skipped == 1:
                self._first_bad = f"; the first malformed one: {self._place(index)}: {outcome.note}"
            logger.info("skipped %s: %s", self._place(index), outcome.note)
        else:
            raise UserError(
                f"{self._place(index)}: {outcome.note} (on_bad_row: skip leaves such rows out)"
            )

    def _place(self, index: int) -> str:
        place_of = getattr(self._rows, "place_of", None)
        return f"row {index} of {self._name}" if place_of is None else str(place_of(index))

    def place_of(self, index: int) -> str:
        """How messages name sample `index`: by its row or file."""
        return self._place(self._sample_row[index])

    @property
    def stats(self) -> DatasetStats:
        """What became of the rows; `truncated` counts those read so far in this process."""
        self._stats.truncated = len(self._truncated_rows)
        return self._stats

    def describe_stats(self) -> str:
        """The counts in words, those that are zero left out."""
        return self.stats.describe()

    def data_line(self) -> str:
        """What became of the rows, in one line, with what a user should know about them."""
        line = f"{self._name}: {self.describe_stats()}{self._first_bad}"
        if self._unread:
            line += f"; changes nothing and is not read: {', '.join(sorted(self._unread))}"
        stop_ids = getattr(self._reader, "stop_ids", ())
        if stop_ids and not self._stops:
            line += (
                f"; {NO_STOP} (ids {', '.join(map(str, stop_ids))}), because the chat template ends the "
                "assistant's turns otherwise: the saved model may not stop"
            )
        return line

    def count_overlong(self) -> int:
        """Number of rows with samples that are longer than `max_seq_len`; looks at all of them."""
        if self.max_seq_len is None:
            return 0
        return sum(self._row_tokens(row) > self.max_seq_len for row in set(self._sample_row))

    def _row_tokens(self, index: int) -> int:
        """How many tokens a row has, without making them where the reader can tell."""
        if index in self._kept:
            return len(self._kept[index][0])
        count = getattr(self._reader, "count_tokens", None)
        return len(self._tokenized(index)[0]) if count is None else int(count(self._rows[index]))

    def _tokenized(self, index: int) -> tuple[list[int], list[int]]:
        if index in self._kept:
            tokens, labels = self._kept[index]
            return tokens.tolist(), labels.tolist()
        try:
            return self._reader.tokenize(self._rows[index])
        except UserError as error:
            raise UserError(
                f"{self._place(index)}: {error} (on_bad_row: skip leaves such rows out)"
            ) from error

    def token_count(self, index: int) -> int:
        """How many tokens sample `index` has, without making them where the reader can tell."""
        tokens = self._row_tokens(self._sample_row[index]) - self._sample_start[index]
        return tokens if self.max_seq_len is None else min(tokens, self.max_seq_len)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._sample_row)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Sample `index`: "tokens" and "labels" (not shifted; -100 = not trained on).

        Raises:
            UserError: When the row cannot be tokenised, naming it.
        """
        row, start = self._sample_row[index], self._sample_start[index]
        if row in self._kept:
            tokens, labels = self._kept[row]
            stop = None if self.max_seq_len is None else start + self.max_seq_len
            if stop is not None and self.overlong == "truncate" and len(tokens) > stop:
                self._note_truncated(row, len(tokens))
            return {"tokens": tokens[start:stop].tolist(), "labels": labels[start:stop].tolist()}
        token_list, label_list = self._tokenized(row)
        if self.max_seq_len is not None and len(token_list) > self.max_seq_len:
            self._note_truncated(row, len(token_list))
        limit = self.max_seq_len
        return {"tokens": token_list[:limit], "labels": label_list[:limit]}

    def _note_truncated(self, row: int, length: int) -> None:
        if not self._truncated_rows and not self._partial:
            logger.warning(
                "%s has %d tokens and is cut to max_seq_len %d; further rows are cut without a "
                "warning (overlong: split, drop or error handle them otherwise)",
                self._place(row),
                length,
                self.max_seq_len,
            )
        self._truncated_rows.add(row)


def log_data_line(line: str) -> None:
    """Tell once what became of a dataset's rows; as a warning where it costs training."""
    warns = NOTHING in line or NO_STOP in line
    logger.log(logging.WARNING if warns else logging.INFO, "%s", line)


def sequence_limit(max_seq_len: int | None, tokenizer: HFTokenizer) -> int | None:
    """The dataset's own `max_seq_len`, or else the tokenizer's."""
    return tokenizer.max_seq_len if max_seq_len is None else max_seq_len


def require_text(row: Mapping[str, Any], column: str, key: str) -> str:
    """The string in a column of a row.

    Args:
        row: The row.
        column: The column's name in the data.
        key: The config key that chooses the column, for the message.

    Raises:
        UserError: When the column is missing, null or not a string.
    """
    value = require_column(row, column, key)
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise UserError(f"column {column!r} is {kind}, it must be a string")
    if (bad := broken_character(value)) is not None:
        raise UserError(f"column {column!r} is not UTF-8 text: it has {bad}")
    return value


def require_column(row: Mapping[str, Any], column: str, key: str) -> Any:
    """The value in a column of a row; UserError naming the columns there are when it is missing."""
    if column not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise UserError(f"no column {column!r}; columns: {columns} (choose with {key})")
    return row[column]

"""The one dataset class behind all factories: rows -> token lists, with a policy for bad and long rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from torchtune_cp.data.packing import Int64
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.record_files import broken_character
from torchtune_cp.datasets.source import Rows
from torchtune_cp.datasets.stats import NOTHING, DatasetStats
from torchtune_cp.datasets.token_store import Job, stored_tokens
from torchtune_cp.datasets.token_table import MALFORMED, Int32, Outcome, TokenTable, joined
from torchtune_cp.errors import UserError

logger = logging.getLogger(__name__)

OVERLONG_POLICIES = ("truncate", "split", "drop", "error")
BAD_ROW_POLICIES = ("error", "skip")

EMPTY, UNKNOWN, UNTRAINED = "empty", "unknown", "untrained"

#: A part of a data line that makes it a warning.
NO_STOP = "no sample trains on a stop token"


class EmptyRow(Exception):
    """The row is well-formed but has no text; it is skipped and counted."""


class UnknownText(Exception):
    """The row has characters that the tokenizer does not know, these; it is left out and counted."""


class NothingToTrain(Exception):
    """The row has no token to train on, for the cause given; it is left out and counted."""


class RowReader(Protocol):
    """Turns one row into tokens. Both methods raise UserError for a malformed row, without naming it.

    What they do depends on the row alone, and readers can be pickled: rows are shared out to processes.

    A reader that does not train on every token says so in attributes and a method of its own:
    `trains_on_part` (true), `stop_ids` (the tokens of which one should be trained on) and `unread(row)`
    (what of a row changes nothing).
    """

    def check(self, row: Mapping[str, Any]) -> str | None:
        """Look at the row without tokenising it; raises EmptyRow or UnknownText to leave it out.

        Returns:
            The characters of the row that the tokenizer does not know, where the reader tells.
        """

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """(tokens, labels) of a row that `check` accepts, labels not shifted, -100 = not trained on.

        Raises NothingToTrain to leave it out.
        """


def outcome_of(reader: RowReader, row: Mapping[str, Any]) -> Outcome:
    """What becomes of a row: its tokens and labels, or the cause for which it gives no sample."""
    try:
        unknown = reader.check(row)
        tokens, labels = reader.tokenize(row)
        if len(tokens) != len(labels):
            raise UserError(f"{len(tokens)} tokens but {len(labels)} labels; each needs one")
        unread = getattr(reader, "unread", _reads_all)(row)
    except EmptyRow:
        return Outcome(cause=EMPTY)
    except UnknownText as found:
        return Outcome(cause=UNKNOWN, note=str(found))
    except NothingToTrain as found:
        return Outcome(cause=UNTRAINED, note=str(found))
    except UserError as error:
        return Outcome(cause=MALFORMED, note=str(error))
    return Outcome(tokens, labels, note=unknown, unread="\n".join(sorted(unread)) or None)


def _reads_all(row: Mapping[str, Any]) -> frozenset[str]:
    return frozenset()


class SFTDataset(Dataset):
    """A map-style dataset of `{"tokens", "labels"}`, both lists of int of the same length.

    All rows are tokenised when the dataset is made, by several processes where they are many, so that
    a malformed row shows before training starts, not hours into it; see `stored_tokens`. Rows with nothing
    to train on are left out and counted by cause.

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
        cached: bool = False,
        num_proc: int | None = None,
    ) -> None:
        """Tokenise the rows and lay out the samples.

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
            cached: Keep the tokens on disk where the rows are many, and use several processes: the
                content of rows and reader must then be told by their attributes.
            num_proc: The most processes that tokenise; None = one a core.

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
        if num_proc is not None and num_proc < 1:
            raise UserError(f"dataset.num_proc must be 1 or more, not {num_proc}")
        self._rows = rows
        self.max_seq_len = max_seq_len
        self.overlong = overlong
        self._on_bad_row = on_bad_row
        self._min_tokens = min_tokens
        self._name = name
        self._partial = partial
        self._stats = DatasetStats(blank_lines=blank_lines)
        self._first_bad = ""
        self._on_part = bool(getattr(reader, "trains_on_part", False))
        self._stop_ids: tuple[int, ...] = tuple(getattr(reader, "stop_ids", ()))
        job = Job(
            rows,
            functools.partial(outcome_of, reader),
            content=reader if cached else None,
            name=name,
            num_proc=num_proc,
            refuse=self._refuse if on_bad_row == "error" else None,
        )
        self._lay_out(job, max_rows_used)

    def _lay_out(self, job: Job, max_rows_used: int | None) -> None:
        parts: list[TokenTable] = []
        looked_at = used = 0
        while not parts or (looked_at < len(self._rows) and used < (max_rows_used or 0)):
            # No more rows than may be needed: there may be far more.
            end = len(self._rows)
            if max_rows_used is not None:
                end = min(end, max(max_rows_used, 2 * looked_at))
            parts.append(stored_tokens(job, looked_at, end))
            looked_at = end
            self._tokens = joined(parts)
            pieces = self._pieces()
            used = int(np.count_nonzero(pieces))
        if max_rows_used and used >= max_rows_used:
            looked_at = int(np.flatnonzero(pieces)[max_rows_used - 1]) + 1
            pieces = pieces[:looked_at]
        self._count(looked_at)
        # One entry a sample: its row, and where in the row's tokens it begins.
        self._sample_row = np.repeat(np.arange(looked_at), pieces)
        nth = np.arange(len(self._sample_row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._sample_start = nth * (self.max_seq_len or 0)
        self._stats.samples = len(self._sample_row)
        if not len(self._sample_row) and not self._partial:
            raise UserError(f"no samples in {self._name}: {self.describe_stats()}{self._first_bad}")

    def _pieces(self) -> Int64:
        """How many samples each row gives."""
        lengths, limit = self._tokens.lengths, self.max_seq_len
        pieces = (self._tokens.has_sample & (lengths >= self._min_tokens)).astype(np.int64)
        if limit is not None and self.overlong == "drop":
            pieces[lengths > limit] = 0
        if limit is not None and self.overlong == "split":
            pieces *= np.maximum(1, -(-lengths // limit))
        self._untrained = np.zeros(len(pieces), dtype=bool)
        if self._on_part:
            # The first label of a sample has no token before it that could predict it.
            first = self._tokens.first_trained()
            last = lengths - 1
            if limit is not None and self.overlong == "truncate":
                last = np.minimum(last, limit - 1)
            self._untrained = (pieces > 0) & ((first < 0) | (first > last))
            for row in np.flatnonzero((pieces > 1) & ~self._untrained).tolist():
                self._untrained[row] = self._idle_pieces(row) == pieces[row]
            pieces[self._untrained] = 0
        return pieces

    def _idle_pieces(self, row: int) -> int:
        """How many pieces of a row that is split have nothing to train on."""
        assert self.max_seq_len is not None
        trained = self._tokens.read(row)[1] != -100
        starts = range(0, len(trained), self.max_seq_len)
        return sum(not trained[s + 1 : s + self.max_seq_len].any() for s in starts)

    def _count(self, rows: int) -> None:
        """Count what became of the first so many rows; UserError for the first that is refused."""
        stats, lengths = self._stats, self._tokens.lengths[:rows]
        has_sample = self._tokens.has_sample[:rows]
        short = has_sample & (lengths < self._min_tokens)
        limit = np.inf if self.max_seq_len is None else self.max_seq_len
        long = np.flatnonzero(has_sample & ~short & (lengths > limit))
        refused = int(long[0]) if len(long) and self.overlong == "error" else rows
        for row, cause, note in self._tokens.notes():
            if row >= refused:
                break
            if cause == MALFORMED:
                self._skip(row, str(note))
                continue
            if cause == UNTRAINED:
                stats.nothing_to_train[str(note)] += 1
                continue
            stats.empty_skipped += cause == EMPTY
            stats.unknown_skipped += cause == UNKNOWN
            stats.unknown_rows += bool(note)
            stats.unknown_residues.update(note or "")
        if refused < rows:
            raise UserError(
                f"{self._place(refused)} has {lengths[refused]} tokens, more than max_seq_len "
                f"{self.max_seq_len}; raise it, or set overlong: truncate, split or drop"
            )
        untrained = self._untrained[:rows]
        cut = np.zeros(rows, dtype=bool)
        cut[long] = True
        for why, found in (("prompt fills max_seq_len", cut), ("a single token", ~cut)):
            if count := int(np.count_nonzero(untrained & found)):
                stats.nothing_to_train[why] += count
        if self._on_part and self.overlong == "split":
            kept = np.flatnonzero(cut & ~untrained).tolist()
            if count := sum(map(self._idle_pieces, kept)):
                stats.nothing_to_train["pieces of split rows"] += count
        stats.rows = rows
        stats.short_skipped = int(np.count_nonzero(short))
        stats.dropped = len(long) if self.overlong == "drop" else 0
        stats.split = len(long) if self.overlong == "split" else 0
        long = long[~untrained[long]]
        stats.truncated = len(long) if self.overlong == "truncate" else 0
        if stats.truncated and not self._partial:
            logger.warning(
                "%s has %d tokens and is cut to max_seq_len %d, and %d further rows are cut "
                "(overlong: split, drop or error handle them otherwise)",
                *(self._place(long[0]), lengths[long[0]], limit, stats.truncated - 1),
            )

    def _refuse(self, row: int, outcome: Outcome) -> None:
        if outcome.cause == MALFORMED:
            raise UserError(
                f"{self._place(row)}: {outcome.note} (on_bad_row: skip leaves such rows out)"
            )

    def _skip(self, row: int, what: str) -> None:
        if self._on_bad_row == "error":
            self._refuse(row, Outcome(cause=MALFORMED, note=what))
        self._stats.bad_skipped += 1
        if self._stats.bad_skipped == 1:
            self._first_bad = f"; the first malformed one: {self._place(row)}: {what}"
        logger.info("skipped %s: %s", self._place(row), what)

    def _place(self, index: int) -> str:
        place_of = getattr(self._rows, "place_of", None)
        return f"row {index} of {self._name}" if place_of is None else str(place_of(index))

    def place_of(self, index: int) -> str:
        """How messages name sample `index`: by its row or file."""
        return self._place(int(self._sample_row[index]))

    @property
    def stats(self) -> DatasetStats:
        """What became of the rows."""
        return self._stats

    def describe_stats(self) -> str:
        """The counts in words, those that are zero left out."""
        return self.stats.describe()

    def data_line(self) -> str:
        """What became of the rows, in one line, with what a user should know about them."""
        line = f"{self._name}: {self.describe_stats()}{self._first_bad}"
        if unread := self._tokens.unread():
            line += f"; changes nothing and is not read: {', '.join(sorted(unread))}"
        if self._stop_ids and not self._trains_on_stop():
            line += (
                f"; {NO_STOP} (ids {', '.join(map(str, self._stop_ids))}), because the chat template ends"
                " the assistant's turns otherwise: the saved model may not stop"
            )
        return line

    def _trains_on_stop(self) -> bool:
        """Whether any row with a sample trains on a stop token; nearly always the first one tells."""
        rows = np.unique(self._sample_row).tolist()
        return any(np.isin(self._tokens.read(row)[1], self._stop_ids).any() for row in rows)

    @property
    def lengths(self) -> Int64:
        """int64 [samples]: the tokens of each."""
        left = self._tokens.lengths[self._sample_row] - self._sample_start
        return left if self.max_seq_len is None else np.minimum(left, self.max_seq_len)

    def token_count(self, index: int) -> int:
        """How many tokens sample `index` has, without making them."""
        left = int(self._tokens.lengths[self._sample_row[index]] - self._sample_start[index])
        return left if self.max_seq_len is None else min(left, self.max_seq_len)

    def read(self, index: int, start: int, length: int | None) -> tuple[Int32, Int32]:
        """(tokens, labels), int32 [length] each, of a part of sample `index`; not to be written to."""
        row, begin = int(self._sample_row[index]), int(self._sample_start[index])
        return self._tokens.read(row, begin + start, length)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._sample_row)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Sample `index`: "tokens" and "labels" (not shifted; -100 = not trained on)."""
        tokens, labels = self.read(index, 0, self.max_seq_len)
        return {"tokens": tokens.tolist(), "labels": labels.tolist()}


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

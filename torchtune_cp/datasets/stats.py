"""Counts of what became of a dataset's rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

#: A part of a data line that makes it a warning.
NOTHING = "nothing to train on"


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
        truncated: Rows cut to `max_seq_len`.
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

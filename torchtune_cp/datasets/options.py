"""The arguments that all dataset factories share, as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class SampleOptions:
    """How rows become samples; the factories document each of these under the same name.

    Attributes:
        max_seq_len: The longest sample in tokens, packed: the tokens of a pack; None = the tokenizer's.
        overlong: What to do with longer rows; None = the factory's default, or `PackedDataset`'s.
        on_bad_row: "error" or "skip".
        packed: Whether to put several rows into each sample.
        split_across_pack: See `PackedDataset`.
        packing_strategy: See `pack_documents`.
        num_proc: The most processes that tokenise; None = one a core.
        min_tokens: Rows with fewer tokens are left out.
    """

    max_seq_len: int | None
    overlong: str | None
    on_bad_row: str
    packed: bool
    split_across_pack: bool
    packing_strategy: str
    num_proc: int | None
    min_tokens: int = 0

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> SampleOptions:
        """Take these options from among a factory's arguments, its `locals()`."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: arguments[name] for name in names if name in arguments})

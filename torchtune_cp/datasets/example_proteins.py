"""A few proteins that come with the package, to try a recipe on without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.packed import PackedDataset
from torchtune_cp.datasets.protein import protein_dataset
from torchtune_cp.datasets.sample_stream import SampleStream
from torchtune_cp.datasets.sft import SFTDataset

#: 128 proteins of UniProt; see the README beside it.
EXAMPLE_PROTEINS = Path(__file__).parent / "examples" / "proteins.fasta"


def example_protein_dataset(
    tokenizer: HFTokenizer, max_seq_len: int | None = None, *, max_rows: int | None = None
) -> SFTDataset | PackedDataset | SampleStream:
    """`protein_dataset` of 128 proteins of 60 to 300 residues.

    Args:
        tokenizer: See `protein_dataset`.
        max_seq_len: The longest sample in tokens; longer ones are cut off.
        max_rows: Use only the first so many proteins.
    """
    settings: dict[str, Any] = {"max_seq_len": max_seq_len, "max_rows": max_rows}
    return protein_dataset(tokenizer, str(EXAMPLE_PROTEINS), **settings)

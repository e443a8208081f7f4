"""How evenly packed documents are spread over the ranks: computed, no processes are started.

python -m benchmarks.balance

Attention work of the busiest rank over the mean of all, at cp 8 on packs of 131,072 tokens: of the standard
library's files (a token a byte) and of proteins (a token a residue). Beside it the same packs in torch's
head-tail order of the whole sequence, which ignores documents.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write_results
from benchmarks.tables import CHECKOUT
from torchtune_cp.attention import AttentionMask
from torchtune_cp.data.packing import STRATEGIES, Int64, pack_documents
from torchtune_cp.distributed.context_parallel.assignment import (
    Assignment,
    assign,
    pairs_by_rank,
    whole_sequence_head_tail,
)

CP, PACK_LEN = 8, 131_072
#: The last packs, which nothing is left to fill, say nothing about packing.
LEAST_FILLED = 0.5
PROTEINS = CHECKOUT / "tests" / "assets" / "protein_lengths.txt"


def library_lengths() -> Int64:
    """Bytes of each of the standard library's files."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in sorted(library.rglob("*.py")) if "-packages" not in p.parent.as_posix())
    sizes = (p.stat().st_size for p in files)
    return np.array([size for size in sizes if size])


def protein_lengths() -> Int64:
    """Residues of 2,000 proteins of UniProt."""
    return np.loadtxt(PROTEINS, dtype=np.int64)


def _imbalance(pieces: Assignment, lengths: list[int]) -> float:
    pairs = pairs_by_rank(pieces, lengths, AttentionMask())
    return max(pairs) * len(pairs) / sum(pairs)


def imbalances(lengths: Int64, strategy: str) -> Mapping[str, list[float]]:
    """By layout, largest over mean attention work for each pack.

    Args:
        lengths: Of the documents.
        strategy: See `torchtune_cp.data.packing.pack_documents`.
    """
    packs = pack_documents(lengths, PACK_LEN, strategy=strategy)
    found: dict[str, list[float]] = {"by_documents": [], "whole_sequence_head_tail": []}
    for number in range(len(packs)):
        pack = [length for _, _, length in packs.pieces(number)]
        if sum(pack) >= LEAST_FILLED * PACK_LEN:
            found["by_documents"].append(_imbalance(assign(pack, CP, AttentionMask()), pack))
            head_tail = whole_sequence_head_tail(pack, CP)
            found["whole_sequence_head_tail"].append(_imbalance(head_tail, pack))
    return found


def main() -> None:
    results: list[dict[str, Any]] = []
    for name, lengths in {"library": library_lengths(), "proteins": protein_lengths()}.items():
        for strategy in STRATEGIES:
            row: dict[str, Any] = {
                "data": name,
                "packing_strategy": strategy,
                "documents": len(lengths),
            }
            for layout, values in imbalances(lengths, strategy).items():
                row["packs"] = len(values)
                row[f"{layout}_mean"] = round(statistics.mean(values), 3)
                row[f"{layout}_worst"] = round(max(values), 3)
            print(row)
            results.append(row)
    write_results("balance", results)


if __name__ == "__main__":
    main()

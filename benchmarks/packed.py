"""Packed training: two ranks against one process, and against the same tokens as one document.

python -m benchmarks.packed

A pack of the standard library's files, a step on 16,384 tokens: one process with two threads (cp 1)
against two processes with one thread each (cp 2), with each method, and both without the document mask.
The contenders of a pair make their steps in turn. `mask_gain` says how often faster a step is for
attending within documents only.
"""

from __future__ import annotations

import statistics
import sys

import torch

from benchmarks.common import Contender, build_ours, interleave, ratio, write_results

METHODS = ("ring", "allgather", "ulysses")
ROUNDS = {4096: 7, 16384: 3, 32768: 2}


def pack(seq_len: int) -> dict[str, torch.Tensor]:
    """Of the packs of the standard library's files that are 99 % full, one with the median of documents."""
    from torchtune_cp.data import byte_tokenizer, collate
    from torchtune_cp.datasets import PackedDataset, text_folder_dataset

    files = text_folder_dataset(
        byte_tokenizer(),
        glob=["*.py", "*/*.py"],
        max_seq_len=seq_len,
        overlong="drop",
        on_bad_row="skip",
    )
    packs = PackedDataset(
        files,
        max_seq_len=seq_len,
        strategy="best_fit",
    )
    full = [
        p for p in map(packs.__getitem__, range(len(packs))) if len(p["tokens"]) > 0.99 * seq_len
    ]
    chosen = sorted(full, key=lambda p: len(p["seq_lens"]))[len(full) // 2]
    return collate([chosen], pad_to=seq_len)


def without_mask(seq_len: int) -> dict[str, torch.Tensor]:
    """The same tokens and labels as one document."""
    batch = pack(seq_len)
    return {
        "tokens": batch["tokens"],
        "labels": batch["labels"],
        "input_pos": torch.arange(seq_len)[None],
    }


def main() -> None:
    results = []
    for seq_len in [int(a) for a in sys.argv[1:]] or [16384]:
        documents = pack(seq_len)["seq_lens"][0]
        for method in METHODS:
            packed = {"make_batch": pack, "method": method}
            whole = {"make_batch": without_mask, "method": method}
            contenders = [
                Contender("cp1", 1, 2, build_ours, (seq_len, 1), packed),
                Contender("cp2", 2, 1, build_ours, (seq_len, 2), packed),
                Contender("cp1_no_mask", 1, 2, build_ours, (seq_len, 1), whole),
                Contender("cp2_no_mask", 2, 1, build_ours, (seq_len, 2), whole),
            ]
            for contender in contenders:
                contender.start()
            seconds = interleave(contenders, ROUNDS.get(seq_len, 3))
            for contender in contenders:
                contender.stop()
            row = {
                "method": method,
                "seq_len": seq_len,
                "documents": len(documents),
                "longest_document": int(documents.max()),
            }
            for name, took in seconds.items():
                row[f"{name}_tokens_per_s"] = round(seq_len / statistics.median(took))
            row["speed_ratio"] = round(ratio(seconds["cp1"], seconds["cp2"]), 3)
            row["mask_gain_cp1"] = round(ratio(seconds["cp1_no_mask"], seconds["cp1"]), 3)
            row["mask_gain_cp2"] = round(ratio(seconds["cp2_no_mask"], seconds["cp2"]), 3)
            print(row)
            results.append(row)
    write_results("packed", results)


if __name__ == "__main__":
    main()

"""Documents with label masks, packed and one by one: what packed training has to equal."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.fixtures import VOCAB, Samples
from torchtune_cp.datasets import PackedDataset

PACK_LEN = 120
#: Four packs of them: a long document, one token alone, documents that fill a pack to the last token.
LENGTHS = [120, 70, 33, 1, 15, 64, 22, 9, 2, 17, 50, 40, 5, 3]


def documents(tokenizer: Any = None) -> Samples:
    """The documents: every third without its first half's labels, one without any."""
    g = torch.Generator().manual_seed(3)
    samples = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(0, VOCAB, (length,), generator=g).tolist()
        masked = length if number == 6 else length // 2 if number % 3 == 0 else 0
        samples.append({"tokens": tokens, "labels": [-100] * masked + tokens[masked:]})
    return Samples(samples)


def packs(tokenizer: Any = None) -> PackedDataset:
    """Them in four packs."""
    return PackedDataset(documents(), max_seq_len=PACK_LEN, strategy="best_fit")


def packs_as_documents(tokenizer: Any = None) -> Samples:
    """What training without the mask would see: every pack as one document.

    Its labels are those of the documents, so that what differs is attention and positions alone.
    """
    samples = []
    for index in range(len(packs())):
        pack = packs()[index]
        labels = pack["labels"].clone()
        ends = pack["seq_lens"].cumsum(0)
        labels[ends[:-1]] = -100
        samples.append({"tokens": pack["tokens"].tolist(), "labels": labels.tolist()})
    return Samples(samples)

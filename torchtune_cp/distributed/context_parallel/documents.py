"""The documents of a batch, and how many query-key pairs attention has in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.entries import SLICE_KEY
from torchtune_cp.errors import UserError


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other and to nothing else.

    Attributes:
        offset: Place of its first token in the batch, rows laid end to end.
        length: Its number of tokens.
    """

    offset: int
    length: int


def documents_of(batch: dict[str, torch.Tensor]) -> tuple[Document, ...]:
    """Read the documents off a batch: `seq_lens` or `cu_seqlens`, or else every row as one document.

    Args:
        batch: `tokens` [b, s] and for packed rows `seq_lens` [b, most documents in a row], integers:
            the lengths of the documents in order, from position 0 of each row, filled up with 0. What
            lies behind the last document of a row is padding. Or, for documents that are padded one by
            one, `cu_seqlens` and `cu_seqlens_padded` [documents + 1], integers: where each ends, with
            the rows laid end to end, counted without and with the padding behind it; both begin with 0.
            Without `cu_seqlens_padded` there is no padding.

    Returns:
        The documents in order, empty ones left out.

    Raises:
        UserError: Entries of another shape, with negative lengths, or beyond the tokens.
    """
    rows, row_length = batch["tokens"].shape
    if any(batch.get(key) is not None for key in ("cu_seqlens", "cu_seqlens_padded")):
        return _padded_documents(batch)
    seq_lens = batch.get("seq_lens")
    if seq_lens is None:
        return tuple(
            Document(row * row_length, row_length) for row in range(rows if row_length else 0)
        )
    if seq_lens.ndim != 2 or seq_lens.size(0) != rows or seq_lens.is_floating_point():
        raise UserError(
            f"batch entry 'seq_lens' has the shape {list(seq_lens.shape)} and dtype"
            f" {seq_lens.dtype}; needed are the document lengths of each row, integers"
            f" [{rows}, most documents in a row], filled up with 0"
        )
    documents = []
    for row, lengths in enumerate(seq_lens.tolist()):
        start = 0
        for length in lengths:
            if length < 0:
                raise UserError(f"batch entry 'seq_lens', row {row}: a length of {length}")
            if length:
                documents.append(Document(row * row_length + start, length))
            start += length
        if start > row_length:
            raise UserError(
                f"batch entry 'seq_lens', row {row}: the documents have {start} tokens together,"
                f" but the row has {row_length}"
            )
    return tuple(documents)


def _padded_documents(batch: dict[str, torch.Tensor]) -> tuple[Document, ...]:
    """What `cu_seqlens` describes of a whole batch."""
    total = batch["tokens"].numel()
    ends = batch.get("cu_seqlens")
    if ends is None:
        raise UserError(
            "a batch with 'cu_seqlens_padded' needs 'cu_seqlens', too, without the padding"
        )
    padded_ends = batch.get("cu_seqlens_padded")
    padded_ends = ends if padded_ends is None else padded_ends
    of_right_shape = ends.ndim == 1 and ends.shape == padded_ends.shape
    lengths, padded = (e.diff().tolist() if of_right_shape else [] for e in (ends, padded_ends))
    if (
        not of_right_shape
        or ends.is_floating_point()
        or (len(ends) and (int(ends[0]) or int(padded_ends[0])))
        or any(not 0 <= real <= whole for real, whole in zip(lengths, padded, strict=True))
        or sum(padded) > total
    ):
        raise UserError(
            f"batch entries cu_seqlens {ends.tolist()} and cu_seqlens_padded {padded_ends.tolist()} do not"
            f" describe documents in {total} tokens; a batch that holds one rank's slices needs its entry"
            f" '{SLICE_KEY}', too"
        )
    starts = padded_ends.tolist()
    return tuple(
        Document(start, length)
        for start, length in zip(starts[:-1], lengths, strict=True)
        if length
    )


def document_positions(
    documents: tuple[Document, ...], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Positions that restart with each document, `[b, s]` int64; -1 on padding."""
    positions = np.full(shape[0] * shape[1], -1, dtype=np.int64)
    for document in documents:
        end = document.offset + document.length
        positions[document.offset : end] = np.arange(document.length)
    return torch.from_numpy(positions.reshape(shape)).to(device)


def _earlier_pairs(upto: int, reach: int | None) -> int:
    """Pairs of the first `upto` queries of a document with themselves and earlier keys."""
    if reach is None or upto <= reach:
        return upto * (upto + 1) // 2
    return reach * (reach + 1) // 2 + (upto - reach) * reach


def attention_pairs(start: int, stop: int, length: int, mask: AttentionMask) -> int:
    """Count the pairs of the queries at `start` to `stop - 1` of a document with its keys.

    Args:
        start: First position.
        stop: One behind the last.
        length: Tokens of the document.
        mask: What is attended to within it.
    """
    if mask.chunk is not None and mask.chunk < length:
        within = AttentionMask(mask.is_causal, mask.window)
        total = 0
        for first in range(start // mask.chunk * mask.chunk, stop, mask.chunk):
            size = min(mask.chunk, length - first)
            total += attention_pairs(
                max(start - first, 0), min(stop - first, size), size, within.within(size)
            )
        return total
    reach = mask.window
    earlier = _earlier_pairs(stop, reach) - _earlier_pairs(start, reach)
    if mask.is_causal:
        return earlier
    # Later keys are earlier ones seen from the other end; the diagonal would count twice.
    later = _earlier_pairs(length - start, reach) - _earlier_pairs(length - stop, reach)
    return earlier + later - (stop - start)

"""What a batch may hold: entries that are cut along the sequence, and entries that all ranks get."""

from __future__ import annotations

from typing import Any

import torch

from torchtune_cp.errors import UserError

#: The entries that have the shape of `tokens`.
SEQUENCE_KEYS = ("tokens", "labels", "input_pos", "token_dropout_scale")
#: What makes a batch one rank's slices: says what every rank holds of the whole batch, see `layout`.
SLICE_KEY = "slice_layout"
#: Where the documents are, in any form; read before the cut, and of no meaning for a slice.
DOCUMENT_KEYS = ("seq_lens", "cu_seqlens", "cu_seqlens_padded", SLICE_KEY)
#: One number a row, or a document: all ranks get them, whatever their length.
_WHOLE_KEYS = (*DOCUMENT_KEYS, "sample_ids")

_DOCUMENTS = (
    "seq_lens, or cu_seqlens and cu_seqlens_padded: padding and other documents are then not seen"
)
#: Other libraries' names: what they say would be left out without a word.
_OTHER_NAMES = {
    "input_ids": "tokens",
    "position_ids": "input_pos",
    "attention_mask": _DOCUMENTS,
    **dict.fromkeys(("segment_ids", "document_ids", "seq_idx"), _DOCUMENTS),
    **dict.fromkeys(("cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens"), "cu_seqlens"),
    **dict.fromkeys(("cu_seq_lens_k", "cu_seqlens_k"), "cu_seqlens alone (attention is to itself)"),
}


def check_entries(batch: dict[str, torch.Tensor]) -> None:
    """Refuse a batch without `tokens`, and entries that would be cut wrongly or not at all.

    Raises:
        UserError: Naming the entry.
    """
    if "tokens" not in batch:
        raise UserError(f"a batch needs an entry 'tokens' [batch, seq]; given: {sorted(batch)}")
    for key, entry in batch.items():
        if key in _OTHER_NAMES:
            raise UserError(f"batch entry '{key}' is not read here: give {_OTHER_NAMES[key]}")
        if entry is not None and not isinstance(entry, torch.Tensor):
            raise UserError(
                f"batch entry '{key}' is a {type(entry).__name__}: a batch holds tensors only"
            )
    tokens = batch["tokens"]
    if tokens is None or tokens.ndim != 2 or tokens.is_floating_point():
        given = "None" if tokens is None else f"{tokens.dtype} {list(tokens.shape)}"
        raise UserError(
            f"batch entry 'tokens' is {given}; needed are token ids, integers [batch, seq]"
        )
    if batch.get("seq_lens") is not None and batch.get("cu_seqlens") is not None:
        raise UserError("a batch has both 'seq_lens' and 'cu_seqlens'; give one of them")
    for key, entry in batch.items():
        if entry is not None and key not in _WHOLE_KEYS:
            _check_shape(key, entry, tokens)


def _check_shape(key: str, entry: torch.Tensor, tokens: torch.Tensor) -> None:
    if key in SEQUENCE_KEYS and entry.shape != tokens.shape:
        raise UserError(
            f"batch entry '{key}' has the shape {list(entry.shape)}, but 'tokens' has"
            f" {list(tokens.shape)}; they are cut together along dimension 1"
        )
    if entry.shape[:2] == tokens.shape:
        if entry.device != tokens.device:
            raise UserError(
                f"batch entry '{key}' is on {entry.device}, but 'tokens' on {tokens.device}; move the"
                " whole batch to one device"
            )
        if any(size == tokens.size(1) > 1 for size in entry.shape[2:]):
            raise UserError(
                f"batch entry '{key}' has the shape {list(entry.shape)}: its sequence dimensions cannot"
                f" all be cut; a mask is said by {_DOCUMENTS}, or by mask_mod"
            )
    elif any(size == tokens.size(1) > 1 for size in entry.shape):
        raise UserError(
            f"batch entry '{key}' has the shape {list(entry.shape)} for tokens {list(tokens.shape)}: it"
            " goes along the sequence and cannot be cut with it; give it as [batch, seq, ...]"
            + (f"; a mask is said by {_DOCUMENTS}, or by mask_mod" if entry.ndim > 2 else "")
        )


def cut_keys(batch: dict[str, torch.Tensor]) -> list[str]:
    """The entries that are cut: `tokens` and all others `[batch, seq, ...]`.

    Args:
        batch: Accepted by `check_entries`.
    """
    shape = batch["tokens"].shape
    return [
        key
        for key, entry in batch.items()
        if entry is not None and key not in _WHOLE_KEYS and entry.shape[:2] == shape
    ]


def other_entries(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that every rank gets as they are; not the documents, which are not those of a slice."""
    cut = set(cut_keys(batch))
    return {k: v for k, v in batch.items() if k not in cut and k not in DOCUMENT_KEYS}


def spread(mask: torch.Tensor, like: Any) -> torch.Tensor:
    """A mask over the first dimension of `like`, shaped so that it broadcasts over the others."""
    return mask.view(-1, *[1] * (like.ndim - 1))

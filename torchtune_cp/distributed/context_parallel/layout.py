"""Which positions of a sequence each context-parallel rank holds.

Shape legend: b batch, s sequence, L padded sequence, n this rank's slice (L / cp).
"""

from __future__ import annotations

import torch

from torchtune_cp.errors import UserError

#: The entries of a batch that have a sequence dimension (dimension 1), and what padding is put there.
#: A padding token is never attended to by a real one (it stands behind all of them under a causal
#: mask) and its label is ignored, so any token id will do.
SEQUENCE_KEYS = ("tokens", "labels", "input_pos")

IGNORE_INDEX = -100


def padded_length(seq_len: int, divisor: int) -> int:
    """Return the smallest multiple of ``divisor`` that is at least ``seq_len``."""
    return -(-seq_len // divisor) * divisor


def pad_batch(batch: dict[str, torch.Tensor], divisor: int) -> dict[str, torch.Tensor]:
    """Copy a batch's sequence entries, padded at the end to a multiple of ``divisor``.

    Args:
        batch: ``tokens`` [b, s] and optionally ``labels`` and ``input_pos`` [b, s]; other entries are
            left out. Without ``input_pos`` the positions 0 .. s-1 are added.
        divisor: What the length must divide by.

    Returns:
        New contiguous tensors [b, L]: tokens padded with 0, labels with -100, positions counted on.

    Raises:
        UserError: No ``tokens``, or an entry whose shape is not that of ``tokens``.
    """
    if "tokens" not in batch:
        raise UserError(f"a batch needs an entry 'tokens' [batch, seq]; given: {sorted(batch)}")
    tokens = batch["tokens"]
    b, s = tokens.shape
    length = padded_length(s, divisor)
    extra = length - s
    padded: dict[str, torch.Tensor] = {}
    for key in SEQUENCE_KEYS:
        entry = batch.get(key)
        if entry is None:
            continue
        if entry.shape != tokens.shape:
            raise UserError(
                f"batch entry '{key}' has the shape {list(entry.shape)}, but 'tokens' has"
                f" {list(tokens.shape)}; they are cut together along dimension 1"
            )
        if key == "input_pos":
            tail = entry[:, -1:] + torch.arange(1, extra + 1, device=entry.device)
        else:
            fill = IGNORE_INDEX if key == "labels" else 0
            tail = entry.new_full((b, extra), fill)
        padded[key] = torch.cat([entry, tail.to(entry.dtype)], dim=1).contiguous()
    if "input_pos" not in padded:
        positions = torch.arange(length, device=tokens.device)
        padded["input_pos"] = positions.expand(b, length).contiguous()
    return padded


def head_tail_indices(length: int, cp: int) -> torch.Tensor:
    """Which positions every rank holds under head-tail balance.

    A causal mask gives late positions more work than early ones. Cut into ``2 cp`` chunks, rank r
    takes chunk r and chunk ``2 cp - 1 - r``, so that all ranks do the same work (as in Llama 3,
    arXiv 2407.21783, section 3.3.2, and in torch's load balancer).

    Args:
        length: Padded sequence length, a multiple of ``2 cp``.
        cp: Context-parallel degree.

    Returns:
        [cp, length / cp] positions, row r for rank r, in the order in which it holds them.

    Raises:
        ValueError: ``length`` is not a multiple of ``2 cp``.
    """
    if length % (2 * cp) != 0:
        raise ValueError(f"head-tail balance needs a multiple of {2 * cp}, not {length}")
    chunks = torch.arange(length).view(2 * cp, length // (2 * cp))
    ranks = torch.arange(cp)
    return torch.cat([chunks[ranks], chunks[2 * cp - 1 - ranks]], dim=1)


def consecutive_indices(length: int, cp: int) -> torch.Tensor:
    """Which positions every rank holds where no balance is needed (bidirectional attention).

    Args:
        length: Padded sequence length, a multiple of ``cp``.
        cp: Context-parallel degree.

    Returns:
        [cp, length / cp] positions, row r for rank r.
    """
    return torch.arange(length).view(cp, length // cp)

"""Token dropout of the ESM models: mask tokens embed as 0, and the other embeddings are scaled to compensate.

In training 15 % of a protein's tokens are chosen and 80 % of these become mask tokens, so 12 % of the
embeddings are 0. The others are scaled by (1 - 0.12) / (1 - r), r the share of mask tokens in the
current sequence, so that a sequence without any sums up to what the model saw in training (Lin et al.
2023, https://doi.org/10.1126/science.ade2574; ESM-1b, https://doi.org/10.1073/pnas.2016239118).

r is a property of a whole protein. A rank that holds a slice of it, or a row in which several lie one
behind the other, cannot see it: then the scale is computed before the sequence is cut and cut along.
"""

import torch
from torch import Tensor

#: The share of tokens that were mask tokens when the ESM models were trained.
TRAINING_MASK_RATIO = 0.15 * 0.8


def token_dropout_scale(
    tokens: Tensor,
    mask_token_id: int,
    *,
    real: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """The factor of each token's embedding, from whole sequences.

    Args:
        tokens: Token ids, `[batch, seq]`: whole rows, before any cut.
        mask_token_id: The mask token.
        real: Boolean `[batch, seq]`, False for padding, which does not count; None means that every
            token counts.
        document_ids: `[batch, seq]`, int64: number of the document within its row, from 0 on; the
            tokens of a document need not be neighbours. None means one document a row.

    Returns:
        `[batch, seq]`, float32: (1 - 0.12) / (1 - r) of the token's document, the same for all of its
        tokens, mask tokens and padding included. 1 where a document has nothing but mask tokens or
        padding: there is nothing to scale.
    """
    if real is None:
        real = torch.ones_like(tokens, dtype=torch.bool)
    if document_ids is None:
        document_ids = torch.zeros_like(tokens)
    batch = tokens.shape[0]
    documents = int(document_ids.max()) + 1 if document_ids.numel() else 1
    zeros = torch.zeros(batch, documents, dtype=torch.int64, device=tokens.device)
    is_mask = (tokens == mask_token_id) & real
    lengths = zeros.scatter_add(1, document_ids, real.long())
    masked = zeros.scatter_add(1, document_ids, is_mask.long())
    # In this order and precision as transformers does, whose weights these are.
    ratio = masked.float() / lengths.float().clamp(min=1.0)
    scale = (1 - TRAINING_MASK_RATIO) / (1 - ratio)
    scale = scale.masked_fill(masked == lengths, 1.0)
    return scale.gather(1, document_ids)

"""Attention over some of the heads at a time, by whichever method the active region has.

Under the methods ring and allgather a chunk's keys and values alone travel. Under Ulysses a chunk's heads are
given out to the ranks and brought back, as in UPipe (Untied Ulysses, arXiv 2602.21196): there is never more
than one chunk of heads in the layout of the heads, and keys and values that serve several chunks of
query heads in a row are sent once.

Shape legend: h query heads and g KV heads of a chunk, n tokens of this rank, d elements of a head; P ranks
that share the heads.
"""

from __future__ import annotations

import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.ops import active_batch

Gradients = tuple[torch.Tensor, torch.Tensor]


class KeysAndValues:
    """The keys and values of a chunk, while `uses` chunks of query heads meet them in turn.

    All of one pass: either `attend` is called `uses` times, or `gradients` is. For use
    without autograd.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, uses: int, ranks: int, mask: AttentionMask
    ) -> None:
        """Take keys and values before they are sent.

        Args:
            key: [1, g, n, d].
            value: As `key`.
            uses: How many chunks of query heads there are for them.
            ranks: P, as the heads were divided.
            mask: What is attended to within a document.

        Raises:
            RuntimeError: No context is active that was entered with `head_chunks` among its options, or it
                shares the heads among another number of ranks.
        """
        self._parts, self._rank = active_batch().heads_split
        self._mask = mask.is_causal, mask.window, mask.chunk
        if self._parts != ranks:
            raise RuntimeError(
                f"head chunks for {ranks} ranks that share the heads inside context_parallel(...) with"
                f" {self._parts}"
            )
        self._key, self._value = key, value
        self._kv_heads = key.size(1)
        self._sent = False
        self._uses = uses
        self._sums: Gradients | None = None

    def _meet(self, query: torch.Tensor) -> torch.Tensor:
        """Bring a chunk's queries to where its keys and values are; with the first, bring those, too."""
        if self._parts == 1:
            return query
        if self._sent:
            return _to_heads(query, self._parts)
        self._sent = True
        q, self._key, self._value = torch.ops.torchtune_cp.to_heads(
            query, self._key, self._value, self._parts, self._rank
        )
        met: torch.Tensor = q
        return met

    def attend(self, query: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with one chunk of query heads.

        Args:
            query: [1, h, n, d].
            scale: Of the scores.

        Returns:
            The output [1, h, n, d] and what `gradients` needs besides: the logsumexp, of this rank's
            heads [1, h / P, n P].
        """
        query = self._meet(query)
        out, logsumexp = torch.ops.torchtune_cp.attention(
            query, self._key, self._value, *self._mask, scale
        )
        return (out if self._parts == 1 else _to_tokens(out, self._parts)), logsumexp

    def gradients(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, Gradients | None]:
        """Take the gradients of one chunk of query heads.

        Args:
            grad_out: [1, h, n, d].
            query: As given to `attend`, in the same order of chunks.
            out: From there.
            logsumexp: From there.
            scale: As there.

        Returns:
            The query's, and with the last chunk those of key and value; else None.
        """
        query = self._meet(query)
        if self._parts > 1:
            grad_out, out = _to_heads(grad_out, self._parts), _to_heads(out, self._parts)
        grad_query, *grads = torch.ops.torchtune_cp.attention_backward(
            grad_out, query, self._key, self._value, out, logsumexp, scale, *self._mask
        )
        del grad_out, out
        query_heads = query.size(1) * self._parts
        self._uses -= 1
        if self._uses or self._sums is not None:
            self._add(*grads)
        if self._uses:
            return (grad_query if self._parts == 1 else _to_tokens(grad_query, self._parts)), None
        key, value = self._sums or grads
        key, value = key.to(self._key.dtype), value.to(self._value.dtype)
        if self._parts > 1:
            grad_query, key, value = torch.ops.torchtune_cp.to_heads_backward(
                grad_query, key, value, query_heads, self._kv_heads, self._parts
            )
        return grad_query, (key, value)

    def _add(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._sums is None:
            exact = torch.promote_types(key.dtype, torch.float32)
            self._sums = key.to(exact), value.to(exact)
        else:
            self._sums[0].add_(key)
            self._sums[1].add_(value)


def _to_heads(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """[1, h, n, d] to [1, h / P, n P, d], of a tensor that has no keys and values with it."""
    heads: torch.Tensor = torch.ops.torchtune_cp.to_tokens_backward(tensor, parts)
    return heads


def _to_tokens(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    tokens: torch.Tensor = torch.ops.torchtune_cp.to_tokens(tensor, parts)
    return tokens

"""The attention that models call, and where a distributed one takes its place.

    attention(q, k, v, is_causal=True, window=4096)

runs torch's `scaled_dot_product_attention` on one device. Inside `context_parallel` the same call attends
over the tokens of all ranks, within documents. What a call needs is in its arguments, so the layers of one
model may differ: some with a window, some without.

`F.scaled_dot_product_attention` ends here as well while a context is active, for models that are not of this
package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtune_cp.errors import UserError

#: `mask_mod(row, head, query position, key position) -> bool`, on tensors, as FlexAttention takes it;
#: positions restart with each document, and keys of other documents are never seen.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionMask:
    """Which tokens of one document a token attends to.

    Attributes:
        is_causal: Itself and earlier ones only.
        window: Those at most `window - 1` tokens away (on either side where it is bidirectional);
            None for any distance.
        chunk: Those of its own chunk only, `chunk` consecutive tokens counted from the document's first
            (chunked attention); None for one chunk.
    """

    is_causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Refuse a window or a chunk that not even the token itself fits into."""
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UserError(f"{name}={size}: must be at least 1, or None for no {name}")

    def within(self, length: int) -> AttentionMask:
        """The same mask for a document of `length` tokens, without limits that cut nothing."""
        window = None if self.window is None or self.window >= length else self.window
        chunk = None if self.chunk is None or self.chunk >= length else self.chunk
        if (window, chunk) == (self.window, self.chunk):
            return self
        return AttentionMask(self.is_causal, window, chunk)

    @property
    def is_limited(self) -> bool:
        """Whether it has a window or chunks."""
        return self.window is not None or self.chunk is not None


@dataclass(eq=False)
class Region:
    """A context in which attention is distributed.

    Attributes:
        attend: `(query, key, value, is_causal, window, chunk, mask_mod, scale) -> output`, shapes as in
            `attention`. The same object for every batch of a kind: torch.compile guards on it.
        batch: What `attend` needs to know of the batch; read when it runs, not when it is compiled.
        is_causal: What the context was entered with.
        window: Likewise; it holds for calls of `F.scaled_dot_product_attention`, which cannot say.
        chunk: Likewise.
        mask_mod: Likewise.
    """

    attend: Callable[..., Tensor]
    batch: Any = None
    is_causal: bool = True
    window: int | None = None
    chunk: int | None = None
    mask_mod: MaskMod | None = None


#: Module-level state: the active context. Models are called with tensors only, and autograd and recomputation
#: call back later, so who distributes attention cannot be handed through their arguments.
_region: Region | None = None


def active_region() -> Region:
    """The region whose context is active; there must be one, see `is_distributed`."""
    assert _region is not None
    return _region


def is_distributed() -> bool:
    """Whether a context is active: the model's tokens then are slices, or several documents."""
    return _region is not None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    mask_mod: MaskMod | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend.

    Shape legend: b rows, h query heads, g KV heads (h / g queries share one), n tokens, d elements of a head.

    Args:
        query: [b, h, n, d].
        key: [b, g, n, d].
        value: As `key`.
        is_causal: See `AttentionMask`.
        window: Likewise.
        chunk: Likewise.
        mask_mod: Any other mask; takes the place of the three.
        attn_mask: bool, broadcastable to [b, h, n, n], True where a query may look at a key; on one device
            only, and takes the place of all others.
        scale: Of the scores; None for `d ** -0.5`.

    Returns:
        [b, h, n, d].

    Raises:
        NotImplementedError: The active context cannot do such attention.
    """
    if _region is None:
        gqa = query.size(1) != key.size(1)
        if attn_mask is None:
            attn_mask = _written_out(query, is_causal, window, chunk, mask_mod)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            is_causal=is_causal and attn_mask is None,
            scale=scale,
            enable_gqa=gqa,
        )
    if attn_mask is not None:
        raise NotImplementedError(_NO_MASK)
    return _region.attend(query, key, value, is_causal, window, chunk, mask_mod, scale)


_NO_MASK = (
    "an attention mask was given inside context_parallel: masks are said by documents (seq_lens), a window,"
    " a chunk or a mask_mod"
)


def other_kind(is_causal: bool, entered_for: bool) -> NotImplementedError:
    """The refusal of causal attention in a context for bidirectional attention, or the other way round."""
    return NotImplementedError(
        f"attention with is_causal={is_causal} inside context_parallel(..., is_causal={entered_for}): the"
        " sequence was cut for the other kind"
    )


def _written_out(
    query: Tensor, is_causal: bool, window: int | None, chunk: int | None, mask_mod: MaskMod | None
) -> Tensor | None:
    """The mask of whole rows on one device, [n, n] or [b, h, n, n]; None where torch needs none."""
    rows, heads, length, _ = query.shape
    place = torch.arange(length, device=query.device)
    if mask_mod is not None:
        row, head = (torch.arange(size, device=query.device) for size in (rows, heads))
        at = row[:, None, None, None], head[:, None, None], place[:, None], place
        return mask_mod(*at).expand(rows, heads, length, length)
    limited = window is not None and length > window
    if not limited and (chunk is None or length <= chunk):
        return None
    distance = place[:, None] - place
    shown = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        shown = shown & (distance.abs() < window)
    if chunk is not None:
        shown = shown & (place[:, None] // chunk == place // chunk)
    return shown


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand for `F.scaled_dot_product_attention` inside a context.

    Raises:
        NotImplementedError: A mask, dropout, or a kind of attention that the context was not entered for.
        ValueError: More query heads than key heads without `enable_gqa`.
    """
    region = _region
    assert region is not None
    if attn_mask is not None:
        raise NotImplementedError(_NO_MASK)
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"attention dropout {dropout_p} inside context_parallel: set attn_dropout to 0"
        )
    if is_causal != region.is_causal and region.mask_mod is None:
        raise other_kind(is_causal, region.is_causal)
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError(
            f"{query.size(1)} query heads and {key.size(1)} key heads: set enable_gqa=True"
        )
    limits = region.window, region.chunk
    return region.attend(query, key, value, is_causal, *limits, region.mask_mod, scale)


@contextlib.contextmanager
def distributed_attention(region: Region) -> Generator[None, None, None]:
    """Let `attention` and `F.scaled_dot_product_attention` be those of a region.

    Args:
        region: Until the context is left.

    """
    global _region
    original = F.scaled_dot_product_attention
    _region = region
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        _region = None
        F.scaled_dot_product_attention = original


def mark_for_context(tokens: Tensor) -> Tensor:
    """Tokens that mean something inside the active context only; `check_inside` refuses them later."""
    own = tokens.detach()  # not the caller's own tensor
    own.needs_context = True  # type: ignore[attr-defined]
    return own


def check_inside(tokens: Tensor) -> None:
    """Refuse tokens that a context has cut, or holds documents of, once that context has ended.

    Args:
        tokens: The model's.

    Raises:
        UserError: Plain attention would take them for whole sequences.
    """
    if _region is None and getattr(tokens, "needs_context", False):
        raise UserError(
            "the model was called outside of the context_parallel that yielded these tokens: plain"
            " attention would take them for whole sequences; call it (and backward) inside"
        )

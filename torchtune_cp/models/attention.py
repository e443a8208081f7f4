"""Self-attention with grouped queries, causal or bidirectional.

Models know nothing of meshes: attention is one call of `F.scaled_dot_product_attention`, looked up
on `torch.nn.functional` at every call, which the `context_parallel` context manager re-routes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtune_cp.errors import UserError
from torchtune_cp.models.config import AttentionSizes
from torchtune_cp.models.norm import RMSNorm
from torchtune_cp.models.rope import rotate

_torch_attention = F.scaled_dot_product_attention


def check_window(window: int | None) -> None:
    """Refuse attention that is distributed without regard to the model's sliding window.

    What stands for ``F.scaled_dot_product_attention`` in such a context has ``window`` as an attribute.

    Args:
        window: The model's.

    Raises:
        UserError: Naming the argument that is missing.
    """
    if window is None:
        return
    given = getattr(F.scaled_dot_product_attention, "window", window)
    if given != window:
        raise UserError(
            f"the model's sliding_window is {window}, but the attention around it has window={given}:"
            f" give context_parallel(..., window={window})"
        )


def check_inside(tokens: Tensor) -> None:
    """Refuse tokens that a context has cut, or holds documents of, once that context has ended.

    Such tokens have ``needs_context`` as an attribute.

    Args:
        tokens: The model's.

    Raises:
        UserError: Plain attention would take them for whole sequences.
    """
    if F.scaled_dot_product_attention is _torch_attention and getattr(
        tokens, "needs_context", False
    ):
        raise UserError(
            "the model was called outside of the context_parallel that yielded these tokens: plain"
            " attention would take them for whole sequences; call it (and backward) inside"
        )


def is_distributed() -> bool:
    """Whether attention is that of a context: the model's tokens then are slices, or several documents."""
    return hasattr(F.scaled_dot_product_attention, "window")  # see `check_window`


def _window_mask(seq: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query sees, `[seq, seq]`: itself and the `window - 1` before it."""
    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)
    return (distance >= 0) & (distance < window)


class MultiHeadAttention(nn.Module):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245) with rotary positions.

    Args:
        config: The model's sizes.
    """

    def __init__(self, config: AttentionSizes) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_causal = config.is_causal
        self.window = config.sliding_window
        query_dim = config.num_heads * config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.embed_dim, query_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.embed_dim, kv_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.embed_dim, kv_dim, bias=config.qkv_bias)
        self.output_proj = nn.Linear(query_dim, config.embed_dim, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attn_mask: Tensor | None = None
    ) -> Tensor:
        """Attend to this and all earlier tokens of the sequence, or to all where not causal.

        Args:
            x: `[batch, seq, embed_dim]`.
            rope: Cosine and sine from `rotary_cos_sin`.
            attn_mask: Boolean, broadcastable to `[batch, heads, seq, seq]`, True where a query may
                look at a key; for bidirectional attention on one device only.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        batch, seq, _ = x.shape
        # -1 for the heads: under tensor parallelism a projection yields this rank's heads only.
        q = self.q_proj(x).view(batch, seq, -1, self.head_dim)
        k = self.k_proj(x).view(batch, seq, -1, self.head_dim)
        v = self.v_proj(x).view(batch, seq, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)

        # [batch, heads, seq, head_dim] views. Keys and values keep their own few heads, so that
        # context parallelism moves only those.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        gqa = q.shape[1] != k.shape[1]
        alone = F.scaled_dot_product_attention is _torch_attention
        if alone and self.window is not None and seq > self.window:
            mask = _window_mask(seq, self.window, x.device)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        else:  # a context that distributes attention was told of the window: see `check_window`
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, is_causal=self.is_causal, enable_gqa=gqa
            )
        output: Tensor = self.output_proj(attended.transpose(1, 2).reshape(batch, seq, -1))
        return output

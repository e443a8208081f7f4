"""Self-attention with grouped queries, causal or bidirectional.

Models know nothing of meshes: they call `torchtune_cp.attention.attention`, which is distributed inside
`context_parallel`.
"""

from torch import Tensor, nn

from torchtune_cp.attention import AttentionMask, attention
from torchtune_cp.models.config import AttentionSizes
from torchtune_cp.models.norm import RMSNorm
from torchtune_cp.models.rope import rotate


class MultiHeadAttention(nn.Module):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245) with rotary positions.

    Args:
        config: The model's sizes.
    """

    def __init__(self, config: AttentionSizes) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.mask = AttentionMask(config.is_causal, config.sliding_window)
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
        mask = self.mask
        attended = attention(
            q,
            k,
            v,
            is_causal=mask.is_causal,
            window=mask.window,
            chunk=mask.chunk,
            attn_mask=attn_mask,
        )
        output: Tensor = self.output_proj(attended.transpose(1, 2).reshape(batch, seq, -1))
        return output

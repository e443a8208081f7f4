"""Attention over documents written out: independent of every kernel, and of how anything is cut."""

from __future__ import annotations

import torch

#: Document lengths by row of the batch, and the length of a row (what is left is padding).
DOCUMENTS = {
    "one": ([[171]], 171),
    "halving": ([[128, 64, 32, 16, 8, 8]], 256),
    "many": (
        [[1 + (37 * i) % 50 for i in range(32)], [1 + (61 * i) % 40 for i in range(32)]],
        1024,
    ),
    "one_huge": ([[400, *[3] * 20]], 460),
    "of_one_token": ([[1] * 9], 9),
    "padded": ([[60, 17, 0], [100, 0, 0], [0, 0, 0]], 128),
}
#: The same kinds in the sizes that packs have.
LARGE_DOCUMENTS = {
    "one": ([[2999]], 2999),
    "halving": ([[2048, 1024, 512, 256, 128, 128]], 4096),
    "many": ([[1 + (37 * i) % 200 for i in range(64)]], 200 * 64),
    "one_huge": ([[3000, *[5] * 40]], 3200),
}
#: Whether causal, and the window.
MASKS = {
    "causal": (True, None),
    "bidirectional": (False, None),
    "window": (True, 23),
    "both_sides": (False, 9),
}


def seq_lens_of(rows):
    most = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])


def is_token(rows, length):
    """[b, s] bool: False on padding."""
    ends = torch.tensor([sum(row) for row in rows])
    return torch.arange(length) < ends[:, None]


def distances_shown(n, is_causal, window, chunk=None):
    """[n, n] bool: which key of a document of n tokens a query sees."""
    place = torch.arange(n)
    distance = place[:, None] - place
    shown = distance >= 0 if is_causal else torch.ones(n, n, dtype=torch.bool)
    if chunk is not None:
        shown = shown & (place[:, None] // chunk == place // chunk)
    return shown if window is None else shown & (distance.abs() < window)


def attention_written_out(q, k, v, rows, shown):
    """Softmax attention of each document alone; 0 on padding.

    ``shown(n)`` gives the [n, n] mask of a document of n tokens.
    """
    out = torch.zeros_like(q)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    for row, lengths in enumerate(rows):
        start = 0
        for n in lengths:
            here = slice(start, start + n)
            start += n
            scores = q[row, :, here] @ k[row, :, here].transpose(-1, -2) / q.size(-1) ** 0.5
            weights = scores.masked_fill(~shown(n), float("-inf")).softmax(-1)
            out[row, :, here] = weights @ v[row, :, here]
    return out


def random_inputs(rows, length, heads, kv_heads, head_dim, dtype=torch.float64):
    """Query, key, value, and a gradient of the output: [b, h, s, d], as projections give them."""
    g = torch.Generator().manual_seed(length + len(rows))
    return [
        torch.randn(len(rows), length, h, head_dim, generator=g, dtype=dtype).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def output_and_gradients(rows, inputs, shown):
    """The output, and the gradients of query, key and value for the output's gradient."""
    q, k, v, gradient = inputs
    whole = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attention_written_out(*whole, rows, shown)
    return [out.detach(), *torch.autograd.grad((out * gradient).sum(), whole)]

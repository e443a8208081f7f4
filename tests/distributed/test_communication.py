"""What attention sends, counted at the process group, against what the method has to move.

Forward: each rank must get the keys and values of all others: (cp - 1) / cp of all KV bytes, with the
model's own few KV heads. Backward: the keys and values once more, and their gradients go round the
whole ring, cp hops of 1 / cp each: (2 cp - 1) / cp of the KV bytes (float32; in bfloat16 the
gradients travel in float32 and count twice).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.dispatch_watchers import BytesSent
from tests.distributed.harness import run_ranks
from torchtune_cp.distributed import context_parallel

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 8, 2, 16
KV_BYTES = 2 * BATCH * SEQ * KV_HEADS * HEAD_DIM * 4


def _count():
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    batch = {"tokens": torch.zeros(BATCH, SEQ, dtype=torch.int64)}
    n = SEQ // world
    counts = {}
    for rotate in ("allgather", "alltoall"):
        q = torch.randn(BATCH, HEADS, n, HEAD_DIM, requires_grad=True)
        k, v = (torch.randn(BATCH, KV_HEADS, n, HEAD_DIM, requires_grad=True) for _ in range(2))
        with context_parallel(mesh, batch, rotate_method=rotate):
            with BytesSent() as forward:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            with BytesSent() as backward:
                out.sum().backward()
        counts[rotate] = sum(forward.sent.values()), sum(backward.sent.values())
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_sent_are_those_of_the_unexpanded_kv_heads(cp):
    for per_rank in run_ranks(cp, _count):
        assert set(per_rank) == {"allgather", "alltoall"}
        for forward, backward in per_rank.values():
            assert forward == pytest.approx((cp - 1) / cp * KV_BYTES, rel=0.05)
            assert backward == pytest.approx((2 * cp - 1) / cp * KV_BYTES, rel=0.05)

"""Cross entropy over a sharded vocabulary: each rank holds a range of token ids.

Shape legend: c tokens of a chunk, w token ids of this rank's range, d embedding, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True)
class VocabShard:
    """Which token ids this rank's logits belong to.

    Attributes:
        group: The ranks that hold the other ids.
        first: The lowest id here.
        vocab_size: Number of ids of all ranks.
    """

    group: dist.ProcessGroup
    first: int
    vocab_size: int


def local_vocab_shard(hidden: DTensor, weight: DTensor) -> tuple[Tensor, Tensor, VocabShard]:
    """Unwrap what a vocabulary-sharded output projection is given.

    Args:
        hidden: [..., d], the same on every rank; each rank's part of the vocabulary adds to its gradient.
        weight: [v, d], cut along v.

    Returns:
        The local tensors, [..., d] and [w, d], with gradients leading back, and the range of ids.
    """
    mesh = weight.device_mesh
    assert weight.placements == (Shard(0),), f"the output weight has placements {weight.placements}"
    assert hidden.placements == (Replicate(),), f"hidden states have placements {hidden.placements}"
    local_weight = weight.to_local()
    assert local_weight.size(0) * mesh.size() == weight.size(0), "uneven ranges of token ids"
    shard = VocabShard(
        group=mesh.get_group(),
        first=mesh.get_local_rank() * local_weight.size(0),
        vocab_size=weight.size(0),
    )
    return hidden.to_local(grad_placements=[Partial()]), local_weight, shard


def vocab_parallel_loss_and_grad(
    logits: Tensor, labels: Tensor, ignore_index: int, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Sum the losses of a chunk and return the gradient of that sum with respect to the local logits.

    The ranks exchange three numbers a token, never logits (as Megatron-LM does, arXiv 1909.08053,
    section 3): the largest logit, the sum of exponentials and the label's logit.

    Args:
        logits: [c, w], float32 or wider; overwritten.
        labels: [c], ids of the whole vocabulary, the same on every rank of `shard.group`.
        ignore_index: The label of a token that does not count.
        shard: This rank's range of ids.

    Returns:
        The sum over the whole vocabulary, a scalar and the same on every rank, and this rank's columns
        of softmax(logits) - onehot(labels), [c, w], 0 for ignored tokens.
    """
    valid = labels != ignore_index
    index = labels - shard.first
    # An id of no rank stays out of range, so that gather refuses it as it does without tensor parallelism.
    known = (labels >= 0) & (labels < shard.vocab_size)
    elsewhere = ~valid | (known & ((index < 0) | (index >= logits.size(1))))
    index = index.masked_fill(elsewhere, 0).unsqueeze(1)

    largest = logits.amax(dim=1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    logits.sub_(largest.unsqueeze(1))
    picked = logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0)
    exponentials = logits.exp_()
    sums = torch.stack([exponentials.sum(dim=1), picked])
    dist.all_reduce(sums, group=shard.group)
    exponential_sum, picked = sums

    loss = (exponential_sum.log() - picked).masked_fill(~valid, 0).sum()
    grad = exponentials.div_(exponential_sum.unsqueeze(1))
    grad.scatter_add_(1, index, elsewhere.to(grad.dtype).sub_(1).unsqueeze(1))
    if not bool(valid.all()):
        # By fill, not by multiplication: an infinite logit times 0 would be NaN.
        grad[~valid] = 0
    return loss, grad

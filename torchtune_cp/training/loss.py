"""Cross entropy fused with the output projection, computed in chunks of tokens.

Shape legend: N tokens (batch x sequence of this rank), c tokens of a chunk, d embedding, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtune_cp.errors import UserError
from torchtune_cp.training.memory import tiling
from torchtune_cp.training.vocab_parallel import (
    VocabShard,
    local_vocab_shard,
    vocab_parallel_loss_and_grad,
)


def _chunk_loss_and_grad(
    logits: Tensor, labels: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Sum the losses of a chunk and return the gradient of that sum with respect to its logits.

    Args:
        logits: [c, v], float32 or wider; its memory may be reused.
        labels: [c].
        ignore_index: The label of a token that does not count.

    Returns:
        The sum, a scalar, and softmax(logits) - onehot(labels), [c, v], 0 for ignored tokens.
    """
    valid = labels != ignore_index
    index = labels.where(valid, 0).unsqueeze(1)
    log_probs = F.log_softmax(logits, dim=-1)
    picked = log_probs.gather(1, index).squeeze(1)
    loss = -picked.where(valid, 0).sum()
    grad = log_probs.exp_()
    grad.scatter_add_(1, index, grad.new_full((1, 1), -1.0).expand_as(index))
    if not bool(valid.all()):
        # In place and by fill, not by multiplication: an infinite logit times 0 would be NaN.
        grad[~valid] = 0
    return loss, grad


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Takes the gradient in the forward pass: three products with the head instead of four.

    Keeping logits for backward needs [N, v]; recomputing them needs a fourth product. A loss that is
    the last node of the graph can compute its own gradient while a chunk's logits exist (as Liger
    Kernel does, arXiv 2410.10989); backward then only multiplies by the incoming scalar.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        ignore_index: int,
        shard: VocabShard | None,
        reuse_hidden: bool,
    ) -> Tensor:
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=accumulate)
        # detach() shares the version counter: had someone kept these hidden states for backward,
        # autograd would raise there, not take gradients for states.
        grad_hidden = hidden.detach() if reuse_hidden else torch.empty_like(hidden)
        # Chunks add up in float32: bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=accumulate)
        for part in tiling.tiles(hidden.size(0), chunk):
            h, y = hidden[part], labels[part]
            logits = h @ weight.t()
            logits = logits.to(accumulate)
            if shard is None:
                loss, grad = _chunk_loss_and_grad(logits, y, ignore_index)
            else:
                loss, grad = vocab_parallel_loss_and_grad(logits, y, ignore_index, shard)
            total += loss
            del logits
            grad = grad.to(hidden.dtype)
            if accumulate == hidden.dtype:
                grad_weight.addmm_(grad.t(), h)
            else:
                grad_weight += grad.t() @ h
            torch.mm(grad, weight, out=grad_hidden[part])  # last: it may take the place of h
            del grad  # otherwise two chunks would exist while the next one is computed
        ctx.scaled = False
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.scaled:
            raise RuntimeError(
                "LinearCrossEntropyLoss: backward was called a second time (retain_graph=True);"
                " its gradients were returned by the first"
            )
        ctx.scaled = True
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place: a second copy of the head's gradient would be the step's peak of memory.
        grad_hidden.mul_(grad.to(grad_hidden.dtype))
        grad_weight.mul_(grad.to(grad_weight.dtype))
        return grad_hidden, grad_weight, None, None, None, None, None


class LinearCrossEntropyLoss:
    """Sum of the cross entropies of a slice's tokens, without materialising all of its logits.

    It is the sum, not the mean: the training step divides by the number of label tokens of the whole global
    step, which a single rank or micro-batch does not know.

    Args:
        num_output_chunks: A slice's tokens are projected in at least this many chunks.
        ignore_index: The label of tokens without loss.
        max_chunk_tokens: Maximum number of tokens in a chunk, for any length of the slice: the logits of a
            chunk take `max_chunk_tokens x v x 4` bytes.
        reuse_hidden: In training, write the gradient of the hidden states over the hidden states, chunk by
            chunk: one tensor of the whole slice instead of two. The caller's hidden states are overwritten;
            the models of this project do not read them afterwards.

    Raises:
        UserError: A number of chunks or tokens below 1.
    """

    def __init__(
        self,
        num_output_chunks: int = 8,
        ignore_index: int = -100,
        max_chunk_tokens: int = 4096,
        reuse_hidden: bool = False,
    ) -> None:
        for key, value in (
            ("num_output_chunks", num_output_chunks),
            ("max_chunk_tokens", max_chunk_tokens),
        ):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"loss.{key}={value!r}: must be a whole number of at least 1")
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index
        self.max_chunk_tokens = max_chunk_tokens
        self.reuse_hidden = reuse_hidden

    def chunk_tokens(self, num_tokens: int) -> int:
        """Return the chunk size, in tokens, for a slice of `num_tokens`."""
        return max(1, min(-(-num_tokens // self.num_output_chunks), self.max_chunk_tokens))

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Project and sum.

        Args:
            hidden: [batch, seq, d], after the last norm.
            weight: [v, d], the output projection. Under tensor parallelism both are DTensors, `hidden`
                replicated and `weight` cut along v; then each rank takes the logits of its own v / tp
                token ids only.
            labels: [batch, seq], already shifted; `ignore_index` where nothing is to be predicted.

        Returns:
            The sum of the token losses in nats, a float32 scalar (float64 for float64 inputs). It
            depends on `hidden` and `weight` even where no label counts: their gradient is then 0.
            Its backward can be called once.
        """
        shard = None
        if isinstance(weight, DTensor):
            assert isinstance(hidden, DTensor), "the weight is sharded, hidden states are not"
            hidden, weight, shard = local_vocab_shard(hidden, weight)
        hidden = hidden.reshape(-1, hidden.size(-1))
        labels = labels.reshape(-1)
        chunk = self.chunk_tokens(hidden.size(0))
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            total: Tensor = _FusedLinearCrossEntropy.apply(
                hidden, weight, labels, chunk, self.ignore_index, shard, self.reuse_hidden
            )
            return total
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in tiling.tiles(hidden.size(0), chunk):
            logits = (hidden[part] @ weight.t()).to(total.dtype)
            if shard is None:
                total += F.cross_entropy(
                    logits, labels[part], ignore_index=self.ignore_index, reduction="sum"
                )
            else:
                total += vocab_parallel_loss_and_grad(
                    logits, labels[part], self.ignore_index, shard
                )[0]
        return total

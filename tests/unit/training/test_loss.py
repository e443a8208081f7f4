"""The chunked loss against torch's cross entropy on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_cp.errors import UserError
from torchtune_cp.training import LinearCrossEntropyLoss

BATCH, SEQ, DIM, VOCAB = 2, 37, 4, 50


def _inputs(dtype=torch.float64, ignored=0.3):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, SEQ, DIM, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, DIM, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=g)
    labels[torch.rand(BATCH, SEQ, generator=g) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _reference(hidden, weight, labels):
    logits = (hidden @ weight.t()).flatten(0, 1)
    return F.cross_entropy(logits.to(torch.float64), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunks", [1, 3, 8, 1000])
def test_loss_and_gradients_equal_whole_logits_for_any_number_of_chunks(chunks):
    hidden, weight, labels = _inputs()
    loss = LinearCrossEntropyLoss(num_output_chunks=chunks)(hidden, weight, labels)
    (loss * 0.25).backward()
    other, other_weight, _ = _inputs()
    expected = _reference(other, other_weight, labels)
    (expected * 0.25).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=1e-10, atol=1e-12)


def test_validation_takes_the_same_loss_without_a_gradient():
    hidden, weight, labels = _inputs()
    loss_fn = LinearCrossEntropyLoss(num_output_chunks=4)
    with torch.no_grad():
        evaluated = loss_fn(hidden, weight, labels)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, loss_fn(hidden, weight, labels).detach())


def test_a_slice_without_any_label_contributes_zero_and_zero_gradients():
    hidden, weight, labels = _inputs(ignored=2.0)
    assert (labels == -100).all()
    loss = LinearCrossEntropyLoss()(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_ignored_tokens_with_infinite_logits_leave_the_rest_finite():
    hidden, weight, labels = _inputs()
    with torch.no_grad():
        hidden[0, 0] = float("inf")
    labels[0, 0] = -100
    loss = LinearCrossEntropyLoss()(hidden, weight, labels)
    assert torch.isfinite(loss)


def test_bfloat16_sums_chunks_in_float32():
    # Reference: the same bfloat16 inputs, everything after them in float64. bfloat16 products keep
    # 8 bits, so single entries are within 2 %; the loss, a sum in float32, is far closer.
    hidden, weight, labels = _inputs(torch.bfloat16)
    loss = LinearCrossEntropyLoss(num_output_chunks=20)(hidden, weight, labels)
    loss.backward()
    other, other_weight = hidden.detach().double(), weight.detach().double()
    other.requires_grad_(), other_weight.requires_grad_()
    expected = _reference(other, other_weight, labels)
    expected.backward()
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), expected, rtol=5e-3, atol=0)
    error = (weight.grad.double() - other_weight.grad).norm() / other_weight.grad.norm()
    assert error < 2e-2


class _LargestTensor(TorchDispatchMode):
    """Records the largest tensor whose last dimension is the vocabulary, the weight's gradient apart."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.ndim and t.shape[-1] == VOCAB:
                self.rows = max(self.rows, t.numel() // VOCAB)
        return out


@pytest.mark.parametrize("train", [True, False])
def test_logits_never_exceed_one_chunk(train):
    hidden, weight, labels = _inputs()
    weight = weight.detach().requires_grad_()
    with _LargestTensor() as seen, torch.set_grad_enabled(train):
        loss = LinearCrossEntropyLoss(num_output_chunks=10)(hidden, weight, labels)
    assert seen.rows == -(-BATCH * SEQ // 10)
    loss_fn = LinearCrossEntropyLoss(num_output_chunks=1, max_chunk_tokens=5)
    with _LargestTensor() as seen, torch.set_grad_enabled(train):
        torch.testing.assert_close(loss_fn(hidden, weight, labels), loss)
    assert seen.rows == 5


@pytest.mark.parametrize("key", ["num_output_chunks", "max_chunk_tokens"])
def test_a_chunk_count_below_one_is_refused_by_its_key(key):
    with pytest.raises(UserError, match=f"loss.{key}=0"):
        LinearCrossEntropyLoss(**{key: 0})


def test_a_second_backward_is_refused_not_wrong():
    hidden, weight, labels = _inputs()
    loss = LinearCrossEntropyLoss()(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()

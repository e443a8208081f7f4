"""A tiled MLP gives the same gradients, is computed as often, and holds the intermediates of one tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.live_storage import LiveStorage
from tests.unit.training.small_llama import gradients, loss_of, small_llama
from tests.unit.training.test_activation_checkpointing import Calls
from torchtune_cp.models.esm2 import esm2
from torchtune_cp.models.init import init_tensor_
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.training.loss import LinearCrossEntropyLoss
from torchtune_cp.training.memory import apply_activation_checkpointing, apply_tiled_mlp

LENGTH = 96
WIDE = {"embed_dim": 32, "intermediate_dim": 1024, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tile", [1, 7, LENGTH, 1000])
def test_gradients_are_those_of_the_untiled_model(tile, checkpointed):
    plain, tiled = small_llama().double(), small_llama().double()
    apply_tiled_mlp(tiled, tile)
    if checkpointed:
        apply_activation_checkpointing(tiled)
    torch.testing.assert_close(loss_of(tiled), loss_of(plain), rtol=1e-13, atol=0)
    loss_of(plain).backward()
    loss_of(tiled).backward()
    torch.testing.assert_close(gradients(tiled), gradients(plain), rtol=1e-12, atol=1e-14)


def test_the_gradient_is_the_derivative_also_in_an_encoder():
    model = esm2(num_layers=1, num_heads=4, embed_dim=32, intermediate_dim=16).double()
    layer = model.layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3)
    plain = layer.feed_forward
    x = torch.randn(1, 3, 32, dtype=torch.float64, requires_grad=True)
    expected = plain(x).detach()
    apply_tiled_mlp(model, 2)
    torch.testing.assert_close(layer.feed_forward(x), expected, rtol=1e-13, atol=0)
    parameters = [*layer.mlp_norm.parameters(), *layer.mlp.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: layer.feed_forward(x), (x, *parameters))


def test_the_gradient_is_the_derivative_also_with_biases():
    model = llama3(vocab_size=32, num_layers=1, max_seq_len=64, **WIDE | {"intermediate_dim": 16})
    layer = model.double().layers[0]
    for name in ("w1", "w2", "w3"):
        linear = getattr(layer.mlp, name)
        linear.bias = torch.nn.Parameter(torch.randn(linear.out_features, dtype=torch.float64))
    apply_tiled_mlp(model, 2)
    parameters = [p for p in layer.parameters() if p.numel() < 40]  # the biases and norm scales

    def half(x: Tensor, *_: Tensor) -> Tensor:
        return layer.feed_forward(x)

    x = torch.randn(1, 3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(half, (x, *parameters[-4:]))


def test_bfloat16_tiles_add_up_in_float32():
    """256 tiles: the weight gradients stay as near to float64's as those of one large product."""
    reference = small_llama().double()
    tokens = torch.randint(0, 32, (1, 256), generator=torch.Generator().manual_seed(3))
    loss_of(reference, tokens).backward()

    def worst(tile):
        model = small_llama().bfloat16()
        apply_tiled_mlp(model, tile)
        loss_of(model, tokens).backward()
        return max(
            (p.grad.double() - q.grad).norm() / q.grad.norm()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True)
            if "mlp" in name
        )

    assert worst(1) < 1.1 * worst(256)


def test_the_output_is_no_view_of_which_fsdp_would_warn():
    model = small_llama()
    apply_tiled_mlp(model, 7)
    output = model.layers[0].feed_forward(torch.randn(1, 20, 64, requires_grad=True))
    assert output.requires_grad
    assert not output._is_view()


def test_without_gradients_it_is_the_same_function():
    plain, tiled = small_llama().double(), small_llama().double()
    apply_tiled_mlp(tiled, 7)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(tiled), loss_of(plain), rtol=1e-13, atol=0)


def _wide_step(tile, length=512, checkpointed=True):
    model = llama3(vocab_size=32, num_layers=2, max_seq_len=512, **WIDE)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            init_tensor_(name, parameter, generator, model.config)
    if tile:
        apply_tiled_mlp(model, tile)
    if checkpointed:
        apply_activation_checkpointing(model)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveStorage() as storage:
        loss_of(model, tokens).backward()
    with Calls() as calls:
        loss_of(model, tokens).backward()
    return storage.peak, calls.count


def test_checkpointed_it_multiplies_as_often_and_holds_the_intermediates_of_a_tile():
    """Five tensors of the hidden width are alive at once in the backward pass of an MLP."""
    (whole, calls), (tiled, tiled_calls) = _wide_step(None), _wide_step(64)
    per_token = 4 * 1024
    products, tiled_products = (
        sum(c.get(op, 0) for op in ("mm", "bmm")) for c in (calls, tiled_calls)
    )
    assert products + 7 * 2 * 11 == tiled_products, "7 more tiles, 2 layers, 11 products of an MLP"
    assert calls["silu"] * 8 == tiled_calls["silu"], "no half is computed more often than untiled"
    assert whole > 5 * 512 * per_token
    assert tiled < 0.25 * whole


def test_a_loss_that_reuses_hidden_states_holds_one_tensor_of_the_slice_less():
    peaks = []
    grads = []
    for reuse in (False, True):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 512, 64, generator=generator).requires_grad_()
        weight = torch.randn(4096, 64, generator=generator).requires_grad_()
        labels = torch.randint(0, 4096, (1, 512), generator=generator)
        loss = LinearCrossEntropyLoss(max_chunk_tokens=64, reuse_hidden=reuse)
        with LiveStorage() as storage:
            # As in the model: made in between, and nobody's afterwards.
            total = loss(hidden * 1.0, weight, labels)
            total.backward()
        peaks.append(storage.peak)
        grads.append((total.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert peaks[0] - peaks[1] == 512 * 64 * 4


def test_hidden_states_that_someone_kept_are_not_silently_overwritten():
    hidden = torch.randn(1, 16, 8).requires_grad_()
    made = hidden.exp()  # keeps its output for backward
    total = LinearCrossEntropyLoss(reuse_hidden=True)(
        made, torch.randn(4, 8), torch.zeros(1, 16, dtype=torch.int64)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()

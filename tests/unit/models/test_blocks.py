"""The hand-written gradients against plain autograd."""

import pytest
import torch
import torch.nn.functional as F

from torchtune_cp.models import DecoderConfig
from torchtune_cp.models.mlp import swiglu
from torchtune_cp.models.norm import RMSNorm
from torchtune_cp.models.rope import inverse_frequencies, rotary_cos_sin, rotate


def _config(**changes) -> DecoderConfig:
    sizes = {
        "family": "llama",
        "vocab_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 6,
        "embed_dim": 12,
        "intermediate_dim": 8,
        "max_seq_len": 32,
    }
    return DecoderConfig(**{**sizes, **changes})


def test_rotation_gradient():
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary_cos_sin(
        inverse_frequencies(_config()), torch.randint(0, 99, (2, 5)), torch.float64
    )
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)


def test_rotation_is_a_complex_product_of_the_two_halves():
    x = torch.randn(2, 5, 3, 6)
    positions = torch.tensor([[0, 1, 2, 7, 900], [5, 5, 4, 0, 1]])
    rotated = rotate(x, *rotary_cos_sin(inverse_frequencies(_config()), positions, torch.float32))
    angles = positions[..., None, None] * 10_000.0 ** (-torch.arange(3) / 3)
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()), angles)
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), -1))


def test_frequencies_do_not_depend_on_the_default_device():
    with torch.device("meta"):
        frequencies = inverse_frequencies(_config())
    assert frequencies.device.type == "cpu"


def test_swiglu_gradient():
    gate, up = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)


def test_swiglu_keeps_two_tensors_for_backward():
    kept = []
    gate, up = (torch.randn(3, 7, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate, up)
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize("shape", [(2, 5, 12), (2, 5, 3, 12), (7, 12)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_norm_and_its_gradients_equal_those_in_fp64(shape, dtype, tolerance):
    norm = RMSNorm(12, eps=1e-3).to(dtype)
    with torch.no_grad():
        norm.scale.normal_(1.0, 0.3)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, dtype=dtype)
    norm(x).backward(grad)

    exact_x, exact_scale = (t.detach().double().requires_grad_() for t in (x, norm.scale))
    mean_square = exact_x.pow(2).mean(-1, keepdim=True)
    exact = exact_x / (mean_square + 1e-3).sqrt() * exact_scale
    exact.backward(grad.double())
    for actual, expected in (
        (norm(x), exact),
        (x.grad, exact_x.grad),
        (norm.scale.grad, exact_scale.grad),
    ):
        assert actual.dtype == dtype
        assert (actual - expected).abs().max() < tolerance * expected.abs().max()

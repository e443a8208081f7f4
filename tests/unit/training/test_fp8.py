import logging

import pytest
import torch
from torchao.float8.float8_linear import Float8Linear

from torchtune_cp.errors import UserError
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.training.fp8 import check_hardware, convert_to_float8, float8_config

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def _model(intermediate_dim=64, embed_dim=32):
    torch.manual_seed(0)
    return llama3(
        vocab_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=embed_dim,
        max_seq_len=64,
        intermediate_dim=intermediate_dim,
    )


def _converted(model):
    return {name for name, m in model.named_modules() if isinstance(m, Float8Linear)}


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_layers_compute_in_float8_and_the_head_does_not(recipe):
    model = _model()
    tokens = torch.randint(0, 64, (2, 10))
    exact = model(tokens)
    names = [name for name, _ in model.named_parameters()]
    convert_to_float8(model, recipe, CPU, emulate=False)
    assert [name for name, _ in model.named_parameters()] == names
    assert _converted(model) == {
        f"layers.{i}.{part}"
        for i in range(2)
        for part in (
            *("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj"),
            *("mlp.w1", "mlp.w2", "mlp.w3"),
        )
    }
    assert type(model.output).__name__ == "OutputProjection"
    logits = model(tokens)
    error = (logits - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.2, error  # e4m3 keeps 3 bits: each product is off by some per cent


def test_layers_with_a_dimension_not_divisible_by_16_stay_and_are_counted(caplog):
    model = _model(intermediate_dim=72)
    with caplog.at_level(logging.INFO, "torchtune_cp"):
        convert_to_float8(model, "rowwise", CPU, emulate=False)
    assert len(_converted(model)) == 8
    assert not any("mlp" in name for name in _converted(model))
    assert caplog.messages == [
        "float8 (rowwise, emulated): 8 of 14 linear layers; 6 have a dimension not divisible by 16"
        " and stay in high precision"
    ]


def test_a_model_without_any_fitting_layer_is_refused():
    with pytest.raises(UserError, match=r"enable_fp8_training=true: none of the 14 linear layers"):
        convert_to_float8(_model(72, 24), "rowwise", CPU, emulate=False)


def test_hardware_without_float8_is_refused_unless_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        UserError, match=r"enable_fp8_training=true: .* 8\.9 .* A100 has 8\.0; .*fp8_emulate=true"
    ):
        check_hardware(CUDA, emulate=False)
    check_hardware(CUDA, emulate=True)
    for capability in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        check_hardware(CUDA, emulate=False)
    with pytest.raises(UserError, match="the device is cpu"):
        check_hardware(CPU, emulate=False)


def test_only_tensorwise_weights_travel_as_float8():
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = float8_config(recipe, emulate=False, float8_all_gather=True)
        assert config.enable_fsdp_float8_all_gather is (recipe == "tensorwise")
        assert config.pad_inner_dim, "any number of tokens"
    assert not float8_config("tensorwise", emulate=True, float8_all_gather=False).pad_inner_dim

"""Every family against transformers' model of the same random weights."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.unit.models.references import REFERENCES, hf_model, our_model, relative_error
from torchtune_cp.models import auto_model, hf_config, to_hf_name

TOLERANCE = 1e-5  # fp32; the aim is 1e-4


@pytest.fixture
def pair(request, tmp_path):
    reference = hf_model(request.param)
    return reference, our_model(reference, tmp_path)


every_family = pytest.mark.parametrize("pair", REFERENCES, indirect=True)


def _tokens(seq: int = 40, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 61, (batch, seq), generator=torch.Generator().manual_seed(1))


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@every_family
def test_logits_and_every_gradient_equal_those_of_transformers(pair):
    reference, ours = pair
    tokens = _tokens()
    expected = reference(tokens, use_cache=False).logits
    actual = ours(tokens)
    assert relative_error(actual, expected) < TOLERANCE

    _loss(expected, tokens).backward()
    _loss(actual, tokens).backward()
    expected_grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in ours.named_parameters():
        grad = expected_grads.pop(to_hf_name(ours.config.family, name))
        assert relative_error(parameter.grad, grad) < TOLERANCE, name
    assert not expected_grads


@every_family
def test_arbitrary_positions_rotate_as_in_transformers(pair):
    reference, ours = pair
    tokens = _tokens()
    restarting = torch.cat((torch.arange(13), torch.arange(27)))
    scattered = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(2))
    positions = torch.stack((restarting, scattered))
    # With a mask given, transformers does not take restarting positions for packed documents.
    expected = reference(
        tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False
    ).logits
    actual = ours(tokens, positions)
    assert relative_error(actual, expected) < TOLERANCE
    assert relative_error(ours(tokens), expected) > 1e-3, "positions must matter"


@every_family
def test_written_config_and_names_load_in_transformers_as_the_same_model(pair, tmp_path):
    _, ours = pair
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(ours)))
    config = transformers.AutoConfig.from_pretrained(folder)
    back = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mapped = {to_hf_name(ours.config.family, n): p for n, p in ours.state_dict().items()}
    result = back.load_state_dict(mapped, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == (["lm_head.weight"] if ours.config.tie_word_embeddings else [])
    tokens = _tokens()
    logits = back.eval()(tokens, use_cache=False).logits
    assert relative_error(ours(tokens), logits) < TOLERANCE


@pytest.mark.parametrize("pair", ["llama3_1", "qwen3_tied_biases"], indirect=True)
def test_bf16_error_is_no_larger_than_that_of_transformers(pair):
    reference, ours = pair
    tokens = _tokens()
    exact = reference(tokens, use_cache=False).logits
    theirs = reference.bfloat16()(tokens, use_cache=False).logits.float()
    actual = ours.bfloat16()(tokens)
    assert actual.dtype == torch.bfloat16
    error, their_error = ((x.float() - exact).pow(2).mean().sqrt() for x in (actual, theirs))
    assert error < 1.1 * their_error


@pytest.mark.parametrize("pair", ["llama3_1"], indirect=True)
def test_rope_scaling_matters(pair, tmp_path):
    _, ours = pair
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    unscaled = auto_model(tmp_path)
    unscaled.load_state_dict(ours.state_dict())
    tokens = _tokens()
    assert relative_error(unscaled(tokens), ours(tokens)) > 1e-3

"""What every decoder promises whatever the family."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from torchtune_cp.distributed import ContextParallelOptions, context_parallel
from torchtune_cp.errors import ConfigError
from torchtune_cp.models import RopeScaling, TiedOutput, TransformerDecoder, init_tensor_
from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.models.mistral import mistral
from torchtune_cp.models.mlp import scale_hidden_dim_for_mlp

_SMALL = {
    "vocab_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 128,
}
_build = partial(
    build_decoder, "qwen3", attn_dropout=0.0, norm_eps=1e-6, rope_base=1e4, qk_norm=True, **_SMALL
)


def _model(**changes) -> TransformerDecoder:
    torch.manual_seed(0)
    return _build(**changes)


def _tokens(seq: int = 24) -> torch.Tensor:
    return torch.randint(0, 64, (2, seq), generator=torch.Generator().manual_seed(1))


def test_the_first_token_reaches_the_last_logits():
    model, tokens = _model(), _tokens()
    before = model(tokens)
    tokens[:, 0] = (tokens[:, 0] + 1) % 64
    assert ((model(tokens) - before)[:, -1].abs().amax(-1) > 1e-4).all()


def test_a_later_token_changes_nothing_before_it():
    model, tokens = _model(), _tokens()
    before = model(tokens)
    tokens[:, 15] = (tokens[:, 15] + 1) % 64
    after = model(tokens)
    torch.testing.assert_close(after[:, :15], before[:, :15], rtol=0, atol=1e-6)
    assert (after[:, 15:] - before[:, 15:]).abs().max() > 1e-3


def test_no_positions_means_positions_from_zero():
    model, tokens = _model(), _tokens()
    positions = torch.arange(24).expand(2, -1)
    assert torch.equal(model(tokens), model(tokens, positions))


@pytest.mark.parametrize("tied", [False, True])
def test_output_fn_gets_what_the_logits_are_made_of(tied):
    model, tokens = _model(tie_word_embeddings=tied), _tokens()
    hidden, weight = model(tokens, output_fn=lambda hidden, weight: (hidden, weight))
    assert hidden.shape == (2, 24, 32)
    assert weight.shape == (64, 32)
    assert torch.equal(F.linear(hidden, weight), model(tokens))


def test_a_tied_weight_is_one_parameter_and_stays_tied_in_a_copy():
    model = copy.deepcopy(_model(tie_word_embeddings=True))
    assert isinstance(model.output, TiedOutput)
    assert model.output.weight is model.tok_embeddings.weight
    assert not any(name.startswith("output") for name, _ in model.named_parameters())
    assert not any(name.startswith("output") for name in model.state_dict())


def test_tied_gradients_come_from_both_ends():
    model, tokens = _model(tie_word_embeddings=True), _tokens()
    model(tokens).square().mean().backward()
    grad = model.tok_embeddings.weight.grad
    unseen = sorted(set(range(64)) - set(tokens.flatten().tolist()))
    assert (grad[unseen].abs().amax(-1) > 0).all(), "the output end reaches every row"


def test_everything_builds_on_the_meta_device_without_buffers():
    with torch.device("meta"):
        model = _model(rope_scaling=RopeScaling("llama3", 8.0))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


def test_attention_is_one_causal_call_a_layer_with_unexpanded_keys(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention

    def recorded(q, k, v, **kwargs):
        calls.append((q.shape, k.shape, v.shape, kwargs))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    _model()(_tokens())
    kwargs = {"attn_mask": None, "is_causal": True, "scale": None, "enable_gqa": True}
    assert calls == [((2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8), kwargs)] * 3


def test_layers_compile_without_graph_breaks_and_share_one_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, tokens = _model(), _tokens()
    expected = model(tokens)
    expected.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    actual = model(tokens)
    actual.square().mean().backward()
    torch.testing.assert_close(actual, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], msg=name)
    assert len(graphs) == 1


def test_initial_values_follow_the_name_and_the_generator():
    model = _model(qkv_bias=True)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.fill_(7.0)
        init_tensor_(name, parameter, torch.Generator().manual_seed(3), model.config)
    assert torch.equal(model.norm.scale, torch.ones(32))
    assert torch.equal(model.layers[0].attn.q_proj.bias, torch.zeros(32))
    weight = model.tok_embeddings.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    again = torch.empty_like(weight)
    init_tensor_("x.weight", again, torch.Generator().manual_seed(3), model.config)
    assert torch.equal(weight, again)
    with pytest.raises(ValueError, match="rope_cache"):
        init_tensor_("layers.0.rope_cache", again, torch.Generator(), model.config)


def test_default_mlp_width_is_that_of_llama():
    assert scale_hidden_dim_for_mlp(4096) == 11_008
    assert llama3(**_SMALL).config.intermediate_dim == 256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_dropout": 0.1}, "attn_dropout is 0.1"),
        ({"num_heads": 3}, "num_heads is 3 and embed_dim is 32"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"num_heads": 32, "num_kv_heads": 8}, "head_dim is 1"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"intermediate_dim": -4}, "intermediate_dim is -4"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        llama3(**{**_SMALL, **changes})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}, "low_freq_factor is 4.0"),
        ({"type": "llama3", "factor": 8.0, "original_max_seq_len": 0}, "0 tokens"),
    ],
)
def test_impossible_rope_scaling_is_refused_by_name(arguments, named):
    with pytest.raises(ConfigError, match=named):
        RopeScaling(**arguments)


def test_a_token_beyond_the_window_of_every_layer_does_not_reach_the_last_one():
    sizes = {**_SMALL, "intermediate_dim": 64}
    with pytest.raises(ConfigError, match="sliding_window is 0"):
        mistral(**sizes, sliding_window=0)
    torch.manual_seed(0)
    model = mistral(**sizes, sliding_window=8)
    reach = 7 * sizes["num_layers"]
    tokens = torch.randint(0, sizes["vocab_size"], (1, reach + 2))
    with torch.no_grad():
        before = model(tokens)
        outside, inside = tokens.clone(), tokens.clone()
        outside[0, 0] += 1 if outside[0, 0] == 0 else -1
        inside[0, 1] += 1 if inside[0, 1] == 0 else -1
        assert torch.equal(model(outside)[:, -1], before[:, -1])
        assert not torch.equal(model(inside)[:, -1], before[:, -1])


def test_a_window_arrives_with_the_call_whether_the_context_was_told_of_it_or_not():
    model = mistral(**{**_SMALL, "intermediate_dim": 64}, sliding_window=8)
    tokens = torch.arange(24)[None] % 16
    alone = torch.cat([model(tokens[:, :14]), model(tokens[:, 14:])], 1)
    batch = {"tokens": tokens, "seq_lens": torch.tensor([[14, 10]])}
    for options in (None, ContextParallelOptions(window=8)):
        with context_parallel(None, batch, options=options) as local:
            torch.testing.assert_close(model(local["tokens"], local["input_pos"]), alone)

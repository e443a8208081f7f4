"""Reading `config.json`: transformers' defaults, both spellings, and what is refused."""

import json

import pytest
import transformers

from tests.unit.models.references import REFERENCES, hf_model, saved_config
from torchtune_cp.errors import ConfigError, UserError
from torchtune_cp.models import RopeScaling, auto_model
from torchtune_cp.models.hf_config_format import decoder_config_from_hf, decoder_config_to_hf
from torchtune_cp.models.hf_names import FAMILIES, to_hf_name

_MINIMAL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
_LLAMA = {"model_type": "llama", **_MINIMAL}


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_mean_what_transformers_takes_them_to_mean(family):
    hf = {"model_type": family, **_MINIMAL}
    if family == "mistral":
        hf["sliding_window"] = None
    ours = decoder_config_from_hf(hf)
    theirs = transformers.AutoConfig.for_model(**hf)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // 32
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert ours.max_seq_len == theirs.max_position_embeddings
    assert ours.rope_base == theirs.rope_parameters["rope_theta"]
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.initializer_range == theirs.initializer_range


@pytest.mark.parametrize("name", REFERENCES)
def test_config_survives_the_way_out_and_in(name, tmp_path):
    config = decoder_config_from_hf(saved_config(hf_model(name), tmp_path))
    assert decoder_config_from_hf(json.loads(json.dumps(decoder_config_to_hf(config)))) == config


def test_several_end_tokens_survive_the_way_out_and_in():
    config = decoder_config_from_hf({**_LLAMA, "eos_token_id": [3, 5], "bos_token_id": 1})
    assert config.eos_token_id == (3, 5)
    assert decoder_config_to_hf(config)["eos_token_id"] == [3, 5]


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "base", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling("linear", 2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            7.0,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}, "max_position_embeddings": 77},
            1e4,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 77),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "original_max_position_embeddings": 99,
                    **_LLAMA3,
                },
            },
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 99),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(keys, base, scaling):
    config = decoder_config_from_hf({**_LLAMA, **keys})
    assert (config.rope_base, config.rope_scaling) == (base, scaling)
    theirs = transformers.AutoConfig.for_model(**{**_LLAMA, **keys}).rope_parameters
    assert theirs["rope_theta"] == base


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, r"model_type is 'gemma3', allowed is one of llama, mistral"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.25",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "lacks low_freq_factor, high_freq_factor",
        ),
        (
            {"model_type": "mistral", "sliding_window": None, "attention_bias": True},
            "attention_bias",
        ),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_key_value_heads": 5}, "num_kv_heads is 5"),
    ],
)
def test_what_cannot_be_built_is_refused_by_key(changes, named):
    with pytest.raises(ConfigError, match=named):
        decoder_config_from_hf({**_LLAMA, **changes})


_MISTRAL_V0_1 = {"model_type": "mistral", **_MINIMAL, "max_position_embeddings": 32768}


@pytest.mark.parametrize("keys", [{"sliding_window": 4096}, {}])
def test_mistral_has_its_window_whether_or_not_the_file_names_it(keys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**_MISTRAL_V0_1, **keys}))
    model = auto_model(tmp_path)
    assert (model.config.max_seq_len, model.config.sliding_window) == (32768, 4096)
    assert auto_model(tmp_path, max_seq_len=4096).config.sliding_window == 4096


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 16}, None),  # the switch is off
        ({"use_sliding_window": True, "sliding_window": 16}, None),  # from layer 28 of 2
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 16),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 4096),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_qwen_windows_count_only_where_a_layer_uses_them(keys, window):
    hf = {"model_type": "qwen2", **_MINIMAL, **keys}
    assert decoder_config_from_hf(hf).sliding_window == window


def test_windows_in_some_of_the_layers_are_refused_beyond_their_length():
    keys = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    hf = {"model_type": "qwen2", **_MINIMAL, **keys}
    with pytest.raises(ConfigError, match=r"1 of 2 layers have a sliding_window of 16"):
        decoder_config_from_hf(hf)
    assert decoder_config_from_hf(hf, max_seq_len=16).sliding_window == 16


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        auto_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        auto_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="allowed is an object"):
        auto_model(tmp_path)


@pytest.mark.parametrize("name", ["rope.inv_freq", "layers.x.sa_norm.scale", "layers.0.attn.bias"])
def test_unknown_parameter_names_are_refused(name):
    with pytest.raises(ValueError, match=name):
        to_hf_name("llama", name)
    with pytest.raises(ValueError, match="gpt2"):
        to_hf_name("gpt2", "norm.scale")

"""`config.json` of a Hugging Face folder to and from `DecoderConfig`.

Settings that transformers supports and this project does not are refused by the key's name: otherwise a
different model would be trained without an error.
"""

from collections.abc import Mapping
from typing import Any

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.config import DecoderConfig, RopeScaling
from torchtune_cp.models.hf_names import FAMILIES
from torchtune_cp.models.values import require_hf_types, shown

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

# What transformers assumes where config.json is silent.
_MAX_POSITION_EMBEDDINGS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_NUM_KEY_VALUE_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_HEAD_DIM = {"qwen3": 128}
_ROPE_THETA = 10_000.0
_RMS_NORM_EPS = 1e-6
_SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}

# Switches that only some families have; transformers ignores them elsewhere.
_HAS_ATTENTION_BIAS = ("llama", "qwen3")
_HAS_MLP_BIAS = ("llama",)
_USE_SLIDING_WINDOW_SWITCH = ("qwen2", "qwen3")


def _refuse(key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"config.json: {key} is {shown(value)}, allowed is {allowed}")


def _rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the old keys (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`).

    As transformers: `rope_scaling` wins over `rope_parameters`, and a `rope_theta` inside wins over
    the one outside.
    """
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise _refuse("rope_parameters", settings, "one setting for all layers")
    settings.setdefault("rope_theta", hf.get("rope_theta", _ROPE_THETA))
    settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    settings.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return settings


def _rope_scaling(
    settings: Mapping[str, Any], hf: Mapping[str, Any], max_pos: int
) -> RopeScaling | None:
    rope_type = settings["rope_type"]
    if rope_type == "default":
        return None
    if rope_type not in ("linear", "llama3"):
        raise _refuse("rope_scaling.rope_type", rope_type, "default, linear or llama3")
    required = ["factor"]
    if rope_type == "llama3":
        required += ["low_freq_factor", "high_freq_factor"]
    missing = [key for key in required if settings.get(key) is None]
    if missing:
        raise ConfigError(
            f"config.json: rope_scaling of type {rope_type} lacks {', '.join(missing)}"
        )
    if rope_type == "linear":
        return RopeScaling("linear", float(settings["factor"]))
    original = hf.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings", max_pos
    )
    return RopeScaling(
        "llama3",
        factor=float(settings["factor"]),
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
        original_max_seq_len=int(original),
    )


def _sliding_window(family: str, hf: Mapping[str, Any], context: int) -> int | None:
    """The window of all layers; refused where only some have one that cuts anything."""
    if family not in _SLIDING_WINDOW:
        return None
    if family in _USE_SLIDING_WINDOW_SWITCH and not hf.get("use_sliding_window", False):
        return None
    window: int | None = hf.get("sliding_window", _SLIDING_WINDOW[family])
    if family not in _USE_SLIDING_WINDOW_SWITCH or window is None:
        return window
    layers = hf["num_hidden_layers"]
    layer_types = hf.get("layer_types")
    if layer_types is not None:
        windowed = layer_types.count("sliding_attention")
    else:
        windowed = max(layers - hf.get("max_window_layers", 28), 0)
    if windowed in (0, layers):
        return window if windowed else None
    if window < context:
        raise ConfigError(
            f"config.json: {windowed} of {layers} layers have a sliding_window of {window}: here all"
            f" layers have the same attention; give the model max_seq_len={window} or less, or set"
            " use_sliding_window to false in config.json to train with full attention"
        )
    return window


def _check_supported(family: str, hf: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Refuse the features that would change the computation and are not supported."""
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _refuse("hidden_act", hf["hidden_act"], "silu")
    if hf.get("attention_dropout"):
        raise _refuse(
            "attention_dropout",
            hf["attention_dropout"],
            "0.0 (attention that is distributed along the sequence has no dropout)",
        )
    if rope["partial_rotary_factor"] not in (None, 1, 1.0):
        raise _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if hf.get("attention_bias") and family not in _HAS_ATTENTION_BIAS:
        raise _refuse("attention_bias", True, f"false for model_type {family}")
    if hf.get("mlp_bias") and family not in _HAS_MLP_BIAS:
        raise _refuse("mlp_bias", True, f"false for model_type {family}")
    if hf.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is set, and quantized weights cannot be trained; "
            "use the folder of the unquantized model"
        )
    if hf.get("per_layer_config"):
        raise _refuse("per_layer_config", hf["per_layer_config"], "the same sizes in all layers")
    unknown_layers = set(hf.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if unknown_layers:
        raise _refuse("layer_types", sorted(unknown_layers), "full_attention")


def decoder_config_from_hf(
    hf: Mapping[str, Any], *, max_seq_len: int | None = None
) -> DecoderConfig:
    """Read a `config.json`.

    Args:
        hf: The parsed file. Missing optional keys mean what transformers takes them to mean.
        max_seq_len: In place of `max_position_embeddings`.

    Returns:
        The sizes and switches.

    Raises:
        ConfigError: If the model type or a feature is not supported, or a key is missing; the
            message names the key.
    """
    require_hf_types(hf)
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise _refuse("model_type", family, f"one of {', '.join(FAMILIES)}, esm")
    missing = [key for key in _REQUIRED if hf.get(key) is None]
    if missing:
        raise ConfigError(f"config.json: {', '.join(missing)} missing")
    rope = _rope_settings(hf)
    _check_supported(family, hf, rope)

    num_heads = hf["num_attention_heads"]
    num_kv_heads = hf.get("num_key_value_heads", _NUM_KEY_VALUE_HEADS.get(family))
    head_dim = hf.get("head_dim", _HEAD_DIM.get(family))
    if head_dim is None:
        head_dim = hf["hidden_size"] // num_heads
    max_pos = hf.get("max_position_embeddings") or _MAX_POSITION_EMBEDDINGS[family]
    context = max_pos if max_seq_len is None else max_seq_len
    window = _sliding_window(family, hf, context)
    attention_bias = bool(hf.get("attention_bias", False))
    eos = hf.get("eos_token_id")
    return DecoderConfig(
        family=family,
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        embed_dim=hf["hidden_size"],
        intermediate_dim=hf["intermediate_size"],
        max_seq_len=context,
        rope_base=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope, hf, max_pos),
        norm_eps=hf.get("rms_norm_eps", _RMS_NORM_EPS),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        sliding_window=window,
        initializer_range=hf.get("initializer_range", 0.02),
        bos_token_id=hf.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=hf.get("pad_token_id"),
    )


def _rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def decoder_config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Write a `config.json` that transformers, before and after version 5, reads as this model.

    Args:
        config: The sizes and switches.

    Returns:
        The JSON object.
    """
    family = config.family
    eos = config.eos_token_id
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        # The keys of transformers before 5, which 5 reads too; 4 takes no notice of the new ones.
        "rope_theta": config.rope_base,
        "rope_scaling": _rope_scaling_to_hf(config.rope_scaling),
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
        "use_cache": True,
    }
    if family != "qwen2" or config.head_dim * config.num_heads != config.embed_dim:
        hf["head_dim"] = config.head_dim
    if family in _HAS_ATTENTION_BIAS:
        hf["attention_bias"] = config.output_bias
    if family in _HAS_MLP_BIAS:
        hf["mlp_bias"] = config.mlp_bias
    if family in _SLIDING_WINDOW:
        hf["sliding_window"] = config.sliding_window
    if family in _USE_SLIDING_WINDOW_SWITCH:
        hf["use_sliding_window"] = config.sliding_window is not None
        # All layers, which is right for any number of windowed ones: none attends beyond it.
        hf["max_window_layers"] = 0 if config.sliding_window is not None else config.num_layers
    return hf

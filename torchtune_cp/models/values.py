"""Limits of the values that describe a model: sizes from a config's arguments, values of a `config.json`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torchtune_cp.errors import ConfigError

#: The largest accepted sizes of a model: far above any real one, so that a typing error or a damaged
#: file is refused at once instead of being built.
MOST = {
    "vocab_size": 2**26,
    "num_layers": 2000,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "embed_dim": 2**20,
    "intermediate_dim": 2**24,
    "max_seq_len": 2**32,
    "sliding_window": 2**32,
}
_MOST_PARAMETERS = 10**14
_MOST_SHOWN = 80

# config.json's names of sizes.
_HF_SIZES = {
    "vocab_size": MOST["vocab_size"],
    "hidden_size": MOST["embed_dim"],
    "intermediate_size": MOST["intermediate_dim"],
    "num_hidden_layers": MOST["num_layers"],
    "num_attention_heads": MOST["num_heads"],
    "num_key_value_heads": MOST["num_kv_heads"],
    "head_dim": MOST["head_dim"],
    "max_position_embeddings": MOST["max_seq_len"],
    "original_max_position_embeddings": MOST["max_seq_len"],
    "sliding_window": MOST["sliding_window"],
}
_HF_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "initializer_range", "rope_theta", "partial_rotary_factor"),
    *("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("factor", "low_freq_factor", "high_freq_factor"),
)
_HF_SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "token_dropout"),
    *("emb_layer_norm_before", "is_folding_model", "is_decoder", "add_cross_attention"),
)
_HF_WORDS = ("model_type", "hidden_act", "position_embedding_type", "rope_type", "type")
_HF_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
_HF_MAPPINGS = ("rope_scaling", "rope_parameters")


def is_whole(value: object) -> bool:
    """Say whether a value is an integer, which True and False are not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Say whether a value is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def shown(value: object) -> str:
    """Show a value from outside on one line and in few characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or endless nesting
        return f"a {type(value).__name__} without end"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def require_sizes(config: Any) -> None:
    """Refuse a model's sizes that are no integers from 1 on, or larger than any model's.

    Args:
        config: A dataclass with fields of the names in `MOST`, and numbers `norm_eps`,
            `rope_base` and `initializer_range`.

    Raises:
        ConfigError: One line for each such size.
    """
    sizes = {field.name: getattr(config, field.name) for field in fields(config)}
    problems = [
        f"{name} is {shown(sizes[name])}, allowed is 1 to {most}"
        for name, most in MOST.items()
        if name in sizes
        and not (is_whole(sizes[name]) and 1 <= sizes[name] <= most)
        and not (name == "sliding_window" and sizes[name] is None)
    ]
    problems += [
        f"{name} is {shown(sizes[name])}, allowed is a number {'above' if above else 'from'} 0"
        for name, above in (("norm_eps", False), ("rope_base", True), ("initializer_range", False))
        if not is_number(sizes[name]) or sizes[name] < 0 or (above and sizes[name] == 0)
    ]
    if problems:
        raise ConfigError(problems)


def too_many_parameters(count: int) -> list[str]:
    """Return the problem of a model that no computer holds, if it is one.

    Args:
        count: Parameters of all layers.
    """
    if count <= _MOST_PARAMETERS:
        return []
    return [f"the sizes make {count:.1e} parameters, allowed are {_MOST_PARAMETERS:.0e}"]


def require_hf_types(hf: Mapping[str, Any], inside: str = "") -> None:
    """Refuse values of a `config.json` of a type that their keys do not allow.

    Args:
        hf: The parsed file; keys that are not known are let pass, and so is null.
        inside: The key of the mapping that `hf` is, for messages, with a dot behind.

    Raises:
        ConfigError: One line for each such value.
    """
    problems: list[str] = []

    def check(keys: Any, allowed: Callable[[str], str], fits: Callable[[str, Any], bool]) -> None:
        problems.extend(
            f"config.json: {inside}{key} is {shown(hf[key])}, allowed is {allowed(key)}"
            for key in keys
            if hf.get(key) is not None and not fits(key, hf[key])
        )

    check(
        _HF_SIZES,
        lambda key: f"an integer from 1 to {_HF_SIZES[key]}",
        lambda key, value: is_whole(value) and 1 <= value <= _HF_SIZES[key],
    )
    check(("max_window_layers",), lambda _: "an integer", lambda _, value: is_whole(value))
    check(_HF_NUMBERS, lambda _: "a number", lambda _, value: is_number(value))
    check(_HF_SWITCHES, lambda _: "true or false", lambda _, value: isinstance(value, bool))
    check(_HF_WORDS, lambda _: "a string", lambda _, value: isinstance(value, str))
    check(
        _HF_TOKENS,
        lambda _: "an integer or a list of them",
        lambda _, value: all(map(is_whole, value if isinstance(value, list) else [value])),
    )
    check(
        ("layer_types",),
        lambda _: "a list of strings",
        lambda _, value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    )
    check(_HF_MAPPINGS, lambda _: "a mapping", lambda _, value: isinstance(value, Mapping))
    if problems:
        raise ConfigError(problems)
    for key in _HF_MAPPINGS if not inside else ():
        if hf.get(key) is not None:
            require_hf_types(hf[key], f"{key}.")

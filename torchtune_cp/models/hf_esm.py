"""The ESM family in Hugging Face's format: `config.json`, and tensors that are not parameters here."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.encoder import TransformerEncoder
from torchtune_cp.models.encoder_config import EncoderConfig
from torchtune_cp.models.rope import inverse_frequencies
from torchtune_cp.models.values import require_hf_types

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "mask_token_id",
    "pad_token_id",
)
# Key, the only value that is built here, what transformers assumes where the file is silent, and why
# there is no other.
_FIXED: tuple[tuple[str, Any, Any, str], ...] = (
    ("position_embedding_type", "rotary", "absolute", "ESM-1b and older models are not supported"),
    ("emb_layer_norm_before", False, False, "only models older than ESM-2 have it"),
    ("is_folding_model", False, False, "use the language model's folder"),
    ("is_decoder", False, False, "attention is bidirectional"),
    ("add_cross_attention", False, False, "there is only one sequence"),
    ("tie_word_embeddings", True, True, "the output projection is the embedding's weight"),
    ("hidden_dropout_prob", 0.0, 0.1, "slices of a sequence on several ranks have no dropout"),
    (
        "attention_probs_dropout_prob",
        0.0,
        0.1,
        "attention that is distributed along the sequence has no dropout",
    ),
)

_CONTACT_HEAD = "esm.contact_head.regression"
#: Where frequencies may be stored: in published folders (read and written by all versions of
#: transformers), in memory of transformers 5, and, with a literal asterisk, in what 5.24 saves.
_FREQUENCIES = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
_OTHER_FREQUENCIES = (_FREQUENCIES.format("*"), "esm.rotary_embeddings.inv_freq")


class StoredTensors(Protocol):
    """A folder's tensors by their names there."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Tensor: ...


def encoder_config_from_hf(
    hf: Mapping[str, Any], *, max_seq_len: int | None = None
) -> EncoderConfig:
    """Read a `config.json` of `model_type` esm.

    Args:
        hf: The parsed file. Missing optional keys mean what transformers takes them to mean.
        max_seq_len: In place of `max_position_embeddings`.

    Returns:
        The sizes and switches.

    Raises:
        ConfigError: If a feature is not supported, or a key is missing; the message names the key.
    """
    require_hf_types(hf)
    missing = [key for key in _REQUIRED if hf.get(key) is None]
    if missing:
        raise ConfigError(f"config.json: {', '.join(missing)} missing")
    for key, allowed, default, reason in _FIXED:
        value = hf.get(key, default)
        # null means "no" in published files.
        if value != allowed and not (value is None and not allowed):
            raise ConfigError(
                f"config.json: {key} is {value!r}, allowed is {allowed!r} ({reason}); "
                f"model_type esm is ESM-2 here"
            )
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ConfigError(f"config.json: rope_scaling is {rope_type!r}, allowed is null")
    if hf.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is set, and quantized weights cannot be trained; "
            "use the folder of the unquantized model"
        )
    eos = hf.get("eos_token_id", 2)
    return EncoderConfig(
        family="esm",
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        embed_dim=hf["hidden_size"],
        intermediate_dim=hf["intermediate_size"],
        max_seq_len=(
            hf.get("max_position_embeddings", 1026) if max_seq_len is None else max_seq_len
        ),
        rope_base=float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0))),
        norm_eps=hf.get("layer_norm_eps", 1e-12),
        token_dropout=bool(hf.get("token_dropout", False)),
        mask_token_id=hf["mask_token_id"],
        pad_token_id=hf["pad_token_id"],
        bos_token_id=hf.get("bos_token_id"),
        eos_token_id=next(iter(eos), None) if isinstance(eos, list) else eos,
        initializer_range=hf.get("initializer_range", 0.02),
    )


def encoder_config_to_hf(config: EncoderConfig) -> dict[str, Any]:
    """Write a `config.json` that transformers, before and after version 5, reads as this model.

    Args:
        config: The sizes and switches.

    Returns:
        The JSON object.
    """
    return {
        "architectures": ["EsmForMaskedLM"],
        "model_type": "esm",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_base,
        "layer_norm_eps": config.norm_eps,
        "token_dropout": config.token_dropout,
        "mask_token_id": config.mask_token_id,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "initializer_range": config.initializer_range,
        **{key: allowed for key, allowed, _, _ in _FIXED},
        "esmfold_config": None,
        "vocab_list": None,
        "use_cache": True,
    }


def is_ignored_esm_tensor(name: str) -> bool:
    """Whether a tensor of a published folder is one that rotary models never used.

    Args:
        name: Its name there: learned positions, and the buffer of their numbers.
    """
    return name.startswith("esm.embeddings.position_")


def is_carried_esm_tensor(name: str) -> bool:
    """Whether a tensor that is no parameter here is read all the same, see `carried_tensors`.

    Args:
        name: Its name in the folder.
    """
    return name.startswith(_CONTACT_HEAD) or name.endswith("rotary_embeddings.inv_freq")


def read_frequencies(model: TransformerEncoder, tensors: StoredTensors) -> None:
    """Give the model the rotary frequencies that a folder stores, where it stores any.

    Args:
        model: Its `rope_frequencies` is set.
        tensors: The folder's tensors.

    Raises:
        ConfigError: They are of another head width, or not the same in all layers.
    """
    layers = [_FREQUENCIES.format(layer) for layer in range(model.config.num_layers)]
    found = [name for name in (*layers, *_OTHER_FREQUENCIES) if name in tensors]
    for name in found:
        stored = tensors[name].float()
        if stored.shape != (model.config.head_dim // 2,):
            raise ConfigError(
                f"tensor {name} has shape {list(stored.shape)}, but config.json describes heads "
                f"of width {model.config.head_dim}"
            )
        if name == found[0]:
            model.rope_frequencies = stored
        elif not torch.equal(stored, tensors[found[0]].float()):
            raise ConfigError(
                f"tensors {found[0]} and {name} differ: here all layers have the same frequencies"
            )


def carried_tensors(model: TransformerEncoder, tensors: StoredTensors) -> dict[str, Tensor]:
    """Tensors of transformers' model that are not parameters here: written, so that nothing is missing.

    Args:
        model: The model that is saved.
        tensors: Those of the folder that it started from; empty without one.

    Returns:
        Tensors by Hugging Face's names. The frequencies are fp32 and come first: cast to half
        precision they would be others. The contact head is that of the folder, or 0.
    """
    config = model.config
    frequencies = model.rope_frequencies
    if frequencies is None:
        frequencies = inverse_frequencies(config)
    carried = {_FREQUENCIES.format(layer): frequencies for layer in range(config.num_layers)}
    for kind, shape in (("weight", (1, config.num_layers * config.num_heads)), ("bias", (1,))):
        name = f"{_CONTACT_HEAD}.{kind}"
        carried[name] = tensors[name] if name in tensors else torch.zeros(shape)
    return carried

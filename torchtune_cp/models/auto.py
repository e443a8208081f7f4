"""From a Hugging Face folder's `config.json` to a model, and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtune_cp.errors import NotFoundHereError, UserError
from torchtune_cp.models.encoder import TransformerEncoder
from torchtune_cp.models.hf_config_format import decoder_config_from_hf, decoder_config_to_hf
from torchtune_cp.models.hf_esm import encoder_config_from_hf, encoder_config_to_hf
from torchtune_cp.models.transformer import TransformerDecoder

#: What can be trained here: causal and masked language models.
LanguageModel = TransformerDecoder | TransformerEncoder


def auto_model(checkpoint_dir: str | Path, max_seq_len: int | None = None) -> LanguageModel:
    """Build the model that a Hugging Face folder's `config.json` describes; weights are not read.

    Args:
        checkpoint_dir: Folder with a `config.json`.
        max_seq_len: Replaces its `max_position_embeddings`; needed only for models whose sliding window is
            shorter than that.

    Returns:
        The model with uninitialised or random parameters, on the device of the surrounding
        `torch.device(...)` context.

    Raises:
        UserError: The file is missing or not a JSON object.
        ConfigError: It contains an unsupported setting; the message names the key.
    """
    path = Path(checkpoint_dir) / "config.json"
    try:
        hf = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise NotFoundHereError(
            f"checkpoint_dir is {str(checkpoint_dir)!r}: cannot read {path} ({error.strerror}); give "
            "a folder in Hugging Face format"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(hf, dict):
        raise UserError(f"{path} holds a JSON {type(hf).__name__}, allowed is an object")
    return model_from_hf_config(hf, max_seq_len=max_seq_len)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        double = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"{double!r} appears in it twice")
    return found


def model_from_hf_config(hf: Mapping[str, Any], *, max_seq_len: int | None = None) -> LanguageModel:
    """Build the model that a parsed `config.json` describes.

    Args:
        hf: The JSON object.
        max_seq_len: In place of its `max_position_embeddings`.

    Returns:
        The model, as `auto_model`.

    Raises:
        ConfigError: If it describes something that is not supported; the message names the key.
    """
    if hf.get("model_type") == "esm":
        return TransformerEncoder(encoder_config_from_hf(hf, max_seq_len=max_seq_len))
    return TransformerDecoder(decoder_config_from_hf(hf, max_seq_len=max_seq_len))


def hf_config(model: LanguageModel, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The `config.json` to write with a model's weights.

    Args:
        model: Any model of this package.
        dtype: What the weights are stored as; None means the model's own dtype.

    Returns:
        A JSON object that transformers loads as the same model.
    """
    stored = dtype if dtype is not None else next(model.parameters()).dtype
    if isinstance(model, TransformerEncoder):
        hf = encoder_config_to_hf(model.config)
    else:
        hf = decoder_config_to_hf(model.config)
    return {**hf, "torch_dtype": str(stored).removeprefix("torch.")}

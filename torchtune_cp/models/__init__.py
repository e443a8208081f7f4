"""Causal and masked language models from one set of blocks.

A family has a module here (`llama3`, `qwen3`, ...) whose builders are named as torchtune names them;
`auto_model` builds what a Hugging Face folder's `config.json` describes.
"""

from torchtune_cp.models import (
    esm2,
    llama2,
    llama3,
    llama3_1,
    llama3_2,
    llama3_3,
    mistral,
    qwen2,
    qwen2_5,
    qwen3,
    smollm2,
)
from torchtune_cp.models.auto import LanguageModel, auto_model, hf_config, model_from_hf_config
from torchtune_cp.models.config import DecoderConfig, RopeScaling
from torchtune_cp.models.encoder import TransformerEncoder
from torchtune_cp.models.encoder_config import EncoderConfig
from torchtune_cp.models.hf_names import to_hf_name
from torchtune_cp.models.init import init_tensor_
from torchtune_cp.models.token_dropout import token_dropout_scale
from torchtune_cp.models.transformer import TiedOutput, TransformerDecoder, TransformerLayer

_FAMILIES = (
    esm2,
    llama2,
    llama3,
    llama3_1,
    llama3_2,
    llama3_3,
    mistral,
    qwen2,
    qwen2_5,
    qwen3,
    smollm2,
)

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {
    "model": (
        "auto_model",
        *(
            f"{family.__name__.rpartition('.')[2]}.{builder}"
            for family in _FAMILIES
            for builder in family.__all__
        ),
    )
}

__all__ = [
    "DecoderConfig",
    "EncoderConfig",
    "LanguageModel",
    "RopeScaling",
    "TiedOutput",
    "TransformerDecoder",
    "TransformerEncoder",
    "TransformerLayer",
    "auto_model",
    "hf_config",
    "init_tensor_",
    "model_from_hf_config",
    "to_hf_name",
    "token_dropout_scale",
]

"""Small random transformers models, one for each way a family differs, as independent references."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from torchtune_cp.models import TransformerDecoder, auto_model, to_hf_name

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

# 12 dimensions a head: wavelengths from 6 to 2,000 tokens, so an original context of 64 has some
# on either side of and between the two thresholds.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

REFERENCES = {
    "llama2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3_1": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama3_2": ("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3_tied_biases": (
        "qwen3",
        {"head_dim": 20, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


def hf_model(name: str) -> transformers.PreTrainedModel:
    """Build a reference with every parameter random, norm scales and biases included."""
    model_type, changes = REFERENCES[name]
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in parameter_name else 0.0
            parameter.normal_(mean, 0.1, generator=generator)
    return model.eval()


def our_model(reference: transformers.PreTrainedModel, folder: Path) -> TransformerDecoder:
    """Save the reference as transformers does, build ours from the folder, fill in its weights."""
    reference.save_pretrained(folder)
    model = auto_model(folder)
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(to_hf_name(model.config.family, name)))
    assert not weights, f"weights that nothing here uses: {sorted(weights)}"
    return model


def saved_config(reference: transformers.PreTrainedModel, folder: Path) -> dict:
    """The config.json as transformers writes it."""
    reference.config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()

"""Parameter names in Hugging Face checkpoints.

One to one, with no permutation of rows: the rotary layout here is Hugging Face's.
"""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Hugging Face's `model_type`s that can be built; their parameter names are the same."""

_TOP_LEVEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_IN_LAYER = {
    "sa_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "attn.q_norm.scale": "self_attn.q_norm.weight",
    "attn.k_norm.scale": "self_attn.k_norm.weight",
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in {
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            "attn.output_proj": "self_attn.o_proj",
            "mlp.w1": "mlp.gate_proj",
            "mlp.w2": "mlp.down_proj",
            "mlp.w3": "mlp.up_proj",
        }.items()
        for kind in ("weight", "bias")
    },
}


def to_hf_name(family: str, name: str) -> str:
    """Name of a parameter in a Hugging Face checkpoint.

    Args:
        family: The model's `config.family`.
        name: The parameter's name in the model, for example `layers.3.attn.q_proj.weight`.

    Returns:
        For example `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        ValueError: If the family or the name is unknown.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}, known are {', '.join(FAMILIES)}")
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    prefix, _, rest = name.partition(".")
    index, _, in_layer = rest.partition(".")
    if prefix == "layers" and index.isdecimal() and in_layer in _IN_LAYER:
        return f"model.layers.{index}.{_IN_LAYER[in_layer]}"
    raise ValueError(f"parameter {name!r} has no Hugging Face name")

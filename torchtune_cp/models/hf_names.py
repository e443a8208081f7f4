"""Parameter names in Hugging Face checkpoints.

One to one, with no permutation of rows: the rotary layout here is Hugging Face's.
"""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Hugging Face's `model_type`s of decoders that can be built; their parameter names are the same."""

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

_ESM_TOP_LEVEL = {
    "tok_embeddings.weight": "esm.embeddings.word_embeddings.weight",
    "output.bias": "lm_head.bias",
    **{
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in {
            "norm": "esm.encoder.emb_layer_norm_after",
            "output.dense": "lm_head.dense",
            "output.norm": "lm_head.layer_norm",
        }.items()
        for kind in ("weight", "bias")
    },
}

_ESM_IN_LAYER = {
    f"{ours}.{kind}": f"{theirs}.{kind}"
    for ours, theirs in {
        "sa_norm": "attention.LayerNorm",
        "attn.q_proj": "attention.self.query",
        "attn.k_proj": "attention.self.key",
        "attn.v_proj": "attention.self.value",
        "attn.output_proj": "attention.output.dense",
        "mlp_norm": "LayerNorm",
        "mlp.w1": "intermediate.dense",
        "mlp.w2": "output.dense",
    }.items()
    for kind in ("weight", "bias")
}

# Names outside layers, the prefix of a layer, and names within it.
_NAMES = {
    **dict.fromkeys(FAMILIES, (_TOP_LEVEL, "model.layers", _IN_LAYER)),
    "esm": (_ESM_TOP_LEVEL, "esm.encoder.layer", _ESM_IN_LAYER),
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
    if family not in _NAMES:
        raise ValueError(f"family is {family!r}, known are {', '.join(_NAMES)}")
    top_level, layers, in_layer = _NAMES[family]
    if name in top_level:
        return top_level[name]
    prefix, _, rest = name.partition(".")
    index, _, inner = rest.partition(".")
    if prefix == "layers" and index.isdecimal() and inner in in_layer:
        return f"{layers}.{index}.{in_layer[inner]}"
    raise ValueError(f"parameter {name!r} has no Hugging Face name")

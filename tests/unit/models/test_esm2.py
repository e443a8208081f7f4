"""ESM-2 against transformers' EsmForMaskedLM of the same random weights."""

import itertools
import json
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh

from torchtune_cp.checkpointing import FullModelHFCheckpointer
from torchtune_cp.distributed.fsdp import materialize, shard_model
from torchtune_cp.distributed.tensor_parallel import apply_tensor_parallel
from torchtune_cp.errors import ConfigError, UserError
from torchtune_cp.models import TransformerEncoder, auto_model, hf_config, to_hf_name
from torchtune_cp.models import esm2 as models_of_esm2
from torchtune_cp.models import token_dropout_scale as dropout_scale
from torchtune_cp.models.esm2 import esm2
from torchtune_cp.models.rope import inverse_frequencies
from torchtune_cp.training.loss import LinearCrossEntropyLoss
from torchtune_cp.training.memory import apply_activation_checkpointing

TOLERANCE = 1e-5  # fp32; the aim is 1e-4
MASK, PAD = 32, 1

# Scaled-down 8M (its 6 layers and heads of 16), 650M (heads of 64), 3B, and a shape that none has.
SIZES = {
    "8M": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4},
    "650M": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2},
    "3B": {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 5},
    "odd": {
        "hidden_size": 36,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "intermediate_size": 50,
        "layer_norm_eps": 1e-3,
        "rope_theta": 500.0,
    },
}


def _hf_config(name: str, **changes) -> transformers.EsmConfig:
    sizes = {"intermediate_size": 4 * SIZES[name]["hidden_size"], "layer_norm_eps": 1e-5}
    fixed = {
        "vocab_size": 33,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "emb_layer_norm_before": False,
    }
    return transformers.EsmConfig(**{**fixed, **sizes, **SIZES[name], **changes})


def _reference(name: str, **changes) -> transformers.EsmForMaskedLM:
    """Every parameter random, norms and biases included."""
    model = transformers.EsmForMaskedLM(_hf_config(name, **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_scale = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
            parameter.normal_(float(is_scale), 0.1, generator=generator)
    return model.eval()


def _fill(model: TransformerEncoder, checkpointer: FullModelHFCheckpointer) -> TransformerEncoder:
    source = checkpointer.source(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, (0,) * parameter.ndim, tuple(parameter.shape)))
    return model


def _ours(reference: transformers.EsmForMaskedLM, folder: Path) -> TransformerEncoder:
    reference.save_pretrained(folder)
    model = auto_model(folder)
    assert isinstance(model, TransformerEncoder)
    return _fill(model, FullModelHFCheckpointer(str(folder)))


def _batch(padded: bool, masked: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, attention mask and labels: rows of 29 and, with padding, 17 and 5 tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 24, (3, 29), generator=generator)
    tokens[:, 0] = 0
    real = torch.ones(3, 29, dtype=torch.bool)
    if padded:
        real = torch.arange(29) < torch.tensor([29, 17, 5])[:, None]
    tokens[torch.arange(3), real.sum(1) - 1] = 2
    chosen = torch.rand(3, 29, generator=generator) < torch.tensor([0.1, 0.3, 0.6])[:, None]
    chosen &= real & (tokens > 3)
    labels = tokens.masked_fill(~chosen, -100)
    if masked:
        tokens = tokens.masked_fill(chosen, MASK)
    return tokens.masked_fill(~real, PAD), real, labels


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("token_dropout", [True, False], ids=["dropout", "plain"])
def test_logits_loss_and_every_gradient_equal_those_of_transformers(
    tmp_path: Path, name: str, token_dropout: bool
) -> None:
    reference = _reference(name, token_dropout=token_dropout)
    ours = _ours(reference, tmp_path)
    for padded, masked in itertools.product([True, False], repeat=2):
        tokens, real, labels = _batch(padded, masked)
        expected = reference(tokens, attention_mask=real.long() if padded else None, labels=labels)
        actual = ours(tokens, attention_mask=real if padded else None)
        assert _relative_error(actual[real], expected.logits[real]) < TOLERANCE
        loss = F.cross_entropy(actual.flatten(0, 1), labels.flatten())
        assert abs(loss.item() - expected.loss.item()) < TOLERANCE * expected.loss.item()

        reference.zero_grad()
        ours.zero_grad()
        expected.loss.backward()
        loss.backward()
        grads = {n: p.grad for n, p in reference.named_parameters() if "contact_head" not in n}
        for parameter_name, parameter in ours.named_parameters():
            grad = grads.pop(to_hf_name("esm", parameter_name))
            assert _relative_error(parameter.grad, grad) < 5 * TOLERANCE, parameter_name
        assert not grads


def test_padding_without_a_mask_is_seen_as_in_transformers(tmp_path: Path) -> None:
    reference = _reference("8M")
    ours = _ours(reference, tmp_path)
    tokens, _, labels = _batch(padded=True, masked=True)
    expected = reference(tokens, labels=labels)
    actual = ours(tokens)
    assert _relative_error(actual, expected.logits) < TOLERANCE
    expected.loss.backward()
    F.cross_entropy(actual.flatten(0, 1), labels.flatten()).backward()
    grad = reference.esm.embeddings.word_embeddings.weight.grad
    assert _relative_error(ours.tok_embeddings.weight.grad, grad) < TOLERANCE


def test_given_positions_rotate_as_in_transformers(tmp_path: Path) -> None:
    reference = _reference("650M")
    ours = _ours(reference, tmp_path)
    tokens, _, _ = _batch(padded=False, masked=True)
    positions = torch.randint(0, 900, (3, 29), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    expected = reference(tokens, position_ids=positions, attention_mask=mask).logits
    assert _relative_error(ours(tokens, positions), expected) < TOLERANCE
    assert _relative_error(ours(tokens), expected) > 100 * TOLERANCE


def test_every_token_sees_every_other_and_none_sees_padding(tmp_path: Path) -> None:
    ours = _ours(_reference("8M"), tmp_path)
    tokens, real, _ = _batch(padded=True, masked=False)
    logits = ours(tokens, attention_mask=real)
    last = tokens.clone()
    last[:, 4] = 7
    assert (ours(last, attention_mask=real)[:, 0] - logits[:, 0]).abs().max() > 1e-3
    other_padding = tokens.masked_fill(~real, 9)
    assert torch.equal(ours(other_padding, attention_mask=real)[real], logits[real])


def test_a_slice_with_the_scale_of_the_whole_embeds_as_the_whole() -> None:
    model = esm2(num_layers=1, num_heads=2, embed_dim=16)
    tokens, real, _ = _batch(padded=True, masked=True)
    embedded = []
    model.layers[0].register_forward_pre_hook(lambda _, args: embedded.append(args[0]))
    scale = dropout_scale(tokens, MASK, real=real)
    model(tokens, attention_mask=real)
    part = slice(10, 20)
    model(tokens[:, part], attention_mask=real[:, part], token_dropout_scale=scale[:, part])
    model(tokens[:, part], attention_mask=real[:, part])
    whole, with_scale, alone = embedded
    assert torch.equal(with_scale, whole[:, part])
    assert not torch.allclose(alone, whole[:, part])


def test_the_scale_of_packed_documents_is_that_of_each_alone() -> None:
    tokens, real, _ = _batch(padded=True, masked=True)
    lengths = real.sum(1).tolist()
    documents = [tokens[i, :n] for i, n in enumerate(lengths)]
    alone = [dropout_scale(d.unsqueeze(0), MASK)[0] for d in documents]
    assert len({scale[0].item() for scale in alone}) == 3
    for scale, document in zip(alone, documents, strict=True):
        share = (document == MASK).float().mean()
        assert torch.allclose(scale, (1 - 0.15 * 0.8) / (1 - share))

    # Padded behind each document to a multiple of 4, as for two context-parallel ranks.
    pads = [-n % 4 for n in lengths]
    padded = [F.pad(d, (0, p), value=PAD) for d, p in zip(documents, pads, strict=True)]
    packed = torch.cat(padded).unsqueeze(0)
    ids = torch.cat([torch.full_like(d, i) for i, d in enumerate(padded)]).unsqueeze(0)
    scale = dropout_scale(packed, MASK, real=packed != PAD, document_ids=ids)
    for i, expected in enumerate(alone):
        assert torch.allclose(scale[ids == i], expected[0].expand(len(padded[i])))
    assert torch.equal(dropout_scale(torch.full((1, 3), MASK), MASK), torch.ones(1, 3))


def test_a_chunked_loss_sees_the_bias_as_one_more_feature(tmp_path: Path) -> None:
    ours = _ours(_reference("8M"), tmp_path)
    tokens, real, labels = _batch(padded=True, masked=True)
    logits = ours(tokens, attention_mask=real)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    grads = {name: p.grad for name, p in ours.named_parameters()}
    ours.zero_grad()
    chunked = LinearCrossEntropyLoss(num_output_chunks=3)
    loss = ours(tokens, attention_mask=real, output_fn=lambda hidden, w: chunked(hidden, w, labels))
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    for name, parameter in ours.named_parameters():
        assert _relative_error(parameter.grad, grads[name]) < TOLERANCE, name


def _load_cleanly(folder: Path) -> transformers.EsmForMaskedLM:
    model, info = transformers.EsmForMaskedLM.from_pretrained(folder, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    assert not problems
    return model.eval()


@pytest.mark.parametrize("frequencies", ["exact", "half"])
def test_a_folder_goes_through_and_loads_in_transformers_with_nothing_missing(
    tmp_path: Path, frequencies: str
) -> None:
    # Published folders hold frequencies that were rounded to half precision in training.
    reference = _reference("650M")
    if frequencies == "half":
        buffer = reference.esm.rotary_embeddings.inv_freq
        buffer.copy_(buffer.half().float())
    reference.save_pretrained(tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(str(tmp_path / "base"), output_dir=str(tmp_path))
    ours = _fill(auto_model(tmp_path / "base"), checkpointer)
    tokens, real, _ = _batch(padded=True, masked=True)
    positions = torch.arange(29).expand(3, 29) * 20
    actual = ours(tokens, positions, attention_mask=real)

    final = checkpointer.save_final(ours)
    again = _load_cleanly(final)
    for model in (reference, again):
        expected = model(tokens, attention_mask=real.long(), position_ids=positions).logits
        assert _relative_error(actual[real], expected[real]) < TOLERANCE
    for name, parameter in reference.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    if frequencies == "half":
        ours.rope_frequencies = None
        computed = ours(tokens, positions, attention_mask=real)
        assert _relative_error(computed[real], actual[real]) > 10 * TOLERANCE


def test_half_precision_weights_keep_exact_frequencies(tmp_path: Path) -> None:
    reference = _reference("8M")
    reference.save_pretrained(tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(str(tmp_path / "base"), output_dir=str(tmp_path))
    ours = _fill(auto_model(tmp_path / "base"), checkpointer)
    final = checkpointer.save_final(ours, dtype=torch.bfloat16)
    again = _fill(auto_model(final), FullModelHFCheckpointer(str(final)))
    assert again.rope_frequencies is not None
    assert torch.equal(again.rope_frequencies, inverse_frequencies(ours.config))
    assert json.loads((final / "config.json").read_text())["dtype"] == "bfloat16"
    _load_cleanly(final)


def test_random_weights_depend_on_the_seed_and_load_in_transformers(tmp_path: Path) -> None:
    checkpointer = FullModelHFCheckpointer(output_dir=str(tmp_path))
    with torch.device("meta"):
        model = esm2(num_layers=2, num_heads=4, embed_dim=64)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    model = _fill(model.to_empty(device="cpu"), checkpointer)
    other = checkpointer.source(model, seed=1)
    assert not torch.equal(
        other.read("output.dense.weight", (0, 0), (64, 64)), model.output.dense.weight
    )
    assert torch.equal(model.norm.weight, torch.ones(64))
    assert torch.equal(model.tok_embeddings.weight[PAD], torch.zeros(64))
    assert abs(model.layers[1].mlp.w1.weight.std().item() - 0.02) < 1e-3
    reference = _load_cleanly(checkpointer.save_final(model))
    tokens, real, _ = _batch(padded=True, masked=True)
    expected = reference(tokens, attention_mask=real.long()).logits
    assert _relative_error(model(tokens, attention_mask=real)[real], expected[real]) < TOLERANCE
    assert auto_model(tmp_path / "final").config == model.config


def test_old_tensors_of_published_folders_are_accepted_and_foreign_ones_refused(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    reference = _reference("8M")
    ours = _ours(reference, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in load_file(path).items()
        if "inv_freq" not in name and "contact_head" not in name
    }
    rounded = inverse_frequencies(ours.config).half()
    key = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
    old = {
        **tensors,
        **{key.format(layer): rounded.clone() for layer in range(6)},
        "esm.embeddings.position_ids": torch.arange(1026).unsqueeze(0),
        "esm.embeddings.position_embeddings.weight": torch.zeros(1026, 64),
        "lm_head.decoder.weight": tensors["esm.embeddings.word_embeddings.weight"].clone(),
    }
    save_file(old, path, metadata={"format": "pt"})
    model = _fill(auto_model(tmp_path), FullModelHFCheckpointer(str(tmp_path)))
    assert torch.equal(model.rope_frequencies, rounded.float())
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True)
    )

    # What the model would have to do without, or share, although the folder says otherwise.
    other = {**old, "lm_head.decoder.weight": old["lm_head.decoder.weight"] + 1}
    save_file(other, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"not the embedding.*lm_head\.decoder\.weight"):
        FullModelHFCheckpointer(str(tmp_path)).source(model, seed=0)
    save_file({**old, key.format(3): rounded + 1}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layer\.0\..* and .*layer\.3\..* differ"):
        FullModelHFCheckpointer(str(tmp_path)).source(model, seed=0)
    save_file({**tensors, "esm.pooler.dense.bias": torch.zeros(64)}, path)
    with pytest.raises(UserError, match=r"unexpected: esm\.pooler\.dense\.bias"):
        FullModelHFCheckpointer(str(tmp_path)).source(model, seed=0)
    save_file({**tensors, "esm.rotary_embeddings.inv_freq": torch.zeros(3)}, path)
    with pytest.raises(ConfigError, match=r"shape \[3\].*heads of width 16"):
        FullModelHFCheckpointer(str(tmp_path)).source(model, seed=0)


def test_every_published_size_has_its_number_of_parameters() -> None:
    # transformers' EsmForMaskedLM of two published folders; of the others their names.
    exact = {"esm2_8m": 7_512_474, "esm2_650m": 651_043_254}
    named = {"esm2_35m": 35e6, "esm2_150m": 150e6, "esm2_3b": 3e9, "esm2_15b": 15e9}
    for builder in (*exact, *named):
        with torch.device("meta"):
            model = getattr(models_of_esm2, builder)()
        config = model.config
        contact_head = config.num_layers * config.num_heads + 1
        count = sum(p.numel() for p in model.parameters()) + contact_head
        assert count == exact.get(builder, count), builder
        assert abs(count / named.get(builder, count) - 1) < 0.06, builder
        with torch.device("meta"):
            reference = transformers.EsmForMaskedLM(
                transformers.EsmConfig(**hf_config(model, torch.float32))
            )
        shapes = {n: tuple(p.shape) for n, p in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            assert shapes.pop(to_hf_name("esm", name)) == tuple(parameter.shape), name
        assert {n.rpartition(".")[0] for n in shapes} == {"esm.contact_head.regression"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"position_embedding_type": "absolute"},
            "position_embedding_type is 'absolute'.*'rotary'",
        ),
        ({"position_embedding_type": None}, "position_embedding_type is None"),
        ({"emb_layer_norm_before": True}, "emb_layer_norm_before is True"),
        ({"hidden_dropout_prob": 0.1}, "hidden_dropout_prob is 0.1, allowed is 0.0"),
        ({"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob is 0.1"),
        ({"is_folding_model": True}, "is_folding_model is True"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"mask_token_id": None}, "mask_token_id missing"),
        ({"num_attention_heads": 5}, "num_heads is 5 and embed_dim is 64"),
        ({"mask_token_id": 33}, "mask_token_id is 33, allowed is 0 to vocab_size - 1 = 32"),
    ],
)
def test_what_is_not_esm2_is_refused_by_its_key(
    tmp_path: Path, changes: dict, message: str
) -> None:
    hf = {**hf_config(esm2(num_layers=1, num_heads=4, embed_dim=64)), **changes}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match=message):
        auto_model(tmp_path)


def test_a_published_config_is_understood(tmp_path: Path) -> None:
    published = {  # facebook/esm2_t6_8M_UR50D
        "architectures": ["EsmForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": None,
        "emb_layer_norm_before": False,
        "esmfold_config": None,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 320,
        "initializer_range": 0.02,
        "intermediate_size": 1280,
        "is_folding_model": False,
        "layer_norm_eps": 1e-05,
        "mask_token_id": 32,
        "max_position_embeddings": 1026,
        "model_type": "esm",
        "num_attention_heads": 20,
        "num_hidden_layers": 6,
        "pad_token_id": 1,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_list": None,
        "vocab_size": 33,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    with torch.device("meta"):
        model = auto_model(tmp_path)
        from torchtune_cp.models.esm2 import esm2_8m

        named = esm2_8m()
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in named.named_parameters()
    }
    hf = transformers.EsmConfig(**hf_config(named, torch.float32))
    for key, value in published.items():
        if key not in ("torch_dtype", "classifier_dropout", "hidden_act"):
            assert getattr(hf, key) == value, key


def test_sharding_and_checkpointed_activations_change_no_gradient(tmp_path: Path) -> None:
    ours = _ours(_reference("8M"), tmp_path)
    with torch.device("meta"):
        sharded = auto_model(tmp_path)
    tokens, real, labels = _batch(padded=True, masked=True)
    loss_fn = LinearCrossEntropyLoss(num_output_chunks=2)

    def loss_of(model: TransformerEncoder) -> torch.Tensor:
        return model(tokens, attention_mask=real, output_fn=lambda h, w: loss_fn(h, w, labels))

    expected = loss_of(ours)
    expected.backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        apply_activation_checkpointing(sharded)
        shard_model(sharded, init_device_mesh("cpu", (1,)))
        source = FullModelHFCheckpointer(str(tmp_path)).source(sharded, seed=0)
        materialize(sharded, source, torch.device("cpu"))
        loss = loss_of(sharded)
        loss.backward()
        assert loss.item() == expected.item()
        for (name, p), q in zip(ours.named_parameters(), sharded.parameters(), strict=True):
            assert torch.equal(q.grad.full_tensor(), p.grad), name
    finally:
        dist.destroy_process_group()


def test_tensor_parallelism_is_refused_in_words() -> None:
    mesh = types.SimpleNamespace(size=lambda: 3)
    with pytest.raises(
        UserError, match="tensor_parallel_dim=3: there is no plan for model_type esm"
    ):
        apply_tensor_parallel(esm2(), mesh)

"""Attention over head chunks gives the same gradients, once, and holds few tensors of the whole slice."""

from __future__ import annotations

import pytest
import torch

from benchmarks.live_storage import LiveStorage
from tests.unit.training.small_llama import gradients, loss_of, small_llama, tokens
from torchtune_cp.distributed import ContextParallelOptions, context_parallel
from torchtune_cp.distributed.context_parallel.heads import HeadChunks
from torchtune_cp.errors import UserError
from torchtune_cp.models.init import init_tensor_
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.models.mistral import mistral
from torchtune_cp.models.qwen2 import qwen2
from torchtune_cp.models.qwen3 import qwen3
from torchtune_cp.models.rope import inverse_frequencies, rotary_cos_sin
from torchtune_cp.training.memory import (
    apply_activation_checkpointing,
    apply_activation_offloading,
    apply_chunked_attention,
    apply_tiled_mlp,
)

HEADS, KV_HEADS = 4, 2
SIZES = {
    "vocab_size": 32,
    "num_layers": 2,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 128,
}
WINDOW = 10
FAMILIES = {
    "llama3": lambda: llama3(**SIZES),
    "qwen2": lambda: qwen2(**SIZES),
    "qwen3": lambda: qwen3(**SIZES, head_dim=16),
    "mistral": lambda: mistral(**SIZES, sliding_window=WINDOW),
}


BY_DOCUMENTS = ContextParallelOptions(by_documents=True)


def _random(model, dtype=torch.float64):
    """Every parameter drawn, biases and norm scales too."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.to(dtype).parameters():
        with torch.no_grad():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
    return model


def _chunked(model, chunks, tile=7):
    heads = HeadChunks.of(chunks, model.config.num_heads, model.config.num_kv_heads)
    apply_chunked_attention(model, heads, tile)
    return model


def _step(model, batch=None, **options):
    """Loss of a model inside a context that lays out by documents, after backward."""
    batch = {"tokens": tokens()} if batch is None else batch
    options["options"] = ContextParallelOptions(
        window=model.config.sliding_window, by_documents=True
    )
    with context_parallel(None, batch, **options) as local:
        loss = loss_of(model, local["tokens"], input_pos=local["input_pos"])
        loss.backward()
    return loss


def _error(model, reference):
    found, expected = gradients(model), gradients(reference)
    return max(
        ((found[name] - g).abs().max() / g.abs().max()).item() for name, g in expected.items()
    )


@pytest.mark.parametrize("tile", [1, 7, 1000])
@pytest.mark.parametrize("chunks", [2, 4])
def test_gradients_are_those_of_the_plain_layer(chunks, tile):
    """Two rows of 96 tokens; with 4 chunks two of them share a KV head."""
    plain, chunked = small_llama().double(), _chunked(small_llama().double(), chunks, tile)
    loss_of(plain).backward()
    torch.testing.assert_close(_step(chunked), loss_of(plain), rtol=1e-13, atol=0)
    assert _error(chunked, plain) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_every_family(family):
    """Biases (Qwen2), norms of heads and heads wider than the embedding (Qwen3), windows (Mistral)."""
    plain, chunked = (_random(FAMILIES[family]()) for _ in range(2))
    _chunked(chunked, 4)
    loss_of(plain).backward()
    _step(chunked)
    assert _error(chunked, plain) < 1e-12


def test_documents_of_a_pack_do_not_see_each_other():
    plain, chunked = small_llama().double(), _chunked(small_llama().double(), 4)
    lengths = [40, 56, 7, 89]
    documents = tokens().flatten().split(lengths)
    for document in documents:
        loss_of(plain, document[None]).backward()
    _step(chunked, {"tokens": tokens(), "seq_lens": torch.tensor([lengths[:2], lengths[2:]])})
    assert _error(chunked, plain) < 1e-12


def test_float32_gradients_agree_to_float32():
    plain, chunked = small_llama(), _chunked(small_llama(), 2)
    loss_of(plain).backward()
    _step(chunked)
    assert _error(chunked, plain) < 2e-6


def test_bfloat16_is_no_further_from_float64_than_the_plain_layer():
    reference = small_llama().double()
    loss_of(reference).backward()
    plain = small_llama().bfloat16()
    loss_of(plain).backward()

    def distance(model):
        pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
        return max(
            ((p.grad.double() - q.grad).norm() / q.grad.norm()).item()
            for (name, p), q in pairs
            if "attn" in name or "sa_norm" in name
        )

    for chunks in (2, 4):
        chunked = _chunked(small_llama().bfloat16(), chunks)
        _step(chunked)
        assert distance(chunked) < 1.1 * distance(plain)


@pytest.mark.parametrize(
    "lever", ["checkpointed", "offloaded", "checkpointed_and_offloaded", "tiled"]
)
def test_other_levers_beside_it_change_no_bit(lever):
    alone, combined = _chunked(small_llama(), 4), _chunked(small_llama(), 4)
    if lever == "tiled":
        apply_tiled_mlp(alone, 7)
        apply_tiled_mlp(combined, 7)
    if "checkpointed" in lever or lever == "tiled":
        apply_activation_checkpointing(combined)
    if "offloaded" in lever:
        moved = apply_activation_offloading(combined, torch.device("cpu"), min_bytes=1)
    _step(alone)
    _step(combined)
    assert _error(combined, alone) == 0
    assert "offloaded" not in lever or moved.moved_bytes > 0


def test_without_gradients_it_is_the_same_function():
    plain, chunked = small_llama().double(), _chunked(small_llama().double(), 2)
    batch = {"tokens": tokens()}
    with torch.no_grad(), context_parallel(None, batch, options=BY_DOCUMENTS) as local:
        found = loss_of(chunked, local["tokens"], input_pos=local["input_pos"])
    torch.testing.assert_close(found, loss_of(plain), rtol=1e-13, atol=0)


def test_the_output_is_no_view_of_which_fsdp_would_warn():
    model = _chunked(small_llama(), 2)
    with context_parallel(None, {"tokens": tokens()}, options=BY_DOCUMENTS) as local:
        rope = rotary_cos_sin(inverse_frequencies(model.config), local["input_pos"], torch.float32)
        output = model.layers[0].attend(torch.randn(2, 96, 64, requires_grad=True), rope)
    assert output.requires_grad
    assert not output._is_view()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_second_backward_is_refused_in_words(checkpointed):
    model = _chunked(small_llama(), 2)
    if checkpointed:
        apply_activation_checkpointing(model)
    with context_parallel(None, {"tokens": tokens()}, options=BY_DOCUMENTS) as local:
        loss = loss_of(model, local["tokens"], input_pos=local["input_pos"])
        loss.backward(retain_graph=True)
        with pytest.raises(
            RuntimeError, match=r"attention_head_chunks.*leave out retain_graph=True"
        ):
            loss.backward()


def test_outside_of_a_fitting_context_it_says_which_one_it_needs():
    model = _chunked(small_llama(), 2)
    with pytest.raises(RuntimeError, match=r"outside of its context_parallel.*head_chunks="):
        model(tokens())
    with (
        context_parallel(None, {"tokens": tokens()}) as local,
        pytest.raises(RuntimeError, match=r"outside of its context_parallel.*head_chunks="),
    ):
        model(local["tokens"])


# --- memory ---------------------------------------------------------------------------------------

LENGTH, WIDTH = 2048, 64


def _half_layer_peak(chunks):
    """Most bytes alive in forward and backward of a layer's first half, in tensors of the slice.

    Its input and the gradient of its output are there before and do not count; the output does.
    """
    sizes = {"num_heads": 8, "num_kv_heads": 2, "embed_dim": WIDTH, "intermediate_dim": 64}
    model = llama3(vocab_size=32, num_layers=1, max_seq_len=LENGTH, **sizes)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            init_tensor_(name, parameter, generator, model.config)
        parameter.grad = torch.zeros_like(parameter)
    if chunks:
        _chunked(model, chunks, tile=32)
    x = torch.randn(1, LENGTH, WIDTH, generator=generator).requires_grad_()
    grad = torch.randn(1, LENGTH, WIDTH, generator=generator)
    batch = {"tokens": torch.zeros(1, LENGTH, dtype=torch.int64)}
    with context_parallel(None, batch, options=BY_DOCUMENTS) as local:
        rope = rotary_cos_sin(inverse_frequencies(model.config), local["input_pos"], x.dtype)
        with LiveStorage() as storage:
            output = model.layers[0].attend(x, rope)
            output.backward(grad)
    return storage.peak / (LENGTH * WIDTH * 4)


def test_backward_holds_the_output_of_attention_two_gradients_and_those_of_keys_and_values():
    """In tensors of the whole slice; a KV tensor is a quarter of one, a chunk of 8 an eighth."""
    whole, two, eight = _half_layer_peak(None), _half_layer_peak(2), _half_layer_peak(8)
    # The half's output (held by the caller), that of attention, the input's gradient, keys and values'.
    assert eight == pytest.approx(1 + 1 + 1 + 0.5, abs=0.4)
    assert whole > 7
    assert eight < two < 0.7 * whole


# --- which chunks there are ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "allowed"),
    [
        (32, 8, 1, [1, 2, 4, 8, 16, 32]),
        (32, 8, 4, [1, 2, 4, 8]),
        (32, 8, 16, [1, 2]),
        (8, 8, 2, [1, 2, 4]),
        (12, 3, 1, [1, 3, 6, 12]),
        (28, 4, 2, [1, 2, 14]),
        (4, 2, 4, [1]),
    ],
)
def test_chunks_use_their_kv_heads_evenly_or_are_refused(heads, kv_heads, ranks, allowed):
    group = heads // kv_heads
    for chunks in range(1, heads + 1):
        if chunks not in allowed:
            with pytest.raises(
                UserError, match=f"attention_head_chunks={chunks}: .*num_heads={heads}"
            ):
                HeadChunks.of(chunks, heads, kv_heads, ranks)
            continue
        made = HeadChunks.of(chunks, heads, kv_heads, ranks)
        seen = []
        for chunk in range(chunks):
            queries = made.queries(torch.arange(heads), chunk, 0)
            keys = made.keys(torch.arange(kv_heads), chunk // made.uses, 0).flatten().tolist()
            per_rank = queries.size(1)
            for rank, own in enumerate(queries.tolist()):
                # From the rank's own heads, and every KV head of theirs is in the chunk, equally often.
                assert all(head // (heads // ranks) == rank for head in own)
                used = [head // group for head in own]
                assert set(used) <= set(keys)
                assert {used.count(k) for k in used} == {per_rank // len(set(used))}
            seen += queries.flatten().tolist()
        assert sorted(seen) == list(range(heads))


def test_kv_heads_that_the_ranks_cannot_share_evenly_are_refused():
    with pytest.raises(UserError, match="num_kv_heads=4 is neither a multiple nor a divisor of 6"):
        HeadChunks.of(2, 12, 4, 6)

"""A model whose layers want different masks: what each call asks for is what it gets, on one layout."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from tests.distributed.written_out import attention_written_out, distances_shown, seq_lens_of
from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed import ContextParallelOptions, context_parallel
from torchtune_cp.models import attention as models_attention
from torchtune_cp.models.llama3 import llama3

#: Of the layers of one model: full, two windows, chunks, and one that sees both sides.
LAYERS = (
    AttentionMask(),
    AttentionMask(True, 7),
    AttentionMask(True, 21),
    AttentionMask(True, None, 16),
    AttentionMask(False),
)
ROWS, LENGTH = [[61, 30, 1], [9, 70]], 96
METHODS = {
    "ring": {"method": "ring"},
    "alltoall": {"method": "ring", "rotate_method": "alltoall"},
    "allgather": {"method": "allgather"},
    "ulysses": {"method": "ulysses"},
}
TOLERANCE = 1e-10  # float64: the order of the sums, over five layers


def _model(masks=LAYERS):
    torch.manual_seed(0)
    model = llama3(
        vocab_size=32,
        num_layers=len(masks),
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        intermediate_dim=48,
        max_seq_len=128,
    ).double()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    for layer, mask in zip(model.layers, masks, strict=True):
        layer.attn.mask = mask
    return model


def _tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 32, (len(ROWS), LENGTH), generator=generator)


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def _reference(masks=LAYERS):
    """Gradients of the sum of squared logits over all documents, each alone, softmax written out."""
    model, tokens = _model(masks), _tokens()

    def attention(q, k, v, *, is_causal, window, chunk, attn_mask):
        shown = lambda n: distances_shown(n, is_causal, window, chunk)  # noqa: E731
        return attention_written_out(q, k, v, [[q.size(2)]], shown)

    plain, models_attention.attention = models_attention.attention, attention
    try:
        for row, lengths in enumerate(ROWS):
            for document in tokens[row, : sum(lengths)].split(lengths):
                model(document[None]).square().sum().backward()
    finally:
        models_attention.attention = plain
    return _gradients(model)


def _error(found, expected):
    return max(((found[n] - e).abs().max() / e.abs().max()).item() for n, e in expected.items())


def _errors():
    cp = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    return _of_each_method(mesh)


def _of_each_method(mesh):
    expected, errors = _reference(), {}
    batch = {"tokens": _tokens(), "seq_lens": seq_lens_of(ROWS)}
    for name, given in METHODS.items():
        for told in (None, ContextParallelOptions(window=7)):
            model = _model()
            with context_parallel(mesh, batch, options=told, **given) as local:
                logits = model(local["tokens"], local["input_pos"])
                if mesh is None:
                    real = torch.arange(LENGTH) < torch.tensor([sum(r) for r in ROWS])[:, None]
                else:
                    real = local.layout.indices[mesh.get_local_rank()][None] >= 0
                logits[real].square().sum().backward()
            if mesh is not None:
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            errors[name, told is None] = _error(_gradients(model), expected)
    return errors


def test_on_one_rank():
    assert max(_of_each_method(None).values()) < TOLERANCE
    # Another order of the same masks is another model.
    assert _error(_reference(LAYERS[::-1]), _reference()) > 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize("cp", [2, 4])
def test_over_process_groups(cp):
    for errors in run_ranks(cp, _errors):
        assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}
        assert len(errors) == 2 * len(METHODS)


def _ring_refusals():
    """Whole rows without a word of the window go through torch's ring, which cannot do it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    said = []
    for masks in ((AttentionMask(True, 7),), (AttentionMask(True, None, 16),), LAYERS[4:]):
        with (
            pytest.raises(NotImplementedError) as caught,
            context_parallel(mesh, {"tokens": _tokens()}) as local,
        ):
            _model(masks)(local["tokens"], local["input_pos"])
        said.append((local.backend, str(caught.value)))
    return said


@pytest.mark.distributed
def test_what_torchs_ring_cannot_do_is_refused_with_the_option_that_helps():
    for window, chunk, both_sides in run_ranks(2, _ring_refusals):
        assert window[0] == ("ring", "whole rows")
        assert "window=7" in window[1]
        assert "ContextParallelOptions(window=7)" in window[1]
        assert "ContextParallelOptions(chunk=16)" in chunk[1]
        assert "is_causal=False inside" in both_sides[1]

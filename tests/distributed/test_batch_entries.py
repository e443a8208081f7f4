"""No batch is misread by `context_parallel`: its documents are kept apart, its entries cut, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from torchtune_cp.data import MaskedLMCollator, collate, cut_for_ranks
from torchtune_cp.distributed import ContextParallelOptions, context_parallel, unshard
from torchtune_cp.errors import UserError
from torchtune_cp.models import TransformerEncoder
from torchtune_cp.models.encoder_config import EncoderConfig
from torchtune_cp.models.llama3 import llama3

MASK, PAD = 32, 1


def _encoder():
    torch.manual_seed(0)
    sizes = EncoderConfig(
        family="esm",
        vocab_size=33,
        num_layers=2,
        num_heads=4,
        embed_dim=32,
        intermediate_dim=64,
        max_seq_len=128,
        token_dropout=True,
        mask_token_id=MASK,
        pad_token_id=PAD,
        initializer_range=0.3,
    )
    return TransformerEncoder(sizes).double()


def _proteins():
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(4, 30, (n,), generator=generator).tolist() for n in (5, 9, 3)]
    drawn[1][4] = MASK
    return [{"tokens": tokens, "labels": tokens} for tokens in drawn]


def _errors(mesh):
    """Largest error of the logits of every protein against a model that sees it alone."""
    model, samples, errors = _encoder(), _proteins(), {}
    alone = [model(torch.tensor([s["tokens"]])) for s in samples]
    for sequence_format in ("thd", "bshd"):
        for pad_to in (1, 8):  # of a batch, and as tensor parallelism asks for it
            for method in ("ring", "allgather", "ulysses"):
                batch = MaskedLMCollator(sequence_format, PAD, 4, mask_id=MASK)(samples)
                options = {
                    "method": method,
                    "is_causal": False,
                    "options": ContextParallelOptions(pad_to_multiple_of=pad_to),
                }
                with context_parallel(mesh, batch, **options) as local:
                    logits = model(
                        local["tokens"],
                        local["input_pos"],
                        token_dropout_scale=local["token_dropout_scale"].double(),
                    )
                whole = unshard(logits, mesh, layout=local.layout)[:, : batch["tokens"].size(1)]
                starts = batch["cu_seqlens_padded"].tolist()
                errors[sequence_format, pad_to, method] = max(
                    (whole.flatten(0, 1)[at : at + right.size(1)] - right[0]).abs().max().item()
                    for at, right in zip(starts, alone, strict=False)
                )
    return errors


def _with(**entries):
    return {"tokens": torch.arange(16).view(2, 8), **entries}


def _unmarked(slices):
    return {key: entry for key, entry in slices.items() if key != "slice_layout"}


def _padded(cp):
    """One protein of 12 tokens in a row of 16: 4 of padding, cut for `cp` ranks."""
    samples = [{"tokens": [5] * 12, "labels": [5] * 12}]
    return MaskedLMCollator("thd", PAD, 2 * cp if cp > 1 else 1, length=16)(samples)


#: A batch, and what the refusal says of it.
REFUSED = {
    "mask": (_with(mask=torch.ones(2, 1, 8, 8)), r"'mask'.*\[2, 1, 8, 8\].*mask_mod"),
    "mask without heads": (_with(mask=torch.ones(2, 8, 8)), r"'mask'.*cannot all be cut"),
    "per token, no rows": (_with(weight=torch.ones(8)), r"'weight'.*\[batch, seq, \.\.\.\]"),
    "one row for all": (_with(weight=torch.ones(1, 8)), r"'weight'.*\[1, 8\]"),
    "attention_mask": (_with(attention_mask=torch.ones(2, 8)), "'attention_mask'.*seq_lens"),
    "position_ids": (_with(position_ids=torch.arange(8)), "'position_ids'.*input_pos"),
    "flattened": (_with(cu_seq_lens_q=torch.tensor([0, 16])), "'cu_seq_lens_q'.*cu_seqlens"),
    "list": (_with(labels=[[1] * 8] * 2), "'labels' is a list"),
    "numpy": (_with(weight=torch.ones(2, 8).numpy()), "'weight' is a ndarray"),
    "device": (_with(labels=torch.ones(2, 8, device="meta")), "'labels' is on meta.*cpu"),
    "length": (_with(labels=torch.ones(2, 7)), r"'labels'.*\[2, 7\].*\[2, 8\]"),
    "no rows": ({"tokens": torch.arange(8)}, r"'tokens' is torch.int64 \[8\]"),
    "no ids": ({"tokens": torch.ones(2, 8)}, r"'tokens' is torch.float32"),
    "twice": (
        _with(seq_lens=torch.tensor([[8], [8]]), cu_seqlens=torch.tensor([0, 16])),
        "both 'seq_lens' and 'cu_seqlens'",
    ),
    "padding alone": (_with(cu_seqlens_padded=torch.tensor([0, 16])), "needs 'cu_seqlens'"),
    "beyond": (_with(cu_seqlens=torch.tensor([0, 17])), "in 16 tokens.*'slice_layout'"),
    "rows of ends": (_with(cu_seqlens=torch.tensor([[0, 16]])), "do not describe"),
    "one number": (_with(cu_seqlens=torch.tensor(16)), "do not describe"),
    "late start": (_with(cu_seqlens=torch.tensor([1, 16])), "do not describe"),
    "slices without their mark": (_unmarked(cut_for_ranks(_padded(2), 2)[1]), "'slice_layout'"),
}


def _accepted(mesh):
    """What is cut and what is handed on, as each rank sees it."""
    rank = 0 if mesh is None else mesh.get_local_rank()
    cp = 1 if mesh is None else mesh.size()
    for name, (batch, says) in REFUSED.items():
        with pytest.raises(UserError, match=says), context_parallel(mesh, batch):
            raise AssertionError(name)
    own = cut_for_ranks(_padded(cp), cp)
    wrong = {
        "cut for 4 context-parallel ranks": cut_for_ranks(_padded(4), 4)[0],
        "of this rank's slices" if cp > 1 else "cut for 2": own[1 - rank]
        if cp > 1
        else cut_for_ranks(_padded(2), 2)[0],
        "do not describe these slices": {**own[rank], "cu_seqlens": torch.tensor([0, 4])},
    }
    for says, batch in wrong.items():
        refused = pytest.raises(UserError, match=says)
        with refused, context_parallel(mesh, batch, is_causal=False):
            raise AssertionError(says)
    extra = torch.arange(2 * 8 * 3).view(2, 8, 3)
    found = {}
    for name, given in {
        "rows": {},
        "documents": {"seq_lens": torch.tensor([[3, 5], [8, 0]])},
        "ends": {"cu_seqlens": torch.tensor([0, 3, 8, 16])},
    }.items():
        batch = _with(extra=extra, per_row=torch.tensor([7, 9]), **given)
        with context_parallel(mesh, batch) as local:
            assert local["per_row"].tolist() == [7, 9]
            assert torch.equal(local["extra"][..., 0], 3 * local["tokens"])  # went along with them
        whole = local["extra"]
        if mesh is not None:
            whole = unshard(whole, mesh, layout=local.layout)
        found[name] = torch.equal(whole, extra)
    # A loader cuts them, too; and positions that it was not asked for are found.
    sliced = cut_for_ranks({**_padded(cp), "extra": torch.arange(16 * 3).view(1, 16, 3)}, cp)[rank]
    positions = sliced.pop("input_pos")
    with context_parallel(mesh, sliced, is_causal=False) as local:
        places = local["extra"][0, :, 0] // 3
        real = places < 12
        assert torch.equal(local["input_pos"][0][real], positions[0][real])
        assert torch.equal(places[real], positions[0][real])
    with (
        pytest.raises(UserError, match="token_dropout_scale"),
        context_parallel(mesh, _padded(cp), is_causal=False) as local,
    ):
        _encoder()(local["tokens"], local["input_pos"])
    model = llama3(32, 1, 4, 2, 32, 64)
    with context_parallel(mesh, _with(seq_lens=torch.tensor([[3, 5], [8, 0]]))) as local:
        model(local["tokens"], local["input_pos"])
    with pytest.raises(UserError, match="outside of the context_parallel"):
        model(local["tokens"], local["input_pos"])
    model(_with()["tokens"])  # the caller's own tokens are as they were
    return found


def _on_two_ranks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return _errors(mesh), _accepted(mesh)


def test_batches_are_kept_apart_cut_or_refused_alike_on_one_rank_and_on_two() -> None:
    results = [(_errors(None), _accepted(None)), *run_ranks(2, _on_two_ranks)]
    for errors, whole in results:
        assert len(errors) == 12
        assert max(errors.values()) < 1e-12, errors
        assert all(whole.values()), whole


def test_an_entry_of_several_features_is_padded_with_its_row() -> None:
    samples = [{"tokens": [1, 2, 3], "labels": [1, 2, 3]}]
    batch = {**collate(samples), "extra": torch.arange(6.0).view(1, 3, 2)}
    slices = cut_for_ranks(batch, 2)
    assert [s["tokens"].tolist() for s in slices] == [[[1, 0]], [[2, 3]]]
    assert [s["extra"].tolist() for s in slices] == [[[[0, 1], [0, 0]]], [[[2, 3], [4, 5]]]]

"""What the protein recipe refuses, and how it counts guesses."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtune_cp.data import byte_tokenizer, esm_tokenizer
from torchtune_cp.data.esm_tokenizer import ESM_ALPHABET
from torchtune_cp.errors import UserError
from torchtune_cp.models.esm2 import esm2
from torchtune_cp.training import LinearCrossEntropyLoss
from torchtune_cp.training.masked_lm import (
    build_masked_lm_loader,
    count_tokens,
    masked_lm_head,
    perplexity,
)


def _build(tokenizer: Any, model: Any) -> None:
    nothing: Any = SimpleNamespace()
    build_masked_lm_loader(nothing, nothing, tokenizer, model, nothing, nothing, seed=0)


def test_a_tokenizer_without_a_mask_token_is_refused_in_one_line() -> None:
    model = esm2(num_layers=1, num_heads=2, embed_dim=16)
    with pytest.raises(UserError) as caught:
        _build(byte_tokenizer(), model)
    assert str(caught.value) == (
        f"tokenizer: {type(byte_tokenizer()).__name__} has no mask token; use"
        " torchtune_cp.data.esm_tokenizer"
    )


def test_a_tokenizer_with_other_ids_than_the_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(reversed(ESM_ALPHABET)))
    model = esm2(num_layers=1, num_heads=2, embed_dim=16)
    with pytest.raises(UserError) as caught:
        _build(esm_tokenizer(tmp_path), model)
    assert str(caught.value) == (
        "tokenizer: its mask and padding tokens are 0 and 31, the model's are 32 and 1; use the"
        " model's own tokenizer"
    )


def test_loss_and_guesses_are_those_of_whole_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 40, 8, generator=generator), torch.randn(33, 8)
    labels = torch.randint(0, 33, (2, 40), generator=generator)
    labels[:, ::3] = -100
    logits = hidden @ weight.t()
    labels[0, 1] = logits[0, 1].argmax()
    loss, right = masked_lm_head(hidden, weight, labels=labels, loss_fn=LinearCrossEntropyLoss())
    flat = labels.flatten()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), flat, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert right == (logits.argmax(-1).flatten() == flat)[flat != -100].sum() >= 1
    nothing = torch.full_like(labels, -100)
    loss, right = masked_lm_head(hidden, weight, labels=nothing, loss_fn=LinearCrossEntropyLoss())
    assert (loss.item(), right.item()) == (0.0, 0)


def test_counts_of_slices_add_up_and_perplexity_has_no_overflow() -> None:
    slices = {
        "tokens": torch.zeros(1, 6),
        "labels": torch.tensor([[3, -100, 4, -100, -100, -100]]),
        "cu_seqlens": torch.tensor([0, 5, 9]),
    }
    assert count_tokens([slices, slices], cp=2) == (4, 9.0, 12)
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf

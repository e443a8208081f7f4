from __future__ import annotations

import numpy as np
import pytest

from torchtune_cp.data import esm_tokenizer, mlm_masking
from torchtune_cp.errors import UserError

TOKENIZER = esm_tokenizer()
PROTEIN = np.array(TOKENIZER.encode("MKVLATRSGDEFHINPQWYCXB" * 2000))


def test_15_percent_are_chosen_and_80_10_10_of_them_masked_replaced_kept() -> None:
    tokens, labels = mlm_masking(TOKENIZER)(PROTEIN, sample_id=0)
    chosen = labels != -100
    assert tokens.shape == labels.shape == PROTEIN.shape
    # Five standard deviations of the shares at these counts.
    assert abs(chosen.mean() - 0.15) < 0.009
    assert (labels[chosen] == PROTEIN[chosen]).all()
    assert (tokens[~chosen] == PROTEIN[~chosen]).all()
    is_mask = tokens[chosen] == TOKENIZER.mask_id
    assert abs(is_mask.mean() - 0.8) < 0.025
    drawn = tokens[chosen][~is_mask]
    # One in 20 random residues is, by chance, the original one.
    assert abs((drawn != labels[chosen][~is_mask]).sum() / chosen.sum() - 0.095) < 0.02
    assert set(drawn[drawn != labels[chosen][~is_mask]]) == set(TOKENIZER.standard_ids)


def test_special_tokens_are_neither_chosen_nor_drawn() -> None:
    masking = mlm_masking(TOKENIZER, probability=1.0, mask_share=0.0, random_share=1.0)
    text = "MK<mask>V<unk>L<pad><pad>"
    original = np.array(TOKENIZER.encode(text))
    tokens, labels = masking(original, sample_id=3)
    special = np.isin(original, sorted(TOKENIZER.special_ids))
    assert special.sum() == 6
    assert (tokens[special] == original[special]).all()
    assert (labels == np.where(special, -100, original)).all()
    everything = mlm_masking(
        TOKENIZER, probability=1.0, mask_share=0.0, random_share=1.0, random_from="alphabet"
    )
    assert set(everything(PROTEIN, sample_id=0)[0]) == set(range(33))


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    masking = mlm_masking(TOKENIZER, seed=7)
    first = masking(PROTEIN, sample_id=5, epoch=2)
    masking(PROTEIN, sample_id=6, epoch=2)
    np.random.default_rng(0).random(3)
    again = mlm_masking(TOKENIZER, seed=7)(PROTEIN.tolist(), sample_id=5, epoch=2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    others = [
        masking(PROTEIN, sample_id=6, epoch=2),
        masking(PROTEIN, sample_id=5, epoch=3),
        mlm_masking(TOKENIZER, seed=8)(PROTEIN, sample_id=5, epoch=2),
    ]
    for tokens, _ in others:
        # As many in common as by chance: not the draws of the first, shifted or swapped.
        assert 0.6 < (tokens == first[0]).mean() < 0.85
    # Pinned: masks of a run that resumes on another day are those it would have had.
    pinned, _ = mlm_masking(TOKENIZER, seed=1)(PROTEIN[:40], sample_id=2, epoch=3)
    assert np.flatnonzero(pinned == TOKENIZER.mask_id).tolist() == [
        4,
        10,
        14,
        18,
        19,
        25,
        31,
        36,
        38,
    ]


def test_an_empty_filler_sample_stays_empty() -> None:
    tokens, labels = mlm_masking(TOKENIZER)([], sample_id=-1)
    assert len(tokens) == len(labels) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probability": 1.5}, "mlm.probability=1.5: must be from 0 to 1"),
        ({"mask_share": 0.8, "random_share": 0.3}, "together they must be 1 at most"),
        ({"random_from": "dna"}, "mlm.random_from='dna' is not known; allowed: standard, alphabet"),
    ],
)
def test_shares_that_make_no_sense_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mlm_masking(TOKENIZER, **arguments)

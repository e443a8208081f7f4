"""Masked language modelling: which tokens of a sample are masked, drawn once per sample and epoch.

A draw depends on (seed, epoch, sample id) alone: not on the rank, the mesh, the batch, or on what was
drawn before. So every mesh trains on the same masks, and a resumed run on those that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtune_cp.data.collate import CROSS_ENTROPY_IGNORE_IDX
from torchtune_cp.data.esm_tokenizer import EsmTokenizer
from torchtune_cp.errors import UserError

IntArray = np.ndarray[Any, np.dtype[np.int64]]

# Keeps these draws apart from others that are seeded with the same numbers.
_STREAM = 0x4D4C4D  # "MLM"


@dataclass(frozen=True)
class MLMMasking:
    """BERT's masking (https://arxiv.org/abs/1810.04805): 15 % of the tokens are to be predicted.

    Of the chosen tokens 80 % become the mask token, 10 % a random token and 10 % stay. Every token but
    special ones is chosen on its own with the same probability, as in transformers'
    DataCollatorForLanguageModeling, so that a short protein may have no label at all.

    Random tokens are drawn from the 20 amino acids by default. transformers' collator draws from all 33
    tokens, so that 13 of 33 draws are none (`<pad>` inside a protein, `<null_1>`, a gap): those say by
    themselves that they are wrong, and teach nothing about proteins.

    Attributes:
        mask_id: The mask token.
        random_ids: What random tokens are drawn from.
        special_ids: Tokens that are never chosen.
        seed: The run's seed.
        probability: Share of tokens that are chosen.
        mask_share: Share of the chosen that become the mask token.
        random_share: Share of the chosen that become a random token.
    """

    mask_id: int
    random_ids: Sequence[int]
    special_ids: frozenset[int]
    seed: int = 0
    probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    _random_ids: IntArray = field(init=False, repr=False, compare=False)
    _special_ids: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the shares.

        Raises:
            UserError: One is not a share, or both together are more than all.
        """
        for key in ("probability", "mask_share", "random_share"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise UserError(f"mlm.{key}={getattr(self, key)}: must be from 0 to 1")
        if self.mask_share + self.random_share > 1.0 + 1e-9:
            raise UserError(
                f"mlm.mask_share={self.mask_share} and mlm.random_share={self.random_share}: together "
                "they must be 1 at most; the rest of the chosen tokens stays"
            )
        if not self.random_ids:
            raise UserError("mlm: there is nothing to draw random tokens from")
        object.__setattr__(self, "_random_ids", np.asarray(self.random_ids, dtype=np.int64))
        object.__setattr__(self, "_special_ids", np.asarray(sorted(self.special_ids)))

    def __call__(
        self, tokens: Sequence[int], *, sample_id: int, epoch: int = 0
    ) -> tuple[IntArray, IntArray]:
        """Mask a sample.

        Args:
            tokens: [s] token ids, special ones included.
            sample_id: The sample's place in the dataset: whatever says the same on every mesh.
            epoch: Each epoch has masks of its own.

        Returns:
            Tokens and labels, int64 [s]: a label is the original token where one was chosen and -100
            elsewhere. Labels stand at their own tokens: they are not shifted.
        """
        original = np.asarray(tokens, dtype=np.int64)
        # Entropy is a list of non-negative integers; the ids of fillers are -1 and get no draws.
        generator = np.random.default_rng([_STREAM, self.seed, epoch, max(sample_id, 0)])
        # Three whole draws, whatever the tokens are: those of one token do not depend on another's.
        choice, fate = generator.random(len(original)), generator.random(len(original))
        replacement = self._random_ids[
            generator.integers(len(self._random_ids), size=len(original))
        ]
        chosen = (choice < self.probability) & ~np.isin(original, self._special_ids)
        masked = original.copy()
        masked[chosen & (fate < self.mask_share)] = self.mask_id
        to_random = chosen & (fate >= self.mask_share)
        to_random &= fate < self.mask_share + self.random_share
        masked[to_random] = replacement[to_random]
        return masked, np.where(chosen, original, CROSS_ENTROPY_IGNORE_IDX)


RANDOM_FROM = ("standard", "alphabet")


def mlm_masking(
    tokenizer: EsmTokenizer,
    *,
    seed: int = 0,
    probability: float = 0.15,
    mask_share: float = 0.8,
    random_share: float = 0.1,
    random_from: str = "standard",
) -> MLMMasking:
    """Masking for a protein tokenizer.

    Args:
        tokenizer: Gives the mask token and the alphabet.
        seed: The run's seed.
        probability: See `MLMMasking`, as the two that follow.
        mask_share: Share of the chosen tokens that become the mask token.
        random_share: Share of the chosen tokens that become a random one.
        random_from: "standard": the 20 amino acids; "alphabet": all tokens of the vocabulary, as
            transformers' collator does.

    Raises:
        UserError: A share that is none, or an unknown `random_from`.
    """
    if random_from not in RANDOM_FROM:
        raise UserError(
            f"mlm.random_from={random_from!r} is not known; allowed: {', '.join(RANDOM_FROM)}"
        )
    standard = random_from == "standard"
    return MLMMasking(
        mask_id=tokenizer.mask_id,
        random_ids=tokenizer.standard_ids if standard else range(tokenizer.vocab_size),
        special_ids=tokenizer.special_ids,
        seed=seed,
        probability=probability,
        mask_share=mask_share,
        random_share=random_share,
    )

"""A dataset whose samples are masked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset


def token_count(dataset: Any, index: int) -> int:
    """How many tokens a sample has, without making it where the dataset can tell.

    Args:
        dataset: Map-style, with or without a `token_count(index)`.
        index: Of the sample.
    """
    count = getattr(dataset, "token_count", None)
    return len(dataset[index]["tokens"]) if count is None else int(count(index))


class MaskedDataset(Dataset):
    """Map-style: the samples of another dataset with masked tokens, and labels where some were masked."""

    def __init__(
        self, dataset: Any, masking: Callable[..., tuple[Any, Any]], first_id: int = 0
    ) -> None:
        """Wrap a dataset.

        Args:
            dataset: Map-style; `dataset[i]` gives "tokens".
            masking: Called with the tokens, `sample_id` and `epoch`, gives tokens and labels; `MLMMasking` is
                one.
            first_id: The `sample_id` of the first sample; the others count on.
        """
        self.dataset = dataset
        self.first_id = first_id
        self._masking = masking
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose whose masks are drawn from now on."""
        self._epoch = epoch

    def token_count(self, index: int) -> int:
        """How many tokens a sample has."""
        return token_count(self.dataset, index)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        sample = self.dataset[index]
        tokens, labels = self._masking(
            sample["tokens"], sample_id=self.first_id + index, epoch=self._epoch
        )
        return {"tokens": tokens, "labels": labels}

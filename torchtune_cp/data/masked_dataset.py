"""A dataset whose samples are masked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset


class MaskedDataset(Dataset):
    """Map-style: the samples of another dataset with masked tokens, and labels where some were masked."""

    def __init__(self, dataset: Any, masking: Callable[..., tuple[Any, Any]]) -> None:
        """Wrap a dataset.

        Args:
            dataset: Map-style; `dataset[i]` gives "tokens".
            masking: Called with the tokens, `sample_id` and `epoch`, gives tokens and labels; `MLMMasking` is
                one.
        """
        self.dataset = dataset
        self._masking = masking
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose whose masks are drawn from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        sample = self.dataset[index]
        tokens, labels = self._masking(sample["tokens"], sample_id=index, epoch=self._epoch)
        return {"tokens": tokens, "labels": labels}

"""Checks from headers whether model, weights and tokenizer match, before a process is started."""

from __future__ import annotations

from typing import Any

from torchtune_cp.checkpointing import FullModelHFCheckpointer
from torchtune_cp.config import vocabulary_problem
from torchtune_cp.errors import UserError
from torchtune_cp.models import LanguageModel


def model_files_problems(model: Any, checkpointer: Any, tokenizer: Any) -> list[str]:
    """Compare a model with the files that the run is to use; weights are not loaded.

    Args:
        model: On the meta device; its tied output may be replaced, as the run will do it.
        checkpointer: Its folder's tensors must be those of the model.
        tokenizer: Must not have more tokens than the model; None where it could not be built.

    Returns:
        One line for each problem. Components of other kinds, the user's own, are not looked at.
    """
    if not isinstance(model, LanguageModel):
        return []
    problems = []
    size = getattr(tokenizer, "vocab_size", 0)
    if isinstance(size, int) and (found := vocabulary_problem(model.config.vocab_size, size)):
        problems.append(found)
    if isinstance(checkpointer, FullModelHFCheckpointer):
        try:
            checkpointer.keep_stored_output(model)
            checkpointer.source(model, seed=0)
        except UserError as error:
            problems.append(f"checkpointer: {error}")
    return problems

"""Verifies that a run's result loads in transformers and is the trained model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from torchtune_cp import config
from torchtune_cp.checkpointing.folder import check_folder
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.jsonl import METRICS_NAME, read_metrics


def transformers_loss(folder: Path, samples: list[dict[str, list[int]]]) -> float:
    """Load a folder with transformers and return its mean token loss, one whole sequence at a time.

    Args:
        folder: A Hugging Face folder.
        samples: `tokens` and aligned `labels` (-100: not counted) each.

    Raises:
        UserError: transformers misses weights in the folder, or finds some that it does not expect.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    model, info = loaded
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys") if info[key]}
    if wrong:
        raise UserError(f"{folder} does not load cleanly in transformers: {wrong}")
    loss_sum, tokens = 0.0, 0
    with torch.no_grad():
        for sample in samples:
            labels = torch.tensor([sample["labels"]])
            count = int((labels[:, 1:] != -100).sum())
            if count:
                loss = model(torch.tensor([sample["tokens"]]), labels=labels).loss
                loss_sum += loss.item() * count
                tokens += count
    return loss_sum / max(tokens, 1)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' and torchao's remarks on optional parts from the screen."""
    logging.disable(logging.WARNING)
    try:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        yield
    finally:
        logging.disable(logging.NOTSET)


def verify_result(output_dir: Path) -> str:
    """Load `final/` with transformers and repeat the last validation without context parallelism.

    Args:
        output_dir: The output folder of a finished run.

    Returns:
        A line with the result.

    Raises:
        UserError: `final/` is not whole, does not load, or gives another loss than the run
            reported.
    """
    final = output_dir / "final"
    check_folder(final)
    run: Any = OmegaConf.load(output_dir / "config.yaml")
    tokenizer = config.instantiate(run.tokenizer)
    dataset = config.instantiate(run.dataset_val, tokenizer)
    with quiet_transformers():
        loss = transformers_loss(final, [dataset[index] for index in range(len(dataset))])
    records = read_metrics(output_dir / METRICS_NAME)
    reported: Any = [r["val_loss"] for r in records if r.get("val_loss") is not None][-1]
    if abs(loss - reported) > 1e-3:
        raise UserError(
            f"transformers computes a validation loss of {loss:.4f} from {final}, the run "
            f"reported {reported:.4f}: the saved model is not the trained one"
        )
    return (
        "transformers loads final/ with no missing key and computes the validation loss "
        f"{loss:.4f} on whole sequences; the two ranks reported {reported:.4f}"
    )

"""torchtune's tokenizer names: the same loader, with the family's chat template for base checkpoints."""

from __future__ import annotations

from pathlib import Path

from torchtune_cp.data import chat_templates
from torchtune_cp.data.tokenizer import HFTokenizer, load_tokenizer
from torchtune_cp.errors import UserError


def _load(
    path: str | Path,
    max_seq_len: int | None,
    template: str,
    *,
    prompt_template: object = None,
    truncation_type: str = "right",
    special_tokens_path: str | None = None,
) -> HFTokenizer:
    problems = []
    if prompt_template is not None:
        problems.append(
            f"tokenizer.prompt_template={prompt_template!r} is not supported: conversations are "
            "written by a chat template; give a jinja2 template as chat_template to "
            "torchtune_cp.data.hf_tokenizer, or set prompt_template: null"
        )
    if truncation_type != "right":
        problems.append(
            f"tokenizer.truncation_type={truncation_type!r} is not supported; allowed: 'right'"
        )
    if special_tokens_path is not None:
        problems.append(
            f"tokenizer.special_tokens_path={special_tokens_path!r} is not supported: special "
            "tokens are read from tokenizer.json; set special_tokens_path: null"
        )
    if max_seq_len is not None and max_seq_len < 1:
        problems.append(f"tokenizer.max_seq_len must be 1 or more, not {max_seq_len}")
    if problems:
        raise UserError("\n".join(problems))
    return load_tokenizer(path, max_seq_len, fallback_template=template)


def llama2_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    prompt_template: object = None,
    truncation_type: str = "right",
) -> HFTokenizer:
    """Tokenizer of a Llama 2 checkpoint; see `hf_tokenizer`.

    Args:
        path: Checkpoint folder, or torchtune's `.../tokenizer.model` where a tokenizer.json lies beside.
        max_seq_len: The length that datasets cut samples to.
        prompt_template: torchtune's argument; only None.
        truncation_type: torchtune's argument; only "right".

    Raises:
        UserError: For what is not supported, or when no tokenizer.json is found.
    """
    return _load(
        path,
        max_seq_len,
        chat_templates.LLAMA2,
        prompt_template=prompt_template,
        truncation_type=truncation_type,
    )


def llama3_tokenizer(
    path: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: object = None,
    truncation_type: str = "right",
) -> HFTokenizer:
    """Tokenizer of a Llama 3, 3.1, 3.2 or 3.3 checkpoint; see `hf_tokenizer`.

    Base checkpoints come without a chat template; they get Llama 3 Instruct's.

    Args:
        path: Checkpoint folder, or torchtune's `.../original/tokenizer.model` where a tokenizer.json
            lies in the folder above.
        special_tokens_path: torchtune's argument; only None.
        max_seq_len: The length that datasets cut samples to.
        prompt_template: torchtune's argument; only None.
        truncation_type: torchtune's argument; only "right".

    Raises:
        UserError: For what is not supported, or when no tokenizer.json is found.
    """
    return _load(
        path,
        max_seq_len,
        chat_templates.LLAMA3,
        prompt_template=prompt_template,
        truncation_type=truncation_type,
        special_tokens_path=special_tokens_path,
    )


def mistral_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    prompt_template: object = None,
    truncation_type: str = "right",
) -> HFTokenizer:
    """Tokenizer of a Mistral checkpoint; see `hf_tokenizer` and `llama2_tokenizer`."""
    return _load(
        path,
        max_seq_len,
        chat_templates.MISTRAL,
        prompt_template=prompt_template,
        truncation_type=truncation_type,
    )


def qwen2_5_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: object = None,
    truncation_type: str = "right",
) -> HFTokenizer:
    """Tokenizer of a Qwen2.5 checkpoint; see `hf_tokenizer`.

    Args:
        path: Checkpoint folder, or torchtune's `.../vocab.json`.
        merges_file: torchtune's argument; not read, because tokenizer.json holds the merges.
        special_tokens_path: torchtune's argument; only None.
        max_seq_len: The length that datasets cut samples to.
        prompt_template: torchtune's argument; only None.
        truncation_type: torchtune's argument; only "right".

    Raises:
        UserError: For what is not supported, or when no tokenizer.json is found.
    """
    return _load(
        path,
        max_seq_len,
        chat_templates.CHATML,
        prompt_template=prompt_template,
        truncation_type=truncation_type,
        special_tokens_path=special_tokens_path,
    )


def qwen2_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: object = None,
    truncation_type: str = "right",
) -> HFTokenizer:
    """Tokenizer of a Qwen2 checkpoint; see `hf_tokenizer` and `qwen2_5_tokenizer`."""
    return qwen2_5_tokenizer(
        path, merges_file, special_tokens_path, max_seq_len, prompt_template, truncation_type
    )


def qwen3_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: object = None,
    truncation_type: str = "right",
) -> HFTokenizer:
    """Tokenizer of a Qwen3 checkpoint; see `hf_tokenizer` and `qwen2_5_tokenizer`."""
    return qwen2_5_tokenizer(
        path, merges_file, special_tokens_path, max_seq_len, prompt_template, truncation_type
    )

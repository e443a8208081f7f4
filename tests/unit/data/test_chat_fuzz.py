"""Mutated chat rows through every template: transformers' ids, or a refusal; answers are always trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.unit.data import chat_fuzz, folders
from torchtune_cp.data import HFTokenizer, chat_templates, hf_tokenizer, mask_messages
from torchtune_cp.data.template_forms import after_reasoning, as_turn, functions
from torchtune_cp.data.turns import parse_conversation
from torchtune_cp.errors import UserError

TEMPLATES = {
    **{
        f"family {n}": getattr(chat_templates, n) for n in ("CHATML", "LLAMA2", "LLAMA3", "MISTRAL")
    },
    **{n: getattr(folders, n) for n in ("CHATML_DEFAULT_SYSTEM", "MISTRAL", "REASONING")},
    **{n: getattr(chat_fuzz, n) for n in ("HERMES", "GENERATION", "LLAMA_TOOLS", "PARTS", "UPPER")},
    "reasoning with tools": chat_fuzz.REASONING,
    "no special tokens": folders.NO_SPECIAL_TOKENS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.byte_level_folder(tmp_path_factory.mktemp("fuzz"))


def as_given(turns: list[dict[str, Any]]) -> bool:
    """Whether no turn has what transformers renders otherwise: developers, parts of texts."""
    return not any(
        turn.get("role") == "developer" or isinstance(turn.get("content"), list) for turn in turns
    )


def check(ours: HFTokenizer, theirs: Any, seed: int) -> str:
    turns, tools = chat_fuzz.conversation(seed)
    try:
        read = parse_conversation(turns, "openai")
        messages = mask_messages(read, "train_on_assistant")
        ids, mask = ours.tokenize_messages(messages, variables={"tools": tools} if tools else None)
    except UserError:
        return "refused"
    if as_given(turns):
        reference = theirs.apply_chat_template(turns, tools=tools, return_dict=False)
        assert ids == reference, f"seed {seed}"
    trained = [token for token, masked in zip(ids, mask, strict=True) if not masked]
    text = ours.decode(trained, skip_special_tokens=False)
    behind = 0
    for message in messages:
        if message.masked or message.is_blank():
            continue
        for said in (
            after_reasoning(message.text()).strip(),
            *(call["name"] for call in functions(as_turn(message))),
        ):
            place = text.find(said, behind)
            assert place >= 0, f"seed {seed}: {said!r} is not trained on in its place"
            behind = place + len(said)
    return "rendered"


def run(folder: Path, name: str, seeds: range) -> Counter[str]:
    folders.set_template(folder, TEMPLATES[name])
    ours, theirs = hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    return Counter(check(ours, theirs, seed) for seed in seeds)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_mutated_rows_are_rendered_as_transformers_does_or_refused(folder: Path, name: str) -> None:
    found = run(folder, name, range(30))
    assert found["refused"]
    assert found["rendered"] or name == "UPPER"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_500_mutated_rows_are_rendered_as_transformers_does_or_refused(
    folder: Path, name: str
) -> None:
    found = run(folder, name, range(1000, 1500))
    assert found["refused"]
    assert found["rendered"] or name == "UPPER"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchtune_cp.data import HFTokenizer
from torchtune_cp.datasets import (
    SFTDataset,
    alpaca_cleaned_dataset,
    alpaca_dataset,
    chat_dataset,
    instruct_dataset,
)
from torchtune_cp.errors import UserError

Write = Callable[..., str]
END = "<|im_end|>"
TURNS = [("system", "S"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")]
OPENAI = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
FROM = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = {"conversations": [{"from": FROM[role], "value": text} for role, text in TURNS]}
TEXT = "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in TURNS)


def trained(ds: SFTDataset, tokenizer: HFTokenizer, index: int = 0) -> list[str]:
    """The runs of labels, as text."""
    sample = ds[index]
    runs: list[list[int]] = []
    before = -100
    for token, label in zip(sample["tokens"], sample["labels"], strict=True):
        assert label in (-100, token)
        if label != -100:
            if before == -100:
                runs.append([])
            runs[-1].append(label)
        before = label
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def text(ds: SFTDataset, tokenizer: HFTokenizer, index: int = 0) -> str:
    return tokenizer.decode(ds[index]["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("row", "column", "style"),
    [(OPENAI, "messages", "openai"), (SHAREGPT, "conversations", "sharegpt")],
)
@pytest.mark.parametrize(
    ("masking", "expected"),
    [
        ({}, ["A1" + END, "A2" + END]),
        ({"train_on_input": False}, ["A1" + END, "A2" + END]),
        ({"train_on_input": True}, ["Q1" + END, "A1" + END, "Q2" + END, "A2" + END]),
        (
            {"masking_strategy": "train_on_all"},
            ["Q1" + END, "A1" + END, "Q2" + END, "A2" + END],
        ),
        ({"masking_strategy": "train_on_assistant"}, ["A1" + END, "A2" + END]),
        ({"masking_strategy": "train_on_last"}, ["A2" + END]),
    ],
)
def test_two_turns_are_trained_on_as_asked_for(
    tokenizer: HFTokenizer,
    jsonl: Write,
    row: dict,
    column: str,
    style: str,
    masking: dict,
    expected: list[str],
) -> None:
    # D31
    ds = chat_dataset(
        tokenizer,
        source="json",
        data_files=jsonl(row),
        conversation_column=column,
        conversation_style=style,
        **masking,
    )
    assert text(ds, tokenizer) == TEXT
    assert trained(ds, tokenizer) == expected


def chat(tokenizer: HFTokenizer, files: str, **kwargs: Any) -> SFTDataset:
    defaults = {"conversation_column": "messages", "conversation_style": "openai"}
    return chat_dataset(tokenizer, source="json", data_files=files, **{**defaults, **kwargs})


def test_a_new_system_prompt_replaces_the_old(tokenizer: HFTokenizer, jsonl: Write) -> None:
    ds = chat(tokenizer, jsonl(OPENAI), new_system_prompt="NEW")
    assert text(ds, tokenizer) == TEXT.replace("S" + END, "NEW" + END)


def test_empty_conversations_are_skipped_and_counted(tokenizer: HFTokenizer, jsonl: Write) -> None:
    blank = {"messages": [{"role": "user", "content": " "}]}
    ds = chat(tokenizer, jsonl(OPENAI, {"messages": []}, blank))
    assert len(ds) == 1
    assert ds.stats.empty_skipped == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": None}, "column 'messages': must be a list of turns, not null"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "column 'messages': turn 0: 'content' must be a string, not null",
        ),
        (
            {"messages": [{"role": "user"}]},
            "column 'messages': turn 0.* 'content'",
        ),
    ],
)
def test_a_malformed_conversation_names_row_column_and_turn(
    tokenizer: HFTokenizer, jsonl: Write, row: dict, message: str
) -> None:
    files = jsonl(OPENAI, row)
    with pytest.raises(UserError, match=f"row 1 of .*: {message}"):
        chat(tokenizer, files)
    ds = chat(tokenizer, files, on_bad_row="skip")
    assert (len(ds), ds.stats.bad_skipped) == (1, 1)


def test_a_conversation_the_template_refuses_names_the_row(
    tokenizer: HFTokenizer, jsonl: Write
) -> None:
    tokenizer.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    assistant_first = {"messages": OPENAI["messages"][2:]}
    with pytest.raises(UserError, match=r"row 1 of .*roles: assistant, user, .*: user first"):
        chat(tokenizer, jsonl(OPENAI, assistant_first))
    ds = chat(tokenizer, jsonl(OPENAI, assistant_first), on_bad_row="skip")
    assert (len(ds), ds.stats.bad_skipped) == (1, 1)


def test_mistakes_show_before_any_row_is_read(tokenizer: HFTokenizer) -> None:
    with pytest.raises(
        UserError, match="conversation_style='chatml' is not known; allowed: openai"
    ):
        chat(tokenizer, "/no/such/file", conversation_style="chatml")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="the byte tokenizer has no chat template"):
        chat(tokenizer, "/no/such/file")


def test_a_missing_column_is_named(tokenizer: HFTokenizer, jsonl: Write) -> None:
    with pytest.raises(
        UserError,
        match=r"row 0 of .*no column 'messages'; columns: conversations .*conversation_col",
    ):
        chat(tokenizer, jsonl(SHAREGPT))


def test_overlong_conversations_are_split_with_their_labels(
    tokenizer: HFTokenizer, jsonl: Write
) -> None:
    files = jsonl(OPENAI)
    whole = chat(tokenizer, files)[0]
    ds = chat(tokenizer, files, max_seq_len=30, overlong="split")
    assert len(ds) == -(-len(whole["tokens"]) // 30)
    for key in ("tokens", "labels"):
        assert [value for i in range(len(ds)) for value in ds[i][key]] == whole[key]


class TestInstruct:
    def test_only_the_answer_is_trained_on(self, tokenizer: HFTokenizer, jsonl: Write) -> None:
        files = jsonl({"input": "Q", "output": "A"})
        ds = instruct_dataset(tokenizer, source="json", data_files=files)
        assert text(ds, tokenizer) == f"<|im_start|>user\nQ{END}\n<|im_start|>assistant\nA{END}\n"
        assert trained(ds, tokenizer) == ["A" + END]
        both = instruct_dataset(tokenizer, source="json", data_files=files, train_on_input=True)
        assert trained(both, tokenizer) == ["Q" + END, "A" + END]

    def test_columns_and_system_prompt_can_be_chosen(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        ds = instruct_dataset(
            tokenizer,
            source="json",
            data_files=jsonl({"q": "Q", "a": "A"}),
            column_map={"input": "q", "output": "a"},
            new_system_prompt="S",
        )
        assert text(ds, tokenizer).startswith(f"<|im_start|>system\nS{END}\n<|im_start|>user\nQ")

    def test_rows_without_prompt_or_answer_are_skipped_or_named(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        good, null = {"input": "Q", "output": "A"}, {"input": "Q", "output": None}
        files = jsonl(good, {"input": "", "output": "A"}, {"input": "Q", "output": " "})
        ds = instruct_dataset(tokenizer, source="json", data_files=files)
        assert (len(ds), ds.stats.empty_skipped) == (1, 2)
        with pytest.raises(UserError, match=r"row 1 of .*: column 'output' is null"):
            instruct_dataset(tokenizer, source="json", data_files=jsonl(good, null))

    def test_a_wrong_column_map_is_refused(self, tokenizer: HFTokenizer) -> None:
        for column_map in ({"input": "q"}, {"input": "q", "output": "a", "ouput": "a"}):
            with pytest.raises(UserError, match=r"column_map has .*must name input, output"):
                instruct_dataset(tokenizer, source="json", column_map=column_map)


class TestAlpaca:
    ROW = {"instruction": "Add {these}.", "input": "1 and 2", "output": "3"}  # noqa: RUF012
    PROMPT = (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {these}.\n\n### Input:\n1 and 2\n\n### Response:\n"
    )
    SHORT = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nAdd {these}.\n\n### Response:\n"
    )

    def test_prompt_and_answer_are_trained_on_by_default(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        files = jsonl(self.ROW)
        ds = alpaca_dataset(tokenizer, source="json", data_files=files)
        assert trained(ds, tokenizer) == [self.PROMPT + END, "3" + END]
        ds = alpaca_dataset(tokenizer, source="json", data_files=files, train_on_input=False)
        assert trained(ds, tokenizer) == ["3" + END]

    @pytest.mark.parametrize("change", [{"input": ""}, {"input": None}, None])
    def test_without_an_input_the_short_prompt_is_used(
        self, tokenizer: HFTokenizer, jsonl: Write, change: dict | None
    ) -> None:
        row = {k: v for k, v in self.ROW.items() if k != "input"} | (change or {})
        ds = alpaca_dataset(tokenizer, source="json", data_files=jsonl(row))
        assert trained(ds, tokenizer)[0] == self.SHORT + END

    def test_columns_can_be_mapped(self, tokenizer: HFTokenizer, jsonl: Write) -> None:
        ds = alpaca_cleaned_dataset(
            tokenizer,
            source="json",
            data_files=jsonl({"task": "Add {these}.", "answer": "3"}),
            column_map={"instruction": "task", "output": "answer"},
        )
        assert trained(ds, tokenizer) == [self.SHORT + END, "3" + END]

    def test_missing_fields_are_named(self, tokenizer: HFTokenizer, jsonl: Write) -> None:
        files = jsonl({"instruction": "x", "input": ""})
        with pytest.raises(UserError, match=r"row 0 of .*no column 'output'; .*column_map\.output"):
            alpaca_dataset(tokenizer, source="json", data_files=files)

    def test_the_default_sources_are_torchtunes(
        self, tokenizer: HFTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import datasets

        asked = []

        def load(source: str, **kwargs: Any) -> datasets.Dataset:
            asked.append((source, kwargs))
            return datasets.Dataset.from_list([self.ROW])

        monkeypatch.setattr(datasets, "load_dataset", load)
        alpaca_dataset(tokenizer)
        alpaca_cleaned_dataset(tokenizer, split="train[:10]")
        assert asked == [
            ("tatsu-lab/alpaca", {"split": "train"}),
            ("yahma/alpaca-cleaned", {"split": "train[:10]"}),
        ]

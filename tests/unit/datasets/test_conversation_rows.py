"""All that a row says is rendered as transformers renders it, or refused by name (F2, F3, F5, F7, H28)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.unit.data import chat_fuzz, folders
from torchtune_cp.data import HFTokenizer, byte_tokenizer, hf_tokenizer
from torchtune_cp.datasets import SFTDataset, alpaca_dataset, chat_dataset, instruct_dataset
from torchtune_cp.errors import UserError

Write = Callable[..., str]
USER = {"role": "user", "content": "How warm is it in Paris?"}
ANSWER = {"role": "assistant", "content": "22 degrees."}
CALL = {"id": "abcdefghi", "type": "function"}
CALL |= {"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "22"}
WITH_CALL = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, ANSWER]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.byte_level_folder(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def both(folder: Path) -> Callable[[str], tuple[HFTokenizer, Any]]:
    def load(template: str) -> tuple[HFTokenizer, Any]:
        folders.set_template(folder, template)
        return hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)

    return load


def chat(tokenizer: HFTokenizer, files: str, **kwargs: Any) -> SFTDataset:
    settings = {"conversation_column": "messages", "conversation_style": "openai", **kwargs}
    ds = chat_dataset(tokenizer, source="json", data_files=files, **settings)
    assert isinstance(ds, SFTDataset)
    return ds


def trained(ds: SFTDataset, tokenizer: HFTokenizer, index: int = 0) -> list[str]:
    runs: list[list[int]] = [[]]
    for label in ds[index]["labels"]:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


class TestTools:
    @pytest.mark.parametrize("template", ["HERMES", "REASONING", "LLAMA_TOOLS"])
    @pytest.mark.parametrize("as_text", [False, True])
    def test_a_rows_tools_and_calls_are_rendered(
        self, both: Any, jsonl: Write, template: str, as_text: bool
    ) -> None:
        ours, theirs = both(getattr(chat_fuzz, template))
        tools = json.dumps(chat_fuzz.TOOLS) if as_text else chat_fuzz.TOOLS
        turns = json.loads(json.dumps(WITH_CALL))
        if as_text:
            function = turns[1]["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(function["arguments"])
        # A second row with other keys: none of them may enter the first.
        other = {"messages": [USER, ANSWER], "tools": None, "id": 7}
        ds = chat(ours, jsonl({"messages": turns, "tools": tools}, other))
        expected = theirs.apply_chat_template(WITH_CALL, tools=chat_fuzz.TOOLS, return_dict=False)
        assert ds[0]["tokens"] == expected
        plain = theirs.apply_chat_template([USER, ANSWER], return_dict=False)
        assert ds[1]["tokens"] == plain
        call, answer = trained(ds, ours)
        assert '"get_weather"' in call
        assert '{"city": "Paris", "days": 3}' in call
        assert answer.startswith("22 degrees.<|")

    def test_older_names_and_sharegpt_say_the_same(self, both: Any, jsonl: Write) -> None:
        ours, _ = both(chat_fuzz.HERMES)
        tools = [chat_fuzz.TOOLS[0]["function"]]
        function = CALL["function"]
        older = [
            USER,
            {"role": "assistant", "content": None, "function_call": function},
            {"role": "function", "name": "get_weather", "content": "22"},
            ANSWER,
        ]
        sharegpt = [
            {"from": "human", "value": USER["content"]},
            {"from": "function_call", "value": json.dumps(function)},
            {"from": "observation", "value": "22"},
            {"from": "gpt", "value": ANSWER["content"]},
        ]
        rows = [{"messages": WITH_CALL, "tools": chat_fuzz.TOOLS}]
        expected = chat(ours, jsonl(*rows))[0]
        ds = chat(ours, jsonl({"messages": older, "functions": tools}))
        assert ds[0] == expected
        row = {"messages": sharegpt, "tools": json.dumps(chat_fuzz.TOOLS)}
        assert chat(ours, jsonl(row), conversation_style="sharegpt")[0] == expected

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (
                {"messages": [USER, ANSWER], "tools": chat_fuzz.TOOLS},
                "the row has tools, which the",
            ),
            (
                {"messages": WITH_CALL},
                r"turn 1 \(assistant\) has 'tool_calls', which the chat temp",
            ),
            ({"messages": [USER, ANSWER], "tools": "not json"}, "'tools': must be a list of tools"),
            ({"messages": [USER, ANSWER], "images": ["x.png"]}, "'images' holds what a text model"),
            ({"messages": [USER, ANSWER], "documents": [{"text": "d"}]}, "'documents': the chat"),
            (
                {"messages": [USER, {**ANSWER, "reasoning_content": "hot"}]},
                r"turn 1 \(assistant\) has 'reasoning_content', which the chat template does not",
            ),
            (
                {"messages": [USER, {**ANSWER, "content": [{"type": "image_url"}]}]},
                "turn 1: 'content' has a part that is not text .*'image_url'",
            ),
        ],
    )
    def test_what_the_template_does_not_render_is_refused(
        self, tokenizer: HFTokenizer, jsonl: Write, row: dict, message: str
    ) -> None:
        with pytest.raises(UserError, match=f"row 0 of .*{message}"):
            chat(tokenizer, jsonl(row))


def test_reasoning_is_rendered_and_trained_on_under_every_name(both: Any, jsonl: Write) -> None:
    ours, theirs = both(chat_fuzz.REASONING)
    expected = ["<think>\nhot\n</think>\n\n22 degrees." + END]
    for extra in ({"reasoning_content": "hot"}, {"thinking": "hot"}, {"reasoning": "hot"}):
        turns = [USER, {**ANSWER, **extra}]
        ds = chat(ours, jsonl({"messages": turns}))
        assert ds[0]["tokens"] == theirs.apply_chat_template(turns, return_dict=False)
        assert trained(ds, ours) == expected
    parts = [{"type": "thinking", "thinking": "hot"}, {"type": "text", "text": "22 degrees."}]
    assert (
        trained(chat(ours, jsonl({"messages": [USER, {**ANSWER, "content": parts}]})), ours)
        == expected
    )


def test_the_templates_own_marks_are_transformers_assistant_mask(both: Any, jsonl: Write) -> None:
    ours, theirs = both(chat_fuzz.GENERATION)
    turns = [*WITH_CALL, USER, {**ANSWER, "reasoning_content": "hot"}]
    ds = chat(ours, jsonl({"messages": turns, "tools": chat_fuzz.TOOLS}))
    reference = theirs.apply_chat_template(
        turns, tools=chat_fuzz.TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ds[0]["tokens"] == reference["input_ids"]
    assert [label != -100 for label in ds[0]["labels"]] == [
        m == 1 for m in reference["assistant_masks"]
    ]
    last = chat(ours, jsonl({"messages": turns}), masking_strategy="train_on_last")
    assert trained(last, ours) == ["<think>\nhot\n</think>\n\n22 degrees." + END]


class TestSystem:
    def test_a_column_of_its_own_is_the_system_turn(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        expected = chat(
            tokenizer, jsonl({"messages": [{"role": "system", "content": "S"}, USER, ANSWER]})
        )[0]
        for column in ("system", "system_prompt", "system_message"):
            assert chat(tokenizer, jsonl({"messages": [USER, ANSWER], column: "S"}))[0] == expected
        pair = {"prompt": USER["content"], "completion": ANSWER["content"], "system": "S"}
        assert instruct_dataset(tokenizer, source="json", data_files=jsonl(pair))[0] == expected
        two = {"messages": [{"role": "system", "content": "T"}, USER, ANSWER], "system": "S"}
        with pytest.raises(UserError, match="column 'system' is not that of the first turn"):
            chat(tokenizer, jsonl(two))

    def test_a_developers_turn_is_a_system_turn_where_the_template_knows_no_developer(
        self, both: Any, jsonl: Write
    ) -> None:
        turns = [{"role": "developer", "content": "S"}, USER, ANSWER]
        ours, theirs = both(folders.CHATML)
        kept = theirs.apply_chat_template(turns, return_dict=False)
        assert chat(ours, jsonl({"messages": turns}))[0]["tokens"] == kept
        ours, theirs = both(chat_fuzz.HERMES)
        system = [{**turns[0], "role": "system"}, USER, ANSWER]
        kept = theirs.apply_chat_template(system, return_dict=False)
        assert chat(ours, jsonl({"messages": turns}))[0]["tokens"] == kept


class TestPairs:
    def test_prompts_and_completions_are_texts_or_turns(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        for prompt, completion in (
            (USER["content"], ANSWER["content"]),
            ([USER], [ANSWER]),
            ([*earlier, USER], [ANSWER]),
        ):
            files = jsonl({"prompt": prompt, "completion": completion})
            ds = instruct_dataset(tokenizer, source="json", data_files=files)
            assert trained(ds, tokenizer) == ["22 degrees." + END]

    def test_an_alpaca_rows_history_comes_first(self, tokenizer: HFTokenizer, jsonl: Write) -> None:
        row = {"instruction": "I", "output": "O", "history": [["a", "b"]]}
        ds = alpaca_dataset(tokenizer, source="json", data_files=jsonl(row), train_on_input=False)
        assert trained(ds, tokenizer) == ["b" + END, "O" + END]


class TestWeights:
    @pytest.mark.parametrize(
        "off", [{"weight": 0}, {"train": False}, {"mask": 1}, {"masked": True}]
    )
    def test_a_turn_of_weight_0_is_not_trained_on(
        self, tokenizer: HFTokenizer, jsonl: Write, off: dict
    ) -> None:
        turns = [USER, {**ANSWER, "content": "no", **off}, USER, {**ANSWER, "weight": 1}]
        assert trained(chat(tokenizer, jsonl({"messages": turns})), tokenizer) == [
            "22 degrees." + END
        ]

    def test_other_weights_are_refused(self, tokenizer: HFTokenizer, jsonl: Write) -> None:
        with pytest.raises(UserError, match=r"turn 1: 'weight' is 0\.5; allowed: 0 and 1"):
            chat(tokenizer, jsonl({"messages": [USER, {**ANSWER, "weight": 0.5}]}))


def test_a_template_that_rewrites_the_answer_is_refused(both: Any, jsonl: Write) -> None:
    ours, _ = both(chat_fuzz.UPPER)
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "abc"}]
    with pytest.raises(UserError, match=r"row 0 of .*cannot tell which tokens are turn 1 \(assist"):
        chat(ours, jsonl({"messages": turns}))


def test_an_unknown_role_is_refused_with_the_allowed_ones(
    tokenizer: HFTokenizer, jsonl: Write
) -> None:
    turns = [USER, {**ANSWER, "role": "model"}]
    with pytest.raises(UserError, match=r"turn 1: 'role' is 'model'; allowed: system, .*assistant"):
        chat(tokenizer, jsonl({"messages": turns}))


class TestNothingToTrain:
    LONG = [{"role": "user", "content": "x" * 200}, ANSWER]  # noqa: RUF012

    def test_rows_are_left_out_and_counted_by_cause(
        self, jsonl: Write, caplog: pytest.LogCaptureFixture
    ) -> None:
        rows = [
            [USER, ANSWER],
            self.LONG,
            [USER],
            [USER, {**ANSWER, "content": " "}],
            [USER, {**ANSWER, "weight": 0}],
        ]
        with caplog.at_level(logging.INFO):
            ds = chat(byte_tokenizer(128), jsonl(*({"messages": turns, "id": 1} for turns in rows)))
        assert len(ds) == 1
        line = caplog.messages[-1]
        assert (
            "5 rows, 1 samples, 4 samples with nothing to train on (1 blank answer, 1 no assistant"
        )
        for cause in (
            "1 blank answer",
            "1 no assistant turn",
            "1 prompt fills max_seq_len",
            "1 weight 0",
        ):
            assert cause in line
        assert "5 rows, 1 samples, 4 samples with nothing to train on" in line
        assert "is not read: column id" in line
        assert caplog.records[-1].levelno == logging.WARNING

    @pytest.mark.parametrize("policy", ["truncate", "drop"])
    def test_none_left_is_an_error_before_the_first_step(self, jsonl: Write, policy: str) -> None:
        with pytest.raises(UserError, match=r"no samples in .*: 1 rows, 0 samples, 1 "):
            chat(byte_tokenizer(128), jsonl({"messages": self.LONG}), overlong=policy)
        packed = chat_dataset(
            byte_tokenizer(128),
            source="json",
            data_files=jsonl({"messages": self.LONG}),
            conversation_column="messages",
            conversation_style="openai",
            packed=True,
            overlong=policy,
        )
        with pytest.raises(UserError, match="no samples in"):
            len(packed)


def test_a_stop_token_that_is_never_trained_on_is_told_once(
    both: Any, jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    files = jsonl({"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]})
    ours, _ = both(folders.CHATML)  # ends turns with <|im_end|>; the eos token is <|end_of_text|>
    chat(ours, files)
    told = [m for m in caplog.messages if "no sample trains on a stop token" in m]
    assert len(told) == 1
    caplog.clear()
    ours, _ = both(folders.CHATML.replace("'<|im_end|>'", "eos_token"))
    chat(ours, files)
    assert not caplog.messages

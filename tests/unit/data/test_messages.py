from __future__ import annotations

import pytest

from torchtune_cp.data import MaskingStrategy, Message, mask_messages, parse_conversation
from torchtune_cp.data.messages import resolve_masking_strategy, with_system_prompt
from torchtune_cp.errors import UserError

CHAT = [
    Message("system", "s"),
    Message("user", "q1"),
    Message("assistant", "a1"),
    Message("user", "q2"),
    Message("assistant", "a2"),
    Message("user", "q3"),
]


@pytest.mark.parametrize(
    ("strategy", "trained"),
    [
        ("train_on_all", ["q1", "a1", "q2", "a2", "q3"]),
        ("train_on_assistant", ["a1", "a2"]),
        ("train_on_last", ["a2"]),
    ],
)
def test_each_strategy_unmasks_its_turns_and_never_the_system_turn(
    strategy: str, trained: list[str]
) -> None:
    masked = mask_messages(CHAT, strategy)
    assert [m.content for m in masked if not m.masked] == trained
    assert [(m.role, m.content) for m in masked] == [(m.role, m.content) for m in CHAT]


@pytest.mark.parametrize("strategy", list(MaskingStrategy))
def test_without_an_assistant_turn_only_train_on_all_trains(strategy: MaskingStrategy) -> None:
    trained = [m for m in mask_messages(CHAT[:2], strategy) if not m.masked]
    assert bool(trained) is (strategy is MaskingStrategy.TRAIN_ON_ALL)


def test_train_on_input_and_masking_strategy_say_the_same_thing() -> None:
    default = MaskingStrategy.TRAIN_ON_ASSISTANT
    assert resolve_masking_strategy(None, None, default) is default
    assert resolve_masking_strategy(None, True, default) is MaskingStrategy.TRAIN_ON_ALL
    assert resolve_masking_strategy(None, False, MaskingStrategy.TRAIN_ON_ALL) is default
    assert resolve_masking_strategy("train_on_last", False, default).value == "train_on_last"
    with pytest.raises(UserError, match="contradicts masking_strategy='train_on_last'"):
        resolve_masking_strategy("train_on_last", True, default)
    with pytest.raises(UserError, match="masking_strategy='last' is not known; allowed: train_on_"):
        resolve_masking_strategy("last", None, default)


def test_a_new_system_prompt_replaces_the_old() -> None:
    messages = with_system_prompt(CHAT, "new")
    assert [(m.role, m.content) for m in messages[:2]] == [("system", "new"), ("user", "q1")]
    assert sum(m.role == "system" for m in messages) == 1
    assert with_system_prompt(CHAT[1:], "new")[0].content == "new"
    assert with_system_prompt(CHAT, None) == CHAT


def test_both_styles_are_read() -> None:
    expected = [Message("system", "s"), Message("user", "q"), Message("assistant", "a")]
    sharegpt = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
    ]
    openai = [
        {"role": "system", "content": "s", "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a"},
    ]
    assert parse_conversation(sharegpt, "sharegpt") == expected
    assert parse_conversation(openai, "openai") == expected
    assert parse_conversation([], "openai") == []


@pytest.mark.parametrize(
    ("turns", "style", "message"),
    [
        (None, "openai", "must be a list of turns, not null"),
        ("hello", "openai", "must be a list of turns, not str"),
        (["hello"], "openai", "turn 0 must be a mapping, not str"),
        (
            [{"from": "human", "value": "q"}],
            "openai",
            r"turn 0 has no 'role' \(it has: from, value\)",
        ),
        ([{"role": "user"}], "openai", "turn 0 has no 'content'"),
        ([{"role": None, "content": "q"}], "openai", "turn 0: 'role' must be a string, not null"),
        (
            [{"role": "user", "content": None}],
            "openai",
            "turn 0: 'content' must be a string, not null",
        ),
        ([{"from": "human", "value": 3}], "sharegpt", "turn 0: 'value' must be a string, not int"),
        (
            [{"from": "alien", "value": "q"}],
            "sharegpt",
            "turn 0: 'from' is 'alien'; allowed: system",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "openai",
            "turn 0: 'content' has a part that is not text",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{}]}],
            "openai",
            "turn 0: 'tool_calls' has a call without a function's name",
        ),
        ([], "alpaca", "conversation_style='alpaca' is not known; allowed: openai, sharegpt"),
    ],
)
def test_a_malformed_conversation_names_turn_and_field(
    turns: object, style: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parse_conversation(turns, style)

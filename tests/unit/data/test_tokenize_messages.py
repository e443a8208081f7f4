"""Which tokens of a conversation are trained on (case D31), against transformers' token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.unit.data import folders
from torchtune_cp.data import HFTokenizer, Message, byte_tokenizer, hf_tokenizer, mask_messages
from torchtune_cp.errors import UserError

TWO_TURNS = [
    Message("user", "Who wrote Hamlet?"),
    Message("assistant", "Shakespeare wrote Hamlet."),
    Message("user", "What time is it?"),
    Message("assistant", "10:00 AM."),
]
WITH_SYSTEM = [Message("system", "Be brief."), *TWO_TURNS]


@pytest.fixture(scope="module")
def plain_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": folders.byte_level_folder(root / "byte_level"),
        "metaspace": folders.metaspace_folder(root / "metaspace"),
    }


def with_template(plain_folders: dict[str, Path], kind: str, template: str) -> Path:
    return folders.set_template(plain_folders[kind], template)


def trained_pieces(tokenizer: HFTokenizer, messages: list[Message]) -> list[str]:
    """The text of each run of tokens that is trained on."""
    ids, mask = tokenizer.tokenize_messages(messages)
    assert len(ids) == len(mask)
    pieces: list[list[int]] = []
    previous = True
    for token, masked in zip(ids, mask, strict=True):
        if not masked:
            if previous:
                pieces.append([])
            pieces[-1].append(token)
        previous = masked
    return [tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]


def as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("byte_level", folders.CHATML),
        ("byte_level", folders.CHATML_DEFAULT_SYSTEM),
        ("byte_level", folders.LLAMA3),
        ("byte_level", folders.REASONING),
        ("byte_level", folders.NO_SPECIAL_TOKENS),
        ("metaspace", folders.MISTRAL),
        ("metaspace", folders.CHATML),
    ],
)
def test_ids_and_text_are_those_of_transformers(
    plain_folders: dict[str, Path], kind: str, template: str
) -> None:
    folder = with_template(plain_folders, kind, template)
    ours, theirs = hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    conversations = [TWO_TURNS, TWO_TURNS[:1], [Message("user", "  blanks \n around  ")]]
    if template != folders.MISTRAL:
        conversations.append(WITH_SYSTEM)
    for messages in conversations:
        chat = as_dicts(messages)
        assert ours.tokenize_messages(messages)[0] == theirs.apply_chat_template(
            chat, return_dict=False
        )
        assert ours.tokenize_messages(chat)[0] == ours.tokenize_messages(messages)[0]
        for prompt in (False, True):
            assert ours.render_messages(messages, prompt) == theirs.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt
            )


ENDS = {"CHATML": "<|im_end|>", "CHATML_DEFAULT_SYSTEM": "<|im_end|>", "LLAMA3": "<|eot_id|>"}


@pytest.mark.parametrize("name", list(ENDS))
class TestMultiTurnMasks:
    """D31: exact spans for training on all, on the assistant, on the last answer."""

    @pytest.fixture
    def tokenizer(self, plain_folders: dict[str, Path], name: str) -> HFTokenizer:
        return hf_tokenizer(with_template(plain_folders, "byte_level", getattr(folders, name)))

    def test_train_on_all(self, tokenizer: HFTokenizer, name: str) -> None:
        end = ENDS[name]
        messages = mask_messages(WITH_SYSTEM, "train_on_all")
        assert trained_pieces(tokenizer, messages) == [m.content + end for m in TWO_TURNS]

    def test_train_on_assistant(self, tokenizer: HFTokenizer, name: str) -> None:
        end = ENDS[name]
        messages = mask_messages(WITH_SYSTEM, "train_on_assistant")
        assert trained_pieces(tokenizer, messages) == [
            "Shakespeare wrote Hamlet." + end,
            "10:00 AM." + end,
        ]

    def test_train_on_last(self, tokenizer: HFTokenizer, name: str) -> None:
        messages = mask_messages(WITH_SYSTEM, "train_on_last")
        assert trained_pieces(tokenizer, messages) == ["10:00 AM." + ENDS[name]]

    def test_nothing_is_trained_on_when_all_is_masked(
        self, tokenizer: HFTokenizer, name: str
    ) -> None:
        messages = [Message(m.role, m.content, masked=True) for m in WITH_SYSTEM]
        assert all(tokenizer.tokenize_messages(messages)[1])


def test_exact_mask_token_by_token() -> None:
    tokenizer = byte_tokenizer()
    ids, mask = tokenizer.tokenize_messages([Message("user", "q", True), Message("assistant", "a")])
    start, end = 259, 260
    user, assistant = list(b"user\nq"), list(b"assistant\n")
    assert ids == [start, *user, end, 10, start, *assistant, ord("a"), end, 10]
    # The content "a" and its end-of-turn token; not the line break after it.
    assert [i for i, masked in enumerate(mask) if not masked] == [len(ids) - 3, len(ids) - 2]


def test_word_pieces_that_join_header_and_content_are_trained_on(
    plain_folders: dict[str, Path],
) -> None:
    # Mistral writes "[/INST]" and the answer without a special token between them.
    tokenizer = hf_tokenizer(with_template(plain_folders, "metaspace", folders.MISTRAL))
    messages = mask_messages(TWO_TURNS, "train_on_assistant")
    pieces = trained_pieces(tokenizer, messages)
    assert [piece.strip() for piece in pieces] == [
        "Shakespeare wrote Hamlet.</s>",
        "10:00 AM.</s>",
    ]
    on_all = trained_pieces(tokenizer, mask_messages(TWO_TURNS, "train_on_all"))
    assert "Who wrote Hamlet?" in on_all[0]
    assert "[INST]" not in on_all[0]


def test_without_special_tokens_a_turn_ends_where_its_own_text_ends(
    plain_folders: dict[str, Path],
) -> None:
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", folders.NO_SPECIAL_TOKENS))
    messages = mask_messages(TWO_TURNS, "train_on_assistant")
    # The blank before an answer is part of the answer's first token.
    assert trained_pieces(tokenizer, messages) == [" Shakespeare wrote Hamlet.\n", " 10:00 AM.\n"]


def test_contents_that_repeat_headers_or_each_other_do_not_mislead(
    plain_folders: dict[str, Path],
) -> None:
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", folders.CHATML))
    messages = [
        Message("user", "assistant", True),
        Message("assistant", "user"),
        Message("user", "user", True),
        Message("assistant", "assistant"),
    ]
    assert trained_pieces(tokenizer, messages) == ["user<|im_end|>", "assistant<|im_end|>"]


def test_trimmed_contents_are_found(plain_folders: dict[str, Path]) -> None:
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", folders.LLAMA3))
    messages = [Message("user", "  q\n", True), Message("assistant", "\n\n  answer  ")]
    assert trained_pieces(tokenizer, messages) == ["answer<|eot_id|>"]


def test_blanks_inside_a_content_are_trained_on(plain_folders: dict[str, Path]) -> None:
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", folders.CHATML))
    code = "def f():\n            return 1\n    "
    messages = [Message("user", "q", True), Message("assistant", code)]
    assert trained_pieces(tokenizer, messages) == [code + "<|im_end|>"]


def test_reasoning_dropped_from_earlier_turns_is_handled(plain_folders: dict[str, Path]) -> None:
    folder = with_template(plain_folders, "byte_level", folders.REASONING)
    tokenizer = hf_tokenizer(folder)
    messages = [
        Message("user", "Who wrote Hamlet?", True),
        Message("assistant", "<think>easy</think>\nShakespeare."),
        Message("user", "What time is it?", True),
        Message("assistant", "<think>clock</think>\n10:00 AM."),
    ]
    assert trained_pieces(tokenizer, messages) == [
        "Shakespeare.<|im_end|>",
        "<think>clock</think>\n10:00 AM.<|im_end|>",
    ]
    assert tokenizer.tokenize_messages(messages)[0] == AutoTokenizer.from_pretrained(
        folder
    ).apply_chat_template(as_dicts(messages), return_dict=False)
    # A content that its own header repeats.
    all_turns = [Message("user", "user"), *(Message(m.role, m.content) for m in messages[1:])]
    assert trained_pieces(tokenizer, all_turns)[0] == "user<|im_end|>"


def test_a_template_that_rewrites_a_trained_turn_beyond_recognition_is_refused(
    plain_folders: dict[str, Path],
) -> None:
    reversing = "{% for m in messages %}{{ (messages | length) ~ m.role ~ (m.content | upper) }}{% endfor %}"
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", reversing))
    masked = [Message("user", "ask", True), Message("assistant", "say", True)]
    assert all(tokenizer.tokenize_messages(masked)[1])
    with pytest.raises(UserError, match=r"cannot tell which tokens are turn 1 \(assistant\)"):
        tokenizer.tokenize_messages([masked[0], Message("assistant", "say")])


def test_a_system_prompt_moved_into_the_user_turn_is_found(
    plain_folders: dict[str, Path],
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}"
        "{{ '[INST] ' + messages[0].content + '\n\n' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", template))
    messages = mask_messages(WITH_SYSTEM[:3], "train_on_assistant")
    assert trained_pieces(tokenizer, messages) == ["Shakespeare wrote Hamlet.<|im_end|>"]


def test_without_end_tokens_the_text_stops_at_the_last_answer(
    plain_folders: dict[str, Path],
) -> None:
    tokenizer = hf_tokenizer(with_template(plain_folders, "byte_level", folders.CHATML))
    whole, _ = tokenizer.tokenize_messages(TWO_TURNS)
    ids, mask = tokenizer.tokenize_messages(TWO_TURNS, add_end_tokens=False)
    assert ids == whole[: len(ids)]
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\n10:00 AM.")
    assert len(mask) == len(ids)
    assert (
        tokenizer.tokenize_messages(TWO_TURNS[:3], add_end_tokens=False)[0]
        == (tokenizer.tokenize_messages(TWO_TURNS[:3])[0])
    )


def test_an_empty_conversation_has_no_tokens() -> None:
    assert byte_tokenizer().tokenize_messages([]) == ([], [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet="ab \n<|é☃", min_size=1, max_size=12), min_size=2, max_size=6),
    st.sampled_from([folders.CHATML, folders.CHATML_DEFAULT_SYSTEM, folders.REASONING]),
)
def test_trained_tokens_are_the_contents_whatever_they_are(
    contents: list[str], template: str
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    roles = ["user", "assistant"] * 3
    messages = [
        Message(role, content, masked=role == "user")
        for role, content in zip(roles, contents, strict=False)
    ]
    ids, mask = tokenizer.tokenize_messages(messages)
    trained = [token for token, masked in zip(ids, mask, strict=True) if not masked]
    expected: list[int] = []
    for message in messages:
        if message.role == "assistant" and message.content.strip():
            expected += [*message.content.encode(), 260]
    assert trained == expected


class TestTemplates:
    def test_a_folder_without_a_template_says_what_is_missing(self, tmp_path: Path) -> None:
        tokenizer = hf_tokenizer(folders.byte_level_folder(tmp_path))
        with pytest.raises(UserError, match=r"has no chat template .*tokenizer\.chat_template"):
            tokenizer.tokenize_messages(TWO_TURNS)

    def test_a_template_file_wins_over_the_config(self, tmp_path: Path) -> None:
        folder = folders.set_template(folders.byte_level_folder(tmp_path), folders.LLAMA3)
        (folder / "chat_template.jinja").write_text(folders.CHATML)
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            as_dicts(TWO_TURNS), tokenize=False
        )
        assert hf_tokenizer(folder).render_messages(TWO_TURNS) == expected
        assert "<|im_start|>" in expected

    def test_named_templates(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path)
        rag = {"name": "rag", "template": "rag"}
        folders.set_template(folder, [rag, {"name": "default", "template": folders.CHATML}])  # type: ignore[arg-type]
        assert hf_tokenizer(folder).chat_template == folders.CHATML
        folders.set_template(folder, [rag])  # type: ignore[arg-type]
        assert hf_tokenizer(folder).chat_template == "rag"
        folders.set_template(folder, [rag, {"name": "tool", "template": "t"}])  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"several chat templates \(rag, tool\)"):
            hf_tokenizer(folder)

    def test_a_template_can_be_given_as_text_or_file(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path)
        file = tmp_path / "mine.jinja"
        file.write_text(folders.CHATML)
        for given_template in (folders.CHATML, str(file)):
            assert (
                hf_tokenizer(folder, chat_template=given_template).chat_template == folders.CHATML
            )
        with pytest.raises(UserError, match="neither a jinja2 template nor an existing file"):
            hf_tokenizer(folder, chat_template="chatml")

    def test_what_templates_may_use(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = (
            "{{ strftime_now('%Y') | length }}"
            "{{ {'a': '<b>', 'é': 1} | tojson }}"
            "{%- for m in messages %}\n"
            "   {% if loop.index0 == 1 %}{% break %}{% endif %}\n"
            "{% generation %}{{ m.content }}{% endgeneration %}\n"
            "{% endfor %}"
            "{{ eos_token }}{{ tools is none }}{{ undefined_name }}"
        )
        assert tokenizer.render_messages(TWO_TURNS) == (
            '4{"a": "<b>", "é": 1}Who wrote Hamlet?<|end_of_text|>True'
        )

    def test_a_template_cannot_reach_python(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
        with pytest.raises(UserError, match="does not accept this conversation"):
            tokenizer.render_messages(TWO_TURNS)
        tokenizer.chat_template = "{{ messages.append(1) }}"
        with pytest.raises(UserError, match="does not accept this conversation"):
            tokenizer.render_messages(TWO_TURNS)

    def test_a_refusal_carries_the_templates_own_words(
        self, plain_folders: dict[str, Path]
    ) -> None:
        tokenizer = hf_tokenizer(with_template(plain_folders, "metaspace", folders.MISTRAL))
        with pytest.raises(
            UserError, match=r"roles: user, user\): Conversation roles must alternate"
        ):
            tokenizer.tokenize_messages([TWO_TURNS[0], TWO_TURNS[0]])

    def test_a_template_with_a_syntax_error_is_named_with_its_line(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = "\n{% for %}"
        with pytest.raises(UserError, match=r"not valid jinja2 \(line 2\)"):
            tokenizer.render_messages(TWO_TURNS)

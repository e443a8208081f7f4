"""Whatever file of a folder says it: tokens, special ids and templates are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import AutoTokenizer

from tests.unit.data import folders
from torchtune_cp.data import HFTokenizer, hf_tokenizer, qwen2_5_tokenizer
from torchtune_cp.data.chat_templates import CHATML
from torchtune_cp.datasets import chat_dataset
from torchtune_cp.errors import UserError

BOS, EOS, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
CHAT = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A fox."}]
OTHER = "{% for m in messages %}{{ m['content'] + '<|eot_id|>' }}{% endfor %}"
#: What text is made of, tokens of all the folders among it.
PIECES = [
    *folders.SPECIALS,
    *(
        "<own>",
        "<extra>",
        "<tool>",
        "added",
        "Hello",
        " World",
        "'s",
        "  ",
        "\n",
        "\t",
        "1234",
        "é",
    ),
    *("e\u0301", "東京", "☃", "\U0001f600", "ab", "<", "|>", "fox", "The quick"),
]


def _dict(text: str, **flags: Any) -> dict[str, Any]:
    return {"content": text, **FLAGS, **flags}


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    folders.write_config(folder, {k: v for k, v in {**kept, **changes}.items() if v is not ...})


def _json(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(state)
    _json(folder, "tokenizer.json", state)


def _post_processor(folder: Path, single: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    used = [(t, tokenizer.token_to_id(t)) for t in folders.SPECIALS if t in single]
    template = TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=used)
    tokenizer.post_processor = Sequence([ByteLevel(), template])
    tokenizer.save(str(folder / "tokenizer.json"))


#: How a byte-level folder (406 tokens: BOS and EOS named by tokenizer_config.json) is changed.
CHANGES: dict[str, Callable[[Path], object]] = {
    "as it is": lambda f: None,
    "named as dicts": lambda f: _config(
        f,
        bos_token={"__type": "AddedToken", **_dict(BOS)},
        eos_token={"__type": "AddedToken", **_dict(EOT)},
    ),
    "special_tokens_map wins": lambda f: (
        _json(f, "special_tokens_map.json", {"eos_token": _dict(EOT), "pad_token": "<|im_end|>"}),
    ),
    "special_tokens_map has a null": lambda f: _json(
        f, "special_tokens_map.json", {"eos_token": None}
    ),
    "special_tokens_map does not count": lambda f: (
        _json(
            f, "special_tokens_map.json", {"eos_token": EOT, "additional_special_tokens": ["<own>"]}
        ),
        _config(f, added_tokens_decoder={"0": _dict("!", special=False)}),
    ),
    "listed by the config": lambda f: _config(
        f,
        added_tokens_decoder={
            "406": _dict("<own>", special=True),
            "407": _dict("added", normalized=True),
        },
    ),
    "listed with other flags": lambda f: _config(
        f, added_tokens_decoder={"403": _dict(EOT, special=True, lstrip=True, rstrip=True)}
    ),
    "added_tokens.json": lambda f: (
        _json(f, "added_tokens.json", {"<own>": 406, "added": 407}),
        _json(f, "special_tokens_map.json", {"additional_special_tokens": ["<own>"]}),
    ),
    "named, not in the vocabulary": lambda f: _config(f, pad_token="<own>", eos_token="<extra>"),
    "a word of the vocabulary is named": lambda f: _config(f, pad_token="fox"),
    "additional": lambda f: _config(f, additional_special_tokens=["<own>", EOT, "<extra>"]),
    "extra": lambda f: _config(f, extra_special_tokens=["<extra>", "<own>"]),
    "extra with names": lambda f: _config(f, extra_special_tokens={"image_token": "<own>"}),
    "of the model's own": lambda f: _config(f, tool_token="<tool>", model_max_length=5),
    "split": lambda f: _config(f, split_special_tokens=True),
    "no post-processor": lambda f: _edit(f, lambda s: s.update(post_processor=None)),
    "add_bos and add_eos": lambda f: _config(f, add_bos_token=True, add_eos_token=True),
    "bos and eos": lambda f: _post_processor(f, f"{BOS} $A {EOS}"),
    "two tokens before": lambda f: _post_processor(f, f"<|im_start|> {EOT} $A"),
    "cls and sep": lambda f: (
        _post_processor(f, "<|im_start|> $A <|im_end|>"),
        _config(f, bos_token=..., eos_token=..., cls_token="<|im_start|>", sep_token="<|im_end|>"),
    ),
    "slow llama class": lambda f: _config(f, tokenizer_class="LlamaTokenizer"),
    "fast llama class": lambda f: _config(f, tokenizer_class="LlamaTokenizerFast", legacy=False),
    "new class": lambda f: _config(f, tokenizer_class="TokenizersBackend"),
    "class of a stranger": lambda f: _config(f, tokenizer_class="NobodysTokenizer"),
    "left padding": lambda f: _config(f, padding_side="left", pad_token=EOT, model_max_length=1),
    "template": lambda f: _config(f, chat_template=folders.CHATML),
    "templates with names": lambda f: _config(
        f,
        chat_template=[
            {"name": "default", "template": folders.CHATML},
            {"name": "tool_use", "template": OTHER},
        ],
    ),
    "template in a file": lambda f: (
        (f / "chat_template.jinja").write_text(folders.CHATML),
        _config(f, chat_template=OTHER),
    ),
    "templates in files": lambda f: (
        (f / "chat_template.jinja").write_text(folders.CHATML),
        (f / "additional_chat_templates").mkdir(),
        (f / "additional_chat_templates" / "tool_use.jinja").write_text(OTHER),
        _config(f, chat_template=OTHER),
    ),
}


def _texts(seed: str, count: int = 25) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randrange(1, 12))) for _ in range(count)]


def _assert_as_transformers(ours: HFTokenizer, theirs: Any, seed: str) -> None:
    for text in _texts(seed):
        plain = ours.encode(text, add_bos=False, add_eos=False)
        assert plain == theirs.encode(text, add_special_tokens=False), text
        begun = ours.encode(text, add_bos=True, add_eos=False)
        assert begun == theirs.encode(text)[: len(begun)], text
        ended = ours.encode(text)
        assert ended[: len(theirs.encode(text))] == theirs.encode(text), text
        if theirs.eos_token_id is not None:
            assert theirs.eos_token_id in ended[len(begun) :], text
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    if theirs.pad_token_id is not None:
        assert ours.pad_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)
    if theirs.chat_template is not None:
        ids = theirs.apply_chat_template(CHAT, return_dict=False)
        assert ours.tokenize_messages(CHAT)[0] == ids


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.byte_level_folder(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_reads_as_transformers_reads_it_and_so_does_what_is_saved(
    tmp_path: Path, base: Path, change: str
) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    CHANGES[change](tmp_path)
    ours = hf_tokenizer(tmp_path)
    _assert_as_transformers(ours, AutoTokenizer.from_pretrained(tmp_path), change)
    saved = tmp_path / "final"
    ours.save(saved)
    _assert_as_transformers(ours, AutoTokenizer.from_pretrained(saved), change)
    again = hf_tokenizer(saved)
    assert again.fingerprint() == ours.fingerprint()
    assert (
        AutoTokenizer.from_pretrained(saved).chat_template
        == AutoTokenizer.from_pretrained(tmp_path).chat_template
    )


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"pad_token_id": -1}, (None, None, 0)),
        ({"eos_token_id": -1, "bos_token_id": -1}, (None, None, 0)),
        ({"eos_token_id": [-1, 403], "pad_token_id": 404}, (None, 403, 404)),
        ({"eos_token_id": [], "bos_token_id": True}, (None, None, 0)),
        ({"eos_token_id": 10**6, "pad_token_id": 2**80}, (None, None, 0)),
    ],
)
def test_ids_of_the_model_that_name_no_token_name_none(
    tmp_path: Path, config: dict[str, Any], ids: tuple[int | None, ...]
) -> None:
    folder = folders.byte_level_folder(tmp_path / "from", config={})
    _json(folder, "config.json", {"model_type": "llama", **config})
    tokenizer = hf_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == ids
    # What was found in the model's config goes along: the saved folder may have another's.
    tokenizer.save(tmp_path / "to")
    again = hf_tokenizer(tmp_path / "to")
    assert (again.bos_id, again.eos_id, again.pad_id) == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "to").eos_token_id == ids[1]


def test_a_familys_template_is_saved_for_a_folder_that_has_none(tmp_path: Path) -> None:
    """Case F8."""
    folder = folders.byte_level_folder(tmp_path / "base")
    tokenizer = qwen2_5_tokenizer(str(folder))
    tokenizer.save(tmp_path / "final")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert theirs.chat_template == CHATML
    assert (
        theirs.apply_chat_template(CHAT, return_dict=False) == tokenizer.tokenize_messages(CHAT)[0]
    )
    assert hf_tokenizer(tmp_path / "final").fingerprint() == tokenizer.fingerprint()


def test_the_template_of_an_older_processor_is_used_and_saved(tmp_path: Path) -> None:
    folder = folders.byte_level_folder(tmp_path / "base")
    _json(folder, "chat_template.json", {"chat_template": OTHER})
    tokenizer = qwen2_5_tokenizer(str(folder))  # it comes before the family's
    assert tokenizer.chat_template == OTHER
    tokenizer.save(tmp_path / "final")
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == OTHER


def test_a_template_that_is_given_is_saved_with_the_named_ones_that_do_not_come_before_it(
    tmp_path: Path,
) -> None:
    folder = folders.byte_level_folder(tmp_path / "base")
    named = [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}]
    _config(folder, chat_template=named)
    with pytest.raises(UserError, match=r"rag, tool_use.*none is named 'default'"):
        hf_tokenizer(folder)
    tokenizer = hf_tokenizer(folder, chat_template=OTHER)
    tokenizer.save(tmp_path / "final")
    saved = AutoTokenizer.from_pretrained(tmp_path / "final").chat_template
    assert saved == {"default": OTHER, "rag": "a"}  # "tool_use" would be read in place of it
    assert hf_tokenizer(folder, chat_template="rag").chat_template == "a"


TOOL_USE = (
    "{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("where", ["a list", "files", "saved"])
def test_rows_with_tools_are_written_with_the_template_for_tools_as_transformers_does(
    tmp_path: Path, where: str
) -> None:
    folder = folders.byte_level_folder(tmp_path / "base")
    if where == "files":
        (folder / "chat_template.jinja").write_text(folders.CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    else:
        named = {"default": folders.CHATML, "tool_use": TOOL_USE}
        _config(folder, chat_template=[{"name": k, "template": v} for k, v in named.items()])
    if where == "saved":
        hf_tokenizer(folder).save(tmp_path / "final")
        folder = tmp_path / "final"
    ours, theirs = hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    rows = [{"messages": CHAT}, {"messages": CHAT, "tools": TOOLS}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, with_tools = chat_dataset(
        ours,
        source="json",
        data_files=str(tmp_path / "rows.jsonl"),
        conversation_column="messages",
        conversation_style="openai",
    )
    assert plain["tokens"] == theirs.apply_chat_template(CHAT, return_dict=False)
    expected = theirs.apply_chat_template(
        CHAT, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert with_tools["tokens"] == expected["input_ids"] != plain["tokens"]
    trained = [int(label != -100) for label in with_tools["labels"]]
    assert trained == expected["assistant_masks"]
    assert 0 < sum(trained) < len(trained)
    # One template for all, where the user says so.
    only = hf_tokenizer(folder, chat_template="default")
    assert only.tokenize_messages(CHAT, variables={"tools": None})[0] == plain["tokens"]
    with pytest.raises(UserError, match=r"leaves out the tool .add."):
        only.tokenize_messages(CHAT, variables={"tools": TOOLS})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("added_tokens.json", {"<own>": 500}, "'<own>' with id 500.* do not belong together"),
        ("added_tokens.json", {"<own>": "x"}, "describes a token wrongly"),
        ("special_tokens_map.json", ["eos"], "must hold a JSON object"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"406": {}}},
            "describes a token wrongly",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": _dict("a")}}, "describes a token"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "describes a token wrongly"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template must be a jinja2 template"),
        ("tokenizer_config.json", {"chat_template": ["a"]}, "a list, but not of {name, template}"),
        ("chat_template.json", {"chat_template": {"default": 3}}, "chat_template.json"),
    ],
)
def test_files_that_do_not_fit_are_named(
    tmp_path: Path, base: Path, name: str, content: Any, says: str
) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    _json(tmp_path, name, content)
    with pytest.raises(UserError, match=says):
        hf_tokenizer(tmp_path)


def test_a_template_that_is_no_text_is_named(tmp_path: Path, base: Path) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template\.jinja cannot be read as UTF-8"):
        hf_tokenizer(tmp_path)

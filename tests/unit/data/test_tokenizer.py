from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.unit.data import folders
from torchtune_cp.data import HFTokenizer, byte_tokenizer, hf_tokenizer
from torchtune_cp.errors import UserError

TEXTS = [
    "",
    "Hello",
    " leading and trailing  ",
    "def f(x):\n        return x  # indented\n\n",
    "Größe 東京 ☃ \U0001f600",
    "<|begin_of_text|>already there",
    "a<|im_end|>\nb",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.metaspace_folder(tmp_path_factory.mktemp("metaspace"))


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("text", TEXTS)
def test_encode_gives_the_ids_of_transformers(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    ours, theirs = hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(text, add_bos=True, add_eos=False) == theirs.encode(text)
    assert ours.encode(text, add_bos=False, add_eos=False) == theirs.encode(
        text, add_special_tokens=False
    )
    assert ours.encode(text) == [*theirs.encode(text), theirs.eos_token_id]
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_decode_gives_the_text_back(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = hf_tokenizer(request.getfixturevalue(kind))
    text = "Who wrote Hamlet? Größe 東京\n    return"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with_specials = tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False)
    assert tokenizer.special_tokens["eos_token"] in with_specials


def test_a_text_gets_one_bos_when_the_post_processor_adds_it(byte_level: Path) -> None:
    tokenizer = hf_tokenizer(byte_level)
    assert tokenizer.adds_bos
    assert tokenizer.encode("fox").count(tokenizer.bos_id) == 1


def test_a_text_gets_no_bos_when_the_checkpoint_does_not_use_it(tmp_path: Path) -> None:
    folder = folders.byte_level_folder(tmp_path, post_processor_adds_bos=False)
    tokenizer = hf_tokenizer(folder)
    assert not tokenizer.adds_bos
    assert tokenizer.bos_id is not None
    assert tokenizer.bos_id not in tokenizer.encode("fox")
    assert tokenizer.encode("fox", add_eos=False) == AutoTokenizer.from_pretrained(folder).encode(
        "fox"
    )


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_post_processor_wins_over_add_bos_token_in_the_config(
    tmp_path: Path, add_bos: bool
) -> None:
    folder = folders.byte_level_folder(
        tmp_path,
        post_processor_adds_bos=not add_bos,
        config={
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "add_bos_token": add_bos,
        },
    )
    theirs = AutoTokenizer.from_pretrained(folder).encode("fox")
    assert hf_tokenizer(folder).encode("fox", add_eos=False) == theirs
    assert hf_tokenizer(folder).adds_bos is not add_bos


def test_long_texts_are_not_cut_by_settings_stored_in_tokenizer_json(tmp_path: Path) -> None:
    folder = folders.byte_level_folder(tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    state["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = hf_tokenizer(folder, max_seq_len=3)
    text = "The quick brown fox jumps over the lazy dog."
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("config", "extra_files", "expected"),
    [
        # bos, eos, pad
        ({"eos_token": "<|eot_id|>"}, {}, (None, "<|eot_id|>", "<|eot_id|>")),
        ({"eos_token": {"content": "<|eot_id|>"}}, {}, (None, "<|eot_id|>", "<|eot_id|>")),
        (
            {"pad_token": "<|im_end|>", "bos_token": None},
            {"special_tokens_map.json": {"bos_token": "<|im_start|>", "eos_token": "<|eot_id|>"}},
            ("<|im_start|>", "<|eot_id|>", "<|im_end|>"),
        ),
        (
            {},
            {
                "generation_config.json": {"bos_token_id": "id:<|im_start|>"},
                "config.json": {"eos_token_id": ["id:<|im_end|>", 3], "bos_token_id": 0},
            },
            ("<|im_start|>", "<|im_end|>", "<|im_end|>"),
        ),
    ],
)
def test_special_ids_are_found_in_the_files_that_name_them(
    tmp_path: Path, config: dict, extra_files: dict, expected: tuple
) -> None:
    folder = folders.byte_level_folder(tmp_path, config=config)
    ids = {text: hf_tokenizer(folder).encode(text, False, False)[0] for text in folders.SPECIALS}

    def resolve(value: object) -> object:
        if isinstance(value, list):
            return [resolve(v) for v in value]
        return ids[value[3:]] if isinstance(value, str) and value.startswith("id:") else value

    for name, content in extra_files.items():
        resolved = {k: resolve(v) for k, v in content.items()}
        (folder / name).write_text(json.dumps(resolved))
    tokenizer = hf_tokenizer(folder)
    found = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert found == tuple(ids.get(e, e) for e in expected)


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    folder = folders.byte_level_folder(tmp_path)
    size = hf_tokenizer(folder).vocab_size
    token = {
        "content": "<extra>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    base = {"bos_token": "<|begin_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folders.write_config(folder, {**base, "added_tokens_decoder": {str(size): token}})
    tokenizer = hf_tokenizer(folder)
    assert tokenizer.encode("fox<extra>", add_eos=False) == AutoTokenizer.from_pretrained(
        folder
    ).encode("fox<extra>")
    assert tokenizer.vocab_size == size + 1
    folders.write_config(folder, {**base, "added_tokens_decoder": {str(size + 5): token}})
    with pytest.raises(UserError, match=r"'<extra>' with id .* do not belong together"):
        hf_tokenizer(folder)


class TestPaths:
    def test_a_file_inside_the_folder_is_enough(self, byte_level: Path) -> None:
        expected = hf_tokenizer(byte_level).encode("fox")
        assert hf_tokenizer(byte_level / "tokenizer.json").encode("fox") == expected
        assert hf_tokenizer(str(byte_level / "tokenizer.model")).encode("fox") == expected

    def test_torchtunes_path_in_original_finds_the_folder_above(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path)
        (folder / "original").mkdir()
        (folder / "original" / "tokenizer.model").write_bytes(b"")
        expected = hf_tokenizer(folder).encode("fox")
        assert hf_tokenizer(folder / "original" / "tokenizer.model").encode("fox") == expected
        assert hf_tokenizer(folder / "original").encode("fox") == expected

    def test_a_folder_without_tokenizer_json_says_what_is_needed_and_what_is_there(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "tokenizer.model").write_bytes(b"")
        with pytest.raises(
            UserError, match=r"no tokenizer\.json for tokenizer\.path=.*there is: tokenizer\.model"
        ):
            hf_tokenizer(tmp_path)

    def test_a_path_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(UserError, match=r"tokenizer\.path='/nowhere/at/all' does not exist"):
            hf_tokenizer("/nowhere/at/all")

    def test_broken_files_are_named(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path)
        (folder / "tokenizer_config.json").write_text("{")
        with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
            hf_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text("[]")
        with pytest.raises(UserError, match="must hold a JSON object, not list"):
            hf_tokenizer(folder)
        (folder / "tokenizer_config.json").unlink()
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
            hf_tokenizer(folder)

    def test_a_wrong_max_seq_len_is_refused(self, byte_level: Path) -> None:
        with pytest.raises(UserError, match="max_seq_len must be 1 or more, not 0"):
            hf_tokenizer(byte_level, max_seq_len=0)


class TestSave:
    def test_saved_files_load_in_transformers_and_here(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path / "from")
        tokenizer = hf_tokenizer(folders.set_template(folder, folders.CHATML))
        assert {p.name for p in tokenizer.files()} == {"tokenizer.json", "tokenizer_config.json"}
        tokenizer.save(tmp_path / "to")
        again = AutoTokenizer.from_pretrained(tmp_path / "to")
        assert again.encode("fox", add_special_tokens=False) == tokenizer.encode(
            "fox", False, False
        )
        assert again.chat_template == folders.CHATML
        assert hf_tokenizer(tmp_path / "to").encode("fox") == tokenizer.encode("fox")

    def test_a_template_given_by_argument_is_saved_with_it(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path / "from")
        folders.set_template(folder, folders.LLAMA3)
        hf_tokenizer(folder, chat_template=folders.CHATML).save(tmp_path / "to")
        assert AutoTokenizer.from_pretrained(tmp_path / "to").chat_template == folders.CHATML
        assert hf_tokenizer(tmp_path / "to").chat_template == folders.CHATML

    def test_saving_into_its_own_folder_changes_nothing(self, tmp_path: Path) -> None:
        folder = folders.byte_level_folder(tmp_path)
        before = (folder / "tokenizer.json").read_bytes()
        hf_tokenizer(folder).save(folder)
        assert (folder / "tokenizer.json").read_bytes() == before


class TestByteTokenizer:
    def test_the_ids_are_the_bytes_with_bos_and_eos(self) -> None:
        tokenizer = byte_tokenizer()
        assert tokenizer.vocab_size == 272
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
        assert tokenizer.encode("hé\n") == [256, 104, 0xC3, 0xA9, 10, 257]
        every_byte = bytes(range(128)).decode()
        assert tokenizer.encode(every_byte, False, False) == list(range(128))

    def test_any_text_comes_back(self) -> None:
        tokenizer = byte_tokenizer()
        text = "".join(map(chr, range(1, 0x250))) + "東京 \U0001f600\r\n\t end "
        ids = tokenizer.encode(text)
        assert ids[1:-1] == list(text.encode())
        assert tokenizer.decode(ids) == text

    def test_its_files_load_in_transformers_with_the_same_ids(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer(max_seq_len=5)
        assert tokenizer.max_seq_len == 5
        tokenizer.save(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in TEXTS:
            assert theirs.encode(text) == tokenizer.encode(text, add_eos=False)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)
        assert len(theirs) == 272
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
        assert (
            theirs.apply_chat_template(chat, return_dict=False)
            == tokenizer.tokenize_messages(chat)[0]
        )
        assert isinstance(hf_tokenizer(tmp_path), HFTokenizer)
        assert hf_tokenizer(tmp_path).encode("x") == tokenizer.encode("x")


def test_a_tokenizer_can_be_sent_to_another_process() -> None:
    import pickle

    tokenizer = byte_tokenizer()
    tokenizer.tokenize_messages([{"role": "user", "content": "hi"}])
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("hi") == tokenizer.encode("hi")


def test_loading_a_tokenizer_does_not_import_transformers() -> None:
    import subprocess

    code = (
        "import sys, torchtune_cp.data, torchtune_cp.datasets; torchtune_cp.data.byte_tokenizer(); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

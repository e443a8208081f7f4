"""Hugging Face tokenizer folders through the `tokenizers` library, with chat templates and loss masks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers import __version__ as tokenizers_version
from tokenizers.processors import ByteLevel

from torchtune_cp.data.chat_templates import find_chat_template, render_chat
from torchtune_cp.data.message_spans import MessageSpan, find_message_spans
from torchtune_cp.data.messages import Message
from torchtune_cp.errors import UserError
from torchtune_cp.models.values import is_whole, shown

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class HFTokenizer:
    """A tokenizer as transformers would load it from the same folder.

    Attributes:
        bos_id: Id of the token that begins a text, or None.
        eos_id: Id of the token that ends a text, or None.
        pad_id: Id for padding. Checkpoints often have none; then eos, then 0 (its choice changes
            nothing: padding is never a label, and no token attends to what follows it).
        adds_bos: Whether the checkpoint's own tokenizer puts `bos_id` before a text.
        vocab_size: Largest token id + 1.
        max_seq_len: The length that datasets cut samples to, or None. Encoding itself never cuts.
        chat_template: The jinja2 template, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        config: Mapping[str, Any],
        chat_template: str | None,
        special_ids: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        source_files: Sequence[Path] = (),
        generated_files: Mapping[str, str] | None = None,
        name: str = "the tokenizer",
    ) -> None:
        """Wrap a loaded tokenizer; users call `hf_tokenizer` or `byte_tokenizer`.

        Args:
            tokenizer: Taken over and changed: its post-processor, truncation and padding are removed.
            config: The contents of tokenizer_config.json.
            chat_template: The template to use.
            special_ids: Fallback ids by name ("bos", "eos", "pad"), from model configs.
            max_seq_len: See the class.
            source_files: Files that `save` copies.
            generated_files: Files that `save` writes, by name (they win over copied ones).
            name: What error messages call this tokenizer.
        """
        if max_seq_len is not None and not (is_whole(max_seq_len) and max_seq_len >= 1):
            raise UserError(f"tokenizer.max_seq_len must be 1 or more, not {shown(max_seq_len)}")
        self.max_seq_len = max_seq_len
        self.chat_template = chat_template
        self._name = name
        self._source_files = list(source_files)
        self._generated_files = dict(generated_files or {})
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        fallback = special_ids or {}
        self.special_tokens = {
            key: text
            for key in _SPECIAL_NAMES
            if (text := _token_text(config.get(key))) is not None
        }
        self.bos_id = self._special_id("bos_token", fallback.get("bos"))
        self.eos_id = self._special_id("eos_token", fallback.get("eos"))
        pad_id = self._special_id("pad_token", fallback.get("pad"))
        if pad_id is None:
            pad_id = self.eos_id if self.eos_id is not None else 0
        self.pad_id: int = pad_id

        # tokenizer.json has the last word on this, as in transformers; `add_bos_token` in
        # tokenizer_config.json is for tokenizers that have no such file.
        begins_with = self._tokenizer.encode("a").ids[:1]
        self.adds_bos = self.bos_id is not None and begins_with == [self.bos_id]
        # From here on special tokens are added by `encode` alone. This processor does nothing (and
        # with trim_offsets off leaves the character offsets whole, which masks are made from).
        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)

        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}
        self._special_ids |= {i for i in (self.bos_id, self.eos_id) if i is not None}
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1

    def _special_id(self, name: str, fallback: int | None) -> int | None:
        """The id of a special token by its text, else the fallback (whose text is then filled in)."""
        text = self.special_tokens.get(name)
        token_id = self._tokenizer.token_to_id(text) if text is not None else None
        if token_id is not None:
            return token_id
        if fallback is not None:
            fallback_text = self._tokenizer.id_to_token(fallback)
            if fallback_text is not None:
                self.special_tokens[name] = fallback_text
                return fallback
        return None

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Special tokens written out in it are read as such.
            add_bos: Begin with `bos_id` if this checkpoint's tokenizer does so (`adds_bos`): once,
                even where its post-processor would add it too.
            add_eos: End with `eos_id`, where there is one.

        Returns:
            The ids, never cut to `max_seq_len`.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self.adds_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def require_chat_template(self) -> str:
        """The chat template; UserError saying what is missing when there is none."""
        if self.chat_template is None:
            raise UserError(
                f"{self._name} has no chat template (neither chat_template in "
                "tokenizer_config.json nor chat_template.jinja), which conversations need; use an "
                "instruction-tuned checkpoint's tokenizer, or give the template's text or a .jinja "
                "file as tokenizer.chat_template"
            )
        return self.chat_template

    def render_messages(
        self, messages: Sequence[Message | Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            UserError: When there is no template, or it does not accept the conversation.
        """
        return self._render([_as_dict(message) for message in messages], add_generation_prompt)

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        return render_chat(
            self.require_chat_template(),
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=self.special_tokens,
        )

    def tokenize_messages(
        self, messages: Sequence[Message | Mapping[str, Any]], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them are context only.

        The ids are those that transformers' `apply_chat_template(tokenize=True)` gives. Of a message
        that is trained on (`masked` False), these tokens are: its content, and its end-of-turn token
        (up to and including the first special token after the content; or all of the message's own
        text after the content, when that has no special token). Headers, and everything else that
        the template adds, are never trained on, nor are messages with a blank content. A token that
        spans the border of header and content belongs to the content.

        Args:
            messages: `Message`s, or mappings with "role", "content" and optionally "masked".
            add_end_tokens: False leaves out everything after the content of a last assistant turn,
                so that generation can go on from there.

        Returns:
            (ids, mask), equally long; mask[i] True = token i is not trained on.

        Raises:
            UserError: When there is no template, when it does not accept the conversation, or when
                it changes a message that is trained on so much that its tokens cannot be told.
        """
        dicts = [_as_dict(message) for message in messages]
        masked = [_is_masked(message) for message in messages]
        if not dicts:
            return [], []
        text, spans = find_message_spans(self._render, dicts)
        last = spans[-1]
        if not add_end_tokens and dicts[-1]["role"] == "assistant":
            if last is None or (last.content_end == last.start and dicts[-1]["content"].strip()):
                raise UserError(
                    f"cannot leave out what follows the last turn: {self._name}'s chat template "
                    "rewrites it; give another template as tokenizer.chat_template"
                )
            text = text[: last.content_end]

        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        offsets = encoding.offsets
        mask = [True] * len(ids)
        for number, span in enumerate(spans):
            if masked[number] or not dicts[number]["content"].strip():
                continue
            if span is None:
                raise UserError(
                    f"cannot tell which tokens are turn {number} ({dicts[number]['role']}): "
                    f"{self._name}'s chat template leaves it out or rewrites it; mask this turn, "
                    "or give a template that keeps it as tokenizer.chat_template"
                )
            for place in self._trained_tokens(ids, offsets, span, number):
                mask[place] = False
        return ids, mask

    def _trained_tokens(
        self, ids: list[int], offsets: list[tuple[int, int]], span: MessageSpan, number: int
    ) -> list[int]:
        """Places of the tokens that a span trains on; a token that only begins or ends in it counts."""
        content = []
        suffix = []
        for place in range(_first_ending_after(offsets, span.start), len(ids)):
            begin, end = offsets[place]
            if begin >= span.end:
                break
            # Special tokens may swallow the blanks beside them (AddedToken's lstrip and rstrip), and
            # so reach into a content that is not theirs.
            special = ids[place] in self._special_ids
            if special and begin < span.start:
                continue
            if begin < span.content_end and not (special and end > span.content_end):
                content.append(place)
                continue
            suffix.append(place)
            if special:
                return content + suffix
        if span.bounded:
            return content + suffix
        if not content:
            raise UserError(
                f"cannot tell where turn {number} ends: {self._name}'s chat template rewrites it and "
                "puts no special token after it; mask this turn, or give another template as "
                "tokenizer.chat_template"
            )
        return content

    def fingerprint(self) -> str:
        """A hash of all that token ids depend on: what the files say, not where they lie."""
        parts = {
            "library": tokenizers_version,
            "tokenizer": self._tokenizer.to_str(),
            "special_tokens": self.special_tokens,
            "special_ids": sorted(self._special_ids),
            "bos_eos": [self.bos_id, self.eos_id, self.adds_bos],
            "chat_template": self.chat_template,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def files(self) -> list[Path]:
        """The tokenizer files that this tokenizer was read from ([] when it was built in memory)."""
        return list(self._source_files)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files beside a saved model, so that transformers loads it from there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._source_files:
            target = folder / path.name
            if not (target.exists() and target.samefile(path)):
                shutil.copyfile(path, target)
        for name, text in self._generated_files.items():
            (folder / name).write_text(text, encoding="utf-8")


def hf_tokenizer(
    path: str | Path, max_seq_len: int | None = None, *, chat_template: str | None = None
) -> HFTokenizer:
    """Load the tokenizer of a Hugging Face checkpoint.

    Args:
        path: The checkpoint's folder (tokenizer.json, and tokenizer_config.json for special tokens
            and chat template), or a file inside it. For torchtune's paths such as
            `.../original/tokenizer.model` the folder above is looked at as well.
        max_seq_len: The length that datasets cut samples to; None = no limit.
        chat_template: A template's text, or the path of a .jinja file, instead of the folder's own.

    Raises:
        UserError: When there is no tokenizer.json, or a file cannot be read.
    """
    return load_tokenizer(path, max_seq_len, chat_template=chat_template)


def load_tokenizer(
    path: str | Path,
    max_seq_len: int | None = None,
    *,
    chat_template: str | None = None,
    fallback_template: str | None = None,
) -> HFTokenizer:
    """As `hf_tokenizer`, with a template for folders that have none (for the model families)."""
    folder = _tokenizer_folder(Path(path).expanduser())
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        # A null in tokenizer_config.json says nothing; it must not hide the other file's token.
        **{k: v for k, v in _read_json(folder / "tokenizer_config.json").items() if v is not None},
    }
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        # The library raises plain Exception for every kind of broken file.
        raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    _add_missing_tokens(tokenizer, config, folder)

    generated = {}
    template = find_chat_template(folder, config) or fallback_template
    if chat_template is not None:
        template = _read_template(chat_template)
        generated["chat_template.jinja"] = template
    return HFTokenizer(
        tokenizer,
        config=config,
        chat_template=template,
        special_ids=_ids_from_model_configs(folder),
        max_seq_len=max_seq_len,
        source_files=[folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()],
        generated_files=generated,
        name=f"the tokenizer in {folder}",
    )


def _tokenizer_folder(path: Path) -> Path:
    """The folder that holds tokenizer.json: `path` itself, the folder it lies in, or the one above."""
    is_folder = path.is_dir()
    candidates = [path] if is_folder else [path.parent]
    if path.name == "original" or not is_folder:
        candidates.append(candidates[0].parent)
    for folder in candidates:
        if (folder / "tokenizer.json").is_file():
            return folder
    if not candidates[0].is_dir():
        raise UserError(f"tokenizer.path={str(path)!r} does not exist")
    there = sorted(p.name for p in candidates[0].iterdir())
    shown = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "") if there else "nothing"
    raise UserError(
        f"no tokenizer.json for tokenizer.path={str(path)!r} (in "
        f"{' or '.join(str(folder) for folder in candidates)}; there is: {shown}); download the "
        "checkpoint's tokenizer.json and tokenizer_config.json into that folder (tokenizer.model "
        "alone cannot be read)"
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; {} when it does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _read_template(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise UserError(
            f"tokenizer.chat_template={chat_template!r} is neither a jinja2 template nor an "
            "existing file"
        )
    return path.read_text(encoding="utf-8")


def _token_text(value: Any) -> str | None:
    """A special token's text: files hold it as a string or as `{"content": ...}`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids_from_model_configs(folder: Path) -> dict[str, int]:
    """bos, eos and pad ids named by generation_config.json, then config.json (the first of a list)."""
    ids: dict[str, int] = {}
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        for key in ("bos", "eos", "pad"):
            value = config.get(f"{key}_token_id")
            if isinstance(value, list):
                value = value[0] if value else None
            if isinstance(value, int):
                ids.setdefault(key, value)
    return ids


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Add tokens that only tokenizer_config.json knows (`added_tokens_decoder`), as transformers does."""
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted((int(i), entry) for i, entry in listed.items()):
        if tokenizer.token_to_id(entry["content"]) is not None:
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = AddedToken(entry["content"], **{f: entry[f] for f in flags if f in entry})
        if entry.get("special", False):
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(entry["content"]) != token_id:
            raise UserError(
                f"{folder / 'tokenizer_config.json'} lists token {entry['content']!r} with id "
                f"{token_id}, but with tokenizer.json it would become "
                f"{tokenizer.token_to_id(entry['content'])}; the two files do not belong together"
            )


def _as_dict(message: Message | Mapping[str, Any]) -> dict[str, str]:
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    return {"role": message["role"], "content": message["content"]}


def _is_masked(message: Message | Mapping[str, Any]) -> bool:
    return message.masked if isinstance(message, Message) else bool(message.get("masked", False))


def _first_ending_after(offsets: list[tuple[int, int]], position: int) -> int:
    """Place of the first token that ends after a character position (token ends never decrease)."""
    low, high = 0, len(offsets)
    while low < high:
        middle = (low + high) // 2
        if offsets[middle][1] > position:
            high = middle
        else:
            low = middle + 1
    return low

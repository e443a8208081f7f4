"""Hugging Face tokenizer folders through the `tokenizers` library, with chat templates and loss masks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version
from tokenizers.processors import ByteLevel

from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.data.chat_templates import render_chat, template_names
from torchtune_cp.data.message_spans import (
    MessageSpan,
    assistant_blocks,
    find_span,
    missing_of,
)
from torchtune_cp.data.messages import Message
from torchtune_cp.data.template_forms import Render, as_turn, check_tools, fit
from torchtune_cp.data.tokenizer_files import (
    SPECIAL_NAMES,
    default_template,
    find_templates,
    ids_from_model_configs,
    load_backend,
    read_config,
    read_json,
    read_text,
    stop_ids_from_model_configs,
    token_text,
    tokenizer_folder,
    tool_template,
)
from torchtune_cp.errors import UserError
from torchtune_cp.models.tokenizer_files import (
    TEMPLATE_FILE,
    TEMPLATES_FOLDER,
    TOKENIZER_FILES,
)
from torchtune_cp.models.values import MOST, is_whole, shown


class HFTokenizer:
    """A tokenizer as transformers would load it from the same folder.

    Attributes:
        bos_id: Id of the token that begins a text, or None.
        eos_id: Id of the token that ends a text, or None.
        pad_id: Id for padding. Checkpoints often have none; then eos, then 0 (its choice changes
            nothing: padding is never a label, and no token attends to what follows it).
        adds_bos: Whether the checkpoint's own tokenizer begins a text with `bos_id`.
        stop_ids: Ids that end what the model says: `eos_id`, and all that the model configs name.
        vocab_size: Largest token id + 1.
        max_seq_len: The length that datasets cut samples to, or None. Encoding itself never cuts.
        chat_template: The jinja2 template, or None.
        tool_template: The one for conversations with tools, or None where `chat_template` is for all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        config: Mapping[str, Any],
        chat_template: str | None,
        tool_template: str | None = None,
        stop_ids: Sequence[int] = (),
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
            tool_template: The template to use for conversations with tools, if that is another one.
            stop_ids: See the class; `eos_id` is one anyway.
            max_seq_len: See the class.
            source_files: Files that `save` copies.
            generated_files: Files that `save` writes, by name (they win over copied ones).
            name: What error messages call this tokenizer.
        """
        if max_seq_len is not None and not (is_whole(max_seq_len) and max_seq_len >= 1):
            raise UserError(f"tokenizer.max_seq_len must be 1 or more, not {shown(max_seq_len)}")
        self.max_seq_len = max_seq_len
        self.chat_template = chat_template
        self.tool_template = tool_template
        self._name = name
        self._source_files = list(source_files)
        self._generated_files = dict(generated_files or {})
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        self.special_tokens = {
            key: text for key in SPECIAL_NAMES if (text := token_text(config.get(key))) is not None
        }
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        eos = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids = tuple(sorted({*stop_ids, *eos}))
        pad_id = self._special_id("pad_token")
        if pad_id is None:
            pad_id = self.eos_id if self.eos_id is not None else 0
        self.pad_id: int = pad_id

        # tokenizer.json has the last word on this, as in transformers; `add_bos_token` in
        # tokenizer_config.json is for tokenizers that have no such file.
        example = self._tokenizer.encode("a")
        added_here = "".join(map(str, example.special_tokens_mask))
        if "0" not in added_here:  # a vocabulary without "a": nothing stands between the two ends
            added_here = "1" * (example.ids[:1] == [self.bos_id]) + "0"
        first, last = len(added_here.partition("0")[0]), len(added_here.rpartition("0")[2])
        self._begin = example.ids[:first]
        self._end = example.ids[len(example.ids) - last :]
        if self.eos_id is not None and self.eos_id not in self._end:
            self._end = [*self._end, self.eos_id]
        self.adds_bos = self.bos_id is not None and self.bos_id in self._begin
        # From here on special tokens are added by `encode` alone. This processor does nothing (and
        # with trim_offsets off leaves the character offsets whole, which masks are made from).
        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)

        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}
        self._special_ids |= {i for i in (self.bos_id, self.eos_id) if i is not None}
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        if self.vocab_size > MOST["vocab_size"]:
            raise UserError(
                f"{name} has the token id {self.vocab_size - 1}; no model has more than"
                f" {MOST['vocab_size']} tokens"
            )

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Special tokens written out in it are read as such.
            add_bos: Begin with what this checkpoint's tokenizer begins a text with: `bos_id` where
                `adds_bos`, or other tokens of its own.
            add_eos: End with what it ends a text with, and with `eos_id`, where there is one.

        Returns:
            The ids, never cut to `max_seq_len`.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*(self._begin if add_bos else ()), *ids, *(self._end if add_eos else ())]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def require_chat_template(self, *, with_tools: bool = False) -> str:
        """The template that a conversation is written with.

        Args:
            with_tools: Whether the conversation has tools, for which a checkpoint may have another template
                (named "tool_use", beside "default").

        Raises:
            UserError: There is none; says what is missing.
        """
        if with_tools and self.tool_template is not None:
            return self.tool_template
        if self.chat_template is None:
            raise UserError(
                f"{self._name} has no chat template (neither chat_template in "
                "tokenizer_config.json or chat_template.json, nor chat_template.jinja), which "
                "conversations need; use an instruction-tuned checkpoint's tokenizer, or give the "
                "template's text or a .jinja file as tokenizer.chat_template"
            )
        return self.chat_template

    def render_messages(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        add_generation_prompt: bool = False,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation.

        Args:
            messages: As for `tokenize_messages`.
            add_generation_prompt: End with the assistant's header.
            variables: What else the template reads: "tools", "documents", ...

        Raises:
            UserError: When there is no template, or it does not accept the conversation.
        """
        turns = [as_turn(_as_message(message)) for message in messages]
        return self._renderer(variables)(turns, add_generation_prompt)

    def _renderer(self, variables: Mapping[str, Any] | None, marked: bool = False) -> Render:
        """The chat template as a function of messages."""
        template = self.require_chat_template(with_tools=has_tools(variables))

        def render(turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            return render_chat(
                template,
                turns,
                add_generation_prompt=add_generation_prompt,
                variables={**self.special_tokens, **(variables or {})},
                marks_generation=marked,
            )

        return render

    def tokenize_messages(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        add_end_tokens: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them are context only.

        The ids are those that transformers' `apply_chat_template(tokenize=True)` gives. Where the
        template marks what the assistant says (`{% generation %}`), the assistant's tokens that are
        trained on are those of transformers' assistant mask. Otherwise, of a message that is trained
        on (`masked` False), these tokens are: its content, with its reasoning and tool calls as the
        template writes them, and its end-of-turn token (up to and including the first special token
        after the content; or all of the message's own text after the content, when that has no
        special token). Headers, and everything else that the template adds, are never trained on, nor
        are messages that say nothing. A token that spans the border of header and content belongs to
        the content.

        Args:
            messages: `Message`s, or mappings with "role", "content", optionally "masked", and what
                else the template reads ("tool_calls", "reasoning_content", ...).
            add_end_tokens: False leaves out everything after the content of a last assistant turn,
                so that generation can go on from there.
            variables: What else the template reads: "tools", "documents", ...

        Returns:
            (ids, mask), equally long; mask[i] True = token i is not trained on.

        Raises:
            UserError: When there is no template, when it does not accept the conversation or leaves
                something of it out, or when it changes a message that is trained on so much that its
                tokens cannot be told.
        """
        given = [_as_message(message) for message in messages]
        if not given:
            return [], []
        render = self._renderer(variables)
        names = template_names(self.require_chat_template(with_tools=has_tools(variables)))
        turns, text = fit(render, [as_turn(message) for message in given], names)
        check_tools((variables or {}).get("tools"), text)
        trained = [i for i, m in enumerate(given) if not m.masked and not m.is_blank()]
        spans: dict[int, list[MessageSpan]] = {}
        if names.generation and add_end_tokens:
            marked = self._renderer(variables, marked=True)
            spans = assistant_blocks(marked, render, turns, text)
        exact = set(spans)  # the template itself says what of these turns is trained on
        for number in trained:
            if number not in exact:
                span = find_span(render, turns, text, number)
                spans[number] = [span] if span else []
        if not add_end_tokens and given[-1].role == "assistant":
            last = find_span(render, turns, text, len(turns) - 1)
            if last is None or (last.content_end == last.start and not given[-1].is_blank()):
                raise UserError(
                    f"cannot leave out what follows the last turn: {self._name}'s chat template "
                    "rewrites it; give another template as tokenizer.chat_template"
                )
            text = text[: last.content_end]

        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        offsets = encoding.offsets
        mask = [True] * len(ids)
        for number in trained:
            if not spans[number] and number in exact:
                continue  # the template trains on other turns only
            runs = [
                _overlapping(offsets, span.start, span.end)
                if number in exact
                else self._trained_tokens(ids, offsets, span, number)
                for span in spans[number]
            ]
            said = "".join(text[offsets[r[0]][0] : offsets[r[-1]][1]] for r in runs if r)
            missing = missing_of(turns[number], said) if runs else "it"
            if missing:
                raise UserError(
                    f"cannot tell which tokens are turn {number} ({turns[number]['role']}): "
                    f"{self._name}'s chat template leaves {missing} out or rewrites it; mask this "
                    "turn, or give a template that keeps it as tokenizer.chat_template"
                )
            for place in chain.from_iterable(runs):
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
        raise UserError(
            f"cannot tell where turn {number} ends: {self._name}'s chat template rewrites it and "
            "puts no special token after it; mask this turn, or give another template as "
            "tokenizer.chat_template"
        )

    def fingerprint(self) -> str:
        """A hash of all that token ids depend on: what the files say, not where they lie."""
        parts = {
            "library": tokenizers_version,
            "tokenizer": self._tokenizer.to_str(),
            "special_tokens": self.special_tokens,
            "special_ids": sorted(self._special_ids),
            "bos_eos": [self.bos_id, self.eos_id, self.adds_bos],
            "ends": [self._begin, self._end, self._tokenizer.encode_special_tokens],
            "chat_template": [self.chat_template, self.tool_template],
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
            if target.exists() and target.samefile(path):
                continue
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target)
        for name, text in self._generated_files.items():
            (folder / name).parent.mkdir(exist_ok=True)
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
        chat_template: A template's text, the path of a .jinja file, or the name of one of the folder's
            templates, for all conversations. Without it those with tools are written with the folder's
            template "tool_use", if there is one, and all others with "default".

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
    folder = tokenizer_folder(expand_home(path))
    config = read_config(folder)
    tokenizer = load_backend(folder, config)
    own_config = read_json(folder / "tokenizer_config.json")
    # Said by the folder of the model alone, which may not be the one that this tokenizer is saved to.
    said = {"tokenizer_class": own_config.get("tokenizer_class") or "PreTrainedTokenizerFast"}
    for key, token_id in ids_from_model_configs(folder).items():
        text = tokenizer.id_to_token(token_id)
        if token_text(config.get(f"{key}_token")) is None and text is not None:
            said[f"{key}_token"] = text
    templates = find_templates(folder, config)
    if chat_template is not None:
        template: str | None = templates.get(chat_template) or _read_template(chat_template)
        for_tools = None
    else:
        template = default_template(templates, folder) or fallback_template
        for_tools = tool_template(templates)
    files: Sequence[str] = TOKENIZER_FILES
    saved_templates = templates
    if for_tools is None and tool_template(templates) is not None:
        # transformers would prefer it to the template that this tokenizer used.
        saved_templates = {k: v for k, v in templates.items() if v != tool_template(templates)}
        files = [name for name in TOKENIZER_FILES if name != TEMPLATES_FOLDER]
    return HFTokenizer(
        tokenizer,
        config={**config, **said},
        chat_template=template,
        tool_template=for_tools,
        stop_ids=stop_ids_from_model_configs(folder),
        max_seq_len=max_seq_len,
        source_files=[folder / name for name in files if (folder / name).exists()],
        generated_files={
            **_config_file(own_config, said),
            **_template_files(folder, config, saved_templates, template),
        },
        name=f"the tokenizer in {folder}",
    )


def _config_file(own: Mapping[str, Any], said: Mapping[str, str]) -> dict[str, str]:
    """tokenizer_config.json with what was found elsewhere; {} where the folder's own says it all."""
    if all(own.get(name) == value for name, value in said.items()):
        return {}
    text = json.dumps({**own, **said}, indent=2, ensure_ascii=False) + "\n"
    return {"tokenizer_config.json": text}


def _template_files(
    folder: Path, config: Mapping[str, Any], templates: Mapping[str, str], used: str | None
) -> dict[str, str]:
    """The files that make `used` the saved folder's template; {} where its copied files do so."""
    in_jinja_file = (folder / TEMPLATE_FILE).is_file()
    if used is None or (
        templates.get("default") == used and (in_jinja_file or config.get("chat_template"))
    ):
        return {}
    # A file of its own hides what tokenizer_config.json has, so that goes along.
    others = {
        f"{TEMPLATES_FOLDER}/{name}.jinja": text
        for name, text in templates.items()
        if name != "default" and Path(name).name == name
    }
    return {TEMPLATE_FILE: used, **others}


def _read_template(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    path = expand_home(chat_template)
    if not path.is_file():
        raise UserError(
            f"tokenizer.chat_template={chat_template!r} is neither a jinja2 template nor an "
            "existing file"
        )
    return read_text(path)


def _as_message(message: Message | Mapping[str, Any]) -> Message:
    if isinstance(message, Message):
        return message
    known = ("role", "content", "masked")
    return Message(
        message["role"],
        message.get("content"),
        bool(message.get("masked", False)),
        extra={k: v for k, v in message.items() if v is not None and k not in known},
    )


def has_tools(variables: Mapping[str, Any] | None) -> bool:
    """Whether a conversation's variables hold tools."""
    return variables is not None and variables.get("tools") is not None


def _overlapping(offsets: list[tuple[int, int]], start: int, end: int) -> list[int]:
    """Places of the tokens with a character in `[start, end)`."""
    places = range(_first_ending_after(offsets, start), len(offsets))
    return list(takewhile(lambda place: offsets[place][0] < end, places))


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

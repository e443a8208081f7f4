"""A Hugging Face tokenizer folder, read as transformers 5 reads it: files, special tokens, templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from torchtune_cp.errors import NotFoundHereError, UserError
from torchtune_cp.models.tokenizer_files import TEMPLATE_FILE, TEMPLATES_FOLDER

#: The special tokens of every tokenizer, in the order in which transformers adds those that are missing.
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def tokenizer_folder(path: Path) -> Path:
    """The folder that holds tokenizer.json: `path` itself, the folder it lies in, or the one above.

    Raises:
        UserError: There is none; says what is there instead.
    """
    is_folder = path.is_dir()
    candidates = [path] if is_folder else [path.parent]
    if path.name == "original" or not is_folder:
        candidates.append(candidates[0].parent)
    for folder in candidates:
        if (folder / "tokenizer.json").is_file():
            return folder
    if not candidates[0].is_dir() or not (path.exists() or path.suffix):
        raise NotFoundHereError(f"tokenizer.path={str(path)!r} does not exist")
    there = sorted(p.name for p in candidates[0].iterdir())
    shown = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "") if there else "nothing"
    kind = UserError if path.exists() else NotFoundHereError
    raise kind(
        f"no tokenizer.json for tokenizer.path={str(path)!r} (in "
        f"{' or '.join(str(folder) for folder in candidates)}; there is: {shown}); download the "
        "checkpoint's tokenizer.json and tokenizer_config.json into that folder (tokenizer.model "
        "alone, or vocab.json with merges.txt, cannot be read; save_pretrained of transformers' "
        "AutoTokenizer writes tokenizer.json)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; {} when it does not exist.

    Raises:
        UserError: It holds no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with what the older files say, which count only without `added_tokens_decoder`.

    special_tokens_map.json then has the last word on what it names. A null names nothing.

    Raises:
        UserError: A file holds no JSON object.
    """
    config = read_json(folder / "tokenizer_config.json")
    if config.get("added_tokens_decoder") is None:
        config |= read_json(folder / "special_tokens_map.json")
    return {key: value for key, value in config.items() if value is not None}


def token_text(value: Any) -> str | None:
    """A special token's text: files hold it as a string or as `{"content": ...}`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def load_backend(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of tokenizer.json, with the tokens that only other files know.

    Args:
        folder: Holds the files.
        config: From :func:`read_config`.

    Raises:
        UserError: A file cannot be read, or two of them do not belong together.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.encode("a")
    except BaseException as error:
        # The library raises plain Exception for every kind of broken file, and for some a panic of its
        # own, which is none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    try:
        listed = _listed_tokens(folder, config)
        tokens = _tokens_to_add(tokenizer, config, listed)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"{folder}: tokenizer_config.json, special_tokens_map.json or added_tokens.json describes a "
            f"token wrongly ({error})"
        ) from error
    tokenizer.add_tokens(tokens)
    for token_id, token in listed.items():
        found = tokenizer.token_to_id(token.content)
        if found != token_id and token.content:
            raise UserError(
                f"{folder / 'tokenizer_config.json'} (or added_tokens.json) lists token "
                f"{token.content!r} with id {token_id}, but with tokenizer.json it would become {found}; "
                "the files do not belong together"
            )
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return tokenizer


def _added_token(entry: Any, **fixed: Any) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    flags = {k: v for k, v in entry.items() if k not in ("__type", "content")}
    return AddedToken(entry["content"], **{**flags, **fixed})


def _listed_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens with their ids, from `added_tokens_decoder` or, without it, added_tokens.json."""
    decoder = config.get("added_tokens_decoder")
    if decoder is not None:
        return {_id(i): _added_token(entry) for i, entry in decoder.items()}
    special = {token_text(config.get(name)) for name in SPECIAL_NAMES}
    special |= {token_text(token) for token in _extra_tokens(config)}
    return {
        _id(i): AddedToken(text, normalized=text not in special, special=text in special)
        for text, i in read_json(folder / "added_tokens.json").items()
    }


def _id(value: Any) -> int:
    """A token id as JSON has it: a number, or a key that is one."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no token id")
    return int(value)


def _extra_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Special tokens without one of the usual names."""
    own = [
        value
        for name, value in config.items()
        if name.endswith("_token") and name not in SPECIAL_NAMES and token_text(value) is not None
    ]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [*own, *(extra.values() if isinstance(extra, Mapping) else extra)]


def _tokens_to_add(
    tokenizer: Tokenizer, config: Mapping[str, Any], listed: Mapping[int, AddedToken]
) -> list[AddedToken]:
    """What transformers adds to the tokenizer of tokenizer.json, in its order."""
    named = [config[name] for name in SPECIAL_NAMES if token_text(config.get(name)) is not None]
    names = {token_text(value) for value in named}
    tokens = [listed[i] for i in sorted(listed)]
    for token in tokens:
        token.special = token.special or token.content in names
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens}
    for value in [*named, *_extra_tokens(config)]:
        if token_text(value) not in known:
            tokens.append(
                _added_token(value, special=True)
                if isinstance(value, Mapping)
                else _added_token(value)
            )
            known.add(token_text(value) or "")
    return tokens


def ids_from_model_configs(folder: Path) -> dict[str, int]:
    """bos, eos and pad ids named by generation_config.json, then config.json.

    Of a list the first; negative ones, which some files write for "none", name nothing, nor do others
    that no tokenizer has.
    """
    ids: dict[str, int] = {}
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        for key in ("bos", "eos", "pad"):
            value = config.get(f"{key}_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if type(token_id) is int and 0 <= token_id < 2**31:
                    ids.setdefault(key, token_id)
    return ids


def stop_ids_from_model_configs(folder: Path) -> list[int]:
    """All ids that generation_config.json, else config.json, ends a text with."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            found = ids if isinstance(ids, list) else [ids]
            return [i for i in found if type(i) is int and 0 <= i < 2**31]
    return []


def find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name, the usual one as "default".

    Files of their own (chat_template.jinja, additional_chat_templates/NAME.jinja) come before
    `chat_template` of tokenizer_config.json, which may be one string, or several with names; where there
    is neither, chat_template.json, which older processors write, is read.

    Raises:
        UserError: A template is no text.
    """
    files = {"default": folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).is_file() else {}
    files |= {path.stem: path for path in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))}
    if files:
        return {name: read_text(path) for name, path in files.items()}
    found, where = config.get("chat_template"), folder / "tokenizer_config.json"
    if found is None:
        where = folder / "chat_template.json"
        found = read_json(where).get("chat_template")
    if found is None:
        return {}
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{where}: chat_template is a list, but not of {{name, template}} ({error})"
            ) from error
    templates = {"default": found} if isinstance(found, str) else found
    if not isinstance(templates, dict) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in templates.items()
    ):
        raise UserError(
            f"{where}: chat_template must be a jinja2 template as a string, or several with names"
        )
    return templates


def tool_template(templates: Mapping[str, str]) -> str | None:
    """The template of conversations with tools, where a folder has one under transformers' name for it."""
    return templates.get("tool_use")


def default_template(templates: Mapping[str, str], folder: Path) -> str | None:
    """The template that conversations are written with: the one named "default", or the only one.

    Raises:
        UserError: There are several and none is named "default".
    """
    if len(templates) > 1 and "default" not in templates:
        raise UserError(
            f"{folder} has several chat templates ({', '.join(templates)}) and none is named 'default'; put "
            f"the one to use into {folder / TEMPLATE_FILE}, or give it as chat_template: to the tokenizer"
        )
    return templates.get("default", next(iter(templates.values()), None))


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from error

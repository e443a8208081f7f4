"""Names for content: equal for equal data, settings and code, in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchtune_cp import __version__


def fingerprint(value: Any) -> str:
    """A hash (hexadecimal) of everything that a value is made of, and of the code that reads rows.

    Of an object that has none of its own (a method `fingerprint()` that returns a string), the class and
    all attributes count, so that a new setting enters by itself.

    Args:
        value: Plain values, mappings, sequences, `datasets.Dataset`s, and objects of these.

    Raises:
        TypeError: Something whose content cannot be told.
    """
    digest = hashlib.sha256()
    _feed(digest, [_code(), value])
    return digest.hexdigest()[:40]  # the most that `datasets` takes is 64 with its own additions


@lru_cache(maxsize=1)
def _code() -> str:
    """Of the package's version and of all files that tokens may depend on, edited ones as well."""
    digest = hashlib.sha256(__version__.encode())
    package = Path(__file__).parents[1]
    for file in sorted(
        file for part in ("data", "datasets") for file in (package / part).glob("*.py")
    ):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    # Every entry is preceded by its kind and, where it has one, its length: no two values read alike.
    if value is None or isinstance(value, bool | int | float | str):
        text = json.dumps(value).encode()
        digest.update(b"%d:" % len(text) + text)
    elif isinstance(value, bytes):
        digest.update(b"bytes%d:" % len(value) + value)
    elif isinstance(value, Enum):
        _feed(digest, [type(value).__qualname__, value.name])
    elif isinstance(value, Mapping):
        digest.update(b"mapping%d:" % len(value))
        for key, entry in value.items():  # in their order: templates can see it
            _feed(digest, key)
            _feed(digest, entry)
    elif isinstance(value, list | tuple):
        digest.update(b"list%d:" % len(value))
        for entry in value:
            _feed(digest, entry)
    elif callable(getattr(value, "fingerprint", None)):
        _feed(digest, [_class_of(value), value.fingerprint()])
    elif _is_hf_dataset(value):
        # The library's own: of the files' names and times, and of what was done to the rows since.
        _feed(digest, [_class_of(value), value._fingerprint])
    elif hasattr(value, "__dict__") and not _is_code(value):
        _feed(digest, [_class_of(value), vars(value)])
    else:
        raise TypeError(f"the content of a {type(value).__name__} cannot be told")


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_code(value: Any) -> bool:
    """Whether a value is a function or class, whose code its attributes do not tell."""
    return hasattr(value, "__code__") or isinstance(value, type)


def _is_hf_dataset(value: Any) -> bool:
    # By name: importing the library takes a second, and who has such a value has imported it.
    return _class_of(value) == "datasets.arrow_dataset.Dataset"

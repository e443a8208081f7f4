"""Names for content: equal for equal data and settings, on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any


def fingerprint(value: Any) -> str:
    """A SHA-256 (hexadecimal) of everything that a value is made of.

    Of an object that has none of its own (a method `fingerprint()` that returns a string), the class and
    all attributes count, so that a new setting enters by itself.

    Args:
        value: Plain values, mappings, sequences, `datasets.Dataset`s, and objects of these.

    Raises:
        TypeError: Something whose content cannot be told.
    """
    digest = hashlib.sha256()
    _feed(digest, value)
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
        _feed_table(digest, value)
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


def _feed_table(digest: Any, rows: Any) -> None:
    """The rows themselves: the library's own fingerprint goes by the files' names and times."""
    import pyarrow

    digest.update(b"table%d:" % len(rows))
    schema = rows.features.arrow_schema.remove_metadata()
    _feed(digest, str(schema))
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(_Sink(digest), mode="w"), schema) as stream:
        for table in rows.with_format("arrow").iter(batch_size=1000):
            # One record batch for a thousand rows, whatever batches they lay in on disk.
            stream.write_table(table.combine_chunks().replace_schema_metadata())


class _Sink:
    """A file that only a digest reads."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest
        self.closed = False

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True

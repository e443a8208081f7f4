from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtune_cp.data import HFTokenizer, byte_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `datasets` library keeps converted copies; keep them out of the user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tokenizer() -> HFTokenizer:
    return byte_tokenizer()


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines; a string is written as it is."""

    def write(*rows: Any) -> str:
        path = tmp_path / "data.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write

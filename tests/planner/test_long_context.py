"""The configs for long sequences are what their table and their plans say."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from benchmarks.long_context import (
    ENTRIES,
    FOLDER,
    PAGE,
    body,
    figures,
    header,
    planned,
    table,
    written_figures,
)
from benchmarks.tables import with_tables

NAMES = [entry.name for entry in ENTRIES]


def test_every_model_length_and_hardware_has_its_file_and_no_other_lies_there():
    assert len(set(NAMES)) == len(NAMES) == 2 * 4 * 3
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_a_file_is_its_base_with_the_keys_of_the_table(entry):
    text = entry.path.read_text(encoding="utf-8")
    assert text == header(entry, written_figures(entry)) + body(entry), (
        f"python -m benchmarks.long_context {entry.name}"
    )
    cfg = OmegaConf.create(text)
    assert cfg.tokenizer.max_seq_len == entry.tokens
    for key, value in entry.keys.items():
        assert OmegaConf.select(cfg, key) == value, key
    needed, there = re.match(r"([\d.]+) of ([\d.]+) GiB", written_figures(entry)["device"]).groups()
    assert float(needed) <= float(there)


def test_the_lengths_that_are_the_aim_are_planned_to_fit():
    tokens = {
        e.hardware.name: e.tokens for e in ENTRIES if e.name.startswith("llama3_1_8B_longest")
    }
    assert tokens["1xH200"] > 1_200_000
    assert tokens["8xH100"] > 5_000_000


def test_the_page_has_the_figures_of_the_files():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page, table(), "long-context"), (
        "python -m benchmarks.long_context --table"
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(e, marks=() if e.name == "llama3_1_8B_1M_1xH200" else pytest.mark.slow)
        for e in ENTRIES
    ],
    ids=NAMES,
)
def test_a_file_has_the_figures_of_its_plan(entry):
    plan = planned(entry)
    assert plan.fits
    assert figures(plan) == written_figures(entry)

"""The documentation builds, and what it says about keys, names, files and figures is true."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import draw_cut, tables
from tests.docs import config_rows
from tests.docs.pages import CHECKOUT, PAGES, name_of
from torchtune_cp import __version__, distributed
from torchtune_cp.attention import attention
from torchtune_cp.config import MaskedLMConfig
from torchtune_cp.config.torchtune_names import ALIASES
from torchtune_cp.distributed import fsdp

_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _text(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "context_parallel" / "index.html").is_file()


def test_the_config_page_has_every_key_with_its_type_and_default_and_no_other() -> None:
    text = _text("docs/config.md")
    section = text.partition("## Every key")[2].partition("\n## ")[0]
    shown = {key: (kind, default) for key, kind, default, _ in _ROW.findall(section)}
    assert shown == config_rows.rows()


def test_the_esm2_page_has_the_keys_that_its_recipe_adds() -> None:
    section = _text("docs/esm2.md").partition("## Keys of this recipe")[2].partition("\n## ")[0]
    shown = {key: (kind, default) for key, kind, default, _ in _ROW.findall(section)}
    common = config_rows.rows()
    every = config_rows.rows(MaskedLMConfig)
    assert shown == {key: row for key, row in every.items() if key not in common}


def test_the_figure_of_the_cut_is_what_the_loader_does() -> None:
    assert draw_cut.FIGURE.read_text(encoding="utf-8") == draw_cut.draw()


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("page", [*PAGES, CHECKOUT / "CHANGELOG.md"], ids=name_of)
def test_the_names_and_files_that_a_page_mentions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for code in _CODE.findall(text):
        if re.fullmatch(r"torchtune_cp(\.\w+)+", code):
            assert _exists(code), code
        elif re.fullmatch(r"torchtune(\.\w+)+", code) and not code.endswith("."):
            assert code in ALIASES, code
        elif re.fullmatch(r"(torchtune_cp|tests|configs|recipes|docs|benchmarks)/[\w./]*", code):
            assert (CHECKOUT / code).exists(), code
        elif code.startswith("tune ") and re.fullmatch(r"[a-z]+", code.split()[1]):
            assert code.split()[1] in ("ls", "cat", "cp", "validate", "download", "run", "plan"), (
                code
            )
    if page.parent == CHECKOUT:  # mkdocs checks the links inside docs/
        for link in _LINK.findall(text):
            if "://" not in link:
                assert (page.parent / link).exists(), link


def test_the_python_interface_is_given_with_its_real_signatures() -> None:
    text = _text("docs/context_parallel.md")
    functions = {
        "context_parallel": distributed.context_parallel,
        "attention": attention,
        "unshard": distributed.unshard,
        "ParallelDims": distributed.ParallelDims,
        "Meshes.build": distributed.Meshes.build,
        "shard_model": fsdp.shard_model,
        "materialize": fsdp.materialize,
        "set_gradient_sync": fsdp.set_gradient_sync,
    }
    for name, function in functions.items():
        signature = inspect.signature(function)
        bare = signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
            return_annotation=signature.empty,
        )
        shown = f"{name}{bare}".replace("'", '"').replace(" = ", "=")
        assert f"\n{shown}\n" in text, shown


def test_the_version_of_the_package_is_in_the_changelog() -> None:
    assert f"## [{__version__}]" in _text("CHANGELOG.md")


def test_the_figures_on_the_measurements_page_are_those_of_the_result_files() -> None:
    page = _text("docs/measurements/performance.md")
    rendered = tables.with_tables(page, tables.render())
    assert page == rendered, "run python -m benchmarks.tables"


def test_a_table_has_a_row_a_figure_and_a_column_a_result(tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(
        '{"machine": {"cpu": "X", "command": "python /a/b/speed.py 4096"},'
        ' "results": [{"seq_len": 4096, "ratio": 1.5}, {"seq_len": 16384, "ratio": 2.0, "n": 3}]}'
    )
    assert tables.render(tmp_path).splitlines() == [
        "### speed",
        "",
        "`python -m benchmarks.speed 4096` on cpu X:",
        "",
        "| seq_len | 4096 | 16,384 |",
        "| --- | ---: | ---: |",
        "| ratio | 1.5 | 2.0 |",
        "| n |  | 3 |",
    ]
    with pytest.raises(ValueError, match="flat"):
        tables.render_table([{"seq_len": 1, "more": {"a": 1}}])
    with pytest.raises(ValueError, match="once"):
        tables.with_tables("no markers", "")

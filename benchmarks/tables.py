"""Writes the result files' figures into docs/measurements/performance.md, between its two marker comments.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
PAGE = CHECKOUT / "docs" / "measurements" / "performance.md"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _command(recorded: str) -> str:
    """The command as a reader would type it: module name in place of a path, then the arguments."""
    words = shlex.split(recorded)
    script = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
    if script is None:
        return recorded
    module = f"benchmarks.{Path(words[script]).stem}"
    return shlex.join(["python", "-m", module, *words[script + 1 :]])


def render_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lay out results as a Markdown table: a row per figure, a column per result.

    Args:
        rows: Flat mappings; the first key of the first one heads the columns.

    Raises:
        ValueError: A result is no flat mapping, or lacks the heading key.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    heading = keys[0]
    for row in rows:
        if heading not in row or any(isinstance(v, (dict, list)) for v in row.values()):
            raise ValueError(f"a result must be a flat mapping with {heading!r}: {row}")
    lines = [f"| {heading} | " + " | ".join(_cell(row[heading]) for row in rows) + " |"]
    lines.append("| --- |" + " ---: |" * len(rows))
    for key in keys[1:]:
        lines.append(f"| {key} | " + " | ".join(_cell(row.get(key)) for row in rows) + " |")
    return lines


def render(results: Path = RESULTS) -> str:
    """Render every result file of a folder, in the order of their names.

    Args:
        results: Holds `NAME.json` files `{"machine": {...}, "results": [{...}, ...]}`.
    """
    lines: list[str] = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        machine = dict(content["machine"])
        command = _command(str(machine.pop("command", "")))
        where = ", ".join(f"{key} {value}" for key, value in machine.items())
        lines += [f"### {path.stem}", "", f"`{command}` on {where}:", ""]
        lines += [*render_table(content["results"]), ""]
    return "\n".join(lines)


def with_tables(page: str, tables: str, name: str = "tables") -> str:
    """Return a page with the text between two of its markers replaced.

    Args:
        page: The page's text.
        tables: From `render`.
        name: The markers are `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Raises:
        ValueError: The page does not have each marker exactly once.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin} and {end} once each")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{tables}{end}{after}"


def main() -> int:
    """Rewrite the page; says whether anything changed."""
    page = PAGE.read_text(encoding="utf-8")
    new = with_tables(page, render())
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE}: {'unchanged' if new == page else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

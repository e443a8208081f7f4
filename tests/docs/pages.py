"""What the documentation says that can be run: fenced blocks, shown files, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*CHECKOUT.glob("docs/**/*.md"), *(CHECKOUT / n for n in ("README.md", "CONTRIBUTING.md"))]
)
CONFIGS = sorted(CHECKOUT.glob("configs/*/*.yaml"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!-- (?:file: (?P<file>\S+)|(?P<output>output)) -->\s*$")
_HEADER_COMMAND = re.compile(r"^#\s+(tune .*)$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A fenced block; `file` and `is_output` come from the comment before it."""

    page: Path
    language: str
    text: str
    file: str | None
    is_output: bool


@dataclass(frozen=True)
class Command:
    """A command with the variables set before it."""

    source: str
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source}: {shlex.join(self.words)}"


def name_of(page: Path) -> str:
    return page.relative_to(CHECKOUT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page in order."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        marker = _MARKER.search(text[: match.start()])
        file = marker["file"] if marker else None
        is_output = bool(marker and marker["output"])
        yield Block(page, match[1], match[2], file, is_output)


def shown_files(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {block.file: block.text for block in blocks(page) if block.file}


def _command(line: str, source: str) -> Command | None:
    words = shlex.split(line, comments=True)
    variables = []
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables.append((name, value))
    return Command(source, tuple(variables), tuple(words)) if words else None


def shell_commands(page: Path) -> Iterator[Command]:
    """Every command of a page's `bash` blocks, or of a config's comments."""
    if page.suffix == ".yaml":
        lines = _HEADER_COMMAND.findall(page.read_text(encoding="utf-8"))
    else:
        bash = [block.text for block in blocks(page) if block.language == "bash"]
        lines = "".join(bash).replace("\\\n", " ").splitlines()
    for line in lines:
        command = _command(line, name_of(page))
        if command is not None:
            yield command


def tune_commands(page: Path) -> list[Command]:
    return [command for command in shell_commands(page) if command.words[0] == "tune"]


def config_of(command: Command) -> str | None:
    """What follows `--config` in a command."""
    words = command.words
    return words[words.index("--config") + 1] if "--config" in words else None


def is_real_run(command: Command) -> bool:
    """Whether a command is a run that needs neither a download nor a GPU, and takes seconds."""
    return command.words[:2] == ("tune", "run") and str(config_of(command)).startswith("tiny/")
